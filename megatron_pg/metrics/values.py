"""What the formulas of the metrics read: fields, result and terms of one micro-batch on one rank."""

from dataclasses import dataclass
from functools import cached_property

from torch import Tensor

from megatron_pg.batch.fields import TokenFields
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss
from megatron_pg.objectives.tokens import Tokens, ratio


@dataclass(frozen=True, eq=False)
class TokenValues:
    """[T] float64 per token, anything where masked: the `fields` as they are, and what follows from the `result`."""

    fields: TokenFields
    result: PolicyGradientLoss
    terms: LossTerms

    @property
    def mask(self) -> Tensor:
        """Trained tokens."""
        return self.fields.mask

    @cached_property
    def logprobs(self) -> Tensor:
        """l, of the model being trained."""
        return self.result.logprobs.double()

    @cached_property
    def log_ratios(self) -> Tensor:
        """d = l - o."""
        return self.result.log_ratios.double()

    @cached_property
    def token_losses(self) -> Tensor:
        """ℓ of the policy term, times its correction."""
        losses = self.result.token_losses.double()
        return losses if self.fields.corrections is None else losses * self.fields.corrections

    @cached_property
    def entropy(self) -> Tensor | None:
        """H."""
        return _as_double(self.result.entropy)

    @cached_property
    def kl(self) -> Tensor | None:
        """Values of the KL term's estimator."""
        return _as_double(self.result.kl)

    @property
    def corrections(self) -> Tensor | None:
        """Factor on the policy term, 0 where rejected."""
        return self.fields.corrections if self.result.kept is None else self.result.kept.double()

    @cached_property
    def ratios(self) -> Tensor:
        """r = e^d, with d clamped as in the objective."""
        return ratio(self.log_ratios)

    @cached_property
    def sequence_ratios(self) -> Tensor:
        """R, the geometric mean of r over the token's sequence."""
        return ratio(self.result.sequence_log_ratios.double())

    @cached_property
    def outside(self) -> tuple[Tensor, Tensor]:
        """[T] bool each, above and below the objective's bounds."""
        objective = self.terms.objective
        tokens = Tokens(
            logprobs=self.logprobs,
            old_logprobs=self.fields.old_logprobs,
            advantages=self.fields.advantages,
            log_ratios=self.log_ratios,
            sequence_log_ratios=_as_double(self.result.sequence_log_ratios),
            sequence_advantages=_as_double(self.result.sequence_advantages),
        )
        return objective.outside(tokens, objective.parameters)

    @property
    def above(self) -> Tensor:
        """Beyond the objective's upper bound."""
        return self.outside[0]

    @property
    def below(self) -> Tensor:
        """Beyond its lower bound."""
        return self.outside[1]

    @cached_property
    def total(self) -> Tensor:
        """Each token's share of the loss."""
        total, weights = self.fields.weights * self.token_losses, self.fields.term_weights
        if self.terms.kl_coef:
            total = total + self.terms.kl_coef * weights * self.kl
        return total - self.terms.entropy_coef * weights * self.entropy if self.terms.entropy_coef else total


def _as_double(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.double()
