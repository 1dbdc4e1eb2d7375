"""Every metric, declared once: name, level, formula, reduction, and what a reader needs to know about it.

`docs/metrics.md` is written from these declarations. The kinds:

    mean     over documents (samples with a trained token) of the document's mean over its trained tokens
    sum      over the trained tokens of the step
    max min  over the trained tokens of the step
    step     an integer of the step plan
    ratio    of sums, formed after they are reduced
    part     a sum that only a ratio needs; not reported
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from megatron_pg.objectives.tokens import MAX_LOG_RATIO, ratio


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenValues:
    """What the formulas read: [T] float64 per token of one micro-batch on one rank, anything where masked."""

    mask: Tensor  # [T] bool, trained tokens
    document_weights: Tensor  # v: sums to 1 over a document's trained tokens
    weights: Tensor  # w of the aggregation
    token_losses: Tensor  # ℓ
    logprobs: Tensor  # l, of the model being trained
    old_logprobs: Tensor  # o
    log_ratios: Tensor  # d = l - o
    advantages: Tensor  # A
    entropy: Tensor | None = None  # H
    ref_logprobs: Tensor | None = None  # f; NaN where the sample has none
    rollout_logprobs: Tensor | None = None  # b; NaN where the sample has none
    above: Tensor | None = None  # bool, beyond the objective's upper bound; None: it has no bounds
    below: Tensor | None = None  # bool, beyond its lower bound
    auxiliary_weights: Tensor | None = None  # u, of the KL and entropy terms
    kl: Tensor | None = None  # values of the KL term's estimator
    corrections: Tensor | None = None  # factor on the policy term, 0 where rejected
    sequence_log_ratios: Tensor | None = None  # mean of d over the token's sequence
    kl_coef: float = 0.0
    entropy_coef: float = 0.0

    @cached_property
    def ratios(self) -> Tensor:
        """r = e^d, with d clamped as in the objective."""
        return ratio(self.log_ratios)

    @cached_property
    def sequence_ratios(self) -> Tensor:
        """R, the geometric mean of r over the token's sequence."""
        return ratio(self.sequence_log_ratios)

    @cached_property
    def total(self) -> Tensor:
        """Each token's share of the loss."""
        total = self.weights * self.token_losses
        if self.kl_coef:
            total = total + self.kl_coef * self.auxiliary_weights * self.kl
        return total - self.entropy_coef * self.auxiliary_weights * self.entropy if self.entropy_coef else total


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Metric:
    """One diagnostic. `formula` maps TokenValues, the step plan or the reduced sums to values, by `kind`."""

    name: str
    level: str
    kind: str  # "mean", "sum", "max", "min", "step", "ratio" or "part"
    formula: Callable[[Any], Any]
    equation: str
    unit: str
    meaning: str
    healthy: str = "–"
    red_flag: str = "–"
    needs: str | None = None  # field of TokenValues without which the metric is absent
    only_with: str | None = None  # feature of the loss (loss.features_of) without which the metric is absent
    elsewhere: Mapping[str, str] = field(default_factory=dict)  # framework: what it is called there


def _k3(x: Tensor) -> Tensor:
    """e^-x - 1 + x, not negative: its mean over samples of p estimates KL(p‖q) for x = log p - log q."""
    return torch.expm1(-x) + x


METRICS = (
    Metric(
        name="pg_loss",
        level="none",
        kind="sum",
        formula=lambda t: t.weights * t.token_losses,
        equation="Σ w·ℓ",
        unit="objective",
        meaning="the policy term, with the weights of `--loss-aggregation` and its correction; no factor K, D or T in it",
        healthy="near 0, either sign",
        red_flag="a jump; never compare its size across aggregations",
        elsewhere={
            "slime, miles": "pg_loss",
            "verl": "actor/pg_loss",
            "TRL": "loss",
            "NeMo-RL": "loss",
            "PipelineRL": "rl/loss",
        },
    ),
    Metric(
        name="loss",
        level="none",
        kind="sum",
        only_with="auxiliary",
        formula=lambda t: t.total,
        equation="Σ w·ℓ + β·Σ u·k - η·Σ u·H",
        unit="objective",
        meaning="all terms: what the gradient is of (before `--pg-grad-divisor`)",
        elsewhere={"slime, miles": "loss"},
    ),
    Metric(
        name="kl_loss",
        level="none",
        kind="sum",
        only_with="kl",
        formula=lambda t: t.auxiliary_weights * t.kl,
        equation="Σ u·k, k of `--pg-kl-estimator`",
        unit="nats",
        meaning="the KL term before its coefficient, with the weights of `--pg-aux-aggregation`",
        healthy="grows slowly",
        red_flag="β·kl_loss near |pg_loss|: the reference decides",
        elsewhere={"slime, miles": "kl_loss", "verl": "actor/kl_loss"},
    ),
    Metric(
        name="entropy_loss",
        level="none",
        kind="sum",
        only_with="entropy",
        formula=lambda t: t.auxiliary_weights * t.entropy,
        equation="Σ u·H",
        unit="nats",
        meaning="the entropy term before its coefficient (it is subtracted), with the weights of `--pg-aux-aggregation`",
        elsewhere={"slime, miles": "entropy_loss", "verl": "actor/entropy_loss"},
    ),
    Metric(
        name="num_tokens",
        level="basic",
        kind="step",
        formula=lambda plan: plan.num_tokens,
        equation="T",
        unit="tokens",
        meaning="trained tokens",
        elsewhere={"PipelineRL": "rl/num_output_tokens_sum"},
    ),
    Metric(
        name="num_tokens_masked",
        level="basic",
        kind="step",
        formula=lambda plan: plan.num_response_tokens - plan.num_tokens,
        equation="Σ (1 - m) over responses",
        unit="tokens",
        meaning="response tokens that are not trained (tool output, truncated samples)",
        red_flag="most of the responses",
    ),
    Metric(
        name="num_samples",
        level="basic",
        kind="step",
        formula=lambda plan: plan.num_samples,
        equation="S",
        unit="samples",
        meaning="training sequences (documents), fully masked ones included",
        elsewhere={"NeMo-RL": "num_valid_samples"},
    ),
    Metric(
        name="num_rollouts",
        level="basic",
        kind="step",
        formula=lambda plan: plan.num_rollouts,
        equation="N_r",
        unit="rollouts",
        meaning="trajectories, fully masked ones included",
    ),
    Metric(
        name="num_prompts",
        level="basic",
        kind="step",
        formula=lambda plan: plan.num_prompts,
        equation="P",
        unit="prompts",
        meaning="prompt groups; absent when samples have no prompt_id",
    ),
    Metric(
        name="new_logprobs",
        level="basic",
        kind="mean",
        formula=lambda t: t.logprobs,
        equation="l",
        unit="nats",
        meaning="log-probability under the model being trained",
        healthy="rises slowly",
        red_flag="runs towards 0: the policy collapses",
        elsewhere={"PipelineRL": "rl/new_logprobs"},
    ),
    Metric(
        name="old_logprobs",
        level="basic",
        kind="mean",
        formula=lambda t: t.old_logprobs,
        equation="o",
        unit="nats",
        meaning="log-probability under the sampling policy",
        elsewhere={"PipelineRL": "rl/old_logprobs"},
    ),
    Metric(
        name="ratio_new_old",
        level="basic",
        kind="mean",
        formula=lambda t: t.ratios,
        equation="r = e^(l - o)",
        unit="1",
        meaning="probability ratio, new over old",
        healthy="1 on the first step over a rollout batch, then within a few percent",
        red_flag="not 1 on that step: temperature, dropout, precision or stale old log-probabilities",
        elsewhere={"NeMo-RL": "probs_ratio", "PipelineRL": "rl/ratio_new_old"},
    ),
    Metric(
        name="ratio_new_old_sum",
        level="basic",
        kind="sum",
        formula=lambda t: t.ratios,
        equation="Σ m·r",
        unit="tokens",
        meaning="sum of the ratios; divided by num_tokens it is near 1 on-policy",
        elsewhere={"PipelineRL": "rl/ratio_new_old_sum"},
    ),
    Metric(
        name="ratio_new_old_squared_sum",
        level="basic",
        kind="sum",
        formula=lambda t: t.ratios.square(),
        equation="Σ m·r²",
        unit="tokens",
        meaning="sum of the squared ratios",
        elsewhere={"PipelineRL": "rl/ratio_new_old_squared_sum"},
    ),
    Metric(
        name="ess",
        level="basic",
        kind="ratio",
        formula=lambda s: s["ratio_new_old_sum"] ** 2 / (s["ratio_new_old_squared_sum"] * s["num_tokens"]),
        equation="(Σ m·r)² / (Σ m·r² · T)",
        unit="fraction",
        meaning="effective sample size of the importance ratios, at most 1",
        healthy="> 0.9",
        red_flag="< 0.5: few tokens carry the step; fewer steps per rollout batch",
        elsewhere={"slime, miles": "ess_ratio (miles)", "PipelineRL": "rl/ess"},
    ),
    Metric(
        name="mean_abs_log_ratio",
        level="basic",
        kind="mean",
        formula=lambda t: t.log_ratios.abs(),
        equation="|l - o|",
        unit="nats",
        meaning="distance of the two policies on the samples",
        healthy="0 on-policy, < 0.05",
        red_flag="> 0 on the first step over a rollout batch",
    ),
    Metric(
        name="kl_new_old",
        level="basic",
        kind="mean",
        formula=lambda t: t.ratios - 1 - t.log_ratios,
        equation="k3 = r - 1 - log r",
        unit="nats",
        meaning="over samples of the old policy this estimates KL(old‖new), not KL(new‖old)",
        healthy="0 on-policy, < 1e-2",
        red_flag="> 0 on the first step over a rollout batch",
        elsewhere={"slime, miles": "ppo_kl (k1)", "verl": "actor/ppo_kl (k1)", "PipelineRL": "rl/kl_new_old"},
    ),
    Metric(
        name="clipped_ratio_fraction",
        level="basic",
        kind="mean",
        only_with="clip",
        formula=lambda t: t.above | t.below,
        equation="1[r < 1 - ε_low or r > 1 + ε_high]",
        unit="fraction",
        meaning="outside the objective's bounds whatever the sign of A (gspo: R of its sequence; cispo: the weight's bounds; dppo: "
        "the trust region): an upper bound of the tokens without gradient",
        healthy="< 0.2",
        red_flag="> 0.5: learning rate, steps per rollout batch",
        elsewhere={
            "slime, miles": "pg_clipfrac (sign-aware)",
            "verl": "actor/pg_clipfrac (sign-aware)",
            "TRL": "clip_ratio/region_mean (sign-aware)",
            "PipelineRL": "rl/clamp_log_ratio_new_old_indicator",
        },
    ),
    Metric(
        name="clipped_high_fraction",
        level="basic",
        kind="mean",
        only_with="clip",
        formula=lambda t: t.above & (t.advantages > 0),
        equation="1[A > 0, r > 1 + ε_high]",
        unit="fraction",
        meaning="tokens that lost their gradient because they already rose enough",
        healthy="< 0.1",
        red_flag="far above clipped_low_fraction: raise ε_high or lower the learning rate",
        elsewhere={"TRL": "clip_ratio/high_mean"},
    ),
    Metric(
        name="clipped_low_fraction",
        level="basic",
        kind="mean",
        only_with="clip",
        formula=lambda t: t.below & (t.advantages < 0),
        equation="1[A < 0, r < 1 - ε_low]",
        unit="fraction",
        meaning="tokens that lost their gradient because they already fell enough",
        healthy="< 0.1",
        red_flag="rises over the run",
        elsewhere={"TRL": "clip_ratio/low_mean"},
    ),
    Metric(
        name="segment_ratio_sum",
        level="basic",
        kind="sum",
        only_with="sequence",
        formula=lambda t: t.document_weights * t.sequence_ratios,
        equation="Σ R over documents",
        unit="documents",
        meaning="sum of the sequence ratios R = exp(mean of l - o)",
        elsewhere={"PipelineRL": "rl/ratio_new_old_sum (gspo)"},
    ),
    Metric(
        name="segment_ratio_squared_sum",
        level="basic",
        kind="sum",
        only_with="sequence",
        formula=lambda t: t.document_weights * t.sequence_ratios.square(),
        equation="Σ R² over documents",
        unit="documents",
        meaning="sum of the squared sequence ratios",
        elsewhere={"PipelineRL": "rl/ratio_new_old_squared_sum (gspo)"},
    ),
    Metric(
        name="num_segments",
        level="basic",
        kind="sum",
        only_with="sequence",
        formula=lambda t: t.document_weights,
        equation="documents with a trained token",
        unit="documents",
        meaning="number of sequence ratios",
    ),
    Metric(
        name="correction_factor",
        level="basic",
        kind="mean",
        only_with="correction",
        formula=lambda t: t.corrections,
        equation="κ·γ",
        unit="1",
        meaning="factor of `--pg-correction` on the policy term",
        healthy="near 1",
        red_flag="far from 1: trainer and rollout engine are two policies",
        elsewhere={"verl": "rollout_corr/rollout_is_mean", "TRL": "sampling/importance_sampling_ratio/mean"},
    ),
    Metric(
        name="rejected_fraction",
        level="basic",
        kind="mean",
        only_with="correction",
        formula=lambda t: t.corrections == 0,
        equation="1[κ·γ = 0]",
        unit="fraction",
        meaning="trained tokens that `--pg-correction` takes out of the policy term",
        healthy="< 0.05",
        red_flag="> 0.2: few tokens are left to learn from",
        elsewhere={"verl": "rollout_corr/rollout_rs_masked_fraction"},
    ),
    Metric(
        name="clamped_log_ratio_fraction",
        level="basic",
        kind="mean",
        formula=lambda t: t.log_ratios.abs() > MAX_LOG_RATIO,
        equation=f"1[|l - o| > {MAX_LOG_RATIO:g}]",
        unit="fraction",
        meaning="log-ratio beyond any meaning: value clamped, gradient 0",
        healthy="0",
        red_flag="> 0: misaligned tokens or log-probabilities of another model",
    ),
    Metric(
        name="advantage",
        level="basic",
        kind="mean",
        formula=lambda t: t.advantages,
        equation="A",
        unit="reward",
        meaning="advantage",
        healthy="near 0 with a group baseline",
        elsewhere={"verl": "critic/advantages/mean", "PipelineRL": "rl/advantage"},
    ),
    Metric(
        name="max_advantage",
        level="basic",
        kind="max",
        formula=lambda t: t.advantages,
        equation="max A",
        unit="reward",
        meaning="largest advantage of a trained token",
        elsewhere={"verl": "critic/advantages/max", "PipelineRL": "rl/max_advantage"},
    ),
    Metric(
        name="min_advantage",
        level="basic",
        kind="min",
        formula=lambda t: t.advantages,
        equation="min A",
        unit="reward",
        meaning="smallest advantage of a trained token",
        elsewhere={"verl": "critic/advantages/min", "PipelineRL": "rl/min_advantage"},
    ),
    Metric(
        name="aggregation_ess",
        level="basic",
        kind="ratio",
        formula=lambda s: s["_weights"] * s["_weights"] / (s["num_tokens"] * s["_squared_weights"]),
        equation="(Σ w)² / (T · Σ w²)",
        unit="fraction",
        meaning="how evenly the aggregation spreads the gradient over tokens; 1 for token_mean and constant",
        red_flag="near 0: a few short answers own the step",
    ),
    Metric(
        name="kl_new_ref",
        level="basic",
        kind="mean",
        formula=lambda t: _k3(t.logprobs - t.ref_logprobs),
        equation="k3 of x = l - f: e^-x - 1 + x",
        unit="nats",
        meaning="estimates KL(new‖ref) on near-on-policy samples; not clamped",
        healthy="grows slowly",
        red_flag="a jump",
        needs="ref_logprobs",
        elsewhere={
            "slime, miles": "kl_loss",
            "verl": "actor/kl_loss",
            "TRL": "kl",
            "NeMo-RL": "kl_penalty",
            "PipelineRL": "rl/kl",
        },
    ),
    Metric(
        name="ratio_new_ref",
        level="basic",
        kind="mean",
        formula=lambda t: (t.logprobs - t.ref_logprobs).exp(),
        equation="e^(l - f)",
        unit="1",
        meaning="probability ratio, new over reference",
        needs="ref_logprobs",
        elsewhere={"PipelineRL": "rl/ratio_ref_new (inverse)"},
    ),
    Metric(
        name="mismatch_kl",
        level="basic",
        kind="mean",
        formula=lambda t: _k3(t.rollout_logprobs - t.old_logprobs),
        equation="k3 of x = b - o: e^-x - 1 + x",
        unit="nats",
        meaning="estimates KL(rollout engine‖trainer) of the sampling policy",
        healthy="< 1e-3",
        red_flag="an upward trend: precision, weight sync, sampling filter, temperature",
        needs="rollout_logprobs",
        elsewhere={
            "slime, miles": "train_rollout_logprob_abs_diff (mean gap)",
            "verl": "rollout_corr/kl",
            "TRL": "sampling/sampling_logp_difference/mean (mean gap)",
            "NeMo-RL": "gen_kl_error",
        },
    ),
    Metric(
        name="mismatch_max",
        level="basic",
        kind="max",
        formula=lambda t: (t.old_logprobs - t.rollout_logprobs).abs(),
        equation="max |o - b|",
        unit="nats",
        meaning="largest gap between trainer and rollout engine on one token",
        healthy="< 1",
        red_flag="> 5: another token, template or model",
        needs="rollout_logprobs",
        elsewhere={"verl": "training/rollout_probs_diff_max (probabilities)"},
    ),
    Metric(
        name="entropy",
        level="with_entropy",
        kind="mean",
        formula=lambda t: t.entropy,
        equation="H = -Σ_v p_v log p_v",
        unit="nats",
        meaning="exact entropy of softmax(z/τ) over the whole vocabulary, from the pass that gives the log-probabilities",
        healthy="falls slowly",
        red_flag="near 0 early",
        elsewhere={
            "slime, miles": "entropy_loss",
            "verl": "actor/entropy",
            "TRL": "entropy",
            "NeMo-RL": "approx_entropy (sampled)",
            "PipelineRL": "rl/entropy",
        },
    ),
    Metric(
        name="_weights",
        level="basic",
        kind="part",
        formula=lambda t: t.weights,
        equation="Σ w",
        unit="1",
        meaning="part of aggregation_ess",
    ),
    Metric(
        name="_squared_weights",
        level="basic",
        kind="part",
        formula=lambda t: t.weights.square(),
        equation="Σ w²",
        unit="1",
        meaning="part of aggregation_ess",
    ),
)
