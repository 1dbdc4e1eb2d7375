"""DAPO (arXiv 2503.14476) as printed: `prompt_mean`, whose bias fades with the group size; zero-variance groups dilute.

    python papers/group_size.py

The policy of length_bias.py at p = 1/8. `prompt_mean` divides by the tokens of the group, which a response is part of,
so its gradient is that of a ratio. Groups are drawn, `plan_step` weighs them, and the expectation is also summed
exactly. `constant` with a group-mean baseline is RLOO times (1 - 1/G) (Dr. GRPO, arXiv 2503.20783, and RLOO, arXiv
2402.14740).
"""

from dataclasses import dataclass
from math import lgamma
from pathlib import Path

import geometric
import numpy as np
import show

from megatron_pg import plan_step

P = 0.125
GROUP_SIZES = (2, 4, 8, 16, 64)


@dataclass(frozen=True, slots=True)
class Row:
    """Gradients by the stop logit, in units of the true one's: prompt_mean times the mean length, constant at L = 1."""

    group_size: int
    constant: float  # drawn
    constant_error: float  # standard error
    prompt_mean: float
    prompt_mean_error: float
    prompt_mean_exact: float


def drawn(aggregation: str, lengths: np.ndarray) -> tuple[float, float]:
    """Mean gradient and its standard error from groups of responses [groups, G], all of them one step."""
    groups, size = lengths.shape
    plan = plan_step(
        lengths.ravel(),
        aggregation=aggregation,
        divisor=1.0 if aggregation == "constant" else None,
        prompt_ids=np.repeat(np.arange(groups), size).tolist(),
    )
    rewards = geometric.reward(lengths)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    weights = 1 / plan.denominators.numpy().reshape(lengths.shape)
    scale = 1.0 if aggregation == "constant" else 1 / P  # a mean over tokens, so times the mean length
    per_group = scale * groups * (weights * advantages * geometric.score(lengths, P)).sum(axis=1)
    return float(per_group.mean()), float(per_group.std() / groups**0.5)


def prompt_mean_exact(size: int) -> float:
    """E[sum A_i s_i / sum T_i] / p: over one response's length t and the sum u of the other G - 1."""
    t = geometric.lengths_that_matter(P)
    u = np.arange(size - 1, size - 1 + 60 * size + 400)
    others = np.exp([_log_choose(x - 1, size - 2) + (size - 1) * np.log(P) + (x - size + 1) * np.log(1 - P) for x in u])
    baseline = [sum(_share(size, length, x) for length in range(geometric.SHORTEST, geometric.LONGEST + 1)) for x in u]
    terms = (geometric.reward(t)[:, None] - np.array(baseline)) * geometric.score(t, P)[:, None] / (t[:, None] + u)
    return float((size - 1) * (geometric.probability(t, P)[:, None] * others * terms).sum() / P)


def _share(size: int, length: int, total: int) -> float:
    """P(one of G - 1 responses has this length, given the sum of their lengths): the ways to write the rest as a
    sum."""
    rest = total - length
    if size == 2:
        return float(rest == 0)
    if rest < size - 2:
        return 0.0
    return float(np.exp(_log_choose(rest - 1, size - 3) - _log_choose(total - 1, size - 2)))


def _log_choose(n: int, k: int) -> float:
    return lgamma(n + 1) - lgamma(k + 1) - lgamma(n - k + 1)


def measure(responses: int, seed: int = 0) -> list[Row]:
    """The gradients at each group size, from so many responses each."""
    rng = np.random.default_rng(seed)
    rows = []
    for size in GROUP_SIZES:
        lengths = rng.geometric(P, (responses // size, size))
        rows.append(Row(size, *drawn("constant", lengths), *drawn("prompt_mean", lengths), prompt_mean_exact(size)))
    return rows


def dilution(prompts: int, without_signal: int, size: int = 8) -> float:
    """Size of a step's gradient relative to the same step without the groups whose advantages are all 0."""
    tokens = [10] * size * prompts
    ids = np.repeat(np.arange(prompts), size).tolist()
    kept = size * (prompts - without_signal)
    whole = plan_step(tokens, aggregation="prompt_mean", prompt_ids=ids)
    filtered = plan_step(tokens[:kept], aggregation="prompt_mean", prompt_ids=ids[:kept])
    return float(filtered.denominators[0] / whole.denominators[0])


def draw(rows: list[Row], folder: Path) -> None:
    """Gradients against the group size."""
    truth = geometric.true_gradient(P)
    figure, (ax,) = show.panels(1)
    sizes = [row.group_size for row in rows]
    ax.axhline(truth, color=show.COLORS["truth"], linestyle="--", label="truth")
    ax.plot(
        sizes, [truth * (1 - 1 / g) for g in sizes], color=show.COLORS["constant"], label="constant: truth · (1 − 1/G)"
    )
    ax.plot(
        sizes, [row.prompt_mean_exact for row in rows], color=show.COLORS["prompt_mean"], label="prompt_mean, exact"
    )
    for name in ("constant", "prompt_mean"):
        means, errors = ([getattr(row, name + end) for row in rows] for end in ("", "_error"))
        ax.errorbar(sizes, means, 2 * np.array(errors), fmt="o", color=show.COLORS[name], markersize=4, capsize=3)
    ax.set(xscale="log", xlabel="group size G", ylabel="gradient of the stop logit", ylim=(0, None))
    ax.set_xticks(sizes, [str(g) for g in sizes], minor=False)
    ax.minorticks_off()
    ax.legend(frameon=False, loc="lower right")
    show.save(figure, folder, "group_size.png")


def main(folder: Path = show.PICTURES, responses: int = 400_000) -> None:
    """Print the table and draw."""
    rows, truth = measure(responses), geometric.true_gradient(P)
    show.table(
        f"Group-mean baseline: gradient by the stop logit, truth {truth:+.4f}; prompt_mean times the mean length",
        ("G", "constant", "... x G/(G-1)", "prompt_mean", "prompt_mean, exact", "of the truth"),
        [
            (
                str(row.group_size),
                f"{row.constant:+.4f} ± {row.constant_error:.4f}",
                f"{row.constant * row.group_size / (row.group_size - 1):+.4f}",
                f"{row.prompt_mean:+.4f} ± {row.prompt_mean_error:.4f}",
                f"{row.prompt_mean_exact:+.4f}",
                f"{row.prompt_mean_exact / truth:.0%}",
            )
            for row in rows
        ],
    )
    show.table(
        "ScaleRL (arXiv 2510.13786): groups whose rewards are all equal still count in P",
        ("prompts", "without signal", "the gradient is scaled by"),
        [("64", "6", f"{dilution(64, 6):.3f}")],
    )
    draw(rows, folder)


if __name__ == "__main__":
    main()
