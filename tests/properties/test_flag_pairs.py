"""Combinations of arguments against a second, independently written decision table (`flag_oracle`)."""

import argparse
import itertools
import math
import random
import warnings
from importlib import metadata

import flag_oracle
import pytest
from namespaces import REDUCER, arguments, ids, with_options
from packaging.version import Version

from megatron_pg.args import ArgumentError, validate_args
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import chosen_head

# factor: (argument, values that no rule refuses by themselves, values that some rule refuses by themselves)
FACTORS = {
    "mode": ("loss_aggregation", [None, "sample_mean", "prompt_mean", "token_mean", "constant"], ["dr_grpo", 1]),
    "flag": ("calculate_per_token_loss", [False, True], ["false", 1]),
    "divisor": ("loss_aggregation_divisor", [None, 16.0, 16], [True, "4096", math.nan, 0, -1.0, 1e39]),
    "path": (
        "custom_pg_loss_reducer_function_path",
        [None, REDUCER],
        ["user_reducers.py", "user_nothing:f", "user_package.turns:three"],
    ),
    "hybrid": ("hybrid_context_parallel", [False], [True]),
    "average": ("ddp_average_in_collective", [False, True], []),
    "fsdp": ("use_megatron_fsdp", [False, True], []),
    "fsdp2": ("use_torch_fsdp2", [False], [True]),
    "strategy": ("data_parallel_sharding_strategy", ["optim_grads_params", "no_shard", "optim", None], []),
    "instances": ("num_distributed_optimizer_instances", [1, 2], []),
    "graph": ("cuda_graph_impl", ["none", "local", "transformer_engine"], ["full_iteration"]),
    "scope": ("cuda_graph_scope", [[], ["attn"], ["moe_router"]], [["attn", "full_iteration"]]),
    "modules": ("cuda_graph_modules", [[]], [["full_iteration"]]),
    "mtp": ("mtp_num_layers", [None, 0, 1], []),
    "predicted": ("pg_mtp_aggregation", ["token_mean", "policy"], ["sample_mean", None]),
    "target": ("pg_mtp_target", ["token", "policy"], ["soft"]),
    "softcap": ("pg_logit_softcap", [None, 30], [0.5, True]),
    "recompute": ("recompute_granularity", [None, "selective", "full"], []),
    "experts": ("num_experts", [None, 8], []),
    "aux": ("moe_aux_loss_coeff", [0.0, 0.01], []),
    "balancing": (
        "moe_router_load_balancing_type",
        ["aux_loss", "none", "seq_aux_loss", "global_aux_loss", "sinkhorn"],
        [],
    ),
    "capacity": ("moe_expert_capacity_factor", [None, 1.5], []),
    "ranks": ("data_parallel_size", [2, 1], []),
    "z": ("moe_z_loss_coeff", [None, 0.001], []),
    "tp": ("tensor_model_parallel_size", [1, 2], []),
    "cp": ("context_parallel_size", [1, 2], []),
    "pp": ("pipeline_model_parallel_size", [1, 2], []),
    "ep": ("expert_model_parallel_size", [1, 2], []),
    "fp16": ("fp16", [False, True], []),
    "gtp": ("gtp_weight_remat_size", [1, None], [2]),
    "loader": ("dataloader_type", ["external"], ["single", "cyclic", None]),
    "rl": ("perform_rl_step", [False], [True]),
    "sft": ("sft", [False, None], [True]),
    "skip": ("iterations_to_skip", [[]], [[3]]),
    "low": ("pg_clip_eps_low", [None, 0.2, 0, 1], [1.01, "0.2", math.nan]),
    "high": ("pg_clip_eps_high", [None, 0.28, 0, 10.0], [-1, math.inf, True]),
    "temperature": ("pg_temperature", [1.0, 1e-3], [0.0, "1.0", None]),
    "metrics": ("pg_metrics", ["basic", "none", "with_entropy"], ["full", False]),
    "kernel": ("pg_kernel", ["torch"], ["triton", "cuda"]),
    "objective": ("pg_objective", ["grpo", "gspo", "cispo", "dual_clip", "reinforce", "dro", "gmpo"], ["dapo", None]),
    "own": ("pg_custom_objective_path", [None, "user_package.turns:two"], ["a.py", "user_nothing:f", REDUCER]),
    "cap": ("pg_objective cap", [None, 1.1, 2.0], [0.28, 1.0, "two"]),
    "pull": ("pg_objective beta", [None, 0.5], [0.0]),
    "correction": (
        "pg_correction",
        ["none", "tis", "icepop", "opsm", "rejection", "m2po", "clip_cov", "kl_cov", "top_entropy"],
        ["trunc"],
    ),
    "bottom": ("pg_correction low", [None, 0.5], [math.nan]),
    "top": ("pg_correction high", [None, 2.0, 0.1], ["two"]),
    "share": ("pg_correction fraction", [None, 0.1], [0.0, 1.0]),
    "force": ("pg_correction coef", [None, 2.0], [0.0]),
    "level": ("pg_correction level", [None, "token", "seq_sum"], ["seq"]),
    "divergence": ("pg_correction estimator", [None, "k1", "k3"], ["k4"]),
    "denominator": ("pg_denominator", ["scheduled", "live", "kept"], ["alive"]),
    "beta": ("pg_kl_coef", [0.0, 0.1], [-0.1, None]),
    "estimator": ("pg_kl_estimator", [None, "k1", "k3_weighted"], ["k2_weighted"]),
    "eta": ("pg_entropy_coef", [0.0, 0.1], [math.inf]),
    "auxiliary": ("pg_aux_aggregation", ["default", "policy"], ["mean"]),
    "gradient": ("pg_grad_divisor", [1.0, 64], [0.0, True]),
    "docs": ("docs_per_step", [0, 256], [-1, True, "256", 2.0, None]),
    "policy": ("docs_per_step_policy", [None, "exact", "at_least"], ["exactly"]),
    "end": ("docs_per_step_end", [None, "partial", "stop"], [False]),
    "rampup": ("rampup_batch_size", [None, ["16", "16", "100"]], []),
    "decrease": ("decrease_batch_size_if_needed", [False, True], []),
    "samples": ("train_samples", [None, 1000], []),
    "stored": ("fp32_lm_head", [False, True], ["yes"]),
    "fused": ("pg_fused_head", [None, "forward", "scaled_exp", "recompute", "auto"], ["both"]),
    "backward": ("fp32_lm_head_backward", [None, "bf16", "split"], ["exact"]),
    "columns": ("pg_vocab_size", [None, 151936], [151937, 0, True]),
    "parameters": ("params_dtype", ["torch.bfloat16", "torch.float32", None], []),
    "deferred": ("defer_embedding_wgrad_compute", [False, True], []),
    "overlap": ("overlap_grad_reduce", [False, True], []),
    "sets": ("multiple_validation_sets", [False, True], []),
    "virtual": ("virtual_pipeline_model_parallel_size", [None, 2], []),
    "fp8": ("fp8_output_proj", [False, True], []),
    "logits": ("output_logit_dtype", [None, "fp32"], []),
    "mup": ("use_mup", [False, True], []),
    "fusion": ("cross_entropy_loss_fusion", [False, True], []),
    "scale": ("loss_scale", [None, 128.0], []),
}
ALL = {name: [*good, *bad] for name, (_, good, bad) in FACTORS.items()}
GOOD = {name: good for name, (_, good, _) in FACTORS.items()}
CORE = Version(metadata.version("megatron-core")).release


def pairs_of(row: dict[str, int]) -> set[tuple]:
    return set(itertools.combinations(sorted(row.items()), 2))


def all_pairs(values: dict[str, list]) -> set[tuple]:
    cells = [[(name, i) for i in range(len(options))] for name, options in sorted(values.items())]
    return {pair for a, b in itertools.combinations(cells, 2) for pair in itertools.product(a, b)}


def covering_rows(values: dict[str, list], rng: random.Random) -> list[dict[str, int]]:
    """Rows of value indices that hold every pair of values, greedily: each row starts from a pair that is missing."""
    missing, rows = all_pairs(values), []
    while missing:
        row = dict(min(missing))
        rest = [name for name in values if name not in row]
        for name in rng.sample(rest, len(rest)):
            gain = [
                sum(tuple(sorted([(name, i), cell])) in missing for cell in row.items())
                for i in range(len(values[name]))
            ]
            best = [i for i, g in enumerate(gain) if g == max(gain)]
            row[name] = rng.choice(best)
        rows.append(row)
        missing -= pairs_of(row)
    return rows


def combination(values: dict[str, list], row: dict[str, int]) -> dict[str, object]:
    return {name: values[name][i] for name, i in row.items()}


def namespace(given: dict[str, object]) -> argparse.Namespace:
    """The arguments of the combination."""
    values = {FACTORS[name][0]: value for name, value in given.items()}
    for flag in ("pg_objective", "pg_correction"):
        options = {name.split()[1]: values.pop(name) for name in list(values) if name.startswith(f"{flag} ")}
        if isinstance(values[flag], str):
            values[flag] = with_options(values[flag], **options)
    return arguments(**values)


def found(given: dict[str, object]) -> tuple:
    """What the package answers: ("refused", rule ids) or ("accepted", mode, flag, ids of its warnings)."""
    args = namespace(given)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            validate_args(args)
        except ArgumentError as error:
            return "refused", sorted(rule for rule, _ in error.violations)
    said = ids([(warning.category, str(warning.message)) for warning in caught])
    return "accepted", args.loss_aggregation, args.calculate_per_token_loss, sorted(said)


def expected(given: dict[str, object]) -> tuple:
    if rules := flag_oracle.refusals(given, core=CORE):
        return "refused", rules
    return "accepted", *flag_oracle.outcome(given)


def check(combinations: list[dict[str, object]]) -> None:
    differing = [(given, found(given), expected(given)) for given in combinations if found(given) != expected(given)]
    assert differing[:3] == []


@pytest.mark.proof("Flags: every pair of values of the arguments, against a second decision table (pairs)")
@pytest.mark.parametrize("values", [ALL, GOOD], ids=["all", "accepted"])
@pytest.mark.usefixtures("user_code")
def test_every_pair_of_values_meets_the_second_table(values, evidence):
    rows = covering_rows(values, random.Random(3))
    covered = set().union(*(pairs_of(row) for row in rows))
    assert covered == all_pairs(values)
    combinations = [combination(values, row) for row in rows]
    check(combinations)
    evidence(cases=len(covered))


@pytest.mark.proof("Flags: random combinations, against a second decision table")
@pytest.mark.usefixtures("user_code")
def test_random_combinations_meet_the_second_table(full, evidence):
    rng = random.Random(8)
    combinations = []
    for _ in range(5000 if full else 100):
        bad = rng.choice([0.0, 0.0, 0.03, 0.3])  # mostly refused by one or two rules, or by none
        usual = rng.choice([0.5, 0.8, 0.9])  # share of arguments that are left as they are
        given = {
            name: rng.choice(
                bad_ones if bad_ones and rng.random() < bad else good[:1] if rng.random() < usual else good
            )
            for name, (_, good, bad_ones) in FACTORS.items()
        }
        combinations.append(given)
    verdicts = {expected(given)[0] for given in combinations}
    assert verdicts == {"refused", "accepted"}
    check(combinations)
    evidence(cases=len(combinations))


@pytest.mark.usefixtures("user_code")
def test_a_chosen_head_is_that_of_the_second_table_and_accepted_where_it_is_given(full):
    rng, modes = random.Random(40), []
    usual = {name: good[0] for name, (_, good, _) in FACTORS.items()} | {"kernel": None}
    of_heads = ["metrics", "objective", "own", "correction", "top", "eta", "beta", "estimator", "backward", "fp16"]
    of_heads += ["scale", "fsdp", "kernel", "tp", "mtp"]
    while len(modes) < (3000 if full else 150):
        given = usual | {name: rng.choice([usual[name], *FACTORS[name][1]]) for name in rng.sample(of_heads, 5)}
        mode = flag_oracle.head_mode(given)
        bare, explicit = (found(given | {"fused": head}) for head in ("auto", mode))
        assert bare == explicit
        if bare[0] == "accepted":
            assert chosen_head(Facts(namespace(given | {"fused": "auto"})))[0] == mode, given
            modes.append(mode)
    assert set(modes) == {"forward", "recompute", "scaled_exp"}


@pytest.mark.usefixtures("user_code")
def test_every_combination_of_the_four_aggregation_arguments_meets_the_second_table():
    usual = {name: good[0] for name, (_, good, _) in FACTORS.items()}
    four = {name: FACTORS[name][1] for name in ("mode", "flag", "divisor", "path")}
    check([usual | dict(zip(four, values, strict=True)) for values in itertools.product(*four.values())])


@pytest.mark.usefixtures("user_code")
def test_the_second_table_differs_from_a_table_without_one_of_its_rules(monkeypatch):
    given = {name: good[0] for name, (_, good, _) in FACTORS.items()} | {"average": True, "mode": "token_mean"}
    assert found(given) == expected(given) == ("refused", ["E18"])
    monkeypatch.setattr(flag_oracle, "_megatron", lambda given: [])
    with pytest.raises(AssertionError):
        check([given])
