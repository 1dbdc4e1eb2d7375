"""The entropy coefficient that follows the policy's entropy from step to step."""

import math
from dataclasses import dataclass, replace

from megatron_pg.declarations.declaration import Reads, positive

NUMBERS: Reads = {positive("step"): None, positive("max"): math.inf}  # options of --pg-entropy-target


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptiveEntropy:
    """Skywork-OR1's adaptive entropy coefficient (arXiv 2505.22312), after training step k. The same on every rank.

        c_{k+1} = c_k + step where e_k < target, c_k - step where e_k > target, within [0, max]
        η_{k+1} = c_{k+1} 1[e_k ≤ target]

    e_k is the mean entropy of the step under the weights of the entropy term.
    """

    target: float  # nats
    step: float
    max: float
    coefficient: float  # c of the next step
    entropy: float | None = None  # e in nats; None: no step was trained

    @property
    def value(self) -> float:
        """η of the next step."""
        return self.coefficient if self.entropy is None or self.entropy <= self.target else 0.0

    def after(self, entropy: float) -> "AdaptiveEntropy":
        """After another training step, with this mean entropy in nats."""
        moved = self.coefficient + self.step * ((entropy < self.target) - (entropy > self.target))
        return replace(self, coefficient=min(max(moved, 0.0), self.max), entropy=entropy)
