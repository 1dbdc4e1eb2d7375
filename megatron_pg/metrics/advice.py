"""One line of advice when the trainer and the rollout engine disagree for several steps."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_pg.metrics.limits import LIMITS, red_flags

# A statistic that explains another one is listed before it: a wrong temperature, for instance, also raises the spread.
_ORDER = tuple(
    f"mismatch/{name}" for name in ("rank_factor", "temperature", "outlier_fraction", "missing_mass", "spread")
)


class Advice:
    """Follows the records of a run's steps; with those of its earlier steps, in order, a resumed run gives the same."""

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()):
        self._given: set[str] = set()
        self._last: tuple[str, Any] | None = None  # metric beyond its limit, and the rank for a metric of one rank
        self._count = 0  # consecutive steps with it
        for record in history:
            self.of(record)

    def of(self, record: Mapping[str, Any]) -> str | None:
        """Advice after a step, at most once per metric and run; steps without rollout log-probabilities are ignored."""
        if record.get("mismatch/outlier_fraction") is None:
            return None
        flags = red_flags(record)
        name = next((metric for metric in _ORDER if metric in flags), None)
        current = None if name is None else (name, record["mismatch/rank"] if name == "mismatch/rank_factor" else None)
        self._count = self._count + 1 if current == self._last else 1
        self._last = current
        if name is None or name in self._given or self._count < LIMITS[name].steps:
            return None
        self._given.add(name)
        whose = f" of data-parallel rank {record['mismatch/rank']:g}" if name == "mismatch/rank_factor" else ""
        return (
            f"advice: trainer and rollout engine have differed for {self._count} steps: {name} {record[name]:.4g}"
            f"{whose}. Likely: {LIMITS[name].cause}. Run megatron-pg mismatch on these rollouts (docs/mismatch.md)."
        )
