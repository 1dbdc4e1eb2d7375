"""Rules for one value: a number in its range, or one of several words."""

import math
from collections.abc import Collection, Mapping
from types import MappingProxyType

from megatron_pg.declarations.declaration import one_of
from megatron_pg.flags.errors import Violations


def number(flag: str, value: object, low: float, high: float, requirement: str) -> Violations:
    """Rule E24: a finite number from `low` to `high`."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        yield f"E24 {flag} is {value!r}. It must be a number."
    elif not (is_finite(value) and low <= value <= high):
        yield f"E24 {flag} is {value}. It must be {requirement}."


def choice(
    flag: str,
    value: object,
    choices: Collection[str],
    rule: str = "E25",
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Violations:
    """Rule E25, or `rule`: one of several words; `elsewhere` maps the words of other frameworks to ours."""
    if not (isinstance(value, str) and value in choices):
        yield f"{rule} {flag} {value!r} is not one of {one_of(f'{value}', choices, elsewhere)}"


def is_finite(value: float) -> bool:
    """Whether `value` is finite as a float64; an integer in YAML may be too large for one."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def are_numbers(*values: object) -> bool:
    """Whether all of them are numbers that can be compared."""
    return all(isinstance(v, (int, float)) and not isinstance(v, bool) and v == v for v in values)
