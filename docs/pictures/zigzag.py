"""docs/parallelism.md: who holds which tokens of a sample under context parallelism.

PYTHONPATH=papers python docs/pictures/zigzag.py
"""

from pathlib import Path

import show

from megatron_pg.cp_utils import padded_length, response_index, zigzag_index

PROMPT, RESPONSE, RANKS = 3, 12, 2
MASK = [1, 1, 1, 1, 0, 0, 1, 1, 1, 1, 1, 1]  # a tool's output in the middle is not trained
COLORS = ["#2471a3", "#b9770e"]


def trained(rank: int) -> int:
    """Trained tokens of the sample that a rank holds."""
    mine = response_index(PROMPT + RESPONSE, RESPONSE, cp_rank=rank, cp_size=RANKS).tolist()
    return sum(MASK[k] for k in mine)


def kind(position: int) -> str:
    """What the logits of a position predict."""
    response = position + 1 - PROMPT
    if not 0 <= response < RESPONSE:
        return "·"
    return str(response) if MASK[response] else "×"


def main(folder: Path = show.PICTURES) -> None:
    """Draw the sample, and the ranks' parts of it."""
    figure, (ax,) = show.panels(1)
    figure.set_size_inches(9.2, 2.8)
    width = padded_length(PROMPT + RESPONSE, RANKS)
    held = [zigzag_index([width], cp_rank=rank, cp_size=RANKS).tolist() for rank in range(RANKS)]
    rows = {"sample": list(range(width))} | {f"rank {rank}": held[rank] for rank in range(RANKS)}
    for height, (name, positions) in enumerate(rows.items()):
        for column, position in enumerate(positions):
            owner = next(rank for rank in range(RANKS) if position in held[rank])
            is_used = kind(position) != "·"
            ax.barh(-height, 0.94, 0.7, left=column, color=COLORS[owner], alpha=0.85 if is_used else 0.35)
            color = "white" if is_used else "#222222"
            ax.text(column + 0.47, -height, kind(position), ha="center", va="center", color=color, fontsize=9)
        ax.text(-0.3, -height, name, ha="right", va="center", color=COLORS[height - 1] if height else "#222222")
        if height:
            text = f"{trained(height - 1)} of M = {sum(MASK)} trained tokens; divides by M"
            ax.text(len(positions) + 0.3, -height, text, va="center", fontsize=9)
    size = width / (2 * RANKS)
    for chunk in range(2 * RANKS):
        owner = min(chunk, 2 * RANKS - 1 - chunk)
        ax.text((chunk + 0.5) * size, 0.5, f"chunk {chunk}: rank {owner}", ha="center", color=COLORS[owner], fontsize=9)
        if chunk:
            ax.vlines(chunk * size - 0.03, -0.4, 0.75, color="#222222", linewidth=1)
    ax.set(xlim=(-1.6, width + 0.4), ylim=(-len(rows) + 0.4, 0.85))
    ax.axis("off")
    show.save(figure, folder, "zigzag.png")


if __name__ == "__main__":
    main()
