"""What of Megatron's own settings cannot go with the policy-gradient loss, and what follows from it. Needs no torch."""

from collections.abc import Callable
from importlib import metadata

from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts


def _takes_documents(facts: Facts) -> bool:
    documents = facts.args.docs_per_step
    return isinstance(documents, int) and not isinstance(documents, bool) and documents > 0


_FSDP = "E19 gradient scaling under {flag} is not verified for --loss-aggregation; remove it"
_BATCHES = "E30 {flag} reads its own kind of batches and cannot be combined with megatron_pg; remove it"
_LOGITS = "E54 {flag} %s, which --pg-fused-head never makes; remove one"
_SCALE = "E55 {flag} brings a loss scale that is not known when --pg-fused-head forward makes the gradient; use --pg-fused-head recompute"
_STEPS = "E62 {flag} %s, and with --docs-per-step every step has its own number of micro-batches; remove it"
# Where the condition holds, these may not be on: Megatron's argument, and the rule and its message.
REFUSED: tuple[tuple[Callable[[Facts], bool], dict[str, str]], ...] = (
    (
        lambda facts: True,
        {
            "hybrid_context_parallel": "E12 {flag} takes samples from Megatron's own data loader (--dataloader-type single) and "
            "distributes them itself, so packed micro-batches cannot reach it; remove it (--context-parallel-size alone works)",
            "use_megatron_fsdp": _FSDP,
            "use_torch_fsdp2": _FSDP,
            "overlap_moe_expert_parallel_comm": "E27 {flag} builds its own schedule plan, so the policy-gradient loss would never be "
            "called; remove it",
            "perform_rl_step": _BATCHES,
            "sft": _BATCHES,
            "iterations_to_skip": _BATCHES,
        },
    ),
    (
        lambda facts: facts.is_per_token or facts.per_token is True,
        {
            "ddp_average_in_collective": "E18 {flag} divides by ranks and cannot be combined with token_mean",
            "mtp_num_layers": "E21 {flag} cannot be combined with token_mean: the MTP loss would be divided by a count that is not its own",
        },
    ),
    (
        lambda facts: bool(facts.args.fp32_lm_head or facts.args.pg_fused_head),
        {
            "defer_embedding_wgrad_compute": "E53 {flag} computes the output layer's weight gradient later, and the float32 head "
            "computes it at once; remove one",
            "fp8_output_proj": "E53 {flag} makes the output layer one of Transformer Engine, into which the float32 head cannot be put; "
            "remove one",
            "output_logit_dtype": "E53 {flag} {value} is Megatron's own way to the same logits; remove it or ours",
        },
    ),
    (
        lambda facts: facts.args.pg_fused_head is not None,
        {
            "mtp_num_layers": _LOGITS % "computes further losses from logits",
            "use_mup": _LOGITS % "scales the logits",
            "cross_entropy_loss_fusion": _LOGITS % "is a loss over logits",
        },
    ),
    (lambda facts: facts.args.pg_fused_head == "forward", {"fp16": _SCALE, "loss_scale": _SCALE}),
    (
        _takes_documents,
        {
            "rampup_batch_size": _STEPS % "sets the number of micro-batches by a schedule",
            "decrease_batch_size_if_needed": _STEPS % "changes the number of micro-batches",
            "train_samples": _STEPS % "is divided by --global-batch-size into steps (use --train-iters)",
            "cuda_graph_impl": _STEPS % "captures a number of micro-batches of one shape",
        },
    ),
)


def compatibility_violations(facts: Facts) -> Violations:
    """Rules E12, E18 to E21, E27 to E30, E53 to E55 and E62."""
    for applies, refused in REFUSED:
        for name, text in refused.items() if applies(facts) else ():
            value = facts.megatron(name)
            if value not in (None, False, "", "none", []):
                rule, _, message = text.partition(" ")
                yield rule, message.format(flag=f"--{name.replace('_', '-')}", value=value)
    loader = facts.megatron("dataloader_type", "external")
    if loader != "external":
        yield (
            "E29",
            f"--dataloader-type {loader} would wrap the iterator of packed micro-batches in a data loader; use --dataloader-type "
            "external",
        )
    graph = [facts.megatron(name) for name in ("cuda_graph_impl", "cuda_graph_scope", "cuda_graph_modules")]
    if any(name in ("full_iteration", "CudaGraphScope.full_iteration") for name in _flatten(graph)):
        yield "E20", "--cuda-graph-impl full_iteration freezes the step's normaliser; capture layers instead"
    if (facts.megatron("gtp_weight_remat_size", 1) or 1) > 1:
        yield "E28", "--tensor-parallel-num-weight-shards > 1 is not verified for --loss-aggregation; remove it"


def _flatten(values: list[object]) -> list[str]:
    items = [item for value in values for item in (value if isinstance(value, (list, tuple)) else [value])]
    return [part.strip() for item in items for part in str(item).split(",")]


def compatibility_warnings(facts: Facts) -> list[str]:
    """W4 to W6 and W11, for arguments without violations."""
    messages = []
    if facts.megatron("eval_iters") is not None and facts.megatron("eval_interval") is None:
        messages.append(
            "--eval-iters without --eval-interval: Megatron's pretrain() divides by the interval when it asks for the data, and ends with a "
            "TypeError; give one, with --eval-iters 0 too"
        )
    if facts.is_per_token and facts.megatron("fp16", False):
        messages.append(
            "--fp16: gradients hold a sum over all trained tokens of the step until finalize; the loss scale must absorb it"
        )
    tp_size, cp_size = (facts.megatron(f"{kind}_parallel_size") or 1 for kind in ("tensor_model", "context"))
    if facts.is_per_token and _has_moe_losses(facts) and tp_size * cp_size > 1 and _core_version() < (0, 19):
        messages.append("this Megatron mis-scales MoE auxiliary losses by TP·CP (Megatron-LM#5047)")
    if not facts.is_per_token and facts.megatron("mtp_num_layers"):
        messages.append("MTP trains by cross-entropy on loss-masked tokens, outside --loss-aggregation")
    return messages


def _has_moe_losses(facts: Facts) -> bool:
    if not facts.megatron("num_experts"):
        return False
    coefficients = [facts.megatron(name) for name in ("moe_aux_loss_coeff", "moe_z_loss_coeff")]
    return any(value not in ("None", "0", "0.0") for value in _flatten(coefficients))


def _core_version() -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in metadata.version("megatron-core").split(".")[:2])
    except (metadata.PackageNotFoundError, ValueError):  # a source tree: newer than every release
        return (99, 0)
