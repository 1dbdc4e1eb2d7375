"""What a recorded optimizer step should have computed, in float64 and one sample at a time, without the package."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

TENSOR_RANK = 1  # of a place: ranks in the data-, tensor-, context- and pipeline-parallel groups


@dataclass(frozen=True)
class Step:
    """A step of all ranks, from the recorder's files."""

    folder: Path
    number: int

    @cached_property
    def _ranks(self) -> list[tuple[list[int], list[dict], dict[str, np.ndarray]]]:
        ranks = []
        for path in sorted(self.folder.glob(f"*_{self.number}.json")):
            content = json.loads(path.read_text(encoding="utf-8"))
            ranks.append((content["place"], content["samples"], dict(np.load(path.with_suffix(".npz")))))
        return ranks

    @property
    def samples(self) -> list[dict]:
        """Of all data-parallel ranks, in the order of their tokens, from the last pipeline stage."""
        last = [0, 0, max(place[-1] for place, *_ in self._ranks)]
        found = [sample for place, samples, _ in self._ranks if place[1:] == last for sample in samples]
        return sorted(found, key=lambda sample: (sample["tokens"], sample["advantages"]))

    @property
    def grad_norm(self) -> float:
        """Of all ranks, which agree on it."""
        (norm,) = {float(arrays["grad_norm"]) for _, _, arrays in self._ranks}
        return norm

    def weights(self, when: str) -> dict[str, np.ndarray]:
        """Embedding and head [V, H], "before" or "after" the step."""
        ranks = sorted(self._ranks, key=lambda rank: rank[0][TENSOR_RANK])
        shards: dict[str, dict[int, np.ndarray]] = {"embedding": {}, "head": {}}
        for place, _, arrays in ranks:
            for name, found in shards.items():
                if (shard := arrays.get(f"{when}/{name}")) is not None:
                    found[place[TENSOR_RANK]] = shard
        return {name: np.concatenate(list(found.values())) for name, found in shards.items()}


Weigh = Callable[[Sequence[int]], Sequence[float]]  # the number of trained tokens of each sample → weight of a token


def token_mean(counts: Sequence[int]) -> list[float]:
    return [1 / sum(counts)] * len(counts)


def sample_mean(counts: Sequence[int]) -> list[float]:
    return [1 / (len(counts) * count) for count in counts]


def constant(divisor: float) -> Weigh:
    """Each sample's sum divided by the divisor, and their mean."""
    return lambda counts: [1 / (len(counts) * divisor)] * len(counts)


def loss_and_norm(
    step: Step,
    weigh: Weigh,
    *,
    low: float,
    high: float,
    cap: float = float("inf"),
    tis: float | None = None,
    logits: torch.dtype = torch.bfloat16,
) -> tuple[float, float]:
    """The loss of a step and the norm of its gradient. The model rounds its logits to this dtype.

    `-Σ w · min(max(min(r A, clip(r, 1 - low, 1 + high) A), cap A where A < 0)` with `r = exp(logprob - old)`; with
    `tis` each token is weighed by `min(exp(old - rollout), tis)`.
    """
    weights = {name: torch.tensor(w, dtype=torch.float64) for name, w in step.weights("before").items()}
    embedding, head = (weights[name].requires_grad_() for name in ("embedding", "head"))
    samples = step.samples
    masks = [torch.tensor(sample["mask"]) > 0 for sample in samples]
    token_weights = weigh([int(mask.sum()) for mask in masks])
    total = torch.zeros((), dtype=torch.float64)
    for sample, mask, weight in zip(samples, masks, token_weights, strict=True):
        old, rollout, advantages = (_row(sample[name], mask) for name in ("old", "rollout", "advantages"))
        ratio = (_logprobs(embedding, head, sample["tokens"], len(mask), logits) - old).exp()
        losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        losses = torch.where(advantages < 0, torch.minimum(losses, -cap * advantages), losses)
        if tis is not None:
            losses = losses * (old - rollout).exp().clamp(max=tis)
        total = total + weight * losses[mask].sum()
    total.backward()
    return total.item(), torch.cat([embedding.grad, head.grad]).norm().item()


def error_of_old(step: Step, before: Step) -> float:
    """Largest error of the old log-probabilities of a step, which those weights of `before` give without rounding."""
    embedding, head = (torch.tensor(before.weights("before")[name]).double() for name in ("embedding", "head"))
    errors = [
        _logprobs(embedding, head, sample["tokens"], len(sample["old"]), torch.float64) - torch.tensor(sample["old"])
        for sample in step.samples
    ]
    return torch.cat(errors).abs().max().item()


def _row(values: Sequence[float], mask: Tensor) -> Tensor:
    assert len(values) == len(mask)
    return torch.tensor(values, dtype=torch.float64)


def _logprobs(embedding: Tensor, head: Tensor, tokens: Sequence[int], num_response: int, dtype: torch.dtype) -> Tensor:
    """Of the response's tokens, each after the one before it."""
    ids = torch.tensor(tokens)
    logits = embedding[ids[:-1]] @ head.T
    logits = logits + (logits.detach().to(dtype).double() - logits.detach())
    logprobs = logits.log_softmax(-1)
    return logprobs.gather(1, ids[1:, None])[-num_response:, 0]


def pid_of(path: Path) -> int:
    """Of the process that wrote a recorded step; waits until the file is whole."""
    while True:
        try:
            return json.loads(path.read_text(encoding="utf-8"))["pid"]
        except json.JSONDecodeError:
            continue
