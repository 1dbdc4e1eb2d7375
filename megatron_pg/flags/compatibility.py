"""Megatron's settings that cannot be combined with the policy-gradient loss. Needs no torch."""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from megatron_pg.declarations.declaration import flag_of
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.megatron import (
    FUSES_UNDER_FSDP,
    REDUCES_UNSHARDED,
    RUNS_FSDP2,
    SCALES_ROUTER_LOSSES,
    core_version,
)

_RANKS = (
    "E12 {flag} takes samples from Megatron's own data loader (--dataloader-type single) and distributes them itself, "
    "so it cannot use packed micro-batches. Remove it. Use --context-parallel-size alone, or dynamic_cp, which runs "
    "each micro-batch on its own ranks."
)


def _leaves_unreduced(facts: Facts) -> bool:
    strategy = facts.megatron("data_parallel_sharding_strategy")  # None: no_shard, the default of 0.16 and 0.17
    return strategy == "no_shard" or (strategy is None and core_version() < (0, 18))


def _is_sharded(facts: Facts, name: str) -> bool:
    """Whether Megatron-FSDP runs with a size above 1."""
    given = facts.megatron(name)
    return bool(facts.megatron("use_megatron_fsdp")) and isinstance(given, int) and given > 1


def _leaves_experts_unreduced(facts: Facts) -> bool:
    """Whether experts have their own tensor parallelism, and Megatron reduces them like all other parameters."""
    if not facts.megatron("num_experts") or (facts.megatron("expert_model_parallel_size") or 1) > 1:
        return False
    return facts.megatron("expert_tensor_parallel_size") != (facts.megatron("tensor_model_parallel_size") or 1)


def _reduces_before_it_is_complete(facts: Facts) -> bool:
    """Whether ranks start to add a gradient while Megatron still holds back a part of it."""
    sizes = facts.megatron("data_parallel_size"), facts.megatron("context_parallel_size")
    return bool(facts.megatron("overlap_grad_reduce")) and sizes != (1, 1)


def _is_per_token(facts: Facts) -> bool:
    return facts.is_per_token or facts.per_token is True


_is_critic, _fuses_head, _has_own_head = map(attrgetter, ("is_critic", "fuses_head", "has_own_head"))
_takes_documents = attrgetter("takes_documents")
_BATCHES = "E30 {flag} reads its own kind of batches and cannot be combined with megatron_pg. Remove it."
_FSDP = "E19 {flag}%s was not run with --use-megatron-fsdp. Remove one of the two."
_NOT_RUN_UNDER_FSDP = "num_distributed_optimizer_instances", "tensor_model_parallel_size"
_LOGITS = "E54 {flag} %s, which --pg-fused-head never computes. Remove one of the two."
_CRITIC = "E46 {flag} %s and cannot be combined with --pg-role critic. Remove it."
_STEPS = "E62 {flag} %s, and with --docs-per-step every step has its own number of micro-batches. Remove it."
# Megatron's arguments that are refused where the condition is true: name, condition, rule and message.
REFUSED: tuple[tuple[str, Callable[[Facts], bool], str], ...] = (
    *((name, lambda facts: True, _RANKS) for name in ("hybrid_context_parallel", "dynamic_context_parallel")),
    *((name, lambda facts: True, _BATCHES) for name in ("perform_rl_step", "sft", "iterations_to_skip")),
    (
        "use_torch_fsdp2",
        lambda facts: core_version() < RUNS_FSDP2,
        "E19 {flag} raises a TypeError in finalize_model_grads of megatron-core before 0.19.2. Use 0.19.2, or "
        "--use-megatron-fsdp.",
    ),
    (
        "use_torch_fsdp2",
        _fuses_head,
        "E19 {flag} frees the output layer's weight after its forward, and --pg-fused-head reads it later. Use "
        "--fp32-lm-head, or --use-megatron-fsdp.",
    ),
    (
        "use_torch_fsdp2",
        lambda facts: bool(facts.megatron("num_experts")) and _is_per_token(facts),
        "E19 {flag} averages gradients without dividing by the number of positions. Use --use-megatron-fsdp, or "
        "another aggregation.",
    ),
    (
        "use_megatron_fsdp",
        lambda facts: facts.fuses_head and core_version() < FUSES_UNDER_FSDP,
        "E19 {flag} loses gradients under --pg-fused-head in megatron-core before 0.19.2. Use 0.19.2, or "
        "--fp32-lm-head.",
    ),
    (
        "use_megatron_fsdp",
        lambda facts: core_version() < REDUCES_UNSHARDED and _leaves_unreduced(facts),
        "E19 {flag} with --data-parallel-sharding-strategy no_shard, the default of 0.16 and 0.17, does not reduce "
        "gradients over ranks in megatron-core before 0.18.2. Use --data-parallel-sharding-strategy "
        "optim_grads_params.",
    ),
    ("ddp_average_in_collective", lambda facts: bool(facts.megatron("use_megatron_fsdp")), _FSDP % ""),
    *((name, partial(_is_sharded, name=name), _FSDP % " {value}") for name in _NOT_RUN_UNDER_FSDP),
    (
        "pipeline_model_parallel_size",
        partial(_is_sharded, name="pipeline_model_parallel_size"),
        "E19 {flag} {value} raises an error when --use-megatron-fsdp creates its process groups. Remove one of the "
        "two.",
    ),
    (
        "expert_model_parallel_size",
        lambda facts: (
            _is_sharded(facts, "expert_model_parallel_size")
            and not _is_per_token(facts)
            and facts.megatron("data_parallel_sharding_strategy") != "optim"
        ),
        "E19 {flag} {value} with --use-megatron-fsdp divides experts' gradients by the number of ranks again with "
        "every micro-batch. Use token_mean, --data-parallel-sharding-strategy optim, or no expert parallelism.",
    ),
    (
        "ddp_average_in_collective",
        _is_per_token,
        "E18 {flag} divides by ranks and cannot be combined with token_mean. Remove one of the two.",
    ),
    (
        "expert_tensor_parallel_size",
        _leaves_experts_unreduced,
        "E17 {flag} {value} is not --tensor-model-parallel-size, and without expert parallelism Megatron does not add "
        "experts' gradients of these ranks. Remove it, or use --expert-model-parallel-size 2 or more.",
    ),
    (
        "defer_embedding_wgrad_compute",
        _reduces_before_it_is_complete,
        "E17 {flag} delays the output layer's weight gradient beyond the last backward, in which --overlap-grad-reduce "
        "begins to add this gradient over ranks. Each rank then trains with another gradient. Remove one of the two.",
    ),
    (
        "defer_embedding_wgrad_compute",
        lambda facts: bool(facts.megatron("mtp_num_layers")),
        "E17 {flag} with --mtp-num-layers multiplies the gradients of one prediction by the hidden states of another. "
        "Remove one of the two.",
    ),
    (
        "multiple_validation_sets",
        lambda facts: (facts.megatron("virtual_pipeline_model_parallel_size") or 1) > 1,
        "E30 {flag} with virtual pipeline stages evaluates the first set in the place of every other one. Remove it, "
        "or the virtual stages.",
    ),
    (
        "defer_embedding_wgrad_compute",
        _has_own_head,
        "E53 {flag} delays the output layer's weight gradient, which the float32 head computes at once. Remove one of "
        "the two.",
    ),
    (
        "fp8_output_proj",
        _has_own_head,
        "E53 {flag} replaces the output layer with one of Transformer Engine, which has no float32 head. Remove one of "
        "the two.",
    ),
    (
        "output_logit_dtype",
        _has_own_head,
        "E53 {flag} {value} also changes the precision of the logits. Remove it, or the float32 head.",
    ),
    ("mtp_num_layers", _is_critic, _CRITIC % "predicts tokens from logits"),
    ("use_mup", _is_critic, _CRITIC % "scales the output layer's result as logits"),
    ("defer_embedding_wgrad_compute", _is_critic, _CRITIC % "delays the gradient of an output layer with logits"),
    ("fp8_output_proj", _is_critic, _CRITIC % "replaces the output layer"),
    ("use_torch_fsdp2", _is_critic, _CRITIC % "was not run with a value head"),
    ("use_megatron_fsdp", _is_critic, _CRITIC % "was not run with a value head"),
    ("use_mup", _fuses_head, _LOGITS % "scales the logits"),
    ("cross_entropy_loss_fusion", _fuses_head, _LOGITS % "is a loss over logits"),
    ("rampup_batch_size", _takes_documents, _STEPS % "sets the number of micro-batches by a schedule"),
    ("decrease_batch_size_if_needed", _takes_documents, _STEPS % "changes the number of micro-batches"),
    ("train_samples", _takes_documents, _STEPS % "is divided by --global-batch-size into steps (use --train-iters)"),
    ("cuda_graph_impl", _takes_documents, _STEPS % "captures a number of micro-batches of one shape"),
)


def compatibility_violations(facts: Facts) -> Violations:
    """Rules E12, E17 to E21, E27 to E30, E53, E54, E62 and E65."""
    for name, applies, text in REFUSED:
        value = facts.megatron(name)
        if value not in (None, False, "", "none", []) and applies(facts):
            yield text.format(flag=flag_of(name), value=value)
    loader = facts.megatron("dataloader_type", "external")
    if loader != "external":
        yield (
            f"E29 --dataloader-type {loader} wraps the iterator of packed micro-batches in a data loader. Use "
            "--dataloader-type external."
        )
    graph = [facts.megatron(name) for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")]
    if any(name in ("full_iteration", "CudaGraphScope.full_iteration") for name in _flatten(graph)):
        yield "E20 --cuda-graph-impl full_iteration freezes the step's denominators. Capture layers instead."
    recomputes_mtp = facts.megatron("mtp_num_layers") and facts.megatron("recompute_granularity") == "full"
    if recomputes_mtp and (0, 18) <= core_version() < (0, 19, 2):
        yield (
            "E21 --recompute-granularity full with --mtp-num-layers raises a TypeError inside megatron-core 0.18 to "
            "0.19.1. Use 0.19.2, --recompute-granularity selective, or no multi-token prediction."
        )
    if (shards := facts.megatron("gtp_weight_remat_size", 1) or 1) > 1:
        yield (
            f"E28 --tensor-parallel-num-weight-shards gives gtp_weight_remat_size {shards}, which is not verified for "
            "--loss-aggregation. Remove it."
        )
    if _captures_router(facts) and _needs_router_scale(facts):
        yield (
            "E65 --cuda-graph-impl transformer_engine captures the router with the coefficients of its losses, which "
            "change with every step under token_mean in megatron-core before 0.19. Leave moe out of "
            "--cuda-graph-scope, or use 0.19."
        )


def _flatten(values: list[object]) -> list[str]:
    """The words of texts with commas and of lists; None has none."""
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [part.strip() for item in items if item is not None for part in str(item).split(",")]


def compatibility_warnings(facts: Facts) -> list[str]:
    """W4, W5 and W11, for arguments without violations."""
    messages = []
    if facts.megatron("eval_iters") is not None and facts.megatron("eval_interval") is None:
        messages.append(
            f"W11 --eval-iters {facts.megatron('eval_iters')} without --eval-interval raises a TypeError in Megatron's "
            "pretrain(), which divides by the interval when it builds the data. Give an interval, also with "
            "--eval-iters 0."
        )
    if facts.is_per_token and facts.megatron("fp16", False) and facts.megatron("num_experts"):
        messages.append(
            "W4 --fp16 with --num-experts leaves gradients as sums over all positions of the step until finalize. Make "
            "sure that the loss scale absorbs them."
        )
    if "global_aux_loss" in _balancing_losses(facts) and facts.megatron("data_parallel_size") != 1:
        messages.append(
            "W5 --moe-router-load-balancing-type global_aux_loss has a gradient that Megatron divides by the number of "
            "data-parallel ranks, and that depends on the order of the micro-batches. Multiply --moe-aux-loss-coeff by "
            "that number, or use aux_loss."
        )
    messages += [
        f"W5 {flag} chooses experts by all positions of a rank's micro-batch, so loss and gradient depend on its size "
        f"and on the layout. {fix}."
        for flag, fix in _routing_by_microbatch(facts)
    ]
    return messages


def _routing_by_microbatch(facts: Facts) -> list[tuple[str, str]]:
    """What makes the experts of a token depend on the others of its micro-batch, and what to do about it."""
    if not facts.megatron("num_experts"):
        return []
    capacity = facts.megatron("moe_expert_capacity_factor")
    found = [] if capacity is None else [(f"--moe-expert-capacity-factor {capacity:g}", "Leave it out")]
    if "sinkhorn" in _flatten([facts.megatron("moe_router_load_balancing_type")]):
        found.append(("--moe-router-load-balancing-type sinkhorn", "Use another type"))
    return found


def _captures_router(facts: Facts) -> bool:
    parts = _flatten([facts.megatron("cuda_graph_scope"), facts.megatron("cuda_graph_modules")])
    is_captured = not parts or any("moe" in part or part == "full" for part in parts)
    return facts.megatron("cuda_graph_impl") == "transformer_engine" and is_captured


def _needs_router_scale(facts: Facts) -> bool:
    """Whether the step multiplies the coefficients of the router's losses (`megatron_pg.step.experts`)."""
    if not _is_per_token(facts) or core_version() >= SCALES_ROUTER_LOSSES:
        return False
    tp_size, cp_size = (facts.megatron(f"{kind}_parallel_size") or 1 for kind in ("tensor_model", "context"))
    losses = _balancing_losses(facts)
    has_z_loss = bool(facts.megatron("num_experts") and facts.megatron("moe_z_loss_coeff"))
    return "seq_aux_loss" in losses or (tp_size * cp_size > 1 and (bool(losses) or has_z_loss))


def _balancing_losses(facts: Facts) -> list[str]:
    """The auxiliary losses that the router has, by Megatron's names."""
    if not facts.megatron("num_experts"):
        return []
    kinds = _flatten([facts.megatron("moe_router_load_balancing_type", "aux_loss")])
    coefficients = _flatten([facts.megatron("moe_aux_loss_coeff")])
    weighted = [kind for kind, value in zip(kinds, coefficients, strict=False) if value not in ("0", "0.0")]
    return [kind for kind in weighted if kind.endswith("aux_loss")]
