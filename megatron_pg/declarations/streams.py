"""Every further loss of a step, once: a stream is a loss, its tokens, its weight and its own denominators."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.declaration import load

AS_POLICY = "policy"  # an aggregation: the weights of pg_loss, without its corrections
SHORTHANDS = {"kl": "--pg-kl-coef", "entropy": "--pg-entropy-coef"}  # the streams that have flags of their own


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamKind:
    """What the loss of a token is."""

    formula: str  # of ℓ
    against: str | None = (
        None  # field of log-probabilities that a KL estimator compares with; every sample must have it
    )
    estimator: str | None = None  # its default; None: there is none
    function: str  # of `megatron_pg.objectives.streams`

    def load(self) -> Callable:
        """From `StreamTokens` to [T]."""
        return load(f"megatron_pg.objectives.streams:{self.function}")


KINDS: Mapping[str, StreamKind] = {
    "ce": StreamKind(formula="-log π", function="cross_entropy"),
    "opd": StreamKind(
        formula="KL(π‖π_teacher)", against="teacher_logprobs", estimator="k3_weighted", function="divergence"
    ),
    "kl": StreamKind(formula="KL(π‖π_ref)", against="ref_logprobs", function="divergence"),
    "entropy": StreamKind(formula="-H", function="negative_entropy"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """A loss of the step beside the objective. The same on every rank."""

    name: str
    kind: str
    weight: float = 1.0  # λ
    aggregation: str | None = None  # or AS_POLICY; None: that of the objective, with its divisor
    divisor: float | None = None  # L of `constant`
    on: str | None = None  # the stream whose tokens it takes; None: it has its own
    estimator: str | None = None  # of a KL divergence

    @property
    def tokens(self) -> str:
        """The stream whose tokens it is over."""
        return self.on or self.name

    @property
    def flag(self) -> str:
        """What asks for it."""
        return SHORTHANDS.get(self.name) or f"--pg-stream {self.name}:{self.kind}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that every sample with a token of it must have."""
        against = KINDS[self.kind].against
        is_weighted = self.estimator is not None and KL_ESTIMATORS[self.estimator].is_weighted
        return (() if against is None else (against,)) + (("old_logprobs",) if is_weighted else ())

    def resolved(self, aggregation: str, divisor: float | None) -> "Stream":
        """With the objective's aggregation and divisor, and the kind's estimator, where none were given."""
        found = dataclasses.replace(self, estimator=self.estimator or KINDS[self.kind].estimator)
        return found if found.aggregation else dataclasses.replace(found, aggregation=aggregation, divisor=divisor)
