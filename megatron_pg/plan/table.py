"""What a rank contributes to the exchange of a step: one row of integers per sample.

A step counts tokens of loss terms and of the depths of multi-token prediction, units, and facts of samples.
"""

import hashlib
from collections.abc import Sequence, Sized
from dataclasses import dataclass, field, fields, replace
from itertools import chain, count
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import ContextRanks, PackedBatch, samples_of
from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.loss_terms import AS_POLICY, OBJECTIVE, LossTerm
from megatron_pg.plan.collectives import rank_of
from megatron_pg.plan.facts import COLUMNS, ONE_PER_ROLLOUT, encode_facts, limbs_of, whole_of
from megatron_pg.rollouts.fields import POLICY, Id, is_number, plain
from megatron_pg.rollouts.printable import shorten
from megatron_pg.rollouts.sample import Sample

MODULUS = 2**44  # of sums of digests: 64-bit integers hold them for 2^19 ranks
TRAINED, ROLLOUT, PROMPT, KEPT = range(4)  # columns of the table
WIDTH = 4 + COLUMNS  # of a row without the tokens of further loss terms and of depths
FACTS = slice(4, WIDTH)
_SURELY_DRAWN_ONCE = -20.0  # nats: such samples are drawn twice in one step of a billion
_SUMMED = ("num_positions", "num_response_tokens", "num_missing")  # over the parts of a step
# A sample's sum of weights is a float64 from 1e-8 on, so a multiple of 2^-80; as integers of that unit, in parts of 32
# bits, sums of samples are exact, and the same in every order and layout.
_WEIGHT_UNIT, _LIMBS = 2**80, 4
_MOST_TOKENS = 2**40  # of a sample: totals of 4 million samples are exact in 64 bits


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRule:
    """What a step counts, and how it weighs tokens. The same on every rank."""

    aggregation: str
    divisor: float | None = None  # L
    denominator: str = "scheduled"  # what denominators count; further loss terms count trained tokens under `kept` too
    sums_weights: bool = False  # denominators sum the weights of tokens, instead of counting tokens
    counts_turns: bool = False
    over_sampling_mask: tuple[str, ...] = (POLICY,)  # the loss terms at whose tokens a sampling mask is read
    terms: tuple[LossTerm, ...] = (OBJECTIVE,)  # the objective first, unless it is dropped
    undivided: tuple[str, ...] = ()  # kinds of units ("rollout_id", "prompt_id") that may not lie on two ranks
    numbers_may_repeat: bool = True  # two ranks may give the same id; False: one process has numbered all samples
    one_per_rollout: tuple[str, ...] = tuple(ONE_PER_ROLLOUT)  # fields with one value; of others, the largest counts
    depths: int = 0  # of multi-token prediction
    depth_aggregation: str = STEP_MEANS[True]  # of its cross-entropies
    expected: int | None = None  # c, which stands for N until an open step closes
    weight_version: int | None = None  # optimizer steps that the trainer's weights have seen, for the ages of tokens
    arguments: tuple[tuple[str, str], ...] = ()  # flags with their values, which only the comparison of ranks reads

    @property
    def agreed(self) -> dict[str, str]:
        """What must be the same on every rank, as texts by name; the flags come first."""
        own = {each.name: f"{getattr(self, each.name)}" for each in fields(self) if each.name != "arguments"}
        return {f"--{name.replace('_', '-')}": text for name, text in self.arguments} | own

    @property
    def live_only(self) -> bool:
        """Whether units without a counted token are left out of the denominators."""
        return self.denominator in ("live", "kept")

    @property
    def has_objective(self) -> bool:
        """Whether the objective is in the loss."""
        return OBJECTIVE in self.terms

    @property
    def tokens(self) -> tuple[str, ...]:
        """The loss terms whose tokens are counted, the objective's first."""
        return tuple(dict.fromkeys(term.tokens for term in self.terms))

    @property
    def columns(self) -> dict[str, int]:
        """Each of `tokens` with its place in `counted`: the objective's is 0."""
        return dict(zip(self.tokens, chain([0] * self.has_objective, count(2)), strict=False))

    @property
    def others(self) -> tuple[str, ...]:
        """Those of `tokens` that are not the objective's; each has a column after the facts."""
        return self.tokens[self.has_objective :]

    @property
    def _width_of_tokens(self) -> int:
        """Columns of the table without sums of weights and turns."""
        return WIDTH + (len(self.others) + 1 if self.others else 0) + self.depths

    @property
    def _extra(self) -> int:
        """Columns of weights and turns for each of `token_columns`."""
        return _LIMBS * self.sums_weights + self.counts_turns

    @property
    def width(self) -> int:
        """Columns of the table."""
        return self._width_of_tokens + self._extra * len(self.token_columns)

    @property
    def any_term(self) -> int:
        """The column of the tokens that any loss term trains."""
        return WIDTH + len(self.others) if self.others else TRAINED

    @property
    def token_columns(self) -> list[int]:
        """The columns of tokens: trained, kept, each of `others`, each depth."""
        return [TRAINED, KEPT, *(column for column in range(WIDTH, self._width_of_tokens) if column != self.any_term)]

    @property
    def counted(self) -> list[int]:
        """[C] the columns that are added up per unit: `token_columns`, then the weights and turns of each of them."""
        return [*self.token_columns, *range(self._width_of_tokens, self.width)]

    def without(self, rows: Tensor, is_left_out: Tensor) -> Tensor:
        """[S, width] the table, with the trained tokens as kept ones but for some samples, which are not members."""
        base, extra, changed = self._width_of_tokens, self._extra, rows.clone()
        trained, kept = (
            [column, *range(first, first + extra)] for column, first in ((TRAINED, base), (KEPT, base + extra))
        )
        changed[:, kept] = torch.where(is_left_out[:, None], -1, rows[:, trained])
        return changed

    def amounts(self, sums: Tensor, column: int) -> Tensor:
        """[n] what denominators count, from sums [n, C]: int64 tokens of one of `token_columns`, or float64 weights."""
        if not self.sums_weights:
            return sums[:, column]
        first = len(self.token_columns) + column * self._extra
        parts = sums[:, first : first + _LIMBS]
        return torch.tensor([whole_of(limbs) / _WEIGHT_UNIT for limbs in parts], dtype=torch.float64)

    def turns(self, sums: Sequence[int], column: int) -> int | None:
        """Turns with a token of one of `token_columns`, from sums [C]; None where they are not counted."""
        last = len(self.token_columns) + (column + 1) * self._extra - 1
        return sums[last] if self.counts_turns else None

    @property
    def needs_prompt_ids(self) -> bool:
        """Whether a denominator counts prompt groups."""
        further = [s.aggregation for s in self.terms if s.aggregation and s.aggregation != AS_POLICY]
        of_depths = [self.depth_aggregation] * (self.depths > 0)
        return self.denominator == "varied" or any(map(needs_prompt_ids, [self.aggregation, *further, *of_depths]))

    @property
    def units(self) -> tuple[str, ...]:
        """The kinds of groups that a denominator counts, which a step must not split."""
        return ("rollout_id", "prompt_id") if self.needs_prompt_ids else ("rollout_id",)


@dataclass(frozen=True, slots=True)
class SelectionFacts:
    """How many tokens of the step a correction selected."""

    num_selected: int
    num_tokens: int  # T
    threshold: float | None  # the key of the last selected token
    num_candidates: int | None  # tokens from which it drew

    @property
    def fraction(self) -> float:
        """Selected tokens over tokens of the step."""
        return self.num_selected / self.num_tokens


class Share(NamedTuple):
    """What a rank holds of a micro-batch that is cut over its own context-parallel ranks."""

    first: int  # of the ranks: it counts the samples
    size: int
    digest: int  # of the whole micro-batch and its place in the step

    @classmethod
    def of(cls, k: int, batch: PackedBatch, ranks: ContextRanks) -> "Share":
        """Of the step's micro-batch k."""
        digest = hashlib.blake2b(k.to_bytes(8, "big") + batch.digest, digest_size=6).digest()
        return cls(ranks.first, ranks.size, int.from_bytes(digest, "big"))

    def balance(self, rank: int) -> int:
        """A number whose sum over the ranks is 0 if all hold the same."""
        return self.digest * (self.size - 1 if rank == self.first else -1)


@dataclass(frozen=True, slots=True, eq=False)
class LocalTable:
    """What this rank contributes to the exchange: one row per sample.

    Its columns are the objective's trained tokens, rollout key, prompt key, kept tokens, facts; the tokens of each loss
    term that has its own, and of all terms together; n_d of each depth of multi-token prediction. A count is -1 where
    the sample is not of the loss term; a sample with 0 tokens counts as a unit.
    """

    rows: Tensor  # [S, width] int64
    has_rollout_ids: bool
    has_prompt_ids: bool
    num_positions: int
    num_response_tokens: int
    held: Tensor  # [n, 2] int64, rollout and prompt keys of all samples here, whichever rank counts them
    num_microbatches: int = 1
    num_missing: int = 0  # of `PackedBatch`
    has_sampling_mask: int = -1  # whether rollouts that need one have one: 1 or 0; -1: no such rollout, or unknown
    ids: dict[int, Sequence[Id | None] | None] = field(default_factory=dict)  # by column: what the keys stand for
    content: int = 0  # digest of its samples; 0: not compared between ranks
    environments: tuple[str, ...] = ()  # of the objective's samples, each name once
    samples: Sequence[Sample] | None = None  # None: only the rows are known
    shares: tuple[Share, ...] = ()  # of the micro-batches that are cut over their own ranks
    selection: SelectionFacts | None = None  # the same on every rank


def table_of_counts(
    rule: PlanRule,
    group: ProcessGroup | None,
    counts: Tensor,
    rollout_ids: Sequence[Id | None] | None,
    prompt_ids: Sequence[Id | None] | None,
    kept: Tensor | None = None,
    further: Tensor | None = None,
    own: Tensor | None = None,
) -> LocalTable:
    """A table from token counts and ids.

    `further`: [S, ...] int64, the columns after the kept tokens; `own`: [S] int64, keys of samples without a rollout.
    """
    _check_aggregation(rule.aggregation, rule.divisor)
    size, total = len(counts), int(counts.clamp(min=0).sum())
    if rule.needs_prompt_ids:
        missing = [i for i in range(size) if prompt_ids is None or (i < len(prompt_ids) and prompt_ids[i] is None)]
        if missing:
            reader = "--pg-denominator varied" if rule.denominator == "varied" else "prompt_mean"
            raise ValueError(f"{reader} needs a prompt_id for every sample; sample {missing[0]} has none")
    own = torch.arange(size) + (rank_of(group) << 32) if own is None else own  # without ids each sample is a rollout
    rollouts = own if rollout_ids is None else _keys("rollout_ids", rollout_ids, size)
    prompts = torch.zeros(size, dtype=torch.int64) if prompt_ids is None else _keys("prompt_ids", prompt_ids, size)
    further = torch.zeros(size, COLUMNS, dtype=torch.int64) if further is None else further
    counted = torch.stack([counts, rollouts, prompts, counts if kept is None else kept], dim=1)
    rows = torch.cat([counted, further], dim=1)
    ids = {ROLLOUT: rollout_ids, PROMPT: prompt_ids}
    held = rows[:, [ROLLOUT, PROMPT]]
    return LocalTable(rows, rollout_ids is not None, prompt_ids is not None, total, total, held, ids=ids)


def local_table_of(
    batches: Sequence[PackedBatch],
    rule: PlanRule,
    group: ProcessGroup | None,
    kept: Sequence[Tensor | None] | None = None,
) -> LocalTable:
    """The table of this rank's micro-batches.

    `kept`: of each micro-batch [sum of R] bool, the objective's tokens that no correction rejects; None: all.

    The first rank of a micro-batch that is cut over its own ranks counts it.
    """
    samples = samples_of(batches)
    prompt_ids: Sequence[Id | None] | None = _all_or_none("prompt_id", samples)
    if rule.needs_prompt_ids and prompt_ids is None:
        prompt_ids = [sample.prompt_id for sample in samples]  # names the sample that has none
    rollout_ids, places = _all_or_none("rollout_id", samples), places_of(batches, group)
    parts = [
        _counted_columns(batch, rule, own) for batch, own in zip(batches, kept or [None] * len(batches), strict=True)
    ]
    counted = torch.cat([torch.zeros(0, len(rule.counted), dtype=torch.int64), *parts])
    counts, kept_counts, rest = counted[:, 0], counted[:, 1], counted[:, 2:]
    of_others, of_depths = rest[:, : len(rule.others)], rest[:, len(rule.others) :]
    any_term = torch.tensor([n for batch in batches for n in batch.tokens_of(*rule.tokens)], dtype=torch.int64)
    of_all = [any_term[:, None]] if rule.others else []
    further = torch.cat([encode_facts(samples) * (counts >= 0)[:, None], of_others, *of_all, of_depths], dim=1)
    keys = torch.tensor(places, dtype=torch.int64)
    table = table_of_counts(rule, group, counts, rollout_ids, prompt_ids, kept_counts, further, keys)
    rank = rank_of(group)
    brought = [batch for batch in batches if batch.cp_ranks is None or batch.cp_ranks.first == rank]
    mine = [i for i, place in enumerate(places) if is_brought(place, group)]
    return replace(
        table,
        rows=table.rows[mine],
        ids={column: ids and [ids[i] for i in mine] for column, ids in table.ids.items()},
        num_positions=sum(batch.num_positions for batch in brought),
        num_response_tokens=sum(samples[i].response_length for i in mine),
        num_microbatches=len(batches),
        num_missing=sum(batch.num_missing for batch in brought),
        has_sampling_mask=_has_sampling_mask(samples, rule.over_sampling_mask),
        samples=[samples[i] for i in mine],
        content=content_of([samples[i] for i in mine]),
        environments=tuple(sorted({name for i in mine if counts[i] >= 0 and (name := samples[i].environment)})),
        shares=tuple(
            Share.of(k, batch, batch.cp_ranks) for k, batch in enumerate(batches) if batch.cp_ranks is not None
        ),
    )


def joined(tables: Sequence[LocalTable]) -> LocalTable:
    """One table of the parts of a rank's open step, in their order; only the samples of the last are kept.

    Raises:
        ValueError: samples of some parts have a prompt id or a sampling mask, and those of others have none.
    """
    *earlier, last = tables
    known = [table for table in tables if len(table.rows)] or [last]  # without samples, nothing is known of ids
    for name, found in {
        "prompt_id": {int(table.has_prompt_ids) for table in known},
        "sampling mask": {table.has_sampling_mask for table in known},
    }.items():
        if {0, 1} <= found:
            raise ValueError(f"a {name} is in some adds of an open step and not in others. Give every sample one.")
    # nothing reads the others: a rollout has all its samples in one part, which was checked when it was added
    samples = [None] * sum(len(table.rows) for table in earlier) + list(last.samples or ())
    ids = {column: [id for table in known for id in table.ids[column] or ()] for column in known[0].ids}
    return replace(
        known[0],
        rows=torch.cat([table.rows for table in tables]),
        held=torch.cat([table.held for table in tables]),
        ids={column: of_column or None for column, of_column in ids.items()},
        **{name: sum(getattr(table, name) for table in tables) for name in _SUMMED},
        num_microbatches=0,
        has_sampling_mask=max(table.has_sampling_mask for table in tables),
        content=0,
        environments=tuple(sorted({name for table in tables for name in table.environments})),
        samples=cast(Sequence[Sample], samples),
    )


def content_of(samples: Sequence[Sample]) -> int:
    """Digest of a rank's samples, > 0; 0 where another rank could have drawn equal samples by chance.

    Samples with rollout ids are equal by chance only if every response is one token. Samples without them are not equal
    by chance if their common probability is below e^-20.
    """
    if all(sample.rollout_id is not None for sample in samples):
        is_known = any(sample.response_length > 1 for sample in samples)
    else:
        drawn = [s.old_logprobs[s.loss_mask].sum() for s in samples if s.old_logprobs is not None]
        is_known = float(sum(drawn)) < _SURELY_DRAWN_ONCE
    if not is_known:
        return 0
    content = hashlib.blake2b(digest_size=8)
    for sample in samples:
        names = (sample.sample_id, sample.rollout_id, sample.prompt_id, sample.term, sample.response_length)
        content.update(repr((*names, sample.reward, sorted(sample.masks))).encode())
        for values in (sample.tokens, sample.loss_mask, sample.old_logprobs, sample.advantages):
            content.update(b"" if values is None else values.numpy().tobytes())
    return 1 + (int.from_bytes(content.digest(), "big") >> 3)


def places_of(batches: Sequence[PackedBatch], group: ProcessGroup | None) -> list[int]:
    """A number for each sample here, unique in the step and the same on every rank that holds the sample."""
    rank = rank_of(group)
    firsts = [rank if batch.cp_ranks is None else batch.cp_ranks.first for batch in batches]
    return [(f << 44) + (k << 22) + i for k, f in enumerate(firsts) for i in range(len(batches[k].samples))]


def is_brought(place: int, group: ProcessGroup | None) -> bool:
    """Whether this rank counts the sample, not another rank that holds it."""
    return place >> 44 == rank_of(group)


def _counted_columns(batch: PackedBatch, rule: PlanRule, kept: Tensor | None) -> Tensor:
    """[S, C] int64, `PlanRule.counted` of a micro-batch's samples."""
    own, every = rule.tokens[: rule.has_objective], batch.mask_of(*rule.tokens)
    trained = batch.mask_of(*own)
    members = [(trained, own), (trained if kept is None else kept, own)]
    members += [(batch.mask_of(name), (name,)) for name in rule.others]
    members += [(every & batch.reached(depth), rule.tokens) for depth in range(1, rule.depths + 1)]
    columns = [torch.tensor(batch.counted(mask, *terms), dtype=torch.int64)[:, None] for mask, terms in members]
    for mask, _ in members:
        if rule.sums_weights:
            sums = batch.sums(batch.weighted(mask)).tolist()
            limbs = [limbs_of(int(total * _WEIGHT_UNIT), _LIMBS) for total in sums]
            columns.append(torch.tensor(limbs, dtype=torch.int64).view(-1, _LIMBS))
        if rule.counts_turns:
            parts = (batch.sums(mask, "turn") > 0).split([len(s.sequence_lengths("turn")) for s in batch.samples])
            columns.append(torch.tensor([int(part.sum()) for part in parts], dtype=torch.int64)[:, None])
    return torch.cat(columns, dim=1)


def _all_or_none(name: str, samples: Sequence) -> list[Id] | None:
    ids = [getattr(sample, name) for sample in samples]
    missing = [i for i, value in enumerate(ids) if value is None]
    if missing and len(missing) < len(ids):
        raise ValueError(
            f"sample {samples[missing[0]].sample_id} has no {name} while others of the step have one, so units cannot "
            "be counted. Give it to every sample or to none."
        )
    return None if missing or not ids else ids


def _has_sampling_mask(samples: Sequence[Sample], terms: Sequence[str]) -> int:
    """1 or 0: whether the rollouts with tokens of these loss terms have one; -1 if there are none."""
    rollouts = [sample for sample in samples if sample.term == POLICY]
    members = [sample for sample in rollouts if any(sample.mask_of(name) is not None for name in terms)]
    known = [sample.sampling_mask is not None for sample in members]
    if any(known) and not all(known):
        raise ValueError(
            f"sample {members[known.index(False)].sample_id} has no sampling mask while others of the step have one. "
            "Give it to every rollout or to none; a token that was sampled from the whole vocabulary has an empty one."
        )
    return int(known[0]) if known else -1


def _check_aggregation(aggregation: str, divisor: float | None) -> None:
    if aggregation not in AGGREGATIONS:
        raise ValueError(
            f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}, so no weight is defined. Choose one."
        )
    takes_divisor = AGGREGATIONS[aggregation].takes_divisor
    if takes_divisor and not (is_number(divisor := plain(divisor)) and 0 < divisor < float("inf")):
        raise ValueError(
            f"divisor={shorten(divisor)} of {aggregation} must be a finite number > 0. Set it to a length, for "
            "instance 4096."
        )
    if not takes_divisor and divisor is not None:
        raise ValueError(f"divisor={divisor} has no effect with {aggregation}; remove it or choose constant.")


def needs_prompt_ids(aggregation: str) -> bool:
    """Whether its denominators count prompt groups."""
    return AGGREGATIONS[aggregation].unit == "prompt"


def whole_counts(name: str, values: Sequence[int] | Tensor) -> Tensor:
    """[S] int64 on the CPU, from a user's values."""
    try:
        counts = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{name}={shorten(values)} are not counts. Give whole numbers.") from error
    if counts.numel() == 0:
        return torch.zeros(0, dtype=torch.int64)
    if counts.dtype.is_floating_point or counts.dtype == torch.bool or counts.dim() != 1:
        raise ValueError(
            f"{name} has dtype {counts.dtype} and shape {tuple(counts.shape)}, not [S] integers: counts are exact. "
            "Give whole numbers."
        )
    for is_bad, text in (
        (counts < 0, "is negative. Count from 0."),
        (counts > _MOST_TOKENS, f"is more than {_MOST_TOKENS}. Give the number of one sample."),
    ):
        if is_bad.any():
            i = int(is_bad.nonzero()[0])
            raise ValueError(f"{name}[{i}]={int(counts[i])} {text}")
    return counts.to(torch.int64).cpu()


def check_one_each(name: str, values: Sized, size: int) -> None:
    """Refuse another number of values than of samples."""
    if len(values) != size:
        raise ValueError(f"{name} has {len(values)} entries for {size} samples. Give one each.")


def _keys(name: str, ids: Sequence[Id | None], size: int) -> Tensor:
    """Integers stay themselves; strings become 63-bit hashes (a collision: 1 in 10^10 for 30,000 ids)."""
    check_one_each(name, ids, size)
    for i, value in enumerate(ids):
        if isinstance(value, bool) or not isinstance(value, (int, str)):
            raise ValueError(f"{name}[{i}]={value!r} is neither an integer nor a string. Give every sample an id.")
        if isinstance(value, int) and abs(value) >= 2**62:
            raise ValueError(f"{name}[{i}]={value} does not fit into 62 bits. Use a smaller integer or a string.")
    keys = [value if isinstance(value, int) else -(2**62) - (hash_of(str(value)) >> 2) for value in ids]
    return torch.tensor(keys, dtype=torch.int64)


def hash_of(text: str) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
