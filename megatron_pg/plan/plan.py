"""The step plan: integer counts of the whole optimizer step, exchanged once, and a denominator per sample.

All later parts (kernels, context parallelism, pipeline, metrics) only read weights that are made from it. Every rank
receives the same counts and strays, so an error is raised on every rank.
"""

import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.args import disagreement
from megatron_pg.batch import ContextRanks
from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.declarations.loss_terms import AS_POLICY
from megatron_pg.plan.collectives import gathered, gathered_texts, rank_of
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.exchange import KINDS, MIXED, Head, Stray, WholeStep, exchange, gather_environments, gather_heads
from megatron_pg.plan.facts import SampleFacts
from megatron_pg.plan.table import (
    PROMPT,
    ROLLOUT,
    TRAINED,
    LocalTable,
    PlanRule,
    SelectionFacts,
    Share,
    check_one_each,
    table_of,
    whole_counts,
)
from megatron_pg.plan.unique_ids import prompts_message, rollouts_message
from megatron_pg.reducers.base import StepCounts
from megatron_pg.rollouts.fields import Id, plain
from megatron_pg.rollouts.printable import shorten

_INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TermPlan:
    """The counts of a loss term's own tokens in one optimizer step."""

    denominators: Tensor | None  # [S] float64, > 0, inf where the unit is not counted; None: the objective's
    num_tokens: int
    num_rollouts: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepPlan:
    """Totals of one optimizer step (rollouts, prompts, T of the objective), and denominators of this rank's samples."""

    aggregation: str
    divisor: float | None
    denominators: Tensor  # [S] float64, > 0, inf where the unit is not counted; N_turn under turn_mean
    num_samples: int
    num_rollouts: int  # N_r
    num_prompts: int | None  # P; None without prompt ids
    num_turns: int | None = None  # with a token that the objective trains; None where nothing reads it
    num_tokens: int  # T, trained by the objective
    num_trained: int  # trained by the objective or a loss term
    num_response_tokens: int  # trained or not
    num_positions: int  # R, prompt, response and padding
    num_microbatches: int  # K, the same on every rank; 0 in an open step, whose ranks may have different numbers
    number: float  # N: the rollouts, prompts or tokens that the objective's denominators count
    facts: SampleFacts = field(repr=False)  # rewards and lengths of all samples
    terms: Mapping[str, TermPlan] = field(default_factory=dict)  # by name
    num_missing: int = 0  # trained tokens outside their samples' sampling masks, masked before counting
    depth_denominators: tuple[Tensor, ...] = ()  # [S] float64, of each depth of multi-token prediction
    depth_counts: tuple[int, ...] = ()  # n_d, trained tokens that a depth can predict
    selection: SelectionFacts | None = None  # of a correction that selects tokens over the step
    warning: str | None = None  # about ids that may not be unique over the step
    agreed: int = field(default=0, repr=False)  # digest of the settings that its ranks have compared


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
    """Denominators of one optimizer step, from integer metadata, by a few small collectives.

        objective = sum over tokens of mask / d_sample(t) * loss_t

    Args:
        tokens_per_sample: [S] trained tokens of each sample of this process in all micro-batches of the step.
        aggregation: sample_mean, prompt_mean, token_mean or constant. The same on every rank.
        divisor: L of `constant`, in tokens. The same on every rank.
        rollout_ids: [S] the trajectory of each sample, unique over all ranks of the step: strings, integers, or a
            tensor or array of integers. Without it every sample is its own rollout.
        prompt_ids: [S] the prompt group of each sample, unique over all ranks; needed by prompt_mean.
        positions_per_sample: [S] positions that the model processes for each sample; default its trained tokens.
        group: Megatron's pure data-parallel group, every rank of which must call; None counts this process alone.
            Context-, tensor- and pipeline-parallel peers hold copies and are never summed. In a job of several ranks,
            None warns: it is right only if this rank has every sample of the step.

    Raises:
        StepPlanError: on every rank of `group`, for an error on any of them.
    """
    warn_if_alone("plan_step", group)
    error, local, rule = None, None, PlanRule(aggregation=aggregation, divisor=divisor)
    try:
        rollouts, prompts = (None if ids is None else [plain(i) for i in ids] for ids in (rollout_ids, prompt_ids))
        counts = whole_counts("tokens_per_sample", tokens_per_sample)
        local = table_of(rule, group, torch.stack([counts, counts], dim=1), rollouts, prompts)
        if is_by_turn(aggregation):
            raise ValueError(
                f"aggregation={aggregation!r} divides by tokens of turns, which plan_step does not receive. Choose "
                "another, or give PolicyGradientStep samples with turns."
            )
        if positions_per_sample is not None:
            positions = whole_counts("positions_per_sample", positions_per_sample)
            check_one_each("positions_per_sample", positions, len(counts))
            local = replace(local, num_positions=int(positions.sum()))
    except Exception as failure:  # the exchange raises it on every rank
        error = failure
    plan = plan_from_table(local, rule, error=error, group=group)
    if plan.warning is not None:
        warnings.warn(plan.warning, stacklevel=2)
    return plan


def warn_if_alone(caller: str, group: ProcessGroup | None) -> None:
    """Warn of a call without a group where other ranks can have samples of the step."""
    if group is None and torch.distributed.is_initialized() and (size := torch.distributed.get_world_size()) > 1:
        warnings.warn(
            f"{caller} without group counts the samples of this rank alone, in a job of {size} ranks. Give the "
            "data-parallel group, unless this rank has every sample of the step.",
            stacklevel=3,
        )


def plan_from_table(
    local: LocalTable | None,
    rule: PlanRule,
    *,
    error: Exception | None,
    group: ProcessGroup | None,
    number: int | None = None,
) -> StepPlan:
    """Exchange the ranks' tables and plan the step; every rank of `group` must call.

    The plan's totals count all rollouts and trained tokens, for every kind of denominator.

    Args:
        local: this rank's table; None where this rank has failed with `error`.
        rule: the same on every rank.
        error: this rank's error.
        group: the ranks that contribute their own samples; None: this process alone.
        number: stands for every number of rollouts, prompts and tokens, where the table is a part of a step.

    Raises:
        StepPlanError: on every rank of `group`.
    """
    none = torch.zeros(0, 2, dtype=torch.int64)
    local = LocalTable(none, none, none, False, False, 0, 0, 0, none) if local is None else local  # only for its head
    try:
        heads = gather_heads(Head.of(local, rule, error), error, group)
    except StepPlanError as failure:
        raise failure from error
    whole, warning = _exchanged(local, rule, heads, group)
    columns, is_kept, is_varied = rule.num_columns, rule.denominator == "kept", rule.denominator == "varied"
    depths = range(columns - rule.depths, columns)
    if number is None:
        _check_counted(whole.num_trained, whole.tokens[0], whole.tokens[int(is_kept)])
    with_prompts = number is not None or any(head.has_prompt_ids == 1 for head in heads)
    count = partial(_counts, whole, rule, with_prompts=with_prompts, number=number)
    tokens = whole.tokens if number is None else [number] * len(whole.tokens)
    counts, live = count(0, live_only=False), partial(count, live_only=rule.live_only)
    of_objective = live(int(is_kept or is_varied))
    is_out = whole.is_flat & is_varied
    return StepPlan(
        aggregation=rule.aggregation,
        divisor=rule.divisor,
        denominators=_denominators(of_objective, rule.aggregation, is_out),
        number=_number(of_objective, rule.aggregation),
        terms=_plan_terms(rule, tokens, count, is_out),
        depth_denominators=tuple(_denominators(live(column), rule.depth_aggregation) for column in depths),
        depth_counts=tuple(whole.tokens[column] for column in depths),
        num_samples=sum(head.num_samples for head in heads),
        num_rollouts=counts.num_rollouts,
        num_prompts=counts.num_prompts,
        num_tokens=tokens[0],
        num_turns=counts.num_turns,
        num_trained=whole.num_trained,
        num_response_tokens=whole.num_response_tokens,
        num_missing=whole.num_missing,
        num_positions=whole.num_positions,
        num_microbatches=local.num_microbatches,
        selection=local.selection,
        warning=warning,
        agreed=heads[0].agreed,
        facts=whole.facts,
    )


def _exchanged(
    local: LocalTable, rule: PlanRule, heads: Sequence[Head], group: ProcessGroup | None
) -> tuple[WholeStep, str | None]:
    """The checked step over all ranks, and a warning about its ids."""
    _check_rule(heads, rule, group)
    _check_agreement(heads)
    if rule.numbers_may_repeat:
        _check_copies(heads)
    whole = exchange(local, rule, group, gather_environments(local.environments, heads, group))
    _check_shares(whole.is_balanced, local.shares, group)
    _check_strays(whole.strays, rule, local, group)
    warning = _check_unique(whole, heads, rule, local, group)
    if rule.denominator == "varied":  # which rewards differ is known now, and what then counts after another exchange
        local = replace(local, tokens=rule.without(local.tokens, whole.is_flat_row))
        whole = exchange(local, rule, group, [*whole.facts.environments])
    return whole, warning


def _plan_terms(
    rule: PlanRule, tokens: Sequence[int], count: Callable[..., StepCounts], is_out: Tensor
) -> dict[str, TermPlan]:
    """The plan of every further loss term; on the objective's tokens it counts the same units as the objective."""
    plans, columns = {}, rule.columns
    for term in rule.terms[rule.has_objective :]:
        column, denominators = columns[term.tokens], None
        is_policys = column == TRAINED
        counts = count(
            int(rule.denominator == "varied") if is_policys else column, live_only=rule.live_only and is_policys
        )
        if term.aggregation and term.aggregation != AS_POLICY:
            denominators = _denominators(replace(counts, divisor=term.divisor), term.aggregation, is_out & is_policys)
        plans[term.name] = TermPlan(
            denominators=denominators,
            num_tokens=tokens[column],
            num_rollouts=count(column, live_only=False).num_rollouts,
        )
    return plans


def _text_from_owner(text_of: Callable[[int], str], group: ProcessGroup | None, place: int) -> str:
    """A text about a sample, from the rank that has it: a collective of all ranks, which then raise the same error."""
    owner, index = place >> 32, place & (2**32 - 1)
    return gathered_texts(text_of(index) if rank_of(group) == owner else "", group)[owner]


def _check_rule(heads: Sequence[Head], rule: PlanRule, group: ProcessGroup | None) -> None:
    """Refuse ranks with different settings; the message names the first that differs."""
    if len({head.agreed for head in heads}) == 1:
        return
    rules = [json.loads(text) for text in gathered_texts(json.dumps(rule.agreed), group)]
    raise StepPlanError(f"data-parallel {disagreement(rules)}")


def _check_agreement(heads: Sequence[Head]) -> None:
    for name, known, way_out in (
        ("has_rollout_ids", "rollout_ids", "Give them on every rank or on none."),
        ("has_prompt_ids", "prompt_ids", "Give them on every rank or on none."),
        ("has_sampling_mask", "samples with a sampling mask", "Give it to every rollout or to none."),
    ):
        given = [getattr(head, name) for head in heads]
        if 1 in given and 0 in given:
            ranks = given.index(1), given.index(0)
            raise StepPlanError(f"data-parallel rank {ranks[0]} has {known} and rank {ranks[1]} has none. {way_out}")
    for rank, head in enumerate(heads):
        if head.num_microbatches != heads[0].num_microbatches:
            raise StepPlanError(
                f"rank 0 has {heads[0].num_microbatches} micro-batches, rank {rank} has {head.num_microbatches}; "
                "Megatron's schedule needs the same number on every rank. Add empty micro-batches."
            )


def _check_copies(heads: Sequence[Head]) -> None:
    """Refuse ranks with the same samples; `content_of` decides when this is not a coincidence."""
    first: dict[int, int] = {}
    for rank, head in enumerate(heads):
        if head.content and (other := first.setdefault(head.content, rank)) != rank:
            raise StepPlanError(
                f"data-parallel ranks {other} and {rank} have the same {head.num_samples} samples, which would be "
                "trained twice. Give cut_microbatches each rank's own data_parallel_rank. If they are different "
                "samples, give each its own sample_id."
            )


def _check_strays(strays: Mapping[str, Stray], rule: PlanRule, local: LocalTable, group: ProcessGroup | None) -> None:
    """Refuse units on two ranks that take their own documents, and rollouts of two prompts or with two values."""

    def name_of(place: int, column: int) -> str:
        return _text_from_owner(lambda index: shorten((local.ids[column] or ())[index]), group, place)

    for kind in rule.undivided:
        if stray := strays.get(kind):
            unit, ranks = name_of(stray.sample, KINDS[kind]), f"{stray.first >> 32} and {stray.sample >> 32}"
            raise StepPlanError(
                f"{kind} {unit} has samples on data-parallel ranks {ranks}. Give all its samples to one rank."
            )
    if stray := strays.get(MIXED):
        rollout, *prompts = (
            name_of(stray.sample, ROLLOUT),
            name_of(stray.first, PROMPT),
            name_of(stray.sample, PROMPT),
        )
        raise StepPlanError(
            f"rollout {rollout} belongs to prompt groups {prompts[0]} and {prompts[1]}. Give all samples of a rollout "
            "one prompt_id."
        )
    for name in rule.one_per_rollout:
        if stray := strays.get(name):
            rollout, places = name_of(stray.first, ROLLOUT), sorted({*stray})
            values = [_text_from_owner(partial(_values_in_rollout, local, name), group, place) for place in places]
            raise StepPlanError(
                f"{name} of rollout {rollout} is {' and '.join(dict.fromkeys(values))}, but a rollout has one {name}. "
                f"Give all its samples the same {name}, or only one of them. Different rollouts need different ids on "
                "all ranks."
            )


def _values_in_rollout(local: LocalTable, name: str, index: int) -> str:
    """The values of a field in the rollout of a sample here, each with the first sample that has it."""
    rollouts, first_with = local.keys[:, ROLLOUT].tolist(), dict[str, str]()
    for key, sample in zip(rollouts, local.samples or (), strict=True):
        if key == rollouts[index] and (value := getattr(sample, name)) is not None:
            first_with.setdefault(shorten(value), sample.sample_id)
    return " and ".join(f"{value} in sample {label}" for value, label in first_with.items())


def _check_shares(is_balanced: bool, shares: Sequence[Share], group: ProcessGroup | None) -> None:
    """Refuse a micro-batch that is split over several ranks and differs between them."""
    if is_balanced:
        return
    everyones = gathered(torch.tensor(shares, dtype=torch.int64).view(-1, 3), group).tolist()
    for k, of_ranks in enumerate(zip(*everyones, strict=True)):
        for rank, share in enumerate(of_ranks):
            run = ContextRanks(*share[:2])
            if strays := [other for other in run if of_ranks[other] != share]:
                raise StepPlanError(
                    f"micro-batch {k} of rank {rank} is split over {run}, and rank {strays[0]} has a different "
                    "micro-batch at that position; the ranks would deadlock. Give every rank of a run the same samples "
                    "at the same position, as cut_over_ranks does."
                )


def _check_unique(
    whole: WholeStep, heads: Sequence[Head], rule: PlanRule, local: LocalTable, group: ProcessGroup | None
) -> str | None:
    """Refuse ids that every rank numbers itself; a warning where this is not certain."""
    if group is None or len(heads) == 1 or not rule.numbers_may_repeat:
        return None
    sizes, warning = [head.num_samples for head in heads], None
    if any(head.has_rollout_ids == 1 for head in heads):
        warning = rollouts_message(whole.units[ROLLOUT], local.keys[:, ROLLOUT], sizes, local.samples, group)
    if warning is None and rule.needs_prompt_ids:
        warning = prompts_message(whole.units[PROMPT], local.keys[:, PROMPT], sizes, local.samples, group)
    return warning


def _check_counted(num_trained: int, num_tokens: int, num_kept: int) -> None:
    if not num_trained:
        raise StepPlanError(
            "the step has no trained token. Leave fully masked samples out of the data, or take more samples per step."
        )
    if num_tokens and not num_kept:
        raise StepPlanError(
            "--pg-correction rejects every trained token of the step, so --pg-denominator kept counts nothing. Widen "
            "its bounds."
        )


def _counts(
    whole: WholeStep, rule: PlanRule, column: int, *, live_only: bool, with_prompts: bool, number: int | None
) -> StepCounts:
    rollouts, prompts = whole.units[ROLLOUT], whole.units[PROMPT]
    (total,) = rule.amounts(torch.tensor([whole.tokens]), column).tolist()
    counts = StepCounts(
        tokens_per_rollout=rule.amounts(rollouts.tokens, column),
        tokens_per_prompt=rule.amounts(prompts.tokens, column) if with_prompts else None,
        num_rollouts=(rollouts.live if live_only else rollouts.counted)[column],
        num_prompts=(prompts.live if live_only else prompts.counted)[column] if with_prompts else None,
        num_tokens=total,
        divisor=rule.divisor,
        live_only=live_only,
        num_turns=rule.turns(whole.tokens, column),
    )
    assumed = dict.fromkeys(("num_rollouts", "num_prompts", "num_tokens"), number)
    return counts if number is None else replace(counts, **assumed)


def _number(counts: StepCounts, aggregation: str) -> float:
    """N: what the aggregation's denominators count."""
    numbers = {
        "rollout": counts.num_rollouts,
        "prompt": counts.num_prompts,
        "turn": counts.num_turns,
        "token": counts.num_tokens,
    }
    return numbers[AGGREGATIONS[aggregation].unit] or 0


def _denominators(counts: StepCounts, aggregation: str, is_out: Tensor | None = None) -> Tensor:
    """[S] float64; infinite where a unit is not counted and has tokens, where nothing is counted, and in `is_out`."""
    if is_out is not None and is_out.any():
        return torch.where(is_out, torch.inf, _denominators(counts, aggregation))
    if not counts.num_tokens:
        return torch.full_like(counts.tokens_per_rollout, torch.inf, dtype=torch.float64)
    denominators = AGGREGATIONS[aggregation].load()(counts)
    tokens = {"rollout": counts.tokens_per_rollout, "prompt": counts.tokens_per_prompt}.get(
        AGGREGATIONS[aggregation].unit
    )
    if not counts.live_only or tokens is None:
        return denominators
    return torch.where(tokens > 0, denominators, torch.inf)


def check_count(count: int) -> None:
    """Refuse positions beyond Megatron's int32 counter (a mixture of experts under the per-token loss scaling)."""
    if count > _INT32_MAX:
        raise StepPlanError(
            f"{count} positions in one step exceed Megatron's int32 counter, which the router's losses need. Take "
            "fewer per step."
        )
