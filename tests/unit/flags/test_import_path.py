"""Paths of a user's functions: what is refused before any import, and how a function is identified."""

import hashlib
import math
from importlib import import_module

import pytest
from namespaces import USER_FILES

from megatron_pg.flags.import_path import ImportPathError, load_function, source_of, split_import_path

pytestmark = pytest.mark.usefixtures("rank_zero")


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("module:function", ("module", "function")),
        ("module.function", ("module", "function")),
        ("package.module:function", ("package.module", "function")),
        ("package.module.function", ("package.module", "function")),
        ("_a._b2.c:_d", ("_a._b2.c", "_d")),
    ],
)
def test_a_path_is_split_before_its_function(text, parts):
    assert split_import_path(text) == parts


@pytest.mark.usefixtures("user_code")
def test_both_spellings_load_the_function_itself():
    four = ("total_lengths", "response_lengths", "loss_masks", "flag")
    function = load_function("user_package.turns:turn_mean", four)
    assert function is import_module("user_package.turns").turn_mean
    assert load_function("user_package.turns.turn_mean", four) is function


@pytest.mark.usefixtures("user_code")
def test_an_import_error_keeps_its_cause():
    with pytest.raises(ImportPathError, match="ZeroDivisionError") as caught:
        load_function("user_raises:f", ("x",))
    assert type(caught.value.__cause__) is ZeroDivisionError


@pytest.mark.parametrize("name", ["turn_mean", "short", "instance", "partial"])
@pytest.mark.usefixtures("user_code")
def test_a_reducer_is_identified_by_the_file_that_defines_it(name):
    # Ranks are compared by it, so it must not hold an address in memory.
    function = getattr(import_module("user_package.turns"), name)
    expected = hashlib.sha256(USER_FILES["user_package/turns.py"].encode()).hexdigest()
    assert source_of(function) == ("turns.py", expected)


def test_a_built_in_function_has_no_source_file():
    assert source_of(math.hypot)[0] == "no source file"
    assert source_of(math.hypot)[1] != source_of(math.prod)[1]
