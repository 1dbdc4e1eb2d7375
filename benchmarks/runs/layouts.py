"""The layouts of gpu_layouts.py: for each its processes, its flags, and the layout whose losses it must have."""

from typing import NamedTuple

EXPERTS = (
    *("--num-experts", "4", "--moe-router-topk", "2", "--moe-aux-loss-coeff", "0"),
    *("--moe-token-dispatcher-type", "alltoall", "--disable-bias-linear", "--no-bias-gelu-fusion"),
)
# rope, because Megatron has a second copy of learned positions under pipeline parallelism
PREDICTION = ("--mtp-num-layers", "1", "--position-embedding-type", "rope", "--no-rope-fusion")
OVERLAPPED = (*EXPERTS, "--overlap-moe-expert-parallel-comm")
HYBRID = ("--hybrid-layer-pattern", "*-*-*-*-")
HYBRID_STAGES = ("--hybrid-layer-pattern", "*-*-|*-*-")
SHARDED = (
    "--use-megatron-fsdp",
    "--data-parallel-sharding-strategy",
    "optim_grads_params",
    "--ckpt-format",
    "fsdp_dtensor",
)
TERMS = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
DOCUMENTS = ("--docs-per-step", "256")
ENGINE = ("--transformer-impl", "transformer_engine")
FP8 = (*ENGINE, "--fp8-format", "e4m3", "--fp8-recipe", "blockwise")
DELAYED_FP8 = (*ENGINE, "--fp8-format", "hybrid", "--fp8-recipe", "delayed")
GROUPED = (*EXPERTS, *ENGINE, "--moe-grouped-gemm", "--moe-permute-fusion")
OFFLOADED = (*ENGINE, "--optimizer-cpu-offload", "--use-precision-aware-optimizer")
CAPTURED = (*ENGINE, "--cuda-graph-impl", "transformer_engine", "--te-rng-tracker")
SEQUENCES = ("--pg-objective", "gspo", "--pg-clip-eps-low", "1", "--pg-clip-eps-high", "1e6")  # no bound for noise
DYNAMIC, OPEN = {"DYNAMIC_CP": "1"}, {"OPEN_STEP": "1"}  # layout_run.py reads them
OVERLAP = ("--overlap-grad-reduce", "--overlap-param-gather")
CRITIC = (
    *("--pg-role", "critic", "--pg-value-clip", "0.5", "--pg-metrics", "basic"),
    *("--lr", "1e-5", "--min-lr", "1e-5"),  # with more, all values pass the returns in one step
    "--untie-embeddings-and-output-weights",  # a value head has its own weight
)


class Layout(NamedTuple):
    """A run, and the run that it is compared with."""

    processes: int
    environment: dict[str, str]
    flags: tuple[str, ...]
    reference: str
    rollouts: str = "plain"  # which of SAMPLED, or "scored"


SAMPLED = {  # further flags of the run on one GPU that samples a rollout file
    "plain": (),
    "top_p": ("--top-p", "0.9"),
    "shown": ("--demonstrations-per-step", "128", "--pg-term", "sft:ce,weight=0.1,aggregation=token_mean"),
}
FEATURES = {  # name: rollouts, further flags
    "SFT term": ("shown", ("--pg-term", "sft:ce,weight=0.1,aggregation=token_mean")),
    "reference KL": ("scored", ("--pg-kl-coef", "0.1", "--pg-kl-estimator", "k3")),
    "teacher": ("scored", ("--pg-term", "teacher:opd,on=rl,weight=0.5")),
    "top-k teacher": ("scored", ("--pg-term", "teacher:topk_forward_kl,on=rl,weight=0.5")),
    "top-p masks": ("top_p", ()),
    "clip_cov": ("plain", ("--pg-correction", "clip_cov,fraction=0.05,low=0")),  # of so few tokens
    "kl_cov": ("scored", ("--pg-correction", "kl_cov,fraction=0.05")),
    "m2po": ("scored", ("--pg-correction", "m2po,high=0.004")),
    "top_entropy": ("scored", ("--pg-correction", "top_entropy")),
    "entropy target": ("plain", ("--pg-entropy-coef", "0.05", "--pg-entropy-target", "2.45,step=0.02,max=0.1")),
    "critic": ("scored", CRITIC),
}
PLACES = {  # name: processes, environment
    "1 GPU": (1, {}),
    "DP2": (2, {}),
    "TP2 + SP": (2, {"TP": "2", "SP": "1"}),
    "PP2": (2, {"PP": "2"}),
    "CP2": (2, {"CP": "2"}),
    "TP2 + SP × PP2": (4, {"TP": "2", "SP": "1", "PP": "2"}),
    "TP2 × CP2 × DP2": (8, {"TP": "2", "CP": "2"}),
}
HEADS = {
    "recompute": ("--pg-fused-head", "recompute"),
    "scaled_exp": ("--pg-fused-head", "scaled_exp", "--pg-metrics", "basic"),  # it computes no entropies
}
HEAD_PLACES = ("1 GPU", "TP2 + SP", "PP2", "CP2", "TP2 + SP × PP2")
NOT_COVERED = {
    "teacher's whole distributions (`full_…`)": "needs hidden states of a teacher, which the example does not record",
    "routing replay": "needs routed experts, which the example does not record",
    "whitened advantages": "the example has no flag for `whiten_advantages`, which gives the same bits in every layout",
    "CP2 × DP2, --docs-per-step": "rows padded for CP2 hold fewer documents, so a step takes others from each rank",
    "several hosts": "this script starts one",
}
OF_THE_LOSS = {  # processes, environment, further flags, what it is compared with
    "1 GPU": (1, {}, (), "1 GPU"),
    "1 GPU, --fp32-lm-head": (1, {}, ("--fp32-lm-head",), "1 GPU"),
    "1 GPU, --pg-fused-head": (1, {}, ("--pg-fused-head",), "1 GPU"),
    "DP2": (2, {}, (), "1 GPU"),
    "DP2, overlapped": (2, {}, OVERLAP, "1 GPU"),
    "DP2, overlapped, open step": (2, OPEN, OVERLAP, "1 GPU"),
    "TP2": (2, {"TP": "2"}, (), "1 GPU"),
    "TP2 + SP": (2, {"TP": "2", "SP": "1"}, (), "1 GPU"),
    "TP2 + SP, --pg-fused-head": (2, {"TP": "2", "SP": "1"}, ("--pg-fused-head",), "1 GPU"),
    "TP2 + SP, --pg-fused-head, open step": (2, {"TP": "2", "SP": "1", **OPEN}, ("--pg-fused-head",), "1 GPU"),
    "PP2": (2, {"PP": "2"}, (), "1 GPU"),
    "PP2, two virtual stages": (2, {"PP": "2"}, ("--num-layers-per-virtual-pipeline-stage", "1"), "1 GPU"),
    "CP2": (2, {"CP": "2"}, (), "1 GPU"),
    "DP2, gspo": (2, {}, SEQUENCES, "1 GPU, gspo"),
    "1 GPU, gspo": (1, {}, SEQUENCES, "1 GPU, gspo"),
    "CP2, gspo": (2, {"CP": "2"}, SEQUENCES, "1 GPU, gspo"),
    "1 GPU, 4 experts": (1, {}, EXPERTS, "1 GPU, 4 experts"),
    "EP2, 4 experts": (2, {"EP": "2"}, EXPERTS, "1 GPU, 4 experts"),
    "EP2, 4 experts, overlapped": (2, {"EP": "2", **TERMS}, OVERLAPPED, "EP2, 4 experts"),
    "1 GPU, prediction": (1, {}, PREDICTION, "1 GPU, prediction"),
    "1 GPU, prediction, --fp32-lm-head": (1, {}, (*PREDICTION, "--fp32-lm-head"), "1 GPU, prediction"),
    "1 GPU, prediction, --pg-fused-head": (1, {}, (*PREDICTION, "--pg-fused-head"), "1 GPU, prediction"),
    "DP2, prediction": (2, {}, PREDICTION, "1 GPU, prediction"),
    "TP2 + SP, prediction, --pg-fused-head": (
        2,
        {"TP": "2", "SP": "1"},
        (*PREDICTION, "--pg-fused-head"),
        "1 GPU, prediction",
    ),
    "PP2, prediction": (2, {"PP": "2"}, PREDICTION, "1 GPU, prediction"),
    "PP2, prediction, --pg-fused-head": (2, {"PP": "2"}, (*PREDICTION, "--pg-fused-head"), "1 GPU, prediction"),
    "CP2, prediction": (2, {"CP": "2"}, PREDICTION, "1 GPU, prediction"),
    "EP2, 4 experts, overlapped, prediction": (
        2,
        {"EP": "2", **TERMS},
        (*OVERLAPPED, *PREDICTION),
        "1 GPU, 4 experts, prediction",
    ),
    "1 GPU, 4 experts, prediction": (1, {}, (*EXPERTS, *PREDICTION), "1 GPU, 4 experts, prediction"),
    "DP2, Megatron-FSDP": (2, TERMS, SHARDED, "1 GPU"),
    "DP2, Megatron-FSDP, --fp32-lm-head": (2, TERMS, (*SHARDED, "--fp32-lm-head"), "1 GPU"),
    "DP2, Megatron-FSDP, --pg-fused-head": (2, TERMS, (*SHARDED, "--pg-fused-head"), "1 GPU"),
    "1 GPU, HybridModel": (1, {}, HYBRID, "1 GPU"),
    "DP2, HybridModel": (2, {}, HYBRID, "1 GPU"),
    "TP2 + SP, HybridModel, --pg-fused-head": (2, {"TP": "2", "SP": "1"}, (*HYBRID, "--pg-fused-head"), "1 GPU"),
    "PP2, HybridModel": (2, {"PP": "2"}, HYBRID_STAGES, "1 GPU"),
    "1 GPU, --docs-per-step": (1, {}, DOCUMENTS, "1 GPU"),
    "DP2, --docs-per-step": (2, {}, DOCUMENTS, "DP2, --docs-per-step"),
    "CP2, --docs-per-step": (2, {"CP": "2"}, DOCUMENTS, "1 GPU"),
    "1 GPU, Transformer Engine": (1, {}, ENGINE, "1 GPU"),
    "TP2 + SP, Transformer Engine": (2, {"TP": "2", "SP": "1"}, ENGINE, "1 GPU"),
    "PP2, Transformer Engine": (2, {"PP": "2"}, ENGINE, "1 GPU"),
    "CP2, Transformer Engine": (2, {"CP": "2"}, ENGINE, "1 GPU"),
    "DP2, --docs-per-step, Transformer Engine": (2, {}, DOCUMENTS + ENGINE, "DP2, --docs-per-step"),
    "CP2, --docs-per-step, Transformer Engine": (2, {"CP": "2"}, DOCUMENTS + ENGINE, "1 GPU"),
    "EP2, 4 experts, Transformer Engine": (2, {"EP": "2"}, EXPERTS + ENGINE, "1 GPU, 4 experts"),
    "EP2, 4 grouped experts, Transformer Engine": (2, {"EP": "2"}, GROUPED, "1 GPU, 4 experts"),
    "EP2, 4 experts, overlapped, Transformer Engine": (
        2,
        {"EP": "2", **TERMS},
        (*OVERLAPPED, *ENGINE, "--delay-wgrad-compute"),
        "1 GPU, 4 experts",
    ),
    "DP2, prediction, Transformer Engine": (2, {}, PREDICTION + ENGINE, "1 GPU, prediction"),
    "CP2, dynamic CP, Transformer Engine": (2, {"CP": "2", **DYNAMIC}, DOCUMENTS + ENGINE, "1 GPU"),
    "1 GPU, captured layers, Transformer Engine": (1, {}, CAPTURED, "1 GPU"),
    "DP2, offloaded optimizer, Transformer Engine": (2, {}, OFFLOADED, "1 GPU"),
    "1 GPU, delayed FP8": (1, {}, DELAYED_FP8, "1 GPU"),
    "1 GPU, FP8": (1, {}, FP8, "1 GPU"),
    "1 GPU, FP8, --fp32-lm-head": (1, {}, (*FP8, "--fp32-lm-head"), "1 GPU, FP8"),
    "1 GPU, FP8, --pg-fused-head": (1, {}, (*FP8, "--pg-fused-head"), "1 GPU, FP8"),
    "DP2, FP8": (2, {}, FP8, "1 GPU, FP8"),
    "DP2, FP8 parameters, overlapped": (2, {}, (*FP8, *OVERLAP, "--fp8-param-gather"), "1 GPU, FP8"),
    "TP2 + SP, FP8, --pg-fused-head": (
        2,
        {"TP": "2", "SP": "1"},
        (*FP8, "--pg-fused-head", "--micro-batch-size", "64"),  # blocks of 128 tokens on each rank
        "1 GPU, FP8",
    ),
    "PP2, FP8": (2, {"PP": "2"}, FP8, "1 GPU, FP8"),
    "CP2, FP8": (2, {"CP": "2"}, FP8, "1 GPU, FP8"),
    "TP2 × DP2": (4, {"TP": "2"}, (), "1 GPU"),
    "PP2 × DP2": (4, {"PP": "2"}, (), "1 GPU"),
    "CP2 × TP2": (4, {"CP": "2", "TP": "2"}, (), "1 GPU"),
    "TP4 + SP": (4, {"TP": "4", "SP": "1"}, (), "1 GPU"),
    "TP2 + SP × PP2, --pg-fused-head": (4, {"TP": "2", "SP": "1", "PP": "2"}, ("--pg-fused-head",), "1 GPU"),
    "EP2 × DP2, 4 experts": (4, {"EP": "2"}, EXPERTS, "1 GPU, 4 experts"),
    "TP4 + SP × DP2": (8, {"TP": "4", "SP": "1"}, (), "1 GPU"),
    "PP2 × CP2 × DP2": (8, {"PP": "2", "CP": "2"}, (), "1 GPU"),
    "PP4 × DP2": (8, {"PP": "4"}, (), "1 GPU"),
    "TP2 + SP × PP2 × CP2, --pg-fused-head": (
        8,
        {"TP": "2", "SP": "1", "PP": "2", "CP": "2"},
        ("--pg-fused-head",),
        "1 GPU",
    ),
    "EP4 × DP2, 4 experts": (8, {"EP": "4"}, EXPERTS, "1 GPU, 4 experts"),
    "DP8, Megatron-FSDP": (8, TERMS, SHARDED, "1 GPU"),
    "DP2, dynamic CP": (2, DYNAMIC, DOCUMENTS, "1 GPU"),
    "TP2 × DP2, dynamic CP": (4, {"TP": "2", **DYNAMIC}, DOCUMENTS, "1 GPU"),
    "CP4 × DP2, dynamic CP": (8, {"CP": "4", **DYNAMIC}, DOCUMENTS, "1 GPU"),
}
LAYOUTS = {name: Layout(*entry) for name, entry in OF_THE_LOSS.items()}
LAYOUTS |= {
    f"{place}, {name}": Layout(*PLACES[place], flags, f"1 GPU, {name}", rollouts)
    for name, (rollouts, flags) in FEATURES.items()
    for place in PLACES
}
LAYOUTS |= {
    f"{place}, --pg-fused-head {mode}": Layout(*PLACES[place], flags, "1 GPU")
    for mode, flags in HEADS.items()
    for place in HEAD_PLACES
}
LAYOUTS |= {
    f"{place}, open step": Layout(processes, environment | OPEN, (), "1 GPU")
    for place, (processes, environment) in PLACES.items()
}
