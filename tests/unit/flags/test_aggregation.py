"""What --loss-aggregation, its divisor and a reducer path may be: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import math
from decimal import Decimal

import pytest
from namespaces import (
    DIVISOR_FLAG,
    MODES,
    PATH_FLAG,
    PATH_FORM,
    PER_TOKEN,
    REDUCER,
    REDUCER_FORM,
    accepts,
    arguments,
    breaks,
    constant,
    mode,
    path,
    pg,
    row,
)

# Each breaks exactly one rule.
BROKEN = [
    row("E2", "number", mode(1), "--loss-aggregation must be a string, got 1"),
    row("E2", "true in YAML", mode(True), "--loss-aggregation must be a string, got True"),
    row("E2", "list in YAML", mode(["token_mean"]), "--loss-aggregation must be a string, got ['token_mean']"),
    row("E3", "empty", mode(""), f"--loss-aggregation '' is not one of {MODES}"),
    row("E3", "upper case", mode("TOKEN_MEAN"), f"--loss-aggregation 'TOKEN_MEAN' is not one of {MODES}"),
    row(
        "E3", "dr_grpo", mode("dr_grpo"), f"--loss-aggregation 'dr_grpo' is not one of {MODES}; did you mean constant?"
    ),
    row("E3", "token-mean", mode("token-mean"), "'token-mean' is not one of", "; did you mean token_mean?"),
    row("E3", "dapo", mode("dapo"), "'dapo' is not one of", "; did you mean token_mean or prompt_mean?"),
    row("E3", "typo", mode("sample_maen"), "'sample_maen' is not one of", "; did you mean sample_mean?"),
    row("E3", "grpo", mode("GRPO"), "'GRPO' is not one of", "; did you mean sample_mean?"),
    row("E3", "verl's name", mode("seq-mean-token-sum-norm"), "'seq-mean-token-sum-norm'", "; did you mean constant?"),
    row("E4", "string", {PER_TOKEN: "false"}, "calculate_per_token_loss must be true or false, got 'false'"),
    row("E4", "null", {PER_TOKEN: None}, "calculate_per_token_loss must be true or false, got None"),
    row("E4", "one", {PER_TOKEN: 1}, "calculate_per_token_loss must be true or false, got 1"),
    row("E4", "zero", {PER_TOKEN: 0}, "calculate_per_token_loss must be true or false, got 0"),
    row(
        "E5",
        "constant without L",
        mode("constant"),
        "--loss-aggregation constant needs --loss-aggregation-divisor L > 0 (Dr. GRPO: the maximum context or response "
        "length, all turns together); there is no default",
    ),
    row("E6", "true in YAML", constant(True), f"{DIVISOR_FLAG} must be a number, got True"),
    row("E6", "false in YAML", constant(False), f"{DIVISOR_FLAG} must be a number, got False"),
    row("E7", "string", constant("4096"), f"{DIVISOR_FLAG} must be a number, got '4096'; write it without quotes"),
    row("E7", "list", constant([4096]), f"{DIVISOR_FLAG} must be a number, got [4096]"),
    row("E7", "other number", constant(Decimal(4)), f"{DIVISOR_FLAG} must be a number, got Decimal('4')"),
    row("E8", "NaN", constant(math.nan), f"{DIVISOR_FLAG} must be finite and > 0, got nan"),
    row("E8", "infinity", constant(math.inf), f"{DIVISOR_FLAG} must be finite and > 0, got inf"),
    row("E8", "minus infinity", constant(-math.inf), f"{DIVISOR_FLAG} must be finite and > 0, got -inf"),
    row("E8", "zero", constant(0), f"{DIVISOR_FLAG} must be finite and > 0, got 0"),
    row("E8", "zero as float", constant(0.0), f"{DIVISOR_FLAG} must be finite and > 0, got 0.0"),
    row("E8", "minus one", constant(-1), f"{DIVISOR_FLAG} must be finite and > 0, got -1"),
    # float32: smallest normal 2**-126 = 1.1755e-38, largest 3.4028e38.
    row("E8", "1/L subnormal", constant(1e39), f"{DIVISOR_FLAG} must be finite and > 0, got 1e+39"),
    row("E8", "1/L = 1e-38", constant(1e38), f"{DIVISOR_FLAG} must be finite and > 0, got 1e+38"),
    row("E8", "1/L = 2**-127", constant(2**127), f"{DIVISOR_FLAG} must be finite and > 0, got 1701411834604692"),
    row("E8", "1/L overflows", constant(1e-39), f"{DIVISOR_FLAG} must be finite and > 0, got 1e-39"),
    row("E8", "1/L = 3.448e38", constant(2.9e-39), f"{DIVISOR_FLAG} must be finite and > 0, got 2.9e-39"),
    row("E8", "integer beyond float64", constant(10**400), f"{DIVISOR_FLAG} must be finite and > 0, got 1000000"),
    row(
        "E9",
        "sample_mean",
        mode("sample_mean", loss_aggregation_divisor=4096),
        "--loss-aggregation-divisor has no effect with --loss-aggregation sample_mean; remove it or choose constant",
    ),
    row("E9", "prompt_mean", mode("prompt_mean", loss_aggregation_divisor=1.0), "--loss-aggregation prompt_mean"),
    row("E9", "token_mean", mode("token_mean", loss_aggregation_divisor=1.0), "--loss-aggregation token_mean"),
    row(
        "E10",
        "constant",
        path(REDUCER, **constant(4096)),
        "--loss-aggregation-divisor has no effect with --custom-pg-loss-reducer-function-path (the reducer owns its "
        "denominator); remove one",
    ),
    row("E10", "instead of E9", path(REDUCER, loss_aggregation_divisor=4096), DIVISOR_FLAG, PATH_FLAG),
    row(
        "E11",
        "constant",
        {**constant(4096), PER_TOKEN: True},
        "--calculate-per-token-loss is the older spelling of --loss-aggregation token_mean and contradicts constant; "
        "remove one",
    ),
    row("E11", "sample_mean, given", mode("sample_mean", calculate_per_token_loss=True), "contradicts sample_mean;"),
    row(
        "E11", "prompt_mean", mode("prompt_mean", calculate_per_token_loss=True), "contradicts prompt_mean; remove one"
    ),
    row("E11", "reducer", path(REDUCER, **mode("constant", calculate_per_token_loss=True)), "contradicts constant"),
    row("E13", "empty", path(""), f"{PATH_FLAG} {PATH_FORM}''; file paths are not accepted"),
    row("E13", "no string", path(5), f"{PATH_FLAG} {PATH_FORM}5;"),
    row("E13", "true in YAML", path(True), f"{PATH_FLAG} {PATH_FORM}True;"),
    row("E13", "list in YAML", path([REDUCER]), f"{PATH_FLAG} {PATH_FORM}['user_reducers:turn_mean'];"),
    row("E13", "function alone", path("turn_mean"), f"{PATH_FLAG} {PATH_FORM}'turn_mean';"),
    row("E13", "no module", path(":turn_mean"), f"{PATH_FLAG} {PATH_FORM}':turn_mean';"),
    row("E13", "no function", path("user_reducers:"), f"{PATH_FLAG} {PATH_FORM}'user_reducers:';"),
    row("E13", "two colons", path("user_package:turns:turn_mean"), f"{PATH_FORM}'user_package:turns:turn_mean';"),
    row("E13", "relative", path(".user_reducers:turn_mean"), f"{PATH_FORM}'.user_reducers:turn_mean';"),
    row("E13", "space", path(" user_reducers:turn_mean"), f"{PATH_FORM}' user_reducers:turn_mean';"),
    row("E13", "line end", path("user_reducers:turn_mean\n"), f"{PATH_FORM}'user_reducers:turn_mean\\n';"),
    row("E13", "digit", path("user_reducers:2turn_mean"), f"{PATH_FORM}'user_reducers:2turn_mean';"),
    row("E13", "folder", path("./user_reducers.py:turn_mean"), f"{PATH_FORM}'./user_reducers.py:turn_mean';"),
    row("E13", "file with function", path("user_reducers.py:turn_mean"), f"{PATH_FORM}'user_reducers.py:turn_mean';"),
    row("E13", "file alone", path("user_reducers.py"), f"{PATH_FORM}'user_reducers.py';"),
    row("E13", "url", path("https://example.org/r.py"), f"{PATH_FORM}'https://example.org/r.py';"),
    row("E13", "dunder function", path("user_reducers:__call__"), f"{PATH_FORM}'user_reducers:__call__';"),
    row("E13", "dunder module", path("__main__:turn_mean"), f"{PATH_FORM}'__main__:turn_mean';"),
    row("E13", "dunder inside", path("user_reducers.__dict__.f"), f"{PATH_FORM}'user_reducers.__dict__.f';"),
    row("E13", "lambda text", path("lambda t, r, m, f: sum"), f"{PATH_FORM}'lambda t, r, m, f: sum';"),
    row(
        "E14",
        "no module",
        path("user_nothing:turn_mean"),
        f"{PATH_FLAG} 'user_nothing:turn_mean' cannot be imported: ModuleNotFoundError: No module named 'user_nothing'",
    ),
    row("E14", "no submodule", path("user_package.nothing.f"), "'user_package.nothing.f' cannot be imported"),
    row("E14", "method", path("user_package.turns.Reducer.f"), "cannot be imported: ModuleNotFoundError"),
    row(
        "E14",
        "no attribute",
        path("user_reducers:turn_maen"),
        f"{PATH_FLAG} 'user_reducers:turn_maen' cannot be imported: user_reducers has no attribute 'turn_maen' "
        "(its functions: turn_mean)",
    ),
    row("E14", "no functions", path("user_package:turn_mean"), "no attribute 'turn_mean' (its functions: none)"),
    row(
        "E14",
        "raises",
        path("user_raises:f"),
        "'user_raises:f' cannot be imported: ZeroDivisionError: division by zero",
    ),
    row("E14", "dependency", path("user_imports.f"), "cannot be imported: ModuleNotFoundError", "no_such_dependency"),
    row("E14", "syntax error", path("user_syntax.f"), "'user_syntax.f' cannot be imported: SyntaxError"),
    row("E14", "exits", path("user_exits:f"), "'user_exits:f' cannot be imported", "usage: user_exits.py --data FILE"),
    row("E14", "lazy", path("user_lazy:turn_mean"), "'user_lazy:turn_mean' cannot be imported", "no_such_dependency"),
    row(
        "E15",
        "three parameters",
        path("user_package.turns:three"),
        f"{PATH_FLAG} 'user_package.turns:three' must be a function that accepts {REDUCER_FORM}, "
        "has (total_lengths, response_lengths, loss_masks)",
    ),
    row("E15", "five parameters", path("user_package.turns:five"), REDUCER_FORM, "has (a, b, c, d, e)"),
    row("E15", "keyword", path("user_package.turns:needs_keyword"), REDUCER_FORM, "has (a, b, c, d, *, scale)"),
    row("E15", "class", path("user_package.turns:Reducer"), "'user_package.turns:Reducer'", "is a type"),
    row("E15", "coroutine", path("user_package.turns.coroutine"), REDUCER_FORM, "is a coroutine or generator function"),
    row("E15", "generator", path("user_package.turns.generator"), REDUCER_FORM, "is a coroutine or generator function"),
    row("E15", "async generator", path("user_package.turns:async_generator"), REDUCER_FORM),
    row("E15", "number", path("user_package.turns:LIMIT"), "'user_package.turns:LIMIT'", REDUCER_FORM, "is a int"),
    row("E13", "objective", pg("grpo", custom_objective_path="a.py"), "--pg-custom-objective-path must be package"),
    row(
        "E14",
        "objective",
        pg("grpo", custom_objective_path="user_nothing:f"),
        "--pg-custom-objective-path 'user_nothing:f'",
    ),
    row(
        "E15",
        "objective",
        pg("grpo", custom_objective_path=REDUCER),
        "must be a function that accepts (tokens, parameters)",
    ),
]

NEAR_MISSES = [
    row("E2", "string", mode("sample_mean")),
    row("E3", "prompt_mean", mode("prompt_mean")),
    row("E3", "token_mean", mode("token_mean")),
    row("E4", "true", {PER_TOKEN: True}),
    row("E4", "false", {PER_TOKEN: False}),
    row("E5", "constant with L", constant(4096)),
    row("E5", "constant with a reducer", path(REDUCER, **mode("constant"))),
    row("E6", "one", constant(1)),
    row("E7", "float", constant(4096.0)),
    row("E8", "smallest 1/L = 2**-126", constant(2**126)),
    row("E8", "1/L = 1.1765e-38", constant(8.5e37)),
    row("E8", "1/L = 3.333e38", constant(3e-39)),
    row("E9", "no L", mode("sample_mean", loss_aggregation_divisor=None)),
    row("E10", "reducer without L", path(REDUCER)),
    row("E11", "token_mean", mode("token_mean", calculate_per_token_loss=True)),
    row("E11", "sample_mean by default", mode(None, calculate_per_token_loss=True)),
    row("E11", "flag off", mode("prompt_mean", calculate_per_token_loss=False)),
    row("E13", "none", path(None)),
    row("E13", "colon", path("user_package.turns:turn_mean")),
    row("E13", "dot", path("user_package.turns.turn_mean")),
    row("E13", "top-level module with dot", path("user_reducers.turn_mean")),
    row("E14", "imports", path(REDUCER)),
    row("E15", "other names", path("user_package.turns:other_names")),
    row("E15", "any arguments", path("user_package.turns:anything")),
    row("E15", "fifth has a default", path("user_package.turns:one_more_with_default")),
    row("E15", "lambda", path("user_package.turns:short")),
    row("E15", "callable object", path("user_package.turns:instance")),
    row("E15", "partial", path("user_package.turns:partial")),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
