"""The causes that can be distinguished: name, meaning and what to do."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause in words."""

    title: str
    advice: str


_TEXTS = {  # title → advice
    "bfloat16_grid": "log-probabilities stored in bfloat16 → Store and send log-probabilities in float32: bfloat16 "
    "keeps only three digits.",
    "shift": "targets shifted by a token → Compare which token the first log-probability of a response belongs to on "
    "both sides: logits at a position predict the next token.",
    "other_samples": "log-probabilities belong to other samples or tokens → Compare sample ids, prompts and lengths "
    "where old_logprobs and rollout_logprobs are joined with the tokens: after sorting, balancing, packing and "
    "gathering over ranks.",
    "vocabulary": "different tokenizer or vocabulary → Compare tokenizer files, added tokens and the order of the "
    "embedding's rows on both sides, and send token ids, not text.",
    "template": "the prompts start differently (chat template, BOS) → Print the token ids that each side reads before "
    "the response, of one sample, and compare them; send ids, not text.",
    "group": "one rank or engine only → Inspect that rank or engine: its weights after the last update, its settings, "
    "its version and its hardware.",
    "staleness": "stale weights → Update the engine's weights more often, bound the age of rollouts, or correct with "
    "--pg-correction. If updates should have arrived, compare a checksum of the weights on both sides after an update.",
    "truncation": "truncated sampling (top-p, top-k, min-p) that the trainer does not replay → Sample without top-p, "
    "top-k and min-p, or record the kept tokens of every sample (Sample.sampling_mask, docs/sampling_masks.md).",
    "sampling": "the engine samples from another distribution than it reports → Have the engine report "
    "log-probabilities after temperature and truncation (vLLM: logprobs_mode processed_logprobs), and compute "
    "old_logprobs at that temperature, over the kept tokens (docs/sampling_masks.md).",
    "padding": "padding columns take probability → On the side with the smaller probabilities, mask the padded columns "
    "of the vocabulary before the softmax. In the trainer, --pg-vocab-size with the tokenizer's size does it.",
    "temperature": "the temperatures differ → Set --pg-temperature to the engine's sampling temperature, and have the "
    "engine report log-probabilities after the temperature.",
    "routing": "some tokens are routed to other experts → If the model has experts, replay the engine's routing "
    "(routed_experts, docs/parallelism.md), or drop the tokens with a correction that rejects. In a dense model, "
    "compare the kernels, and the samples in which the tokens crowd.",
    "dropout": "the trainer is in training mode (dropout) → Compute old_logprobs with the model in evaluation mode, or "
    "set --hidden-dropout 0 and --attention-dropout 0. If they are 0, compare the log-probabilities of a sample alone "
    "and in a packed batch.",
    "head_precision": "precision of the head → Compute the logits in float32 on both sides: --pg-fused-head or "
    "--fp32-lm-head in the trainer, a float32 head in the engine.",
}
CAUSES = {name: Cause(*text.split(" → ")) for name, text in _TEXTS.items()}

Outcome = Literal["found", "not found", "cannot tell"]


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of one test."""

    cause: str  # of CAUSES
    outcome: Outcome
    evidence: str  # the numbers, in words
    p: float | None = None  # of the noise model; None: nothing was computed
    estimate: dict[str, Any] = field(default_factory=dict)  # its size


def cannot_tell(cause: str, why: str) -> Answer:
    """The result of a test that could not run."""
    return Answer(cause, "cannot tell", why)


def decided(cause: str, p: float, level: float, is_large: bool, evidence: str, **estimate: Any) -> Answer:
    """Found if the noise model is rejected and the effect is larger than a harmless one."""
    return Answer(cause, "found" if p <= level and is_large else "not found", evidence, p, estimate)
