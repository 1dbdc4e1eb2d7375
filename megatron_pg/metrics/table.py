"""Every metric, declared once: name, level, formula, reduction, and what a reader needs to know about it.

`docs/metrics.md` is written from these declarations. The kinds:

    mean     over samples with a trained token, of the sample's mean over its trained tokens
    sum      over the objective's trained tokens of the step
    all      over the trained tokens of the step, those of loss terms too
    total    a sum that the formula computes over this rank's part of a micro-batch
    age      a sum over the objective's trained tokens whose weights have an age; the formula gives those of all ages
    max min  over the trained tokens of the step
    rank     of sums over each data-parallel rank's trained tokens
    step     an integer of the step plan
    rollout  over the rollouts of the step that carry the value, fully masked ones included (`samples`)
    ratio    of sums and extrema, formed after they are reduced
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from megatron_pg.declarations.corrections import PENALTY
from megatron_pg.declarations.loss_terms import KINDS, LossTerm
from megatron_pg.metrics import ages, gap
from megatron_pg.objectives.interface.tokens import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One diagnostic. `formula` maps TokenValues, the step plan or the reduced sums to values, by `kind`."""

    name: str
    formula: Callable[[Any], Any]
    equation: str
    unit: str
    meaning: str
    _: KW_ONLY
    kind: str = "mean"  # or "sum", "all", "total", "age", "max", "min", "rank", "step", "rollout", "ratio"
    level: str = "basic"  # of `--pg-metrics`, the first that has it
    needs: str | None = None  # field of the samples without which the metric is absent
    only_with: str | None = None  # feature of the loss (settings.features_of) without which the metric is absent
    term: str | None = None  # without a token of which the metric is absent; None: the objective
    is_reported: bool = True  # False: only a ratio needs it
    role: str | None = "policy"  # of the model without which the metric is absent; None: any
    power: int = 0  # of the weights, and so of 1/N, in its formula
    per: Callable[[Any], float] | None = None  # of the step plan: what the reduced sum is divided by


def _k3(x: Tensor) -> Tensor:
    """e^-x - 1 + x, not negative: its mean over samples of p estimates KL(p‖q) for x = log p - log q."""
    return torch.expm1(-x) + x


def _kind(kind: str, **shared: Any) -> Callable[..., Metric]:
    """Makes the metrics of a kind; the text of a metric is "equation [unit]: meaning"."""

    def metric(name: str, formula: Callable[[Any], Any], text: str, **rest: Any) -> Metric:
        equation, unit, meaning = re.split(r" \[|\]: ", text, maxsplit=2)
        return Metric(name, formula, equation, unit, meaning, kind=kind, **(shared | rest))

    return metric


_mean, _sum, _total, _max, _min, _ratio = map(_kind, ("mean", "sum", "total", "max", "min", "ratio"))
_part, _of_age = (_kind(kind, is_reported=False) for kind in ("sum", "age"))
_step = _kind("step", role=None)
_loss, _clip = _kind("sum", level="none", power=1), _kind("mean", only_with="clip")
_sequence, _correction = _kind("sum", only_with="sequence"), _kind("mean", only_with="correction")
_selection, _farthest = _kind("step", only_with="selection"), _kind("rank", needs="rollout_logprobs")


def _count(name: str, text: str, *, is_policys: bool = False) -> Metric:
    """An integer of the step plan, under its name there; of the objective: only in steps with a rollout of it."""
    value = attrgetter(name)
    return _step(name, (lambda p: value(p) if p.num_rollouts else None) if is_policys else value, text)


def _fact(name: str, text: str, **rest: Any) -> Metric:
    """A property of `SampleFacts`, under its name there."""
    return _kind("rollout", role=None)(name, attrgetter(name), text, **rest)


def _of_gap(name: str, formula: Callable[[gap.Sums], Any], text: str) -> Metric:
    """A statistic of trainer against rollout engine."""
    return _ratio(f"mismatch/{name}", lambda s: formula(_gap_sums(s)), text, needs="rollout_logprobs")


def _gap_sums(sums: Mapping[str, float]) -> dict[str, float]:
    return {name: sums[_GAP + name] for name in gap.SUMS}


def _summand(name: str) -> Metric:
    """A sum that the statistics of trainer against rollout engine read."""
    return _part(_GAP + name, lambda t: t.gap[name], "Σ [–]: part of mismatch/…", needs="rollout_logprobs")


def _by_age(name: str, of: str, text: str) -> list[Metric]:
    """A mean over the trained tokens whose weights have an age, for each age."""
    return [_ratio(f"staleness/{name}age_{age}", partial(ages.mean, of, [age]), text) for age in ages.BINS]


_MOMENTS = {  # of values v, returns R and errors e over the trained tokens
    "v": lambda t: t.result.logprobs,
    "vv": lambda t: t.result.logprobs.square(),
    "R": lambda t: t.fields.advantages,
    "RR": lambda t: t.fields.advantages.square(),
    "e": lambda t: t.fields.advantages - t.result.logprobs,
    "ee": lambda t: (t.fields.advantages - t.result.logprobs).square(),
}


def _of_critic(name: str, formula: Callable[[gap.Sums], Any], text: str) -> Metric:
    """A statistic of a critic's values and returns over the T trained tokens of the step."""

    def of_sums(sums: Mapping[str, float]) -> Any:
        return formula({"near": sums["num_tokens"]} | {moment: sums[f"_critic/{moment}"] for moment in _MOMENTS})

    return _ratio(name, of_sums, text, role="critic")


def _farthest_rank(ranks: Any) -> tuple[Any, Any]:
    """The rank and its factor."""
    return gap.farthest_rank([_gap_sums(sums) for sums in ranks]) or (None, None)


def own_metric(name: str) -> Metric:
    """A value that a custom objective reports in addition to its loss."""
    return _mean(name, lambda t: t.own[name], "your objective's [yours]: reported by the custom objective")


def term_metrics(term: LossTerm) -> tuple[Metric, ...]:
    """The metrics of a loss term that the table does not list."""
    name, loss = term.name, KINDS[term.kind].formula
    of_all, of_step, ratio = (_kind(kind, term=name) for kind in ("all", "step", "ratio"))
    part = _kind("sum", term=name, is_reported=False)
    count = f"{name}/num_tokens"

    def mean(suffix: str, formula: Callable, equation: str, unit: str, meaning: str) -> tuple[Metric, Metric]:
        sums, mean = f"_{name}/{suffix}", f"{name}/{suffix}"
        return (
            part(sums, formula, f"{equation} [{unit}]: part of the mean"),
            ratio(mean, lambda s: s[sums] / s[count], f"{equation} / n [{unit}]: {meaning}"),
        )

    metrics = (
        of_all(
            f"{name}/loss",
            lambda t: _weighted(t, name),
            f"Σ w·({loss}) [nats]: the loss term before its weight",
            level="none",
            power=1,
        ),
        of_all(f"{name}/weight", lambda t: t.of_term(name)[0], "Σ w [1]: the sum of its tokens' weights", power=1),
        of_step(count, lambda p: p.terms[name].num_tokens, "n [tokens]: its trained tokens"),
        of_step(
            f"{name}/num_rollouts",
            lambda p: p.terms[name].num_rollouts,
            "N [rollouts]: rollouts with samples of the term",
        ),
        *mean("mean", lambda t: t.of_term(name)[1], f"Σ ({loss})", "nats", "mean of its tokens"),
    )
    if not term.reads_topk:
        return metrics
    teachers = "probability that the teacher gives its top-k tokens"
    masses = (
        *mean("teacher_mass", lambda t: t.teacher_mass(name), "Σ Σ_S p", "1", teachers),
        *mean("student_mass", lambda t: t.student_mass(name), "Σ Σ_S q", "1", "probability that the policy gives them"),
    )
    if term.tail_floor is None:
        return *metrics, *masses
    text = "Σ 1[1 - Σ_S p < floor] [tokens]: tokens whose teacher tail is raised to `tail_floor` of `--pg-term`"
    return *metrics, *masses, of_all(f"{name}/num_floored", lambda t: t.is_floored(term), text)


def _weighted(tokens: Any, term: str) -> torch.Tensor:
    """w·ℓ of a term."""
    weights, losses = tokens.of_term(term)
    return weights * losses


_TARGET: dict[str, Any] = {"level": "none", "only_with": "adaptive_entropy"}
_GAP = "_mismatch/"  # before the names of its sums

METRICS: tuple[Metric, ...] = (
    _loss(
        "pg_loss",
        lambda t: t.fields.weights * t.token_losses,
        "Σ w·ℓ [objective]: the policy loss, with the weights of `--loss-aggregation` and its correction; not "
        "multiplied by K, D or T",
    ),
    _loss(
        "value_loss",
        lambda t: t.fields.weights * t.token_losses,
        "Σ w·ℓ [return²]: a critic's loss, with the weights of `--loss-aggregation`",
        role="critic",
    ),
    _total(
        "loss",
        lambda t: t.total,
        "Σ w·ℓ + Σ_s λ_s·Σ w^s·ℓ^s + λ·mtp_loss [objective]: the loss whose gradient is taken (before "
        "`--pg-grad-divisor`): objective, all loss terms (β·Σ u·k of KL, -η·Σ u·H of entropy, …), multi-token "
        "prediction",
        level="none",
        only_with="further",
        power=1,
    ),
    _loss(
        "kl_loss",
        lambda t: _weighted(t, "kl"),
        "Σ u·k, k of `--pg-kl-estimator` [nats]: the KL term before its coefficient, with the weights of "
        "`--pg-aux-aggregation`",
        only_with="kl",
    ),
    _loss(
        "entropy_loss",
        lambda t: -_weighted(t, "entropy"),
        "Σ u·H [nats]: the entropy term before its coefficient (it is subtracted), with the weights of "
        "`--pg-aux-aggregation`",
        only_with="entropy",
    ),
    _part("_u", lambda t: t.of_term("entropy")[0], "Σ u [1]: part of entropy_mean", **_TARGET, power=1),
    _ratio(
        "entropy_mean",
        lambda s: s["entropy_loss"] / s["_u"],
        "Σ u·H / Σ u [nats]: the mean entropy that decides the next step's coefficient",
        **_TARGET,
    ),
    _max(
        "entropy_coef",
        lambda t: torch.full_like(t.result.logprobs, t.terms.adaptive_entropy.value),
        "η [1]: the entropy coefficient of this step, 0 after a step above the target",
        **_TARGET,
    ),
    _loss(
        "kl_cov_loss",
        lambda t: _weighted(t, PENALTY),
        "Σ w·|log r| over the chosen tokens [nats]: the penalty of `--pg-correction kl_cov` before its coefficient, "
        "with the weights of pg_loss",
        only_with=PENALTY,
    ),
    _total(
        "mtp_loss",
        lambda t: t.totals["mtp_loss"],
        "(1/N) Σ_d Σ v·ce_d [nats]: cross-entropy of multi-token prediction before its coefficient, with the weights "
        "of `--pg-mtp-aggregation`, mean over the N depths; KL(π‖π_d) with `--pg-mtp-target policy`",
        level="none",
        only_with="mtp",
        power=1,
    ),
    _total(
        "mtp_acceptance",
        lambda t: t.totals["mtp_accepted"],
        "Σ_d Σ 1[target is the most likely] / Σ_d n_d [fraction]: response tokens that greedy "
        "multi-token prediction would have drafted correctly, over all depths",
        only_with="mtp",
        per=lambda plan: max(sum(plan.depth_counts), 1),
    ),
    _fact("reward", "Σ reward / num_rewards [reward]: mean reward", needs="reward"),
    _fact(
        "reward_std", "√(Σ (reward - mean)² / num_rewards) [reward]: standard deviation of the rewards", needs="reward"
    ),
    _fact("max_reward", "max reward [reward]: largest reward", needs="reward"),
    _fact("min_reward", "min reward [reward]: smallest reward", needs="reward"),
    _fact(
        "num_rewards", "Σ 1[has a reward] [rollouts]: rollouts with a reward; only these count in metrics of rewards"
    ),
    _fact(
        "zero_variance_fraction",
        "1[max reward = min reward] of a prompt [fraction]: prompts whose rewards are all equal, of those with rewards "
        "of two rollouts or more: a group baseline makes their advantages 0; absent if no prompt has that many",
    ),
    _fact(
        "response_length",
        "Σ response_length / num_rollouts [tokens]: mean number of response tokens of a rollout, trained or not, all "
        "its samples together",
    ),
    _fact("max_response_length", "max response_length [tokens]: most response tokens of a rollout"),
    _fact(
        "truncated_fraction",
        "1[truncated] [fraction]: rollouts with a sample that has `truncated=True`, of the rollouts whose samples have "
        "the field",
        needs="truncated",
    ),
    _count("num_tokens", "T [tokens]: tokens that the objective trains", is_policys=True),
    _step(
        "num_tokens_masked",
        lambda plan: plan.num_response_tokens - plan.num_trained,
        "Σ (1 - m) over responses [tokens]: response tokens that are not trained (tool output, truncated samples)",
    ),
    _step(
        "num_tokens_missing",
        attrgetter("num_missing"),
        "Σ 1[y ∉ S] [tokens]: tokens that their samples' sampling masks do not contain, masked before anything is "
        "counted",
        only_with="sampling_mask_missing",
    ),
    _count("num_samples", "S [samples]: training sequences (documents), fully masked ones included"),
    _count("num_rollouts", "N_r [rollouts]: trajectories, fully masked ones included", is_policys=True),
    _count("num_prompts", "P [prompts]: prompt groups; absent when samples have no prompt_id", is_policys=True),
    _count("num_turns", "N_turn [turns]: turns with a trained token; this and the next two only if turns are counted"),
    _step(
        "turn_length",
        lambda p: p.num_tokens / p.num_turns if p.num_turns else None,
        "T / N_turn [tokens]: mean number of trained tokens of a turn",
    ),
    _step(
        "turns_per_rollout",
        lambda p: p.num_turns / p.num_rollouts if p.num_turns else None,
        "N_turn / N_r [turns]: mean number of turns of a rollout",
    ),
    _mean("new_logprobs", lambda t: t.result.logprobs, "l [nats]: log-probability under the model being trained"),
    _mean("old_logprobs", lambda t: t.fields.old_logprobs, "o [nats]: log-probability under the sampling policy"),
    _mean("ratio_new_old", lambda t: t.ratios, "r = e^(l - o) [1]: probability ratio, new over old"),
    _sum(
        "ratio_new_old_sum",
        lambda t: t.ratios,
        "Σ m·r [tokens]: sum of the ratios; divided by num_tokens it is near 1 on-policy",
    ),
    _sum("ratio_new_old_squared_sum", lambda t: t.ratios.square(), "Σ m·r² [tokens]: sum of the squared ratios"),
    _ratio(
        "ess",
        lambda s: s["ratio_new_old_sum"] ** 2 / (s["ratio_new_old_squared_sum"] * s["num_tokens"]),
        "(Σ m·r)² / (Σ m·r² · T) [fraction]: effective sample size of the importance ratios, at most 1",
    ),
    _mean(
        "mean_abs_log_ratio",
        lambda t: t.result.log_ratios.abs(),
        "|l - o| [nats]: distance of the two policies on the samples",
    ),
    _mean(
        "kl_new_old",
        lambda t: t.ratios - 1 - t.result.log_ratios,
        "k3 = r - 1 - log r [nats]: over samples of the old policy this estimates KL(old‖new), not KL(new‖old)",
    ),
    _clip(
        "clipped_ratio_fraction",
        lambda t: t.outside[0] | t.outside[1],
        "1[r < 1 - ε_low or r > 1 + ε_high] [fraction]: outside the objective's bounds for either sign of A (gspo: R "
        "of its sequence; cispo: the weight's bounds; dppo: the trust region; ipo: the band; gmpo: log r): an upper "
        "bound of the tokens without gradient",
    ),
    _clip(
        "clipped_high_fraction",
        lambda t: t.outside[0] & (t.fields.advantages > 0),
        "1[A > 0, r > 1 + ε_high] [fraction]: tokens that lost their gradient because they already rose enough",
    ),
    _clip(
        "clipped_low_fraction",
        lambda t: t.outside[1] & (t.fields.advantages < 0),
        "1[A < 0, r < 1 - ε_low] [fraction]: tokens that lost their gradient because they already fell enough",
    ),
    _sequence(
        "segment_ratio_sum",
        lambda t: t.sequence_weights * t.sequence_ratios,
        "Σ R over sequences [sequences]: sum of the sequence ratios R = exp(mean of l - o), of samples or of turns "
        "(`--pg-sequence-level`)",
    ),
    _sequence(
        "segment_ratio_squared_sum",
        lambda t: t.sequence_weights * t.sequence_ratios.square(),
        "Σ R² over sequences [sequences]: sum of the squared sequence ratios",
    ),
    _sequence(
        "num_segments",
        lambda t: t.sequence_weights,
        "sequences with a trained token [sequences]: number of sequence ratios",
    ),
    _correction(
        "correction_factor", lambda t: t.corrections, "κ·γ [1]: factor of `--pg-correction` on the policy loss"
    ),
    _correction(
        "rejected_fraction",
        lambda t: t.corrections == 0,
        "1[κ·γ = 0] [fraction]: trained tokens that `--pg-correction` removes from the policy loss",
    ),
    _selection(
        "selected_fraction",
        lambda plan: plan.selection.fraction,
        "selected tokens / T [fraction]: trained tokens of the step that a token selection removes from the "
        "policy loss, or penalizes (kl_cov)",
    ),
    _selection(
        "selection_threshold",
        lambda plan: plan.selection.threshold,
        "the smallest score that is selected; top_entropy: the smallest H that is kept [the score's]: the threshold "
        "of the score, cov, (log ρ)² or H; absent with clip_cov, which draws, and if m2po or kl_cov selects nothing",
    ),
    _selection(
        "selection_candidates",
        lambda plan: plan.selection.num_candidates,
        "Σ 1[lo < cov < hi] [tokens]: tokens from which clip_cov draws",
    ),
    _mean(
        "clamped_log_ratio_fraction",
        lambda t: t.result.log_ratios.abs() > MAX_LOG_RATIO,
        f"1[|l - o| > {MAX_LOG_RATIO:g}] [fraction]: log-ratio too large to be meaningful: value clamped, gradient 0",
    ),
    _mean("advantage", lambda t: t.fields.advantages, "A [reward]: advantage"),
    _max("max_advantage", lambda t: t.fields.advantages, "max A [reward]: largest advantage of a trained token"),
    _min("min_advantage", lambda t: t.fields.advantages, "min A [reward]: smallest advantage of a trained token"),
    _ratio(
        "aggregation_ess",
        lambda s: s["_weights"] * s["_weights"] / (s["num_tokens"] * s["_squared_weights"]),
        "(Σ w)² / (T · Σ w²) [fraction]: how evenly the aggregation spreads the gradient over tokens; 1 for "
        "token_mean and constant",
        role=None,
    ),
    _mean(
        "kl_new_ref",
        lambda t: _k3(t.result.logprobs - t.fields.ref_logprobs),
        "k3 of x = l - f: e^-x - 1 + x [nats]: estimates KL(new‖ref) on near-on-policy samples; not clamped",
        needs="ref_logprobs",
    ),
    _mean(
        "ratio_new_ref",
        lambda t: (t.result.logprobs - t.fields.ref_logprobs).exp(),
        "e^(l - f) [1]: probability ratio, new over reference",
        needs="ref_logprobs",
    ),
    _mean(
        "mismatch_kl",
        lambda t: _k3(t.fields.rollout_logprobs - t.fields.old_logprobs),
        "k3 of x = b - o: e^-x - 1 + x [nats]: estimates KL(rollout engine‖trainer) of the sampling policy",
        needs="rollout_logprobs",
    ),
    _max(
        "mismatch_max",
        lambda t: (t.fields.old_logprobs - t.fields.rollout_logprobs).abs(),
        "max |o - b| [nats]: largest gap between trainer and rollout engine on one token",
        needs="rollout_logprobs",
    ),
    _of_gap(
        "difference",
        gap.difference,
        "mean of d = o - b, of tokens with |d| ≤ 3 [nats]: mean gap between trainer and rollout engine",
    ),
    _of_gap("spread", gap.spread, "standard deviation of d, |d| ≤ 3 [nats]: how much the gap varies"),
    _of_gap(
        "correlation",
        gap.correlation,
        "cov(d, b)/√(var d · var b), |d| ≤ 3 [1]: whether d follows the log-probability; absent where all d are equal",
    ),
    _of_gap(
        "temperature",
        gap.temperature,
        "1/κ, κ = cov(e, o)/cov(e, b), e = e^d - 1 [1]: the trainer's temperature over the engine's; absent where d "
        "does not follow the log-probability (|correlation| < 0.5) or spreads by less than 0.02 nats",
    ),
    _of_gap(
        "missing_mass",
        gap.missing_mass,
        "1 - E[e^d], or 1 - E[e^-d] if that is larger [fraction]: probability of columns that only one side counts",
    ),
    _of_gap(
        "outlier_fraction", gap.outlier_fraction, "1[|d| > 0.5] [fraction]: tokens with a gap of more than 0.5 nats"
    ),
    _farthest(
        "mismatch/rank",
        lambda ranks: _farthest_rank(ranks)[0],
        "argmax_r of mean_r |d| over the mean of the other ranks [rank]: the data-parallel rank that is furthest from "
        "the rollout engine; absent with one rank",
    ),
    _farthest(
        "mismatch/rank_factor",
        lambda ranks: _farthest_rank(ranks)[1],
        "mean_r |d| over the mean of the other ranks, |d| up to 3 [1]: how much further it is than the others",
    ),
    *map(_summand, gap.SUMS),
    _ratio(
        "staleness/mean_age",
        partial(ages.mean, "ages", ages.BINS),
        "Σ (v - v_t) / n [steps]: mean age of the weights that sampled the tokens: optimizer steps v of the trainer's "
        "weights minus `weight_version`. All of `staleness/` is over the n trained tokens that have one, else absent",
    ),
    _ratio(
        "staleness/max_age",
        lambda s: s["_staleness/max_age"] if s["_staleness/max_age"] >= 0 else None,
        "max (v - v_t) [steps]: largest age of a trained token",
    ),
    *_by_age("", "tokens", "n_a / n [fraction]: share of the tokens of this age"),
    *_by_age("ratio_new_old_", "ratios", "Σ r / n_a [1]: mean ratio of the tokens of this age"),
    *_by_age("abs_log_ratio_", "sizes", "Σ |l - o| / n_a [nats]: mean |log-ratio| of the tokens of this age"),
    *(_of_age(name, ages.sums_of, "Σ [–]: part of staleness/…") for name in ages.NAMES),
    _max(
        "_staleness/max_age",
        lambda t: torch.full_like(t.fields.targets, -1) if t.fields.ages is None else t.fields.ages,
        "max [steps]: part of staleness/max_age",
        is_reported=False,
    ),
    _mean(
        "entropy",
        lambda t: t.result.entropy,
        "H = -Σ_v p_v log p_v [nats]: exact entropy of softmax(z/τ) over the whole vocabulary, from the pass that "
        "gives the log-probabilities",
        level="with_entropy",
    ),
    _part("_weights", lambda t: t.fields.weights, "Σ w [1]: part of aggregation_ess", role=None, power=1),
    _part(
        "_squared_weights", lambda t: t.fields.weights.square(), "Σ w² [1]: part of aggregation_ess", role=None, power=2
    ),
    _mean(
        "value_clipped_fraction",
        lambda t: t.outside[0] | t.outside[1],
        "1[(v_c - R)² > (v - R)²] [fraction]: tokens whose gradient `--pg-value-clip` removed",
        role="critic",
    ),
    _of_critic(
        "explained_variance",
        lambda s: 1 - gap.variance(s, "e") / gap.variance(s, "R"),
        "1 - var(R - v)/var(R) [1]: share of the returns' variance that the values explain; absent where all returns "
        "are equal",
    ),
    _of_critic("value_mean", lambda s: s["v"] / s["near"], "Σ v / T [return]: mean value"),
    _of_critic(
        "value_std", lambda s: math.sqrt(gap.variance(s, "v")), "√var(v) [return]: standard deviation of the values"
    ),
    _of_critic("return_mean", lambda s: s["R"] / s["near"], "Σ R / T [return]: mean return"),
    _of_critic(
        "return_std", lambda s: math.sqrt(gap.variance(s, "R")), "√var(R) [return]: standard deviation of the returns"
    ),
    *(
        _part(f"_critic/{name}", formula, "Σ [–]: part of the moments of values and returns", role="critic")
        for name, formula in _MOMENTS.items()
    ),
)
