"""Trainer against rollout engine in a step: by hand, on distributions whose temperature is known, and over ranks."""

import math

import metric_oracle
import pytest
import torch

from megatron_pg.metrics import Reduction, gap
from megatron_pg.metrics.limits import LIMITS


def sums(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Of (o, b)."""
    trainer, engine = torch.tensor(pairs, dtype=torch.float64).view(-1, 2).T
    return dict(zip(gap.SUMS, gap.sums_of(trainer, engine).sum(dim=1).tolist(), strict=True))


def test_hand_worked_values():
    found = sums([(-1.0, -1.25), (-2.0, -1.75), (-9.0, -1.0)])  # d: 0.25, -0.25, and one of another token
    assert gap.difference(found) == 0.0
    assert gap.spread(found) == 0.25
    assert gap.correlation(found) == pytest.approx(1.0)  # the likelier token is the one that gained
    assert gap.outlier_fraction(found) == pytest.approx(1 / 3)
    assert gap.missing_mass(found) == pytest.approx(1 - (math.exp(0.25) + math.exp(-0.25) + math.exp(-8)) / 3)


def test_a_token_counts_with_three_nats_at_most():
    """So a single token of another model does not decide which rank is furthest."""
    assert sums([(-9.0, -1.0)])["size"] == gap.NEAR
    assert sums([(-1.0, -9.0)])["size"] == gap.NEAR


def test_mass_may_be_missing_on_either_side():
    found = sums([(-1.0, -1.25), (-2.0, -2.5)])  # the trainer counts fewer columns
    assert gap.missing_mass(found) == pytest.approx(1 - (math.exp(-0.25) + math.exp(-0.5)) / 2)


def drawn(kappa: float, count: int, *, noise: float = 0.0) -> list[tuple[float, float]]:
    """(o, b) of tokens of 40 contexts, drawn from q; π ∝ q^κ."""
    generator = torch.Generator().manual_seed(4)
    logits = 2.5 * torch.randn(40, 30, generator=generator, dtype=torch.float64)
    engine, trainer = logits.log_softmax(-1), (kappa * logits).log_softmax(-1)
    tokens = torch.multinomial(engine.exp(), count, replacement=True, generator=generator)
    trainer = trainer + noise * torch.randn(trainer.shape, generator=generator, dtype=torch.float64)
    picked = (side.gather(1, tokens).flatten().tolist() for side in (trainer, engine))
    return list(zip(*picked, strict=True))


@pytest.mark.parametrize("ratio", [0.8, 0.95, 1.05, 1.3])
def test_the_temperature_is_that_of_the_trainer_over_the_engines(ratio):
    assert gap.temperature(sums(drawn(1 / ratio, 500))) == pytest.approx(ratio, rel=0.02)


@pytest.mark.parametrize("ratio", [0.8, 1.3])
def test_the_temperature_where_the_engine_reports_before_its_own(ratio):
    """Then the trainer's distribution is the one that drew the tokens."""
    swapped = [(b, o) for o, b in drawn(ratio, 500)]
    assert gap.temperature(sums(swapped)) == pytest.approx(ratio, rel=0.002)


def test_a_nearly_deterministic_policy_has_no_temperature():
    pairs = [(-1.9, -2.0)] * 2 + [(-1e-6, -1e-6)] * 9998  # two tokens, as if at another temperature
    found = sums(pairs)
    assert abs(gap.correlation(found)) > 0.99
    assert gap.temperature(found) is None


def test_noise_has_no_temperature():
    found = sums(drawn(1.0, 100, noise=0.02))
    assert abs(gap.correlation(found)) < 0.2
    assert gap.temperature(found) is None
    assert 0.01 < gap.spread(found) < 0.03
    assert abs(gap.missing_mass(found)) < 0.003


def test_equal_sides_have_no_spread_and_no_correlation():
    for offset in (0.0, 0.1, 1 / 3):
        found = sums([(b + offset, b) for b in (-1.0, -0.7, -3.1, -0.2, -5.0)])
        assert gap.spread(found) == 0.0
        with pytest.raises(ZeroDivisionError):  # which leaves the metric out
            gap.correlation(found)


def test_tokens_that_are_none_count_for_nothing():
    pairs = drawn(0.8, 3)
    trainer, engine = torch.tensor(pairs, dtype=torch.float64).T
    rows = gap.sums_of(torch.cat([trainer, trainer[:1]]), torch.cat([engine, torch.tensor([math.nan])]))
    assert torch.equal(rows[:, :-1], gap.sums_of(trainer, engine))  # the reduction selects the rest away


def test_the_statistics_equal_loops():
    pairs = drawn(0.85, 4, noise=0.3)
    found = sums(pairs)
    for name, value in metric_oracle.gap_metrics(pairs).items():
        assert getattr(gap, name.removeprefix("mismatch/"))(found) == pytest.approx(value, rel=1e-10), name


# --- ranks ---


def test_the_rank_that_is_furthest_from_the_engine():
    near, far = [(-1.0, -1.01)] * 3, [(-1.0, -1.05)]
    assert gap.farthest_rank([sums(near), sums(far), sums(near)]) == (1, pytest.approx(5.0))
    assert gap.farthest_rank([sums(near), sums(near)]) == (0, pytest.approx(1.0))
    assert gap.farthest_rank([sums(near), sums([])]) is None  # nobody to compare with
    assert gap.farthest_rank([sums(near)]) is None
    assert gap.farthest_rank([sums(near), sums([(-1.0, -1.0)])]) == (1, 0.0)  # the other one agrees to the last bit
    assert gap.farthest_rank([]) is None


def test_parts_of_one_data_parallel_rank_are_one():
    """Context-parallel ranks have parts of the same samples; tensor-parallel copies have nothing."""
    reduction = Reduction("basic")
    names = [metric.name for metric in reduction.metrics if metric.name.startswith("_mismatch/")]
    assert names == [f"_mismatch/{name}" for name in gap.SUMS]
    added = [metric.name for metric in reduction._added]

    def row(pairs: list[tuple[float, float]]) -> torch.Tensor:
        values = torch.tensor(reduction.identity(), dtype=torch.float64)
        for name, value in sums(pairs).items():
            values[added.index(f"_mismatch/{name}")] = value
        return values

    parts = [[(-1.0, -1.01)], [(-2.0, -2.03)], [(-1.0, -1.2)], []]
    rows = torch.stack([row(each) for each in parts])
    found = reduction.by_rank(rows, torch.tensor([0, 0, 1, 1]))
    by_name = [dict(zip(added, each, strict=True)) for each in found]
    assert [each["_mismatch/all"] for each in by_name] == [2.0, 1.0]
    assert [each["_mismatch/size"] for each in by_name] == pytest.approx([0.04, 0.2])


def test_every_statistic_that_has_a_limit_is_advised():
    advised = {name for name, limit in LIMITS.items() if limit.steps > 1}
    assert advised == {name for name in LIMITS if name.startswith("mismatch/")}
