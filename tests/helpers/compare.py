"""How found values are compared with expected ones, in one place.

Every function returns an error figure that is compared with `<=`. It is infinite, never NaN, where something is not
finite, is missing, is too much, has the wrong shape, or where there is nothing to compare: none of that may pass.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

OF_RANKS = frozenset(("mismatch/rank", "mismatch/rank_factor"))  # metrics of a layout, which one process has not
# metrics that are picked or counted, not computed
_EXACT = ("max_", "min_", "num_", "mismatch_max", "staleness/max_age", "staleness/age_")
# of differences of sums, whose last digits cancel where the log-probabilities, values or returns are nearly equal
_OF_MOMENTS = (
    *("mismatch/correlation", "mismatch/temperature", "mismatch/spread"),
    *("explained_variance", "value_std", "return_std"),
)
CANCELLED = 1e-9  # what may be lost so


def scalar_error(found: float, expected: float, scale: float) -> float:
    """Difference over a scale that does not cancel, for instance Σ|w·ℓ| of a loss."""
    if not all(math.isfinite(value) for value in (found, expected, scale)) or scale < 0:
        return math.inf
    return _over(abs(found - expected), scale)


def tensor_error(found: Tensor, expected: Tensor) -> float:
    """Largest difference over the largest expected entry."""
    return gradient_error([found], [expected])


def gradient_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Largest difference over the largest expected entry of all pieces together; the pieces must match one by one."""
    if len(found) != len(expected) or any(a.shape != b.shape for a, b in zip(found, expected, strict=True)):
        return math.inf
    if not any(piece.numel() for piece in expected):
        return math.inf
    flat, wanted = (torch.cat([piece.detach().double().flatten() for piece in pieces]) for pieces in (found, expected))
    if not (torch.isfinite(flat).all() and torch.isfinite(wanted).all()):
        return math.inf
    return _over(float((flat - wanted).abs().max()), float(wanted.abs().max()))


def gradient_error_by_name(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """`gradient_error` of pieces that are matched by name, on one scale."""
    if found.keys() != expected.keys():
        return math.inf
    return gradient_error([found[name] for name in expected], list(expected.values()))


def metrics_error(
    found: Mapping[str, float], expected: Mapping[str, float], *, ignore: Iterable[str] = (), floor: float = 0.1
) -> float:
    """Largest relative error; picked and counted metrics must be equal.

    Args:
        found: metrics by name.
        expected: metrics by name; both must have the same names.
        ignore: names that are compared elsewhere.
        floor: values below it are compared absolutely, on its scale.
    """
    ignored = OF_RANKS.union(ignore)
    names = expected.keys() - ignored
    if not names or found.keys() - ignored != names:
        return math.inf
    return max(_metric_error(name, float(found[name]), float(expected[name]), floor) for name in names)


def same_bits(found: Iterable[Tensor], expected: Iterable[Tensor]) -> bool:
    """Whether all tensors are finite and equal in type, shape and every bit."""
    found, expected = list(found), list(expected)
    if len(found) != len(expected) or not any(piece.numel() for piece in expected):
        return False
    return all(_same_bits(a, b) for a, b in zip(found, expected, strict=True))


def _same_bits(found: Tensor, expected: Tensor) -> bool:
    if found.dtype != expected.dtype or found.shape != expected.shape or not torch.isfinite(expected).all():
        return False
    return found.detach().cpu().numpy().tobytes() == expected.detach().cpu().numpy().tobytes()


def _metric_error(name: str, found: float, expected: float, floor: float) -> float:
    if name.startswith(_EXACT):
        return 0.0 if math.isfinite(expected) and found == expected else math.inf
    error = scalar_error(found, expected, max(abs(expected), floor))
    return 1e-3 * error if name in _OF_MOMENTS and error <= CANCELLED else error


def _over(difference: float, scale: float) -> float:
    if difference == 0.0:
        return 0.0
    return difference / scale if scale > 0 else math.inf
