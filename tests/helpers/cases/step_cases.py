"""Random optimizer steps with what the oracle expects of them, and how far an outcome of the simulation is from that.

    plain       the clipped objective under every aggregation and contract; all metrics are compared
    objective   every objective with corrections, KL and entropy terms, denominators and aggregations
    selection   corrections that choose tokens of the whole step, with ties and twins
    masked      an objective's case whose samples say what could be sampled

`term_cases` draws steps with further loss terms. `record.py` draws plain and objective cases, so their order of draws
stays.
"""

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import metric_oracle
import numpy as np
import selection_oracle
import simulation
import step_oracle
import torch
from compare import gradient_error, metrics_error, scalar_error
from loss_terms import kl_and_entropy
from samples import divisor_of, random_step
from selection_oracle import Rule
from simulation import EPS_HIGH, EPS_LOW, Layout, Outcome, Step
from step_oracle import Document, Settings
from token_oracle import KL_ESTIMATORS, RANGES
from torch import Tensor

from megatron_pg.declarations.aggregations import AGGREGATIONS as DECLARED
from megatron_pg.declarations.aggregations import STEP_MEANS, is_by_turn
from megatron_pg.declarations.corrections import CORRECTIONS, PENALTY
from megatron_pg.declarations.loss_terms import AS_POLICY, LossTerm
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.sample import Sample

VOCABULARY = 12
CUSTOM = "root_length"  # the aggregation of the cases that use the custom reducer below
BY_SAMPLE = tuple(name for name in sorted(DECLARED) if not is_by_turn(name))  # turns: `weight_cases`
AGGREGATIONS = (*BY_SAMPLE, CUSTOM)
CONTRACTS = [(aggregation, per_token) for aggregation in AGGREGATIONS for per_token in (False, True)]
BAD = (math.nan, math.inf, -math.inf, 1e30)
BOUNDS = {
    torch.float64: {"loss": 1e-12, "gradient": 1e-12, "metrics": 1e-12},
    torch.float32: {"loss": 1e-5, "gradient": 2e-6, "metrics": 1e-5},
}
KINK_MARGIN = {torch.float64: 1e-9, torch.float32: 1e-3}  # nearer to a clip bound, rounding decides on the gradient
MOST_CANCELLATION = {torch.float64: math.inf, torch.float32: 4.0}  # of 1 - p, which no float32 gradient can undo
METRIC_FLOOR = {torch.float64: 0.1, torch.float32: 1.0}
ROUNDINGS = 4 * torch.finfo(torch.float64).eps / 1e-12  # of what is summed, as a share of the tests' limit
MEANS = ("new_logprobs", "old_logprobs", "advantage", "entropy", "kl_new_ref")
PER_TERM = ("loss", "weight", "num_tokens", "num_rollouts", "mean")
PRODUCTS = ("topr", "vespo")  # whose ratio is a product over the sequence
CORRECTION_RANGES = {  # of the lower and the upper bound
    "tis": ((0.0, 0.8), (1.0, 2.0)),
    "seq_tis": ((0.0, 0.8), (1.0, 2.0)),
    "icepop": ((0.5, 0.95), (1.0, 1.5)),
    "kpop": (None, (1e-4, 0.05)),
    "mis": ((0.2, 0.9), (1.0, 3.0)),
    "seq_mask_tis": ((0.7, 0.99), (1.0, 1.4)),
    "opsm": (None, (-0.5, 0.5)),
}
PENALTY_COEF = 0.3


def root_length_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """A user's reducer: each sample's token sum over the root of its response length."""

    def reduce(x):
        parts = zip(x.split(response_lengths), loss_masks, strict=True)
        return sum((part * mask).sum() / math.sqrt(len(mask)) for part, mask in parts)

    return reduce


def numbers_of(objective: str) -> list[str]:
    return [number.name for number in OBJECTIVES[objective].numbers]


@dataclass(frozen=True)
class StepCase:
    """One optimizer step, in the words of the oracle and of the package."""

    samples: Sequence[Sample]
    logits: Sequence[Tensor]  # [n, V] of every sample
    asked: Settings
    loss: LossSettings
    rule: Rule | None = None  # of a correction that chooses tokens of the whole step
    keeps_entropy: bool = False  # entropies are over what could be sampled
    has_all_metrics: bool = False  # all metrics of the outcome are compared

    @classmethod
    def of(cls, samples: Sequence[Sample], logits: Sequence[Tensor], asked: Settings, **rest) -> "StepCase":
        """The case with the package's settings for the oracle's; further loss terms go through flags (`term_cases`)."""
        case = cls(samples, logits, asked, settings_of(asked), **rest)
        terms = replace(case.loss.terms, sampling_mask_entropy="kept" if case.keeps_entropy else "full")
        return replace(case, loss=with_rule(replace(case.loss, terms=terms), case.rule))

    @property
    def dtype(self) -> torch.dtype:
        return self.logits[0].dtype

    @cached_property
    def selected(self) -> list[np.ndarray]:
        """[R] bool of each sample: what the rule acts on."""
        return selection_oracle.select(rows_of(self.samples), self.rule)

    @cached_property
    def documents(self) -> list[Document]:
        found = [document_of(*pair, self.keeps_entropy) for pair in zip(self.samples, self.logits, strict=True)]
        for document, chosen in zip(found, self.selected, strict=True) if self.rule else ():
            if self.rule.name == PENALTY:
                document.penalised = chosen
            else:
                document.kept = ~chosen
        return found

    @cached_property
    def wanted(self) -> step_oracle.StepResult:
        return step_oracle.run(self.documents, self.asked)

    def step(self, layout: Layout, rng: random.Random) -> Step:
        """The step in a random cut."""
        cells = simulation.scatter_samples(self.samples, layout, rng)
        return Step(self.samples, self.logits, self.loss, cells, weight_version=self.asked.weight_version)

    def with_versions(self, seed: object) -> "StepCase":
        """The case with a weight version for most samples or tokens, and in most cases for the trainer."""
        rng = random.Random(f"versions {seed}")
        newest = rng.choice([0, 2, 40, 40, 2**61])
        samples = [replace(s, weight_version=_drawn_versions(s.response_length, newest, rng)) for s in self.samples]
        asked = replace(self.asked, weight_version=rng.choice([newest, newest, newest, None]))
        return replace(self, samples=samples, asked=asked)

    # ---- Errors ----

    def errors(self, found: Outcome) -> dict[str, float]:
        """By subject: losses on the scale of their magnitudes, the gradient on that of its largest entry."""
        assert found.num_nonfinite == 0
        errors = {"gradient": gradient_error(found.gradients, self.gradients)}
        if self.has_all_metrics:
            return errors | self._all_metrics(found)
        wanted = self.wanted
        if any(name != "rl" for name in wanted.terms):
            weights = {"rl": 1.0} | {term.name: term.weight for term in self.asked.all_terms}
            scale = sum(weights[name] * self._scale(name) for name in wanted.terms)
            errors["loss"] = scalar_error(found.metrics["loss"], wanted.loss, scale)
        errors |= self._policy_errors(found)
        for term in self.asked.terms:
            errors |= _term_errors(found.metrics, term.name, wanted.terms.get(term.name))
        if self.rule:
            self._check_selection(found)
        return errors

    @property
    def gradients(self) -> list[Tensor]:
        """[n, V] of every sample, as the oracle has them."""
        found = []
        for sample, table, rows in zip(self.samples, self.logits, self.wanted.gradients, strict=True):
            whole, first = torch.zeros_like(table, dtype=torch.float64), first_row(sample)
            whole[first : first + len(rows)] = torch.from_numpy(rows)
            found.append(whole)
        return found

    def _all_metrics(self, found: Outcome) -> dict[str, float]:
        policy = self.wanted.terms["rl"]
        reported = found.reported, found.metrics.get("pg_loss", math.nan)
        rewards, truncated = ([getattr(s, name) for s in self.samples] for name in ("reward", "truncated"))
        metrics = metric_oracle.step_metrics(self.documents, self.asked, policy, rewards, truncated)
        return {
            "loss": max(scalar_error(value, policy.loss, policy.magnitude) for value in reported),
            "metrics": metrics_error(found.metrics, metrics, ignore=["pg_loss"], floor=METRIC_FLOOR[self.dtype]),
        }

    def _scale(self, name: str) -> float:
        """What the loss of a term is compared on: sizes where it may cancel, else itself or a few roundings of sizes.

        In a token's e^-x - 1 + x, all digits may cancel.
        """
        result = self.wanted.terms[name]
        may_cancel = name == "rl" or self.asked.terms or self.samples[0].sampling_mask is not None
        return result.magnitude if may_cancel else max(abs(result.loss), ROUNDINGS * result.magnitude)

    def _policy_errors(self, found: Outcome) -> dict[str, float]:
        """Of pg_loss and of the KL and entropy terms, which are absent without a token of the objective."""
        terms, metrics = self.wanted.terms, found.metrics
        policy = terms.get("rl")
        is_there = policy is not None and policy.num_tokens > 0
        assert ("pg_loss" in metrics) == ("advantage" in metrics) == is_there
        if not is_there:
            return {"reported": abs(found.reported)}
        values = {"reported": found.reported, "pg_loss": metrics["pg_loss"]}
        errors = {name: scalar_error(value, policy.loss, policy.magnitude) for name, value in values.items()}
        assert metrics["num_tokens"] == policy.num_tokens
        assert metrics["num_rollouts"] == policy.num_rollouts
        assert metrics.get("reward") == self._mean_reward
        means = metric_oracle.token_metrics(step_oracle.capped(self.documents, self.asked.softcap), self.asked)
        for name in MEANS:
            assert (name in means) == (name in metrics), name
            if name in means:
                errors[name] = scalar_error(metrics[name], means[name], max(abs(means[name]), 1.0))
        for name, sign in (("kl", 1), ("entropy", -1), (PENALTY, 1)):
            assert (f"{name}_loss" in metrics) == (name in terms), name
            if name in terms:
                errors[f"{name}_loss"] = scalar_error(
                    sign * metrics[f"{name}_loss"], terms[name].loss, self._scale(name)
                )
        return errors

    @property
    def _mean_reward(self) -> float | None:
        """Over the rollouts of the objective; sums of these rewards are exact."""
        known = [(i, s) for i, s in enumerate(self.samples) if s.term == "rl" and s.reward is not None]
        rewards = {i if s.rollout_id is None else s.rollout_id: s.reward for i, s in known}
        return sum(rewards.values()) / len(rewards) if rewards else None

    def _check_selection(self, found: Outcome) -> None:
        """What is reported of a choice is exact."""
        count, size = sum(int(own.sum()) for own in self.selected), sum(s.num_trained for s in self.samples)
        assert found.metrics["selected_fraction"] == count / size
        logged = {name: value for name, value in found.metrics.items() if name.startswith("selection_")}
        assert logged == selection_oracle.facts(rows_of(self.samples), self.rule)


def worst_of(cases: Sequence[StepCase], layout: Layout, rng: random.Random, limit: float) -> float:
    """Worst error of the cases in a layout; what misses the limit is named."""
    outcomes = simulation.run_steps([case.step(layout, rng) for case in cases], layout)
    errors = [case.errors(outcome) for case, outcome in zip(cases, outcomes, strict=True)]
    bad = {
        f"{layout} case {i}, {subject}": (error, cases[i].asked, cases[i].rule)
        for i, own in enumerate(errors)
        for subject, error in own.items()
        if not error <= limit
    }
    assert not bad, bad
    return max(max(own.values()) for own in errors)


def _term_errors(metrics: dict[str, float], name: str, wanted: step_oracle.TermResult | None) -> dict[str, float]:
    """`wanted` is None of a term of weight 0."""
    found = {key: metrics[f"{name}/{key}"] for key in PER_TERM if f"{name}/{key}" in metrics}
    if wanted is None:
        assert not any(key.startswith(f"{name}/") for key in metrics), name
        return {}
    if not wanted.num_tokens:
        assert found == {}, name
        return {}
    assert (found["num_tokens"], found["num_rollouts"]) == (wanted.num_tokens, wanted.num_rollouts), name
    return {
        f"{name}/loss": scalar_error(found["loss"], wanted.loss, wanted.magnitude),
        f"{name}/weight": scalar_error(found["weight"], wanted.weight, wanted.weight),
        f"{name}/mean": scalar_error(found["mean"], wanted.mean, wanted.mean_magnitude),
        **_topk_errors(metrics, name, wanted.rows),
    }


def _topk_errors(metrics: dict[str, float], name: str, rows: Sequence) -> dict[str, float]:
    masses = [key for key in ("teacher_mass", "student_mass") if f"{name}/{key}" in metrics]
    assert metrics.get(f"{name}/num_floored", 0) == sum(row.is_floored for row in rows)
    return {
        f"{name}/{key}": scalar_error(metrics[f"{name}/{key}"], sum(getattr(row, key) for row in rows) / len(rows), 1.0)
        for key in masses
    }


# ---- From the package's words to the oracle's, and back ----


def first_row(sample: Sample) -> int:
    """The row of logits that predicts the first response token."""
    return len(sample.tokens) - sample.response_length - 1


def document_of(sample: Sample, table: Tensor, keeps_entropy: bool = False) -> Document:
    first = first_row(sample)
    names = {
        "old_logprobs": "old",
        "advantages": "advantages",
        "rollout_logprobs": "rollout",
        "ref_logprobs": "ref",
        "teacher_logprobs": "teacher",
    }
    known = {short: values.numpy() for name, short in names.items() if (values := getattr(sample, name)) is not None}
    version = sample.weight_version
    return Document(
        logits=table[first : first + sample.response_length].numpy(),
        targets=sample.tokens[first + 1 :].numpy(),
        mask=sample.loss_mask.numpy(),
        term=sample.term,
        masks={name: mask.numpy() for name, mask in sample.masks.items()},
        **known,
        whole=None if sample.teacher_hidden is None else sample.teacher_hidden.double().numpy(),
        topk=None if sample.teacher_topk is None else list(zip(*sample.teacher_topk.lists().values(), strict=True)),
        sets=None if sample.sampling_mask is None else sets_of(sample),
        keeps_entropy=keeps_entropy,
        token_weights=None if sample.token_weights is None else sample.token_weights.numpy(),
        turns=sample.turns,
        versions=None if version is None else torch.as_tensor(version).expand(sample.response_length).tolist(),
        rollout_id=sample.rollout_id,
        prompt_id=sample.prompt_id,
        reward=sample.reward,
    )


def sets_of(sample: Sample) -> list[list[int]]:
    ids, offsets = sample.sampling_mask.lists().values()
    return [ids[start:end] for start, end in itertools.pairwise(offsets)]


def rows_of(samples: Sequence[Sample]) -> list[selection_oracle.Row]:
    return [
        selection_oracle.Row(
            name=(s.step, s.prompt_id, s.rollout_id, s.response_length),
            tokens=s.tokens.numpy(),
            mask=s.loss_mask.numpy(),
            advantages=s.advantages.numpy(),
            old=s.old_logprobs.numpy(),
            rollout=s.rollout_logprobs.numpy(),
            entropies=s.old_entropies.numpy(),
        )
        for s in samples
    ]


def settings_of(asked: Settings) -> LossSettings:
    """The package's settings for the oracle's, without further terms."""
    is_custom, is_opsm = asked.aggregation == CUSTOM, asked.correction == "opsm"
    numbers = {name: asked.numbers[name] for name in numbers_of(asked.objective)}
    terms = LossTerms(
        objective=objective_of(asked.objective, **numbers),
        opsm_anchor="rollout_logprobs" if is_opsm else None,
        opsm_threshold=asked.correction_high if is_opsm else None,
        further=kl_and_entropy(
            kl_coef=asked.kl_coef,
            kl_estimator=asked.kl_estimator,
            entropy_coef=asked.entropy_coef,
            aggregation="policy" if asked.aux_aggregation == "policy" else STEP_MEANS[asked.per_token],
        ),
        grad_divisor=asked.grad_divisor,
    )
    low, high = asked.bounds
    return simulation.settings(
        "sample_mean" if is_custom else asked.aggregation,
        per_token=asked.per_token,
        divisor=asked.divisor,
        reducer=root_length_reducer if is_custom else None,
        temperature=asked.temperature,
        softcap=asked.softcap,
        terms=terms,
        correction=Correction(name=asked.correction, low=low, high=high),
        denominator=asked.denominator,
        sums_weights=asked.weight_denominator == "weights",
        sequence_level=asked.sequence_level,
    )


def with_rule(loss: LossSettings, rule: Rule | None) -> LossSettings:
    """The settings with a correction that chooses tokens of the whole step."""
    if rule is None:
        return loss
    is_penalty, terms = rule.name == PENALTY, loss.terms
    fraction = None if rule.fraction is None else float(rule.fraction)
    correction = Correction(
        name=rule.name, low=rule.low, high=rule.high, fraction=fraction, coef=PENALTY_COEF if is_penalty else None
    )
    if is_penalty:
        penalty = LossTerm(
            name=PENALTY, kind=PENALTY, weight=PENALTY_COEF, on="rl", aggregation=AS_POLICY, estimator="abs"
        )
        terms = replace(terms, further=(*terms.further, penalty))
    metrics = metrics_of("with_entropy", terms, correction)
    return replace(loss, correction=correction, terms=terms, seed=rule.seed, metrics=metrics)


# ---- Plain cases ----


def random_case(
    rng: random.Random,
    aggregation: str,
    *,
    per_token: bool,
    dtype: torch.dtype = torch.float64,
    temperature: float | None = None,
    most_tokens: int = 14,
) -> StepCase:
    """A plain case away from the clip bounds, where the gradient jumps, and whose gradient the precision can hold."""
    while True:
        samples = random_step(rng, vocabulary=VOCABULARY, most_tokens=most_tokens)
        logits = poisoned_logits(samples, rng, dtype)
        divisor = divisor_of(aggregation, rng.uniform(1, 5000))
        scale = rng.choice([1.0, 0.7]) if temperature is None else temperature
        case = plain_case(samples, logits, aggregation, per_token=per_token, divisor=divisor, temperature=scale)
        if is_well_conditioned(case):
            return case


def plain_case(samples: Sequence[Sample], logits: Sequence[Tensor], aggregation: str, **rest) -> StepCase:
    """The clipped objective alone."""
    numbers = {"clip_eps_low": EPS_LOW, "clip_eps_high": EPS_HIGH}
    return StepCase.of(
        samples, logits, Settings(numbers=numbers, aggregation=aggregation, **rest), has_all_metrics=True
    )


def is_well_conditioned(case: StepCase) -> bool:
    ratios = np.concatenate([own.ratio for own in metric_oracle.policy_tokens(case.documents, case.asked.temperature)])
    near = [np.abs(ratios - bound) <= KINK_MARGIN[case.dtype] for bound in (1 - EPS_LOW, 1 + EPS_HIGH)]
    if np.any(near):
        return False
    most = MOST_CANCELLATION[case.dtype]
    return most == math.inf or _cancellation(case) <= most


def _cancellation(case: StepCase) -> float:
    """max |g w / temperature| over max |dJ/dz|, at least 1: what 1 - p of a near-certain token loses to rounding."""
    policy = case.wanted.terms["rl"]
    pairs = zip(policy.weights, policy.slopes, strict=True)
    scales = [np.abs(w * part).max() / case.asked.temperature for w, part in pairs if part is not None]
    largest = max(np.abs(table).max() for table in case.wanted.gradients)
    return max(scales) / largest if largest > 0 else 1.0


def poisoned_logits(samples: Sequence[Sample], rng: random.Random, dtype=torch.float64, silent=None) -> list[Tensor]:
    """[n, V] per sample; NaN and inf at its `silent` positions, by default those whose logits predict no trained
    token."""
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    tables = []
    for sample in samples:
        table = 1.5 * torch.randn(len(sample.tokens), VOCABULARY, dtype=dtype, generator=generator)
        for position in (silent or silent_positions)(sample):
            table[position] = rng.choice(BAD)
        tables.append(table)
    return tables


def silent_positions(sample: Sample) -> list[int]:
    """Positions whose logits predict no trained token."""
    predicts = {first_row(sample) + k for k, trained in enumerate(sample.loss_mask.tolist()) if trained}
    return [position for position in range(len(sample.tokens)) if position not in predicts]


def _drawn_versions(size: int, newest: int, rng: random.Random) -> int | list[int] | None:
    """Of one sample: none, one, or one for each token, of ages on both sides of every bound."""
    oldest = max(newest - 1000, 0)
    ages = [min(rng.choice([0, 0, 1, 2, 3, 4, 5, 8, 9, newest - oldest]), newest) for _ in range(size)]
    return rng.choice([None, newest - ages[0], [newest - age for age in ages]])


# ---- Objectives ----


def random_objective_case(rng: random.Random, objective: str) -> StepCase:
    samples = [_with_engines(sample, rng) for sample in random_step(rng, vocabulary=VOCABULARY)]
    logits = poisoned_logits(samples, rng)
    asked = random_settings(rng, objective)
    if OBJECTIVES[objective].has_one_advantage_per_sequence:
        samples = [_with_one_advantage(sample) for sample in samples]
    if objective in PRODUCTS:
        near = zip(samples, logits, strict=True)
        samples = [_with_near_anchor(sample, table, asked.temperature, rng) for sample, table in near]
    case = StepCase.of(samples, logits, asked)
    if asked.denominator == "kept" and not keeps_some(case):
        return StepCase.of(samples, logits, replace(asked, denominator="live"))
    return case


def keeps_some(case: StepCase) -> bool:
    """Whether the correction leaves a token of the objective."""
    return any(factors.any() for factors in case.wanted.terms["rl"].factors if factors is not None)


def _with_engines(sample: Sample, rng: random.Random) -> Sample:
    """The sample with rollout and reference log-probabilities, one token in 50 far from the others."""
    size, spread = sample.response_length, rng.choice([0.02, 0.2, 0.6])
    noise = [rng.gauss(0, spread) for _ in range(size)]
    far = [rng.choice([-25.0, 0.0]) if rng.random() < 0.02 else 0.0 for _ in range(size)]
    old = sample.old_logprobs + torch.tensor(far, dtype=torch.float64)
    rollout = (old + torch.tensor(noise, dtype=torch.float64)).clamp(max=0)
    ref = torch.tensor([rng.uniform(-5, -0.5) for _ in range(size)], dtype=torch.float64)
    return replace(sample, old_logprobs=old, rollout_logprobs=rollout, ref_logprobs=ref)


def _with_one_advantage(sample: Sample) -> Sample:
    trained = sample.advantages[sample.loss_mask]
    return replace(sample, advantages=torch.where(sample.loss_mask, trained[:1].sum(), sample.advantages))


def _with_near_anchor(sample: Sample, table: Tensor, temperature: float, rng: random.Random) -> Sample:
    """The sample with old log-probabilities from which a product of ratios over the sequence is not 0 or infinite."""
    rows = table[first_row(sample) : first_row(sample) + sample.response_length] / temperature
    new = rows.log_softmax(-1).gather(1, sample.tokens[first_row(sample) + 1 :, None])[:, 0]
    noise = torch.tensor([rng.gauss(0, 0.3) for _ in new], dtype=torch.float64)
    old = torch.where(sample.loss_mask, (new + noise).clamp(max=0), sample.old_logprobs)
    return replace(sample, old_logprobs=old)


def random_settings(rng: random.Random, objective: str) -> Settings:
    numbers = {name: rng.uniform(*RANGES[name]) for name in numbers_of(objective)}
    correction = rng.choice(["none", *CORRECTION_RANGES])
    low, high = CORRECTION_RANGES.get(correction, (None, None))
    aggregation = rng.choice(BY_SAMPLE)
    return Settings(
        objective=objective,
        numbers=numbers,
        aggregation=aggregation,
        divisor=divisor_of(aggregation, rng.uniform(1, 5000)),
        temperature=rng.choice([1.0, 0.7]),
        correction=correction,
        correction_low=rng.uniform(*low) if low else None,
        correction_high=rng.uniform(*high) if high else None,
        denominator=rng.choice(["scheduled", "live", *(["kept"] if CORRECTIONS[correction].rejects == "data" else [])]),
        kl_coef=rng.choice([0.0, rng.uniform(0.01, 2.0)]),
        kl_estimator=rng.choice(sorted(KL_ESTIMATORS)),
        entropy_coef=rng.choice([0.0, rng.uniform(0.01, 2.0)]),
        aux_aggregation=rng.choice(["default", "policy"]),
        per_token=rng.random() < 0.5,
        grad_divisor=rng.choice([1.0, 64.0]),
    )


# ---- Corrections that choose tokens of the whole step ----

SELECTIONS = tuple(name for name, declared in CORRECTIONS.items() if declared.selection)
FRACTIONS = ("0.0002", "0.1", "0.25", "0.29", "0.5", "0.97")


def random_rule(rng: random.Random, name: str) -> Rule:
    """Fractions from none of a step's tokens to nearly all; bounds that some keys reach, and lie on."""
    seed = rng.choice([0, 1234])
    if name == "m2po":
        return Rule(name, high=rng.choice([1e-3, 1 / 64, 0.04, 0.25, 10.0]), seed=seed)
    bounds = {"low": rng.choice([-2.0, 0.0, 0.0625]), "high": 1.5} if name == "clip_cov" else {}
    return Rule(name, fraction=rng.choice(FRACTIONS), seed=seed, **bounds)


def random_selection_case(rng: random.Random, name: str, objective: str) -> StepCase:
    """A case of an objective without another correction; nothing but what the choice leaves is counted in some."""
    made = random_objective_case(rng, objective)
    samples, twin = with_keys(made.samples, rng)
    logits = [*made.logits, *[made.logits[twin]] * (len(samples) - len(made.samples))]
    asked = replace(
        made.asked, correction="none", penalty_coef=PENALTY_COEF if name == PENALTY else 0.0, denominator="scheduled"
    )
    case = StepCase.of(samples, logits, asked, rule=random_rule(rng, name))
    keeps = sum(s.num_trained for s in samples) > sum(int(own.sum()) for own in case.selected)
    if name == PENALTY or not keeps:
        return case
    denominators = ["scheduled", "kept", *(["live"] if asked.aggregation != "token_mean" else [])]
    return StepCase.of(samples, logits, replace(asked, denominator=rng.choice(denominators)), rule=case.rule)


def with_keys(samples: Sequence[Sample], rng: random.Random) -> tuple[list[Sample], int]:
    """The samples with fields that keys are made of, and then up to two twins of one of them: its name, other numbers.

    The fields have few values in most steps, so that choices end among equals. The second result is the twins'
    original.
    """
    is_coarse, twin = rng.random() < 0.7, rng.randrange(len(samples))
    found = [with_fields(sample, rng, is_coarse=is_coarse) for sample in samples]
    twins = [with_fields(samples[twin], rng, is_coarse=is_coarse) for _ in range(rng.choice([0, 0, 1, 2]))]
    return found + twins, twin


def with_fields(sample: Sample, rng: random.Random, *, is_coarse: bool) -> Sample:
    def draw(low: float, high: float) -> list[float]:
        size = sample.response_length
        return [
            rng.randint(int(2 * low), int(2 * high)) / 2 if is_coarse else rng.uniform(low, high) for _ in range(size)
        ]

    old = draw(-2.5, -0.5)
    fields = {
        "old_logprobs": old,
        "advantages": draw(-2.0, 2.0),
        "rollout_logprobs": [o + x for o, x in zip(old, draw(-0.5, 0.5), strict=True)],
        "old_entropies": draw(0.0, 1.0),
    }
    whole = {name: torch.tensor(values, dtype=torch.float64) for name, values in fields.items()}
    return replace(sample, **{name: torch.where(sample.loss_mask, values, torch.nan) for name, values in whole.items()})


# ---- Samples that say what could be sampled ----

OF_ROLLOUT = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


def random_masked_case(rng: random.Random, objective: str) -> StepCase:
    base = random_objective_case(rng, objective)
    samples = [_with_sets(sample, rng) for sample in base.samples]
    if objective in PRODUCTS:
        pairs = zip(samples, base.logits, strict=True)
        near = [_with_near_anchor(s, _restricted(s, t), base.asked.temperature, rng) for s, t in pairs]
        samples = [with_certain_tokens(sample) for sample in near]
    case = StepCase.of(samples, base.logits, base.asked, keeps_entropy=rng.random() < 0.5)
    if base.asked.denominator == "kept" and not keeps_some(case):
        return random_masked_case(rng, objective)
    return case


def _with_sets(sample: Sample, rng: random.Random) -> Sample:
    """The sample with a set for each token: itself alone, several, the whole vocabulary, none; garbage where it is
    masked."""
    tokens, trained = sample.tokens[-sample.response_length :].tolist(), sample.loss_mask.tolist()
    sets = [random_set(rng, token)[0] if live else [99, 99, -7] for token, live in zip(tokens, trained, strict=True)]
    return with_certain_tokens(replace(sample, sampling_mask=PAYLOADS["sampling_mask"].of(sets, sample.sample_id)))


def random_set(rng: random.Random, token: int) -> tuple[list[int], list[int]]:
    """A set with the token, or an empty one, and the same without it."""
    size = rng.choice([0, 1, 2, 3, 5, VOCABULARY])
    others = rng.sample([j for j in range(VOCABULARY) if j != token], max(size - 1, 0))
    return rng.sample([token, *others], size) if size else [], others


def with_certain_tokens(sample: Sample) -> Sample:
    """A token that was the only one has log-probability 0 under every policy over its set."""
    alone = sample.sampling_mask.counts == 1
    known = {name: values for name in OF_ROLLOUT if (values := getattr(sample, name)) is not None}
    return replace(sample, **{name: torch.where(alone, 0.0, values) for name, values in known.items()})


def _restricted(sample: Sample, table: Tensor) -> Tensor:
    """The logits with -inf outside each response token's set."""
    table = table.clone()
    for k, allowed in enumerate(sets_of(sample)):
        outside = [j for j in range(table.shape[1]) if allowed and j not in allowed]
        table[first_row(sample) + k, outside] = -torch.inf
    return table
