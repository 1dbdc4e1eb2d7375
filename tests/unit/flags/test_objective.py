"""Which terms of the loss go together: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import pytest
from namespaces import REDUCER, accepts, arguments, breaks, constant, correction, mode, path, pg, row

# Each breaks exactly one rule.
BROKEN = [
    row(
        "E40",
        "number of another objective",
        {"pg_dual_clip": 3.0},
        "--pg-dual-clip has no effect with --pg-objective grpo; remove it",
    ),
    row("E40", "eps of cispo", pg("cispo", cispo_cap=2.0, clip_eps_high=0.28), "--pg-clip-eps-high has no effect with"),
    row("E40", "eps of reinforce", pg("reinforce", clip_eps_low=0.2), "--pg-clip-eps-low has no effect with"),
    row(
        "E40",
        "bound of none",
        {"pg_correction_high": 2.0},
        "--pg-correction-high has no effect with --pg-correction none",
    ),
    row(
        "E40", "lower bound of k3", correction("token_k3", high=1.0, low=0.0), "--pg-correction-low has no effect with"
    ),
    row("E40", "estimator alone", {"pg_kl_estimator": "k3"}, "--pg-kl-estimator has no effect without --pg-kl-coef"),
    row(
        "E40", "auxiliary alone", {"pg_aux_aggregation": "policy"}, "--pg-aux-aggregation policy has no effect without"
    ),
    row("E40", "prediction", {"pg_mtp_aggregation": "policy"}, "--pg-mtp-aggregation policy has no effect without"),
    row("E41", "dual clip", pg("dual_clip"), "--pg-objective dual_clip needs --pg-dual-clip; there is no default"),
    row("E41", "cap", pg("cispo"), "--pg-objective cispo needs --pg-cispo-cap; there is no default"),
    row("E41", "pull", pg("dro"), "--pg-objective dro needs --pg-dro-beta; there is no default"),
    row("E40", "eps of gmpo", pg("gmpo", clip_eps_low=0.2), "--pg-clip-eps-low has no effect with --pg-objective gmpo"),
    row("E40", "trust region of ipo", pg("ipo", dppo_delta_low=0.2), "--pg-dppo-delta-low has no effect with"),
    row("E41", "trust region", pg("dppo_kl", dppo_delta_low=0.1), "dppo_kl needs --pg-dppo-delta-high"),
    row("E41", "threshold", correction("opsm"), "--pg-correction opsm needs --pg-correction-high; there is no default"),
    row("E41", "estimator", {"pg_kl_coef": 0.1}, "--pg-kl-coef needs --pg-kl-estimator; there is no default"),
    row("E42", "bounds turned round", correction("icepop", low=3, high=2), "--pg-correction-low 3 is not below"),
    row("E42", "default low", correction("seq_mask_tis", high=0.9), "--pg-correction-low 0.999 is not below"),
    row("E42", "ratio below 0", correction("tis", low=-1.0), "--pg-correction-low -1 bounds a ratio"),
    row(
        "E40",
        "fraction of m2po",
        correction("m2po", correction_fraction=0.1),
        "--pg-correction-fraction has no effect with",
    ),
    row(
        "E40", "penalty of clip_cov", correction("clip_cov", correction_coef=2.0), "--pg-correction-coef has no effect"
    ),
    row(
        "E40",
        "bound of kl_cov",
        correction("kl_cov", high=2.0),
        "--pg-correction-high has no effect with --pg-correction kl",
    ),
    row("E40", "fraction of none", {"pg_correction_fraction": 0.1}, "--pg-correction-fraction has no effect with"),
    row(
        "E42",
        "covariances",
        correction("clip_cov", low=5.0),
        "--pg-correction-low 5 is not below --pg-correction-high 5",
    ),
    row(
        "E42",
        "second moment",
        correction("m2po", high=0.0),
        "--pg-correction-high 0 bounds a mean of squares, so every",
    ),
    row(
        "E43",
        "kept, penalty",
        correction("kl_cov", denominator="kept"),
        "--pg-correction kl_cov, which rejects no token",
    ),
    row("E42", "nothing left", correction("tis", low=-2.0 + 2, high=0.0), "is not below --pg-correction-high 0"),
    row(
        "E43", "kept, nothing rejects", {"pg_denominator": "kept"}, "with --pg-correction none, which rejects no token"
    ),
    row(
        "E43", "kept, truncation", correction("tis", denominator="kept"), "--pg-correction tis, which rejects no token"
    ),
    row("E43", "kept, opsm", correction("opsm", high=0.1, denominator="kept"), "known only after the forward"),
    row("E43", "live, token_mean", mode("token_mean", pg_denominator="live"), "has no effect with token_mean"),
    row(
        "E43",
        "prediction, reducer",
        path(REDUCER, mtp_num_layers=1, pg_mtp_aggregation="policy"),
        "which knows nothing of multi-token prediction",
    ),
    row("E43", "live, reducer", path(REDUCER, pg_denominator="live"), "the reducer owns its denominator"),
    row(
        "E44",
        "two objectives",
        pg("reinforce", custom_objective_path="user_package.turns:two"),
        "--pg-custom-objective-path replaces --pg-objective, which is reinforce; remove one of the two",
    ),
]

NEAR_MISSES = [
    row("E40", "gspo", pg("gspo", clip_eps_low=3e-4, clip_eps_high=4e-4)),
    row("E40", "sapo", pg("sapo", sapo_tau_pos=1.0)),
    row("E41", "pull", pg("dro", dro_beta=0.1)),
    row("E40", "m2po", correction("m2po", high=0.1, denominator="kept")),
    row("E40", "clip_cov", correction("clip_cov", low=-2.0, high=-1.0, correction_fraction=0.5, denominator="kept")),
    row("E40", "kl_cov", correction("kl_cov", correction_fraction=0.5, correction_coef=2.0, objective="reinforce_is")),
    row("E40", "top_entropy", correction("top_entropy", correction_fraction=0.99, denominator="kept")),
    row("E40", "ipo", pg("ipo", ipo_delta_low=0.1, ipo_delta_high=0.3, ipo_tau=0.0)),
    row("E40", "vespo", pg("vespo", vespo_k_pos=1.0, vespo_lambda_neg=0.5)),
    row("E40", "gmpo", pg("gmpo", gmpo_eps_low=0.2, gmpo_eps_high=0.3)),
    row("E41", "topr", pg("topr")),
    row("E41", "topr by token", pg("topr_token")),
    row("E40", "k1 has two bounds", correction("seq_mean_k1", low=-0.1, high=0.1)),
    row("E40", "prediction", {"mtp_num_layers": 1, "pg_mtp_aggregation": "policy"}),
    row("E40", "entropy alone", {"pg_entropy_coef": 0.1, "pg_aux_aggregation": "policy"}),
    row("E41", "dual clip", pg("dual_clip", dual_clip=3.0)),
    row("E41", "cap of one", pg("cispo", cispo_cap=1.0)),
    row("E41", "trust region", pg("dppo_kl", dppo_delta_low=0.1, dppo_delta_high=0.1)),
    row("E40", "cap of dppo", pg("dppo_tv", dppo_delta_low=0.1, dppo_delta_high=0.1, dual_clip=20.0)),
    row("E41", "estimator", {"pg_kl_coef": 0.1, "pg_kl_estimator": "k3_weighted"}),
    row("E41", "truncation", correction("tis")),
    row("E42", "bounds", correction("icepop", low=0.0, high=2)),
    row("E43", "kept", correction("icepop", denominator="kept")),
    row("E43", "live, opsm", correction("opsm", high=0.1, denominator="live")),
    row("E43", "live, constant", constant(4096) | {"pg_denominator": "live"}),
    row("E44", "custom objective", pg("grpo", custom_objective_path="user_package.turns:two", clip_eps_low=0.1)),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
