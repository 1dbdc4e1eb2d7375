"""Choices among the tokens of a step, worked by hand; their exact sums and draws."""

import math
import random
import re
from fractions import Fraction

import pytest
import torch
from samples import make_sample

from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.objectives.corrections.selections import (
    StepKeys,
    average,
    below_quantile,
    check_size,
    covariance,
    drawn_between,
    entropy,
    exact_parts,
    identity_of,
    largest,
    second_moment,
    share,
    squared_gap,
)
from megatron_pg.rollouts.sample import Sample


def step_of(*keys: float) -> StepKeys:
    return StepKeys(torch.tensor(keys, dtype=torch.float64), [len(keys)], [7])


def correction(**numbers: float) -> Correction:
    return Correction(name="m2po", **numbers)


def places(found) -> list[int]:
    return found.tokens.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    ("fraction", "expected", "threshold"),
    [(0.2, [3], 5.0), (0.4, [1, 3], 3.0), (0.6, [0, 1, 3], 2.0), (0.19, [], None), (0.999, [0, 1, 2, 3], 1.0)],
)
def test_the_largest_are_penalised_and_of_equal_ones_the_earlier(fraction, expected, threshold):
    found = largest(step_of(2.0, 3.0, 1.0, 5.0, 1.0), correction(fraction=fraction))
    assert (places(found), found.threshold) == (expected, threshold)


@pytest.mark.parametrize(
    ("high", "dropped"),
    [
        (4.0, []),  # mean of 1, 9, 4, 0, 4 is 3.6
        (3.6, []),
        (3.5, [1]),  # 9/4 = 2.25 without the 9
        (2.25, [1]),
        (2.2, [1, 2]),  # of the two 4 the earlier: 5/3
        (0.5, [1, 2, 4]),  # 1/2
        (0.4, [0, 1, 2, 4]),
        (0.0, [0, 1, 2, 4]),
    ],
)
def test_the_largest_squares_go_until_the_mean_is_in_bounds(high, dropped):
    assert places(second_moment(step_of(1.0, 9.0, 4.0, 0.0, 4.0), correction(high=high))) == dropped


def test_a_step_beyond_the_bound_loses_every_token():
    found = second_moment(step_of(0.5, 0.25, 0.5), correction(high=0.2))
    assert (places(found), found.threshold) == ([0, 1, 2], 0.25)


@pytest.mark.parametrize("size", [3, 10, 1000])
def test_a_mean_that_is_the_bound_is_in_bounds_whatever_rounding_adds(size):
    """0.1 + 0.1 + 0.1 is more than 3 · 0.1 in float64; the exact sum of the numbers is not."""
    assert not places(second_moment(step_of(*[0.1] * size), correction(high=0.1)))
    assert len(places(second_moment(step_of(*[0.1] * size), correction(high=math.nextafter(0.1, 0))))) == size


@pytest.mark.parametrize(
    ("fraction", "dropped"),
    [
        (0.5, [2, 3]),  # 1 + ⌊0.5·4⌋ = 3 are kept
        (0.49, [0, 2, 3]),
        (0.25, [0, 2, 3]),
        (0.24, [0, 2, 3, 4]),
        (0.75, [3]),
    ],
)
def test_entropies_below_the_quantile_go(fraction, dropped):
    keys = torch.tensor([0.3, 0.9, 0.2, 0.1, 0.5], dtype=torch.float64)
    assert places(below_quantile(step_of(*keys.tolist()), correction(fraction=fraction))) == dropped
    quantile = torch.quantile(keys, 1 - fraction)  # interpolated
    assert (keys < quantile).nonzero().flatten().tolist() == dropped


def test_equals_of_the_least_that_is_kept_are_kept():
    assert places(below_quantile(step_of(0.0, 0.0, 0.5, 0.0), correction(fraction=0.5))) == []
    assert places(below_quantile(step_of(0.0, 0.5, 0.5, 0.0, 1.0), correction(fraction=0.25))) == [0, 3]
    assert places(below_quantile(step_of(0.3), correction(fraction=0.1))) == []


def test_draws_are_from_the_open_interval_alone():
    assert CORRECTIONS["clip_cov"].selection.choice == drawn_between.__name__
    step = step_of(1.0, 2.0, 3.0, 4.0, 5.0, 2.0)
    found = drawn_between(step, correction(low=1.0, high=5.0, fraction=0.5))
    assert found.num_candidates == 4
    assert found.threshold is None
    among = [1, 2, 3, 5]
    assert places(found) == sorted(sorted(among, key=lambda i: -float(step.draws()[i]))[:3])
    everything = drawn_between(step, correction(low=1.0, high=5.0, fraction=0.99))
    assert places(everything) == among  # fewer than ⌊f·T⌋
    assert places(drawn_between(step, correction(low=6.0, high=7.0, fraction=0.5))) == []
    assert places(drawn_between(step, correction(low=1.0, high=5.0, fraction=0.1))) == []


def test_draws_are_those_of_splitmix64():
    """Its first outputs from the seed 1234567, as they are published with it."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    draws = StepKeys(torch.zeros(6), [4, 2], [1234567, -1]).draws()
    assert draws[:4].tolist() == [(x >> 11) / 2**53 for x in published]
    assert draws[4:].tolist() == StepKeys(torch.zeros(2), [2], [-1]).draws().tolist()


def test_a_share_is_of_the_fraction_as_it_is_written():
    assert [share(0.29, 100), share(2e-4, 5000), share(2e-4, 4999), share(0.1, 30), share(0.7, 10)] == [29, 1, 0, 3, 7]


def test_sums_are_exact_in_any_order_and_any_parts():
    rng = random.Random(1)
    values = [rng.choice([1, -1]) * rng.uniform(1, 2) * 2.0 ** rng.randint(-300, 300) for _ in range(400)]
    exact = sum(map(Fraction, values))
    for cut in (1, 7, 399):
        parts = [*exact_parts(values[:cut]), *exact_parts(values[cut:])]
        assert sum(map(Fraction, parts)) == exact
        assert average(rng.sample(parts, len(parts)), 400) == float(exact / 400)
    assert exact_parts([]) == exact_parts([0.0, 1e300, -1e300]) == []
    assert average([], 0) == 0.0


def sample(**fields) -> Sample:
    given = {"old_logprobs": [-1.0, -2.0, -4.0], "advantage": [1.0, 9.0, -1.0]} | fields
    return Sample.build(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[1, 0, 1], sample_id="s", **given)


def test_keys_are_of_trained_tokens():
    assert covariance(sample(), 0.5, -1.5).tolist() == [0.5 * 0.5, -1.5 * -2.5]
    assert squared_gap(sample(rollout_logprobs=[-1.5, 0.0, -4.0])).tolist() == [0.25, 0.0]
    assert entropy(sample(old_entropies=[0.5, math.nan, 0.0])).tolist() == [0.5, 0.0]


def test_a_sample_is_named_by_step_ids_tokens_and_mask():
    rng = random.Random(0)
    one = make_sample(prompt_length=2, mask=[1, 1], rng=rng, rollout_id="a", prompt_id=1)
    other = {"rollout_id": "b", "prompt_id": 2, "step": 5, "loss_mask": torch.tensor([True, False])}
    other |= {"tokens": one.tokens + 1}
    fields = {name: getattr(one, name) for name in ("tokens", "loss_mask", "rollout_id", "prompt_id", "step")}

    def named(**changes) -> int:
        rest = {"old_logprobs": one.old_logprobs - 1, "advantages": one.advantages, "sample_id": "elsewhere"}
        return identity_of(Sample(**fields | rest | changes))

    assert named() == identity_of(one)
    assert len({identity_of(one), *(named(**{name: value}) for name, value in other.items())}) == 1 + len(other)


@pytest.mark.parametrize(
    ("name", "field", "values", "shown"),
    [
        (
            "kl_cov",
            "advantage",
            [1e101, 0.0, 1.0],
            "advantages of sample s is 1e+101 at response token 0, and --pg-cor",
        ),
        (
            "m2po",
            "rollout_logprobs",
            [-1.0, 0.0, -1e200],
            "rollout_logprobs of sample s is -1e+200 at response token 2",
        ),
        ("top_entropy", "old_entropies", [0.0, 0.0, 1e101], "old_entropies of sample s is 1e+101 at response token 2"),
    ],
)
def test_numbers_whose_sums_are_not_finite_are_refused(name, field, values, shown):
    with pytest.raises(ValueError, match=re.escape(shown)):
        check_size([sample(**{field: [0.0, 0.0, 0.0]}), sample(**{field: values})], Correction(name=name))
    check_size([sample(**{field: [0.0, 1e300, 0.0]})], Correction(name=name))  # not trained
    check_size([sample(advantage=1e300)], Correction(name="tis"))
