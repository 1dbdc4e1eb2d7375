"""Rows as NeMo-RL's driver has them, and every gradient and metric of a step over them, by plain loops in float64."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

VOCABULARY, WIDTH = 14, 20  # columns of the logits, and of the rows
LENGTHS = [1, 7, 2, 9, 5, 3, 8, 1, 6, 4, 6, 2, 3, 7, 5, 4]  # of the responses
PER_PROMPT, LEFT_OUT = 4, 6  # rows of a prompt; a row whose sample mask is 0
LOW, HIGH, CAP, DIVISOR, BETA = 0.2, 0.28, 1.28, 4096.0, 0.05
TIS_LOW, TIS_HIGH = 0.6, 1.6


def batch() -> dict[str, Tensor]:
    """Padded rows, four of each prompt; a token's values stand at its own position."""
    rng, rows = random.Random(5), len(LENGTHS)
    found = {
        "input_ids": torch.zeros(rows, WIDTH, dtype=torch.int64),
        "input_lengths": torch.zeros(rows, dtype=torch.int64),
        "sample_mask": torch.ones(rows),
        **{
            name: torch.zeros(rows, WIDTH)
            for name in (
                "token_mask",
                "advantages",
                "prev_logprobs",
                "generation_logprobs",
                "reference_policy_logprobs",
            )
        },
    }
    found["sample_mask"][LEFT_OUT] = 0.0
    for i, length in enumerate(LENGTHS):
        if i % PER_PROMPT == 0:
            prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(1, 6))]
        start = len(prompt)
        end = start + length
        found["input_ids"][i, :end] = torch.tensor(prompt + [rng.randrange(VOCABULARY) for _ in range(length)])
        found["input_lengths"][i] = end
        found["advantages"][i] = rng.uniform(-1.0, 1.0)
        for k in range(length):
            t = start + k
            found["token_mask"][i, t] = float(k == 0 or rng.random() < 0.7)
            old = rng.uniform(-3.2, -1.8)
            found["prev_logprobs"][i, t] = old
            found["generation_logprobs"][i, t] = old + rng.uniform(-0.8, 0.8)
            found["reference_policy_logprobs"][i, t] = old + rng.uniform(-0.5, 0.5)
    return found


def with_holes(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """With NaN where no token is trained, which must reach nothing."""
    trained = (found["token_mask"] * found["sample_mask"][:, None]).bool()
    names = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
    return found | {name: torch.where(trained, found[name], torch.nan) for name in names}


class Row(NamedTuple):
    """A row in Python's own numbers."""

    tokens: list[int]
    trained: list[int]  # positions of trained tokens
    is_counted: bool
    values: dict[str, list[float]]
    prompt: tuple[int, ...]


def rows_of(found: dict[str, Tensor], first: int, last: int) -> list[Row]:
    rows = []
    for i in range(first, last):
        length = int(found["input_lengths"][i])
        tokens, mask = found["input_ids"][i, :length].tolist(), found["token_mask"][i].tolist()
        trained = [t for t in range(1, length) if mask[t]]
        values = {
            name: found[name][i].double().tolist()
            for name in ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")
        }
        is_counted = float(found["sample_mask"][i]) != 0
        rows.append(Row(tokens, trained if is_counted else [], is_counted, values, tuple(tokens[: trained[0]])))
    return rows


def denominators(mode: str, rows: Sequence[Row]) -> list[float]:
    """What a row's trained token is divided by; rows that the sample mask leaves out are nobody."""
    n = sum(row.is_counted for row in rows)
    total = sum(len(row.trained) for row in rows)
    prompts = {row.prompt for row in rows if row.is_counted}
    of_prompt = {prompt: sum(len(row.trained) for row in rows if row.prompt == prompt) for prompt in prompts}
    per_row = {
        "sample_mean": lambda row: n * len(row.trained),
        "token_mean": lambda row: total,
        "constant": lambda row: n * DIVISOR,
        "prompt_mean": lambda row: len(prompts) * of_prompt[row.prompt],
    }[mode]
    return [float(per_row(row)) if row.is_counted else math.inf for row in rows]


@dataclass(frozen=True)
class Case:
    """A loss."""

    mode: str  # of the aggregation
    objective: str = "grpo"
    tis: bool = False
    kl: Callable[[Tensor], Tensor] | None = None  # of log π - log π_ref
    kl_mode: str = "sample_mean"


def k3(x: Tensor) -> Tensor:
    return (-x).exp() - 1 + x


class Found(NamedTuple):
    """A step's gradients and metrics."""

    gradients: list[Tensor]
    metrics: dict[str, float]


def token_loss(case: Case, logprob: Tensor, old: float, advantage: float) -> Tensor:
    ratio = (logprob - old).exp()
    if case.objective == "cispo":
        return -ratio.detach().clamp(1 - LOW, CAP) * advantage * logprob
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)


def oracle(parameters: Sequence[Tensor], rows: Sequence[Row], case: Case) -> Found:
    """Of sum over rows i and trained tokens t of κ_it · loss_it / d_i, and of β times the sum of kl_it / d'_i."""
    embedding, head = (p.detach().double().requires_grad_() for p in parameters)
    policy = penalty = torch.zeros((), dtype=torch.float64)
    sums: dict[str, float] = {}
    for row, d, u in zip(rows, denominators(case.mode, rows), denominators(case.kl_mode, rows), strict=True):
        if not row.trained:
            continue
        logits = {t: head @ embedding[row.tokens[t - 1]] for t in row.trained}
        logprobs = {t: logits[t][row.tokens[t]] - logits[t].logsumexp(0) for t in row.trained}
        old, rollout = row.values["prev_logprobs"], row.values["generation_logprobs"]
        factors = dict.fromkeys(row.trained, 1.0)
        if case.tis:
            factors = {t: min(max(math.exp(old[t] - rollout[t]), TIS_LOW), TIS_HIGH) for t in row.trained}
        if case.objective == "gspo":
            mean = sum(logprobs[t] - old[t] for t in row.trained) / len(row.trained)
            advantage = sum(row.values["advantages"][t] for t in row.trained) / len(row.trained)
            losses = dict.fromkeys(row.trained, token_loss(case, mean, 0.0, advantage))
        else:
            losses = {t: token_loss(case, logprobs[t], old[t], row.values["advantages"][t]) for t in row.trained}
        policy = policy + sum(factors[t] * losses[t] / d for t in row.trained)
        if case.kl:
            reference = row.values["reference_policy_logprobs"]
            penalty = penalty + sum(case.kl(logprobs[t] - reference[t]) / u for t in row.trained)
        _add(sums, row, {t: float(logprobs[t].detach()) for t in row.trained}, factors)
    total = policy + BETA * penalty
    return Found(
        list(torch.autograd.grad(total, (embedding, head))),
        _metrics(sums, rows, float(policy.detach()), float(penalty.detach())),
    )


def _add(sums: dict[str, float], row: Row, logprobs: dict[int, float], factors: dict[int, float]) -> None:
    """A row's mean of what is measured per token, and its sums over tokens."""
    n, old = len(row.trained), row.values["prev_logprobs"]
    rollout = row.values["generation_logprobs"]
    log_ratios = {t: logprobs[t] - old[t] for t in row.trained}
    per_token = {
        "new_logprobs": logprobs,
        "old_logprobs": {t: old[t] for t in row.trained},
        "ratio_new_old": {t: math.exp(d) for t, d in log_ratios.items()},
        "mean_abs_log_ratio": {t: abs(d) for t, d in log_ratios.items()},
        "kl_new_old": {t: math.exp(d) - 1 - d for t, d in log_ratios.items()},
        "advantage": {t: row.values["advantages"][t] for t in row.trained},
        "correction_factor": factors,
    }
    of_tokens = {
        "probs_ratio": sum(math.exp(d) for d in log_ratios.values()),
        "token_mult_prob_error": sum(math.exp(abs(rollout[t] - old[t])) for t in row.trained),
        "gen_kl_error": sum(math.exp(old[t] - rollout[t]) - 1 - old[t] + rollout[t] for t in row.trained),
        "policy_kl_error": sum(math.exp(rollout[t] - old[t]) - 1 - rollout[t] + old[t] for t in row.trained),
        "sampling_importance_ratio": sum(math.exp(old[t] - rollout[t]) for t in row.trained),
        "approx_entropy": -sum(math.exp(logprobs[t] - rollout[t]) * logprobs[t] for t in row.trained),
        "js_divergence_error": sum(_js(old[t], rollout[t]) for t in row.trained),
    }
    for name, values in per_token.items():
        sums[f"mean {name}"] = sums.get(f"mean {name}", 0.0) + sum(values.values()) / n
    for name, value in of_tokens.items():
        sums[name] = sums.get(name, 0.0) + value
    ratios = [math.exp(d) for d in log_ratios.values()]
    sums["probs_ratio_min"] = min(sums.get("probs_ratio_min", math.inf), *ratios)
    sums["probs_ratio_max"] = max(sums.get("probs_ratio_max", -math.inf), *ratios)


def _js(p: float, q: float) -> float:
    mixture = math.log(0.5 * math.exp(p) + 0.5 * math.exp(q))
    return 0.5 * sum(math.exp(x - mixture) - (x - mixture) - 1 for x in (p, q))


def _metrics(sums: dict[str, float], rows: Sequence[Row], policy: float, penalty: float) -> dict[str, float]:
    documents, tokens = sum(bool(row.trained) for row in rows), sum(len(row.trained) for row in rows)
    found = {"pg_loss": policy, "kl_loss": penalty, "loss": policy + BETA * penalty}
    for name, value in sums.items():
        if name.startswith("mean "):
            found[name.removeprefix("mean ")] = value / documents
        elif name.startswith("probs_ratio_m"):
            found[name] = value
        else:
            found[name] = value / tokens
    return found | {"num_valid_samples": float(sum(row.is_counted for row in rows)), "num_tokens": float(tokens)}
