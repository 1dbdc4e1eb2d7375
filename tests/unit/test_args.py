"""Validation as a whole: what arrives at once, what is said, what a second validation and a late change do; the
parser."""

import argparse
import copy
import math
import subprocess
import sys

import processes
import pytest
from namespaces import (
    MEGATRON_DEFAULTS,
    PER_TOKEN,
    REDUCER,
    arguments,
    constant,
    head,
    ids,
    mode,
    parse,
    path,
    pg,
    refused,
    said,
)

from megatron_pg.args import (
    ArgumentError,
    ArgumentNotice,
    ArgumentWarning,
    add_arguments,
    default_arguments,
    disagreement,
    rank_snapshot,
    validate_args,
)
from megatron_pg.flags.megatron import RULE_ARGUMENTS

pytestmark = pytest.mark.usefixtures("rank_zero")


def test_the_helper_has_every_attribute_that_the_rules_read():
    assert set(RULE_ARGUMENTS) <= vars(arguments()).keys()


def test_two_independent_errors_arrive_in_one_exception():
    args = arguments(**mode("dr_grpo", pg_temperature=0.0))
    with pytest.raises(ValueError, match="megatron_pg found 2 problem") as caught:
        validate_args(args)
    assert caught.type is ArgumentError
    assert str(caught.value).splitlines() == [
        "megatron_pg found 2 problem(s) in the arguments:",
        "  [E3] --loss-aggregation 'dr_grpo' is not one of sample_mean, prompt_mean, token_mean, constant, turn_mean. "
        "Did you mean constant?",
        "  [E24] --pg-temperature is 0.0. It must be finite and > 0 as a normal float32.",
    ]


def test_every_violation_arrives_at_once():
    ours = {"pg_clip_eps_low": 2.0, "pg_clip_eps_high": "0.28", "pg_metrics": "all", "pg_kernel": "triton"}
    ours |= {"calculate_per_token_loss": "true", **path("user_reducers.py:turn mean"), **constant("4096")}
    megatron = {"hybrid_context_parallel": True, "use_torch_fsdp2": True, "cuda_graph_impl": "full_iteration"}
    megatron |= {"use_megatron_fsdp": True, "data_parallel_sharding_strategy": "no_shard", "gtp_weight_remat_size": 4}
    args = arguments(**ours, **megatron)
    expected = "E4 E7 E10 E12 E13 E24 E24 E25 E19 E19 E20 E28"
    assert sorted(rule for rule, _ in refused(args)) == sorted(expected.split())


TOLD = " of megatron_pg: --yaml-cfg replaces the parsed namespace. Set what is missing in the YAML file."


def test_a_yaml_file_that_replaced_the_namespace_is_told_what_to_set():
    args = argparse.Namespace(**MEGATRON_DEFAULTS)
    ((rule, message),) = refused(args)
    missing = "the arguments lack loss_aggregation, "
    assert (rule, message[: len(missing)]) == ("E1", missing)
    assert message.endswith(TOLD)
    assert vars(args) == MEGATRON_DEFAULTS


def test_a_yaml_file_that_lacks_one_argument_is_told_which():
    args = arguments()
    del args.pg_temperature
    ((rule, message),) = refused(args)
    assert (rule, message) == ("E1", f"the arguments lack pg_temperature{TOLD}")


def test_token_mean_switches_the_flag_on_where_a_release_lacks_it():
    args = parse("--loss-aggregation", "token_mean")
    assert said(args) == [
        (ArgumentNotice, "[R1] --loss-aggregation token_mean switches --calculate-per-token-loss on.")
    ]
    assert args.calculate_per_token_loss is True


@pytest.mark.parametrize(
    ("overrides", "notice"),
    [
        (mode("token_mean"), "[R1] --loss-aggregation token_mean switches --calculate-per-token-loss on."),
        ({PER_TOKEN: True}, "[R2] --calculate-per-token-loss makes --loss-aggregation token_mean, not sample_mean."),
    ],
)
def test_a_flag_that_follows_from_another_is_set_with_a_notice(overrides, notice):
    args = arguments(**overrides)
    with pytest.warns(ArgumentNotice) as caught:
        validate_args(args)
    assert [str(warning.message) for warning in caught] == [notice]
    assert caught[0].filename == __file__  # it points at the caller
    assert (args.calculate_per_token_loss, args.loss_aggregation) == (True, "token_mean")


@pytest.mark.parametrize(
    ("overrides", "first"),
    [
        ({}, []),
        (mode("token_mean"), ["R1"]),
        ({PER_TOKEN: True}, ["R2"]),
        (constant(16), []),
        (path(REDUCER, **mode("constant")), ["W1", "W2"]),
        ({"mtp_num_layers": 1}, []),
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


TOKEN_MEAN = mode("token_mean", calculate_per_token_loss=True)
LATE = [  # arguments, what is changed after their validation, and how it was and is
    (TOKEN_MEAN, mode("sample_mean"), "loss_aggregation was 'token_mean'", "'sample_mean'"),
    (TOKEN_MEAN, {PER_TOKEN: False}, "calculate_per_token_loss was True", "False"),
    ({}, {PER_TOKEN: True}, "calculate_per_token_loss was False", "True"),
    (constant(1024.0), constant(2048.0), "loss_aggregation_divisor was 1024.0", "2048.0"),
    (constant(1024.0), constant("1024"), "loss_aggregation_divisor was 1024.0", "'1024'"),
    ({}, {"loss_aggregation_divisor": 8}, "loss_aggregation_divisor was None", "8"),
    ({}, path(REDUCER), "custom_pg_loss_reducer_function_path was None", repr(REDUCER)),
    ({}, {"pg_temperature": 0.6}, "pg_temperature was 1.0", "0.6"),
    ({"pg_clip_eps_high": 0.2}, {"pg_clip_eps_high": math.nan}, "pg_clip_eps_high was 0.2", "nan"),
]


@pytest.mark.parametrize(("overrides", "late", "was", "now"), LATE)
def test_a_value_that_changes_after_validation_is_refused(overrides, late, was, now):
    args = arguments(**overrides)
    assert said(args) == []
    vars(args).update(late)
    changed = dict(vars(args))
    message = f"{was} when validated and is {now} now. Call validate_args after the last merge."
    assert refused(args) == [("E22", message)]
    assert vars(args) == changed


def test_late_changes_are_all_reported_at_once():
    args = validate_args(arguments())
    args.loss_aggregation, args.pg_kernel = "constant", "triton"
    assert [rule for rule, _ in refused(args)] == ["E22", "E22"]
    del args.loss_aggregation
    assert [rule for rule, _ in refused(args)] == ["E1"]


def test_a_late_change_of_something_else_is_no_business_of_ours():
    args = validate_args(arguments(**constant(1024.0)))
    args.lr, args.global_batch_size, args.loss_aggregation_divisor = 2e-6, 128, 1024
    assert said(args) == []
    args.use_torch_fsdp2 = True  # the rules apply again
    assert [rule for rule, _ in refused(args)] == ["E19"]


FP16 = (
    "[W4] --fp16 with --num-experts leaves gradients as sums over all positions of the step until finalize. Make sure "
    "that the loss scale absorbs them."
)
FLOAT32 = (
    "[W10] {} has no effect here: without --bf16 and --fp16, hidden states, weights, logits and their gradients are "
    "float32."
)
PRECEDENCE = (
    "[W1] --custom-pg-loss-reducer-function-path takes precedence, and --loss-aggregation {} does not shape pg_loss. "
    "Remove one of the two."
)
# The first 12 digits of the sha256 of user_reducers.py in USER_FILES.
REDUCED = "[W2] pg_loss = (1/{})·Σ reducer(ℓ), reducer user_reducers:turn_mean (user_reducers.py, sha256 450ccdd0cc80)"
BY_REDUCER, IN_FLOAT32 = path(REDUCER), {"params_dtype": "torch.float32"}
WARNED = {  # arguments, and the warnings
    "W1 prompt_mean": (BY_REDUCER | mode("prompt_mean"), [PRECEDENCE.format("prompt_mean"), REDUCED.format("N_r")]),
    "W1 constant without L": (BY_REDUCER | mode("constant"), [PRECEDENCE.format("constant"), REDUCED.format("N_r")]),
    "W1 token_mean": (BY_REDUCER | TOKEN_MEAN, [PRECEDENCE.format("token_mean"), REDUCED.format("T")]),
    "W1 no reducer": (mode("prompt_mean"), []),
    "W2 flag off": (BY_REDUCER, [REDUCED.format("N_r")]),
    "W4 flag on": (TOKEN_MEAN | {"fp16": True, "num_experts": 4}, [FP16]),
    "W4 flag off": ({"fp16": True, "num_experts": 4}, []),
    "W4 no experts": (TOKEN_MEAN | {"fp16": True}, []),
    "W4 bf16": (TOKEN_MEAN, []),
    "W10 stored": ({"fp32_lm_head": True, **IN_FLOAT32}, [FLOAT32.format("--fp32-lm-head")]),
    "W10 both": (
        head(fp32_lm_head=True, fp32_lm_head_backward="bf16", **IN_FLOAT32),
        [FLOAT32.format("--fp32-lm-head"), FLOAT32.format("--fp32-lm-head-backward")],
    ),
    "W10 chunks": (head(**IN_FLOAT32), []),  # the logits are still not stored
    "W10 bf16": ({"fp32_lm_head": True, "fp32_lm_head_backward": "split"}, []),
    "W10 not known": ({"fp32_lm_head": True, "params_dtype": None}, []),
}


@pytest.mark.parametrize("name", WARNED)
@pytest.mark.usefixtures("user_code")
def test_a_consequence_is_a_warning_and_its_absence_is_silence(name):
    overrides, texts = WARNED[name]
    assert said(arguments(**overrides)) == [(ArgumentWarning, text) for text in texts]


@pytest.mark.usefixtures("user_code")
def test_the_mode_that_precedence_speaks_of_is_the_one_given():
    # Given sample_mean, so no precedence to speak of, although the flag makes it token_mean.
    args = arguments(**path(REDUCER, calculate_per_token_loss=True))
    assert said(args) == [
        (ArgumentNotice, "[R2] --calculate-per-token-loss makes --loss-aggregation token_mean, not sample_mean."),
        (ArgumentWarning, REDUCED.format("T")),
    ]


@pytest.mark.usefixtures("user_code")
def test_the_unit_of_a_reducer_is_the_one_after_reconciliation():
    # The flag was off, token_mean switches it on, so the reducer's sum is divided by T.
    assert said(arguments(**path(REDUCER, **mode("token_mean")))) == [
        (ArgumentNotice, "[R1] --loss-aggregation token_mean switches --calculate-per-token-loss on."),
        (ArgumentWarning, PRECEDENCE.format("token_mean")),
        (ArgumentWarning, REDUCED.format("T")),
    ]


@pytest.mark.parametrize("name", RULE_ARGUMENTS)
def test_ranks_that_differ_in_an_argument_that_a_rule_reads_are_told_which(name):
    """One of them would stop at the rule, and the others wait for it."""
    ranks = [rank_snapshot(arguments(**{name: value})) for value in ("alike", "alike", "other")]
    assert disagreement(ranks[:2]) is None
    assert (
        disagreement(ranks) == f"ranks disagree on {name}: rank 0 has 'alike', rank 2 has 'other'. Give all the same."
    )


@pytest.mark.parametrize(
    ("interval", "iterations", "messages"), [(None, 0, ["W11"]), (None, 10, ["W11"]), (None, None, []), (1000, 0, [])]
)
def test_evaluation_without_an_interval_is_warned_of(interval, iterations, messages):
    assert ids(said(arguments(eval_interval=interval, eval_iters=iterations))) == messages


BALANCED = {"num_experts": 8, "moe_aux_loss_coeff": 0.01, "moe_router_load_balancing_type": "global_aux_loss"}
TWO_LOSSES = {"moe_router_load_balancing_type": ["aux_loss", "global_aux_loss"]}


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({}, ["W5"]),
        (TWO_LOSSES | {"moe_aux_loss_coeff": [0.0, 0.01]}, ["W5"]),
        ({"data_parallel_size": None}, ["W5"]),
        ({"data_parallel_size": 1}, []),
        (TWO_LOSSES | {"moe_aux_loss_coeff": [0.01, 0.0]}, []),
        ({"moe_router_load_balancing_type": "aux_loss"}, []),
        ({"moe_aux_loss_coeff": 0}, []),
        ({"num_experts": None}, []),
    ],
)
@pytest.mark.parametrize("aggregation", ["token_mean", "prompt_mean"])
def test_a_loss_that_megatron_divides_by_ranks_is_warned_of(change, messages, aggregation):
    given = TOKEN_MEAN if aggregation == "token_mean" else mode(aggregation)
    assert ids(said(arguments(**BALANCED | change | given))) == messages


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"moe_expert_capacity_factor": 1.5}, ["W5"]),
        ({"moe_router_load_balancing_type": "sinkhorn"}, ["W5"]),
        ({"moe_router_load_balancing_type": ["sinkhorn"], "moe_expert_capacity_factor": 1.0}, ["W5", "W5"]),
        ({"moe_expert_capacity_factor": 1.5, "num_experts": None}, []),
        ({"moe_router_load_balancing_type": "sinkhorn", "num_experts": None}, []),
        ({}, []),
    ],
)
def test_experts_that_depend_on_other_tokens_are_warned_of(change, messages):
    assert ids(said(arguments(**{"num_experts": 8, "data_parallel_size": 1} | change))) == messages


@pytest.mark.usefixtures("user_code")
def test_only_rank_zero_speaks_and_every_rank_reconciles(monkeypatch):
    overrides = path(REDUCER, **mode("token_mean", fp16=True, num_experts=4))
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
    assert vars(parser.parse_args([])) == default_arguments()


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("--loss-aggregation dapo", "argument --loss-aggregation: invalid choice: 'dapo'"),
        ("--loss-aggregation dapo", ". Did you mean token_mean (DAPO's code) or prompt_mean (DAPO's paper)?\n"),
        ("--loss-aggregation-divisor long", "argument --loss-aggregation-divisor: invalid float value: 'long'"),
        ("--pg-metrics all", "argument --pg-metrics: invalid choice: 'all'"),
        ("--pg-kernel cuda", "argument --pg-kernel: invalid choice: 'cuda'"),
        ("--docs-per-step 2.5", "argument --docs-per-step: invalid int value: '2.5'"),
        ("--docs-per-step-policy about", "argument --docs-per-step-policy: invalid choice: 'about'"),
        ("--loss-agg token_mean", "unrecognized arguments: --loss-agg token_mean. For --loss-agg, did you mean"),
        ("--pg-kl=0.1 --lrr 1", "--lrr 1. For --pg-kl, did you mean --pg-kl-coef?\n"),
        ("--lrr 1", "unrecognized arguments: --lrr 1\n"),
    ],
)
def test_the_parser_refuses_what_it_can(words, complaint, capsys):
    with pytest.raises(SystemExit, match="2"):
        parse(*words.split())
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    ("overrides", "fragment"),
    [
        (pg("gspo") | mode("token_mean", calculate_per_token_loss=True), "token_mean has other weights"),
        (pg("gmpo") | mode("token_mean", calculate_per_token_loss=True), "token_mean has other weights"),
        (
            pg("gspo", clip_eps_high=0.2),
            "an eps of 0.2 almost never reaches. Leave the clip flags out, for the paper's 3e-4 and 4e-4.",
        ),
        ({"pg_kl_coef": 0.1, "pg_kl_estimator": "k1"}, "--pg-kl-estimator k1 has an expected gradient of 0"),
        ({"pg_kl_coef": 0.1, "pg_kl_estimator": "k3"}, "--pg-kl-estimator k3 has the gradient of KL(π_ref‖π)"),
        *(({"pg_kl_coef": 0.1, "pg_kl_estimator": name}, None) for name in ("k2", "k1_weighted", "k3_weighted")),
    ],
)
def test_a_term_with_a_consequence_is_said(overrides, fragment):
    found = said(arguments(**overrides))
    assert [category for category, _ in found] == [ArgumentWarning] * (fragment is not None)
    assert all(fragment in text for _, text in found)


def test_reading_flags_and_declarations_imports_neither_torch_nor_megatron():
    program = """
import argparse, importlib, pkgutil, sys
import megatron_pg, megatron_pg.declarations
for module in pkgutil.iter_modules(megatron_pg.declarations.__path__, "megatron_pg.declarations."):
    importlib.import_module(module.name)
parser = megatron_pg.add_arguments(argparse.ArgumentParser(allow_abbrev=False))
args = parser.parse_args(["--loss-aggregation", "constant", "--loss-aggregation-divisor", "16"])
args.calculate_per_token_loss = False
assert megatron_pg.validate_args(args) is args
from megatron_pg.flags.banner import banner
assert "(Σ m·ℓ)/(N_r·L)" in banner(args)
print(*sorted({name.partition(".")[0] for name in sys.modules} & {"torch", "megatron", "numpy", "triton"}))
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=processes.PACKAGE)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_an_argument_error_survives_the_way_between_processes():
    error = copy.copy(ArgumentError([("E1", "a"), ("E5", "b")]))
    assert error.violations == [("E1", "a"), ("E5", "b")]
    assert "[E5] b" in str(error)


def test_the_fused_head_has_a_mode_without_being_given_one():
    assert parse("--pg-fused-head").pg_fused_head == parse("--pg-fused-head", "auto").pg_fused_head == "auto"
    assert parse("--pg-fused-head", "recompute").pg_fused_head == "recompute"
