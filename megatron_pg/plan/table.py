"""What a rank contributes to the exchange of a step: integers of each sample.

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
ROLLOUT, PROMPT = range(2)  # columns of keys
TRAINED, KEPT = range(2)  # first columns of tokens
_SURELY_DRAWN_ONCE = -20.0  # nats: such samples are drawn twice in one step of a billion
SUMMED = ("num_trained", "num_positions", "num_response_tokens", "num_missing")  # over ranks, and parts of a step
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
        """Each of `tokens` with its column in the table: the objective's is 0."""
        return dict(zip(self.tokens, chain([0] * self.has_objective, count(2)), strict=False))

    @property
    def others(self) -> tuple[str, ...]:
        """Those of `tokens` that are not the objective's."""
        return self.tokens[self.has_objective :]

    @property
    def num_columns(self) -> int:
        """Columns of tokens in the table: trained, kept, each of `others`, each depth."""
        return 2 + len(self.others) + self.depths

    @property
    def width(self) -> int:
        """C, columns of tokens together with those of weights and turns."""
        return self._extra(self.num_columns).start

    def _extra(self, column: int) -> slice:
        """The columns of weights and turns of one column of tokens; they come after all of those."""
        size = _LIMBS * self.sums_weights + self.counts_turns
        return slice(self.num_columns + column * size, self.num_columns + (column + 1) * size)

    def without(self, tokens: Tensor, is_left_out: Tensor) -> Tensor:
        """[S, C] the tokens, with the trained ones as kept ones but for some samples, which are not members."""
        changed = tokens.clone()
        for trained, kept in ((TRAINED, KEPT), (self._extra(TRAINED), self._extra(KEPT))):
            changed[:, kept] = tokens[:, trained]
        changed[is_left_out, KEPT] = changed[is_left_out, self._extra(KEPT)] = -1
        return changed

    def amounts(self, sums: Tensor, column: int) -> Tensor:
        """[n] what denominators count, from sums [n, C]: int64 tokens of a column, or float64 weights."""
        if not self.sums_weights:
            return sums[:, column]
        parts = sums[:, self._extra(column)][:, :_LIMBS]
        return torch.tensor([whole_of(limbs) / _WEIGHT_UNIT for limbs in parts], dtype=torch.float64)

    def turns(self, sums: Sequence[int], column: int) -> int | None:
        """Turns with a token of a column, from sums [C]; None where they are not counted."""
        return sums[self._extra(column)][-1] if self.counts_turns else None

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
    """What this rank contributes to the exchange.

    The columns of tokens are the objective's trained and kept ones, those of each loss term that has its own, and n_d
    of each depth of multi-token prediction; then sums of weights and turns of each of these columns. A count is -1
    where the sample is not of the loss term; a sample with 0 tokens counts as a unit.
    """

    keys: Tensor  # [S, 2] int64, of the rollout and prompt of each sample
    tokens: Tensor  # [S, C] int64
    facts: Tensor  # [S, 3] int64, from `encode_facts`
    has_rollout_ids: bool
    has_prompt_ids: bool
    num_trained: int  # by any loss term
    num_positions: int
    num_response_tokens: int
    held: Tensor  # [n, 2] int64, the keys of all samples here, whichever rank counts them
    num_microbatches: int = 1
    num_missing: int = 0  # of `PackedBatch`
    has_sampling_mask: int = -1  # whether rollouts that need one have one: 1 or 0; -1: no such rollout, or unknown
    ids: dict[int, Sequence[Id | None] | None] = field(default_factory=dict)  # by column: what the keys stand for
    content: int = 0  # digest of its samples; 0: not compared between ranks
    environments: tuple[str, ...] = ()  # of the objective's samples, each name once
    samples: Sequence[Sample] | None = None  # None: only the rows are known
    shares: tuple[Share, ...] = ()  # of the micro-batches that are cut over their own ranks
    selection: SelectionFacts | None = None  # the same on every rank


def table_of(
    rule: PlanRule,
    group: ProcessGroup | None,
    tokens: Tensor,
    rollout_ids: Sequence[Id | None] | None,
    prompt_ids: Sequence[Id | None] | None,
    own: Tensor | None = None,
) -> LocalTable:
    """A table from tokens [S, C] and ids; `own`: [S] int64, keys of samples without a rollout."""
    _check_aggregation(rule.aggregation, rule.divisor)
    size, total = len(tokens), int(tokens[:, TRAINED].clamp(min=0).sum())
    if rule.needs_prompt_ids:
        missing = [i for i in range(size) if prompt_ids is None or (i < len(prompt_ids) and prompt_ids[i] is None)]
        if missing:
            reader = "--pg-denominator varied" if rule.denominator == "varied" else "prompt_mean"
            raise ValueError(
                f"{reader} needs a prompt_id for every sample, and sample {missing[0]} has none. Give one."
            )
    own = torch.arange(size) + (rank_of(group) << 32) if own is None else own  # without ids each sample is a rollout
    rollouts = own if rollout_ids is None else _keys("rollout_ids", rollout_ids, size)
    prompts = torch.zeros(size, dtype=torch.int64) if prompt_ids is None else _keys("prompt_ids", prompt_ids, size)
    keys, facts = torch.stack([rollouts, prompts], dim=1), torch.zeros(size, COLUMNS, dtype=torch.int64)
    has_ids, ids = (rollout_ids is not None, prompt_ids is not None), {ROLLOUT: rollout_ids, PROMPT: prompt_ids}
    return LocalTable(keys, tokens, facts, *has_ids, total, total, total, keys, ids=ids)


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
    tokens = torch.cat([torch.zeros(0, rule.width, dtype=torch.int64), *parts])
    table = table_of(rule, group, tokens, rollout_ids, prompt_ids, torch.tensor(places, dtype=torch.int64))
    rank, is_member = rank_of(group), tokens[:, TRAINED] >= 0
    brought = [batch for batch in batches if batch.cp_ranks is None or batch.cp_ranks.first == rank]
    mine = [i for i, place in enumerate(places) if is_brought(place, group)]
    return replace(
        table,
        keys=table.keys[mine],
        tokens=tokens[mine],
        facts=(encode_facts(samples) * is_member[:, None])[mine],
        num_trained=sum(max(n, 0) for batch in brought for n in batch.tokens_of(*rule.tokens)),
        ids={column: ids and [ids[i] for i in mine] for column, ids in table.ids.items()},
        num_positions=sum(batch.num_positions for batch in brought),
        num_response_tokens=sum(samples[i].response_length for i in mine),
        num_microbatches=len(batches),
        num_missing=sum(batch.num_missing for batch in brought),
        has_sampling_mask=_has_sampling_mask(samples, rule.over_sampling_mask),
        samples=[samples[i] for i in mine],
        content=content_of([samples[i] for i in mine]),
        environments=tuple(sorted({name for i in mine if is_member[i] and (name := samples[i].environment)})),
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
    known = [table for table in tables if len(table.keys)] or [last]  # without samples, nothing is known of ids
    for name, found in {
        "prompt_id": {int(table.has_prompt_ids) for table in known},
        "sampling mask": {table.has_sampling_mask for table in known},
    }.items():
        if {0, 1} <= found:
            raise ValueError(f"a {name} is in some adds of an open step and not in others. Give every sample one.")
    # nothing reads the others: a rollout has all its samples in one part, which was checked when it was added
    samples = [None] * sum(len(table.keys) for table in earlier) + list(last.samples or ())
    ids = {column: [id for table in known for id in table.ids[column] or ()] for column in known[0].ids}
    return replace(
        known[0],
        keys=torch.cat([table.keys for table in tables]),
        tokens=torch.cat([table.tokens for table in tables]),
        facts=torch.cat([table.facts for table in tables]),
        held=torch.cat([table.held for table in tables]),
        ids={column: of_column or None for column, of_column in ids.items()},
        **{name: sum(getattr(table, name) for table in tables) for name in SUMMED},
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
    """[S, C] int64, `LocalTable.tokens` of a micro-batch's samples."""
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
        raise ValueError(f"divisor={divisor} has no effect with {aggregation}. Remove it, or choose constant.")


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
