"""Staleness: sums over trained tokens by the age of the weights that sampled them, in optimizer steps."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

BINS = {"0": 1, "1": 1, "2": 1, "3_to_4": 2, "5_to_8": 4, "9_or_more": 1}  # how many ages; the last includes all older
_COUNT = sum(BINS.values())
NAMES = tuple(f"_staleness/{name}/{age}" for age in BINS for name in ("tokens", "ages", "ratios", "sizes"))


def sums_of(t: Any) -> Tensor:
    """[len(NAMES)] float64, from TokenValues; a token without an age is left out. `sizes` are |log r|."""
    ages, ratios = t.fields.ages, t.ratios
    if ages is None:
        return ratios.new_zeros(len(NAMES))
    is_of_age = ages.clamp(max=_COUNT - 1) == torch.arange(_COUNT, device=ages.device)[:, None]
    summands = torch.stack([torch.ones_like(ratios), ages.double(), ratios, t.result.log_ratios.abs()])
    table = torch.where((is_of_age & t.fields.objective_mask)[:, None], summands, 0).sum(dim=2)
    return torch.cat([part.sum(dim=0) for part in table.split([*BINS.values()])])


def mean(name: str, those: Iterable[str], sums: Mapping[str, float]) -> float | None:
    """A sum over the tokens of those ages, divided by their number; of `tokens`: by that of all. None without one."""
    own, number = (sum(sums[f"_staleness/{what}/{age}"] for age in those) for what in (name, "tokens"))
    whole = sum(sums[f"_staleness/tokens/{age}"] for age in BINS) if name == "tokens" else number
    return own / whole if number else None
