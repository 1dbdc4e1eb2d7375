"""Dr. GRPO (arXiv 2503.20783): 1/length makes responses longer, against the reward; a constant does not.

    python papers/length_bias.py

The policy stops with probability p after every token and is rewarded for 3 to 9 tokens. The gradient of the whole
distribution under an aggregation comes out of the package: one step with a response of every length, the advantage
times the length's probability, through `plan_step` and the loss. The truth is the derivative of the expected reward.
"""

from dataclasses import dataclass
from pathlib import Path

import geometric
import numpy as np
import show
import torch

from megatron_pg import plan_step
from megatron_pg.kernels import grpo_loss

STOP, GO = 0, 1


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients of the expected reward by the stop logit."""

    p: float
    truth: float
    constant: float
    sample_mean: float


def gradient(p: float, aggregation: str) -> float:
    """Expected gradient of the objective by the stop logit; `constant` with L = 1."""
    lengths = geometric.lengths_that_matter(p)
    plan = plan_step(lengths.tolist(), aggregation=aggregation, divisor=1.0 if aggregation == "constant" else None)
    expected = geometric.expected_reward(p)
    # the plan divides by N_r responses, each of which represents a share P(T) of the distribution
    advantages = plan.num_rollouts * geometric.probability(lengths, p) * (geometric.reward(lengths) - expected)
    return -_loss_gradient(p, lengths, advantages, plan.denominators)


def _loss_gradient(p: float, lengths: np.ndarray, advantages: np.ndarray, denominators: torch.Tensor) -> float:
    theta = torch.tensor(np.log(p / (1 - p)), dtype=torch.float64, requires_grad=True)
    repeats = torch.from_numpy(lengths)
    ends = repeats.cumsum(0) - 1
    targets = torch.full((int(repeats.sum()),), GO)
    targets[ends] = STOP
    logits = torch.stack([theta, torch.zeros_like(theta)]).expand(len(targets), 2)
    out = grpo_loss(
        logits,
        targets,
        logits.detach().log_softmax(dim=1).gather(1, targets[:, None])[:, 0],
        torch.from_numpy(advantages).repeat_interleave(repeats),
        (1 / denominators).repeat_interleave(repeats),
        clip_eps_low=0.2,
        clip_eps_high=0.2,
        impl="torch",
    )
    (gradient,) = torch.autograd.grad(out.loss, theta)
    return float(gradient)


def measure(probabilities: tuple[float, ...]) -> list[Row]:
    """The gradients at each stop probability."""
    return [
        Row(p, geometric.true_gradient(p), gradient(p, "constant"), gradient(p, "sample_mean")) for p in probabilities
    ]


def climb(aggregation: str, *, p: float, updates: int) -> list[float]:
    """Stop probabilities of a policy that follows its aggregation's gradient; per-sample gradients times 1/p, a
    length."""
    path = [p]
    for _ in range(updates):
        step = gradient(p, aggregation) * (1.0 if aggregation == "constant" else 1 / p)
        p = 1 / (1 + (1 - p) / p * np.exp(-step))
        path.append(p)
    return path


def draw(rows: list[Row], paths: dict[str, list[float]], folder: Path) -> None:
    """Gradients against the mean length, and the reward of policies that follow them."""
    figure, (left, right) = show.panels(2)
    lengths = [1 / row.p for row in rows]
    for name in ("truth", "constant", "sample_mean"):
        style = {"truth": "--", "constant": "-", "sample_mean": "-"}[name]
        left.plot(lengths, [getattr(row, name) for row in rows], style, color=show.COLORS[name], label=name)
    left.axhline(0, color="#999999", linewidth=0.8)
    left.set(
        xlabel="mean response length 1/p, tokens",
        ylabel="gradient of the stop logit",
        title="above 0: responses get shorter",
    )
    left.legend(frameon=False)
    for name, path in paths.items():
        right.plot([geometric.expected_reward(p) for p in path], color=show.COLORS[name], label=name)
        end = (len(path) - 1, geometric.expected_reward(path[-1]))
        right.annotate(f"length {1 / path[-1]:.1f}", end, (0, 5), textcoords="offset points", ha="right")
    right.set(
        xlabel="update", ylim=(0.33, 0.53), ylabel="expected reward", title=f"both start at length {1 / path[0]:.0f}"
    )
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(frameon=False)
    show.save(figure, folder, "length_bias.png")


def main(
    folder: Path = show.PICTURES,
    probabilities: tuple[float, ...] = (0.06, 0.08, 0.1, 0.125, 0.16, 0.2),
    updates: int = 20,
) -> None:
    """Print the table and draw."""
    rows = measure(probabilities)
    show.table(
        "Dr. GRPO: gradient of the expected reward by the stop logit (positive: shorter responses)",
        ("stop probability", "truth", "constant (L = 1)", "sample_mean", "sign of sample_mean"),
        [
            (
                f"{row.p:g}",
                *(f"{value:+.4f}" for value in (row.truth, row.constant, row.sample_mean)),
                "right" if row.sample_mean * row.truth > 0 else "WRONG",
            )
            for row in rows
        ],
    )
    paths = {name: climb(name, p=0.125, updates=updates) for name in ("constant", "sample_mean")}
    show.table(
        f"Policies that follow these gradients for {updates} updates from p = 0.125",
        ("aggregation", "mean length", "expected reward"),
        [
            (f"{name}, {when}", f"{1 / path[i]:.2f}", f"{geometric.expected_reward(path[i]):.4f}")
            for name, path in paths.items()
            for when, i in (("start", 0), ("end", -1))
        ],
    )
    draw(rows, paths, folder)


if __name__ == "__main__":
    main()
