"""Checks of sampling masks before a step is planned. All peers have the same samples, so results are equal."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_pg.batch import PackedBatch
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.fields import LOGPROBS
from megatron_pg.rollouts.payloads.sampling_masks import RecordedMask, check_ids
from megatron_pg.rollouts.sample import Sample

_CERTAIN = -1e-3  # nats: log-probability of the only token of a set, with rounding
_OF_ROLLOUT = tuple(name for name in LOGPROBS if name != "teacher_logprobs")  # a teacher's use the whole vocabulary


def members(samples: Iterable[Sample], settings: LossSettings) -> Iterator[tuple[Sample, RecordedMask, Tensor]]:
    """The samples with a sampling mask that a term reads, with the mask and the tokens [R] of those terms."""
    for sample in samples:
        if sample.sampling_mask is not None and (
            masks := list(_masks_of(sample, settings.over_sampling_mask).values())
        ):
            yield sample, sample.sampling_mask, torch.stack(masks).any(dim=0)


def _masks_of(sample: Sample, terms: Iterable[str]) -> dict[str, Tensor]:
    """The masks of those loss terms that the sample belongs to."""
    return {name: mask for name in terms if (mask := sample.mask_of(name)) is not None}


def without_missing(batch: PackedBatch, settings: LossSettings) -> PackedBatch:
    """Under `--pg-sampling-mask-missing mask`, mask the trained tokens outside their samples' sampling masks."""
    if settings.sampling_mask_missing != "mask" or not settings.over_sampling_mask:
        return batch
    outside = {
        id(s): mask & ~sampling_mask.contains(_response(s))
        for s, sampling_mask, mask in members(batch.samples, settings)
    }
    samples = [_without(s, outside[id(s)], settings) if id(s) in outside else s for s in batch.samples]
    num_missing = sum(int(tokens.sum()) for tokens in outside.values())
    return replace(batch.with_samples(samples), num_missing=num_missing)


def _without(sample: Sample, outside: Tensor, settings: LossSettings) -> Sample:
    """The sample without those tokens [R] in the loss terms that read the sampling mask."""
    kept = {name: mask & ~outside for name, mask in _masks_of(sample, settings.over_sampling_mask).items()}
    loss_mask = kept.pop(sample.term, sample.loss_mask)
    return replace(sample, loss_mask=loss_mask, masks={**sample.masks, **kept})


def check_sampling_masks(samples: Sequence[Sample], settings: LossSettings) -> None:
    """Refuse tokens outside the sampling mask, and log-probabilities over the whole vocabulary, where a term reads it.

    Raises:
        ValueError: for the first such token.
    """
    for sample, sampling_mask, mask in members(samples, settings):
        if settings.masked_head_mode == "scaled_exp":
            raise ValueError(
                f"sample {sample.sample_id} has a sampling mask, and --pg-fused-head scaled_exp computes "
                "log-probabilities over the whole vocabulary only. Use --pg-fused-head forward."
            )
        check_ids(sampling_mask, mask, sample.sample_id)
        _check_holds(sample, sampling_mask, mask)
        for name in _OF_ROLLOUT:
            _check_anchor(sample, sampling_mask, mask, name)
        for term in settings.terms.further:
            if not (term.is_over_sampling_mask or term.kind == "entropy"):
                _check_term(sample, sampling_mask, mask, term)


def _response(sample: Sample) -> Tensor:
    return sample.tokens[-sample.response_length :]


def _check_holds(sample: Sample, sampling_mask: RecordedMask, mask: Tensor) -> None:
    if (bad := (mask & ~sampling_mask.contains(_response(sample))).nonzero()).numel():
        k = int(bad[0])
        raise ValueError(
            f"sampling_mask of sample {sample.sample_id} does not hold token {int(_response(sample)[k])}, its trained "
            f"response token {k} ({len(bad)} of the sample's tokens). Check that tokens and sets come from the same "
            "step of the engine. --pg-sampling-mask-missing mask masks such tokens."
        )


def _check_anchor(sample: Sample, sampling_mask: RecordedMask, mask: Tensor, name: str) -> None:
    """Refuse a log-probability below 0 of the only token of a set: it was computed over the whole vocabulary."""
    values = getattr(sample, name)
    if values is None:
        return
    if (bad := (mask & (sampling_mask.counts == 1) & (values < _CERTAIN)).nonzero()).numel():
        k = int(bad[0])
        raise ValueError(
            f"{name} of sample {sample.sample_id} is {float(values[k]):g} at response token {k}, whose sampling mask "
            "has only that token, with log-probability 0: the value was computed over the whole vocabulary. Compute it "
            "over the sampling mask (docs/sampling_masks.md); an engine reports it as processed log-probabilities."
        )


def _check_term(sample: Sample, sampling_mask: RecordedMask, mask: Tensor, term: LossTerm) -> None:
    """Refuse a token for which one term reads log π over the sampling mask and another over the whole vocabulary."""
    of_term = sample.mask_of(term.tokens)
    is_both = mask & (sampling_mask.counts > 0) if of_term is None else mask & (sampling_mask.counts > 0) & of_term
    is_alone = term.payload is not None
    if (of_term is not None or is_alone) and is_both.any():
        raise ValueError(
            f"{term.flag} reads log-probabilities over the whole vocabulary at response token "
            f"{int(is_both.nonzero()[0])} of sample {sample.sample_id}, where another term reads those over its "
            f"sampling mask. Give the loss term its own tokens{' in its own run' if is_alone else ''}, or remove one "
            "of them."
        )
