import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch

from megatron_pg.args import ArgumentError, ArgumentWarning
from megatron_pg.reducers.custom import load_custom_reducer, reducer_weights

# The form in which slime and miles users write one: constant divisor, flag on: a token sum.
EXISTING = """
    def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        def sum_of_token(x):
            return sum([(x_i * m).sum() for x_i, m in zip(x.split(response_lengths, dim=0), loss_masks, strict=False)])
        if calculate_per_token_loss:
            return sum_of_token
        return lambda x: sum_of_token(x) / 1000.0
"""
OURS = """
    from megatron_pg.cp_utils import get_sum_of_sample_mean

    def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return get_sum_of_sample_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss)
"""


def body(code: str) -> str:
    return f"""
    import torch
    def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        mask = torch.cat(loss_masks)
        return {code}
    """


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Write the source of a user's module `user_reducer` and return the path of its function."""

    def make(source: str) -> str:
        (tmp_path / "user_reducer.py").write_text(textwrap.dedent(source), encoding="utf-8")
        monkeypatch.syspath_prepend(tmp_path)
        monkeypatch.delitem(sys.modules, "user_reducer", raising=False)
        return "user_reducer:reducer"

    yield make
    sys.modules.pop("user_reducer", None)


MASKS = [torch.tensor([1, 0, 1], dtype=torch.bool), torch.tensor([1], dtype=torch.bool)]


def weights_of(path: str, *, per_token: bool = False) -> list[float]:
    reducer = load_custom_reducer(path, calculate_per_token_loss=per_token)
    return reducer_weights(reducer, [5, 2], MASKS, calculate_per_token_loss=per_token).tolist()


def test_an_existing_reducer_file_works_unchanged(write):
    assert weights_of(write(EXISTING)) == [0.001, 0.0, 0.001, 0.001]


def test_the_flag_is_passed_on(write):
    assert weights_of(write(EXISTING), per_token=True) == [1.0, 0.0, 1.0, 1.0]


def test_our_default_reducer_sees_whole_samples_under_context_parallelism(write, monkeypatch):
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_context_parallel_rank=lambda: 1,
        get_context_parallel_world_size=lambda: 4,
    )
    monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
    assert weights_of(write(OURS)) == [0.5, 0.0, 0.5, 1.0]


@pytest.mark.parametrize("per_token", [False, True])
def test_the_reducer_of_the_partition_tests_is_accepted(per_token):
    reducer = load_custom_reducer("step_cases:root_length_reducer", calculate_per_token_loss=per_token)
    weights = reducer_weights(reducer, [5, 2], MASKS, calculate_per_token_loss=per_token).tolist()
    assert weights == pytest.approx([3**-0.5, 0.0, 3**-0.5, 1.0])


def test_an_empty_microbatch_asks_the_reducer_nothing(write):
    reducer = load_custom_reducer(write(EXISTING), calculate_per_token_loss=False)
    assert reducer_weights(reducer, [], [], calculate_per_token_loss=False).tolist() == []


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("lambda x: (x * mask).sum() / mask.sum()", "in one micro-batch and"),
        ("lambda x: (x * mask).sum() / len(loss_masks)", "in one micro-batch and"),
        ("lambda x: x.sum()", "gives a masked token a weight"),
        ("lambda x: (x * mask).pow(2).sum()", "is not linear"),
        ("lambda x: (x * mask).sum() + 1.0", "is not linear"),
        ("lambda x: (x * mask).sum() + 1e-9", "is not linear"),
        ("lambda x: (x * mask).sum() + float('nan')", "is not linear"),  # its gradient is finite
        ("lambda x: (x * mask).abs().sum()", "is not linear"),
        ("lambda x: (x.detach() * mask).sum()", "is not linear"),
        ("lambda x: torch.zeros(())", "has no gradient"),
        ("lambda x: x * mask", "not a scalar tensor"),
        ("lambda x: (x * mask).sum() / 0.0", "not finite"),
        ("lambda x: 3.0", "not a scalar tensor"),
        ("mask.missing", "AttributeError"),
        ("exit(3)", "fails on a tiny step of whole samples: SystemExit: 3"),
    ],
)
def test_a_reducer_whose_value_depends_on_the_cut_is_refused_at_startup(write, code, message):
    path = write(body(code))
    with pytest.raises(ArgumentError) as error:
        load_custom_reducer(path, calculate_per_token_loss=False)
    assert error.value.violations[0][0] == "E16"
    assert path in str(error.value)
    assert message in str(error.value)


def test_a_reducer_with_negative_weights_is_a_warning(write):
    path = write(body("lambda x: -(x * mask).sum()"))
    with pytest.warns(ArgumentWarning, match="gives a token the negative weight -1. Check its sign"):
        load_custom_reducer(path, calculate_per_token_loss=False)
