"""What is declared once: numbers with their flags or options, hints for unknown names, functions that are imported when
asked for."""

import pytest

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.declaration import Number, did_you_mean, resolved
from megatron_pg.declarations.objectives import OBJECTIVES

LOW = Number(name="low", low=0.0, high=1.0, requirement="between 0 and 1", flag="--pg-my-low")
HIGH = Number(name="high", low=1.0, high=9.0, requirement="between 1 and 9")


def test_a_number_has_a_flag_or_is_an_option_of_its_name():
    assert (LOW.attribute, HIGH.attribute) == ("pg_my_low", "high")


def test_what_is_given_comes_before_the_default_and_zero_is_given():
    reads = {LOW: 0.5, HIGH: 2.0}
    assert resolved(reads, {"pg_my_low": None, "high": 3.0, "pg_other": 7.0}) == {"low": 0.5, "high": 3.0}
    assert resolved(reads, {"pg_my_low": 0.0}) == {"low": 0.0, "high": 2.0}


@pytest.mark.parametrize("table", [AGGREGATIONS, CORRECTIONS, KL_ESTIMATORS])
def test_every_declared_function_can_be_loaded(table):
    for declared in table.values():
        found = declared.load()
        for function in found if isinstance(found, tuple) else [found]:
            assert function is None or callable(function)


def test_every_default_is_a_value_that_the_number_may_have():
    reads = [declared.numbers for table in (OBJECTIVES, CORRECTIONS) for declared in table.values()]
    defaults = [(number, value) for numbers in reads for number, value in numbers.items() if value is not None]
    assert defaults
    assert [(number.name, value) for number, value in defaults if not number.low <= value <= number.high] == []


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("sample_maen", " Did you mean sample_mean?"),
        ("Sample-Mean", " Did you mean sample_mean?"),
        ("dapo", " Did you mean prompt_mean or token_mean?"),
        ("dapoo", " Did you mean prompt_mean or token_mean?"),
        ("xyz", ""),
    ],
)
def test_a_close_name_or_another_frameworks_word_is_hinted_at(word, hint):
    names, elsewhere = ["sample_mean", "token_mean"], {"dapo": "prompt_mean or token_mean"}
    assert did_you_mean(word, names, elsewhere) == hint
