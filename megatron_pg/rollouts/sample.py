"""One training sequence: prompt and response tokens, and what reinforcement learning knows about the response.

Everything is checked here, at the door, so that nothing later has to.
"""

import numbers
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megatron_pg.rollouts.fields import LOGPROBS, OPTIONAL, Id, is_id
from megatron_pg.rollouts.printable import printable, shorten


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
    loss_mask: Tensor  # [R] bool, True where the token is trained
    old_logprobs: Tensor  # [R] float64, nats, of the sampling policy at the training temperature
    advantages: Tensor  # [R] float64
    sample_id: str = "?"  # what error messages call it
    prompt_id: Id | None = None  # samples of one prompt share it
    rollout_id: Id | None = None  # samples of one trajectory share it
    rollout_logprobs: Tensor | None = None  # [R] float64, nats, as the rollout engine reported them
    ref_logprobs: Tensor | None = None  # [R] float64, nats, of the reference policy
    step: int | None = None  # optimizer step that it belongs to
    reward: float | None = None
    extra: dict[str, object] = field(default_factory=dict)  # the user's own x_ fields

    def __post_init__(self):
        object.__setattr__(self, "sample_id", label := printable(self.sample_id))
        tokens, mask = self.tokens, self.loss_mask
        if tokens.dim() != 1 or tokens.dtype != torch.int64:
            raise ValueError(
                f"tokens of sample {label} have shape {tuple(tokens.shape)} and dtype {tokens.dtype}, not [n] int64. Give one "
                "flat list of token ids."
            )
        if len(tokens) and tokens.min() < 0:
            raise ValueError(
                f"tokens of sample {label} hold {int(tokens.min())}, which is no token id. Remove padding first."
            )
        if mask.dim() != 1 or mask.dtype != torch.bool:
            raise ValueError(
                f"loss_mask of sample {label} has shape {tuple(mask.shape)} and dtype {mask.dtype}, not [R] bool. "
                "Use Sample.build, which also takes 0 and 1."
            )
        check_lengths(len(tokens), len(mask))
        for name in ("prompt_id", "rollout_id"):
            value = getattr(self, name)
            if value is not None and not is_id(value):
                raise ValueError(
                    f"{name}={shorten(value)} of sample {label} is neither a string of printable characters nor an integer "
                    "of 62 bits, so units could not be counted or named. Give one."
                )
        for name in ("advantages", *LOGPROBS):
            if (values := getattr(self, name)) is not None:
                _check_values(name, values, mask, label)

    @classmethod
    def build(
        cls,
        *,
        tokens: Sequence[int],
        response_length: int,
        loss_mask: Sequence[int],
        old_logprobs: Sequence[float],
        advantage: float | Sequence[float],
        **rest: Any,
    ) -> "Sample":
        """A sample from plain lists; `advantage` is one number for the whole response or one per response token.

        Args:
            tokens: prompt and response token ids.
            response_length: R, the number of response tokens.
            loss_mask: R entries, 0 or 1.
            old_logprobs: R log-probabilities in nats.
            advantage: a number or R numbers.
            rest: any other field of `Sample`; log-probability fields may be lists.
        """
        label = printable(rest.setdefault("sample_id", str(rest.get("rollout_id") or rest.get("prompt_id") or "?")))
        if len(loss_mask) != response_length:
            raise ValueError(_length_message("loss_mask", len(loss_mask), response_length, label))
        if isinstance(advantage, numbers.Real):
            advantage = [float(advantage)] * response_length
        ids, mask = torch.as_tensor(tokens), torch.as_tensor(loss_mask, dtype=torch.float64)
        if ids.dtype.is_floating_point:
            raise ValueError(
                f"tokens of sample {label} are fractions, not token ids, and none may be rounded. Give integers."
            )
        if not (is_binary := (mask == 0) | (mask == 1)).all():
            bad = float(mask[~is_binary][0])
            raise ValueError(
                f"loss_mask of sample {label} must be 0 or 1, got {bad:g}; put weights into the advantages"
            )
        for name in OPTIONAL:
            if rest.get(name) is not None:
                rest[name] = torch.as_tensor(rest[name], dtype=torch.float64)
        return cls(
            tokens=ids.to(torch.int64),
            loss_mask=mask.bool(),
            old_logprobs=torch.as_tensor(old_logprobs, dtype=torch.float64),
            advantages=torch.as_tensor(advantage, dtype=torch.float64),
            **rest,
        )

    @property
    def response_length(self) -> int:
        """R, the number of response tokens, trained or not."""
        return len(self.loss_mask)

    @property
    def num_trained(self) -> int:
        """M_i, the number of trained tokens."""
        return int(self.loss_mask.sum())


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


def _length_message(name: str, length: int, response_length: int, label: object) -> str:
    return (
        f"{name} of sample {label} has {length} entries for {response_length} response tokens, so they would not align. "
        "Give one per response token."
    )


def _check_values(name: str, values: Tensor, mask: Tensor, label: str) -> None:
    if values.shape != mask.shape:
        raise ValueError(_length_message(name, len(values) if values.dim() else 1, len(mask), label))
    if not values.dtype.is_floating_point:
        raise ValueError(f"{name} of sample {label} have dtype {values.dtype}, not a floating-point one. Convert them.")
    bad = (mask & ~torch.isfinite(values)).nonzero()
    if len(bad):
        position = int(bad[0])
        raise ValueError(
            f"{name} of sample {label} is {float(values[position])} at response token {position}, which is trained, so the loss "
            "would not be finite. Mask the token or repair the value."
        )
    if name in LOGPROBS and (values[mask] > 1e-3).any():  # rounding may leave a little above 0
        raise ValueError(
            f"{name} of sample {label} reach {float(values[mask].max()):g}, log-probabilities are at most 0, so the ratio would be "
            "wrong. Were probabilities or negative log-likelihoods given?"
        )
