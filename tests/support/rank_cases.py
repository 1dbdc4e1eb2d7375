"""What is run on real ranks by `ranks.py`: layouts with options, documents, and faults with the message that they end in."""

from itertools import product

from processes import gradients, worst_difference

MODES = ["sample_mean", "prompt_mean", "token_mean", "constant"]
LIMIT = 2e-6
# t: packed rows, s: sequence parallel, v: two virtual stages, tied: embeddings shared with the head, dist: distributed
# optimizer, overlap: overlapped gradient reduction, fp32: float32 logits, fused and recompute: the fused head, experts: a
# mixture of experts, ep: distributed over data-parallel ranks, uneven: all samples on one data-parallel rank.
FAST = [
    *(f"{layout}-{mode}" for layout in ("dp2", "cp2") for mode in MODES),
    *("tp2-constant", "tp2-token_mean", "tp2s-sample_mean", "tp2s-token_mean-tied"),
    *("pp2-prompt_mean", "pp2-token_mean", "pp2v-sample_mean-tied", "pp2v-token_mean"),
    *("cp2t-sample_mean", "cp2t-token_mean", "dp2t-constant"),
    *("dp2-constant-gspo", "cp2-sample_mean-gspo", "cp2t-token_mean-gspo", "tp2-sample_mean-gspo"),
    *("tp2s-constant-fused", "tp2-sample_mean-fused-tied", "tp2s-token_mean-recompute-tied", "tp2s-constant-fp32-tied"),
    *(
        "pp2-prompt_mean-fused-tied",
        "pp2v-token_mean-fused",
        "cp2t-sample_mean-fused",
        "dp2-constant-fused-dist-overlap",
    ),
    *("tp2-constant-fp32-dist-overlap", "dp2-sample_mean-recompute-tied-dist-overlap"),
    *("cp2t-sample_mean-gspo-recompute", "tp2s-constant-gspo-recompute"),
    *("ep2-sample_mean-experts", "ep2-token_mean-experts-dist-overlap", "ep2-constant-experts-fused"),
    *("dp2-prompt_mean-dist", "dp2-constant-tied-dist-overlap", "dp2-token_mean-overlap", "dp2-sample_mean-uneven"),
]
OPTIONS = ["", "-tied", "-dist", "-overlap", "-tied-dist-overlap"]
HEADS = [
    *("-fused", "-fused-tied-dist-overlap", "-recompute", "-recompute-tied-dist-overlap", "-fp32-tied-dist-overlap")
]
TWO = ["dp2", "dp2t", "tp2", "tp2s", "tp2t", "pp2", "pp2v", "cp2", "cp2t"]
FOUR = [
    "dp4",
    "tp4s",
    "pp4",
    "cp4",
    "dp2cp2",
    "dp2cp2t",
    "tp2pp2",
    "tp2pp2sv",
    "dp2tp2s",
    "dp2pp2v",
    "tp2cp2",
    "pp2cp2",
]
GSPO = [
    f"{layout}-{mode}-gspo{head}"
    for layout in ("dp2", "dp2t", "tp2", "pp2", "cp2", "cp2t")
    for mode in MODES
    for head in ("", "-recompute")
]
EXPERTS = [
    f"ep2{kind}-{mode}-experts{option}" for kind in ("", "t") for mode in MODES for option in ("", "-dist-overlap")
]
FULL = [
    *GSPO,
    *EXPERTS,
    *(f"cp2-{mode}-experts" for mode in MODES),
    *("-".join(parts) + option for parts in product(TWO, MODES) for option in [*OPTIONS, *HEADS]),
    "dp2-token_mean-uneven",
]
FULL_4 = [
    "-".join(parts) + option
    for parts in product(FOUR, MODES)
    for option in ("", "-tied-dist-overlap", "-fused-tied-dist-overlap")
]
FULL_4 += [
    f"{layout}-{mode}-experts{option}"
    for layout in ("ep4", "dp4ep2", "ep2pp2", "ep2cp2")
    for mode in MODES
    for option in ("", "-dist-overlap")
]
REFERENCES = [f"dp1-{mode}{option}" for mode in MODES for option in ("", "-tied", "-gspo", "-experts")]
# docs: the same samples as a step of --docs-per-step
DOCUMENTS = [
    *("dp2t-sample_mean-docs", "dp2-prompt_mean-docs", "dp2t-token_mean-docs", "dp2t-constant-dist-overlap-docs"),
    *("tp2t-constant-docs", "tp2s-token_mean-docs", "tp2ts-prompt_mean-docs"),
    *("pp2-sample_mean-docs", "pp2t-token_mean-docs", "pp2v-constant-docs", "pp2tv-token_mean-docs"),
    *("cp2t-prompt_mean-docs", "cp2-constant-docs", "cp2t-token_mean-docs"),
    *("dp2t-constant-fused-docs", "pp2tv-token_mean-fused-docs", "cp2t-sample_mean-gspo-recompute-docs"),
]
DOCUMENTS_4 = [f"dp2cp2{kind}-{mode}-docs" for kind in ("", "t") for mode in MODES]
EVALUATIONS = ["dp2-constant-evaluate", "tp2s-constant-fused-evaluate", "pp2-prompt_mean-fused-evaluate"]
STARTUP = [  # arguments that rank 1 has otherwise; source: the reducer's file
    *(
        "loss_aggregation",
        "loss_aggregation_divisor",
        "custom_pg_loss_reducer_function_path",
        "calculate_per_token_loss",
    ),
    *("pg_clip_eps_low", "pg_clip_eps_high", "pg_temperature", "pg_metrics", "pg_kernel", "pg_objective", "pg_dry_run"),
    *("pg_custom_objective_path", "pg_dual_clip", "pg_delta", "pg_cispo_cap", "pg_sapo_tau_pos", "pg_sapo_tau_neg"),
    *("pg_dppo_delta_low", "pg_dppo_delta_high", "pg_correction", "pg_correction_low", "pg_correction_high"),
    *("pg_denominator", "pg_kl_coef", "pg_kl_estimator", "pg_entropy_coef", "pg_aux_aggregation", "pg_grad_divisor"),
    *("docs_per_step", "docs_per_step_policy", "docs_per_step_end", "docs_per_step_drop_position"),
    *("context_parallel_size", "cuda_graph_impl", "cuda_graph_modules", "cuda_graph_scope", "dataloader_type"),
    *("ddp_average_in_collective", "fp16", "gtp_weight_remat_size", "hybrid_context_parallel", "iterations_to_skip"),
    *("moe_aux_loss_coeff", "moe_z_loss_coeff", "mtp_num_layers", "num_experts", "overlap_moe_expert_parallel_comm"),
    *("decrease_batch_size_if_needed", "rampup_batch_size", "train_samples"),
    *("perform_rl_step", "sft", "tensor_model_parallel_size", "use_megatron_fsdp", "use_torch_fsdp2"),
    *("fp32_lm_head", "fp32_lm_head_backward", "pg_fused_head", "pg_vocab_size", "cross_entropy_loss_fusion"),
    *("defer_embedding_wgrad_compute", "loss_scale", "output_logit_dtype", "padded_vocab_size", "use_mup"),
    *("fp8_output_proj", "params_dtype", "eval_interval", "eval_iters"),
]
# case: what every rank's message says, in order of the ranks (one text: the same on both)
FAULTS = {
    "dp2-constant-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "pp2-token_mean-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "pp2v-token_mean-nan": "NonFiniteLossError: non-finite loss at rank 1, sample",
    "tp2-constant-peers": "ContractError: step plan differs between ranks 0 and 1",
    "cp2-sample_mean-peers": "ContractError: step plan differs between ranks 0 and 1",
    "dp2-constant-ended": "rank 1: the data ended after 1 of the 2 micro-batches of this step",
    "tp2-constant-ended": "the data ended after 1 of the 2 micro-batches of this step",
    "pp2-token_mean-raises": "RuntimeError: the sampler broke",
    "dp2-token_mean-masked": "the step has no trained token",
    "dp2-constant-detached": "call PolicyGradientStep.attach",
    "pp2-token_mean-detached": "call PolicyGradientStep.attach",
    "dp2-sample_mean-reducer": "rank 1: RuntimeError: my reducer broke",
    "tp2-constant-advantages": "ContractError: step plan differs between ranks 0 and 1",
    "tp2-constant-vocabulary": "holds token id 16, the vocabulary has 16",
    "dp2-constant-positions": "holds a document of 25 positions, the model has 24",
    "dp2-constant-unreduced": "config.finalize_model_grads_func is None",
    "pp2-constant-columns": "--pg-vocab-size 17 is more than the 16 columns of the model's logits",
    "pp2-constant-fused-bias": "the output layer has a bias, which the float32 head would leave out",
    "pp2-constant-fp32-bias": "the output layer has a bias, which the float32 head would leave out",
    "pp2-constant-fused-telayer": "the output layer is a TELayer, not Megatron's ColumnParallelLinear",
    "pp2-token_mean-shape": "pipeline parallelism sends (",
    "dp2-token_mean-flag": "built with calculate_per_token_loss=True, the arguments say False",
    "dp2-sample_mean-nanold": "non-finite loss at rank 1, sample 1 (number 0 of its micro-batch), response token 0 with old_logprobs nan",
    "dp2-token_mean-nanadvantage": "non-finite loss at rank 1, sample 1 (number 0 of its micro-batch), response token 0 with old_logprobs -",
    "tp2-constant-nanold": "ContractError: step plan differs between ranks 0 and 1",
    "dp2-constant-buildold": "rank 1: old_logprobs of sample 1 is nan at response token 0",
    "dp2-constant-buildadvantage": "rank 1: advantages of sample 1 is inf at response token 0",
    "dp2-constant-positive": "rank 1: old_logprobs of sample 1 reach 0.7",
    "dp2-constant-masklength": "rank 1: loss_mask of sample 1 has",
    "dp2-constant-oldlength": "rank 1: old_logprobs of sample 1 has",
    "pp2-constant-oldlength": "old_logprobs of sample",
    "dp2-constant-fraction": "rank 1: loss_mask of sample 1 must be 0 or 1, got 0.5",
    "dp2-prompt_mean-noprompt": "rank 1: sample 1 has no prompt_id",
    "dp2-sample_mean-noids": "rank 0 has rollout_ids and rank 1 has none",
    "dp2-sample_mean-duplicate": "rollout '0/0' belongs to prompt groups",
    "dp2-constant-more": "rank 0 has 2 micro-batches, rank 1 has 3",
    "dp2-constant-noref": "rank 0: sample 0 has no ref_logprobs, which --pg-kl-coef 0.1 needs",
    "pp2-token_mean-norollout": "has no rollout_logprobs, which --pg-correction tis needs",
    "dp2-constant-dict": "rank 1: the data iterator gave a dict, not a PackedBatch",
    "dp2t-constant-docs-breaks": "rank 1: RuntimeError: the sampler broke",
    "tp2t-constant-docs-breaks": "RuntimeError: the sampler broke",
    "pp2t-token_mean-docs-breaks": "RuntimeError: the sampler broke",
    "dp2t-constant-docs-masked": "the step has no trained token, so nothing can be learned from it. Leave fully masked samples out",
    "dp2t-constant-docs-toolong": "rank 1: document a long one has 73 tokens and a micro-batch holds 12",
    "tp2t-constant-docs-unequal": "ContractError: step plan differs between ranks 0 and 1",
    "dp2t-prompt_mean-docs-divided": "has samples on data-parallel ranks 0 and 1, so --docs-per-step could split it between steps",
    "pp2-token_mean-docs-detached": "call PolicyGradientStep.attach",
    "dp2-token_mean-docs-short": "EndOfDocuments: the documents have ended: 0 were trained, ",
}


def reference_of(case: str) -> str:
    option = next((f"-{name}" for name in ("tied", "gspo", "experts") if name in case), "")
    return f"dp1-{case.split('-')[1]}{option}"


def compare(folder, references, cases: list[str]) -> float:
    """Worst gradient error of the cases; every case that misses the limit is named."""
    worst = {
        case: worst_difference(gradients(folder, case), gradients(references, reference_of(case))) for case in cases
    }
    assert {case: error for case, error in worst.items() if not error <= LIMIT} == {}
    return max(worst.values())
