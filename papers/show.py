"""Tables and pictures of the demonstrations."""

import os
from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

PICTURES = Path(__file__).parents[1] / "docs" / "pictures"
COLORS = {
    "truth": "#222222",
    "sample_mean": "#c0392b",
    "prompt_mean": "#2471a3",
    "token_mean": "#b9770e",
    "constant": "#1e8449",
}


def table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows of text under a header, in columns."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    print(f"\n{title}\n")
    for row in (header, ["-" * width for width in widths], *rows):
        print("  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))


def panels(count: int) -> tuple[Figure, list]:
    """A figure with so many panels side by side."""
    figure, axes = plt.subplots(1, count, figsize=(4.6 * count, 3.4), layout="constrained", squeeze=False)
    for ax in axes[0]:
        ax.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save(figure: Figure, folder: Path, name: str) -> None:
    """Write the picture and say where."""
    folder.mkdir(parents=True, exist_ok=True)
    figure.savefig(folder / name, dpi=100, metadata={"Software": None})
    plt.close(figure)
    print(f"\n  picture: {os.path.relpath(folder / name)}")
