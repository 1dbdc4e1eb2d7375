"""The rule of the adaptive entropy coefficient, worked by hand."""

import pytest

from megatron_pg.declarations.adaptive_entropy import AdaptiveEntropy


def test_the_coefficient_rises_below_the_target_falls_above_it_and_is_off_after_a_step_above_it():
    state = AdaptiveEntropy(target=0.5, step=0.25, max=0.75, coefficient=0.25)
    assert state.value == 0.25  # no step yet
    found = []
    for entropy in (0.4, 0.3, 0.2, 0.5, 0.6, 0.7, 0.8, 0.9, 0.5, 0.1):
        state = state.after(entropy)
        assert state.entropy == entropy
        found.append((state.coefficient, state.value))
    rising = [(0.5, 0.5), (0.75, 0.75), (0.75, 0.75), (0.75, 0.75)]  # up to max; on the target it stays
    falling = [(0.5, 0.0), (0.25, 0.0), (0.0, 0.0), (0.0, 0.0)]
    assert found == [*rising, *falling, (0.0, 0.0), (0.25, 0.25)]


@pytest.mark.parametrize(("entropy", "value"), [(None, 0.1), (0.2, 0.1), (0.3, 0.1), (0.4, 0.0)])
def test_a_resumed_coefficient_is_off_where_the_last_entropy_is_above_the_target_of_now(entropy, value):
    assert AdaptiveEntropy(target=0.3, step=1.0, max=1.0, coefficient=0.1, entropy=entropy).value == value
