"""An unbiased value of KL(policy || reference) does not make a right gradient.

    python papers/kl_gradients.py

Sources: A Comedy of Estimators (arXiv 2512.21852), On a few pitfalls in KL divergence gradient estimation for RL (arXiv
2506.09477), DeepSeek-V3.2 (arXiv 2512.02556), which weights k3 by the ratio. With a vocabulary of four tokens every
expectation is a sum: an estimator's expected gradient is compared with the gradient of the divergence itself.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import show
import torch
from torch import Tensor

POLICY = (1.0, 0.0, -1.0, 0.5)  # logits
REFERENCE = (0.0, 0.5, 0.0, -0.5)
SAMPLER = (0.6, 0.2, -0.6, 0.4)  # an older policy that the tokens come from
ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {  # of x = log policy - log reference of the sampled token
    "k1": lambda x: x,
    "k2": lambda x: x.square() / 2,
    "k3": lambda x: torch.expm1(-x) + x,
    "abs": lambda x: x.abs(),
}


@dataclass(frozen=True, slots=True)
class Row:
    """Bias of the value, and distance of the expected gradient from the true one, in nats."""

    kind: str
    value_bias: float
    plain: float  # samples of the policy itself, gradient of the value
    weighted: float  # times exp(l - sg[l])
    plain_off_policy: float  # samples of an older policy, uncorrected
    weighted_off_policy: float  # times the ratio r


def divergence(policy: Tensor, reference: Tensor) -> Tensor:
    """KL(policy || reference) of two logit vectors."""
    log_policy, log_reference = policy.log_softmax(dim=0), reference.log_softmax(dim=0)
    return (log_policy.exp() * (log_policy - log_reference)).sum()


def expected_gradient(kind: str, sampler: Tensor, *, weighted: bool) -> Tensor:
    """Gradient by the policy's logits of the estimator, averaged over the sampler's tokens."""
    z = torch.tensor(POLICY, dtype=torch.float64, requires_grad=True)
    reference = torch.tensor(REFERENCE, dtype=torch.float64).log_softmax(dim=0)
    new, old = z.log_softmax(dim=0), sampler.log_softmax(dim=0)
    per_token = ESTIMATORS[kind](new - reference)
    if weighted:
        per_token = (new - old).exp() * per_token
    (gradient,) = torch.autograd.grad((old.exp() * per_token).sum(), z)
    return gradient


def true_gradient() -> Tensor:
    """dKL / dz_j = p_j (x_j - KL), with x the log-ratio of policy and reference."""
    z, f = torch.tensor(POLICY, dtype=torch.float64), torch.tensor(REFERENCE, dtype=torch.float64)
    x = z.log_softmax(dim=0) - f.log_softmax(dim=0)
    return z.softmax(dim=0) * (x - divergence(z, f))


def measure() -> list[Row]:
    """Every estimator, by enumeration."""
    policy, reference, sampler = (torch.tensor(v, dtype=torch.float64) for v in (POLICY, REFERENCE, SAMPLER))
    x, truth = policy.log_softmax(dim=0) - reference.log_softmax(dim=0), true_gradient()

    def distance(kind: str, source: Tensor, *, weighted: bool) -> float:
        return float((expected_gradient(kind, source, weighted=weighted) - truth).norm())

    return [
        Row(
            kind,
            float((policy.softmax(dim=0) * ESTIMATORS[kind](x)).sum() - divergence(policy, reference)),
            distance(kind, policy, weighted=False),
            distance(kind, policy, weighted=True),
            distance(kind, sampler, weighted=False),
            distance(kind, sampler, weighted=True),
        )
        for kind in ESTIMATORS
    ]


LABELS = {
    "plain": "plain, on-policy",
    "weighted": "weighted, on-policy",
    "plain_off_policy": "plain, off-policy",
    "weighted_off_policy": "weighted, off-policy",
}


def draw(rows: list[Row], folder: Path) -> None:
    """Errors of the expected gradients relative to the size of the true one."""
    figure, (ax,) = show.panels(1)
    columns = {
        "plain": "#c0392b",
        "weighted": "#1e8449",
        "plain_off_policy": "#e6a49c",
        "weighted_off_policy": "#9ad0af",
    }
    for k, (name, color) in enumerate(columns.items()):
        places = np.arange(len(rows)) + 0.2 * (k - 1.5)
        ax.bar(places, [getattr(row, name) for row in rows], 0.18, color=color, label=LABELS[name])
    ax.axhline(float(true_gradient().norm()), color=show.COLORS["truth"], linestyle="--", linewidth=1)
    ax.text(3.45, float(true_gradient().norm()), "size of the true gradient", ha="right", va="bottom", fontsize=8)
    ax.set_xticks(range(len(rows)), [row.kind for row in rows])
    ax.set(ylabel="|E[gradient] − ∇KL|; no bar: 0")
    ax.legend(frameon=False, fontsize=8)
    show.save(figure, folder, "kl_gradients.png")


def main(folder: Path = show.PICTURES) -> None:
    """Print the table and draw."""
    rows = measure()
    show.table(
        f"|E[gradient] - grad KL|, by enumeration; the true gradient has norm {float(true_gradient().norm()):.4f}",
        ("estimator", "bias of the value", "plain", "weighted", "plain, off-policy", "weighted, off-policy"),
        [
            (
                row.kind,
                f"{round(row.value_bias, 4) + 0.0:+.4f}",
                *(f"{value:.4f}" for value in (row.plain, row.weighted, row.plain_off_policy, row.weighted_off_policy)),
            )
            for row in rows
        ],
    )
    draw(rows, folder)


if __name__ == "__main__":
    main()
