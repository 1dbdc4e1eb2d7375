"""One training sequence: prompt and response tokens, and what reinforcement learning records about the response.

Everything is checked here, at the door, so that nothing later has to.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.fields import (
    FIELDS,
    LOGPROBS,
    OPTIONAL,
    ORIGINS,
    POLICY,
    Id,
    is_environment,
    is_id,
    is_int,
    is_number,
    is_term,
    plain,
)
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.base import is_plain, shown
from megatron_pg.rollouts.payloads.sampling_masks import RecordedMask
from megatron_pg.rollouts.payloads.topk import TokenSets
from megatron_pg.rollouts.printable import printable, shorten

Values = Sequence[Any] | np.ndarray | Tensor

_ID = "is neither a string of printable characters nor an integer of 62 bits. Give one."
_ORIGIN = (
    "does not say where it comes from. Give an integer of at least 0 (worker: any integer or printable string), or "
    "none."
)
_PLAIN_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "prompt_id": (is_id, _ID),
    "rollout_id": (is_id, _ID),
    "step": (FIELDS["step"].accepts, "is not an integer of at least 0. Give one, or none."),
    # an untrained sample's reward may be NaN
    "reward": (lambda value: is_number(value) or isinstance(value, float), "is not a number. Give one, or none."),
    "truncated": (FIELDS["truncated"].accepts, "is neither True nor False. Give one, or none."),
    "environment": (is_environment, "is not a string of 1 to 100 printable characters. Give its name, or none."),
    **{name: (FIELDS[name].accepts, _ORIGIN) for name in ORIGINS},
    # versions of tokens are checked when the response's length is known
    "weight_version": (lambda v: not isinstance(v, (int, float, str)) or FIELDS["weight_version"].accepts(v), _ORIGIN),
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training sequence, whole, on the CPU. Response-aligned fields have one entry per response token (R).

    Values at masked tokens are ignored and may be arbitrary, NaN included. At trained tokens they must be finite.

    Raises:
        ValueError: shapes, dtypes or lengths disagree, the mask is not 0/1, or a trained token has a value that is
            not finite.
    """

    tokens: Tensor  # [n] int64, prompt then response
    loss_mask: Tensor  # [R] bool, the tokens that the sample's loss term trains
    old_logprobs: Tensor | None = None  # [R] float64, nats, of the sampling policy at the training temperature
    advantages: Tensor | None = None  # [R] float64; None, as old_logprobs, only in loss terms that do not read it
    term: str = POLICY  # the objective, or the name of a `--pg-term`
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # [R] bool, tokens that further loss terms train
    sample_id: str = "without id"  # its name in error messages
    prompt_id: Id | None = None  # samples of one prompt share it
    rollout_id: Id | None = None  # samples of one trajectory share it
    rollout_logprobs: Tensor | None = None  # [R] float64, nats, as the rollout engine reported them
    ref_logprobs: Tensor | None = None  # [R] float64, nats, of the reference policy
    teacher_logprobs: Tensor | None = None  # [R] float64, nats, of the teacher
    old_entropies: Tensor | None = None  # [R] float64, nats, of the sampling policy's distribution of each token
    values: Tensor | None = None  # [R] float64, a critic's, of the state in which each token was sampled
    returns: Tensor | None = None  # [R] float64, that the critic learns; a sample with them may lack advantages
    token_weights: Tensor | None = None  # [R] float64, factors on the tokens' weights in every loss term; None: 1
    turns: tuple[int, ...] | None = None  # response tokens of each turn, one turn after another; they sum to R
    teacher_topk: TokenSets | None = None  # the teacher's top-k tokens at each response token
    teacher_hidden: Tensor | None = None  # [R, H_T] bfloat16 or float32, after the teacher's last norm
    sampling_mask: RecordedMask | None = None  # what the rollout engine could have sampled; None: the whole vocabulary
    rollout_topk: TokenSets | None = None  # the engine's top-k tokens; only `megatron-pg mismatch` reads them
    routed_experts: Tensor | None = None  # [n - 1, layers, topk] int32, the engine's, of all tokens but the last
    step: int | None = None  # optimizer step that it belongs to
    reward: float | None = None  # of its rollout; equal in all samples of a trajectory that have one
    truncated: bool | None = None  # the response ended at a length limit; None: not known
    environment: str | None = None  # of its rollout; metrics are also reported by environment
    weight_version: int | Tensor | None = None  # optimizer steps the engine's weights had seen; or [R] int64, by token
    worker: Id | None = None  # the rollout engine that sampled it
    data_parallel_rank: int | None = None  # of the trainer that computed old_logprobs
    extra: dict[str, object] = field(default_factory=dict)  # the user's own x_ fields

    def __post_init__(self):
        object.__setattr__(self, "sample_id", _label(self.sample_id))
        self._check_plain_fields()
        self._check_tokens_and_mask()
        self._check_terms()
        if self.turns is not None:
            object.__setattr__(self, "turns", _turns(self.turns, len(self.loss_mask), self.sample_id))
        if not (self.weight_version is None or is_int(self.weight_version)):
            versions = _versions(self.weight_version, len(self.loss_mask), self.sample_id)
            object.__setattr__(self, "weight_version", versions)
        for name in ("advantages", "old_logprobs", *OPTIONAL):
            if (values := getattr(self, name)) is not None:
                mask = self.trained if name == "token_weights" else self.loss_mask
                _check_values(name, values, mask, self.sample_id)
            elif self.term == POLICY and name not in OPTIONAL and self.returns is None:
                raise ValueError(
                    f"sample {self.sample_id} has no {'advantage' if name == 'advantages' else name}, which the "
                    "objective needs. Give it, or set term to the NAME of a --pg-term."
                )
        for name, payload in PAYLOADS.items():
            if (record := getattr(self, name)) is not None:
                payload.check(record, self)

    def _check_plain_fields(self) -> None:
        """Numbers and names, of numpy and torch too, become Python's."""
        for name, (accepts, mistake) in _PLAIN_FIELDS.items():
            value = plain(getattr(self, name))
            object.__setattr__(self, name, value)
            if value is not None and not accepts(value):
                raise ValueError(f"{name}={shorten(value)} of sample {self.sample_id} {mistake}")
        if not isinstance(self.extra, dict):
            raise ValueError(
                f"extra={shorten(self.extra)} of sample {self.sample_id} is not a dict of x_ fields. Give one."
            )

    def _check_tokens_and_mask(self) -> None:
        tokens, mask, label = self.tokens, self.loss_mask, self.sample_id
        if not is_plain(tokens, 1, torch.int64):
            raise ValueError(
                f"tokens of sample {label} are {shown(tokens)}, not [n] int64 on the CPU. Use Sample.build."
            )
        for bad in (tokens[tokens < 0], tokens[tokens >= 2**31]):
            if len(bad):
                raise ValueError(
                    f"tokens of sample {label} contain {int(bad[0])}, which is not a token id. Remove padding first."
                )
        if not is_plain(mask, 1, torch.bool):
            raise ValueError(
                f"loss_mask of sample {label} is {shown(mask)}, not [R] bool on the CPU. Use Sample.build, which also "
                "takes 0 and 1."
            )
        check_lengths(len(tokens), len(mask))

    def _check_terms(self) -> None:
        """LossTerm and further masks: names of loss terms, one each, and tokens of the response."""
        label, size = self.sample_id, len(self.loss_mask)
        if not is_term(self.term):
            raise ValueError(
                f"term={shorten(self.term)} of sample {label} is not the name of a term. Give the NAME of a "
                "--pg-term NAME:kind."
            )
        if not isinstance(self.masks, Mapping):
            raise ValueError(f"masks={shorten(self.masks)} of sample {label} are not masks by term. Give a dict.")
        for name, mask in self.masks.items():
            if not is_term(name) or name in (POLICY, self.term):
                raise ValueError(
                    f"masks of sample {label} contain {shorten(name)}, which is not a further loss term: the tokens "
                    f"of the loss term {self.term} are in loss_mask, and those of the objective belong to "
                    f"samples of the loss term {POLICY}. Rename it."
                )
            if not is_plain(mask, 1, torch.bool) or len(mask) != size:
                raise ValueError(
                    f"masks[{name}] of sample {label} is {shown(mask)}, not [R] bool on the CPU with R = {size}. "
                    "Use Sample.build, which also takes 0 and 1."
                )

    @classmethod
    def build(
        cls,
        *,
        tokens: Values,
        response_length: int,
        loss_mask: Values,
        old_logprobs: Values | None = None,
        advantage: float | Values | None = None,
        **rest: Any,
    ) -> "Sample":
        """A sample from lists, arrays or tensors; numbers may be numpy's, or tensors without dimensions.

        Args:
            tokens: prompt and response token ids, integers.
            response_length: R, the number of response tokens.
            loss_mask: R entries, 0 or 1, or truth values.
            old_logprobs: R log-probabilities in nats.
            advantage: one number for the whole response, R numbers, or one for each of `turns`. It and
                `old_logprobs` are optional for loss terms that do not read them.
            rest: any other field of `Sample`. Log-probabilities and `old_entropies` are given as `old_logprobs`, masks
                as `loss_mask`, `routed_experts` as nested lists or an array of integers. `teacher_topk` and
                `rollout_topk` are a dict of `ids` and `logprobs`, each a list per response token of lists, or an array
                [R, K]. `teacher_hidden` is a tensor or array [R, H_T], kept in bfloat16 or else converted to float32.
                `sampling_mask` is a list of ids per response token, or a dict of `ids` and `offsets`. `weight_version`
                is an integer, or R of them.

        Raises:
            ValueError: a value is not valid for its field, or `Sample` refuses it.
        """
        _check_names(rest)
        names = (rest.get(name) for name in ("sample_id", "rollout_id", "prompt_id"))
        label = rest["sample_id"] = _label(next((name for name in names if name is not None), "without id"))
        if not is_int(length := plain(response_length)) or abs(length) >= 2**62:
            raise ValueError(
                f"response_length={shorten(length)} of sample {label} is not a length, so prompt and response "
                "cannot be separated. Give the number of response tokens."
            )
        mask = _mask("loss_mask", loss_mask, length, label)
        number = plain(advantage)
        values = [number] * length if isinstance(number, float) or is_int(number) else advantage
        given = {"old_logprobs": old_logprobs, "advantages": values} | {n: rest.pop(n, None) for n in OPTIONAL}
        vectors: dict[str, Any] = {
            name: _vector(name.replace("advantages", "advantage"), values, label, (int, float))
            for name, values in given.items()
            if values is not None
        }
        if rest.get("turns") is not None:
            turns = rest["turns"] = _turns(rest["turns"], length, label)
            if len(of_turns := vectors.get("advantages", ())) == len(turns):
                vectors["advantages"] = of_turns.repeat_interleave(torch.tensor(turns))
        if isinstance(masks := rest.get("masks"), Mapping):
            rest["masks"] = {
                name: _mask(f"masks[{shorten(name)}]", given_mask, length, label) for name, given_mask in masks.items()
            }
        for name, payload in PAYLOADS.items():
            if rest.get(name) is not None:
                rest[name] = payload.of(rest[name], label)
        return cls(tokens=_vector("tokens", tokens, label, (int,)), loss_mask=mask, **vectors, **rest)

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, trained or not."""
        return len(self.loss_mask)

    def sequence_lengths(self, level: str) -> tuple[int, ...]:
        """Response tokens of each of its sequences: of the whole sample, or of each turn; without turns it is one."""
        return self.turns if level == "turn" and self.turns is not None else (self.response_length,)

    @property
    def trained(self) -> Tensor:
        """[R] bool, the tokens that any loss term trains."""
        return torch.stack([self.loss_mask, *self.masks.values()]).any(dim=0) if self.masks else self.loss_mask

    @property
    def num_trained(self) -> int:
        """M_i, the number of tokens that its loss term trains."""
        return int(self.loss_mask.sum())

    def mask_of(self, term: str) -> Tensor | None:
        """[R] bool, the tokens that a loss term trains; None where the sample is not of it."""
        return self.loss_mask if term == self.term else self.masks.get(term)


def _check_names(given: Mapping[str, Any]) -> None:
    names = ("advantage", *Sample.__dataclass_fields__.keys() - {"advantages"})
    for name in given.keys() - set(names):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"{shorten(name)} is not an argument of Sample.build.{hint} Put your own fields into extra.")


def check_lengths(total_length: int, response_length: int) -> None:
    """Refuse a sample without a prompt token (its first response token has no logits) or without a response token."""
    if response_length < 1:
        raise ValueError(
            f"response_length={response_length} of a sample of {total_length} tokens, so it has no response token to "
            "train. Drop the sample before the step is planned."
        )
    if total_length <= response_length:
        raise ValueError(
            f"total_length={total_length} with response_length={response_length} leaves no prompt token, so the first "
            "response token has no logits. Give every sample at least one prompt token."
        )


def _label(name: Any) -> str:
    name = plain(name)
    return printable(name) if isinstance(name, str) else shorten(name)


def _vector(name: str, values: Any, label: str, kinds: tuple[type, ...]) -> Tensor:
    """[n] float64, or int64 where only integers have a meaning, from a list, an array or a tensor of these kinds."""
    dtype, types = torch.int64 if kinds == (int,) else torch.float64, set()
    is_tensor = isinstance(values, Tensor)
    try:
        if isinstance(values, np.ndarray) and values.dtype != object:
            values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
        if isinstance(values, Tensor):
            types = {type(torch.zeros((), dtype=values.dtype, device="cpu").item())}
        else:
            values = _plain_list(values)
            types = set(map(type, values))
        if types <= set(kinds) or len(values) == 0:
            # copied, because the caller may reuse a buffer; an array has been copied above
            vector = torch.as_tensor(values, dtype=None if is_tensor else dtype)
            vector = vector.detach().to("cpu", dtype, copy=is_tensor)
            if is_plain(vector, 1):
                return vector
    except Exception:  # any conversion failure gets the one message below
        types = set()
    if float in types and dtype == torch.int64:
        raise ValueError(f"{name} of sample {label} are fractions, and none may be rounded. Give integers.")
    what = "token ids" if name == "tokens" else "0 and 1" if "mask" in name else "numbers"
    raise ValueError(f"{name}={shown(values)} of sample {label} is not one flat list of {what}. Give one.")


def _plain_list(values: Any) -> list:
    """The Python values of a list or array."""
    items = values.tolist() if hasattr(values, "tolist") else values
    if not isinstance(items, Sequence) or isinstance(items, (str, bytes, bytearray)):
        raise TypeError
    return list(items) if set(map(type, items)) <= {bool, int, float} else list(map(plain, items))


def _mask(name: str, values: Any, length: int, label: str) -> Tensor:
    """[R] bool."""
    mask = _vector(name, values, label, (bool, int, float))
    if len(mask) != length:
        raise ValueError(_length_message(name, len(mask), length, label))
    if not (is_binary := (mask == 0) | (mask == 1)).all():
        bad = float(mask[~is_binary][0])
        raise ValueError(
            f"{name} of sample {label} contains {bad:g}, and it must be 0 or 1. Put weights into token_weights."
        )
    return mask.bool()


def _turns(values: Any, size: int, label: str) -> tuple[int, ...]:
    """Lengths of turns in any form, of a response of `size` tokens."""
    turns = tuple[Any, ...]()
    with suppress(TypeError):
        turns = tuple(map(plain, values))
    if not all(is_int(length) and length > 0 for length in turns) or sum(turns) != size:
        raise ValueError(
            f"turns={shorten(values)} of sample {label} are not lengths of turns that add up to its {size} response "
            "tokens. Give positive integers; the tokens of a tool belong to a turn, masked."
        )
    return turns


def _versions(values: Any, size: int, label: str) -> Tensor:
    """[R] int64, the weight versions of the response tokens."""
    versions = _vector("weight_version", values, label, (int,))
    if len(versions) != size or not FIELDS["weight_version"].accepts(versions.tolist()):
        raise ValueError(
            f"weight_version={shorten(values)} of sample {label} is not a number of optimizer steps for each of its "
            f"{size} response tokens. Give one integer of at least 0, or {size} of them."
        )
    return versions


def _length_message(name: str, length: int, response_length: int, label: object) -> str:
    return (
        f"{name} of sample {label} has {length} entries for {response_length} response tokens. Give one per response "
        "token."
    )


def _check_values(name: str, values: Any, mask: Tensor, label: str) -> None:
    if not is_plain(values, 1):
        raise ValueError(f"{name} of sample {label} are {shown(values)}, not [R] numbers. Use Sample.build.")
    if len(values) != len(mask):
        raise ValueError(_length_message(name, len(values), len(mask), label))
    if not values.dtype.is_floating_point:
        raise ValueError(f"{name} of sample {label} have dtype {values.dtype}, not a floating-point one. Convert them.")
    bad = (mask & ~torch.isfinite(values)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise ValueError(
            f"{name} of sample {label} is {float(values[position])} at response token {position}, which is trained. "
            "Mask the token or repair the value."
        )
    check_range(name, values[mask], label)


def check_range(name: str, values: Tensor, label: str) -> None:
    """Refuse values that are not log-probabilities or entropies, with a tolerance for rounding around 0."""
    if name == "old_entropies" and (values < -1e-3).any():
        raise ValueError(
            f"old_entropies of sample {label} go down to {float(values.min()):g}. Entropies are at least 0. Were "
            "log-probabilities or negative entropies given?"
        )
    if name == "token_weights" and (bad := values[(values != 0) & ~((values >= 1e-8) & (values <= 1e6))]).numel():
        # sums of weights are integers of 2^-80 (plan/table.py): in this range every sum is one
        raise ValueError(
            f"token_weights of sample {label} contain {float(bad[0]):g}. A weight is 0, or from 1e-8 to 1e6. Scale "
            "them; a token that must not be trained belongs to the mask."
        )
    if name in LOGPROBS and (values > 1e-3).any():
        raise ValueError(
            f"{name} of sample {label} reach {float(values.max()):g}. Log-probabilities are at most 0. Were "
            "probabilities or negative log-likelihoods given?"
        )
