"""The step plan: integer counts of the whole optimizer step, exchanged once, and a denominator per sample.

Everything later (kernel, context parallelism, pipeline, metrics) only reads the weights that come out of here. Every
rank sees the same table, so a mistake in it is found, and raised, on every rank.
"""

import hashlib
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import ContextRanks, PackedBatch
from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.streams import AS_POLICY, Stream
from megatron_pg.metrics.samples import COLUMNS, SampleFacts, encode_facts
from megatron_pg.reducers import StepCounts, reducer_of
from megatron_pg.rollouts.fields import POLICY, Id, plain
from megatron_pg.rollouts.printable import shorten
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.collectives import all_gather_rows, decode, encode
from megatron_pg.step.errors import StepPlanError, message_of
from megatron_pg.step.unique_ids import prompts_message, rollouts_message

SLOTS = 1024  # samples per rank that one exchange carries; a rank with more costs one further exchange
_MESSAGE = 512  # bytes of a rank's error that travel to the others
_MODULUS = 2**61  # of sums of digests, which integers of 64 bits hold
_INT32_MAX = 2**31 - 1
_TRAINED, _ROLLOUT, _PROMPT, _KEPT = range(4)  # columns of a table
_WIDTH = 4 + COLUMNS  # of a row of the table, but for the depths of multi-token prediction


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StreamPlan:
    """What a stream counts of one optimizer step, of its own tokens alone."""

    denominators: Tensor | None  # [S] float64, > 0, inf where the unit is not counted; None: those of the objective
    num_tokens: int
    num_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Totals of one optimizer step, and the denominators of this rank's samples: rollouts, prompts and T are the objective's."""

    aggregation: str
    divisor: float | None
    denominators: Tensor  # [S] float64, > 0, inf where the unit is not counted; S samples of this process
    num_samples: int
    num_rollouts: int  # N_r
    num_prompts: int | None  # P; None without prompt ids
    num_tokens: int  # T, that the objective trains
    num_trained: int  # that the objective or a stream trains
    num_response_tokens: int  # trained or not
    num_positions: int  # R, prompt, response and padding
    num_microbatches: int  # K, the same on every rank
    facts: SampleFacts  # rewards and lengths of all samples
    streams: Mapping[str, StreamPlan] = field(default_factory=dict)  # by name
    depth_denominators: tuple[Tensor, ...] = ()  # [S] float64, of each depth of multi-token prediction
    depth_counts: tuple[int, ...] = ()  # n_d, trained tokens that a depth can predict
    warning: str | None = None  # about ids that may not be unique over the step


def plan_step(
    tokens_per_sample: Sequence[int] | Tensor,
    *,
    aggregation: str,
    divisor: float | None = None,
    rollout_ids: Sequence[Id] | Tensor | None = None,
    prompt_ids: Sequence[Id] | Tensor | None = None,
    positions_per_sample: Sequence[int] | Tensor | None = None,
    group: ProcessGroup | None = None,
) -> StepPlan:
    """Denominators of one optimizer step, from integer metadata, by one all-gather (two above 1024 samples on a rank).

        objective = sum over tokens of mask / d_sample(t) * loss_t

    Args:
        tokens_per_sample: [S] trained tokens of each sample of this process in the whole step, all micro-batches.
        aggregation: sample_mean, prompt_mean, token_mean or constant. The same on every rank.
        divisor: L of `constant`, in tokens. The same on every rank.
        rollout_ids: [S] the trajectory of each sample, unique over all ranks of the step: strings, integers, or a tensor or
            array of integers; without it every sample is its own rollout.
        prompt_ids: [S] the prompt group of each sample, unique over all ranks; needed by prompt_mean.
        positions_per_sample: [S] positions that the model processes for each sample; default its trained tokens.
        group: Megatron's pure data-parallel group, every rank of which must call; None counts this process alone.
            Context-, tensor- and pipeline-parallel peers hold copies and are never summed.

    Raises:
        StepPlanError: on every rank of `group`, for a mistake on any of them.
    """
    error, local, rule = None, None, PlanRule(aggregation=aggregation, divisor=divisor)
    try:
        rollouts, prompts = (None if ids is None else [plain(i) for i in ids] for ids in (rollout_ids, prompt_ids))
        local = _local_table(rule, group, _counts(tokens_per_sample), rollouts, prompts)
        if positions_per_sample is not None:
            local = replace(local, num_positions=_count_positions(positions_per_sample, len(local.rows)))
    except Exception as failure:  # travels to the other ranks, so that all of them stop
        error = failure
    plan = plan_from_table(local, rule, error=error, group=group)
    if plan.warning is not None:
        warnings.warn(plan.warning, stacklevel=2)
    return plan


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """What a step is planned for. The same on every rank."""

    aggregation: str
    divisor: float | None = None  # L
    denominator: str = "scheduled"  # what denominators count; streams count trained tokens under `kept` too
    policy: tuple[str, ...] = (POLICY,)  # the stream whose tokens the objective trains; empty: there is no objective
    streams: tuple[Stream, ...] = ()
    undivided: tuple[str, ...] = ()  # kinds of units ("rollout_id", "prompt_id") that may not lie on two ranks
    numbers_may_repeat: bool = True  # a rank may have numbered its samples anew; False: one process has numbered all
    depths: int = 0  # of multi-token prediction
    depth_aggregation: str = STEP_MEANS[True]  # of its cross-entropies

    @property
    def live_only(self) -> bool:
        """Whether units without a counted token are left out of the denominators."""
        return self.denominator != "scheduled"

    @property
    def own_tokens(self) -> tuple[str, ...]:
        """The streams whose tokens are not the objective's."""
        return tuple(dict.fromkeys(stream.tokens for stream in self.streams if stream.tokens not in self.policy))

    @property
    def width(self) -> int:
        """Columns of the table."""
        return _WIDTH + (len(self.own_tokens) + 1 if self.own_tokens else 0) + self.depths

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether a denominator counts prompt groups."""
        further = [stream.aggregation for stream in self.streams if stream.aggregation != AS_POLICY]
        return any(map(needs_prompt_ids, [self.aggregation, *further, *[self.depth_aggregation] * (self.depths > 0)]))


class _Share(NamedTuple):
    """What a rank has of a micro-batch that is cut over ranks of its own."""

    first: int  # of the ranks, which brings the samples
    size: int
    digest: int  # of the whole micro-batch and its place in the step

    def balance(self, rank: int) -> int:
        """What adds up to 0 over the ranks where all have the same."""
        return self.digest * (self.size - 1 if rank == self.first else -1)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTable:
    """This rank's part of the exchange: one row per sample.

    Its columns are the objective's trained tokens, rollout key, prompt key, kept tokens, facts; where streams have tokens of their
    own, those of each and of all together; n_d of each depth of multi-token prediction. A count is -1 where the sample is not of the
    stream: 0 tokens are counted as a unit.
    """

    rows: Tensor  # [S, width] int64
    has_rollout_ids: bool
    has_prompt_ids: bool
    num_positions: int
    num_response_tokens: int
    held: Tensor  # [n, 2] int64, rollout and prompt keys of all samples here, brought by another rank or by this one
    num_microbatches: int = 1
    ids: dict[int, Sequence[Id] | None] = field(default_factory=dict)  # by column: what the keys stand for
    samples: Sequence[Sample] | None = None  # None: nothing is known but what is in the rows
    shares: tuple[_Share, ...] = ()  # of the micro-batches that are cut over ranks of their own


def _local_table(
    rule: PlanRule,
    group: ProcessGroup | None,
    counts: Tensor,
    rollout_ids: Sequence[Id] | None,
    prompt_ids: Sequence[Id] | None,
    kept: Tensor | None = None,
    further: Tensor | None = None,
    own: Tensor | None = None,
) -> LocalTable:
    """`further`: [S, ...] int64, the columns behind kept tokens; `own`: [S] int64, keys of samples without a rollout."""
    _check_aggregation(rule.aggregation, rule.divisor)
    size, total = len(counts), int(counts.clamp(min=0).sum())
    if rule.needs_prompt_ids:
        missing = [i for i in range(size) if prompt_ids is None or (i < len(prompt_ids) and prompt_ids[i] is None)]
        if missing:
            raise ValueError(f"prompt_mean needs prompt_ids for every sample; sample {missing[0]} has none")
    rank = torch.distributed.get_rank(group) if group is not None else 0
    own = torch.arange(size) + (rank << 32) if own is None else own  # without ids every sample is a rollout of its own
    rollouts = own if rollout_ids is None else _keys("rollout_ids", rollout_ids, size)
    prompts = torch.zeros(size, dtype=torch.int64) if prompt_ids is None else _keys("prompt_ids", prompt_ids, size)
    further = torch.zeros(size, COLUMNS, dtype=torch.int64) if further is None else further
    counted = torch.stack([counts, rollouts, prompts, counts if kept is None else kept], dim=1)
    rows = torch.cat([counted, further], dim=1)
    ids = {_ROLLOUT: rollout_ids, _PROMPT: prompt_ids}
    held = rows[:, [_ROLLOUT, _PROMPT]]
    return LocalTable(rows, rollout_ids is not None, prompt_ids is not None, total, total, held, ids=ids)


def _count_positions(positions_per_sample: Sequence[int] | Tensor, size: int) -> int:
    if len(positions_per_sample) != size:
        raise ValueError(
            f"positions_per_sample has {len(positions_per_sample)} entries for {size} samples, so positions cannot be "
            "counted. Give one each."
        )
    return int(_counts(positions_per_sample).sum())


def local_table_of(
    batches: Sequence[PackedBatch],
    rule: PlanRule,
    group: ProcessGroup | None,
    kept_per_sample: Sequence[int] | None = None,
) -> LocalTable:
    """The table of this rank's micro-batches; `kept_per_sample`: the objective's tokens that no correction rejects.

    A micro-batch that is cut over ranks of its own is counted by the first of them.
    """
    samples = [sample for batch in batches for sample in batch.samples]
    prompt_ids = _all_or_none("prompt_id", samples)
    if rule.needs_prompt_ids and prompt_ids is None:
        prompt_ids = [sample.prompt_id for sample in samples]  # names the sample that has none
    rollout_ids, counts = _all_or_none("rollout_id", samples), _tokens_of(batches, rule.policy)
    rank = torch.distributed.get_rank(group) if group is not None else 0
    firsts = [rank if batch.cp_ranks is None else batch.cp_ranks.first for batch in batches]
    own = [(f << 44) + (k << 22) + i for k, f in enumerate(firsts) for i in range(len(batches[k].samples))]
    kept = counts if kept_per_sample is None else torch.tensor(kept_per_sample, dtype=torch.int64)
    further, keys = _further_columns(batches, samples, rule, counts >= 0), torch.tensor(own, dtype=torch.int64)
    table = _local_table(rule, group, counts, rollout_ids, prompt_ids, kept, further, keys)
    brought = [batch for batch, first in zip(batches, firsts, strict=True) if first == rank]
    mine = [i for i, key in enumerate(own) if key >> 44 == rank]
    return replace(
        table,
        rows=table.rows[mine],
        ids={column: ids and [ids[i] for i in mine] for column, ids in table.ids.items()},
        num_positions=sum(batch.num_positions for batch in brought),
        num_response_tokens=sum(samples[i].response_length for i in mine),
        num_microbatches=len(batches),
        samples=[samples[i] for i in mine],
        shares=tuple(_share_of(k, batch) for k, batch in enumerate(batches) if batch.cp_ranks is not None),
    )


def _tokens_of(batches: Sequence[PackedBatch], streams: Sequence[str]) -> Tensor:
    return torch.tensor([n for batch in batches for n in batch.tokens_of(*streams)], dtype=torch.int64)


def _further_columns(
    batches: Sequence[PackedBatch], samples: Sequence[Sample], rule: PlanRule, is_policys: Tensor
) -> Tensor:
    """[S, ...] int64: facts of the objective's samples, tokens of streams, tokens at depths."""
    streams = (*rule.policy, *rule.own_tokens)
    columns = [_tokens_of(batches, (stream,)) for stream in rule.own_tokens]
    columns += [_tokens_of(batches, streams)] if columns else []
    for depth in range(1, rule.depths + 1):
        counted = [n for batch in batches for n in batch.trained_at(depth, *streams)]
        columns.append(torch.tensor(counted, dtype=torch.int64))
    return torch.cat([encode_facts(samples) * is_policys[:, None], *(column[:, None] for column in columns)], dim=1)


def _share_of(k: int, batch: PackedBatch) -> _Share:
    digest = hashlib.blake2b(k.to_bytes(8, "big") + batch.digest, digest_size=6).digest()
    return _Share(batch.cp_ranks.first, batch.cp_ranks.size, int.from_bytes(digest, "big"))


def plan_from_table(
    local: LocalTable | None, rule: PlanRule, *, error: Exception | None, group: ProcessGroup | None
) -> StepPlan:
    """Exchange the ranks' tables and plan; `local` is None where this rank failed with `error`.

    The plan's totals count all rollouts and trained tokens, whatever its denominators count.
    """
    none = torch.zeros(0, rule.width, dtype=torch.int64)
    local = LocalTable(none, False, False, 0, 0, none[:, :2]) if local is None else local
    rank = torch.distributed.get_rank(group) if group is not None else 0
    try:
        heads, tables = _exchange(local.rows, _Head.of(local, error, rank), error, group)
    except StepPlanError as failure:
        raise failure from error
    _check_agreement(heads)
    _check_shares(heads, local.shares, group)
    name_of = partial(_name_of, tables, local.ids, group)
    _check_undivided(tables, rule.undivided, name_of)
    if any(head.has_prompt_ids == 1 for head in heads):
        _check_groups(torch.cat(tables), name_of)
    warning = _check_unique(tables, heads, rule, local.samples, group)
    whole, with_prompts = torch.cat(tables), any(h.has_prompt_ids == 1 for h in heads)
    count = partial(_count_units, whole, local.held, with_prompts=with_prompts, divisor=rule.divisor)
    trained, kept = whole[:, _TRAINED], whole[:, _KEPT if rule.denominator == "kept" else _TRAINED]
    of_streams, of_depths = whole[:, _WIDTH:].tensor_split([rule.width - _WIDTH - rule.depths], dim=1)
    union = of_streams[:, -1] if rule.own_tokens else trained
    _check_counted(union, trained, kept)
    counts, counted = count(trained), count(kept, live_only=rule.live_only)
    depths = [count(tokens, live_only=rule.live_only) for tokens in of_depths.unbind(dim=1)]
    columns = dict.fromkeys(rule.policy, trained) | dict(zip(rule.own_tokens, of_streams.unbind(dim=1), strict=False))
    return StepPlan(
        aggregation=rule.aggregation,
        divisor=rule.divisor,
        denominators=_denominators(counted, rule.aggregation),
        streams=_plan_streams(rule, columns, count),
        depth_denominators=tuple(_denominators(depth, rule.depth_aggregation) for depth in depths),
        depth_counts=tuple(depth.num_tokens for depth in depths),
        num_samples=sum(h.num_samples for h in heads),
        num_rollouts=counts.num_rollouts,
        num_prompts=counts.num_prompts,
        num_tokens=counts.num_tokens,
        num_trained=int(union.clamp(min=0).sum()),
        num_response_tokens=sum(h.num_response_tokens for h in heads),
        num_positions=sum(h.num_positions for h in heads),
        num_microbatches=local.num_microbatches,
        warning=warning,
        facts=SampleFacts.of(whole[:, 4:_WIDTH], whole[:, _ROLLOUT], whole[:, _PROMPT] if with_prompts else None),
    )


def _plan_streams(
    rule: PlanRule, columns: Mapping[str, Tensor], count: Callable[..., StepCounts]
) -> dict[str, StreamPlan]:
    """Every stream by itself; over the objective's tokens its denominators count the units that the objective's count."""
    names = dict.fromkeys(stream.tokens for stream in rule.streams)
    counts = {name: count(columns[name], live_only=rule.live_only and name in rule.policy) for name in names}
    totals = {name: count(columns[name]) for name in names}
    found = {}
    for stream in rule.streams:
        own, denominators = counts[stream.tokens], None
        if stream.aggregation != AS_POLICY:
            denominators = _denominators(replace(own, divisor=stream.divisor), stream.aggregation)
        found[stream.name] = StreamPlan(
            denominators=denominators, num_tokens=own.num_tokens, num_rollouts=totals[stream.tokens].num_rollouts
        )
    return found


class _Head(NamedTuple):
    """What every rank sends beside its table."""

    num_samples: int
    failed: int
    has_rollout_ids: int  # 1 or 0; -1 without samples
    has_prompt_ids: int
    num_positions: int
    num_microbatches: int
    num_response_tokens: int
    balance: int  # of its shares; 0 over all ranks

    @classmethod
    def of(cls, local: LocalTable, error: Exception | None, rank: int) -> "_Head":
        has_ids = (int(local.has_rollout_ids), int(local.has_prompt_ids)) if len(local.rows) else (-1, -1)
        totals = local.num_positions, local.num_microbatches, local.num_response_tokens
        balance = sum(share.balance(rank) for share in local.shares) % _MODULUS
        return cls(len(local.rows), int(error is not None), *has_ids, *totals, balance)


def _all_or_none(name: str, samples: Sequence) -> list[Id] | None:
    ids = [getattr(sample, name) for sample in samples]
    missing = [i for i, value in enumerate(ids) if value is None]
    if missing and len(missing) < len(ids):
        raise ValueError(
            f"sample {samples[missing[0]].sample_id} has no {name} while others of the step have one, so units cannot be "
            "counted. Give it to every sample or to none."
        )
    return None if missing or not ids else ids


def _check_aggregation(aggregation: str, divisor: float | None) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}, so no weight is defined. Choose one."
        )
    takes_divisor = AGGREGATIONS[aggregation].takes_divisor
    if takes_divisor and not (divisor is not None and 0 < divisor < float("inf")):
        raise ValueError(
            f"divisor={divisor} of {aggregation} must be finite and > 0. Set it to a length, for instance 4096."
        )
    if not takes_divisor and divisor is not None:
        raise ValueError(f"divisor={divisor} has no effect with {aggregation}; remove it or choose constant.")


def needs_prompt_ids(aggregation: str) -> bool:
    """Whether its denominators count prompt groups."""
    return AGGREGATIONS[aggregation].unit == "prompt"


def _counts(tokens_per_sample: Sequence[int] | Tensor) -> Tensor:
    try:
        counts = torch.as_tensor(tokens_per_sample)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(
            f"tokens_per_sample={shorten(tokens_per_sample)} are no counts, so totals are unknown. Give whole numbers of trained tokens."
        ) from error
    if counts.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if counts.dtype.is_floating_point or counts.dtype == torch.bool or counts.dim() != 1:
        raise ValueError(
            f"tokens_per_sample has dtype {counts.dtype} and shape {tuple(counts.shape)}, not [S] integers: counts are exact. "
            "Give whole numbers of trained tokens."
        )
    if (counts < 0).any():
        i = int((counts < 0).nonzero()[0])
        raise ValueError(
            f"tokens_per_sample[{i}]={int(counts[i])} is negative, so the totals would be wrong. Count from 0."
        )
    return counts.to(torch.int64).cpu()


def _keys(name: str, ids: Sequence[Id], size: int) -> Tensor:
    """Integers stay themselves; strings become 63-bit hashes (a collision: 1 in 10^10 for 30,000 ids)."""
    if len(ids) != size:
        raise ValueError(
            f"{name} has {len(ids)} entries for {size} samples, so units cannot be counted. Give one each."
        )
    for i, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{name}[{i}]={value!r} is neither an integer nor a string. Give every sample an id.")
        if isinstance(value, int) and abs(value) >= 2**62:
            raise ValueError(f"{name}[{i}]={value} does not fit into 62 bits. Use a smaller integer or a string.")
    keys = [value if isinstance(value, int) else -(2**62) - (_hash(value) >> 2) for value in ids]
    return torch.tensor(keys, dtype=torch.int64)


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")


def _exchange(
    rows: Tensor, head: _Head, error: Exception | None, group: ProcessGroup | None
) -> tuple[list[_Head], list[Tensor]]:
    """All ranks' heads and tables, in rank order; raises on every rank where one rank reports an error."""
    message = encode("" if error is None else message_of(error), _MESSAGE).view(torch.int64)
    row = torch.cat([torch.tensor(head, dtype=torch.int64), message, _fill(rows, SLOTS)])
    gathered = _all_gather(row, group, error)
    integers, messages, bodies = gathered.tensor_split([len(head), len(head) + len(message)], dim=1)
    heads = [_Head(*values) for values in integers.tolist()]
    if failed := [rank for rank, other in enumerate(heads) if other.failed]:
        texts = [decode(messages[rank]) for rank in failed]
        if len(failed) == len(heads) and len(set(texts)) == 1:  # every rank's own
            raise StepPlanError(texts[0])
        raise StepPlanError(f"data-parallel rank {failed[0]}: {texts[0]}")
    largest = max(other.num_samples for other in heads)
    if largest > SLOTS:
        bodies = _all_gather(_fill(rows, largest), group)
    width = rows.shape[1]
    tables = [b[: width * other.num_samples].view(-1, width) for b, other in zip(bodies, heads, strict=True)]
    return heads, tables


def _fill(rows: Tensor, slots: int) -> Tensor:
    return torch.nn.functional.pad(rows.reshape(-1), (0, rows.shape[1] * slots - rows.numel()))  # or cut


def _all_gather(values: Tensor, group: ProcessGroup | None, error: Exception | None = None) -> Tensor:
    return values[None] if group is None else all_gather_rows(values, group, error=error)


def _name_of(
    tables: list[Tensor], ids: dict[int, Sequence[Id] | None], group: ProcessGroup | None, row: int, column: int
) -> str:
    """The id of a row of all tables, from the rank that has it: a collective, which every rank reaches with its error."""
    ends = torch.tensor([len(table) for table in tables]).cumsum(0)
    owner = int(torch.searchsorted(ends, row, right=True))
    rank = torch.distributed.get_rank(group) if group is not None else 0
    mine = shorten(ids[column][row - int(ends[owner]) + len(tables[owner])]) if rank == owner else ""
    return decode(_all_gather(encode(mine, _MESSAGE), group)[owner])


def _check_agreement(heads: list[_Head]) -> None:
    for name in ("rollout_ids", "prompt_ids"):
        found = [getattr(head, f"has_{name}") for head in heads]
        if 1 in found and 0 in found:
            raise StepPlanError(
                f"data-parallel rank {found.index(1)} has {name} and rank {found.index(0)} has none, so units cannot be counted. "
                "Give them on every rank or on none."
            )
    for rank, head in enumerate(heads):
        if head.num_microbatches != heads[0].num_microbatches:
            raise StepPlanError(
                f"rank 0 has {heads[0].num_microbatches} micro-batches, rank {rank} has {head.num_microbatches}; Megatron's schedule "
                "needs the same number everywhere. Fill up with empty micro-batches."
            )


def _check_shares(heads: list[_Head], shares: Sequence[_Share], group: ProcessGroup | None) -> None:
    """A micro-batch that is cut over several ranks is the same on all of them."""
    if sum(head.balance for head in heads) % _MODULUS == 0:
        return
    gathered = _all_gather(torch.tensor(shares, dtype=torch.int64).view(-1, 3), group).tolist()
    for k, of_ranks in enumerate(zip(*gathered, strict=True)):
        for rank, share in enumerate(of_ranks):
            run = ContextRanks(*share[:2])
            if strays := [other for other in run if of_ranks[other] != share]:
                raise StepPlanError(
                    f"micro-batch {k} of rank {rank} is cut over {run}, and rank {strays[0]} has another one there, so they would wait for "
                    "each other. Give every rank of a run the same samples at the same place, as cut_over_ranks does."
                )


def _check_unique(
    tables: list[Tensor],
    heads: list[_Head],
    rule: PlanRule,
    samples: Sequence[Sample] | None,
    group: ProcessGroup | None,
) -> str | None:
    """Refuse ids that every rank numbers anew; a warning where that cannot be told."""
    if len(tables) == 1 or not rule.numbers_may_repeat:
        return None
    warning = None
    if any(head.has_rollout_ids == 1 for head in heads):
        warning = rollouts_message(tables, _ROLLOUT, samples, group)
    if warning is None and rule.needs_prompt_ids:
        warning = prompts_message(tables, _PROMPT, samples, group)
    return warning


def _check_undivided(tables: list[Tensor], kinds: Sequence[str], name_of: Callable[[int, int], str]) -> None:
    """A step that is cut out of every rank's own stream would not hold the whole of a unit that two ranks share."""
    ranks = torch.repeat_interleave(torch.arange(len(tables)), torch.tensor([len(table) for table in tables]))
    for kind in kinds:
        column = _ROLLOUT if kind == "rollout_id" else _PROMPT
        if found := _divided(torch.cat(tables)[:, column], ranks):
            first, stray = found
            raise StepPlanError(
                f"{kind} {name_of(stray, column)} has samples on data-parallel ranks {int(ranks[first])} and {int(ranks[stray])}, so "
                "--docs-per-step could split it between steps. Give all its samples to one rank."
            )


def _check_groups(table: Tensor, name_of: Callable[[int, int], str]) -> None:
    """A rollout belongs to one prompt."""
    if found := _divided(table[:, _ROLLOUT], table[:, _PROMPT]):
        first, stray = found
        raise StepPlanError(
            f"rollout {name_of(stray, _ROLLOUT)} belongs to prompt groups {name_of(first, _PROMPT)} and {name_of(stray, _PROMPT)}, so "
            "its tokens would count twice. Give all samples of a rollout one prompt_id."
        )


def _divided(units: Tensor, parts: Tensor) -> tuple[int, int] | None:
    """Two entries of one unit that lie in different parts: the unit's first, and the first that strays from one."""
    _, inverse = torch.unique(units, return_inverse=True)
    indices = torch.arange(len(units))
    first = torch.full_like(indices, len(units)).scatter_reduce(0, inverse, indices, "amin")[inverse]
    stray = (parts != parts[first]).nonzero()
    return (int(first[stray[0, 0]]), int(stray[0, 0])) if len(stray) else None


def _check_counted(union: Tensor, trained: Tensor, kept: Tensor) -> None:
    if not int(union.clamp(min=0).sum()):
        raise StepPlanError(
            "the step has no trained token, so nothing can be learned from it. Leave fully masked samples out of the data, or take "
            "more samples per step."
        )
    if int(trained.clamp(min=0).sum()) and not int(kept.clamp(min=0).sum()):
        raise StepPlanError(
            "--pg-correction rejects every trained token of the step, so --pg-denominator kept counts nothing. Widen its bounds."
        )


def _count_units(
    table: Tensor, held: Tensor, tokens: Tensor, *, with_prompts: bool, divisor: float | None, live_only: bool = False
) -> StepCounts:
    """Over the samples with tokens >= 0; `held`: keys of the samples for which units' tokens are asked, 0 where there is no such unit."""
    rollouts, prompts = held.t().contiguous()
    table, tokens = table[tokens >= 0], tokens[tokens >= 0]
    num_rollouts, per_rollout = _totals(table[:, _ROLLOUT], tokens, rollouts, live_only)
    num_prompts, per_prompt = _totals(table[:, _PROMPT], tokens, prompts, live_only) if with_prompts else (None, None)
    return StepCounts(
        tokens_per_rollout=per_rollout,
        tokens_per_prompt=per_prompt,
        num_rollouts=num_rollouts,
        num_prompts=num_prompts,
        num_tokens=int(tokens.sum()),
        divisor=divisor,
        live_only=live_only,
    )


def _totals(keys: Tensor, tokens: Tensor, held: Tensor, live_only: bool) -> tuple[int, Tensor]:
    """Number of distinct units (`live_only`: with a counted token), and the tokens of the units that are held here."""
    units, inverse = torch.unique(keys, return_inverse=True)
    totals = torch.zeros(len(units), dtype=torch.int64).index_add_(0, inverse, tokens)
    number = int((totals > 0).sum()) if live_only else len(units)
    if not len(units):
        return 0, torch.zeros_like(held)
    place = torch.searchsorted(units, held).clamp(max=len(units) - 1)
    return number, torch.where(units[place] == held, totals[place], 0)


def _denominators(counts: StepCounts, aggregation: str) -> Tensor:
    """One per sample; infinite for a unit that is not counted although it has trained tokens, and where nothing is."""
    if not counts.num_tokens:
        return torch.full_like(counts.tokens_per_rollout, torch.inf, dtype=torch.float64)
    denominators = reducer_of(aggregation)(counts)
    tokens = {"rollout": counts.tokens_per_rollout, "prompt": counts.tokens_per_prompt}.get(
        AGGREGATIONS[aggregation].unit
    )
    if not counts.live_only or tokens is None:
        return denominators
    return torch.where(tokens > 0, denominators, torch.inf)


def check_count(count: int) -> None:
    """Refuse positions that Megatron's int32 accumulator cannot hold (a mixture of experts under the per-token contract)."""
    if count > _INT32_MAX:
        raise StepPlanError(
            f"{count} positions in one step exceed Megatron's int32 counter, to which the router's losses bind us. Take fewer per step."
        )
