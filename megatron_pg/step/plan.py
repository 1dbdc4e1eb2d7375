"""The step plan: integer counts of the whole optimizer step, exchanged once, and a denominator per sample.

Everything later (kernel, context parallelism, pipeline, metrics) only reads the weights that come out of here. Every
rank sees the same table, so a mistake in it is found, and raised, on every rank.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import ContextRanks
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.streams import AS_POLICY
from megatron_pg.metrics.samples import SampleFacts
from megatron_pg.reducers import StepCounts, reducer_of
from megatron_pg.rollouts.fields import Id, plain
from megatron_pg.rollouts.printable import shorten
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.collectives import all_gather_rows, decode, encode
from megatron_pg.step.errors import StepPlanError, message_of
from megatron_pg.step.table import (
    KEPT,
    MODULUS,
    PROMPT,
    ROLLOUT,
    TRAINED,
    WIDTH,
    LocalTable,
    PlanRule,
    Share,
    count_positions,
    table_of_counts,
    whole_counts,
)
from megatron_pg.step.unique_ids import prompts_message, rollouts_message

SLOTS = 1024  # samples per rank that one exchange carries; a rank with more costs one further exchange
_MESSAGE = 512  # bytes of a rank's error that travel to the others
_INT32_MAX = 2**31 - 1


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
        local = table_of_counts(rule, group, whole_counts(tokens_per_sample), rollouts, prompts)
        if positions_per_sample is not None:
            local = replace(local, num_positions=count_positions(positions_per_sample, len(local.rows)))
    except Exception as failure:  # travels to the other ranks, so that all of them stop
        error = failure
    plan = plan_from_table(local, rule, error=error, group=group)
    if plan.warning is not None:
        warnings.warn(plan.warning, stacklevel=2)
    return plan


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
    # by the column itself: a stream over the objective's tokens is not counted again
    count = cache(partial(_count_units, whole, local.held, with_prompts=with_prompts, divisor=rule.divisor))
    trained = whole[:, TRAINED]
    kept = whole[:, KEPT] if rule.denominator == "kept" else trained
    of_streams, of_depths = whole[:, WIDTH:].tensor_split([rule.width - WIDTH - rule.depths], dim=1)
    union = of_streams[:, -1] if rule.own_tokens else trained
    _check_counted(union, trained, kept)
    counts, counted = count(trained, live_only=False), count(kept, live_only=rule.live_only)
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
        facts=SampleFacts.of(whole[:, 4:WIDTH], whole[:, ROLLOUT], whole[:, PROMPT] if with_prompts else None),
    )


def _plan_streams(
    rule: PlanRule, columns: Mapping[str, Tensor], count: Callable[..., StepCounts]
) -> dict[str, StreamPlan]:
    """Every stream by itself; over the objective's tokens its denominators count the units that the objective's count."""
    names = dict.fromkeys(stream.tokens for stream in rule.streams)
    counts = {name: count(columns[name], live_only=rule.live_only and name in rule.policy) for name in names}
    found = {}
    for stream in rule.streams:
        own, denominators = counts[stream.tokens], None
        if stream.aggregation != AS_POLICY:
            denominators = _denominators(replace(own, divisor=stream.divisor), stream.aggregation)
        found[stream.name] = StreamPlan(
            denominators=denominators,
            num_tokens=own.num_tokens,
            num_rollouts=count(columns[stream.tokens], live_only=False).num_rollouts,
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
        balance = sum(share.balance(rank) for share in local.shares) % MODULUS
        return cls(len(local.rows), int(error is not None), *has_ids, *totals, balance)


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


def _check_shares(heads: list[_Head], shares: Sequence[Share], group: ProcessGroup | None) -> None:
    """A micro-batch that is cut over several ranks is the same on all of them."""
    if sum(head.balance for head in heads) % MODULUS == 0:
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
        warning = rollouts_message(tables, ROLLOUT, samples, group)
    if warning is None and rule.needs_prompt_ids:
        warning = prompts_message(tables, PROMPT, samples, group)
    return warning


def _check_undivided(tables: list[Tensor], kinds: Sequence[str], name_of: Callable[[int, int], str]) -> None:
    """A step that is cut out of every rank's own stream would not hold the whole of a unit that two ranks share."""
    ranks = torch.repeat_interleave(torch.arange(len(tables)), torch.tensor([len(table) for table in tables]))
    for kind in kinds:
        column = ROLLOUT if kind == "rollout_id" else PROMPT
        if found := _divided(torch.cat(tables)[:, column], ranks):
            first, stray = found
            raise StepPlanError(
                f"{kind} {name_of(stray, column)} has samples on data-parallel ranks {int(ranks[first])} and {int(ranks[stray])}, so "
                "--docs-per-step could split it between steps. Give all its samples to one rank."
            )


def _check_groups(table: Tensor, name_of: Callable[[int, int], str]) -> None:
    """A rollout belongs to one prompt."""
    if found := _divided(table[:, ROLLOUT], table[:, PROMPT]):
        first, stray = found
        raise StepPlanError(
            f"rollout {name_of(stray, ROLLOUT)} belongs to prompt groups {name_of(first, PROMPT)} and {name_of(stray, PROMPT)}, so "
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
    num_rollouts, per_rollout = _totals(table[:, ROLLOUT], tokens, rollouts, live_only)
    num_prompts, per_prompt = _totals(table[:, PROMPT], tokens, prompts, live_only) if with_prompts else (None, None)
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
