"""One table of what the loss knows of a micro-batch's tokens: batch, loss, kernels, heads and metrics share it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_pg.batch.sequences import Sequences

TOPK = "topk:"  # before the names of `TopK`'s fields; no loss term's name holds a colon
SAMPLED = "sampled"  # among the fields of a step: bool, tokens at which a term reads the policy that was sampled from
TAUGHT = "taught"  # among the fields of a step: bool, tokens that a loss term trains by the teacher's hidden states


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermFields:
    """What a loss term has of its own: [T] each, 0 and False where the token is not of it."""

    weights: Tensor | None = None  # None: those of the objective
    mask: Tensor | None = None  # bool; None: the tokens of the objective


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TopK:
    """The teacher's likeliest tokens; where no loss term that reads them trains the token they may be anything."""

    ids: Tensor  # [T, K] int32, global ids, -1 where there is none
    logprobs: Tensor  # [T, K] float32, nats
    tails: Tensor  # [T] float64, the teacher's probability of all other tokens


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenSupport:
    """What the rollout engine could have sampled in the place of each token: row t's is ids[starts[t] : starts[t] + counts[t]]."""

    starts: Tensor  # [T] int64
    counts: Tensor  # [T] int64; 0: the whole vocabulary
    ids: Tensor  # [n] int32, global ids, of all rows and maybe others
    longest: int  # ids of a row, at most

    @classmethod
    def of(cls, ids: Tensor, offsets: Tensor) -> "TokenSupport":
        """Of T rows, from `Support`'s form: ids [n] int32 and offsets [T + 1] int64; the host waits for their device.

        Raises:
            ValueError: the offsets do not rise from 0 to n.
        """
        counts = offsets.diff()
        if len(offsets) == 0 or [int(offsets[0]), int(offsets[-1])] != [0, len(ids)] or (counts < 0).any():
            raise ValueError(
                f"offsets do not rise from 0 to {len(ids)}, the number of ids, so rows would have others' ids. Give one for the begin of each "
                "row and one for the end."
            )
        longest = int(counts.max()) if len(counts) else 0
        return cls(starts=offsets[:-1], counts=counts, ids=ids, longest=longest)

    def at(self, rows: Tensor | slice) -> "TokenSupport":
        """That of some of the rows."""
        return replace(self, starts=self.starts[rows], counts=self.counts[rows])

    def table(self) -> Tensor:
        """[T, longest] int32, -1 where a row has fewer ids."""
        k = torch.arange(self.longest, device=self.ids.device)
        here = k < self.counts[:, None]
        return torch.where(here, self.ids[torch.where(here, self.starts[:, None] + k, 0)], -1)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TeacherStates:
    """The teacher's last hidden states: row t's are states[slots[t]]; where no loss term that reads them trains it, anyone's."""

    slots: Tensor  # [T] int64
    states: Tensor  # [m, H_T] of the rows that a loss term trains, on any device; m = 0: of none

    def at(self, rows: Tensor | slice) -> "TeacherStates":
        """Those of some of the rows."""
        return replace(self, slots=self.slots[rows])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFields:
    """What is known of this rank's T tokens beside the model's output: [T] each, in the order of the logits' rows.

    Fields of masked tokens may hold anything: they are selected away before any exp. A field that is None is known of no
    token. A further field is one line here, and one where its values come from.
    """

    targets: Tensor  # int64, global ids; one outside the vocabulary at a trained token gives NaN
    old_logprobs: (
        Tensor | None
    )  # nats, of the sampling policy; None: it is the model being trained, whose own are taken, detached
    advantages: Tensor
    weights: Tensor  # w of the aggregation, without any correction
    mask: Tensor  # bool, trained tokens: of the objective or of any loss term
    policy_mask: Tensor | None = None  # bool, tokens of the objective; None: `mask`
    corrections: Tensor | None = None  # factor on the policy term's weight; None: there is none
    sample_weights: Tensor | None = None  # v = mask / trained tokens of the sample: sums to 1 over a sample
    ref_logprobs: Tensor | None = None  # nats, of the reference; NaN where the sample has none
    rollout_logprobs: Tensor | None = None  # nats, as the rollout engine reported them; likewise
    teacher_logprobs: Tensor | None = None  # nats, of the teacher; likewise
    teacher_topk: TopK | None = None
    teacher_hidden: TeacherStates | None = None
    support: TokenSupport | None = None  # of the tokens at which a term reads the policy that was sampled from
    terms: Mapping[str, TermFields] = field(
        default_factory=dict
    )  # by name; one that is not there has nothing of its own
    sequences: Sequences | None = None  # which sequence each token belongs to; terms of whole sequences need it

    @property
    def corrected_weights(self) -> Tensor:
        """The weights of the policy term."""
        return self.weights if self.corrections is None else self.weights * self.corrections

    @property
    def of_policy(self) -> "TokenFields":
        """The same for the objective, whose trained tokens alone are in the mask."""
        return self if self.policy_mask is None else replace(self, mask=self.policy_mask, policy_mask=None)

    def of_term(self, name: str) -> TermFields:
        """Weights and mask of a loss term, none of them None."""
        own = self.terms.get(name, TermFields())
        mask = self.of_policy.mask if own.mask is None else own.mask
        return TermFields(weights=self.weights if own.weights is None else own.weights, mask=mask)

    def per_token(self) -> dict[str, Any]:
        """The fields that are known but support and hidden states, by name; those of a loss term as `term.field`, those of `TopK` as `topk:field`, two of them [T, K]."""
        found = dict(zip(_NAMES, _values(self), strict=True))
        if self.teacher_topk is not None:
            found |= {f"{TOPK}{each.name}": getattr(self.teacher_topk, each.name) for each in fields(TopK)}
        for term, own in self.terms.items():
            found |= {f"{term}.{each.name}": getattr(own, each.name) for each in fields(own)}
        return {name: values for name, values in found.items() if isinstance(values, torch.Tensor)}

    @classmethod
    def of(cls, values: Mapping[str, Tensor], sequences: Sequences | None = None) -> "TokenFields":
        """From the values by the names of `per_token`."""
        own: dict[str, dict[str, Tensor]] = {}
        for name in values:
            term, dot, kind = name.partition(".")
            if dot:
                own.setdefault(term, {})[kind] = values[name]
        terms = {term: TermFields(**each) for term, each in own.items()}
        topk = {name.removeprefix(TOPK): v for name, v in values.items() if name.startswith(TOPK)}
        rest: dict[str, Any] = {"old_logprobs": None}
        rest |= {name: v for name, v in values.items() if "." not in name and not name.startswith(TOPK)}
        return cls(**rest, teacher_topk=TopK(**topk) if topk else None, terms=terms, sequences=sequences)

    def at(self, rows: Tensor | slice) -> "TokenFields":
        """The fields of some of the rows, for a loss that reads no sequences."""
        found = TokenFields.of({name: values[rows] for name, values in self.per_token().items()}, self.sequences)
        support = None if self.support is None else self.support.at(rows)
        hidden = None if self.teacher_hidden is None else self.teacher_hidden.at(rows)
        return replace(found, support=support, teacher_hidden=hidden)


_NAMES = tuple(each.name for each in fields(TokenFields))
_values = attrgetter(*_NAMES)
