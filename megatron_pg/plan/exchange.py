"""Counts rollouts and prompt groups over all ranks, without gathering all samples on any rank.

A hash of its key assigns every rollout and prompt group (a unit) to an owner rank. Each rank sends the owner one row
per unit of its samples; the owner sums, validates and replies. Totals and maxima are all-reduced. So a rank receives
about as many rows as it has units, and 40 bytes from every other rank, with any aggregation.

    all-gather heads -> all-to-all sizes, rows -> count -> all-to-all answers -> all-reduce sums, largest values

Every rank executes the same collectives. An error travels in the heads or the results, and is then raised on every
rank.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from megatron_pg.plan.collectives import (
    all_reduced,
    all_to_all_rows,
    decode,
    encode,
    gathered,
    gathered_parts,
    gathered_texts,
    rank_of,
)
from megatron_pg.plan.errors import StepPlanError, message_of
from megatron_pg.plan.facts import (
    NOTHING,
    ONE_PER_ROLLOUT,
    UNIT_COLUMNS,
    SampleFacts,
    are_flat,
    count_groups,
    fact_sums,
    largest_facts,
    merged_facts,
    of_environments,
    unit_facts,
)
from megatron_pg.plan.table import MODULUS, PROMPT, ROLLOUT, SUMMED, LocalTable, PlanRule, hash_of

KINDS = {"rollout_id": ROLLOUT, "prompt_id": PROMPT}  # of units: their column of keys
MIXED = "prompts"  # the stray of a rollout that belongs to two prompts
_KIND, _KEY, _PART, _PLACE, _TOKENS = range(5)  # columns of a unit's row; its facts come after the tokens
_NOWHERE = 2**52  # above every place and exact in float64: of a unit whose samples another rank counts


class Head(NamedTuple):
    """The data of a rank that every other rank receives first."""

    num_samples: int
    failed: int
    has_rollout_ids: int  # 1 or 0; -1 without samples
    has_prompt_ids: int
    num_microbatches: int
    has_sampling_mask: int  # 1 or 0; -1 without rollouts that read it
    environments: int  # bytes of their names
    agreed: int  # digest of `PlanRule.agreed`, below 2^31
    content: int  # digest of its samples, below 2^62; 0: not compared

    @classmethod
    def of(cls, local: LocalTable, rule: PlanRule, error: Exception | None) -> "Head":
        """The head of this rank."""
        has_ids = (int(local.has_rollout_ids), int(local.has_prompt_ids)) if len(local.keys) else (-1, -1)
        sizes = len(local.keys), int(error is not None), *has_ids, local.num_microbatches, local.has_sampling_mask
        return cls(*sizes, len(_encoded(local.environments)), hash_of(repr(rule.agreed)) >> 33, local.content)

    @property
    def row(self) -> Tensor:
        """The head as it is sent, [10] int32."""
        return torch.tensor([*self[:-1], self.content >> 31, self.content & (2**31 - 1)], dtype=torch.int32)


def gather_heads(head: Head, error: Exception | None, group: ProcessGroup | None) -> list[Head]:
    """All ranks' heads, in rank order; raises on every rank if one rank reports an error."""
    rows = gathered(head.row, group, error).tolist()
    heads = [Head._make([*values, (high << 31) + low]) for *values, high, low in rows]
    if failed := [rank for rank, other in enumerate(heads) if other.failed]:
        texts = gathered_texts("" if error is None else message_of(error), group, error)
        if len(set(texts)) == 1:  # the same on every rank
            raise StepPlanError(texts[0])
        raise StepPlanError(f"data-parallel rank {failed[0]}: {texts[failed[0]]}")
    return heads


def gather_environments(names: Sequence[str], heads: Sequence[Head], group: ProcessGroup | None) -> list[str]:
    """The sorted names of all ranks' environments; a collective only if a head announces some."""
    parts = gathered_parts(_encoded(names), [head.environments for head in heads], group)
    return sorted({name for part in parts for name in decode(part).splitlines()})


def _encoded(environments: Sequence[str]) -> Tensor:
    return encode("\n".join(environments))  # they are printable


class Stray(NamedTuple):
    """Two samples of one unit that must not differ, by their places: rank * 2^32 + index on that rank."""

    sample: int  # the first that differs from the unit's first
    first: int


_NO_STRAY = Stray(_NOWHERE, _NOWHERE)


@dataclass(frozen=True, slots=True, eq=False)
class Units:
    """Rollouts or prompts of the step; C columns as in `LocalTable.tokens`."""

    tokens: Tensor  # [n, C] int64, of the unit of each held sample; 0 where the column has no such unit
    counted: list[int]  # [C] units with a sample of the column
    live: list[int]  # [C] units with a token of the column
    distinct: int  # of all columns
    brought: int  # distinct ones of each rank, summed
    most: int  # distinct ones of one rank
    fewest: int  # of a rank with any


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WholeStep:
    """A step over all ranks."""

    units: Mapping[int, Units]  # by column: ROLLOUT, PROMPT
    tokens: list[int]  # [C]
    num_trained: int
    num_positions: int
    num_response_tokens: int
    num_missing: int
    is_flat: Tensor  # [n] bool, of each held sample: its prompt group's rewards are all equal
    is_flat_row: Tensor  # [S] bool, the same of each sample of the table
    is_balanced: bool  # whether ranks that share a micro-batch have the same one
    facts: SampleFacts
    strays: Mapping[str, Stray]  # by kind: a unit of `PlanRule.undivided` on two ranks; by field: two values; `MIXED`


def exchange(
    local: LocalTable, rule: PlanRule, group: ProcessGroup | None, environments: Sequence[str] = ()
) -> WholeStep:
    """Count the step over `group`, every rank of which must call with the same rule and environments.

    Without a group this process alone is counted.
    """
    rank = rank_of(group)
    held = [_own_units(local, kind, rank) for kind in KINDS.values()]
    deal = _Deal(torch.cat([units.rows for units in held]), group)
    owned = [_owned_units(deal.rows, kind) for kind in KINDS.values()]
    answers = deal.answered(_answers(deal.rows, owned)).split([len(units.rows) for units in held])
    strays = _own_strays(owned, rule)
    of_rollouts = owned[0].facts, *of_environments(owned[0].facts, environments)
    sums = _combined(_sums(local, rank, held, owned, of_rollouts), ReduceOp.SUM, group)
    largest = _combined(_largest(held, of_rollouts, strays.values()), ReduceOp.MAX, group)
    *totals, balance = sums[0].tolist()
    return WholeStep(
        units={
            kind: _units(answer[units.of_held, :-1], of_sums, of_largest)
            for kind, units, answer, of_sums, of_largest in zip(
                KINDS.values(), held, answers, sums[4:], largest[1:-1], strict=True
            )
        },
        tokens=sums[1].tolist(),
        **dict(zip(SUMMED, totals, strict=True)),
        is_flat=answers[-1][held[-1].of_held, -1] > 0,
        is_flat_row=answers[-1][held[-1].of_rows, -1] > 0,
        is_balanced=balance % MODULUS == 0,
        facts=SampleFacts.of(sums[2], largest[0], sums[3], environments),
        strays=_first_strays(strays, largest[-1], group),
    )


class _OwnUnits(NamedTuple):
    """The units of one kind that this rank's samples belong to."""

    rows: Tensor  # [U, width]
    of_held: Tensor  # [n] the row of each held sample
    of_rows: Tensor  # [S] the row of each sample of the table


def _own_units(local: LocalTable, kind: int, rank: int) -> _OwnUnits:
    """A rollout has one row per prompt; valid data have one prompt per rollout."""
    keys, prompts = torch.cat([local.held, local.keys])[:, [kind, PROMPT]].unbind(dim=1)
    parts = prompts if kind == ROLLOUT else torch.zeros_like(prompts)
    numbers = _numbered(keys) * (len(keys) + 1) + _numbered(parts)
    units, inverse = numbers.unique(return_inverse=True)
    of_held, brought = inverse.split([len(local.held), len(local.keys)])
    number, places = len(units), torch.arange(len(local.keys)) + (rank << 32)
    heads = torch.full((number, _TOKENS), kind, dtype=torch.int64)
    heads[inverse, _KEY], heads[inverse, _PART] = keys, parts
    heads[:, _PLACE] = torch.full((number,), _NOWHERE).scatter_reduce(0, brought, places, "amin")
    facts = unit_facts(local.facts)
    if kind == PROMPT:  # without prompt ids there are no groups of rewards
        facts = unit_facts(local.facts * local.has_prompt_ids, local.keys[:, ROLLOUT])
    merged = merged_facts(facts, brought, number)
    tokens = _added(local.tokens, brought, number)
    return _OwnUnits(torch.cat([heads, tokens, merged], dim=1), of_held, brought)


def _numbered(keys: Tensor) -> Tensor:
    return keys.unique(return_inverse=True)[1]


def _added(tokens: Tensor, units: Tensor, number: int) -> Tensor:
    """[number, C] int64 from [n, C]: the sum of each unit; -1 if no sample of the unit is counted."""
    none = torch.zeros(number, tokens.shape[1], dtype=torch.int64)
    members = none.index_add(0, units, (tokens >= 0).long())
    return none.index_add(0, units, tokens.clamp(min=0)).where(members > 0, -1)


class _Deal:
    """Sends rows to the ranks that own their units, and returns the answers."""

    def __init__(self, rows: Tensor, group: ProcessGroup | None):
        self._group, self.rows = group, rows
        if group is None:
            return
        size = torch.distributed.get_world_size(group)
        owners, each = _owners(rows[:, _KEY], size), torch.ones(size, dtype=torch.int32)
        self._order = owners.argsort(stable=True)
        self._sent = torch.bincount(owners, minlength=size).int()
        self._received = all_to_all_rows(self._sent, each, each, group)
        self.rows = all_to_all_rows(rows[self._order], self._sent, self._received, group)

    def answered(self, answers: Tensor) -> Tensor:
        """The owners' answers to this rank's rows, given this rank's answers to the rows that it received."""
        if self._group is None:
            return answers
        back = all_to_all_rows(answers, self._received, self._sent, self._group)
        return torch.empty_like(back).index_copy_(0, self._order, back)


def _owners(keys: Tensor, size: int) -> Tensor:
    """[n] ranks; consecutive keys, and keys that differ in their high bits only, are spread over all ranks."""
    mixed = (keys ^ (keys >> 32)) * -7046029254386353131
    mixed = (mixed ^ (mixed >> 29)) * -4658895280553007687
    return ((mixed >> 33) & (2**31 - 1)) % size


class _OwnedUnits(NamedTuple):
    """The units of one kind that this rank owns."""

    rows: Tensor  # [n, width] from all ranks
    places: Tensor  # [n] indices of the rows among all received ones
    inverse: Tensor  # [n] the unit of each
    totals: Tensor  # [U, C]
    facts: Tensor  # [U, 6] of `merged_facts`


def _owned_units(rows: Tensor, kind: int) -> _OwnedUnits:
    places = (rows[:, _KIND] == kind).nonzero().flatten()
    rows = rows[places]
    units, inverse = rows[:, _KEY].unique(return_inverse=True)
    tokens, facts = rows[:, _TOKENS:].tensor_split([-UNIT_COLUMNS], dim=1)
    totals, facts = _added(tokens, inverse, len(units)), merged_facts(facts, inverse, len(units))
    return _OwnedUnits(rows, places, inverse, totals, facts)


def _answers(rows: Tensor, owned: Sequence[_OwnedUnits]) -> Tensor:
    """[n, C + 1] for all received rows: the tokens of their units, and whether the rewards are all equal."""
    answers = torch.zeros(len(rows), rows.shape[1] - _TOKENS - UNIT_COLUMNS + 1, dtype=torch.int64)
    for units in owned:
        of_units = torch.cat([units.totals.clamp(min=0), are_flat(units.facts)[:, None]], dim=1)
        answers[units.places] = of_units[units.inverse]
    return answers


def _sums(
    local: LocalTable, rank: int, held: Sequence[_OwnUnits], owned: Sequence[_OwnedUnits], of_rollouts: Sequence[Tensor]
) -> list[Tensor]:
    """Integers to sum over the ranks; `of_rollouts`: facts of all owned rollouts, then by environment."""
    balance = sum(share.balance(rank) for share in local.shares) % MODULUS
    parts = [
        torch.tensor([*(getattr(local, name) for name in SUMMED), balance]),
        local.tokens.clamp(min=0).sum(dim=0),
        torch.cat([fact_sums(rollouts) for rollouts in of_rollouts]),
        count_groups(owned[-1].facts),
    ]
    for mine, units in zip(held, owned, strict=True):
        counts = [(units.totals >= 0).sum(dim=0), (units.totals > 0).sum(dim=0)]
        parts.append(torch.cat([*counts, torch.tensor([len(units.totals), _count_brought(mine)])]))
    return parts


def _count_brought(units: _OwnUnits) -> int:
    return int((units.rows[:, _PLACE] != _NOWHERE).sum())


def _largest(held: Sequence[_OwnUnits], of_rollouts: Sequence[Tensor], strays: Iterable[Stray]) -> list[Tensor]:
    """Numbers to take the maximum of over the ranks."""
    counts = [float(_count_brought(units)) for units in held]
    sets = [torch.tensor([n, -n if n else -torch.inf], dtype=torch.float64) for n in counts]
    first = torch.tensor([-stray.sample for stray in strays], dtype=torch.float64)
    return [torch.cat([largest_facts(rollouts) for rollouts in of_rollouts]), *sets, first]


def _combined(parts: Sequence[Tensor], operation: ReduceOp.RedOpType, group: ProcessGroup | None) -> Sequence[Tensor]:
    if group is None:
        return parts
    return all_reduced(torch.cat(list(parts)), operation, group).split([len(part) for part in parts])


def _units(tokens: Tensor, sums: Tensor, largest: Tensor) -> Units:
    columns = tokens.shape[1]
    counted, live, (distinct, brought) = (part.tolist() for part in sums.split([columns, columns, 2]))
    most, fewest = largest.tolist()
    return Units(tokens, counted, live, distinct, brought, int(most), int(-fewest) if distinct else 0)


def _own_strays(owned: Sequence[_OwnedUnits], rule: PlanRule) -> dict[str, Stray]:
    """`WholeStep.strays` of the units that this rank owns, `_NO_STRAY` where there is none."""
    rows = {kind: units.rows[units.rows[:, _PLACE] != _NOWHERE] for kind, units in zip(KINDS, owned, strict=True)}
    rollouts = rows["rollout_id"]
    strays = {MIXED: _stray(rollouts, rollouts[:, _PART])}
    strays |= {name: _conflict(rollouts, ONE_PER_ROLLOUT[name] - UNIT_COLUMNS) for name in rule.one_per_rollout}
    return strays | {kind: _stray(rows[kind], rows[kind][:, _PLACE] >> 32) for kind in rule.undivided}


def _conflict(rows: Tensor, column: int) -> Stray:
    """The stray of a rollout whose largest and smallest value of a field, in this column and the next, differ."""
    rows = rows[rows[:, column] != NOTHING]
    return _stray(rows.repeat(2, 1), torch.cat([rows[:, column], rows[:, column + 1]]))


def _stray(rows: Tensor, parts: Tensor) -> Stray:
    """The first sample in another part than its unit's first."""
    order = rows[:, _PLACE].argsort(stable=True)
    rows, parts = rows[order], parts[order]
    inverse, indices = _numbered(rows[:, _KEY]), torch.arange(len(rows))
    first = torch.full_like(indices, len(rows)).scatter_reduce(0, inverse, indices, "amin")[inverse]
    apart = (parts != parts[first]).nonzero().flatten()
    if not len(apart):
        return _NO_STRAY
    return Stray(*rows[[apart[0], first[apart[0]]], _PLACE].tolist())


def _first_strays(strays: Mapping[str, Stray], largest: Tensor, group: ProcessGroup | None) -> dict[str, Stray]:
    """The first stray of each kind over all ranks; a further collective on every rank if there is any."""
    if (largest == -_NOWHERE).all():
        return {}
    rows = gathered(torch.tensor([*strays.values()], dtype=torch.int64), group)  # [ranks, kinds, 2]
    firsts = [min(Stray(*stray) for stray in column) for column in rows.transpose(0, 1).tolist()]
    return {kind: stray for kind, stray in zip(strays, firsts, strict=True) if stray != _NO_STRAY}
