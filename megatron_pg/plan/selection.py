"""Token selection by a correction over the whole step: before the step is planned, the same on every rank.

    gather sizes and sums -> keys of this rank's tokens -> gather samples and keys -> order -> choice

Every rank executes both collectives unless one rank has failed. The first reports it, and the metadata exchange raises
the error. Samples are whole here: context parallelism slices later.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch, samples_of
from megatron_pg.declarations.corrections import SelectionDeclaration
from megatron_pg.objectives.corrections.selections import (
    MOST_PARTS,
    StepKeys,
    TokenSelection,
    average,
    content_of,
    exact_parts,
    identity_of,
    origin_of,
)
from megatron_pg.plan.collectives import gathered, gathered_parts
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import SelectionFacts, is_brought, places_of
from megatron_pg.plan.weights import TokenFactors
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.sample import Sample

_HAS_FAILED, _SAMPLES, _TOKENS, _SUMS = range(4)  # columns of what is gathered first


class _Line(NamedTuple):
    """The data of a sample that are sent, in addition to its keys."""

    identity: int
    content: int
    place: int  # in the step, to identify the sample on its rank
    length: int  # trained tokens


def select_tokens(
    batches: Sequence[PackedBatch],
    factors: Sequence[TokenFactors],
    settings: LossSettings,
    group: ProcessGroup | None,
    error: Exception | None = None,
) -> tuple[list[TokenFactors], SelectionFacts | None]:
    """The factors of each micro-batch with the tokens that the correction selects, and how many these are.

    Every rank of `group` must call, also one that has failed with `error`, which the metadata exchange then raises.
    """
    declared = settings.correction.declared.selection
    if declared is None:
        return [*factors], None
    placed = zip(places_of(batches, group), samples_of(batches), strict=True) if error is None else ()
    brought = {place: sample for place, sample in placed if sample.term == POLICY and is_brought(place, group)}
    samples = [*brought.values()]
    heads = gathered(_head(samples, declared, error), group, error)
    if heads[:, _HAS_FAILED].any():
        return [*factors], None
    means = _means(heads, declared)
    keys = [declared.load_key()(sample, *means) for sample in samples]
    lines = [_Line(identity_of(s), content_of(s, k), p, len(k)) for s, k, p in zip(samples, keys, brought, strict=True)]
    everyones, lines = _gathered_tokens(lines, keys, heads, group)
    alike = groupby(lines, key=lambda line: line.identity)
    origins = [origin_of(settings.seed, identity, n) for identity, same in alike for n, _ in enumerate(same)]
    step = StepKeys(everyones, [line.length for line in lines], origins)
    nothing = TokenSelection(everyones.bool(), None)  # type: ignore[arg-type]
    chosen = declared.load_choice()(step, settings.correction) if len(everyones) else nothing
    of_place = dict(zip((line.place for line in lines), chosen.tokens.split(list(step.lengths)), strict=True))
    facts = SelectionFacts(int(chosen.tokens.sum()), len(everyones), chosen.threshold, chosen.num_candidates)
    return _with_choice(batches, factors, of_place, group, declared), facts


def _head(samples: Sequence[Sample], declared: SelectionDeclaration, error: Exception | None) -> Tensor:
    """[3 + parts] float64: whether this rank has failed, its samples, their trained tokens, exact sums over them."""
    averaged = declared.reads if declared.is_centred else ()
    head = torch.zeros(_SUMS + MOST_PARTS * len(averaged), dtype=torch.float64)
    head[:_SUMS] = torch.tensor([error is not None, len(samples), sum(sample.num_trained for sample in samples)])
    for i, name in enumerate(averaged):
        values = [getattr(sample, name)[sample.loss_mask].double() for sample in samples]
        parts = exact_parts(torch.cat([head[:0], *values]).tolist())
        head[_SUMS + i * MOST_PARTS :][: len(parts)] = torch.tensor(parts, dtype=torch.float64)
    return head


def _means(heads: Tensor, declared: SelectionDeclaration) -> list[float]:
    """The means over the step's trained tokens of the fields that the key reads."""
    sums = heads[:, _SUMS:].split(MOST_PARTS, dim=1) if declared.is_centred else ()
    return [average(parts.flatten().tolist(), int(heads[:, _TOKENS].sum())) for parts in sums]


def _gathered_tokens(
    lines: Sequence[_Line], keys: Sequence[Tensor], heads: Tensor, group: ProcessGroup | None
) -> tuple[Tensor, list[_Line]]:
    """[T] keys and the lines of all samples of the step, in the order of identities."""
    width = len(_Line._fields)
    sizes = heads[:, [_SAMPLES, _TOKENS]].long() * torch.tensor([width, 1])
    of_lines = torch.tensor(lines, dtype=torch.int64).flatten()
    of_keys = torch.cat([torch.zeros(0, dtype=torch.float64), *keys]).view(torch.int64)
    parts = gathered_parts(torch.cat([of_lines, of_keys]), sizes.sum(dim=1).tolist(), group)
    keyed: list[tuple[_Line, Tensor]] = []
    for values, split in zip(parts, sizes.tolist(), strict=True):
        of_lines, bits = values.split(split)
        of_rank = [_Line(*line) for line in of_lines.view(-1, width).tolist()]
        keyed += zip(of_rank, bits.view(torch.float64).split([line.length for line in of_rank]), strict=True)
    keyed.sort(key=lambda each: each[0])
    return torch.cat([torch.zeros(0, dtype=torch.float64), *(k for _, k in keyed)]), [line for line, _ in keyed]


def _with_choice(
    batches: Sequence[PackedBatch],
    factors: Sequence[TokenFactors],
    of_place: Mapping[int, Tensor],
    group: ProcessGroup | None,
    declared: SelectionDeclaration,
) -> list[TokenFactors]:
    """The factors of each micro-batch; `of_place`: of a sample's trained tokens, whether they are selected."""
    places, found = iter(places_of(batches, group)), []
    for batch, of_batch in zip(batches, factors, strict=True):
        parts = [torch.zeros(0, dtype=torch.bool)]
        for sample, place in zip(batch.samples, places, strict=False):
            parts.append(torch.zeros_like(sample.loss_mask))
            if place in of_place:
                parts[-1][sample.loss_mask] = of_place[place]
        chosen = torch.cat(parts)
        if declared.penalises:
            found.append(replace(of_batch, penalised=chosen))
        else:
            kept = batch.mask_of(POLICY) & ~chosen
            found.append(replace(of_batch, corrections=(~chosen).double(), kept=kept))
    return found
