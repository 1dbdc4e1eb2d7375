"""Random steps with loss terms, from flags to samples, and what the oracle expects of them.

A step may lack the tokens of any loss term, its samples may be of several, and its rollouts have samples of different ones. Whatever no live loss term reads is NaN or absent: fields at other tokens, logits of other rows, fields of samples whose
tokens no loss term asks them of.
"""

import dataclasses
import itertools
import math
import random
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import cases
import numpy as np
import objective_cases
import objective_oracle
import simulation
import term_oracle as oracle
import torch
from compare import gradient_error, scalar_error
from namespaces import arguments
from samples import share_an_advantage
from simulation import Layout, Outcome, Step
from teacher_files import write_head
from torch import Tensor

from megatron_pg.args import ArgumentError, validate_args
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.payloads.topk import TokenSets
from megatron_pg.rollouts.sample import Sample

NAMES = ("sft", "echo", "teacher", "ref", "h")
REDUCER = "cases:root_length_reducer"
TOPK = (
    "topk_forward_kl",
    "topk_reverse_kl",
    "topk_jsd",
    "topk_skew_forward",
    "topk_skew_reverse",
    "topk_generalised_reverse",  # the one without a tail
)
WHOLE = ("full_forward_kl", "full_reverse_kl", "full_jsd")
WEIGHTS = (1.0, 1e-9, 1e6)
PER_TERM = ("loss", "weight", "num_tokens", "num_rollouts", "mean")


@dataclass(frozen=True)
class Flags:
    """What a launch script asks for: `expected` holds the objective and the shorthands, `dropped` loss terms of weight 0."""

    expected: objective_oracle.Settings
    terms: tuple[oracle.Term, ...]
    dropped: tuple[oracle.Term, ...] = ()
    has_policy: bool = True
    has_root_length: bool = False
    tail_floor: float | None = None
    keeps_entropy: bool = False

    @property
    def names_of_tokens(self) -> list[str]:
        """Loss terms that samples may be of."""
        return ["rl", *(term.name for term in (*self.terms, *self.dropped) if term.on is None)]

    def step(self, samples: Sequence[Sample], logits: Sequence[Tensor]) -> oracle.TermStep:
        return oracle.TermStep(
            documents(samples, logits, keeps_entropy=self.keeps_entropy),
            self.expected,
            self.terms,
            self.has_policy,
            has_root_length=self.has_root_length,
            **({} if self.tail_floor is None else {"tail_floor": self.tail_floor}),
        )

    @cached_property
    def loss(self) -> LossSettings:
        """The package's settings, through the flags.

        Raises:
            ArgumentError: they contradict each other.
        """
        e = self.expected
        texts = [flag_text(term, e.temperature) for term in (*self.terms, *self.dropped)] + ["rl:rl,weight=0"] * (
            not self.has_policy
        )
        numbers = {
            f"pg_{n}": getattr(e, objective_cases.NUMBERS[n][0]) for n in objective_cases.numbers_of(e.objective)
        }
        low, high = e.bounds
        args = arguments(
            loss_aggregation=None if self.has_root_length else e.aggregation,
            loss_aggregation_divisor=None if self.has_root_length else e.divisor,
            custom_pg_loss_reducer_function_path=REDUCER if self.has_root_length else None,
            calculate_per_token_loss=e.per_token,
            pg_objective=e.objective,
            **numbers,
            pg_correction=e.correction,
            pg_correction_low=low,
            pg_correction_high=high,
            pg_denominator=e.denominator,
            pg_kl_coef=e.kl_coef,
            pg_kl_estimator=e.kl_estimator if e.kl_coef else None,
            pg_entropy_coef=e.entropy_coef,
            pg_aux_aggregation=e.aux_aggregation,
            pg_grad_divisor=e.grad_divisor,
            pg_temperature=e.temperature,
            pg_term=texts or None,
            pg_teacher_tail_floor=self.tail_floor,
            pg_teacher_head=teacher_head() if have_whole(self.terms) else None,
            pg_fused_head="recompute" if have_whole(self.terms) else None,
            pg_metrics="with_entropy",
            pg_sampling_mask_entropy="kept" if self.keeps_entropy else "full",
            pg_kernel="torch",
            padded_vocab_size=cases.VOCABULARY,
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return LossSettings.from_args(validate_args(args))


def have_tail(terms: Sequence[oracle.Term]) -> bool:
    return any(term.kind in TOPK[:-1] for term in terms)


def have_whole(terms: Sequence[oracle.Term]) -> bool:
    return any(term.kind in WHOLE for term in terms)


@cache
def teacher_head() -> str:
    """A head whose logits are the hidden states."""
    path = Path(tempfile.mkdtemp()) / "teacher.safetensors"
    write_head(path, torch.eye(cases.VOCABULARY))
    return f"{path}:weight"


def flag_text(term: oracle.Term, temperature: float) -> str:
    options = {name: getattr(term, name) for name in ("weight", "aggregation", "divisor", "on", "estimator")}
    if term.kind.startswith("topk_"):
        options |= {"temperature": temperature, "beta" if term.kind == "topk_jsd" else "alpha": term.share}
    if term.kind == "full_jsd":
        options |= {"beta": term.share}
    return ",".join([f"{term.name}:{term.kind}", *(f"{k}={v}" for k, v in options.items() if v is not None)])


@dataclass(frozen=True)
class Case:
    samples: Sequence[Sample]
    logits: Sequence[Tensor]
    flags: Flags

    @cached_property
    def wanted(self) -> oracle.StepResult:
        return oracle.run(self.flags.step(self.samples, self.logits))

    def step(self, layout: Layout, rng: random.Random) -> Step:
        return Step(self.samples, self.logits, self.flags.loss, simulation.scatter_samples(self.samples, layout, rng))

    def errors(self, found: Outcome) -> dict[str, float]:
        """By subject: loss over Σ|λ·w·ℓ|, gradient over its largest entry, what a loss term reports over its magnitudes."""
        wanted = self.wanted
        assert found.num_nonfinite == 0
        gradients = [_spread(*each) for each in zip(self.samples, self.logits, wanted.gradients, strict=True)]
        errors = {"gradient": gradient_error(found.gradients, gradients)}
        if any(name != "rl" for name in wanted.terms):
            errors["loss"] = scalar_error(found.metrics["loss"], wanted.loss, wanted.magnitude)
        errors |= self._policy_errors(found)
        for term in self.flags.terms:
            errors |= _term_errors(found.metrics, term.name, wanted.terms[term.name])
        for term in self.flags.dropped:
            assert not any(name.startswith(f"{term.name}/") for name in found.metrics), term
        return errors

    @property
    def _mean_reward(self) -> float | None:
        """Of the rollouts of the objective, whatever a sample of another loss term carries; sums of these are exact."""
        known = [(i, s) for i, s in enumerate(self.samples) if s.term == "rl" and s.reward is not None]
        rewards = {i if s.rollout_id is None else s.rollout_id: s.reward for i, s in known}
        return sum(rewards.values()) / len(rewards) if rewards else None

    def _policy_errors(self, found: Outcome) -> dict[str, float]:
        """pg_loss and the shorthands, which are absent without a token of the objective."""
        policy = self.wanted.terms.get("rl")
        is_there = policy is not None and policy.num_tokens > 0
        assert ("pg_loss" in found.metrics) == ("advantage" in found.metrics) == is_there
        if not is_there:
            return {"reported": abs(found.reported)}
        values = {"reported": found.reported, "pg_loss": found.metrics["pg_loss"]}
        errors = {name: scalar_error(value, policy.loss, policy.magnitude) for name, value in values.items()}
        assert found.metrics["num_tokens"] == policy.num_tokens
        assert found.metrics["num_rollouts"] == policy.num_rollouts
        assert found.metrics.get("reward") == self._mean_reward
        means = oracle.policy_means(self.flags.step(self.samples, self.logits))
        for name, mean in means.items():
            errors[name] = scalar_error(found.metrics[name], mean, max(abs(mean), 1.0))
        assert means.keys() & {"kl_new_ref"} == found.metrics.keys() & {"kl_new_ref"}
        for name, sign in (("kl", 1), ("entropy", -1)):
            assert (f"{name}_loss" in found.metrics) == (name in self.wanted.terms)
            if name in self.wanted.terms:
                own = self.wanted.terms[name]
                errors[f"{name}_loss"] = scalar_error(sign * found.metrics[f"{name}_loss"], own.loss, own.magnitude)
        return errors


def _term_errors(metrics: dict[str, float], name: str, wanted: oracle.TermResult) -> dict[str, float]:
    found = {each: metrics[f"{name}/{each}"] for each in PER_TERM if f"{name}/{each}" in metrics}
    if not wanted.num_tokens:
        assert found == {}, name
        return {}
    assert (found["num_tokens"], found["num_rollouts"]) == (wanted.num_tokens, wanted.num_rollouts), name
    return {
        f"{name}/loss": scalar_error(found["loss"], wanted.loss, wanted.magnitude),
        f"{name}/weight": scalar_error(found["weight"], wanted.weight, wanted.weight),
        f"{name}/mean": scalar_error(found["mean"], wanted.mean, wanted.mean_magnitude),
        **_topk_errors(metrics, name, wanted.topk),
    }


def _topk_errors(metrics: dict[str, float], name: str, rows: Sequence) -> dict[str, float]:
    names = {f"{name}/{each}" for each in ("teacher_mass", "student_mass", "num_floored")} & metrics.keys()
    if not rows:
        assert not names, names
        return {}
    assert metrics.get(f"{name}/num_floored", 0) == sum(row.is_floored for row in rows)
    return {
        f"{name}/{each}": scalar_error(
            metrics[f"{name}/{each}"], sum(getattr(row, each) for row in rows) / len(rows), 1.0
        )
        for each in ("teacher_mass", "student_mass")
    }


def documents(
    samples: Sequence[Sample], logits: Sequence[Tensor], *, keeps_entropy: bool = False
) -> list[oracle.TermDocument]:
    return [
        oracle.TermDocument(
            logits=table[_first(s) : _first(s) + s.response_length].numpy(),
            targets=s.tokens[_first(s) + 1 :].numpy(),
            term=s.term,
            mask=s.loss_mask.numpy(),
            masks={name: mask.numpy() for name, mask in s.masks.items()},
            **{short: _array(getattr(s, name)) for name, short in FIELDS.items()},
            whole=None if s.teacher_hidden is None else s.teacher_hidden.double().numpy(),
            topk=None if s.teacher_topk is None else list(zip(*s.teacher_topk.lists().values(), strict=True)),
            sets=None if s.sampling_mask is None else sets_of(s),
            keeps_entropy=keeps_entropy,
            rollout_id=s.rollout_id,
            prompt_id=s.prompt_id,
        )
        for s, table in zip(samples, logits, strict=True)
    ]


def sets_of(sample: Sample) -> list[list[int]]:
    ids, offsets = sample.sampling_mask.lists().values()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


FIELDS = {
    "old_logprobs": "old",
    "advantages": "advantages",
    "rollout_logprobs": "rollout",
    "ref_logprobs": "ref",
    "teacher_logprobs": "teacher",
}


def _array(values: Tensor | None) -> np.ndarray | None:
    return None if values is None else values.numpy()


def _first(sample: Sample) -> int:
    return len(sample.tokens) - sample.response_length - 1


def _spread(sample: Sample, table: Tensor, rows: np.ndarray) -> Tensor:
    whole, first = torch.zeros_like(table), _first(sample)
    whole[first : first + len(rows)] = torch.from_numpy(rows)
    return whole


# ---- Drawing ----


def random_case(rng: random.Random, **given) -> Case:
    """A step with a trained token; `given`: fields of `random_flags` that are not drawn."""
    while True:
        flags = random_flags(rng, **given)
        samples = random_samples(rng, flags)
        case = Case(samples, poisoned_logits(rng, flags, samples), flags)
        if not any(len(live_rows(flags, sample)) for sample in samples):
            continue
        if flags.expected.denominator == "kept" and not case.wanted.terms["rl"].magnitude:
            continue  # the correction rejects every token
        return case


# The objectives that take any samples: products of ratios and one advantage per sequence need their own (objective_cases).
PLAIN = [
    name
    for name, declared in OBJECTIVES.items()
    if name not in objective_cases.PRODUCTS and not declared.has_one_advantage_per_sequence
]


def random_flags(rng: random.Random, objective: str | None = None, denominator: str | None = None, **given) -> Flags:
    while True:
        chosen = objective or rng.choice([*PLAIN, "grpo", "gspo", "gspo"])
        expected = objective_cases.random_settings(rng, chosen)
        if denominator not in (None, expected.denominator):
            continue
        has_root_length = rng.random() < 0.2
        if not expected.kl_coef and not expected.entropy_coef:
            expected.aux_aggregation = "default"
        expected.per_token = expected.aggregation == "token_mean" or expected.per_token
        if has_root_length:
            expected.denominator = "scheduled"
        has_policy = given.get("has_policy", rng.random() > 0.12)
        if not has_policy:  # rule E73 refuses the terms, correction and denominators of an objective that is dropped
            expected.kl_coef = expected.entropy_coef = 0.0
            expected.aux_aggregation, expected.correction, expected.denominator = "default", "none", "scheduled"
        terms = random_terms(rng, has_policy)
        dropped = ()
        if rng.random() < 0.25:  # of weight 0, with tokens of its own
            dropped = (oracle.Term("off", rng.choice(["ce", "opd"]), 0.0),)
            terms = tuple(dataclasses.replace(t, on="off") if rng.random() < 0.1 and t.on else t for t in terms)
            terms = tuple(
                dataclasses.replace(t, aggregation=None) if t.on == "off" and t.aggregation == "policy" else t
                for t in terms
            )
        floor = rng.choice([1e-5, 1e-3, 0.05]) if have_tail(terms) and rng.random() < 0.4 else None
        found = Flags(expected, terms, dropped, has_policy, has_root_length, floor)
        found = dataclasses.replace(found, **given)
        try:
            assert found.loss is not None
        except ArgumentError:
            continue
        return found


def random_terms(rng: random.Random, has_policy: bool) -> tuple[oracle.Term, ...]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    own = [name for name in names if rng.random() < 0.6]
    terms = []
    for name in names:
        on = None if name in own else rng.choice(["rl", "rl", *own])
        kind = rng.choice(["ce", "opd", "opd", "kl", "entropy", *rng.sample(TOPK, 2)])
        has_estimator = kind == "kl" or (kind == "opd" and rng.random() < 0.6)
        aggregation = rng.choice([None, *sorted(AGGREGATIONS), *(["policy"] if on == "rl" and has_policy else [])])
        terms.append(
            oracle.Term(
                name=name,
                kind=kind,
                weight=rng.choice([*WEIGHTS, rng.uniform(0.01, 2.0), rng.uniform(0.01, 2.0)]),
                aggregation=aggregation,
                divisor=rng.uniform(1, 5000) if aggregation == "constant" else None,
                on=on,
                estimator=rng.choice(sorted(objective_oracle.KL_ESTIMATORS)) if has_estimator else None,
                share=rng.uniform(0.02, 0.98) if kind in oracle.DEFAULT_SHARES and rng.random() < 0.6 else None,
            )
        )
    return tuple(terms)


def whole_terms(rng: random.Random) -> tuple[oracle.Term, ...]:
    """Some of which read a teacher's hidden states, one divergence of them; the likeliest tokens nobody reads then."""
    kind, share = rng.choice(WHOLE), rng.choice([None, 0.2, 0.9])
    terms = random_terms(rng, has_policy=True)
    readers = rng.sample(range(len(terms)), rng.randint(1, len(terms)))
    whole = {"kind": kind, "estimator": None, "share": share if kind == "full_jsd" else None}
    plain = {"kind": "ce", "estimator": None, "share": None}
    return tuple(
        dataclasses.replace(term, **(whole if i in readers else plain if term.kind in TOPK else {}))
        for i, term in enumerate(terms)
    )


def random_samples(rng: random.Random, flags: Flags) -> list[Sample]:
    """Prompts with rollouts, rollouts of several samples, and samples of one rollout in several terms."""
    weights = [rng.choice([0, 1, 2]) if rng.random() < 0.4 else 2 for _ in flags.names_of_tokens]
    if not any(weights):
        weights[0] = 1
    samples: list[Sample] = []
    has_id = rng.random() < 0.9
    has_prompt = flags.loss.plan_rule.needs_prompt_ids or rng.random() < 0.8
    for prompt in range(rng.randint(1, 4)):
        for rollout in range(rng.randint(1, 3)):
            begin = len(samples)
            for _ in range(rng.choice([1, 1, 1, 2]) if has_id else 1):
                term = rng.choices(flags.names_of_tokens, weights)[0]
                rest = {
                    "rollout_id": f"{prompt}/{rollout}" if has_id else None,
                    "prompt_id": prompt if has_prompt else None,
                }
                samples.append(random_sample(rng, flags, term, sample_id=str(len(samples)), **rest))
            share_an_advantage([sample for sample in samples[begin:] if sample.term == "rl"])
    return samples


def random_reward(rng: random.Random, rollout_id: str | None) -> float | None:
    """One for a rollout, or none."""
    own = rng.choice([None, 0.0, 1.0, 2.5])
    return own if rollout_id is None or own is None else random.Random(rollout_id).choice([0.0, 1.0, 2.5])


def random_mask(rng: random.Random, length: int) -> list[int]:
    kind = rng.random()
    return [0] * length if kind < 0.2 else [int(kind < 0.45 or rng.random() < 0.6) for _ in range(length)]


def random_sample(rng: random.Random, flags: Flags, term: str, **ids) -> Sample:
    length = rng.choice([1, 1, 2, rng.randint(1, 14)])
    others = [name for name in flags.names_of_tokens if name not in ("rl", term)]
    sample = Sample.build(
        tokens=[rng.randrange(cases.VOCABULARY) for _ in range(rng.choice([1, 2, rng.randint(1, 6)]) + length)],
        response_length=length,
        loss_mask=random_mask(rng, length),
        term=term,
        masks={name: random_mask(rng, length) for name in others if rng.random() < 0.4},
        old_logprobs=[0.0] * length,
        advantage=0.0,
        reward=random_reward(rng, ids["rollout_id"]),
        **ids,
    )
    known = {name: random_field(rng, flags, sample, name) for name in FIELDS}
    return dataclasses.replace(
        sample, **known, teacher_topk=random_topk(rng, flags, sample), teacher_hidden=random_hidden(rng, flags, sample)
    )


def random_hidden(rng: random.Random, flags: Flags, sample: Sample) -> Tensor | None:
    """Where it is read logits of a teacher, some of them so far that a probability is 0; elsewhere nothing, or poison."""
    if not have_whole(flags.terms):
        return None
    rows = [rows for rows in rows_that_read(flags, sample, "teacher_hidden") if rows is not None]
    if not rows and rng.random() < 0.6:
        return None
    trained = torch.stack([sample.loss_mask, *sample.masks.values()]).any(dim=0)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    states = rng.choice([1.0, 5.0]) * torch.randn(len(trained), cases.VOCABULARY, generator=generator)
    states = states.bfloat16() if rng.random() < 0.5 else states
    states[~trained] = torch.nan
    return states


def random_topk(rng: random.Random, flags: Flags, sample: Sample) -> TokenSets | None:
    """Where it is read some of the vocabulary, from one token to all; elsewhere nothing, or what must not be looked at."""
    rows = [rows for rows in rows_that_read(flags, sample, "teacher_topk") if rows is not None]
    if not rows and rng.random() < 0.6:
        return None
    read, trained = (
        {row for own in rows for row in own},
        torch.stack([sample.loss_mask, *sample.masks.values()]).any(dim=0),
    )
    width = rng.choice([1, 2, rng.randint(1, cases.VOCABULARY), cases.VOCABULARY])
    ids, logprobs = (
        torch.full((len(trained), width), -1, dtype=torch.int32),
        torch.full((len(trained), width), torch.nan),
    )
    for t in range(len(trained)):
        if t in read:
            named, values = random_teacher(rng, rng.randint(1, width) if rng.random() < 0.3 else width)
            places = rng.sample(range(width), len(named))
            ids[t, places] = torch.tensor(named, dtype=torch.int32)
            logprobs[t, places] = torch.tensor(values)
        elif not trained[t]:
            ids[t] = rng.choice([-7, 3, 2**31 - 1])
    return TokenSets(ids=ids, logprobs=logprobs)


def random_teacher(rng: random.Random, count: int) -> tuple[list[int], list[float]]:
    """Ids and their log-probabilities: the likeliest, or any; of a teacher that may give the others nothing, or hardly anything."""
    logits = [rng.gauss(0, 1.5) for _ in range(cases.VOCABULARY)]
    by_size = sorted(range(cases.VOCABULARY), key=logits.__getitem__, reverse=True)
    named = by_size[:count] if rng.random() < 0.7 else rng.sample(by_size, count)
    gap = rng.choice([0.0, 0.0, 0.0, math.inf])  # between, 1 - Σ p has no digits that two sums would share
    lowered = [z if j in named else z - gap for j, z in enumerate(logits)]
    total = math.log(sum(map(math.exp, lowered)))
    return named, [lowered[j] - total for j in named]


def random_field(rng: random.Random, flags: Flags, sample: Sample, name: str) -> Tensor | None:
    """Values where a live loss term reads them; elsewhere NaN, as far as a sample may hold it, or no field at all."""
    rows = [rows for rows in rows_that_read(flags, sample, name) if rows is not None]
    is_required = bool(rows) or (sample.term == "rl" and name in ("old_logprobs", "advantages"))
    if not is_required and rng.random() < 0.6:
        return None
    read = {row for own in rows for row in own}
    values = []
    for t, trained in enumerate(sample.loss_mask.tolist()):
        if t not in read and not trained:
            values.append(float("nan"))
        elif name == "advantages":
            values.append(rng.choice([-1.0, 1.0]) * rng.uniform(0.1, 2.0))
        else:
            values.append(rng.uniform(-4.0, -0.5) + (rng.choice([-25.0, 0.0]) if rng.random() < 0.02 else 0.0))
    return torch.tensor(values, dtype=torch.float64)


def rows_that_read(flags: Flags, sample: Sample, name: str) -> Iterable[list[int] | None]:
    """For each loss that reads a field the response tokens at which it does, None where the sample is no member."""
    document = documents([sample], [torch.zeros(len(sample.tokens), 1)])[0]
    if flags.has_policy and name in ("old_logprobs", "advantages", "rollout_logprobs"):
        yield document.rows("rl")
    for term in oracle.all_terms(flags.step([sample], [torch.zeros(len(sample.tokens), 1)])):
        against = {"opd": "teacher_logprobs", "kl": "ref_logprobs"}.get(term.kind)
        is_weighted = against is not None and term.estimator.endswith("_weighted")
        if (
            name == against
            or (name == "teacher_topk" and term.kind in TOPK)
            or (name == "teacher_hidden" and term.kind in WHOLE)
            or (name == "old_logprobs" and is_weighted)
        ):
            yield document.rows(term.tokens)


def live_rows(flags: Flags, sample: Sample) -> set[int]:
    """Response tokens that a loss of the step trains."""
    step = flags.step([sample], [torch.zeros(len(sample.tokens), 1)])
    tokens = {*(["rl"] if flags.has_policy else []), *(term.tokens for term in oracle.all_terms(step))}
    return {row for name in tokens for row in step.documents[0].rows(name) or ()}


def poisoned_logits(rng: random.Random, flags: Flags, samples: Sequence[Sample]) -> list[Tensor]:
    """[n, V] per sample; NaN, infinite or huge wherever no live loss term trains the token that is predicted."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    tables = []
    for sample in samples:
        table = 1.5 * torch.randn(len(sample.tokens), cases.VOCABULARY, dtype=torch.float64, generator=generator)
        live = {_first(sample) + t for t in live_rows(flags, sample)}
        for position in set(range(len(sample.tokens))) - live:
            table[position] = rng.choice(cases.BAD)
        tables.append(table)
    return tables
