"""Choices and numbers of the flags: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import math

import pytest
from namespaces import accepts, arguments, breaks, correction, docs, pg, row

# Each breaks exactly one rule.
BROKEN = [
    row("E24", "low string", {"pg_clip_eps_low": "0.2"}, "--pg-clip-eps-low must be a number, got '0.2'"),
    row("E24", "coefficient null", {"pg_kl_coef": None, "pg_kl_estimator": "k3"}, "--pg-kl-coef must be a number"),
    row("E24", "entropy below", {"pg_entropy_coef": -0.1}, "--pg-entropy-coef must be finite and >= 0, got -0.1"),
    row("E24", "divisor zero", {"pg_grad_divisor": 0.0}, "--pg-grad-divisor must be finite and > 0, got 0.0"),
    row("E24", "divisor infinite", {"pg_grad_divisor": math.inf}, "--pg-grad-divisor must be finite and > 0, got inf"),
    row("E24", "dual clip 1", pg("dual_clip", dual_clip=1.0), "--pg-dual-clip must be finite and > 1, got 1.0"),
    row("E24", "cap 0.28", pg("cispo", cispo_cap=0.28), "--pg-cispo-cap must be finite and >= 1 (an absolute cap"),
    row("E24", "tau zero", pg("sapo", sapo_tau_neg=0.0), "--pg-sapo-tau-neg must be finite and > 0, got 0.0"),
    row("E24", "pull zero", pg("dro", dro_beta=0.0), "--pg-dro-beta must be finite and > 0, got 0.0"),
    row("E24", "band zero", pg("ipo", ipo_delta_low=0.0), "--pg-ipo-delta-low must be finite and > 0, got 0.0"),
    row("E24", "pull below", pg("ipo", ipo_tau=-1e-3), "--pg-ipo-tau must be finite and >= 0, got -0.001"),
    row("E24", "k zero", pg("vespo", vespo_k_neg=0.0), "--pg-vespo-k-neg must be finite and > 0, got 0.0"),
    row(
        "E24", "λ NaN", pg("vespo", vespo_lambda_pos=math.nan), "--pg-vespo-lambda-pos must be finite and > 0, got nan"
    ),
    row(
        "E24",
        "log-ratio bound below",
        pg("gmpo", gmpo_eps_low=-0.4),
        "--pg-gmpo-eps-low must be finite and > 0, got -0.4",
    ),
    row(
        "E24",
        "trust region below",
        pg("dppo_tv", dppo_delta_low=-0.1, dppo_delta_high=0.1),
        "--pg-dppo-delta-low must be finite and > 0, got -0.1",
    ),
    row("E24", "bound string", correction("tis", high="2"), "--pg-correction-high must be a number, got '2'"),
    row(
        "E24",
        "share of all",
        correction("top_entropy", correction_fraction=1.0),
        "--pg-correction-fraction must be between 0 and",
    ),
    row(
        "E24",
        "share zero",
        correction("kl_cov", correction_fraction=0.0),
        "--pg-correction-fraction must be between 0 and",
    ),
    row(
        "E24",
        "no penalty",
        correction("kl_cov", correction_coef=0.0),
        "--pg-correction-coef must be finite and > 0, got",
    ),
    row("E24", "low negative", {"pg_clip_eps_low": -0.1}, "--pg-clip-eps-low must be between 0 and 1", "got -0.1"),
    row("E24", "low above one", {"pg_clip_eps_low": 1.01}, "--pg-clip-eps-low must be between 0 and 1", "got 1.01"),
    row("E24", "low NaN", {"pg_clip_eps_low": math.nan}, "--pg-clip-eps-low must be between 0 and 1", "got nan"),
    row("E24", "high true", {"pg_clip_eps_high": True}, "--pg-clip-eps-high must be a number, got True"),
    row("E24", "high negative", {"pg_clip_eps_high": -1}, "--pg-clip-eps-high must be finite and >= 0, got -1"),
    row("E24", "high infinite", {"pg_clip_eps_high": math.inf}, "--pg-clip-eps-high must be finite and >= 0, got inf"),
    row("E24", "huge integer", {"pg_clip_eps_high": 10**400}, "--pg-clip-eps-high must be finite and >= 0, got 1000"),
    row("E24", "temperature zero", {"pg_temperature": 0.0}, "--pg-temperature must be finite and > 0, got 0.0"),
    row("E24", "temperature below", {"pg_temperature": -1.0}, "--pg-temperature must be finite and > 0, got -1.0"),
    row("E24", "temperature tiny", {"pg_temperature": 1e-39}, "--pg-temperature must be finite and > 0, got 1e-39"),
    row("E24", "temperature NaN", {"pg_temperature": math.nan}, "--pg-temperature must be finite and > 0, got nan"),
    row("E24", "temperature string", {"pg_temperature": "1.0"}, "--pg-temperature must be a number, got '1.0'"),
    row("E25", "ppo", {"pg_objective": "ppo"}, "--pg-objective 'ppo' is not one of", "; did you mean grpo?"),
    row("E25", "metrics", {"pg_metrics": "full"}, "--pg-metrics 'full' is not one of none, basic, with_entropy"),
    row("E25", "metrics null", {"pg_metrics": None}, "--pg-metrics None is not one of none, basic, with_entropy"),
    row("E25", "metrics false", {"pg_metrics": False}, "--pg-metrics False is not one of none, basic, with_entropy"),
    row("E25", "objective", pg("dapo"), "--pg-objective 'dapo' is not one of grpo, dual_clip, gspo"),
    row("E25", "removed", pg("two_sided"), "; did you mean dual_clip, the same loss with the cap as --pg-dual-clip?"),
    row("E25", "objective null", pg(None), "--pg-objective None is not one of"),
    row("E25", "correction", correction("trunc"), "--pg-correction 'trunc' is not one of none, tis, seq_tis"),
    row("E25", "correction list", correction(["tis"]), "--pg-correction ['tis'] is not one of none"),
    row(
        "E25",
        "denominator",
        {"pg_denominator": "alive"},
        "--pg-denominator 'alive' is not one of scheduled, live, kept",
    ),
    row(
        "E25", "auxiliary", {"pg_aux_aggregation": "mean"}, "--pg-aux-aggregation 'mean' is not one of default, policy"
    ),
    row(
        "E25",
        "unweighable estimator",
        {"pg_kl_coef": 0.1, "pg_kl_estimator": "k2_weighted"},
        "--pg-kl-estimator 'k2_weighted' is not one of k1, k2, k3, abs, k1_weighted, k3_weighted",
    ),
    row("E25", "kernel", {"pg_kernel": "cuda"}, "--pg-kernel 'cuda' is not one of triton, torch"),
    row("E25", "kernel list", {"pg_kernel": ["torch"]}, "--pg-kernel ['torch'] is not one of triton, torch"),
    row(
        "E25",
        "policy",
        docs(8, docs_per_step_policy="at least"),
        "--docs-per-step-policy 'at least' is not one of exact, at_least",
    ),
    row("E25", "end", docs(8, docs_per_step_end=False), "--docs-per-step-end False is not one of partial, stop"),
]

NEAR_MISSES = [
    row("E24", "divisor tiny", {"pg_grad_divisor": 1e-30}),
    row("E24", "no bound of their own", pg("grpo", clip_eps_low=None, clip_eps_high=None)),
    row("E24", "bounds", {"pg_clip_eps_low": 1, "pg_clip_eps_high": 0, "pg_temperature": 1}),
    row("E24", "clip-higher", {"pg_clip_eps_low": 0.0, "pg_clip_eps_high": 10.0, "pg_temperature": 1e-3}),
    row("E25", "no metrics", {"pg_metrics": "none"}),
    row("E25", "all metrics", {"pg_metrics": "with_entropy"}),
    row("E25", "triton", {"pg_kernel": "triton"}),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
