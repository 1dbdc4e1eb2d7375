"""The console line, and what a callback adds to a step."""

import math

import numpy
import pytest
import torch

from megatron_pg.metrics.limits import LIMITS
from megatron_pg.metrics.reporting import added_values, console_line, red_flag_line


def test_the_console_line_marks_what_is_beyond_a_limit_and_shows_what_is_yours():
    values = {"pg_loss": 0.5, "kl_new_old": 0.002, "clamped_log_ratio_fraction": 0.25, "mine": 3.0, "skipped": False}
    line = console_line(3, values, ["mine"])
    assert line == "pg      3 | pg_loss +0.5 | kl_new_old +0.002 | clamped_log_ratio_fraction +0.25! | mine +3"
    assert red_flag_line("ess", 0.25, LIMITS["ess"]).startswith(
        "red flag: ess 0.25 is < 0.5: few tokens dominate the step: take fewer"
    )


def test_what_a_callback_may_add():
    returned = {"a": 1, "b/c": numpy.float32(0.5), "d": torch.tensor([2.0]), "e": math.nan}
    found = added_values(returned, ["iteration"])
    assert {name: found[name] for name in ["a", "b/c", "d"]} == {"a": 1.0, "b/c": 0.5, "d": 2.0}
    assert math.isnan(found["e"])
    assert added_values(None, []) == added_values({}, []) == {}


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (0.5, "on_step returned a float"),
        ({1: 0.5}, "a value named 1, which no log can show"),
        ({"": 0.5}, "a value named '', which no log can show"),
        ({"a\x1b": 0.5}, "which no log can show"),
        ({"a": "0.5"}, "a='0.5', which is not a real number"),
        ({"a": True}, "a=True, which is not a real number"),
        ({"a": None}, "a=None, which is not a real number"),
        ({"a": torch.zeros(2)}, "which is not a real number"),
        ({"a": 10**400}, "on_step returned a=1000000"),
        ({"a": 10**5000}, "which is not a real number in the range of float"),
        ({"a": Unprintable()}, "a=a Unprintable without a text, which is not a real number"),  # and no rank waits
        ({"a": torch.tensor(1j)}, "a=tensor(0.+1.j), which is not a real number"),
        ({"nonfinite": 3.0}, "'nonfinite', which is a metric of megatron_pg"),
        ({"iteration": 1}, "'iteration', which is a metric of megatron_pg"),
        ({"kl_new_ref": 1.0}, "'kl_new_ref', which is a metric of megatron_pg"),  # of another step, maybe
        ({f"{i:0100}": 1.0 for i in range(200)}, "on_step returned 200 values in 2"),
    ],
)
def test_what_a_callback_may_not_add(returned, message):
    with pytest.raises(ValueError) as error:
        added_values(returned, ["iteration"])
    assert message in str(error.value)
