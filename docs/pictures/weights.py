"""docs/aggregation.md: what a short and a long answer weigh under each aggregation, out of plan_step.

PYTHONPATH=papers python docs/pictures/weights.py
"""

from pathlib import Path

import show

from megatron_pg import plan_step

LENGTHS = [10, 1000]
DIVISOR = 4096.0
CASES = {  # label: aggregation, prompt of each answer
    "sample_mean": ("sample_mean", ["p", "q"]),
    "prompt_mean\ntwo prompts": ("prompt_mean", ["p", "q"]),
    "prompt_mean\none prompt": ("prompt_mean", ["p", "p"]),
    "token_mean": ("token_mean", ["p", "q"]),
    "constant\nL = 4096": ("constant", ["p", "q"]),
}


def weights(aggregation: str, prompts: list[str]) -> list[float]:
    """Weight of one token of each answer."""
    divisor = DIVISOR if aggregation == "constant" else None
    return (1 / plan_step(LENGTHS, aggregation=aggregation, divisor=divisor, prompt_ids=prompts).denominators).tolist()


def shares(per_token: list[float]) -> list[float]:
    """Share of the step's weight that each whole answer has."""
    whole = [weight * length for weight, length in zip(per_token, LENGTHS, strict=True)]
    return [weight / sum(whole) for weight in whole]


def main(folder: Path = show.PICTURES) -> None:
    """Draw both answers, token by token and whole."""
    figure, (left, right) = show.panels(2)
    for k, case in enumerate(CASES.values()):
        per_token = weights(*case)
        for answer, (weight, share) in enumerate(zip(per_token, shares(per_token), strict=True)):
            color, alpha = show.COLORS[case[0]], 0.4 if answer == 0 else 1.0
            height = 2 * k + 0.8 * answer
            left.plot(weight, height, "o", color=color, alpha=alpha, markersize=8)  # a log axis has no 0 for bars
            left.text(weight * 1.3, height, f"{LENGTHS[answer]} tokens: {weight:.2g}", va="center", fontsize=8)
            right.barh(height, 100 * share, 0.75, color=color, alpha=alpha)
            right.text(100 * share + 1, height, f"{LENGTHS[answer]} tokens: {share:.0%}", va="center", fontsize=8)
    left.set_yticks([2 * k + 0.4 for k in range(len(CASES))], CASES, fontsize=8)
    left.set(xscale="log", xlim=(5e-5, 0.9), xlabel="weight of one token")
    left.grid(axis="x", alpha=0.3)
    right.set(xlim=(0, 135), xticks=range(0, 101, 20), yticks=[], xlabel="weight of the whole answer, % of the step")
    right.spines["bottom"].set_bounds(0, 100)
    for ax in (left, right):
        ax.invert_yaxis()
    show.save(figure, folder, "weights.png")


if __name__ == "__main__":
    main()
