"""What other trainers make of the same samples, to compare with (docs/evidence.md)."""

from dataclasses import replace

from tasks.sampling import Policy
from tasks.task_samples import with_values

from megatron_pg import Sample


def microbatch_means(samples: list[Sample], rows: int) -> list[Sample]:
    """The samples with advantages under which `token_mean` is the mean of the means of micro-batches of `rows` samples.

    The loss of a token scales with its advantage, here by T / (K T_k), so that its weight 1/T becomes 1/(K T_k): T
    tokens in the step, T_k in its micro-batch, K micro-batches.
    """
    parts = [samples[first : first + rows] for first in range(0, len(samples), rows)]
    sizes = [sum(sample.response_length for sample in part) for part in parts]
    return [
        replace(sample, advantages=sample.advantages * (sum(sizes) / len(parts) / size))
        for part, size in zip(parts, sizes, strict=True)
        for sample in part
    ]


def without_sampling_mask(samples: list[Sample], policy: Policy, logprobs: str) -> list[Sample]:
    """Truncated samples as a trainer reads them without their sampling masks.

    `logprobs`: "engine" leaves the log-probabilities over the sampling mask, "recomputed" takes those over the whole
    vocabulary.
    """
    bare = [replace(sample, sampling_mask=None) for sample in samples]
    return bare if logprobs == "engine" else with_values(bare, "old_logprobs", policy.score)
