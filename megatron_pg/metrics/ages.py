"""Staleness: sums over trained tokens by the age of the weights that sampled them, in optimizer steps."""

from collections.abc import Mapping

import torch
from torch import Tensor

BINS = {"0": 1, "1": 1, "2": 1, "3_to_4": 2, "5_to_8": 4, "9_or_more": 1}  # how many ages; the last includes all older
_COUNT = sum(BINS.values())
NAMES = tuple(f"_staleness/{name}/{age}" for age in BINS for name in ("tokens", "ages", "ratios", "sizes"))


def sums_of(ages: Tensor | None, mask: Tensor, ratios: Tensor, log_ratios: Tensor) -> Tensor:
    """[len(NAMES)] float64 from tokens [T] in a mask, but for those of age -1; `sizes` are |log r|."""
    if ages is None:
        return ratios.new_zeros(len(NAMES))
    members = mask & (ages.clamp(max=_COUNT - 1) == torch.arange(_COUNT, device=ages.device)[:, None])
    summands = torch.stack([torch.ones_like(ratios), ages.double(), ratios, log_ratios.abs()])
    table = torch.where(members[:, None], summands, 0).sum(dim=2)
    return torch.cat([part.sum(dim=0) for part in table.split([*BINS.values()])])


def total(sums: Mapping[str, float], name: str) -> float:
    """One of the sums over all ages."""
    return sum(sums[f"_staleness/{name}/{age}"] for age in BINS)
