"""The banner says which objective is in force, and which flag decided it."""

import re

import pytest
from namespaces import REDUCER, arguments, constant, correction, docs, head, mode, parse, path, pg

from megatron_pg.args import validate_args
from megatron_pg.flags.banner import banner

pytestmark = pytest.mark.usefixtures("rank_zero")


B_CONTRACT = "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"
A_CONTRACT = "returns (Q·Σwℓ, n, report), n = 1, Q = Σn = K·D·C; finalize divides by Q  (--calculate-per-token-loss)"


@pytest.mark.parametrize(
    ("overrides", "pg_loss", "weight", "contract"),
    [
        (
            mode("sample_mean"),
            "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout  (--loss-aggregation sample_mean)",
            "1/δ, δ = N_r · M_rollout: rollouts of the step · trained tokens of the token's rollout",
            B_CONTRACT,
        ),
        (
            mode("prompt_mean"),
            "(1/P) Σ_prompts (Σ m·ℓ)/M_group  (--loss-aggregation prompt_mean)",
            "1/δ, δ = P · M_group: prompts of the step · trained tokens of the token's prompt group",
            B_CONTRACT,
        ),
        (
            mode("token_mean", calculate_per_token_loss=True),
            "(Σ m·ℓ)/T  (--loss-aggregation token_mean)",
            "1/δ, δ = T: trained tokens of the step",
            A_CONTRACT,
        ),
        (
            constant(4096.0),
            "(Σ m·ℓ)/(N_r·L)  (--loss-aggregation constant --loss-aggregation-divisor 4096)",
            "1/δ, δ = N_r · L: rollouts of the step · 4096",
            B_CONTRACT,
        ),
    ],
    ids=["sample_mean", "prompt_mean", "token_mean", "constant"],
)
def test_the_banner_names_formula_divisor_and_deciding_flag(overrides, pg_loss, weight, contract):
    text = banner(validate_args(arguments(**overrides)))
    assert rows_of(text)["pg_loss"] == pg_loss
    assert rows_of(text)["weight"] == weight
    assert rows_of(text)["Megatron"] == contract


@pytest.mark.parametrize(
    ("per_token", "pg_loss", "contract"),
    [
        (False, f"(1/N_r) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {REDUCER})", B_CONTRACT),
        (True, f"(1/T) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {REDUCER})", A_CONTRACT),
    ],
    ids=["flag off", "flag on"],
)
@pytest.mark.usefixtures("user_code")
@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice", "ignore::megatron_pg.args.ArgumentWarning")
def test_the_banner_of_a_custom_reducer_names_its_path_and_no_mode(per_token, pg_loss, contract):
    text = banner(validate_args(arguments(**path(REDUCER, calculate_per_token_loss=per_token))))
    assert rows_of(text)["pg_loss"] == pg_loss
    assert "weight" not in rows_of(text)
    assert "--loss-aggregation" not in text
    assert rows_of(text)["Megatron"] == contract


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice")
def test_the_banner_speaks_of_the_reconciled_mode():
    args = validate_args(arguments(calculate_per_token_loss=True))
    assert rows_of(banner(args))["pg_loss"] == "(Σ m·ℓ)/T  (--loss-aggregation token_mean)"
    assert rows_of(banner(args))["Megatron"] == A_CONTRACT


@pytest.mark.parametrize(
    ("divisor", "shown"), [(1, "1"), (0.5, "0.5"), (131072.0, "131072"), (1048576.0, "1048576"), (1234567, "1234567")]
)
def test_the_banner_rounds_no_divisor(divisor, shown):
    text = banner(validate_args(arguments(**constant(divisor))))
    assert f"--loss-aggregation-divisor {shown})" in text
    assert rows_of(text)["weight"].endswith(f" · {shown}")


def test_the_banner_shows_the_remaining_settings_with_their_flags():
    args = validate_args(
        arguments(
            pg_clip_eps_low=0.1,
            pg_clip_eps_high=0.28,
            pg_temperature=0.6,
            pg_metrics="none",
            context_parallel_size=4,
            tensor_model_parallel_size=8,
        )
    )
    rows = rows_of(banner(args))
    assert rows["clip"] == "r in [0.9, 1.28]  (--pg-clip-eps-low/-high)"
    assert rows["temperature"] == "softmax(z / 0.6), in float32  (--pg-temperature)"
    assert rows["kernel"] == "triton on CUDA, torch elsewhere  (--pg-kernel)"
    assert rows["metrics"].startswith("none, ")
    assert rows["layout"] == "D=2 C=4 TP=8 PP=1"


@pytest.mark.parametrize(
    ("overrides", "row", "text"),
    [
        (
            pg("cispo", cispo_cap=5.0),
            "clip",
            "weight in [0, 5]  (--pg-clip-eps-low, --pg-cispo-cap, which is absolute)",
        ),
        (pg("gspo"), "clip", "R in [0.9997, 1.0004]  (--pg-clip-eps-low/-high)"),
        (pg("dual_clip", dual_clip=3.0), "dual clip", "c = 3  (--pg-dual-clip)"),
        (pg("sapo"), "tau", "1 where A > 0, else 1.05  (--pg-sapo-tau-pos/-neg)"),
        (pg("dro", dro_beta=0.05), "pull", "β = 0.05  (--pg-dro-beta)"),
        (
            pg("ipo", ipo_delta_high=0.3),
            "band",
            "π - π_old in [-0.2, 0.3], for both signs of A  (--pg-ipo-delta-low/-high)",
        ),
        (pg("ipo"), "pull", "τ = 0.001  (--pg-ipo-tau)"),
        (
            pg("vespo", vespo_k_neg=1.0),
            "k, λ",
            "2, 3 where A > 0, else 1, 2  (--pg-vespo-k-pos, --pg-vespo-lambda-pos, -neg)",
        ),
        (pg("gmpo"), "clip", "log r <= 0.4 where A >= 0, >= -0.4 where A < 0  (--pg-gmpo-eps-high/-low)"),
        (
            pg("dppo_tv", dppo_delta_low=0.1, dppo_delta_high=0.2),
            "trust region",
            "0.2 where A > 0, 0.1 where A < 0, probability  (--pg-dppo-delta-high/-low)",
        ),
        (
            pg("dppo_kl", dppo_delta_low=0.1, dppo_delta_high=0.2, dual_clip=20.0),
            "cap",
            "c = 20, for both signs of A  (--pg-dual-clip)",
        ),
        (
            pg("dppo_kl", dppo_delta_low=0.1, dppo_delta_high=0.2),
            "cap",
            "c = inf, for both signs of A  (--pg-dual-clip)",
        ),
        (
            correction("icepop", high=4.0),
            "correction",
            "ℓ times ρ where lo <= ρ <= hi, else 0, lo = 0.5, hi = 4  (--pg-correction icepop)",
        ),
        (
            correction("icepop", denominator="kept"),
            "denominator",
            "counts units and tokens that the correction does not reject  (--pg-denominator kept)",
        ),
        (
            correction("icepop", denominator="kept"),
            "weight",
            "1/δ, δ = N_r · M_rollout: rollouts of the step with a kept token · kept tokens of the token's rollout",
        ),
        (
            mode("prompt_mean", pg_denominator="live"),
            "weight",
            "1/δ, δ = P · M_group: prompts of the step with a trained token · trained tokens of the token's prompt "
            "group",
        ),
        (
            constant(64) | {"pg_denominator": "live"},
            "weight",
            "1/δ, δ = N_r · L: rollouts of the step with a trained token · 64",
        ),
        (
            mode("token_mean", calculate_per_token_loss=True) | correction("icepop", denominator="kept"),
            "weight",
            "1/δ, δ = T: kept tokens of the step",
        ),
        (
            {"pg_entropy_coef": 0.01, "pg_denominator": "live"},
            "u",
            "sample_mean over the step, over rollouts with a trained token  (--pg-aux-aggregation default)",
        ),
        (
            {"pg_entropy_coef": 0.01, "pg_aux_aggregation": "policy", **correction("icepop", denominator="kept")},
            "u",
            "the weights of pg_loss  (--pg-aux-aggregation policy)",
        ),
        (
            {"pg_entropy_coef": 0.01, **correction("icepop", denominator="kept")},
            "u",
            "sample_mean over the step, over what is trained, rejected or not  (--pg-aux-aggregation default)",
        ),
        (
            {"fp32_lm_head": True, "fp32_lm_head_backward": "split"},
            "head",
            "float32 logits, stored whole, backward split  (--fp32-lm-head)",
        ),
        (
            head(params_dtype="torch.float32"),
            "head",
            "fused, logits never stored, backward float32  (--pg-fused-head forward)",
        ),
        (
            {"pg_kl_coef": 0.01, "pg_kl_estimator": "k3_weighted"},
            "KL",
            "+ 0.01 Σ u·KL(π‖π_ref) by k3_weighted  (--pg-kl-coef, --pg-kl-estimator)",
        ),
        ({"pg_entropy_coef": 0.01}, "u", "sample_mean over the step  (--pg-aux-aggregation default)"),
        (
            {"pg_entropy_coef": 0.01, "pg_aux_aggregation": "policy"},
            "u",
            "the weights of pg_loss  (--pg-aux-aggregation policy)",
        ),
        (
            {"pg_grad_divisor": 1024.0},
            "gradient",
            "divided by 1024, the loss is not; with Adam the same without it: --clip-grad and --adam-eps times 1024  "
            "(--pg-grad-divisor)",
        ),
    ],
)
def test_the_banner_says_which_terms_are_in_force(overrides, row, text):
    plain = rows_of(banner(validate_args(arguments())))
    rows = rows_of(banner(validate_args(arguments(**overrides))))
    assert rows[row] == text
    assert plain.get(row) != text


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        (docs(256), "256 documents, the last step may have fewer  (--docs-per-step, -policy exact, -end partial)"),
        (
            docs(9, docs_per_step_policy="at_least", docs_per_step_end="stop"),
            "at least 9 documents, too few for a last step are left  (--docs-per-step, -policy at_least, -end stop)",
        ),
    ],
)
def test_the_banner_says_what_a_step_is(overrides, step):
    assert rows_of(banner(validate_args(arguments(**overrides))))["step"] == step
    assert "step" not in rows_of(banner(validate_args(arguments())))


def test_the_banner_says_what_is_not_the_default():
    plain = banner(validate_args(arguments()))
    assert "sampling mask" not in plain
    text = banner(
        validate_args(
            arguments(pg_sampling_mask_entropy="kept", pg_metrics="with_entropy", pg_sampling_mask_missing="mask")
        )
    )
    assert "over what could be sampled, where samples say it  (--pg-sampling-mask-entropy kept)" in text
    assert "trained tokens that it does not hold are masked  (--pg-sampling-mask-missing mask)" in text


def test_the_banner_needs_no_megatron_attribute():
    rows = rows_of(banner(validate_args(parse("--loss-aggregation", "prompt_mean"))))
    assert rows["Megatron"] == B_CONTRACT
    assert rows["layout"] == "not known yet"


def rows_of(text: str) -> dict[str, str]:
    """The rows of a banner, by name."""
    title, *lines = text.splitlines()
    assert title == "── megatron_pg: effective policy-gradient objective ──"
    return dict(re.fullmatch(r"  (\S+(?: \S+)*) {2,}(\S.*)", line).groups() for line in lines)
