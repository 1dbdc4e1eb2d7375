"""docs/design.md: the factor at each arrow between S and the gradient, under both contracts.

PYTHONPATH=papers python docs/pictures/dataflow.py
"""

from pathlib import Path

import show
import torch

from megatron_pg.step.loss_scaling import LossScaling

D, C, K = 2, 2, 4
Q = K * D * C


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
    figure.set_size_inches(10, 3.4)
    for row, per_token in enumerate((False, True)):
        steps = stations(per_token=per_token)
        height = -2.2 * row
        ax.text(-0.75, height + 0.95, f"--calculate-per-token-loss {'on' if per_token else 'off'}", fontsize=10)
        for k, (label, factor) in enumerate(steps):
            style = {"boxstyle": "round,pad=0.4", "facecolor": "#eef3f7", "edgecolor": "#2471a3"}
            ax.text(2.6 * k, height, label, ha="center", va="center", fontsize=9, bbox=style)
            if k < len(steps) - 1:
                ax.annotate("", (2.6 * k + 1.75, height), (2.6 * k + 0.95, height), arrowprops={"arrowstyle": "->"})
                ax.text(2.6 * k + 1.35, height + 0.3, f"× {factor:g}", ha="center", fontsize=9, color="#c0392b")
        ax.text(2.6 * 4 + 1.2, height, f"× {steps[-1][1]:g}\n= ΣS", va="center", fontsize=10, color="#1e8449")
    ax.text(-0.75, -3.35, f"factors for D = {D} data-parallel, C = {C} context-parallel ranks, K = {K}", fontsize=8)
    ax.set(xlim=(-1.0, 12.6), ylim=(-3.6, 1.3))
    ax.axis("off")
    show.save(figure, folder, "dataflow.png")


if __name__ == "__main__":
    main()
