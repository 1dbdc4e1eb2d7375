"""Rows as NeMo-RL's driver has them, and every gradient and metric of a step over them, by the oracle in float64."""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import metric_oracle
import numpy as np
import step_oracle
import torch
from host_cases import through_head
from step_oracle import Document, Settings, StepResult, Term
from torch import Tensor

VOCABULARY, WIDTH = 14, 20  # columns of the logits, and of the rows
LENGTHS = [1, 7, 2, 9, 5, 3, 8, 1, 6, 4, 6, 2, 3, 7, 5, 4]  # of the responses
PER_PROMPT, LEFT_OUT = 4, 6  # rows of a prompt; a row whose sample mask is 0
LOW, HIGH, CAP, DIVISOR, BETA = 0.2, 0.28, 1.28, 4096.0, 0.05
TIS_LOW, TIS_HIGH = 0.6, 1.6
VALUES = ("advantages", "prev_logprobs", "generation_logprobs", "reference_policy_logprobs")  # of tokens
# NeMo-RL's options: of a truncated correction, and of a loss without a KL penalty
TIS = {"use_importance_sampling_correction": True, "truncated_importance_sampling_type": "tis"}
TIS |= {"truncated_importance_sampling_ratio": TIS_HIGH, "truncated_importance_sampling_ratio_min": TIS_LOW}
PLAIN = {"ratio_clip_min": LOW, "ratio_clip_max": HIGH, "reference_policy_kl_penalty": 0.0}


def batch() -> dict[str, Tensor]:
    """Padded rows, four of each prompt; a token's values stand at its own position."""
    rng, rows = random.Random(5), len(LENGTHS)
    found = {name: torch.zeros(rows, WIDTH) for name in ("token_mask", *VALUES)} | {
        "input_ids": torch.zeros(rows, WIDTH, dtype=torch.int64),
        "input_lengths": torch.zeros(rows, dtype=torch.int64),
        "sample_mask": torch.ones(rows),
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
    return found | {name: torch.where(trained, found[name], torch.nan) for name in VALUES}


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
        values = {name: found[name][i].double().tolist() for name in VALUES}
        is_counted = float(found["sample_mask"][i]) != 0
        rows.append(Row(tokens, trained if is_counted else [], is_counted, values, tuple(tokens[: trained[0]])))
    return rows


@dataclass(frozen=True)
class Case:
    """A loss."""

    mode: str  # of the aggregation
    objective: str = "grpo"
    tis: bool = False
    kl: str | None = None  # estimator
    kl_mode: str = "sample_mean"
    on_policy: bool = False  # the old log-probabilities are the current ones

    @property
    def settings(self) -> Settings:
        """Every row is its own rollout."""
        kl = [Term("kl", "kl", BETA, self.kl_mode, on="rl", estimator=self.kl)] if self.kl else []
        return Settings(
            objective=self.objective,
            numbers={"clip_eps_low": LOW, "clip_eps_high": HIGH, "cap": CAP},
            aggregation=self.mode,
            divisor=DIVISOR,
            correction="tis" if self.tis else "none",
            correction_low=TIS_LOW,
            correction_high=TIS_HIGH,
            terms=kl,
        )


class Found(NamedTuple):
    """A step's gradients and metrics."""

    gradients: list[Tensor]
    metrics: dict[str, float]


def oracle(parameters: Sequence[Tensor], rows: Sequence[Row], case: Case) -> Found:
    """Of the rows that the sample mask counts, through a model of an embedding and a head."""
    embedding, head = (p.detach().double().numpy() for p in parameters)
    counted = [row for row in rows if row.is_counted]
    documents = [_document(row, embedding, head, on_policy=case.on_policy) for row in counted]
    result = step_oracle.run(documents, case.settings)
    gradients = through_head([row.tokens[:-1] for row in counted], result.gradients, embedding, head)
    return Found(gradients, _metrics(documents, case, result))


def _document(row: Row, embedding: np.ndarray, head: np.ndarray, *, on_policy: bool) -> Document:
    """All tokens but the first, of which some are trained."""
    logits, targets = embedding[row.tokens[:-1]] @ head.T, np.array(row.tokens[1:])
    values = dict(row.values)
    if on_policy:
        own = logits[range(len(targets)), targets] - np.log(np.exp(logits).sum(axis=1))
        values["prev_logprobs"] = [0.0, *own]
    fields = dict(zip(("advantages", "old", "rollout", "ref"), VALUES, strict=True))
    mask = np.zeros(len(row.tokens) - 1, dtype=bool)
    mask[np.array(row.trained, dtype=int) - 1] = True
    return Document(
        logits=logits,
        targets=targets,
        mask=mask,
        **{short: np.array(values[name][1 : len(row.tokens)]) for short, name in fields.items()},
        prompt_id=row.prompt,
    )


def _metrics(documents: Sequence[Document], case: Case, result: StepResult) -> dict[str, float]:
    """Ours, and those of NeMo-RL, which are means over tokens."""
    found = metric_oracle.policy_tokens(documents, 1.0)
    new, old, rollout = (np.concatenate([getattr(own, name) for own in found]) for name in ("new", "old", "rollout"))
    ratios = np.exp(new - old)
    policy = result.terms["rl"]
    means = [float(own.mean()) for own in policy.factors if own is not None]
    kl = result.terms["kl"].loss if case.kl else 0.0
    of_tokens = {
        "probs_ratio": ratios,
        "token_mult_prob_error": np.exp(np.abs(rollout - old)),
        "gen_kl_error": np.exp(old - rollout) - 1 - old + rollout,
        "policy_kl_error": np.exp(rollout - old) - 1 - rollout + old,
        "sampling_importance_ratio": np.exp(old - rollout),
        "approx_entropy": -np.exp(new - rollout) * new,
        "js_divergence_error": _js(old, rollout),
    }
    return {
        **metric_oracle.token_metrics(documents, case.settings),
        **{name: float(values.mean()) for name, values in of_tokens.items()},
        "correction_factor": sum(means) / len(means),
        "pg_loss": policy.loss,
        "kl_loss": kl,
        "loss": policy.loss + BETA * kl,
        "probs_ratio_min": float(ratios.min()),
        "probs_ratio_max": float(ratios.max()),
        "num_valid_samples": float(len(documents)),
    }


def _js(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    mixture = np.log(0.5 * np.exp(p) + 0.5 * np.exp(q))
    return 0.5 * sum(np.exp(x - mixture) - (x - mixture) - 1 for x in (p, q))
