"""What of Megatron's own settings cannot go with the policy-gradient loss, and what follows from it. Needs no torch."""

from importlib import metadata

from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts


def compatibility_violations(facts: Facts) -> Violations:
    """Rules E12, E18 to E21 and E27 to E30."""
    yield from _data_rules(facts)
    yield from _megatron_rules(facts)


def _megatron_rules(facts: Facts) -> Violations:
    token_mean = facts.is_per_token or facts.per_token is True
    if token_mean and facts.megatron("ddp_average_in_collective", False):
        yield "E18", "--ddp-average-in-collective divides by ranks and cannot be combined with token_mean"
    for name in ("use_megatron_fsdp", "use_torch_fsdp2"):
        if facts.megatron(name, False):
            yield (
                "E19",
                f"gradient scaling under --{name.replace('_', '-')} is not verified for --loss-aggregation; remove it",
            )
    graph = [facts.megatron(name) for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")]
    if any(name in ("full_iteration", "CudaGraphScope.full_iteration") for name in _flatten(graph)):
        yield "E20", "--cuda-graph-impl full_iteration freezes the step's normaliser; capture layers instead"
    if token_mean and facts.megatron("mtp_num_layers"):
        yield (
            "E21",
            "--mtp-num-layers cannot be combined with token_mean: the MTP loss would be divided by a count that is not its own",
        )
    if facts.megatron("overlap_moe_expert_parallel_comm", False):
        yield (
            "E27",
            "--overlap-moe-expert-parallel-comm builds its own schedule plan, so the policy-gradient loss would never be "
            "called; remove it",
        )
    if (facts.megatron("gtp_weight_remat_size", 1) or 1) > 1:
        yield (
            "E28",
            "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation; remove it",
        )


def _data_rules(facts: Facts) -> Violations:
    loader = facts.megatron("dataloader_type", "external")
    if facts.megatron("hybrid_context_parallel"):  # whatever the loader
        yield (
            "E12",
            "--hybrid-context-parallel takes samples from Megatron's own data loader (--dataloader-type single) and distributes them "
            "itself, so packed micro-batches cannot reach it; remove it (--context-parallel-size alone works)",
        )
    if loader != "external":
        yield (
            "E29",
            f"--dataloader-type {loader} would wrap the iterator of packed micro-batches in a data loader; use --dataloader-type "
            "external",
        )
    for name in ("perform_rl_step", "sft", "iterations_to_skip"):
        if facts.megatron(name):
            yield (
                "E30",
                f"--{name.replace('_', '-')} reads its own kind of batches and cannot be combined with megatron_pg; remove it",
            )


def _flatten(values: list[object]) -> list[str]:
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [part.strip() for item in items for part in str(item).split(",")]


def compatibility_warnings(facts: Facts) -> list[str]:
    """W4 to W6, for arguments without violations."""
    messages = []
    if facts.is_per_token and facts.megatron("fp16", False):
        messages.append(
            "--fp16: gradients hold a sum over all trained tokens of the step until finalize; the loss scale must absorb it"
        )
    if facts.is_per_token and _has_moe_losses(facts) and _model_ranks(facts) > 1 and _core_version() < (0, 19):
        messages.append("this Megatron mis-scales MoE auxiliary losses by TP·CP (Megatron-LM#5047)")
    if not facts.is_per_token and facts.megatron("mtp_num_layers"):
        messages.append("MTP trains by cross-entropy on loss-masked tokens, outside --loss-aggregation")
    return messages


def _has_moe_losses(facts: Facts) -> bool:
    if not facts.megatron("num_experts"):
        return False
    coefficients = [facts.megatron(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    return any(value not in ("None", "0", "0.0") for value in _flatten(coefficients))


def _model_ranks(facts: Facts) -> int:
    return (facts.megatron("tensor_model_parallel_size") or 1) * (facts.megatron("context_parallel_size") or 1)


def _core_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):  # a source tree: newer than every release
        return (99, 0)
