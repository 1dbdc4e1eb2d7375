"""Checks of the arguments of kernels and heads."""

import math
import os
from functools import lru_cache

import torch
from torch import Tensor

from megatron_pg.declarations.choices import IMPLEMENTATIONS
from megatron_pg.declarations.loss_terms import KINDS, LossTerm
from megatron_pg.declarations.single_pass import too_old
from megatron_pg.kernels.policy_loss import LossTerms, PolicyLoss
from megatron_pg.kernels.vocabulary import Vocabulary

_TABLES = "teacher_topk.ids", "teacher_topk.logprobs"  # [T, K]


def check_impl(impl: str) -> None:
    """Raise ValueError for an unknown `impl`."""
    if impl not in IMPLEMENTATIONS:
        raise ValueError(f"impl={impl!r} is not one of {', '.join(IMPLEMENTATIONS)}.")


def check_loss(values: Tensor, policy_loss: PolicyLoss, grad_scale: float) -> None:
    """Refuse fields that are missing, misshapen or on another device than `values`, and factors that are not > 0."""
    terms, fields = policy_loss.terms, policy_loss.fields
    for name in _needed(terms):
        if getattr(fields, name) is None:
            raise ValueError(f"{name} is missing, and a term of the loss needs it. Give one value per token.")
    if fields.sampling_mask is not None and any(term.payload for term in terms.further):
        raise ValueError(
            "a loss over a teacher's distribution is over the whole vocabulary, and the log-probabilities of this "
            "micro-batch are over what could be sampled. Leave out one of the loss term and the sampling mask."
        )
    known = fields.per_token()
    for payload, rows in fields.payloads.items():
        known |= {f"{payload}.{name}": getattr(rows, name) for name in rows.per_row}
    if terms.reads_sequences:
        known |= {f"sequences.{name}": getattr(fields.sequences, name) for name in ("slots", "order")}
    size, device = (fields.targets.numel(),), values.device
    for name, found in known.items():
        is_table = name in _TABLES
        if found.shape[:1] != size or found.dim() != 1 + is_table or (is_table and not found.shape[1]):
            form = "[T, K] with K of 1 or more; an id of -1 means none" if is_table else "one value per token"
            raise ValueError(
                f"{name} has shape {tuple(found.shape)} for {tuple(fields.targets.shape)} targets. Give {form}."
            )
        if found.device != device:
            raise ValueError(f"{name} is on {found.device} and the logits on {device}. Move it there.")
        if name.endswith("mask") and found.dtype != torch.bool:
            raise ValueError(
                f"{name} has dtype {found.dtype}, not bool, and it selects the trained tokens. Use {name}.bool()."
            )
        if name == "teacher_topk.logprobs" and found.shape != fields.topk.ids.shape:
            raise ValueError(
                f"{name} has shape {tuple(found.shape)} for ids {tuple(fields.topk.ids.shape)}. Give one per id."
            )
        if name == "teacher_topk.ids" and found.dtype != torch.int32:
            raise ValueError(f"{name} has dtype {found.dtype}, which kernels would misread. Use {name}.int().")
    _check_factor("grad_scale", grad_scale)


@lru_cache(maxsize=16)  # once per settings: a check of every micro-batch would cost more host time than small launches
def _needed(terms: LossTerms) -> tuple[str, ...]:
    """The fields that the terms need. Refuses terms that no fields would make valid."""
    for term in terms.further:
        _check_mixture(term)
    _check_factor("grad_divisor", terms.grad_divisor)
    read = sorted(terms.reads - {"old_logprobs"})  # which may be the model's own
    anchor = [terms.opsm_anchor] if terms.opsm_anchor else []
    return "mask", "advantages", "weights", *read, *(["sequences"] if terms.reads_sequences else []), *anchor


def _check_factor(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise ValueError(f"{name}={value} is not > 0 and finite. Use 1.")


def check_labels(policy_loss: PolicyLoss, vocabulary: Vocabulary) -> None:
    """Refuse a trained token whose target is outside the vocabulary; on a CPU only: a host would wait for a GPU."""
    targets, mask = policy_loss.fields.targets, policy_loss.fields.mask
    if targets.device.type != "cpu" or mask.shape != targets.shape or mask.dtype != torch.bool:  # refused elsewhere
        return
    bad = mask & ((targets < 0) | (targets >= vocabulary.size))
    if count := int(bad.sum()):
        t = int(bad.int().argmax())
        raise ValueError(
            f"targets[{t}] is {int(targets[t])} at a trained token, and the vocabulary has the ids 0 to "
            f"{vocabulary.size - 1} ({count} such tokens). Set weights or mask to 0 there: no value of targets is "
            "ignored."
        )


def _check_mixture(term: LossTerm) -> None:
    """Refuse a missing share β or α, and one that the divergence does not have."""
    found, has_one = term.mixture, KINDS[term.kind].mixture is not None
    if not (found is not None and 0 < found < 1 if has_one else found is None):
        raise ValueError(
            f"mixture={found} of a loss term {term.kind} cannot be: some divergences have a share between 0 and 1 and "
            "the others none. Use LossTerm.resolved, which fills in the default."
        )


def check_triton(choice: str) -> None:
    """Refuse a Triton that does not compile the kernels, which the flag or argument `choice` chose."""
    import triton  # torch alone must not need Triton

    if (needed := too_old(triton.__version__)) is not None:
        raise ValueError(f"{choice} needs {needed}. Update both, or choose torch.")


def check_for_triton(values: Tensor) -> None:
    """Refuse a device, dtype or Triton that the kernels do not support."""
    if values.dtype == torch.float64:
        raise ValueError("impl='triton' computes in float32 and would lose float64's digits. Use impl='torch'.")
    if values.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            f"impl='triton' cannot run on {values.device}: Triton kernels need a CUDA device (or TRITON_INTERPRET=1, "
            "to test). Use impl='torch'."
        )
    check_triton("impl='triton'")


def check_layout(logits: Tensor, inplace: bool) -> None:
    """Refuse logits that the kernels cannot read in order, or may not overwrite."""
    if logits.shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(
            f"logits have stride {logits.stride(1)} along the vocabulary, which the kernels read in order. "
            "Use logits.contiguous()."
        )
    if inplace and not may_be_overwritten(logits):
        raise ValueError(
            f"inplace=True would overwrite {_why_not(logits)}. Pass the model's output itself, or leave inplace off."
        )


def may_be_overwritten(logits: Tensor) -> bool:
    """Whether a gradient may overwrite the logits: they are not a leaf that requires grad, and rows do not overlap."""
    return not _why_not(logits)


def _why_not(logits: Tensor) -> str:
    """What else the gradient would overwrite; empty: nothing."""
    owner = logits if logits._base is None else logits._base  # a view's memory is its base's
    if owner.is_leaf and owner.requires_grad:
        return "a leaf tensor that requires grad"
    if len(logits) > 1 and logits.stride(0) < logits.shape[1]:
        strides = f"row stride {logits.stride(0)} is below their {logits.shape[1]} columns"
        return f"rows with one another, because the logits' {strides}"
    return ""
