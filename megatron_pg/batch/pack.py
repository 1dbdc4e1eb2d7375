"""One micro-batch, whole: samples laid out as Megatron requires.

Two layouts: thd (one row, samples one after the other) and bshd (one padded row per sample). Everything is laid
out at full length first, and labels are shifted inside each sample; context parallelism slices afterwards (`slicing`).
"""

import hashlib
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.batch.context_ranks import ContextRanks
from megatron_pg.batch.zigzag import padded_length
from megatron_pg.rollouts.fields import OPTIONAL, POLICY
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.sample import Sample


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedBatch:
    """One micro-batch of whole samples, on the CPU, equal on all tensor-, context- and pipeline-parallel peers.

    B rows of W positions: thd has B = 1, bshd one row per sample and empty rows up to the row count. A response
    token belongs to the position whose logits predict it, one before its own.
    """

    qkv_format: str  # "thd" or "bshd"
    samples: tuple[Sample, ...]
    tokens: Tensor  # [B, W] int64
    labels: Tensor  # [B, W] int64, the next token of the same sample, else 0
    position_ids: Tensor  # [B, W] int64, counted from the start of the sample
    sample_index: Tensor  # [B, W] int64 into `samples`, -1 on padding
    response_positions: Tensor  # [sum of R] int64 into the flattened rows
    lengths: Tensor  # [S] int64, R of each sample
    masks: Mapping[str, Tensor]  # [sum of R] bool by loss term, the response tokens that it trains
    values: Mapping[str, Tensor]  # [sum of R] float64 by field; NaN where a sample has none, absent if no sample has it
    versions: Tensor | None  # [sum of R] int64, -1 where a sample has no weight version; None: no sample has one
    padded_lengths: tuple[int, ...]  # along a row: of every sample (thd), or the width (bshd)
    cp_ranks: ContextRanks | None = None  # over which it is cut; None: Megatron's context-parallel group
    num_missing: int = 0  # trained tokens that were masked: their samples' sampling masks do not contain them

    @property
    def digest(self) -> bytes:
        """48 bits of everything that the loss and the metrics read, independent of its layout in memory."""
        facts = [(s.reward, s.truncated, s.environment, s.term, s.turns, sorted(s.masks)) for s in self.samples]
        content = hashlib.blake2b(digest_size=6)
        content.update(repr((self.qkv_format, self.padded_lengths, facts, self.cp_ranks)).encode())
        content.update(self.tokens.numpy().tobytes() + self.lengths.numpy().tobytes())
        for tensors in (self.masks, self.values, {} if self.versions is None else {"weight_version": self.versions}):
            for name, values in sorted(tensors.items()):
                content.update(name.encode() + values.numpy().tobytes())
        for name, payload in PAYLOADS.items():
            for i, record in enumerate(self.records_of(name)):
                for values in () if record is None else payload.tensors(record):
                    content.update(f"{name} {i}".encode() + values.numpy().tobytes())
        return content.digest()

    @property
    def num_positions(self) -> int:
        """Positions that the model processes, padding included."""
        return self.tokens.numel()

    @property
    def tokens_per_sample(self) -> list[int]:
        """M_i of each sample, the tokens that the objective trains."""
        return [max(n, 0) for n in self.tokens_of(POLICY)]

    def tokens_of(self, *terms: str) -> list[int]:
        """Tokens of each sample that one of the loss terms trains; -1 if the sample belongs to none of them."""
        return self.counted(self.mask_of(*terms), *terms)

    def counted(self, mask: Tensor, *terms: str) -> list[int]:
        """Tokens of each sample in a mask [sum of R]; -1 if the sample belongs to none of the loss terms."""
        counts = self.sums(mask)
        is_member = [any(name == s.term or name in s.masks for name in terms) for s in self.samples]
        return [n if is_of else -1 for n, is_of in zip(counts.tolist(), is_member, strict=True)]

    def mask_of(self, *terms: str) -> Tensor:
        """[sum of R] bool, tokens that one of the loss terms trains."""
        masks = [self.masks[name] for name in terms if name in self.masks]
        return torch.stack(masks).any(dim=0) if masks else torch.zeros(int(self.lengths.sum()), dtype=torch.bool)

    @property
    def loss_mask(self) -> Tensor:
        """[sum of R] bool, response tokens that the objective trains."""
        return self.mask_of(POLICY)

    def response_values(self, field: str) -> Tensor:
        """[sum of R] float64, one field of the samples; NaN for samples without it."""
        known = self.values.get(field)
        return torch.full((int(self.lengths.sum()),), torch.nan, dtype=torch.float64) if known is None else known

    def records_of(self, payload: str) -> list[Any]:
        """The payload of each sample, None for samples without it."""
        return [getattr(sample, payload) for sample in self.samples]

    def with_samples(self, samples: Sequence[Sample]) -> "PackedBatch":
        """The same layout with other masks, values and payloads."""
        return replace(self, samples=tuple(samples), **_concatenated(samples))

    def reached(self, depth: int) -> Tensor:
        """[sum of R] bool: the token's sample has a position `depth` before the one that predicts it."""
        return self.position_ids.flatten()[self.response_positions] >= depth

    def spread(self, values: Tensor, depth: int = 0) -> Tensor:
        """[B, W, …] from values [sum of R, …]: each at the position that predicts it, or `depth` before; else 0."""
        further = values.shape[1:]
        reached, flat = self.reached(depth), torch.zeros(self.tokens.numel(), *further, dtype=values.dtype)
        flat[self.response_positions[reached] - depth] = values[reached]
        return flat.view(*self.tokens.shape, *further)

    def sequence_lengths(self, level: str) -> Tensor:
        """[n] int64, response tokens of each sequence: of each sample, or of each turn."""
        lengths = [length for sample in self.samples for length in sample.sequence_lengths(level)]
        return torch.tensor(lengths, dtype=torch.int64)

    def per_token(self, values: Tensor, level: str = "sample") -> Tensor:
        """[sum of R] from one value per sequence."""
        return torch.repeat_interleave(values, self.sequence_lengths(level))

    def sums(self, values: Tensor, level: str = "sample") -> Tensor:
        """[n] the sums of values [sum of R] over each sequence: counts of a mask, or sums of float64, rounded once."""
        lengths = self.sequence_lengths(level)
        if values.is_floating_point():
            parts = values.split(lengths.tolist())
            return torch.tensor([math.fsum(part.tolist()) for part in parts], dtype=torch.float64)
        return torch.zeros_like(lengths).index_add_(0, self.per_token(torch.arange(len(lengths)), level), values.long())

    def weighted(self, mask: Tensor) -> Tensor:
        """[sum of R] float64: `token_weights` of the tokens in the mask, 1 in samples without them; 0 elsewhere."""
        weights = self.response_values("token_weights")
        return torch.where(mask, torch.where(weights.isnan(), 1.0, weights), 0.0)


def samples_of(batches: Iterable[PackedBatch]) -> list[Sample]:
    """All samples of the micro-batches, in their order."""
    return [sample for batch in batches for sample in batch.samples]


def pack(
    samples: Sequence[Sample],
    *,
    qkv_format: str,
    cp_size: int = 1,
    max_seq_len: int | None = None,
    rows: int | None = None,
    multiple_of: int = 1,
    cp_ranks: ContextRanks | None = None,
) -> PackedBatch:
    """Lay samples out as one micro-batch.

    Args:
        samples: may be empty: an empty micro-batch still takes part in every collective.
        qkv_format: "thd" (packed) or "bshd" (padded).
        cp_size: context-parallel size C; documents (thd) are padded to a multiple of 2C.
        max_seq_len: width W of the rows; a multiple of 2C when C > 1. bshd needs it. thd takes it as the exact length
            of the row, which pipeline parallelism needs (`--seq-length`); without it the row is as long as its
            documents.
        rows: number of rows, for bshd only; rows without a sample are padding. Default: one per sample.
        multiple_of: of the row's length, for thd only (sequence parallelism: TP · C).
        cp_ranks: ranks over which this micro-batch is cut, independent of C (`PolicyGradientStep(dynamic_cp=True)`),
            for thd only. Each of them packs the same samples as the same micro-batch of its step.

    Raises:
        ValueError: the format is unknown, a sample is longer than the row, or there are more samples than rows.
    """
    if cp_ranks is not None:
        if qkv_format != "thd" or cp_size != 1:
            raise ValueError(
                f"cp_ranks={cp_ranks} with qkv_format={qkv_format!r} and cp_size={cp_size}: only a packed row (thd) "
                "has its own ranks, and their number is its cp_size. Choose thd and leave cp_size out."
            )
        return replace(_pack_thd(samples, cp_ranks.size, max_seq_len, multiple_of), cp_ranks=cp_ranks)
    if qkv_format == "thd":
        if rows is not None:
            raise ValueError(f"rows={rows} has no effect on thd, which packs one row. Leave it out or choose bshd.")
        return _pack_thd(samples, cp_size, max_seq_len, multiple_of)
    if qkv_format == "bshd":
        if multiple_of != 1:
            raise ValueError(
                f"multiple_of={multiple_of} has no effect on bshd, whose width is max_seq_len. Leave it out."
            )
        return _pack_bshd(samples, cp_size, max_seq_len, len(samples) if rows is None else rows)
    raise ValueError(f"qkv_format={qkv_format!r} is neither thd nor bshd, so the layout is unknown. Use one of them.")


def pack_row(samples: Sequence[Sample], padded_lengths: Sequence[int]) -> PackedBatch:
    """Lay samples out in a packed row as another trainer has laid them out.

    Args:
        samples: in this order.
        padded_lengths: positions of each sample; further lengths are padding, which is cut over context-parallel ranks
            separately.

    Raises:
        ValueError: a length is missing, or shorter than its sample.
    """
    lengths = [len(sample.tokens) for sample in samples]
    if len(lengths) > len(padded_lengths) or any(n > w for n, w in zip(lengths, padded_lengths, strict=False)):
        raise ValueError(
            f"padded_lengths={list(padded_lengths)} for samples of {lengths} tokens. Give each sample its length in "
            "the row, padding included."
        )
    starts = [0, *itertools.accumulate(padded_lengths)]
    return _lay_out("thd", samples, (1, starts[-1]), starts, tuple(padded_lengths))


def _pack_thd(samples: Sequence[Sample], cp_size: int, width: int | None, multiple_of: int) -> PackedBatch:
    lengths = [padded_length(len(sample.tokens), cp_size) for sample in samples]
    unit = math.lcm(multiple_of, 2 * cp_size if cp_size > 1 else 1)
    needed = -(-max(sum(lengths), 1) // unit) * unit
    if width is not None and (width < needed or width % unit):
        raise ValueError(
            f"max_seq_len={width} for a packed row of {needed} tokens (a multiple of {unit}). Put fewer samples into "
            "the micro-batch, or raise the width."
        )
    filling = (needed if width is None else width) - sum(lengths)
    # the last sample takes the filling: a separate segment of padding would be a phantom document
    padded = [*lengths[:-1], lengths[-1] + filling] if lengths else [filling]
    starts = [0, *itertools.accumulate(padded)]
    return _lay_out("thd", samples, (1, starts[-1]), starts, tuple(padded))


def _pack_bshd(samples: Sequence[Sample], cp_size: int, width: int | None, rows: int) -> PackedBatch:
    if width is None:
        raise ValueError(
            "bshd needs max_seq_len, the width of the rows, so that every rank lays them out alike. Pass --seq-length."
        )
    if too_long := next((sample for sample in samples if len(sample.tokens) > width), None):
        raise ValueError(
            f"max_seq_len={width} is less than the {len(too_long.tokens)} tokens of sample {too_long.sample_id}. Raise "
            "the row width (--seq-length) or drop the sample."
        )
    if cp_size > 1 and width % (2 * cp_size):
        raise ValueError(
            f"max_seq_len={width} is not a multiple of {2 * cp_size} (2 * context-parallel size {cp_size}). Use "
            f"{padded_length(width, cp_size)}."
        )
    if not rows >= 1 or rows < len(samples):
        raise ValueError(
            f"rows={rows} for {len(samples)} samples: none may be dropped. Give at least one row per sample."
        )
    return _lay_out("bshd", samples, (rows, width), range(0, rows * width, width), (width,))


def _lay_out(
    qkv_format: str, samples: Sequence[Sample], shape: tuple[int, int], starts: Sequence[int], lengths: tuple[int, ...]
) -> PackedBatch:
    tokens, labels, position_ids = (torch.zeros(math.prod(shape), dtype=torch.int64) for _ in range(3))
    sample_index = torch.full(tokens.shape, -1)
    response_positions = [torch.zeros(0, dtype=torch.int64)]
    for i, (sample, start) in enumerate(zip(samples, starts, strict=False)):
        end = start + len(sample.tokens)
        tokens[start:end] = sample.tokens
        labels[start : end - 1] = sample.tokens[1:]
        position_ids[start:end] = torch.arange(end - start)
        sample_index[start:end] = i
        response_positions.append(torch.arange(end - sample.response_length - 1, end - 1))
    return PackedBatch(
        qkv_format=qkv_format,
        samples=tuple(samples),
        tokens=tokens.view(shape),
        labels=labels.view(shape),
        position_ids=position_ids.view(shape),
        sample_index=sample_index.view(shape),
        response_positions=torch.cat(response_positions),
        padded_lengths=lengths,
        **_concatenated(samples),
    )


def _concatenated(samples: Sequence[Sample]) -> dict[str, Any]:
    """Lengths, masks and values of the samples' response tokens, one sample after another."""
    lengths = [sample.response_length for sample in samples]
    terms = dict.fromkeys(name for sample in samples for name in (sample.term, *sample.masks))
    columns = {name: [getattr(s, name) for s in samples] for name in ("old_logprobs", "advantages", *OPTIONAL)}
    versions = [
        None if (v := s.weight_version) is None else torch.as_tensor(v).expand(len(s.loss_mask)) for s in samples
    ]
    return {
        "lengths": torch.tensor(lengths, dtype=torch.int64),
        "masks": {name: _joined([s.mask_of(name) for s in samples], lengths, torch.bool, False) for name in terms},
        "values": {
            name: _joined(column, lengths, torch.float64, torch.nan)
            for name, column in columns.items()
            if not samples or any(values is not None for values in column)
        },
        "versions": _joined(versions, lengths, torch.int64, -1) if any(v is not None for v in versions) else None,
    }


def _joined(parts: Sequence[Tensor | None], lengths: Sequence[int], dtype: torch.dtype, filling: float) -> Tensor:
    """[sum of R] the parts, one after another, with `filling` for those that are None."""
    gaps = (torch.full((length,), filling, dtype=dtype) for length in lengths)
    return torch.cat(
        [torch.zeros(0, dtype=dtype), *(gap if part is None else part for part, gap in zip(parts, gaps, strict=True))]
    )
