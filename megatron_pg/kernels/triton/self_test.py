"""Compares the single-pass kernel with the eager reference at its first use on an untried chip or Triton release.

A few rows of random numbers, as wide as the logits and with the terms of the loss; once per process for each kind.
"""

import logging
import warnings
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.batch.fields import TermFields, TokenFields
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.reference import reference_loss
from megatron_pg.kernels.triton import single_pass
from megatron_pg.kernels.triton.terms import KernelTerms
from megatron_pg.kernels.vocabulary import Vocabulary

_PROGRAMS, _ROWS = 2, 7  # several rows per program, to exercise the pipeline
_TOLERANCE = 2e-5  # float32 sums over a vocabulary
_ROUNDING = {torch.float32: 2e-5, torch.bfloat16: 2.0**-8}  # of a gradient's entry
_found: dict[tuple, bool] = {}


def agrees(logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary, *, entropy: bool) -> bool:
    """Whether the kernel, compiled for such logits and terms, gives the reference's numbers and spills no register.

    The result is logged; a disagreement is a warning.
    """
    built_for = KernelTerms.of(policy_loss.terms).constants.values()
    shape = logits.shape[1], vocabulary.valid, vocabulary.softcap
    key = (logits.device, logits.dtype, *shape, entropy, *built_for)
    if key not in _found:
        dtypes = dict.fromkeys((logits.dtype, torch.bfloat16))  # that its gradient may have
        flaws = (_flaw(logits, each, policy_loss, vocabulary, entropy) for each in dtypes)
        why = next(filter(None, flaws), None)
        _found[key] = why is None
        if why is None:
            logging.getLogger(__name__).info("the single-pass kernel agrees with the reference on %s", logits.device)
        else:
            warnings.warn(
                f"the single-pass kernel {why} on {torch.cuda.get_device_name(logits.device)}: the multi-pass kernels "
                "do its work, with the reference's results and about 1.4 times the time of the loss",
                stacklevel=2,
            )
    return _found[key]


def _flaw(
    logits: Tensor, dtype: torch.dtype, policy_loss: PolicyLoss, vocabulary: Vocabulary, entropy: bool
) -> str | None:
    """How the kernel differs from the reference; None: it does not."""
    table, loss = _drawn(logits, policy_loss, vocabulary)
    gradient = torch.empty_like(table, dtype=dtype)
    found, spills = single_pass.loss_and_gradient(
        table, gradient, loss, vocabulary, grad_scale=3.0, entropy=entropy, most_programs=_PROGRAMS
    )
    if spills:
        return f"keeps {spills} values in memory that registers should hold"
    with torch.enable_grad():
        leaf = table.float().requires_grad_()
        wanted = reference_loss(leaf, loss, vocabulary)
        (wanted_gradient,) = torch.autograd.grad(3.0 * wanted.loss, leaf)
    names = "token_losses", "logprobs", "log_ratios", "term_losses", *(["entropy"] if entropy else [])
    pairs: dict[str, tuple[Any, Any]] = {name: (getattr(found, name), getattr(wanted, name)) for name in names}
    different = [name for name, (ours, theirs) in pairs.items() if not _are_close(ours, theirs, _TOLERANCE)]
    if not (found.loss - wanted.loss).abs() <= _TOLERANCE * _size(loss, wanted):  # NaN, too
        different.append("loss")
    if not _are_close(gradient.float(), wanted_gradient, _ROUNDING[dtype]):
        different.append("gradient")
    return f"gives another {' and '.join(different)} than the reference" if different else None


def _size(loss: PolicyLoss, found: PolicyGradientLoss) -> Tensor:
    """Sum of the absolute values of the summands of the loss."""
    size = (loss.fields.corrected_weights * found.token_losses).abs().sum()
    losses = () if found.term_losses is None else found.term_losses
    for term, values in zip(loss.terms.further, losses, strict=True):
        size += term.weight * (loss.fields.of_term(term.name).weights * values).abs().sum()
    return size


def _are_close(ours: Tensor | None, theirs: Tensor | None, relative: float) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    least = _TOLERANCE * theirs.abs().max()  # rounding, relative to the largest
    return bool(((ours - theirs).abs() <= relative * theirs.abs() + least).all())


def _drawn(logits: Tensor, policy_loss: PolicyLoss, vocabulary: Vocabulary) -> tuple[Tensor, PolicyLoss]:
    """Random rows as wide as the logits, one of them masked and one of weight 0, and the loss of them."""
    generator = torch.Generator().manual_seed(0)
    drawn = lambda *shape: torch.randn(*shape, generator=generator).to(logits.device)  # noqa: E731
    table = (3 * drawn(_ROWS, logits.shape[1])).to(logits.dtype)
    targets = torch.randint(vocabulary.valid, (_ROWS,), generator=generator).to(logits.device)
    at = torch.arange(_ROWS, device=logits.device)
    logprobs, _ = label_logprobs(table.float(), targets, vocabulary, impl="torch")
    old, reference, teacher = (logprobs + 0.2 * drawn(_ROWS) for _ in range(3))
    fields = TokenFields(
        targets=targets,
        old_logprobs=old,
        ref_logprobs=reference,
        teacher_logprobs=teacher,
        advantages=drawn(_ROWS),
        weights=drawn(_ROWS).abs() * (at != 4),
        mask=at != 3,
        terms={each.name: TermFields(weights=drawn(_ROWS).abs()) for each in policy_loss.terms.further},
    )
    return table, replace(policy_loss, fields=fields)
