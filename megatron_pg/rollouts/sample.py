"""One training sequence: prompt and response tokens, and what reinforcement learning knows about the response.

Everything is checked here, at the door, so that nothing later has to.
"""

import difflib
from collections.abc import Mapping, Sequence
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
from megatron_pg.rollouts.hidden_states import check_hidden_states, hidden_states_of
from megatron_pg.rollouts.printable import printable, shorten
from megatron_pg.rollouts.support import Support, check_support, support_of
from megatron_pg.rollouts.token_sets import TOKEN_SETS, TokenSets, check_token_sets, token_sets_of

Values = Sequence[Any] | np.ndarray | Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sample:
    """One training sequence, whole, on the CPU. Response-aligned fields have one entry per response token (R).

    Values at masked tokens may be anything, NaN included: they are selected away. At trained tokens they must be
    finite.

    Raises:
        ValueError: shapes, dtypes or lengths disagree, the mask is not 0/1, or a trained token has a value that is
            not finite.
    """

    tokens: Tensor  # [n] int64, prompt then response
    loss_mask: Tensor  # [R] bool, True where the token is trained by the sample's loss term
    old_logprobs: Tensor | None = None  # [R] float64, nats, of the sampling policy at the training temperature
    advantages: Tensor | None = (
        None  # [R] float64; it and old_logprobs may be None in a loss term that does not read them
    )
    term: str = POLICY  # that of the objective, or one of `--pg-term`
    masks: Mapping[str, Tensor] = field(default_factory=dict)  # [R] bool, tokens that further loss terms train
    sample_id: str = "?"  # what error messages call it
    prompt_id: Id | None = None  # samples of one prompt share it
    rollout_id: Id | None = None  # samples of one trajectory share it
    rollout_logprobs: Tensor | None = None  # [R] float64, nats, as the rollout engine reported them
    ref_logprobs: Tensor | None = None  # [R] float64, nats, of the reference policy
    teacher_logprobs: Tensor | None = None  # [R] float64, nats, of the teacher
    old_entropies: Tensor | None = None  # [R] float64, nats, of the sampling policy's distribution of each token
    teacher_topk: TokenSets | None = None  # the teacher's likeliest tokens in the place of each response token
    teacher_hidden: Tensor | None = (
        None  # [R, H_T] bfloat16 or float32, the teacher's states that predict the response tokens, behind its last norm
    )
    support: Support | None = None  # what the rollout engine could have sampled; None: the whole vocabulary
    rollout_topk: TokenSets | None = None  # the engine's likeliest, which only `megatron-pg mismatch` reads
    routed_experts: Tensor | None = (
        None  # [n - 1, layers, topk] int32: the engine's experts of every token but the last
    )
    step: int | None = None  # optimizer step that it belongs to
    reward: float | None = None  # of its rollout: samples of one trajectory have the same, or only one of them has it
    truncated: bool | None = None  # the response ended at a length limit; None: not known
    environment: str | None = None  # of its rollout, whose metrics are also reported for each environment
    weight_version: int | None = None  # optimizer steps behind the weights that the rollout engine sampled with
    worker: Id | None = None  # the rollout engine that sampled it
    data_parallel_rank: int | None = None  # of the trainer, that computed old_logprobs
    extra: dict[str, object] = field(default_factory=dict)  # the user's own x_ fields

    def __post_init__(self):
        label = _label(self.sample_id)
        object.__setattr__(self, "sample_id", label)
        for name in ("prompt_id", "rollout_id", "step", "reward", "truncated", "environment", *ORIGINS):
            object.__setattr__(self, name, plain(getattr(self, name)))
        for name in ("prompt_id", "rollout_id"):
            value = getattr(self, name)
            if value is not None and not is_id(value):
                raise ValueError(
                    f"{name}={shorten(value)} of sample {label} is neither a string of printable characters nor an integer "
                    "of 62 bits, so units could not be counted or named. Give one."
                )
        if self.step is not None and not FIELDS["step"].accepts(self.step):
            raise ValueError(
                f"step={shorten(self.step)} of sample {label} is not an integer from 0 on. Give one, or none."
            )
        if not (
            self.reward is None or is_number(self.reward) or isinstance(self.reward, float)
        ):  # nan: it is not trained
            raise ValueError(f"reward={shorten(self.reward)} of sample {label} is not a number. Give one, or none.")
        if self.truncated is not None and not FIELDS["truncated"].accepts(self.truncated):
            raise ValueError(
                f"truncated={shorten(self.truncated)} of sample {label} is neither True nor False. Give one, or none."
            )
        if self.environment is not None and not is_environment(self.environment):
            raise ValueError(
                f"environment={shorten(self.environment)} of sample {label} is not a string of 1 to 100 printable characters. Give its name, or "
                "none."
            )
        for name in ORIGINS:
            value = getattr(self, name)
            if value is not None and not FIELDS[name].accepts(value):
                raise ValueError(
                    f"{name}={shorten(value)} of sample {label} does not say where it comes from, so mismatches could not be traced. "
                    "Give an integer from 0 on (worker: any integer or printable string), or none."
                )
        if not isinstance(self.extra, dict):
            raise ValueError(f"extra={shorten(self.extra)} of sample {label} is no dict of x_ fields. Give one.")
        tokens, mask = self.tokens, self.loss_mask
        if not _is_vector(tokens) or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens of sample {label} are {_shown(tokens)}, not [n] int64 on the CPU. Use Sample.build."
            )
        for bad in (tokens[tokens < 0], tokens[tokens >= 2**31]):
            if len(bad):
                raise ValueError(
                    f"tokens of sample {label} hold {int(bad[0])}, which is no token id. Remove padding first."
                )
        if not _is_vector(mask) or mask.dtype != torch.bool:
            raise ValueError(
                f"loss_mask of sample {label} is {_shown(mask)}, not [R] bool on the CPU. Use Sample.build, which also takes 0 and 1."
            )
        check_lengths(len(tokens), len(mask))
        _check_terms(self, label)
        for name in ("advantages", "old_logprobs", *OPTIONAL):
            if (values := getattr(self, name)) is not None:
                _check_values(name, values, mask, label)
            elif self.term == POLICY and name not in OPTIONAL:
                raise ValueError(
                    f"sample {label} has no {name}, without which the objective has no loss. Give them, or name the loss term of --pg-term "
                    "that the sample is of."
                )
        trained = torch.stack([mask, *self.masks.values()]).any(dim=0) if self.masks else mask
        for name in TOKEN_SETS:
            if (sets := getattr(self, name)) is not None:
                check_token_sets(name, sets, len(mask), trained, label)
        if self.teacher_hidden is not None:
            check_hidden_states(self.teacher_hidden, len(mask), trained, label)
        if self.support is not None:
            check_support(self.support, len(mask), mask & (self.term == POLICY), label)
        if self.routed_experts is not None:
            _check_experts(self.routed_experts, len(tokens), label)

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
            advantage: one number for the whole response, or R numbers. It and `old_logprobs` may be left out in a loss term that
                does not read them.
            rest: any other field of `Sample`; log-probabilities and `old_entropies` as `old_logprobs`, masks as `loss_mask`,
                `routed_experts` as nested lists or an array of integers, `teacher_topk` and `rollout_topk` as a dict of `ids` and
                `logprobs`, each a list per response token of lists, or an array [R, K]; `teacher_hidden` as a tensor or array
                [R, H_T], kept in bfloat16 if it is in it, else in float32; `support` as a list of ids per response token, or a
                dict of `ids` and `offsets`.

        Raises:
            ValueError: a value has no meaning as its field, or `Sample` refuses it.
        """
        _check_names(rest)
        names = (rest.get(name) for name in ("sample_id", "rollout_id", "prompt_id"))
        label = rest["sample_id"] = _label(next((name for name in names if name is not None), "?"))
        if not is_int(length := plain(response_length)) or abs(length) >= 2**62:
            raise ValueError(
                f"response_length={shorten(length)} of sample {label} is no length, so prompt and response cannot be told apart. "
                "Give the number of response tokens."
            )
        mask = _mask("loss_mask", loss_mask, length, label)
        number = plain(advantage)
        values = [number] * length if isinstance(number, float) or is_int(number) else advantage
        given = {
            "old_logprobs": old_logprobs,
            "advantages": values,
            **{name: rest.pop(name, None) for name in OPTIONAL},
        }
        vectors: dict[str, Any] = {
            name: _vector("advantage" if name == "advantages" else name, each, label, (int, float))
            for name, each in given.items()
            if each is not None
        }
        if isinstance(masks := rest.get("masks"), Mapping):
            rest["masks"] = {
                name: _mask(f"masks[{shorten(name)}]", each, length, label) for name, each in masks.items()
            }
        for name in TOKEN_SETS:
            if rest.get(name) is not None:
                rest[name] = token_sets_of(name, rest[name], label)
        if rest.get("teacher_hidden") is not None:
            rest["teacher_hidden"] = hidden_states_of(rest["teacher_hidden"], label)
        if rest.get("support") is not None:
            rest["support"] = support_of(rest["support"], label)
        if rest.get("routed_experts") is not None:
            rest["routed_experts"] = _experts(rest["routed_experts"], label)
        return cls(tokens=_vector("tokens", tokens, label, (int,)), loss_mask=mask, **vectors, **rest)

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, trained or not."""
        return len(self.loss_mask)

    @property
    def num_trained(self) -> int:
        """M_i, the number of tokens that its loss term trains."""
        return int(self.loss_mask.sum())

    def mask_of(self, term: str) -> Tensor | None:
        """[R] bool, the tokens that a loss term trains; None where the sample is not of it."""
        return self.loss_mask if term == self.term else self.masks.get(term)


def _check_names(given: Mapping[str, Any]) -> None:
    """Refuse what is no field of a sample."""
    names = ("advantage", *Sample.__dataclass_fields__.keys() - {"advantages"})
    for name in given.keys() - set(names):
        close = difflib.get_close_matches(name, names, n=1)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ValueError(f"{shorten(name)} is not an argument of Sample.build.{hint} Put your own fields into extra.")


def check_lengths(total_length: int, response_length: int) -> None:
    """Refuse a sample without a prompt token (its first response token has no logits) or without a response token."""
    if response_length < 1:
        raise ValueError(
            f"response_length={response_length} of a sample of {total_length} tokens, so it has no response token to train. "
            "Drop the sample before the step is planned."
        )
    if total_length <= response_length:
        raise ValueError(
            f"total_length={total_length} with response_length={response_length} leaves no prompt token, so the first "
            "response token has no logits. Give every sample at least one prompt token."
        )


def _label(name: Any) -> str:
    """What messages call a sample."""
    name = plain(name)
    return printable(name) if isinstance(name, str) else shorten(name)


def _shown(values: Any) -> str:
    """Values as messages show them."""
    if isinstance(values, Tensor) and not values.is_nested:
        return f"a tensor of shape {tuple(values.shape)}, {values.dtype}, on {values.device}"
    return shorten(values)


def _is_vector(values: Any) -> bool:
    """Whether it is a plain tensor of one dimension on the CPU."""
    is_plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_nested
    return is_plain and values.dim() == 1 and values.device.type == "cpu"


def _vector(name: str, values: Any, label: str, kinds: tuple[type, ...]) -> Tensor:
    """[n] float64, or int64 where only integers have a meaning, from a list, an array or a tensor of these kinds."""
    dtype, found = torch.int64 if kinds == (int,) else torch.float64, set()
    is_tensor = isinstance(values, Tensor)
    try:
        if isinstance(values, np.ndarray) and values.dtype != object:
            values = torch.from_numpy(np.array(values, dtype=values.dtype.newbyteorder("="), order="C"))
        if isinstance(values, Tensor):
            found = {type(torch.zeros((), dtype=values.dtype, device="cpu").item())}
        else:
            values = _plain_list(values)
            found = set(map(type, values))
        if found <= set(kinds) or len(values) == 0:
            # copied, because the caller may reuse a buffer; an array has been copied above
            vector = (
                torch.as_tensor(values, dtype=None if is_tensor else dtype).detach().to("cpu", dtype, copy=is_tensor)
            )
            if _is_vector(vector):
                return vector
    except Exception:  # of whatever else was given
        found = set()
    if float in found and dtype == torch.int64:
        raise ValueError(
            f"tokens of sample {label} are fractions, not token ids, and none may be rounded. Give integers."
        )
    what = "token ids" if name == "tokens" else "0 and 1" if "mask" in name else "numbers"
    raise ValueError(f"{name}={_shown(values)} of sample {label} is not one flat list of {what}. Give one.")


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
        raise ValueError(f"{name} of sample {label} must be 0 or 1, got {bad:g}; put weights into the advantages")
    return mask.bool()


def _length_message(name: str, length: int, response_length: int, label: object) -> str:
    return (
        f"{name} of sample {label} has {length} entries for {response_length} response tokens, so they would not align. "
        "Give one per response token."
    )


def _check_values(name: str, values: Any, mask: Tensor, label: str) -> None:
    if not _is_vector(values):
        raise ValueError(f"{name} of sample {label} are {_shown(values)}, not [R] numbers. Use Sample.build.")
    if len(values) != len(mask):
        raise ValueError(_length_message(name, len(values), len(mask), label))
    if not values.dtype.is_floating_point:
        raise ValueError(f"{name} of sample {label} have dtype {values.dtype}, not a floating-point one. Convert them.")
    bad = (mask & ~torch.isfinite(values)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise ValueError(
            f"{name} of sample {label} is {float(values[position])} at response token {position}, which is trained, so the loss "
            "would not be finite. Mask the token or repair the value."
        )
    check_range(name, values[mask], label)


def check_range(name: str, values: Tensor, label: str) -> None:
    """Refuse values that are no log-probabilities, or no entropies; rounding may leave a little beyond 0."""
    if name == "old_entropies" and (values < -1e-3).any():
        raise ValueError(
            f"old_entropies of sample {label} go down to {float(values.min()):g}, entropies are at least 0, so tokens would be chosen by "
            "something else. Were log-probabilities or negative entropies given?"
        )
    if name in LOGPROBS and (values > 1e-3).any():
        raise ValueError(
            f"{name} of sample {label} reach {float(values.max()):g}, log-probabilities are at most 0, so the ratio would be "
            "wrong. Were probabilities or negative log-likelihoods given?"
        )


def _check_terms(sample: Sample, label: str) -> None:
    """Loss term and further masks: names of loss terms, one each, and tokens of the response."""
    if not is_term(sample.term):
        raise ValueError(
            f"term={shorten(sample.term)} of sample {label} is no name of a term. Give the NAME of a --pg-term NAME:kind."
        )
    if not isinstance(sample.masks, Mapping):
        raise ValueError(f"masks={shorten(sample.masks)} of sample {label} are no masks by term. Give a dict.")
    for name, mask in sample.masks.items():
        if not is_term(name) or name in (POLICY, sample.term):
            raise ValueError(
                f"masks of sample {label} hold {shorten(name)}, which is no further loss term: the tokens of its own loss term, "
                f"{sample.term}, are in loss_mask, and those of the objective belong to samples of the loss term {POLICY}. Rename it."
            )
        if not _is_vector(mask) or mask.dtype != torch.bool or len(mask) != len(sample.loss_mask):
            raise ValueError(
                f"masks[{name}] of sample {label} is {_shown(mask)}, not [R] bool on the CPU with R = {len(sample.loss_mask)}. Use "
                "Sample.build, which also takes 0 and 1."
            )


def _experts(values: Any, label: str) -> Tensor:
    """[n - 1, layers, topk] int32 from nested lists, an array or a tensor of integers."""
    try:
        array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.array(values)
        if array.dtype.kind in "iu" and (
            array.size == 0 or (int(array.min()) >= -(2**31) and int(array.max()) < 2**31)
        ):
            return torch.from_numpy(array.astype(np.int32))  # a copy
    except Exception:  # of whatever else was given
        array = None
    raise ValueError(
        f"routed_experts={_shown(values)} of sample {label} are not numbers of experts, a list per token of lists per layer. Give the "
        "engine's array [tokens - 1, layers, topk]."
    )


def _check_experts(values: Any, num_tokens: int, label: str) -> None:
    is_plain = isinstance(values, Tensor) and values.layout == torch.strided and not values.is_nested
    if not is_plain or values.dim() != 3 or values.dtype != torch.int32 or values.device.type != "cpu":
        raise ValueError(
            f"routed_experts of sample {label} are {_shown(values)}, not [tokens - 1, layers, topk] int32 on the CPU. Use Sample.build."
        )
    if len(values) != num_tokens - 1 or values.numel() == 0:
        raise ValueError(
            f"routed_experts of sample {label} have shape {tuple(values.shape)} for {num_tokens} tokens, so they would not align: an engine "
            "has experts for every token but the last, which it never reads. Give [tokens - 1, layers, topk]."
        )
    if values.min() < 0:
        raise ValueError(
            f"routed_experts of sample {label} hold a negative number, which is no expert. Record all tokens."
        )
    ordered = values.sort(dim=-1).values
    is_dense = (values == 0).all(dim=2).all(dim=0)  # engines leave the zeros of layers without experts
    twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1) & ~is_dense
    if twice.any():
        token, layer = twice.nonzero()[0].tolist()
        raise ValueError(
            f"routed_experts of sample {label} name an expert twice at token {token}, layer {layer}, so the token would lack one. Was the "
            "record taken whole, prompt and cached prefixes included?"
        )
