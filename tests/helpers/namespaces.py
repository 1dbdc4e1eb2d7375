"""Namespaces as Megatron and a launch script make them, a user's modules, and what validation says of both."""

import argparse
import copy
import enum
import sys
import warnings
from collections.abc import Mapping

import pytest

from megatron_pg.args import (
    ArgumentError,
    ArgumentNotice,
    ArgumentWarning,
    add_arguments,
    default_arguments,
    validate_args,
)

# What a dense bf16 run on two data-parallel ranks has after Megatron's own validation.
OFF = (
    "calculate_per_token_loss", "cross_entropy_loss_fusion", "ddp_average_in_collective",
    "defer_embedding_wgrad_compute", "decrease_batch_size_if_needed", "dynamic_context_parallel", "fp16",
    "fp8_output_proj", "hybrid_context_parallel", "multiple_validation_sets", "overlap_grad_reduce", "perform_rl_step",
    "sft", "use_megatron_fsdp", "use_mup", "use_torch_fsdp2",
)  # fmt: skip
ABSENT = (
    "expert_tensor_parallel_size", "loss_scale", "moe_expert_capacity_factor", "moe_z_loss_coeff", "mtp_num_layers",
    "num_experts", "output_logit_dtype", "rampup_batch_size", "recompute_granularity", "train_samples",
    "virtual_pipeline_model_parallel_size",
)  # fmt: skip
ONE = (
    "context_parallel_size", "expert_model_parallel_size", "gtp_weight_remat_size",
    "num_distributed_optimizer_instances", "pipeline_model_parallel_size", "tensor_model_parallel_size",
)  # fmt: skip
MEGATRON_DEFAULTS = dict.fromkeys(OFF, False) | dict.fromkeys(ABSENT) | dict.fromkeys(ONE, 1)
MEGATRON_DEFAULTS |= {
    "cuda_graph_impl": "none",
    "cuda_graph_modules": [],
    "cuda_graph_scope": [],
    "data_parallel_sharding_strategy": "optim_grads_params",
    "data_parallel_size": 2,
    "dataloader_type": "external",
    "eval_interval": 1000,
    "eval_iters": 100,
    "global_batch_size": 64,
    "hidden_size": 4096,
    "iterations_to_skip": [],
    "lr": 1e-6,
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "aux_loss",
    "mtp_loss_scaling_factor": 0.1,
    "padded_vocab_size": 151936,
    "params_dtype": "torch.bfloat16",  # Megatron has the dtype itself; this module needs no torch
    "seed": 1234,
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
    args = argparse.Namespace(**default_arguments())
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


@pytest.fixture(scope="session")
def user_folder(tmp_path_factory):
    """Of `USER_FILES`, which no test changes."""
    folder = tmp_path_factory.mktemp("user")
    for name, text in USER_FILES.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return folder


@pytest.fixture
def user_code(user_folder, monkeypatch):
    """The modules of `USER_FILES`, importable during the test and forgotten after it."""
    monkeypatch.syspath_prepend(user_folder)
    yield
    for name in [name for name in sys.modules if name.startswith("user_")]:
        del sys.modules[name]


def constant(divisor: object) -> dict[str, object]:
    return {"loss_aggregation": "constant", "loss_aggregation_divisor": divisor}


def mode(name: object, **more: object) -> dict[str, object]:
    return {"loss_aggregation": name, **more}


def path(name: object, **more: object) -> dict[str, object]:
    return {"custom_pg_loss_reducer_function_path": name, **more}


def with_options(name: str, **options: object) -> str:
    """The text of a flag with those options that are given."""
    return ",".join([name, *(f"{option}={value}" for option, value in options.items() if value is not None)])


def objective_arguments(name: str, numbers: Mapping[str, object]) -> dict[str, object]:
    """The arguments of an objective with its numbers."""
    clip = {f"pg_{number}": value for number, value in numbers.items() if number.startswith("clip_eps")}
    options = {number: value for number, value in numbers.items() if f"pg_{number}" not in clip}
    return {"pg_objective": with_options(name, **options), **clip}


def pg(objective: object, **more: object) -> dict[str, object]:
    return {"pg_objective": objective, **{f"pg_{name}": value for name, value in more.items()}}


def head(**more: object) -> dict[str, object]:
    return {"pg_fused_head": "forward", **more}


def ids(messages: list[tuple[type[Warning], str]]) -> list[str]:
    """The id of each message, checked against its category."""
    found = [(text[1:].partition("]")[0], category) for category, text in messages]
    assert all(category is (ArgumentNotice if rule[0] == "R" else ArgumentWarning) for rule, category in found)
    return [rule for rule, _ in found]


PER_TOKEN = "calculate_per_token_loss"


# A router whose losses the step has to scale, captured before it can, in a release before 0.19.
GRAPHS = {
    "loss_aggregation": "token_mean",
    PER_TOKEN: True,
    "num_experts": 8,
    "moe_aux_loss_coeff": 0.01,
    "tensor_model_parallel_size": 2,
    "cuda_graph_impl": "transformer_engine",
}


@pytest.fixture
def rank_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a launch, if the tests run in one."""
    monkeypatch.delenv("RANK", raising=False)


def breaks(args: argparse.Namespace, rule: str, *fragments: str) -> None:
    """Exactly this rule is named, with the fragments, and nothing is changed."""
    before = copy.deepcopy(vars(args))
    violations = refused(args)
    assert [found for found, _ in violations] == [rule]
    for fragment in fragments:
        assert fragment in violations[0][1]
    assert repr(vars(args)) == repr(before)


def accepts(args: argparse.Namespace) -> None:
    """No rule is broken; warnings are allowed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ArgumentNotice)
        warnings.simplefilter("ignore", ArgumentWarning)
        assert validate_args(args) is args
