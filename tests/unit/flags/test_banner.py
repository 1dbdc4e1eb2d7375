"""The banner says which objective is in force, and which flag decided it."""

import re
from pathlib import Path

import pytest
from namespaces import REDUCER, arguments, constant, mode, parse, path

from megatron_pg.args import validate_args
from megatron_pg.flags.banner import banner

TEXT = (Path(__file__).parent / "banner.txt").read_text(encoding="utf-8")
ROWS = [line for line in TEXT.replace("\n    ", " ").splitlines() if line and not line.startswith("#")]
BY_MICROBATCH = "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"
PER_TOKEN = "returns (Q·Σwℓ, n, report), n = 1, Q = Σn = K·D·C; finalize divides by Q  (--calculate-per-token-loss)"

pytestmark = pytest.mark.usefixtures("rank_zero")


def rows_of(text: str) -> dict[str, str]:
    """The rows of a banner, by name."""
    title, *lines = text.splitlines()
    assert title == "── megatron_pg: effective policy-gradient objective ──"
    return dict(re.fullmatch(r"  (\S+(?: \S+)*) {2,}(\S.*)", line).groups() for line in lines)


def rows(**overrides: object) -> dict[str, str]:
    return rows_of(banner(validate_args(arguments(**overrides))))


FORMULAS = {  # pg_loss and weight
    "sample_mean": (
        "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout",
        "N_r · M_rollout: rollouts of the step · trained tokens of the token's rollout",
    ),
    "prompt_mean": (
        "(1/P) Σ_prompts (Σ m·ℓ)/M_group",
        "P · M_group: prompts of the step · trained tokens of the token's prompt group",
    ),
    "token_mean": ("(Σ m·ℓ)/T", "T: trained tokens of the step"),
    "constant": ("(Σ m·ℓ)/(N_r·L)", "N_r · L: rollouts of the step · 4096"),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_the_banner_names_formula_divisor_and_deciding_flag(name):
    per_token, is_constant = name == "token_mean", name == "constant"
    found = rows(**constant(4096.0) if is_constant else mode(name, calculate_per_token_loss=per_token))
    pg_loss, weight = FORMULAS[name]
    flags = f"--loss-aggregation {name}" + (" --loss-aggregation-divisor 4096" if is_constant else "")
    assert found["pg_loss"] == f"{pg_loss}  ({flags})"
    assert found["weight"] == f"1/δ, δ = {weight}"
    assert found["Megatron"] == (PER_TOKEN if per_token else BY_MICROBATCH)


@pytest.mark.parametrize(("per_token", "count"), [(False, "N_r"), (True, "T")])
@pytest.mark.usefixtures("user_code")
@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice", "ignore::megatron_pg.args.ArgumentWarning")
def test_the_banner_of_a_custom_reducer_names_its_path_and_no_mode(per_token, count):
    text = banner(validate_args(arguments(**path(REDUCER, calculate_per_token_loss=per_token))))
    found = rows_of(text)
    assert found["pg_loss"] == f"(1/{count}) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {REDUCER})"
    assert "weight" not in found
    assert "--loss-aggregation" not in text
    assert found["Megatron"] == (PER_TOKEN if per_token else BY_MICROBATCH)


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice")
def test_the_banner_speaks_of_the_reconciled_mode():
    found = rows(calculate_per_token_loss=True)
    assert (found["pg_loss"], found["Megatron"]) == ("(Σ m·ℓ)/T  (--loss-aggregation token_mean)", PER_TOKEN)


@pytest.mark.parametrize(
    ("divisor", "shown"), [(1, "1"), (0.5, "0.5"), (131072.0, "131072"), (1048576.0, "1048576"), (1234567, "1234567")]
)
def test_the_banner_rounds_no_divisor(divisor, shown):
    found = rows(**constant(divisor))
    assert found["pg_loss"].endswith(f"--loss-aggregation-divisor {shown})")
    assert found["weight"].endswith(f" · {shown}")


@pytest.mark.parametrize("line", ROWS)
def test_the_banner_says_what_is_in_force(line):
    words, _, row = line.partition(" -> ")
    name, _, text = row.partition(": ")
    assert rows(**eval(f"dict({words})"))[name] == text
    assert rows().get(name) != text


def test_the_banner_says_what_is_not_the_default():
    plain = banner(validate_args(arguments()))
    assert "sampling mask" not in plain
    assert rows()["kernel"] == "triton on CUDA, torch elsewhere  (--pg-kernel)"
    assert rows(pg_metrics="none")["metrics"].startswith("none, ")
    kept = {"pg_sampling_mask_entropy": "kept", "pg_metrics": "with_entropy", "pg_sampling_mask_missing": "mask"}
    text = banner(validate_args(arguments(**kept)))
    assert "over the sampling mask, for tokens that have one  (--pg-sampling-mask-entropy kept)" in text
    assert "trained tokens outside it are masked  (--pg-sampling-mask-missing mask)" in text


def test_the_banner_needs_no_megatron_attribute():
    found = rows_of(banner(validate_args(parse("--loss-aggregation", "prompt_mean"))))
    assert (found["Megatron"], found["layout"]) == (BY_MICROBATCH, "not known yet")
