"""Causes that spread d randomly: rounding of logits, and dropout in the trainer."""

import numpy as np

from megatron_pg.mismatch.causes import Answer, cannot_tell, decided
from megatron_pg.mismatch.gap import Floats, Gap
from megatron_pg.mismatch.inference import mean_over, p_above
from megatron_pg.mismatch.noise import bins_of, noise_of
from megatron_pg.mismatch.repeats import BY_CHANCE, OF_WEIGHTS, Share, at_pairs, at_places, shown

MOST_SCALE = 0.04  # nats: many models in bfloat16 stay below; a small chat model had 0.06
UNUSUAL_SCALE = 1.5 * MOST_SCALE  # nats: a model that has not been trained by RL stays below
_MOST_OF_HEAD = 0.15  # nats: bfloat16 logits up to 64 on both sides err by 0.1, eight-bit activations by up to this
_MOST_TAIL = 3.6  # 99 % quantile of |d| over its median: 2 if uniform, 3.1 for two such errors, 3.8 if normal
_VARIES = 0.4  # of the variance of d, between samples with the same tokens so far; dropout has 0.5 to 0.9
_FEWEST = 100  # tokens that a scale needs
_MEDIAN = 0.6745  # of |d| in scales


def head_precision(gap: Gap, rounding: Floats, level: float) -> Answer:
    """A scale between 0.04 and 0.15 nats, with d bounded like rounding errors and not repeated at the same tokens."""
    noise = noise_of(gap)
    if ((gap.surprise > 0.4) & (gap.surprise < 4)).sum() < _FEWEST:
        return cannot_tell("head_precision", f"fewer than {_FEWEST} tokens at 0.4 to 4 nats")
    size = np.abs(noise.standardized(gap)[gap.surprise > 0.4])
    tail, pairs = float(np.quantile(size, 0.99) / max(np.median(size), 1e-9)), at_pairs(gap)
    evidence = (
        f"the scale of log π - log q is {noise.level:.4f} nats, its 99 % quantile {tail:.1f} times its median "
        f"(rounding: up to {_MOST_TAIL}){shown(pairs)}"
    )
    p = p_wide(gap, MOST_SCALE, rounding)
    is_like = MOST_SCALE <= noise.level <= _MOST_OF_HEAD and tail <= _MOST_TAIL and not _is_unsteady(_varies(gap))
    if is_like and p <= level and pairs is None:
        return cannot_tell("head_precision", f"{evidence}; too few tokens repeat to exclude other weights")
    is_large = is_like and pairs is not None and pairs.value < BY_CHANCE
    return decided("head_precision", p, level, is_large, evidence, scale=noise.level, tail=tail)


def is_of_rounding(gap: Gap) -> bool:
    """Whether rounding a model to bfloat16 explains the scale of d.

    It does below 0.06 nats. The uncertain tokens of a trained policy reach 0.14 nats. From 0.06 to 0.15 nats, d must
    not repeat at the same tokens, as with other weights, and log π must not vary with the same tokens so far, as with
    dropout.
    """
    scale = noise_of(gap).level
    if scale < UNUSUAL_SCALE:
        return True
    if scale >= _MOST_OF_HEAD:
        return False
    pairs, varies = at_pairs(gap), _varies(gap)
    return pairs is not None and pairs.value < BY_CHANCE and varies is not None and not _is_unsteady(varies)


def dropout(gap: Gap, level: float, *, alone: bool) -> Answer:
    """A scale of at least 0.06 nats, with log π but not log q varying between samples of a step with the same tokens so
    far.

    Without such samples: a scale larger than any arithmetic has, 0.15 nats, and d that does not repeat at the same
    tokens. `alone`: no other cause was found that spreads d.
    """
    noise = noise_of(gap)
    evidence, wide = f"the scale of log π - log q is {noise.level:.4f} nats", p_wide(gap, UNUSUAL_SCALE)
    if noise.level < UNUSUAL_SCALE:
        return decided("dropout", wide, level, False, evidence, scale=noise.level)
    varies, pairs, p = _varies(gap), at_pairs(gap, 1.5 * OF_WEIGHTS), 1.0
    if varies is not None:
        trainer, engine = varies
        evidence += (
            f"; between samples of a step with the same tokens so far, log π varies by {trainer.value:.0%} of the "
            f"variance of d, log q by {engine.value:.0%}"
        )
        p = max(trainer.p_above, engine.p_below)
        if trainer.value < _VARIES or engine.value > BY_CHANCE:
            return decided("dropout", p, level, False, evidence, scale=noise.level)
    evidence += shown(pairs)
    if pairs is not None and pairs.value >= OF_WEIGHTS and varies is None:
        return decided("dropout", pairs.p_below, level, False, evidence, scale=noise.level)
    if pairs is not None and pairs.value < OF_WEIGHTS and alone and noise.level >= _MOST_OF_HEAD:
        p = min(p, pairs.p_below)
    elif varies is None:
        return cannot_tell("dropout", f"{evidence}; no samples of a step have the same tokens so far")
    return decided("dropout", max(wide, min(2 * p, 1.0)), level, True, evidence, scale=noise.level)


def _is_unsteady(varies: tuple[Share, Share] | None) -> bool:
    """Whether log π differs although the tokens so far are the same; rounded logits do not."""
    return varies is not None and varies[0].value > _VARIES / 2


def _varies(gap: Gap) -> tuple[Share, Share] | None:
    """The result of `at_places` for the trainer and for the engine."""
    trainer, engine = at_places(gap, gap.trainer, _VARIES / 2), at_places(gap, gap.engine, BY_CHANCE)
    return None if trainer is None or engine is None else (trainer, engine)


def p_wide(gap: Gap, scale: float, rounding: Floats | float = 0.0) -> float:
    """p-value of d at 0.4 to 4 nats of surprise having at most this scale plus the rounding [T] of its values."""
    middle = (gap.surprise > 0.4) & (gap.surprise < 4)
    if middle.sum() < _FEWEST:
        return 1.0
    d = gap.difference - noise_of(gap).center[bins_of(gap)]
    beyond = np.abs(d) > _MEDIAN * np.hypot(scale, rounding)
    return p_above(mean_over(beyond[middle] - 0.5, gap.observation[middle]))
