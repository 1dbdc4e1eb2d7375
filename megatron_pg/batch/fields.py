"""The token fields of a micro-batch, which batch, loss, kernels, heads and metrics share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast

from torch import Tensor

from megatron_pg.batch.sequences import Sequences
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.payloads import PAYLOADS, Rows
from megatron_pg.rollouts.payloads.hidden_states import TeacherStates
from megatron_pg.rollouts.payloads.sampling_masks import SamplingMask
from megatron_pg.rollouts.payloads.topk import TopK


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermFields:
    """Weights and mask of one loss term: [T] each, 0 and False for tokens that it does not train."""

    weights: Tensor | None = None  # None: those of the objective
    mask: Tensor | None = None  # bool; None: the tokens of the objective


class TermRows(NamedTuple):
    """The weights and the mask of one loss term, its own or those of the objective."""

    weights: Tensor
    mask: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFields:
    """The fields of this rank's T tokens, without the model's output: [T] each, in the order of the logits' rows.

    Fields of masked tokens are arbitrary: they are selected away before any exp. A field is None if no token has it.
    Of a critic, the old values are in the place of `old_logprobs`, and the returns of `advantages`.
    """

    targets: Tensor  # int64, global ids; one outside the vocabulary at a trained token gives NaN
    old_logprobs: Tensor | None  # nats, of the sampling policy; None: on-policy, the current ones, detached
    advantages: Tensor
    weights: Tensor  # w of the aggregation, without any correction
    mask: Tensor  # bool, trained tokens: of the objective or of any loss term
    corrections: Tensor | None = None  # factor on the policy term's weight; None: 1
    sample_weights: Tensor | None = None  # v = mask / trained tokens of the sample: sums to 1 over a sample
    ref_logprobs: Tensor | None = None  # nats, of the reference; NaN where the sample has none
    rollout_logprobs: Tensor | None = None  # nats, as the rollout engine reported them; NaN where the sample has none
    teacher_logprobs: Tensor | None = None  # nats, of the teacher; NaN where the sample has none
    teacher_topk: TopK | None = None
    teacher_hidden: TeacherStates | None = None
    sampling_mask: SamplingMask | None = None  # of the tokens at which a term reads the policy that was sampled from
    terms: Mapping[str, TermFields] = field(default_factory=dict)  # by name, of terms with their own weights or mask
    ages: Tensor | None = None  # int64, optimizer steps since the weights that sampled the token; -1: not known
    sequences: Sequences | None = None  # of the tokens; sequence-level terms need it

    @property
    def corrected_weights(self) -> Tensor:
        """The weights of the policy term."""
        return self.weights if self.corrections is None else self.weights * self.corrections

    @property
    def topk(self) -> TopK:
        """The teacher's top-k tokens, for callers that checked that a term reads them."""
        return cast(TopK, self.teacher_topk)

    @property
    def hidden(self) -> TeacherStates:
        """The teacher's hidden states, for callers that checked that a term reads them."""
        return cast(TeacherStates, self.teacher_hidden)

    def of_term(self, name: str) -> TermRows:
        """Weights and mask of a loss term; without its own, those of the objective."""
        own = self.terms.get(name, TermFields())
        mask = self.objective_mask if own.mask is None else own.mask
        return TermRows(self.weights if own.weights is None else own.weights, mask)

    @property
    def objective_mask(self) -> Tensor:
        """[T] bool, the tokens of the objective: all trained tokens, unless it has its own mask as other loss terms."""
        own = self.terms.get(POLICY)
        return self.mask if own is None or own.mask is None else own.mask

    def per_token(self) -> dict[str, Any]:
        """The known fields [T] by name; those of a loss term as `term.field`. Payloads are not among them."""
        known = {name: getattr(self, name) for name in _PER_TOKEN}
        for term, own in self.terms.items():
            known |= {f"{term}.weights": own.weights, f"{term}.mask": own.mask}
        return {name: values for name, values in known.items() if values is not None}

    @property
    def payloads(self) -> dict[str, Rows]:
        """The known payloads by name."""
        return {name: rows for name in _PAYLOADS if (rows := getattr(self, name)) is not None}

    @classmethod
    def of(cls, values: Mapping[str, Any], sequences: Sequences | None = None) -> "TokenFields":
        """From the values by the names of `per_token`, and payloads by theirs."""
        by_term: dict[str, dict[str, Tensor]] = {}
        for name in values:
            term, dot, kind = name.partition(".")
            if dot:
                by_term.setdefault(term, {})[kind] = values[name]
        terms = {term: TermFields(**values) for term, values in by_term.items()}
        rest: dict[str, Any] = {name: v for name, v in values.items() if "." not in name}
        return cls(**{"old_logprobs": None, **rest}, terms=terms, sequences=sequences)

    def at(self, rows: Tensor | slice) -> "TokenFields":
        """Select rows, for a loss that reads no sequences."""
        chosen: dict[str, Any] = {name: values[rows] for name, values in self.per_token().items()}
        return TokenFields.of(
            chosen | {name: payload.at(rows) for name, payload in self.payloads.items()}, self.sequences
        )


_NAMES = tuple(field.name for field in fields(TokenFields))
_PAYLOADS = tuple(name for name in PAYLOADS if name in _NAMES)
_PER_TOKEN = tuple(name for name in _NAMES if name not in (*_PAYLOADS, "terms", "sequences"))
