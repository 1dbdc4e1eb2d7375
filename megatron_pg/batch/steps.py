"""Rollout batch or file → optimizer steps → micro-batches, with every sample in exactly one of them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

from megatron_pg.batch.context_ranks import ContextRanks, assign_rows
from megatron_pg.batch.pack import PackedBatch, pack
from megatron_pg.batch.zigzag import padded_length
from megatron_pg.rollouts.fields import Id
from megatron_pg.rollouts.file import read_rollouts
from megatron_pg.rollouts.lines import RolloutFileError
from megatron_pg.rollouts.printable import show_path
from megatron_pg.rollouts.sample import Sample


def cut_steps(samples: Sequence[Sample], *, samples_per_step: int) -> list[list[Sample]]:
    """Cut one rollout batch into optimizer steps, in order.

    Raises:
        ValueError: samples are left over, or a prompt group or rollout would lie in two steps, so that neither step
            could compute its denominator.
    """
    if samples_per_step < 1 or len(samples) % samples_per_step:
        raise ValueError(
            f"{len(samples)} samples do not fill steps of {samples_per_step}; none may be dropped. Choose a step size "
            "that divides the rollout batch."
        )
    steps = [list(samples[i : i + samples_per_step]) for i in range(0, len(samples), samples_per_step)]
    check_boundaries(steps)
    return steps


def read_steps(path: str | Path) -> list[list[Sample]]:
    """The optimizer steps of a rollout file, in the order of their `step`, read and checked whole.

    Raises:
        RolloutFileError: with file and line, if the file does not follow docs/rollout_file.md, or if a prompt group
            or rollout lies in two steps.
    """
    by_step: dict[int, list[Sample]] = {}
    for sample in read_rollouts(path):
        by_step.setdefault(cast(int, sample.step), []).append(sample)
    numbers = sorted(by_step)
    try:
        check_boundaries([by_step[number] for number in numbers], numbers)
    except ValueError as error:
        raise RolloutFileError(f"{show_path(path)}: {error}") from error
    return [by_step[number] for number in numbers]


def check_boundaries(steps: Sequence[Sequence[Any]], numbers: Sequence[int] | None = None) -> None:
    """Raise ValueError if a prompt group or a rollout lies in two steps; `numbers` are the steps' names."""
    for kind, noun in (("prompt_id", "prompt group"), ("rollout_id", "rollout")):
        seen: dict[Id, int] = {}
        for number, step in zip(numbers or range(len(steps)), steps, strict=True):
            for unit in {getattr(sample, kind) for sample in step} - {None}:
                if seen.setdefault(unit, number) != number:
                    raise ValueError(
                        f"{noun} {unit!r} has samples in steps {seen[unit]} and {number}; a group must lie in one "
                        "optimizer step. Sort the samples by prompt, or choose another step size."
                    )


def cut_microbatches(
    samples: Sequence[Sample],
    *,
    num_microbatches: int,
    qkv_format: str,
    data_parallel_rank: int = 0,
    data_parallel_size: int = 1,
    rows: int | None = None,
    max_seq_len: int | None = None,
    cp_size: int = 1,
    multiple_of: int = 1,
) -> list[PackedBatch]:
    """This data-parallel rank's K micro-batches of one optimizer step.

    The partition depends on the arguments alone, so tensor-, context- and pipeline-parallel peers get the same one.
    Over all ranks every sample lies in exactly one micro-batch. Loss and gradient do not depend on the partition.

    bshd: rank r takes samples r, r + D, r + 2D, …, `rows` per micro-batch; the last ones may have empty rows. thd: the
    longest document first, each into the row with the fewest tokens.

    Args:
        samples: the whole step, the same on every rank; with the default rank and size, this rank's own samples.
        num_microbatches: K, Megatron's `get_num_microbatches()`.
        qkv_format: "thd" (packed) or "bshd" (padded).
        data_parallel_rank: r, of Megatron's pure data-parallel group.
        data_parallel_size: D, the size of that group.
        rows: rows of a bshd micro-batch, `--micro-batch-size`; not for thd.
        max_seq_len: width of a row, `--seq-length`; optional for thd with one pipeline stage.
        cp_size: context-parallel size.
        multiple_of: of the row's length, for thd (sequence parallelism: TP · C).

    Raises:
        ValueError: the samples don't fit into the micro-batches: none is dropped.
    """
    if num_microbatches < 1 or not 0 <= data_parallel_rank < data_parallel_size:
        raise ValueError(
            f"num_microbatches={num_microbatches}, data_parallel_rank={data_parallel_rank}, "
            f"data_parallel_size={data_parallel_size} do not select the micro-batches of a rank. Give K ≥ 1 and a "
            "rank below the size."
        )
    laid_out = partial(
        pack, qkv_format=qkv_format, cp_size=cp_size, max_seq_len=max_seq_len, rows=rows, multiple_of=multiple_of
    )
    if qkv_format == "thd":
        parts = _even_rows(samples, num_microbatches * data_parallel_size, cp_size)[
            data_parallel_rank::data_parallel_size
        ]
        return [laid_out(part) for part in parts]
    if rows is None:
        raise ValueError("bshd needs rows, so that every micro-batch has the same shape. Pass --micro-batch-size.")
    if len(samples) > (places := rows * num_microbatches * data_parallel_size):
        raise ValueError(
            f"{len(samples)} samples for {num_microbatches} micro-batches of {rows} rows on {data_parallel_size} "
            f"data-parallel ranks: {len(samples) - places} have no row, and none may be dropped. Raise "
            "--global-batch-size, or cut smaller steps."
        )
    mine = samples[data_parallel_rank::data_parallel_size]
    return [laid_out(mine[k * rows : (k + 1) * rows]) for k in range(num_microbatches)]


def cut_over_ranks(
    samples: Sequence[Sample],
    *,
    num_microbatches: int,
    rank: int,
    num_ranks: int,
    max_tokens: int,
    attention_length: float,
    multiple_of: int = 1,
) -> list[PackedBatch]:
    """This rank's K packed micro-batches of one optimizer step, each with its own ranks (`dynamic_cp`).

    Long documents lie on many ranks and short ones on one, which balances the time of the ranks. The partition depends
    on the arguments alone and takes about a second for 4,096 documents on 128 ranks; loss and gradient do not depend on
    it.

    Args:
        samples: the whole step, the same on every rank.
        num_microbatches: K, Megatron's `get_num_microbatches()`.
        rank: of `parallel_state.get_data_parallel_group(with_context_parallel=True)`.
        num_ranks: D · C, the size of that group.
        max_tokens: most tokens of a micro-batch on a rank, padding included.
        attention_length: tokens of a document whose attention costs as much as all other layers, for instance 12 times
            the hidden size; the same on every rank.
        multiple_of: of a rank's part of a row (sequence parallelism: TP).

    Raises:
        ValueError: the samples don't fit into the micro-batches: none is dropped.
    """
    if min(num_microbatches, max_tokens) < 1 or not 0 <= rank < num_ranks or not attention_length > 0:
        raise ValueError(
            f"num_microbatches={num_microbatches}, max_tokens={max_tokens}, rank={rank} of num_ranks={num_ranks}, "
            f"attention_length={attention_length} do not select the micro-batches of a rank. Give positive numbers "
            "and a rank below num_ranks."
        )
    rows = assign_rows(
        [len(sample.tokens) for sample in samples],
        num_ranks=num_ranks,
        num_microbatches=num_microbatches,
        max_tokens=max_tokens,
        attention_length=attention_length,
    )
    mine = {row.microbatch: ([samples[i] for i in row.documents], row.ranks) for row in rows if rank in row.ranks}
    places = [mine.get(k, ([], ContextRanks(rank, 1))) for k in range(num_microbatches)]
    return [
        pack(part, qkv_format="thd", multiple_of=multiple_of * ranks.size, cp_ranks=ranks) for part, ranks in places
    ]


def _even_rows(samples: Sequence[Sample], count: int, cp_size: int) -> list[list[Sample]]:
    """The samples in `count` rows of nearly equal numbers of tokens."""
    rows: list[list[Sample]] = [[] for _ in range(count)]
    lengths = [0] * count
    for sample in sorted(samples, key=lambda sample: -len(sample.tokens)):  # stable: equal on every rank
        row = min(range(count), key=lengths.__getitem__)
        rows[row].append(sample)
        lengths[row] += padded_length(len(sample.tokens), cp_size)
    return rows
