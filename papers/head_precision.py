"""FP16 against the mismatch (arXiv 2510.26788), fp32 heads (ScaleRL, arXiv 2510.13786; MiniMax-M1, arXiv 2506.13585).

    python papers/head_precision.py

The same weights score the same tokens twice, in the trainer and in the rollout engine, whose hidden states differ in
the last bit of some bfloat16 entries, as those of two implementations do. Before the first update every ratio should be
1. What the head rounds its logits to decides how far from 1 they are; the truth is the same pair of models in float64.
"""

from dataclasses import dataclass
from pathlib import Path

import show
import torch
from torch import Tensor

from megatron_pg.kernels import grpo_loss

CLIP_EPS = 0.01
JITTER = 2.5e-5  # relative difference of the hidden states before they are rounded to bfloat16
HEADS = {  # the log-probabilities that a head gives, from exact logits
    "float64": lambda logits, targets: logprobs(logits, targets),
    "float32": lambda logits, targets: logprobs(logits.float(), targets),
    "bfloat16 logits": lambda logits, targets: logprobs(logits.bfloat16(), targets),
    "bfloat16 log-probs": lambda logits, targets: logprobs(logits.bfloat16(), targets).bfloat16(),
}
PAIRS = (
    ("float64", "float64"),
    ("float32", "float32"),
    ("bfloat16 logits", "bfloat16 logits"),
    ("float32", "bfloat16 logits"),
    ("bfloat16 log-probs", "bfloat16 log-probs"),
)


@dataclass(frozen=True, slots=True)
class Row:
    """Ratios new/old at step 0."""

    trainer: str
    engine: str
    mean_abs_log_ratio: float
    ratio_spread: float  # standard deviation of r - 1
    clipped: float  # fraction outside 1 ± CLIP_EPS
    exactly_one: float


def logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """[T] log-probabilities as the package's loss computes them."""
    unused = torch.zeros(len(targets), dtype=torch.float64)
    mask = torch.ones(len(targets), dtype=torch.bool)
    out = grpo_loss(
        logits, targets, unused, unused, unused, mask=mask, clip_eps_low=0.2, clip_eps_high=0.2, impl="torch"
    )
    return out.logprobs


def two_models(tokens: int, vocabulary: int, hidden: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Float64 logits of the trainer and of the engine [T, V], and the tokens that the engine samples [T]."""
    generator = torch.Generator().manual_seed(seed)
    states = torch.randn(tokens, hidden, generator=generator, dtype=torch.float64)
    weight = 2.5 * torch.randn(hidden, vocabulary, generator=generator, dtype=torch.float64) / hidden**0.5
    weight = weight.bfloat16().double()
    noise = (1 + JITTER * torch.randn(states.shape, generator=generator, dtype=torch.float64) for _ in range(2))
    trainer, engine = ((states * factor).bfloat16().double() @ weight for factor in noise)
    targets = torch.multinomial(engine.softmax(dim=1), 1, generator=generator)[:, 0]
    return trainer, engine, targets


def describe(trainer: str, engine: str, log_ratios: Tensor) -> Row:
    """The figures of one pair of heads."""
    excess = log_ratios.expm1()
    return Row(
        trainer,
        engine,
        float(log_ratios.abs().mean()),
        float(excess.std()),
        float((excess.abs() > CLIP_EPS).double().mean()),
        float((excess == 0).double().mean()),
    )


def measure(tokens: int, vocabulary: int = 4096, hidden: int = 512) -> list[Row]:
    """Every pair of heads that matters; float64 is the truth."""
    new, old, targets = two_models(tokens, vocabulary, hidden)
    rows = []
    for trainer, engine in PAIRS:
        log_ratios = HEADS[trainer](new, targets).double() - HEADS[engine](old, targets).double()
        rows.append(describe(trainer, engine, log_ratios))
    return rows


def draw(rows: list[Row], folder: Path) -> None:
    """Spread and clip fraction of each pair."""
    figure, (left, right) = show.panels(2)
    names = [f"trainer: {row.trainer}\nengine: {row.engine}" for row in rows]
    colors = ["#222222", "#1e8449", "#b9770e", "#c0392b", "#c0392b"]
    left.barh(names, [row.ratio_spread for row in rows], color=colors)
    left.set(xlabel="standard deviation of the first step's ratio")
    right.barh(names, [100 * row.clipped for row in rows], color=colors)
    right.set(xlabel=f"% of tokens clipped at ε = {CLIP_EPS:g}", yticklabels=[])
    for ax in (left, right):
        ax.invert_yaxis()
        ax.tick_params(axis="y", labelsize=8)
    show.save(figure, folder, "head_precision.png")


def main(folder: Path = show.PICTURES, tokens: int = 4096) -> None:
    """Print the table and draw."""
    rows = measure(tokens)
    show.table(
        (
            f"Ratios before the first update: {tokens} tokens, two models that differ in the last bits of some hidden "
            "states"
        ),
        ("trainer's head", "engine's head", "mean |log r|", "std(r - 1)", f"clipped at {CLIP_EPS:g}", "r is exactly 1"),
        [
            (
                row.trainer,
                row.engine,
                f"{row.mean_abs_log_ratio:.1e}",
                f"{row.ratio_spread:.1e}",
                f"{row.clipped:.2%}",
                f"{row.exactly_one:.1%}",
            )
            for row in rows
        ],
    )
    draw(rows, folder)


if __name__ == "__main__":
    main()
