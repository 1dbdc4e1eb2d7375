"""docs/design.md: the factor at each arrow between S and the gradient, under both loss scalings.

PYTHONPATH=papers python docs/pictures/dataflow.py
"""

from pathlib import Path

import show
import torch

from megatron_pg.step.loss_scaling import LossScaling

D, C, K = 2, 2, 4
Q = K * D * C
END = "gradient\nof ΣS"


def stations(*, per_token: bool) -> list[tuple[str, float]]:
    """Where S passes, and the factor that it carries from there on."""
    scaling = LossScaling(per_token=per_token, num_microbatches=K, data_parallel_size=D, context_parallel_size=C)
    returned = float(scaling.outputs(torch.ones((), dtype=torch.float64))[0])
    if per_token:
        return [
            ("S = Σ w·ℓ\nof a micro-batch\non one rank", 1.0),
            ("loss_func returns\n(Q·S, 1, report)", returned),
            ("schedule\nleaves it", returned),
            ("DDP\nsums over ranks", returned),
            ("finalize\n÷ Q = K·D·C", returned / Q),
        ]
    return [
        ("S = Σ w·ℓ\nof a micro-batch\non one rank", 1.0),
        ("loss_func returns\n(K·D·S, report)", returned),
        ("schedule\n× C ÷ K", returned * C / K),
        ("DDP ÷ (D·C),\nsums over ranks", returned * C / K / (D * C)),
        ("finalize\nleaves it", returned * C / K / (D * C)),
    ]


def main(folder: Path = show.PICTURES) -> None:
    """Draw both rows of stations."""
    figure, (ax,) = show.panels(1)
    figure.set_size_inches(11, 3.4)
    for row, per_token in enumerate((False, True)):
        steps = stations(per_token=per_token)
        height = -2.2 * row
        ax.text(-0.75, height + 0.95, f"--calculate-per-token-loss {'on' if per_token else 'off'}", fontsize=10)
        style = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3f7", "edgecolor": "#2471a3"}
        final = style | {"facecolor": "#e8f5ec", "edgecolor": "#1e8449"}
        boxes = [
            ax.text(2.6 * k, height, label, ha="center", va="center", fontsize=9, bbox=final if label == END else style)
            for k, label in enumerate([label for label, _ in steps] + [END])
        ]
        for k, (_, factor) in enumerate(steps):
            ends = {"patchA": boxes[k].get_bbox_patch(), "patchB": boxes[k + 1].get_bbox_patch()}
            arrow = {"arrowstyle": "->", "shrinkA": 2, "shrinkB": 2, **ends}
            ax.annotate("", (2.6 * (k + 1), height), (2.6 * k, height), arrowprops=arrow)
            ax.text(2.6 * k + 1.3, height + 0.18, f"× {factor:g}", ha="center", fontsize=9, color="#c0392b")
    text = f"red: the factor that S carries, with D = {D} data-parallel ranks, C = {C} context-parallel ranks, K = {K}"
    ax.text(-0.75, -3.35, f"{text} micro-batches", fontsize=9)
    ax.set(xlim=(-1.0, 13.9), ylim=(-3.6, 1.3))
    ax.axis("off")
    show.save(figure, folder, "dataflow.png")


if __name__ == "__main__":
    main()
