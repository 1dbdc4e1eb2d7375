"""The flags, the decision table that checks them, the user's reducer path, and the banner.

The rule ids are those of the decision table in `megatron_pg/args.py`; E16 and E23 need torch and are tested elsewhere.
"""

import argparse
import copy
import enum
import hashlib
import math
import re
import subprocess
import sys
import warnings
from decimal import Decimal
from importlib import import_module, metadata
from pathlib import Path

import pytest

import megatron_pg
from megatron_pg.args import (
    ArgumentError,
    ArgumentNotice,
    ArgumentWarning,
    add_arguments,
    validate_args,
)
from megatron_pg.flags.banner import banner
from megatron_pg.flags.import_path import ImportPathError, load_function, source_of, split_import_path
from megatron_pg.flags.megatron import RULE_ARGUMENTS

# What a dense bf16 run on two data-parallel ranks has after Megatron's own validation.
MEGATRON_DEFAULTS = {
    "calculate_per_token_loss": False,
    "context_parallel_size": 1,
    "cross_entropy_loss_fusion": False,
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_scope": [],
    "data_parallel_size": 2,
    "dataloader_type": "external",
    "ddp_average_in_collective": False,
    "defer_embedding_wgrad_compute": False,
    "decrease_batch_size_if_needed": False,
    "fp16": False,
    "fp8_output_proj": False,
    "global_batch_size": 64,
    "gtp_weight_remat_size": 1,
    "hybrid_context_parallel": False,
    "iterations_to_skip": [],
    "loss_scale": None,
    "lr": 1e-6,
    "moe_aux_loss_coeff": 0.0,
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    "num_experts": None,
    "output_logit_dtype": None,
    "overlap_moe_expert_parallel_comm": False,
    "padded_vocab_size": 151936,
    "params_dtype": "torch.bfloat16",  # Megatron has the dtype itself; this module needs no torch
    "perform_rl_step": False,
    "pipeline_model_parallel_size": 1,
    "rampup_batch_size": None,
    "sft": False,
    "tensor_model_parallel_size": 1,
    "train_samples": None,
    "use_megatron_fsdp": False,
    "use_mup": False,
    "use_torch_fsdp2": False,
}

REDUCER = "user_reducers:turn_mean"
USER_FILES = {
    "user_reducers.py": """\
def turn_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    return sum
""",
    "user_package/__init__.py": "",
    "user_package/turns.py": """\
import functools


def turn_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    return sum


def other_names(a, b, c, d):
    return sum


def anything(*args, **kwargs):
    return sum


def one_more_with_default(total_lengths, response_lengths, loss_masks, flag=False, temperature=1.0):
    return sum


def three(total_lengths, response_lengths, loss_masks):
    return sum


def five(a, b, c, d, e):
    return sum


def needs_keyword(a, b, c, d, *, scale):
    return sum


async def coroutine(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    return sum


def generator(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    yield sum


async def async_generator(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    yield sum


class Reducer:
    def __init__(self, a=0, b=0, c=0, d=0):
        pass

    def __call__(self, total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return sum


def two(tokens, parameters):
    return -tokens.advantages * tokens.logprobs


short = lambda total_lengths, response_lengths, loss_masks, flag: sum
instance = Reducer()
partial = functools.partial(one_more_with_default, temperature=0.5)
LIMIT = 3
""",
    "user_raises.py": "1 / 0\n",
    "user_imports.py": "import no_such_dependency\n",
    "user_syntax.py": "def f(:\n",
    "user_exits.py": "raise SystemExit('usage: user_exits.py --data FILE')\n",
    "user_side_effect.py": "raise RuntimeError('imported')\n",
    "user_lazy.py": "def __getattr__(name):\n    raise ImportError('turn_mean needs no_such_dependency')\n",
}


class CudaGraphScope(enum.Enum):
    """Stands for Megatron's enumeration of the same name, whose members the parsed arguments hold."""

    full_iteration = 1
    attn = 2
    full_iteration_inference = 8


def arguments(**overrides: object) -> argparse.Namespace:
    """megatron_pg's defaults and Megatron's attributes, with some of them replaced."""
    args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args([])
    for name, value in MEGATRON_DEFAULTS.items():
        setattr(args, name, copy.copy(value))
    if unknown := overrides.keys() - vars(args).keys():
        raise TypeError(f"no such arguments: {unknown}")
    vars(args).update(overrides)
    return args


def parse(*words: str) -> argparse.Namespace:
    """What a launch script's command line gives, without Megatron's attributes."""
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


def refused(args: argparse.Namespace) -> list[tuple[str, str]]:
    """The violations for which `args` are refused."""
    with pytest.raises(ArgumentError) as caught:
        validate_args(args)
    return caught.value.violations


def said(args: argparse.Namespace) -> list[tuple[type[Warning], str]]:
    """Category and text of what `validate_args` says while it accepts `args`."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert validate_args(args) is args
    return [(warning.category, str(warning.message)) for warning in caught]


@pytest.fixture(autouse=True)
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)


@pytest.fixture
def user_code(tmp_path, monkeypatch):
    """The modules of `USER_FILES`, importable during the test and forgotten after it."""
    for name, text in USER_FILES.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    ours = {name.partition("/")[0].removesuffix(".py") for name in USER_FILES}
    for name in [name for name in sys.modules if name.partition(".")[0] in ours]:
        del sys.modules[name]


def constant(divisor: object) -> dict[str, object]:
    return {"loss_aggregation": "constant", "loss_aggregation_divisor": divisor}


def mode(name: object, **more: object) -> dict[str, object]:
    return {"loss_aggregation": name, **more}


def path(name: object, **more: object) -> dict[str, object]:
    return {"custom_pg_loss_reducer_function_path": name, **more}


def pg(objective: object, **more: object) -> dict[str, object]:
    return {"pg_objective": objective, **{f"pg_{name}": value for name, value in more.items()}}


def correction(name: object, *, low: object = None, high: object = None, **more: object) -> dict[str, object]:
    bounds = {"pg_correction_low": low, "pg_correction_high": high}
    return {"pg_correction": name, **bounds, **{f"pg_{key}": value for key, value in more.items()}}


def head(**more: object) -> dict[str, object]:
    return {"pg_fused_head": "forward", **more}


def docs(number: object, **more: object) -> dict[str, object]:
    return {"docs_per_step": number, **more}


def row(rule: str, case: str, overrides: dict[str, object], *fragments: str):
    return pytest.param(overrides, rule, fragments, id=f"{rule} {case}")


MODES = "sample_mean, prompt_mean, token_mean, constant"
PATH_FLAG = "--custom-pg-loss-reducer-function-path"
DIVISOR_FLAG = "--loss-aggregation-divisor"
PATH_FORM = "must be package.module.function (or package.module:function), got "
REDUCER_FORM = "(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False)"
PER_TOKEN = "calculate_per_token_loss"

# Each breaks exactly one rule.
BROKEN = [
    row("E2", "null in YAML", mode(None), "--loss-aggregation must be a string, got None"),
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
    row(
        "E11", "prompt_mean", mode("prompt_mean", calculate_per_token_loss=True), "contradicts prompt_mean; remove one"
    ),
    row("E11", "reducer", path(REDUCER, **mode("constant", calculate_per_token_loss=True)), "contradicts constant"),
    row(
        "E12",
        "with the flag that Megatron asks for",
        {"hybrid_context_parallel": True, PER_TOKEN: True},
        "--hybrid-context-parallel takes samples from Megatron's own data loader (--dataloader-type single)",
    ),
    row("E12", "another loader", {"hybrid_context_parallel": True}, "packed micro-batches cannot reach it; remove it"),
    row("E12", "documents", docs(8, hybrid_context_parallel=True), "remove it (--context-parallel-size alone works)"),
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
    row(
        "E18",
        "token_mean",
        mode("token_mean", ddp_average_in_collective=True),
        "--ddp-average-in-collective divides by ranks and cannot be combined with token_mean",
    ),
    row("E18", "flag", {PER_TOKEN: True, "ddp_average_in_collective": True}, "--ddp-average-in-collective"),
    row(
        "E19",
        "Megatron-FSDP",
        {"use_megatron_fsdp": True},
        "gradient scaling under --use-megatron-fsdp is not verified for --loss-aggregation",
    ),
    row(
        "E19",
        "torch FSDP2",
        {"use_torch_fsdp2": True},
        "gradient scaling under --use-torch-fsdp2 is not verified for --loss-aggregation",
    ),
    row(
        "E20",
        "implementation",
        {"cuda_graph_impl": "full_iteration"},
        "--cuda-graph-impl full_iteration freezes the step's normaliser",
    ),
    row("E20", "scope", {"cuda_graph_scope": ["attn", "full_iteration"]}, "full_iteration freezes"),
    row("E20", "scope member", {"cuda_graph_scope": [CudaGraphScope.full_iteration]}, "full_iteration freezes"),
    row("E20", "scope alone", {"cuda_graph_scope": "full_iteration"}, "full_iteration freezes"),
    row("E20", "scope with comma", {"cuda_graph_scope": "attn,full_iteration"}, "full_iteration freezes"),
    row("E20", "modules", {"cuda_graph_modules": ("full_iteration",)}, "full_iteration freezes"),
    row(
        "E21",
        "token_mean",
        mode("token_mean", mtp_num_layers=1),
        "--mtp-num-layers cannot be combined with token_mean: the MTP loss would be divided by a count that is not its own",
    ),
    row("E21", "flag", {PER_TOKEN: True, "mtp_num_layers": 2}, "--mtp-num-layers cannot be combined with token_mean"),
    row("E24", "low string", {"pg_clip_eps_low": "0.2"}, "--pg-clip-eps-low must be a number, got '0.2'"),
    row("E24", "coefficient null", {"pg_kl_coef": None, "pg_kl_estimator": "k3"}, "--pg-kl-coef must be a number"),
    row("E24", "entropy below", {"pg_entropy_coef": -0.1}, "--pg-entropy-coef must be finite and >= 0, got -0.1"),
    row("E24", "divisor zero", {"pg_grad_divisor": 0.0}, "--pg-grad-divisor must be finite and > 0, got 0.0"),
    row("E24", "divisor infinite", {"pg_grad_divisor": math.inf}, "--pg-grad-divisor must be finite and > 0, got inf"),
    row("E24", "dual clip 1", pg("dual_clip", dual_clip=1.0), "--pg-dual-clip must be finite and > 1, got 1.0"),
    row("E24", "cap 0.28", pg("cispo", cispo_cap=0.28), "--pg-cispo-cap must be finite and >= 1 (an absolute cap"),
    row("E24", "tau zero", pg("sapo", sapo_tau_neg=0.0), "--pg-sapo-tau-neg must be finite and > 0, got 0.0"),
    row(
        "E24",
        "trust region below",
        pg("dppo_tv", dppo_delta_low=-0.1, dppo_delta_high=0.1),
        "--pg-dppo-delta-low must be finite and > 0, got -0.1",
    ),
    row("E24", "bound string", correction("tis", high="2"), "--pg-correction-high must be a number, got '2'"),
    row("E24", "low negative", {"pg_clip_eps_low": -0.1}, "--pg-clip-eps-low must be between 0 and 1", "got -0.1"),
    row("E24", "low above one", {"pg_clip_eps_low": 1.01}, "--pg-clip-eps-low must be between 0 and 1", "got 1.01"),
    row("E24", "low NaN", {"pg_clip_eps_low": math.nan}, "--pg-clip-eps-low must be between 0 and 1", "got nan"),
    row("E24", "high true", {"pg_clip_eps_high": True}, "--pg-clip-eps-high must be a number, got True"),
    row("E24", "high negative", {"pg_clip_eps_high": -1}, "--pg-clip-eps-high must be finite and >= 0, got -1"),
    row("E24", "high infinite", {"pg_clip_eps_high": math.inf}, "--pg-clip-eps-high must be finite and >= 0, got inf"),
    row("E24", "huge integer", {"pg_clip_eps_high": 10**400}, "--pg-clip-eps-high must be finite and >= 0, got 1000"),
    row("E24", "temperature zero", {"pg_temperature": 0.0}, "--pg-temperature must be finite and > 0, got 0.0"),
    row("E24", "temperature below", {"pg_temperature": -1.0}, "--pg-temperature must be finite and > 0, got -1.0"),
    row("E24", "temperature tiny", {"pg_temperature": 1e-39}, "--pg-temperature must be finite and > 0, got 1e-39"),
    row("E24", "temperature NaN", {"pg_temperature": math.nan}, "--pg-temperature must be finite and > 0, got nan"),
    row("E24", "temperature string", {"pg_temperature": "1.0"}, "--pg-temperature must be a number, got '1.0'"),
    row("E25", "metrics", {"pg_metrics": "full"}, "--pg-metrics 'full' is not one of none, basic, with_entropy"),
    row("E25", "metrics null", {"pg_metrics": None}, "--pg-metrics None is not one of none, basic, with_entropy"),
    row("E25", "metrics false", {"pg_metrics": False}, "--pg-metrics False is not one of none, basic, with_entropy"),
    row("E25", "objective", pg("dapo"), "--pg-objective 'dapo' is not one of grpo, dual_clip, two_sided, gspo"),
    row("E25", "objective null", pg(None), "--pg-objective None is not one of"),
    row("E25", "correction", correction("trunc"), "--pg-correction 'trunc' is not one of none, tis, seq_tis"),
    row("E25", "correction list", correction(["tis"]), "--pg-correction ['tis'] is not one of none"),
    row(
        "E25",
        "denominator",
        {"pg_denominator": "alive"},
        "--pg-denominator 'alive' is not one of scheduled, live, kept",
    ),
    row(
        "E25", "auxiliary", {"pg_aux_aggregation": "mean"}, "--pg-aux-aggregation 'mean' is not one of default, policy"
    ),
    row(
        "E25",
        "unweighable estimator",
        {"pg_kl_coef": 0.1, "pg_kl_estimator": "k2_weighted"},
        "--pg-kl-estimator 'k2_weighted' is not one of k1, k2, k3, abs, k1_weighted, k3_weighted",
    ),
    row("E25", "kernel", {"pg_kernel": "cuda"}, "--pg-kernel 'cuda' is not one of triton, torch"),
    row("E25", "kernel list", {"pg_kernel": ["torch"]}, "--pg-kernel ['torch'] is not one of triton, torch"),
    row(
        "E40",
        "number of another objective",
        {"pg_dual_clip": 3.0},
        "--pg-dual-clip has no effect with --pg-objective grpo; remove it",
    ),
    row("E40", "eps of cispo", pg("cispo", cispo_cap=2.0, clip_eps_high=0.28), "--pg-clip-eps-high has no effect with"),
    row("E40", "eps of reinforce", pg("reinforce", clip_eps_low=0.2), "--pg-clip-eps-low has no effect with"),
    row(
        "E40",
        "bound of none",
        {"pg_correction_high": 2.0},
        "--pg-correction-high has no effect with --pg-correction none",
    ),
    row(
        "E40", "lower bound of k3", correction("token_k3", high=1.0, low=0.0), "--pg-correction-low has no effect with"
    ),
    row("E40", "estimator alone", {"pg_kl_estimator": "k3"}, "--pg-kl-estimator has no effect without --pg-kl-coef"),
    row(
        "E40", "auxiliary alone", {"pg_aux_aggregation": "policy"}, "--pg-aux-aggregation policy has no effect without"
    ),
    row("E41", "dual clip", pg("dual_clip"), "--pg-objective dual_clip needs --pg-dual-clip; there is no default"),
    row("E41", "delta", pg("two_sided"), "--pg-objective two_sided needs --pg-delta; there is no default"),
    row("E41", "cap", pg("cispo"), "--pg-objective cispo needs --pg-cispo-cap; there is no default"),
    row("E41", "trust region", pg("dppo_kl", dppo_delta_low=0.1), "dppo_kl needs --pg-dppo-delta-high"),
    row("E41", "threshold", correction("opsm"), "--pg-correction opsm needs --pg-correction-high; there is no default"),
    row("E41", "estimator", {"pg_kl_coef": 0.1}, "--pg-kl-coef needs --pg-kl-estimator; there is no default"),
    row("E42", "delta inside", pg("two_sided", delta=1.2), "--pg-delta 1.2 must be > 1 + --pg-clip-eps-high = 1.2"),
    row("E42", "bounds turned round", correction("icepop", low=3, high=2), "--pg-correction-low 3 is not below"),
    row("E42", "default low", correction("seq_mask_tis", high=0.9), "--pg-correction-low 0.999 is not below"),
    row("E42", "ratio below 0", correction("tis", low=-1.0), "--pg-correction-low -1 bounds a ratio"),
    row("E42", "nothing left", correction("tis", low=-2.0 + 2, high=0.0), "is not below --pg-correction-high 0"),
    row(
        "E43", "kept, nothing rejects", {"pg_denominator": "kept"}, "with --pg-correction none, which rejects no token"
    ),
    row(
        "E43", "kept, truncation", correction("tis", denominator="kept"), "--pg-correction tis, which rejects no token"
    ),
    row("E43", "kept, opsm", correction("opsm", high=0.1, denominator="kept"), "known only after the forward"),
    row("E43", "live, token_mean", mode("token_mean", pg_denominator="live"), "has no effect with token_mean"),
    row("E43", "live, reducer", path(REDUCER, pg_denominator="live"), "the reducer owns its denominator"),
    row(
        "E44",
        "two objectives",
        pg("reinforce", custom_objective_path="user_package.turns:two"),
        "--pg-custom-objective-path replaces --pg-objective, which is reinforce; remove one of the two",
    ),
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
    row(
        "E27",
        "overlap",
        {"overlap_moe_expert_parallel_comm": True},
        "--overlap-moe-expert-parallel-comm builds its own schedule plan",
    ),
    row(
        "E28",
        "two shards",
        {"gtp_weight_remat_size": 2},
        "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation",
    ),
    row("E29", "single", {"dataloader_type": "single"}, "--dataloader-type single", "use --dataloader-type external"),
    row("E29", "cyclic", {"dataloader_type": "cyclic"}, "--dataloader-type cyclic"),
    row("E29", "null", {"dataloader_type": None}, "--dataloader-type None"),
    row("E30", "rl", {"perform_rl_step": True}, "--perform-rl-step reads its own kind of batches"),
    row("E30", "sft", {"sft": True}, "--sft reads its own kind of batches"),
    row("E30", "skip", {"iterations_to_skip": [3]}, "--iterations-to-skip reads its own kind of batches"),
    row("E50", "float32", {"fp32_lm_head": "yes"}, "--fp32-lm-head must be true or false, got 'yes'"),
    row("E50", "fused", {"pg_fused_head": "both"}, "--pg-fused-head 'both' is not one of forward, recompute"),
    row(
        "E50",
        "backward",
        head(fp32_lm_head_backward="exact"),
        "--fp32-lm-head-backward 'exact' is not one of bf16, split",
    ),
    row("E51", "no head", {"fp32_lm_head_backward": "split"}, "--fp32-lm-head-backward split has no effect without"),
    row("E52", "zero", {"pg_vocab_size": 0}, "--pg-vocab-size must be a whole number >= 1, got 0"),
    row("E52", "float", {"pg_vocab_size": 8.0}, "--pg-vocab-size must be a whole number >= 1, got 8.0"),
    row("E52", "bool", {"pg_vocab_size": True}, "--pg-vocab-size must be a whole number >= 1, got True"),
    row("E52", "more", {"pg_vocab_size": 151937}, "--pg-vocab-size 151937 is more than the 151936 columns"),
    row("E53", "deferred", head(defer_embedding_wgrad_compute=True), "--defer-embedding-wgrad-compute computes"),
    row(
        "E53",
        "dtype",
        {"fp32_lm_head": True, "output_logit_dtype": "fp32"},
        "--output-logit-dtype fp32 is Megatron's own",
    ),
    row("E53", "fp8", head(fp8_output_proj=True), "--fp8-output-proj makes the output layer one of Transformer Engine"),
    row("E53", "fp8, stored", {"fp32_lm_head": True, "fp8_output_proj": True}, "--fp8-output-proj makes the output"),
    row("E54", "mtp", head(mtp_num_layers=1), "--mtp-num-layers computes further losses from logits"),
    row("E54", "mup", head(use_mup=True), "--use-mup scales the logits"),
    row("E54", "fusion", head(cross_entropy_loss_fusion=True), "--cross-entropy-loss-fusion is a loss over logits"),
    row("E55", "fp16", head(fp16=True), "--fp16 brings a loss scale", "use --pg-fused-head recompute"),
    row("E55", "loss scale", head(loss_scale=128.0), "--loss-scale brings a loss scale"),
    row("E55", "gspo", head(**pg("gspo")), "--pg-objective gspo reads whole sequences"),
    row("E55", "opsm", head(**correction("opsm", high=0.1)), "--pg-correction opsm reads whole sequences"),
    row("E60", "negative", docs(-1), "--docs-per-step must be a whole number of documents, or 0 for off, got -1"),
    row("E60", "true in YAML", docs(True), "got True"),
    row("E60", "string", docs("256"), "got '256'"),
    row("E60", "float", docs(2.0), "got 2.0"),
    row("E60", "null", docs(None), "got None"),
    row(
        "E25",
        "policy",
        docs(8, docs_per_step_policy="at least"),
        "--docs-per-step-policy 'at least' is not one of exact, at_least",
    ),
    row("E25", "end", docs(8, docs_per_step_end=False), "--docs-per-step-end False is not one of partial, stop"),
    row(
        "E61",
        "policy",
        {"docs_per_step_policy": "exact"},
        "--docs-per-step-policy exact has no effect without --docs-per-step",
    ),
    row("E61", "end", {"docs_per_step_end": "stop"}, "--docs-per-step-end stop has no effect without --docs-per-step"),
    row(
        "E62",
        "ramp-up",
        docs(8, rampup_batch_size=[8, 8, 100]),
        "--rampup-batch-size sets the number of micro-batches by",
    ),
    row("E62", "decrease", docs(8, decrease_batch_size_if_needed=True), "--decrease-batch-size-if-needed changes"),
    row("E62", "samples", docs(8, train_samples=1000), "--train-samples is divided", "use --train-iters"),
    row("E62", "graphs", docs(8, cuda_graph_impl="local"), "--cuda-graph-impl captures a number of micro-batches"),
]

# Each is one step away from breaking the rule that it is named after.
NEAR_MISSES = [
    row("E60", "off", docs(0)),
    row("E60", "one", docs(1)),
    row("E61", "with a number", docs(256, docs_per_step_policy="at_least", docs_per_step_end="stop")),
    row("E61", "defaults", docs(0, docs_per_step_policy=None, docs_per_step_end=None)),
    row("E62", "off", docs(0, rampup_batch_size=[8, 8, 100], train_samples=1000, cuda_graph_impl="local")),
    row("E62", "iterations", docs(256, train_samples=None, rampup_batch_size=None, cuda_graph_impl="none")),
    row("E2", "string", mode("sample_mean")),
    row("E3", "prompt_mean", mode("prompt_mean")),
    row("E3", "token_mean", mode("token_mean")),
    row("E4", "true", {PER_TOKEN: True}),
    row("E4", "false", {PER_TOKEN: False}),
    row("E5", "constant with L", constant(4096)),
    row("E24", "divisor tiny", {"pg_grad_divisor": 1e-30}),
    row("E24", "no bound of their own", pg("grpo", clip_eps_low=None, clip_eps_high=None)),
    row("E40", "gspo", pg("gspo", clip_eps_low=3e-4, clip_eps_high=4e-4)),
    row("E40", "sapo", pg("sapo", sapo_tau_pos=1.0)),
    row("E40", "k1 has two bounds", correction("seq_mean_k1", low=-0.1, high=0.1)),
    row("E40", "entropy alone", {"pg_entropy_coef": 0.1, "pg_aux_aggregation": "policy"}),
    row("E41", "dual clip", pg("dual_clip", dual_clip=3.0)),
    row("E41", "cap of one", pg("cispo", cispo_cap=1.0)),
    row("E41", "trust region", pg("dppo_kl", dppo_delta_low=0.1, dppo_delta_high=0.1)),
    row("E41", "estimator", {"pg_kl_coef": 0.1, "pg_kl_estimator": "k3_weighted"}),
    row("E41", "truncation", correction("tis")),
    row("E42", "delta outside", pg("two_sided", delta=1.25)),
    row("E42", "bounds", correction("icepop", low=0.0, high=2)),
    row("E43", "kept", correction("icepop", denominator="kept")),
    row("E43", "live, opsm", correction("opsm", high=0.1, denominator="live")),
    row("E43", "live, constant", constant(4096) | {"pg_denominator": "live"}),
    row("E44", "custom objective", pg("grpo", custom_objective_path="user_package.turns:two", clip_eps_low=0.1)),
    row("E5", "constant with a reducer", path(REDUCER, **mode("constant"))),
    row("E6", "one", constant(1)),
    row("E7", "float", constant(4096.0)),
    row("E8", "smallest 1/L = 2**-126", constant(2**126)),
    row("E8", "1/L = 1.1765e-38", constant(8.5e37)),
    row("E8", "1/L = 3.333e38", constant(3e-39)),
    row("E9", "no L", mode("sample_mean", loss_aggregation_divisor=None)),
    row("E10", "reducer without L", path(REDUCER)),
    row("E11", "token_mean", mode("token_mean", calculate_per_token_loss=True)),
    row("E11", "sample_mean", mode("sample_mean", calculate_per_token_loss=True)),
    row("E11", "flag off", mode("prompt_mean", calculate_per_token_loss=False)),
    row("E12", "plain context parallelism", {"context_parallel_size": 4}),
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
    row("E18", "flag off", {"ddp_average_in_collective": True}),
    row("E18", "constant", {**constant(4096), "ddp_average_in_collective": True}),
    row("E19", "off", {"use_megatron_fsdp": False, "use_torch_fsdp2": False}),
    row("E20", "layers", {"cuda_graph_impl": "transformer_engine", "cuda_graph_scope": ["attn"]}),
    row("E20", "layer member", {"cuda_graph_impl": "local", "cuda_graph_scope": [CudaGraphScope.attn]}),
    row("E20", "inference", {"cuda_graph_scope": ["full_iteration_inference"]}),
    row("E20", "inference member", {"cuda_graph_scope": [CudaGraphScope.full_iteration_inference]}),
    row("E20", "whole layer", {"cuda_graph_scope": "full", "cuda_graph_modules": None}),
    row("E21", "flag off", {"mtp_num_layers": 1}),
    row("E21", "no layers", mode("token_mean", mtp_num_layers=0)),
    row("E24", "bounds", {"pg_clip_eps_low": 1, "pg_clip_eps_high": 0, "pg_temperature": 1}),
    row("E24", "clip-higher", {"pg_clip_eps_low": 0.0, "pg_clip_eps_high": 10.0, "pg_temperature": 1e-3}),
    row("E25", "no metrics", {"pg_metrics": "none"}),
    row("E25", "all metrics", {"pg_metrics": "with_entropy"}),
    row("E25", "triton", {"pg_kernel": "triton"}),
    row("E27", "off", {"overlap_moe_expert_parallel_comm": False}),
    row("E29", "external", {"dataloader_type": "external"}),
    row("E30", "nothing to skip", {"iterations_to_skip": []}),
    row("E50", "both heads", head(fp32_lm_head=True)),
    row("E50", "recompute", {"pg_fused_head": "recompute", "fp32_lm_head_backward": "split"}),
    row("E51", "float32 logits", {"fp32_lm_head": True, "fp32_lm_head_backward": "bf16"}),
    row("E52", "all columns", {"pg_vocab_size": 151936}),
    row("E52", "not known yet", {"pg_vocab_size": 151937, "padded_vocab_size": None}),
    row(
        "E53",
        "no head",
        {"defer_embedding_wgrad_compute": True, "output_logit_dtype": "fp32", "fp8_output_proj": True},
    ),
    row("E54", "float32 logits", {"fp32_lm_head": True, "use_mup": True, "cross_entropy_loss_fusion": True}),
    row("E55", "fp16", {"pg_fused_head": "recompute", "fp16": True}),
    row("E55", "gspo", {"pg_fused_head": "recompute", **pg("gspo")}),
    # whether it reads whole sequences is known once it was tried
    row("E55", "custom objective", head(**pg("grpo", custom_objective_path="user_package.turns:two"))),
    row("E30", "null", {"sft": None}),
    row("E28", "one shard", {"gtp_weight_remat_size": 1}),
    row("E28", "null", {"gtp_weight_remat_size": None}),
]


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
@pytest.mark.usefixtures("user_code")
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    args = arguments(**overrides)
    before = copy.deepcopy(vars(args))
    violations = refused(args)
    assert [found for found, _ in violations] == [rule]
    for fragment in fragments:
        assert fragment in violations[0][1]
    assert repr(vars(args)) == repr(before)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
@pytest.mark.usefixtures("user_code")
@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice", "ignore::megatron_pg.args.ArgumentWarning")
def test_a_near_miss_passes(overrides, rule, fragments):
    args = arguments(**overrides)
    assert validate_args(args) is args


ROOMS = Path(megatron_pg.__file__).parent
SOURCES = "".join(path.read_text(encoding="utf-8") for path in [ROOMS / "args.py", *(ROOMS / "flags").glob("*.py")])


def test_every_rule_has_a_broken_example_and_a_near_miss():
    rules = set(re.findall(r'"(E\d+)"', SOURCES)) - {"E1", "E22"}  # tests of their own
    assert {parameters.values[1] for parameters in BROKEN} == rules
    assert {parameters.values[1] for parameters in NEAR_MISSES} == rules


def test_the_helper_has_every_attribute_that_the_rules_read():
    assert set(RULE_ARGUMENTS) <= vars(arguments()).keys()


# What is said, by its id; the fragments are disjoint.
SAID = {
    "R1": "token_mean: --calculate-per-token-loss switched on",
    "R2": "--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean",
    "W1": "--custom-pg-loss-reducer-function-path takes precedence",
    "W2": "Σ reducer(ℓ)",
    "W4": "until finalize; the loss scale must absorb it",
    "W5": "this Megatron mis-scales MoE auxiliary losses",
    "W6": "MTP trains by cross-entropy on loss-masked tokens, outside --loss-aggregation",
    "W3": "is published with equal sequence weights",
    "W7": "--pg-kl-estimator",
    "W8": "clips the geometric mean",
    "W9": "ℓ is the objective",
    "W10": "has no effect here: without --bf16 and --fp16",
}


def ids(messages: list[tuple[type[Warning], str]]) -> list[str]:
    """The id of each message, checked against its category."""
    found = [(next(rule for rule, part in SAID.items() if part in text), category) for category, text in messages]
    assert all(category is (ArgumentNotice if rule[0] == "R" else ArgumentWarning) for rule, category in found)
    return [rule for rule, _ in found]


# Every combination of mode, per-token flag, divisor (16.0) and reducer: the rules that refuse it, or what it becomes.
COMBINATIONS = """
sample_mean  off  -  -        -> sample_mean  off
sample_mean  off  L  -        -> E9
sample_mean  off  -  reducer  -> sample_mean  off  W2
sample_mean  off  L  reducer  -> E10
sample_mean  on   -  -        -> token_mean   on   R2
sample_mean  on   L  -        -> E9
sample_mean  on   -  reducer  -> token_mean   on   R2 W2
sample_mean  on   L  reducer  -> E10
prompt_mean  off  -  -        -> prompt_mean  off
prompt_mean  off  L  -        -> E9
prompt_mean  off  -  reducer  -> prompt_mean  off  W1 W2
prompt_mean  off  L  reducer  -> E10
prompt_mean  on   -  -        -> E11
prompt_mean  on   L  -        -> E11 E9
prompt_mean  on   -  reducer  -> E11
prompt_mean  on   L  reducer  -> E10 E11
token_mean   off  -  -        -> token_mean   on   R1
token_mean   off  L  -        -> E9
token_mean   off  -  reducer  -> token_mean   on   R1 W1 W2
token_mean   off  L  reducer  -> E10
token_mean   on   -  -        -> token_mean   on
token_mean   on   L  -        -> E9
token_mean   on   -  reducer  -> token_mean   on   W1 W2
token_mean   on   L  reducer  -> E10
constant     off  -  -        -> E5
constant     off  L  -        -> constant     off
constant     off  -  reducer  -> constant     off  W1 W2
constant     off  L  reducer  -> E10
constant     on   -  -        -> E11 E5
constant     on   L  -        -> E11
constant     on   -  reducer  -> E11
constant     on   L  reducer  -> E10 E11
"""


@pytest.mark.parametrize("combination", COMBINATIONS.strip().splitlines())
@pytest.mark.usefixtures("user_code")
def test_every_combination_of_the_four_aggregation_arguments(combination):
    given, _, expected = (words.split() for words in combination.partition("->"))
    args = arguments(
        loss_aggregation=given[0],
        calculate_per_token_loss=given[1] == "on",
        loss_aggregation_divisor=16.0 if given[2] == "L" else None,
        custom_pg_loss_reducer_function_path=REDUCER if given[3] == "reducer" else None,
    )
    if expected[0].startswith("E"):
        assert sorted(rule for rule, _ in refused(args)) == sorted(expected)
        return
    messages = ids(said(args))
    assert [args.loss_aggregation, "on" if args.calculate_per_token_loss else "off", *messages] == expected


def test_two_independent_errors_arrive_in_one_exception():
    args = arguments(**mode("dr_grpo", pg_temperature=0.0))
    with pytest.raises(ValueError, match="megatron_pg found 2 problem") as caught:
        validate_args(args)
    assert caught.type is ArgumentError
    assert str(caught.value).splitlines() == [
        "megatron_pg found 2 problem(s) in the arguments:",
        "  [E3] --loss-aggregation 'dr_grpo' is not one of sample_mean, prompt_mean, token_mean, constant; "
        "did you mean constant?",
        "  [E24] --pg-temperature must be finite and > 0, got 0.0",
    ]


def test_every_violation_arrives_at_once():
    args = arguments(
        loss_aggregation="constant",
        calculate_per_token_loss="true",
        loss_aggregation_divisor="4096",
        custom_pg_loss_reducer_function_path="user_reducers.py:turn mean",
        pg_clip_eps_low=2.0,
        pg_clip_eps_high="0.28",
        pg_metrics="all",
        pg_kernel="triton",
        hybrid_context_parallel=True,
        use_megatron_fsdp=True,
        use_torch_fsdp2=True,
        cuda_graph_impl="full_iteration",
        overlap_moe_expert_parallel_comm=True,
        gtp_weight_remat_size=4,
    )
    expected = "E4 E7 E10 E12 E13 E24 E24 E25 E19 E19 E20 E27 E28"
    assert sorted(rule for rule, _ in refused(args)) == sorted(expected.split())


def test_a_yaml_file_that_replaced_the_namespace_is_told_what_to_set():
    args = argparse.Namespace(**MEGATRON_DEFAULTS)
    ((rule, message),) = refused(args)
    assert rule == "E1"
    assert (
        "megatron_pg arguments are missing (--yaml-cfg replaces the parsed namespace): set loss_aggregation" in message
    )
    assert message.endswith(" in the YAML file")
    assert vars(args) == MEGATRON_DEFAULTS


def test_a_yaml_file_that_lacks_one_argument_is_told_which():
    args = arguments()
    del args.pg_temperature
    assert refused(args) == [
        (
            "E1",
            "megatron_pg arguments are missing (--yaml-cfg replaces the parsed namespace): set pg_temperature in the YAML "
            "file",
        )
    ]
    args.pg_temperature = 1.0
    assert said(args) == []


def test_a_megatron_attribute_that_a_release_lacks_is_a_feature_that_is_off():
    args = parse("--loss-aggregation", "prompt_mean")
    assert said(args) == []
    assert args.loss_aggregation == "prompt_mean"


def test_token_mean_switches_the_flag_on_where_a_release_lacks_it():
    args = parse("--loss-aggregation", "token_mean")
    assert said(args) == [(ArgumentNotice, "token_mean: --calculate-per-token-loss switched on")]
    assert args.calculate_per_token_loss is True


def test_token_mean_switches_the_per_token_flag_on_with_a_notice():
    args = arguments(loss_aggregation="token_mean")
    with pytest.warns(ArgumentNotice) as caught:
        validate_args(args)
    assert [str(warning.message) for warning in caught] == ["token_mean: --calculate-per-token-loss switched on"]
    assert caught[0].filename == __file__  # it points at the caller
    assert args.calculate_per_token_loss is True
    assert args.loss_aggregation == "token_mean"


def test_the_per_token_flag_renames_sample_mean_with_a_notice():
    args = arguments(calculate_per_token_loss=True)
    with pytest.warns(ArgumentNotice) as caught:
        validate_args(args)
    assert [str(warning.message) for warning in caught] == [
        "--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean"
    ]
    assert args.calculate_per_token_loss is True
    assert args.loss_aggregation == "token_mean"


def test_the_flag_and_token_mean_agree_in_silence():
    args = arguments(loss_aggregation="token_mean", calculate_per_token_loss=True)
    before = dict(vars(args))
    assert said(args) == []
    assert {name: vars(args)[name] for name in before} == before


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ({}, []),
        (mode("token_mean"), ["R1"]),
        ({PER_TOKEN: True}, ["R2"]),
        (constant(16), []),
        (path(REDUCER, **mode("constant")), ["W1", "W2"]),
        ({"mtp_num_layers": 1}, ["W6"]),
    ],
)
@pytest.mark.usefixtures("user_code")
def test_a_second_validation_changes_and_says_nothing(overrides, first):
    args = arguments(**overrides)
    assert ids(said(args)) == first
    after_first = dict(vars(args))
    assert said(args) == []
    assert vars(args) == after_first


def test_the_mark_of_validation_is_a_string_that_a_checkpoint_can_hold():
    args = arguments(**constant(16.0))
    validate_args(args)
    assert type(args.megatron_pg_validated) is str
    assert said(argparse.Namespace(**vars(args))) == []


@pytest.mark.parametrize(
    ("overrides", "late", "message"),
    [
        (
            mode("token_mean", calculate_per_token_loss=True),
            mode("sample_mean"),
            "loss_aggregation was 'token_mean' when validated and is 'sample_mean' now",
        ),
        (
            mode("token_mean", calculate_per_token_loss=True),
            {PER_TOKEN: False},
            "calculate_per_token_loss was True when validated and is False now",
        ),
        ({}, {PER_TOKEN: True}, "calculate_per_token_loss was False when validated and is True now"),
        (constant(1024.0), constant(2048.0), "loss_aggregation_divisor was 1024.0 when validated and is 2048.0 now"),
        (constant(1024.0), constant("1024"), "loss_aggregation_divisor was 1024.0 when validated and is '1024' now"),
        ({}, {"loss_aggregation_divisor": 8}, "loss_aggregation_divisor was None when validated and is 8 now"),
        ({}, path(REDUCER), f"custom_pg_loss_reducer_function_path was None when validated and is {REDUCER!r} now"),
        ({}, {"pg_temperature": 0.6}, "pg_temperature was 1.0 when validated and is 0.6 now"),
        (
            {"pg_clip_eps_high": 0.2},
            {"pg_clip_eps_high": math.nan},
            "pg_clip_eps_high was 0.2 when validated and is nan now",
        ),
    ],
)
def test_a_value_that_changes_after_validation_is_refused(overrides, late, message):
    args = arguments(**overrides)
    assert said(args) == []
    vars(args).update(late)
    changed = dict(vars(args))
    assert refused(args) == [("E22", f"{message}; call validate_args after the last merge")]
    assert vars(args) == changed


def test_late_changes_are_all_reported_at_once():
    args = validate_args(arguments())
    args.loss_aggregation, args.pg_kernel = "constant", "triton"
    assert [rule for rule, _ in refused(args)] == ["E22", "E22"]


def test_a_late_change_of_something_else_is_no_business_of_ours():
    args = validate_args(arguments(**constant(1024.0)))
    args.lr, args.global_batch_size, args.loss_aggregation_divisor = 2e-6, 128, 1024
    assert said(args) == []


def test_an_argument_that_a_late_merge_removed_is_missing():
    args = validate_args(arguments())
    del args.loss_aggregation
    assert [rule for rule, _ in refused(args)] == ["E1"]


def warned(rule: str, case: str, overrides: dict[str, object], *texts: str):
    return pytest.param(overrides, list(texts), id=f"{rule} {case}")


FP16 = "--fp16: gradients hold a sum over all trained tokens of the step until finalize; the loss scale must absorb it"
MTP = "MTP trains by cross-entropy on loss-masked tokens, outside --loss-aggregation"
MOE = "this Megatron mis-scales MoE auxiliary losses by TP·CP (Megatron-LM#5047)"
FLOAT32 = "{} has no effect here: without --bf16 and --fp16 hidden states, weights, logits and their gradients are float32 anyway"
PRECEDENCE = "--custom-pg-loss-reducer-function-path takes precedence: --loss-aggregation {} does not shape pg_loss"
# The first 12 digits of the sha256 of user_reducers.py in USER_FILES.
SOURCE = "reducer user_reducers:turn_mean (user_reducers.py, sha256 450ccdd0cc80)"


@pytest.mark.parametrize(
    ("overrides", "texts"),
    [
        warned(
            "W1",
            "prompt_mean",
            path(REDUCER, **mode("prompt_mean")),
            PRECEDENCE.format("prompt_mean"),
            f"pg_loss = (1/N_r)·Σ reducer(ℓ), {SOURCE}",
        ),
        warned(
            "W1",
            "constant without L",
            path(REDUCER, **mode("constant")),
            PRECEDENCE.format("constant"),
            f"pg_loss = (1/N_r)·Σ reducer(ℓ), {SOURCE}",
        ),
        warned(
            "W1",
            "token_mean",
            path(REDUCER, **mode("token_mean", calculate_per_token_loss=True)),
            PRECEDENCE.format("token_mean"),
            f"pg_loss = (1/T)·Σ reducer(ℓ), {SOURCE}",
        ),
        warned("W2", "flag off", path(REDUCER), f"pg_loss = (1/N_r)·Σ reducer(ℓ), {SOURCE}"),
        warned("W4", "flag on", mode("token_mean", calculate_per_token_loss=True, fp16=True), FP16),
        warned("W6", "flag off", {"mtp_num_layers": 1}, MTP),
        warned("W6", "constant", {**constant(16), "mtp_num_layers": 2}, MTP),
        warned(
            "W10", "stored", {"fp32_lm_head": True, "params_dtype": "torch.float32"}, FLOAT32.format("--fp32-lm-head")
        ),
        warned(
            "W10",
            "both",
            head(fp32_lm_head=True, fp32_lm_head_backward="bf16", params_dtype="torch.float32"),
            FLOAT32.format("--fp32-lm-head"),
            FLOAT32.format("--fp32-lm-head-backward"),
        ),
        warned("W10", "chunks", head(params_dtype="torch.float32")),  # the logits are still not stored
        warned("W10", "bf16", {"fp32_lm_head": True, "fp32_lm_head_backward": "split"}),
        warned("W10", "not known", {"fp32_lm_head": True, "params_dtype": None}),
        warned("W1", "no reducer", mode("prompt_mean")),
        warned("W4", "flag off", {"fp16": True}),
        warned("W4", "bf16", mode("token_mean", calculate_per_token_loss=True)),
        warned("W6", "no layers", {"mtp_num_layers": 0}),
    ],
)
@pytest.mark.usefixtures("user_code")
def test_a_consequence_is_a_warning_and_its_absence_is_silence(overrides, texts):
    assert said(arguments(**overrides)) == [(ArgumentWarning, text) for text in texts]


@pytest.mark.usefixtures("user_code")
def test_the_mode_that_precedence_speaks_of_is_the_one_given():
    # Given sample_mean, so no precedence to speak of, although the flag makes it token_mean.
    args = arguments(**path(REDUCER, calculate_per_token_loss=True))
    assert said(args) == [
        (ArgumentNotice, "--calculate-per-token-loss: --loss-aggregation is token_mean, not sample_mean"),
        (ArgumentWarning, f"pg_loss = (1/T)·Σ reducer(ℓ), {SOURCE}"),
    ]


@pytest.mark.usefixtures("user_code")
def test_the_unit_of_a_reducer_is_the_one_after_reconciliation():
    # The flag was off, token_mean switches it on, so the reducer's sum is divided by T.
    assert said(arguments(**path(REDUCER, **mode("token_mean")))) == [
        (ArgumentNotice, "token_mean: --calculate-per-token-loss switched on"),
        (ArgumentWarning, PRECEDENCE.format("token_mean")),
        (ArgumentWarning, f"pg_loss = (1/T)·Σ reducer(ℓ), {SOURCE}"),
    ]


def test_fp16_warns_also_where_the_reconciliation_switches_the_flag_on():
    assert ids(said(arguments(loss_aggregation="token_mean", fp16=True))) == ["R1", "W4"]
    assert ids(said(arguments(calculate_per_token_loss=True, fp16=True))) == ["R2", "W4"]


MOE_RUN = {
    "loss_aggregation": "token_mean",
    PER_TOKEN: True,
    "num_experts": 8,
    "moe_aux_loss_coeff": 0.01,
    "tensor_model_parallel_size": 2,
}


@pytest.mark.parametrize(
    ("version", "change", "texts"),
    [
        ("0.16.1", {}, [MOE]),
        ("0.17.1", {}, [MOE]),
        ("0.18.0", {}, [MOE]),
        ("0.18.0rc2", {"tensor_model_parallel_size": 1, "context_parallel_size": 2}, [MOE]),
        ("0.18.0", {"moe_aux_loss_coeff": 0.0, "moe_z_loss_coeff": 1e-3}, [MOE]),
        ("0.18.0", {"moe_aux_loss_coeff": [0.0, 0.01]}, [MOE]),
        ("0.19.0", {}, []),
        ("0.20.0", {}, []),
        ("1.0.0", {}, []),
        ("0.18.0", {"tensor_model_parallel_size": 1}, []),
        ("0.18.0", {"moe_aux_loss_coeff": 0.0}, []),
        ("0.18.0", {"moe_aux_loss_coeff": 0, "moe_z_loss_coeff": 0.0}, []),
        ("0.18.0", {"moe_aux_loss_coeff": [0.0, 0.0]}, []),
        ("0.18.0", {"num_experts": None}, []),
        ("0.18.0", {"loss_aggregation": "prompt_mean", PER_TOKEN: False}, []),
    ],
)
def test_a_megatron_that_mis_scales_moe_losses_is_warned_of(version, change, texts, monkeypatch):
    monkeypatch.setattr(metadata, "version", {"megatron-core": version}.__getitem__)
    assert said(arguments(**{**MOE_RUN, **change})) == [(ArgumentWarning, text) for text in texts]


def test_a_megatron_without_a_version_counts_as_new(monkeypatch):
    def not_installed(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert said(arguments(**MOE_RUN)) == []


@pytest.mark.usefixtures("user_code")
def test_only_rank_zero_speaks_and_every_rank_reconciles(monkeypatch):
    overrides = path(REDUCER, **mode("token_mean", fp16=True))
    monkeypatch.setenv("RANK", "0")
    assert ids(said(arguments(**overrides))) == ["R1", "W1", "W2", "W4"]
    for rank in ("1", "10"):
        monkeypatch.setenv("RANK", rank)
        args = arguments(**overrides)
        assert said(args) == []
        assert args.calculate_per_token_loss is True


def test_every_rank_raises(monkeypatch):
    monkeypatch.setenv("RANK", "3")
    assert [rule for rule, _ in refused(arguments(loss_aggregation="constant"))] == ["E5"]


def test_add_arguments_returns_the_parser_that_it_was_given():
    parser = argparse.ArgumentParser(allow_abbrev=False)
    assert add_arguments(parser) is parser
    assert vars(parser.parse_args([])) == {
        "loss_aggregation": "sample_mean",
        "loss_aggregation_divisor": None,
        "custom_pg_loss_reducer_function_path": None,
        "pg_clip_eps_low": None,
        "pg_clip_eps_high": None,
        "pg_temperature": 1.0,
        "pg_objective": "grpo",
        "pg_custom_objective_path": None,
        "pg_dual_clip": None,
        "pg_delta": None,
        "pg_cispo_cap": None,
        "pg_sapo_tau_pos": None,
        "pg_sapo_tau_neg": None,
        "pg_dppo_delta_low": None,
        "pg_dppo_delta_high": None,
        "pg_correction": "none",
        "pg_correction_low": None,
        "pg_correction_high": None,
        "pg_denominator": "scheduled",
        "pg_kl_coef": 0.0,
        "pg_kl_estimator": None,
        "pg_entropy_coef": 0.0,
        "pg_aux_aggregation": "default",
        "pg_grad_divisor": 1.0,
        "pg_metrics": "basic",
        "pg_kernel": None,
        "fp32_lm_head": False,
        "fp32_lm_head_backward": None,
        "pg_fused_head": None,
        "pg_vocab_size": None,
        "docs_per_step": 0,
        "docs_per_step_policy": None,
        "docs_per_step_end": None,
    }


def test_the_flags_parse_as_documented():
    words = (
        "--loss-aggregation constant --loss-aggregation-divisor 4096 --custom-pg-loss-reducer-function-path my_rl.turns:f "
        "--pg-clip-eps-low 0.1 --pg-clip-eps-high 0.28 --pg-temperature 0.6 --pg-metrics with_entropy --pg-kernel triton "
        "--docs-per-step 256 --docs-per-step-policy at_least --docs-per-step-end stop"
    )
    assert vars(parse(*words.split())) == vars(parse()) | {
        "loss_aggregation": "constant",
        "loss_aggregation_divisor": 4096.0,
        "custom_pg_loss_reducer_function_path": "my_rl.turns:f",
        "pg_clip_eps_low": 0.1,
        "pg_clip_eps_high": 0.28,
        "pg_temperature": 0.6,
        "pg_metrics": "with_entropy",
        "pg_kernel": "triton",
        "docs_per_step": 256,
        "docs_per_step_policy": "at_least",
        "docs_per_step_end": "stop",
    }


@pytest.mark.parametrize("name", ["sample_mean", "prompt_mean", "token_mean", "constant"])
def test_each_mode_is_a_choice(name):
    assert parse("--loss-aggregation", name).loss_aggregation == name


@pytest.mark.parametrize("word", ["inf", "nan", "-1", "0", "1e39"])
def test_a_divisor_that_parses_as_a_number_is_still_checked(word):
    args = parse("--loss-aggregation", "constant", f"--loss-aggregation-divisor={word}")
    assert [rule for rule, _ in refused(args)] == ["E8"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--loss-aggregation dapo", "argument --loss-aggregation: invalid choice: 'dapo'"),
        ("--loss-aggregation-divisor long", "argument --loss-aggregation-divisor: invalid float value: 'long'"),
        ("--pg-metrics all", "argument --pg-metrics: invalid choice: 'all'"),
        ("--pg-kernel cuda", "argument --pg-kernel: invalid choice: 'cuda'"),
        ("--docs-per-step 2.5", "argument --docs-per-step: invalid int value: '2.5'"),
        ("--docs-per-step-policy about", "argument --docs-per-step-policy: invalid choice: 'about'"),
        ("--loss-agg token_mean", "unrecognized arguments: --loss-agg token_mean"),
    ],
)
def test_the_parser_refuses_what_it_can(words, complaint, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*words.split())
    assert complaint in capsys.readouterr().err


def test_the_help_names_every_flag():
    text = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).format_help()
    for flag in ("--loss-aggregation {sample_mean,prompt_mean,token_mean,constant}", DIVISOR_FLAG, PATH_FLAG):
        assert flag in text
    for flag in ("--pg-clip-eps-low", "--pg-clip-eps-high", "--pg-temperature", "--pg-metrics", "--pg-kernel"):
        assert flag in text
    for flag in ("--docs-per-step N", "--docs-per-step-policy {exact,at_least}", "--docs-per-step-end {partial,stop}"):
        assert flag in text


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
def test_a_refused_path_reaches_no_import():
    for text in ("user_side_effect:__call__", "user_side_effect:f()", "user_side_effect/f", "user_side_effect.f g"):
        with pytest.raises(ImportPathError, match="file paths are not accepted"):
            load_function(text, ("x",))


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


B_CONTRACT = "returns (K·D·Σwℓ, report); the schedule multiplies by C and divides by K, DDP divides by D·C"
A_CONTRACT = "returns (Q·Σwℓ, n, report); finalize divides by Q = Σn  (--calculate-per-token-loss)"


@pytest.mark.parametrize(
    ("overrides", "pg_loss", "weight", "contract"),
    [
        (
            mode("sample_mean"),
            "(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout  (--loss-aggregation sample_mean)",
            "1/δ, δ = N_r · M_rollout: rollouts of the step · trained tokens of the token's rollout",
            B_CONTRACT,
        ),
        (
            mode("prompt_mean"),
            "(1/P) Σ_prompts (Σ m·ℓ)/M_group  (--loss-aggregation prompt_mean)",
            "1/δ, δ = P · M_group: prompts of the step · trained tokens of the token's prompt group",
            B_CONTRACT,
        ),
        (
            mode("token_mean", calculate_per_token_loss=True),
            "(Σ m·ℓ)/T  (--loss-aggregation token_mean)",
            "1/δ, δ = T: trained tokens of the step",
            A_CONTRACT,
        ),
        (
            constant(4096.0),
            "(Σ m·ℓ)/(N_r·L)  (--loss-aggregation constant --loss-aggregation-divisor 4096)",
            "1/δ, δ = N_r · L: rollouts of the step · 4096",
            B_CONTRACT,
        ),
    ],
    ids=["sample_mean", "prompt_mean", "token_mean", "constant"],
)
def test_the_banner_names_formula_divisor_and_deciding_flag(overrides, pg_loss, weight, contract):
    text = banner(validate_args(arguments(**overrides)))
    assert rows_of(text)["pg_loss"] == pg_loss
    assert rows_of(text)["weight"] == weight
    assert rows_of(text)["Megatron"] == contract


@pytest.mark.parametrize(
    ("per_token", "pg_loss", "contract"),
    [
        (False, f"(1/N_r) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {REDUCER})", B_CONTRACT),
        (True, f"(1/T) Σ reducer(ℓ)  (--custom-pg-loss-reducer-function-path {REDUCER})", A_CONTRACT),
    ],
    ids=["flag off", "flag on"],
)
@pytest.mark.usefixtures("user_code")
@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice", "ignore::megatron_pg.args.ArgumentWarning")
def test_the_banner_of_a_custom_reducer_names_its_path_and_no_mode(per_token, pg_loss, contract):
    text = banner(validate_args(arguments(**path(REDUCER, calculate_per_token_loss=per_token))))
    assert rows_of(text)["pg_loss"] == pg_loss
    assert "weight" not in rows_of(text)
    assert "--loss-aggregation" not in text
    assert rows_of(text)["Megatron"] == contract


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentNotice")
def test_the_banner_speaks_of_the_reconciled_mode():
    args = validate_args(arguments(calculate_per_token_loss=True))
    assert rows_of(banner(args))["pg_loss"] == "(Σ m·ℓ)/T  (--loss-aggregation token_mean)"
    assert rows_of(banner(args))["Megatron"] == A_CONTRACT


@pytest.mark.parametrize(
    ("divisor", "shown"), [(1, "1"), (0.5, "0.5"), (131072.0, "131072"), (1048576.0, "1048576"), (1234567, "1234567")]
)
def test_the_banner_rounds_no_divisor(divisor, shown):
    text = banner(validate_args(arguments(**constant(divisor))))
    assert f"--loss-aggregation-divisor {shown})" in text
    assert rows_of(text)["weight"].endswith(f" · {shown}")


def test_the_banner_shows_the_remaining_settings_with_their_flags():
    args = validate_args(
        arguments(
            pg_clip_eps_low=0.1,
            pg_clip_eps_high=0.28,
            pg_temperature=0.6,
            pg_metrics="none",
            context_parallel_size=4,
            tensor_model_parallel_size=8,
        )
    )
    rows = rows_of(banner(args))
    assert rows["clip"] == "r in [0.9, 1.28]  (--pg-clip-eps-low/-high)"
    assert rows["temperature"] == "softmax(z / 0.6), in float32  (--pg-temperature)"
    assert rows["kernel"] == "triton on CUDA, torch elsewhere  (--pg-kernel)"
    assert rows["metrics"].startswith("none, ")
    assert rows["layout"] == "D=2 C=4 TP=8 PP=1"


@pytest.mark.parametrize(
    ("overrides", "row", "text"),
    [
        (
            pg("cispo", cispo_cap=5.0),
            "clip",
            "weight in [0, 5]  (--pg-clip-eps-low, --pg-cispo-cap, which is absolute)",
        ),
        (pg("gspo"), "clip", "R in [0.9997, 1.0004]  (--pg-clip-eps-low/-high)"),
        (pg("dual_clip", dual_clip=3.0), "dual clip", "c = 3  (--pg-dual-clip)"),
        (pg("two_sided", delta=4.0), "cap", "δ = 4  (--pg-delta)"),
        (pg("sapo"), "tau", "1 where A > 0, else 1.05  (--pg-sapo-tau-pos/-neg)"),
        (
            pg("dppo_tv", dppo_delta_low=0.1, dppo_delta_high=0.2),
            "trust region",
            "0.2 where A > 0, 0.1 where A < 0, probability  (--pg-dppo-delta-high/-low)",
        ),
        (
            correction("icepop", high=4.0),
            "correction",
            "ℓ times ρ where lo <= ρ <= hi, else 0, lo = 0.5, hi = 4  (--pg-correction icepop)",
        ),
        (
            correction("icepop", denominator="kept"),
            "denominator",
            "counts units and tokens that the correction does not reject  (--pg-denominator kept)",
        ),
        (
            correction("icepop", denominator="kept"),
            "weight",
            "1/δ, δ = N_r · M_rollout: rollouts of the step with a kept token · kept tokens of the token's rollout",
        ),
        (
            mode("prompt_mean", pg_denominator="live"),
            "weight",
            "1/δ, δ = P · M_group: prompts of the step with a trained token · trained tokens of the token's prompt group",
        ),
        (
            constant(64) | {"pg_denominator": "live"},
            "weight",
            "1/δ, δ = N_r · L: rollouts of the step with a trained token · 64",
        ),
        (
            mode("token_mean", calculate_per_token_loss=True) | correction("icepop", denominator="kept"),
            "weight",
            "1/δ, δ = T: kept tokens of the step",
        ),
        (
            {"pg_entropy_coef": 0.01, "pg_denominator": "live"},
            "u",
            "sample_mean over the step, over rollouts with a trained token  (--pg-aux-aggregation default)",
        ),
        (
            {"pg_entropy_coef": 0.01, "pg_aux_aggregation": "policy", **correction("icepop", denominator="kept")},
            "u",
            "sample_mean over the step, over what is trained, rejected or not  (--pg-aux-aggregation policy)",
        ),
        (
            {"fp32_lm_head": True, "fp32_lm_head_backward": "split"},
            "head",
            "float32 logits, stored whole, backward split  (--fp32-lm-head)",
        ),
        (
            head(params_dtype="torch.float32"),
            "head",
            "fused, logits never stored, backward float32  (--pg-fused-head forward)",
        ),
        (
            {"pg_kl_coef": 0.01, "pg_kl_estimator": "k3_weighted"},
            "KL",
            "+ 0.01 Σ u·KL(π‖π_ref) by k3_weighted  (--pg-kl-coef, --pg-kl-estimator)",
        ),
        ({"pg_entropy_coef": 0.01}, "u", "sample_mean over the step  (--pg-aux-aggregation default)"),
        (
            {"pg_entropy_coef": 0.01, "pg_aux_aggregation": "policy"},
            "u",
            "the weights of pg_loss  (--pg-aux-aggregation policy)",
        ),
        (
            {"pg_grad_divisor": 1024.0},
            "gradient",
            "divided by 1024, the loss is not; with Adam the same without it: --clip-grad and --adam-eps times 1024  "
            "(--pg-grad-divisor)",
        ),
    ],
)
def test_the_banner_says_which_terms_are_in_force(overrides, row, text):
    plain = rows_of(banner(validate_args(arguments())))
    rows = rows_of(banner(validate_args(arguments(**overrides))))
    assert rows[row] == text
    assert plain.get(row) != text


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (pg("gspo") | mode("token_mean", calculate_per_token_loss=True), "token_mean weighs"),
        (pg("gspo", clip_eps_high=0.2), "an eps of 0.2 hardly ever reaches (the paper: 3e-4 and 4e-4)"),
        ({"pg_kl_coef": 0.1, "pg_kl_estimator": "k1"}, "--pg-kl-estimator k1: its expected gradient is 0"),
        ({"pg_kl_coef": 0.1, "pg_kl_estimator": "k3"}, "--pg-kl-estimator k3: its gradient is that of KL(π_ref‖π)"),
    ],
)
def test_a_term_with_a_consequence_is_said(overrides, fragment):
    ((category, text),) = said(arguments(**overrides))
    assert category is ArgumentWarning
    assert fragment in text


@pytest.mark.parametrize("estimator", ["k2", "k1_weighted", "k3_weighted"])
def test_an_estimator_with_the_right_gradient_is_accepted_in_silence(estimator):
    assert said(arguments(pg_kl_coef=0.1, pg_kl_estimator=estimator)) == []


@pytest.mark.parametrize(
    ("overrides", "step"),
    [
        (docs(256), "256 documents, the last step may have fewer  (--docs-per-step, -policy exact, -end partial)"),
        (
            docs(9, docs_per_step_policy="at_least", docs_per_step_end="stop"),
            "at least 9 documents, too few for a last step are left  (--docs-per-step, -policy at_least, -end stop)",
        ),
    ],
)
def test_the_banner_says_what_a_step_is(overrides, step):
    assert rows_of(banner(validate_args(arguments(**overrides))))["step"] == step
    assert "step" not in rows_of(banner(validate_args(arguments())))


def test_the_banner_needs_no_megatron_attribute():
    rows = rows_of(banner(validate_args(parse("--loss-aggregation", "prompt_mean"))))
    assert rows["Megatron"] == B_CONTRACT
    assert rows["layout"] == "not known yet"


def rows_of(text: str) -> dict[str, str]:
    """The rows of a banner, by name."""
    title, *lines = text.splitlines()
    assert title == "── megatron_pg: effective policy-gradient objective ──"
    return dict(re.fullmatch(r"  (\S+(?: \S+)*) {2,}(\S.*)", line).groups() for line in lines)


def test_reading_flags_imports_neither_torch_nor_megatron():
    program = """
import argparse, sys
import megatron_pg
parser = megatron_pg.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args(["--loss-aggregation", "constant", "--loss-aggregation-divisor", "16"])
args.calculate_per_token_loss = False
assert megatron_pg.validate_args(args) is args
from megatron_pg.flags.banner import banner
assert "(Σ m·ℓ)/(N_r·L)" in banner(args)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron", "numpy", "triton"}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_a_late_change_of_a_megatron_argument_meets_the_rules_again():
    args = validate_args(arguments())
    args.use_megatron_fsdp = True
    assert [rule for rule, _ in refused(args)] == ["E19"]


def test_an_argument_error_survives_the_way_between_processes():
    import copy

    error = copy.copy(ArgumentError([("E1", "a"), ("E5", "b")]))
    assert error.violations == [("E1", "a"), ("E5", "b")]
    assert "[E5] b" in str(error)


def test_the_fused_head_has_a_mode_without_being_given_one():
    assert parse("--pg-fused-head").pg_fused_head == "forward"
    assert parse("--pg-fused-head", "recompute").pg_fused_head == "recompute"
