"""One line of advice when the statistics of trainer against rollout engine stay beyond a limit for several steps."""

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_pg.metrics.table import LIMITS, red_flags

# What explains another one stands before it: a temperature spreads d, another token has a probability of its own.
_ORDER = tuple(
    f"mismatch/{name}" for name in ("rank_factor", "temperature", "outlier_fraction", "missing_mass", "spread")
)


class Advice:
    """Follows the steps of a run; what it says depends on their records alone, so a run that goes on says what one run would.

    Args:
        history: records of the run's earlier steps, in their order.
    """

    def __init__(self, history: Iterable[Mapping[str, Any]] = ()):
        self._said: set[str] = set()
        self._seen: tuple[str, Any] | None = None  # the metric, and the rank if it is of one
        self._count = 0  # steps running
        for record in history:
            self.of(record)

    def of(self, record: Mapping[str, Any]) -> str | None:
        """The line that the step brings, once for each metric in a run; a step without rollout log-probabilities changes nothing."""
        if record.get("mismatch/outlier_fraction") is None:
            return None
        flags = red_flags(record)
        name = next((each for each in _ORDER if each in flags), None)
        seen = None if name is None else (name, record["mismatch/rank"] if name == "mismatch/rank_factor" else None)
        self._count = self._count + 1 if seen == self._seen else 1
        self._seen = seen
        if name is None or name in self._said or self._count < LIMITS[name].steps:
            return None
        self._said.add(name)
        whose = f" of data-parallel rank {record['mismatch/rank']:g}" if name == "mismatch/rank_factor" else ""
        return (
            f"advice: for {self._count} steps trainer and rollout engine have been apart: {name} {record[name]:.4g}{whose}, which says "
            f"{LIMITS[name].cause}; run megatron-pg mismatch on these rollouts (docs/mismatch.md)"
        )
