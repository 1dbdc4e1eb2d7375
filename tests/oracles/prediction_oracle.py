"""Gradient of a step with multi-token prediction: sample by sample through the model, log-softmax in float64, plain
loops.

Written from the definition: depth d of N predicts response token k at d positions before the policy's own prediction of
it, where the sample has that position; its cross-entropies have the weight λ/(N n_d) each, n_d their number in the
step, or λ/N times what the aggregation over the tokens of that depth gives. With the policy as target, a token has
Σ_v p_v log(p_v / q_v) instead, with p what the policy itself predicts for that token, without gradient.
"""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

EPS_LOW, EPS_HIGH = 0.2, 0.28


def weights(samples: Sequence[Any], tokens: Sequence[int], aggregation: str, divisor: float | None) -> list[float]:
    """Of a token of each sample, when `tokens` of it count."""
    per_rollout, per_prompt = defaultdict(int), defaultdict(int)
    for sample, count in zip(samples, tokens, strict=True):
        per_rollout[sample.rollout_id] += count
        per_prompt[sample.prompt_id] += count
    found = []
    for sample, count in zip(samples, tokens, strict=True):
        denominator = {
            "token_mean": sum(tokens),
            "sample_mean": len(per_rollout) * per_rollout[sample.rollout_id],
            "prompt_mean": len(per_prompt) * per_prompt[sample.prompt_id],
            "constant": len(per_rollout) * (divisor or 0),
        }[aggregation]
        found.append(1 / denominator if count else 0.0)
    return found


def predicted(sample: Any, depth: int) -> list[tuple[int, int]]:
    """(position, token) of what a depth predicts of a sample's trained tokens; depth 0 is the policy itself."""
    prompt = len(sample.tokens) - sample.response_length
    at = [(prompt + k - 1 - depth, prompt + k) for k, trained in enumerate(sample.loss_mask.tolist()) if trained]
    return [(position, int(sample.tokens[token])) for position, token in at if position >= 0]


def backward(
    model: Any,
    samples: Sequence[Any],
    *,
    aggregation: str,
    divisor: float | None,
    depths: int,
    factor: float,
    own: bool,
    of_policy_target: bool = False,
) -> dict[str, float]:
    """Adds the step's gradient to every parameter of a GPTModel on one rank; the metrics of multi-token prediction."""
    total, mean, accepted, counted = torch.zeros((), dtype=torch.float64), 0.0, 0, 0
    of_policy = weights(samples, [len(predicted(s, 0)) for s in samples], aggregation, divisor)
    counts = [[len(predicted(sample, depth)) for sample in samples] for depth in range(1, depths + 1)]
    of_depth = [weights(samples, tokens, aggregation if own else "token_mean", divisor) for tokens in counts]
    for i, sample in enumerate(samples):
        logprobs = _logprobs(model, sample)
        prompt = len(sample.tokens) - sample.response_length
        for k, trained in enumerate(sample.loss_mask.tolist()):
            if trained:
                new = logprobs[-1][prompt + k - 1, int(sample.tokens[prompt + k])]
                ratio = (new - float(sample.old_logprobs[k])).exp()
                advantage = float(sample.advantages[k])
                clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
                total = total - of_policy[i] * torch.minimum(ratio * advantage, clipped * advantage)
        for depth in range(1, depths + 1):
            for position, token in predicted(sample, depth):
                row = logprobs[depth - 1][position]
                value = divergence(logprobs[-1][position + depth].detach(), row) if of_policy_target else -row[token]
                total = total + factor / depths * of_depth[depth - 1][i] * value
                mean += float(value.detach()) * of_depth[depth - 1][i] / depths
                accepted, counted = accepted + int(row.argmax() == token), counted + 1
    total.backward()
    return {"mtp_loss": mean, "mtp_acceptance": accepted / counted, "loss": float(total.detach())}


def divergence(log_p: Tensor, log_q: Tensor) -> Tensor:
    """Σ_v p_v log(p_v / q_v) of one row."""
    return (log_p.exp() * (log_p - log_q)).sum()


def _logprobs(model: Any, sample: Any) -> list[Tensor]:
    """[T, V] float64 of every depth, the policy's own last, from a forward over one sample."""
    seen: list[Tensor] = []

    def keep(labels: Tensor, logits: Tensor) -> Tensor:
        seen.append(logits[:, 0].double().log_softmax(-1))
        return torch.zeros(labels.shape)

    length = len(sample.tokens)
    model.compute_language_model_loss = keep
    tokens, positions = sample.tokens[None].clone(), torch.arange(length)[None]
    mask = torch.ones(1, 1, length, length).triu(1).bool()
    model(tokens, positions, mask, labels=torch.zeros_like(tokens), loss_mask=torch.zeros(1, length))
    return seen
