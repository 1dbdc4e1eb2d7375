"""The loss terms: each is a loss with its own tokens, weight and denominators."""

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_pg.declarations.corrections import KL_ESTIMATORS, PENALTY
from megatron_pg.declarations.declaration import load

AS_POLICY = "policy"  # an aggregation: the weights of pg_loss, without its corrections
_RL = "rl"  # name and kind of the objective
# The loss terms with their own flags.
SHORTHANDS = {"kl": "--pg-kl-coef", "entropy": "--pg-entropy-coef", PENALTY: f"--pg-correction {PENALTY}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Mixture:
    """The option of a loss term that sets the share of a distribution in the mixture m."""

    option: str
    default: float


@dataclass(frozen=True, slots=True, kw_only=True)
class TermKind:
    """The token-level loss of a kind of loss term."""

    formula: str  # of ℓ
    payload: str | None = None  # of the samples, if it reads more than one number per token
    whole_form: str | None = None  # of a divergence over the whole vocabulary, from the teacher's hidden states
    module: str = "losses"  # of `megatron_pg.objectives.terms`, with its function
    has_tail: bool = True  # of a top-k kind: all other tokens are one category
    mixture: Mixture | None = None
    against: str | None = None  # required field of log-probabilities that a KL estimator compares with
    estimator: str | None = None  # the default, if there is one
    is_of_a_correction: bool = False  # which selects its tokens; --pg-term does not accept it
    function: str  # in `module`

    @property
    def reads_topk(self) -> bool:
        """Whether it reads the teacher's top-k tokens."""
        return self.payload == "teacher_topk"

    def load(self) -> Callable:
        """From `TermTokens` to [T]."""
        return load(f"megatron_pg.objectives.terms.{self.module}:{self.function}")


def _topk(formula: str, function: str, **rest: Any) -> TermKind:
    return TermKind(formula=formula, payload="teacher_topk", module="topk", function=function, **rest)


def _full(formula: str, form: str, **rest: Any) -> TermKind:
    return TermKind(formula=formula, payload="teacher_hidden", whole_form=form, function="whole_divergence", **rest)


_JSD = "β·KL(P‖m) + (1-β)·KL(Q‖m), m = βP + (1-β)Q"
KINDS: Mapping[str, TermKind] = {
    "ce": TermKind(formula="-log π", function="cross_entropy"),
    "opd": TermKind(
        formula="KL(π‖π_teacher)", against="teacher_logprobs", estimator="k3_weighted", function="divergence"
    ),
    "kl": TermKind(formula="KL(π‖π_ref)", against="ref_logprobs", function="divergence"),
    "entropy": TermKind(formula="-H", function="negative_entropy"),
    PENALTY: TermKind(
        formula="|log π - log π_old|",
        against="old_logprobs",
        estimator="abs",
        is_of_a_correction=True,
        function="divergence",
    ),
    "topk_forward_kl": _topk("KL(P‖Q)", "forward_kl"),
    "topk_reverse_kl": _topk("KL(Q‖P)", "reverse_kl"),
    "topk_jsd": _topk(_JSD, "jsd", mixture=Mixture(option="beta", default=0.5)),
    "topk_skew_forward": _topk("KL(P‖αP + (1-α)Q)", "skew_forward", mixture=Mixture(option="alpha", default=0.1)),
    "topk_skew_reverse": _topk("KL(Q‖αQ + (1-α)P)", "skew_reverse", mixture=Mixture(option="alpha", default=0.1)),
    "topk_generalised_reverse": _topk("Σ_S q·log(q/p) - q + p", "generalised_reverse", has_tail=False),
    "full_forward_kl": _full("KL(P‖Q)", "forward_kl"),
    "full_reverse_kl": _full("KL(Q‖P)", "reverse_kl"),
    "full_jsd": _full(_JSD, "jsd", mixture=Mixture(option="beta", default=0.5)),
}
TAIL_FLOOR = 1e-6  # default
_OBJECTIVE_KIND = TermKind(formula="the objective", function="", against="old_logprobs")


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerm:
    """A loss of the step. The same on every rank."""

    name: str
    kind: str
    weight: float = 1.0  # λ
    aggregation: str | None = None  # or AS_POLICY; None: as the objective, with its divisor
    divisor: float | None = None  # L of `constant`
    on: str | None = None  # the loss term whose tokens it takes; None: it has its own
    estimator: str | None = None  # of a KL divergence
    mixture: float | None = None  # β or α of a teacher's divergence
    temperature: float | None = None  # of the teacher, of a top-k divergence; None: 1
    tail_floor: float | None = None  # lower bound of the teacher's tail probability, of a top-k divergence with a tail
    softcap: float | None = None  # of the logits of a teacher over the whole vocabulary; 0: none, None: the policy's
    head: str | None = None  # PATH[:NAME] of the teacher's output layer, of a divergence over the whole vocabulary

    @property
    def _kind(self) -> TermKind:
        return KINDS.get(self.kind, _OBJECTIVE_KIND)

    @property
    def payload(self) -> str | None:
        """The payload of the samples that it reads."""
        return self._kind.payload

    @property
    def reads_topk(self) -> bool:
        """Whether it reads the teacher's top-k tokens."""
        return self._kind.reads_topk

    @property
    def reads_hidden(self) -> bool:
        """Whether it reads the teacher's hidden states."""
        return self._kind.whole_form is not None

    @property
    def is_over_sampling_mask(self) -> bool:
        """Whether it compares with log-probabilities of the rollout, which are over the sampling mask."""
        return self._kind.against not in (None, "teacher_logprobs")

    @property
    def is_of_a_correction(self) -> bool:
        """Whether a correction selects its tokens."""
        return self._kind.is_of_a_correction

    @property
    def tokens(self) -> str:
        """The loss term whose tokens it uses."""
        return self.on or self.name

    @property
    def flag(self) -> str:
        """The flag that adds it."""
        return SHORTHANDS.get(self.name) or f"--pg-term {self.name}:{self.kind}"

    @property
    def reads(self) -> tuple[str, ...]:
        """Fields that every sample with a token of this loss term must have."""
        if self.payload is not None:
            return (self.payload,)
        against = self._kind.against
        is_weighted = self.estimator is not None and KL_ESTIMATORS[self.estimator].is_weighted
        return (() if against is None else (against,)) + (("old_logprobs",) if is_weighted else ())

    def resolved(self, aggregation: str, divisor: float | None) -> "LossTerm":
        """Fill in missing options: aggregation and divisor of the objective, the rest of the kind."""
        kind = self._kind
        mixture = kind.mixture.default if self.mixture is None and kind.mixture else self.mixture
        floor = TAIL_FLOOR if self.tail_floor is None else self.tail_floor
        complete = dataclasses.replace(
            self,
            estimator=self.estimator or kind.estimator,
            mixture=mixture,
            tail_floor=floor if kind.reads_topk and kind.has_tail else None,
        )
        if complete.aggregation:
            return complete
        return dataclasses.replace(complete, aggregation=aggregation, divisor=divisor)


OBJECTIVE = LossTerm(name=_RL, kind=_RL, aggregation=AS_POLICY)  # the first loss term, unless it is dropped
