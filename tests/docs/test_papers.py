"""The papers' claims, as `make papers` shows them, at sizes that run in seconds."""

from pathlib import Path

import distillation_gradients
import geometric
import group_size
import head_precision
import kl_gradients
import length_bias
import numpy as np
import pytest


def test_constant_has_the_true_gradient_and_sample_mean_the_wrong_sign():
    (row,) = length_bias.measure((0.125,))
    assert row.constant == pytest.approx(row.truth, rel=1e-9)
    assert (row.truth, row.sample_mean) == (pytest.approx(0.1468, abs=5e-5), pytest.approx(-0.0410, abs=5e-5))


def test_the_closed_form_of_the_true_gradient_is_the_slope_of_the_expected_reward():
    p, h = 0.125, 1e-6
    theta = np.log(p / (1 - p))
    up, down = (geometric.expected_reward(1 / (1 + np.exp(-(theta + d)))) for d in (h, -h))
    assert geometric.true_gradient(p) == pytest.approx((up - down) / (2 * h), rel=1e-6)
    lengths = geometric.lengths_that_matter(p)
    by_hand = (geometric.probability(lengths, p) * geometric.reward(lengths)).sum()
    assert geometric.expected_reward(p) == pytest.approx(by_hand, rel=1e-12)


def test_a_policy_that_follows_sample_mean_gets_longer_and_worse():
    paths = {name: length_bias.climb(name, p=0.125, updates=5) for name in ("constant", "sample_mean")}
    start = geometric.expected_reward(0.125)
    assert geometric.expected_reward(paths["constant"][-1]) > start + 0.03
    assert geometric.expected_reward(paths["sample_mean"][-1]) < start - 0.05
    assert 1 / paths["sample_mean"][-1] > 10


def test_prompt_mean_approaches_the_truth_with_the_group_size():
    rows, truth = group_size.measure(responses=16_000), geometric.true_gradient(group_size.P)
    exact = [row.prompt_mean_exact for row in rows]
    assert exact == pytest.approx([0.0077, 0.0600, 0.1017, 0.1244, 0.1413], abs=1e-4)
    assert exact == sorted(exact)
    assert exact[-1] < truth
    for row in rows:
        assert abs(row.prompt_mean - row.prompt_mean_exact) < 4 * row.prompt_mean_error
        assert abs(row.constant - truth * (1 - 1 / row.group_size)) < 4 * row.constant_error


def test_groups_without_signal_dilute_the_step():
    assert group_size.dilution(prompts=64, without_signal=6) == pytest.approx(58 / 64)


def test_the_head_decides_how_far_the_ratio_is_from_one_at_step_0():
    truth, fp32, bf16, one_sided, stored = head_precision.measure(tokens=1024, vocabulary=1024, hidden=256)
    assert fp32.ratio_spread == pytest.approx(truth.ratio_spread, rel=0.02)
    assert fp32.clipped == truth.clipped < 0.001
    assert bf16.ratio_spread > 3 * fp32.ratio_spread
    assert bf16.clipped > 0.01
    assert one_sided.mean_abs_log_ratio > 3 * bf16.mean_abs_log_ratio
    assert stored.exactly_one > 0.9
    assert stored.ratio_spread > bf16.ratio_spread


def test_which_kl_estimators_have_the_right_gradient():
    k1, k2, k3, absolute = kl_gradients.measure()
    zero = pytest.approx(0, abs=1e-12)
    assert (k1.value_bias, k3.value_bias) == (zero, zero)
    assert (k1.weighted, k2.plain, k3.weighted) == (zero, zero, zero)
    assert (k1.weighted_off_policy, k3.weighted_off_policy) == (zero, zero)
    wrong = [k1.plain, k2.weighted, k3.plain, absolute.plain, absolute.weighted, k2.plain_off_policy]
    assert wrong == pytest.approx([0.3080, 0.0451, 0.0947, 0.0869, 0.0783, 0.0762], abs=5e-5)
    assert (k2.value_bias, absolute.value_bias) == pytest.approx((-0.0147, 0.4450), abs=5e-5)


def test_which_forms_of_distillation_have_the_teacher_in_their_gradient():
    found = {row.form.partition(":")[0]: row for row in distillation_gradients.measure()}
    zero, one = pytest.approx(0, abs=1e-12), pytest.approx(1, abs=1e-12)
    for right in ("k1_weighted", "k3_weighted", "advantage of the policy"):
        assert (found[right].on_policy, found[right].off_policy, found[right].teacher) == (zero, zero, one)
    for without in ("k1", "one advantage for every token"):
        assert found[without].teacher == zero
    assert found["k2"].on_policy == zero
    stale = found["advantage of the sampler"]
    assert (stale.on_policy, stale.off_policy) == (zero, pytest.approx(0.443, abs=5e-4))
    page = (Path(__file__).parents[2] / "docs" / "distillation.md").read_text(encoding="utf-8")
    for row in distillation_gradients.cells(distillation_gradients.measure()):
        assert "| " + " | ".join(row) + " |" in page


@pytest.mark.parametrize(
    ("demonstration", "sizes", "words"),
    [
        (length_bias, {"probabilities": (0.125, 0.2), "updates": 2}, ["WRONG", "+0.1468", "-0.0410"]),
        (group_size, {"responses": 3_200}, ["0.906", "± 0.0"]),
        (head_precision, {"tokens": 64}, ["bfloat16 log-probs"]),
        (kl_gradients, {}, ["0.3080"]),
        (distillation_gradients, {}, ["k3_weighted", "0.443"]),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_demonstration_prints_its_table_and_draws(demonstration, sizes, words, tmp_path, capsys):
    demonstration.main(tmp_path, **sizes)
    shown = capsys.readouterr().out
    assert all(word in shown for word in words)
    (picture,) = tmp_path.glob("*.png")
    assert 5_000 < picture.stat().st_size < 100_000
