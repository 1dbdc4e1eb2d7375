"""The words that flags and functions share, in addition to the tables."""

IMPLEMENTATIONS = ("triton", "torch")  # of log-probabilities and loss
ROLES = {"policy": "pg_loss", "critic": "value_loss"}  # of the trained model, and what its loss is called in logs
METRIC_LEVELS = ("none", "basic", "with_entropy")
AUX_AGGREGATIONS = ("default", "policy")  # weights of the KL and entropy terms
MTP_AGGREGATIONS = ("token_mean", "policy")  # weights of multi-token prediction
MTP_TARGETS = ("token", "policy")  # what multi-token prediction learns
HEAD_MODES = ("forward", "recompute", "scaled_exp")  # how the fused head makes its gradient
AT_ONCE = ("forward", "scaled_exp")  # the modes that make it with the loss
AUTO = "auto"  # --pg-fused-head without a mode, which the table in flags/head.py chooses
HEAD_BACKWARDS = ("bf16", "split")  # how it rounds the gradient of the logits
SOFTCAPS = (1.0, 1000.0)  # bounds of a softcap c: float32 has c tanh(x / c) to 3e-7 c
SAMPLING_MASK_MISSING = ("error", "mask")  # for a trained token outside its sampling mask
SAMPLING_MASK_ENTROPIES = ("full", "kept")  # the entropy of a token with a sampling mask
WEIGHT_DENOMINATORS = ("tokens", "weights")  # what denominators sum of a token
SEQUENCE_LEVELS = ("sample", "turn")  # what a sequence is, for losses, importance weights and rejections
DOCS_POLICIES = ("exact", "at_least")
DOCS_ENDS = ("partial", "stop")

# What denominators count: which rollouts and groups, which of their tokens, and the banner's text.
DENOMINATORS = {
    "scheduled": ("", "trained", "counts all rollouts and trained tokens, rejected ones too"),
    "live": (" with a trained token", "trained", "counts only rollouts and prompt groups with a trained token"),
    "varied": (
        " of groups whose rewards differ",
        "trained",
        "leaves out prompt groups whose rewards are all equal, as if they were not in the step",
    ),
    "kept": (
        " with a kept token",
        "kept",
        "counts only tokens that the correction does not reject, and rollouts and groups with such a token",
    ),
}

# The positional arguments of a custom function.
REDUCER_PARAMETERS = ("total_lengths", "response_lengths", "loss_masks", "calculate_per_token_loss=False")
OBJECTIVE_PARAMETERS = ("tokens", "parameters")
