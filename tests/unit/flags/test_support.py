"""The flags of what could be sampled: each rule broken alone, and its near misses. `-k E40` finds one rule."""

import pytest
from namespaces import accepts, arguments, breaks, row

from megatron_pg.args import validate_args
from megatron_pg.flags.banner import banner

KEPT = {"pg_entropy_support": "kept"}
# Each breaks exactly one rule.
BROKEN = [
    row("E25", "missing", {"pg_support_missing": "drop"}, "--pg-support-missing 'drop' is not one of error, mask"),
    row("E25", "no word", {"pg_support_missing": None}, "--pg-support-missing None is not one of error, mask"),
    row("E25", "entropy", {"pg_entropy_support": "S"}, "--pg-entropy-support 'S' is not one of full, kept"),
    row(
        "E40", "no entropy", KEPT, "--pg-entropy-support kept has no effect without an entropy", "remove it or give one"
    ),
    row("E40", "other loss term", KEPT | {"pg_term": ["sft:ce"]}, "--pg-entropy-support kept has no effect"),
    row("E40", "weight 0", KEPT | {"pg_term": ["h:entropy,on=rl,weight=0"]}, "--pg-entropy-support kept has no effect"),
]
ACCEPTED = [
    {"pg_support_missing": "mask"},
    KEPT | {"pg_entropy_coef": 0.01},
    KEPT | {"pg_metrics": "with_entropy"},
    KEPT | {"pg_term": ["h:entropy,on=rl"]},
]


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_a_near_miss_is_accepted(overrides):
    accepts(arguments(**overrides))


def test_the_banner_says_what_is_not_the_default():
    plain = banner(validate_args(arguments()))
    assert "support" not in plain
    text = banner(validate_args(arguments(**KEPT, pg_metrics="with_entropy", pg_support_missing="mask")))
    assert "over what could be sampled, where samples say it  (--pg-entropy-support kept)" in text
    assert "trained tokens that it does not hold are masked  (--pg-support-missing mask)" in text
