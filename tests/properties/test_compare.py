"""The comparisons themselves: each must fail on everything that could hide an error."""

import math

import pytest
import torch
from compare import gradient_error, gradient_error_by_name, metrics_error, same_bits, scalar_error, tensor_error

NAN, INF = math.nan, math.inf
ONE, NONE = torch.ones(3), torch.zeros(0)
METRICS = {"entropy": 1.5, "max_advantage": 2.0, "num_tokens": 7}


def with_value(value: float) -> torch.Tensor:
    return torch.tensor([1.0, value, 1.0])


def tensors_that_must_not_pass():
    """(found, expected), each of them bad in one way."""
    for bad in (NAN, INF, -INF):
        yield with_value(bad), ONE
        yield ONE, with_value(bad)
        yield with_value(bad), with_value(bad)
    yield NONE, NONE
    yield torch.ones(2), ONE
    yield torch.ones(3, 1), ONE
    yield torch.ones(1), ONE  # would broadcast


def metrics_that_must_not_pass():
    """(found, expected), each of them bad in one way."""
    for bad in (NAN, INF, -INF):
        for name in METRICS:
            yield METRICS | {name: bad}, METRICS
            yield METRICS, METRICS | {name: bad}
            yield METRICS | {name: bad}, METRICS | {name: bad}
    yield {}, {}
    yield {}, METRICS
    yield {name: METRICS[name] for name in ("entropy", "num_tokens")}, METRICS
    yield METRICS | {"kl": 0.0}, METRICS
    yield METRICS | {"num_tokens": 8}, METRICS
    yield METRICS | {"max_advantage": math.nextafter(2.0, 3.0)}, METRICS


@pytest.mark.proof("comparisons fail on NaN, inf, gaps, shapes")
def test_no_comparison_lets_a_bad_value_pass(evidence):
    errors = [tensor_error(a, b) for a, b in tensors_that_must_not_pass()]
    errors += [gradient_error([ONE, a], [ONE, b]) for a, b in tensors_that_must_not_pass() if a.numel()]
    errors += [gradient_error_by_name({"w": a}, {"w": b}) for a, b in tensors_that_must_not_pass()]
    errors += [metrics_error(a, b) for a, b in metrics_that_must_not_pass()]
    for bad in (NAN, INF, -INF):
        errors += [
            scalar_error(*[bad if i in places else 1.0 for i in range(3)]) for places in ((0,), (1,), (2,), (0, 1))
        ]
    errors += [
        scalar_error(1.0, 2.0, 0.0),
        scalar_error(1.0, 2.0, -1.0),
        gradient_error([], []),
        gradient_error([ONE], []),
    ]
    errors += [gradient_error_by_name({}, {"w": ONE}), gradient_error_by_name({"w": ONE, "v": ONE}, {"w": ONE})]
    errors += [metrics_error(METRICS, METRICS, ignore=METRICS)]
    assert errors == [INF] * len(errors)
    bits = [same_bits([a], [b]) for a, b in tensors_that_must_not_pass()]
    bits += [same_bits([], []), same_bits([ONE], []), same_bits([ONE], [ONE.double()])]
    bits += [same_bits([torch.tensor([-0.0])], [torch.tensor([0.0])])]
    assert bits == [False] * len(bits)
    evidence(cases=len(errors) + len(bits))


def test_what_is_equal_passes():
    assert scalar_error(0.0, 0.0, 0.0) == tensor_error(ONE, ONE) == metrics_error(METRICS, METRICS) == 0.0
    assert gradient_error([NONE, ONE], [NONE, ONE]) == 0.0
    assert same_bits([ONE, NONE], [ONE.clone(), NONE.clone()])


def test_errors_are_relative_to_the_scale():
    assert scalar_error(1.5, 1.0, 2.0) == 0.25
    assert tensor_error(torch.tensor([1.0, 2.5]), torch.tensor([1.0, 2.0])) == 0.25
    assert gradient_error([torch.tensor([0.5]), ONE * 4], [torch.tensor([0.0]), ONE * 4]) == 0.125
    assert metrics_error({"entropy": 3.0}, {"entropy": 4.0}) == 0.25
    assert metrics_error({"entropy": 0.02}, {"entropy": 0.01}) == pytest.approx(0.1)


def test_an_expected_gradient_of_zero_must_be_found_exactly():
    assert tensor_error(torch.zeros(2), torch.zeros(2)) == 0.0
    assert tensor_error(torch.tensor([0.0, 1e-30]), torch.zeros(2)) == INF
