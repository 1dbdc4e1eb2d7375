"""What the formulas of the metrics read: fields, result and terms of one micro-batch on one rank."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property

import torch
from torch import Tensor

from megatron_pg.batch.fields import TokenFields
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss
from megatron_pg.metrics import gap
from megatron_pg.objectives.interface.tokens import Tokens, ratio


@dataclass(frozen=True, eq=False)
class TokenValues:
    """[T] float64 per token, anything where masked: the `fields`, the `result` in float64, and what follows from both."""

    fields: TokenFields
    result: PolicyGradientLoss
    terms: LossTerms
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # [] of losses over other tokens, by metric
    vocab_size: int | None = None  # None: larger than any set of named tokens

    def __post_init__(self):
        found = {each.name: getattr(self.result, each.name) for each in fields(self.result)}
        exact = {name: v.double() for name, v in found.items() if v is not None and v.dtype != torch.bool}
        object.__setattr__(self, "result", replace(self.result, **exact))

    @cached_property
    def token_losses(self) -> Tensor:
        """ℓ of the policy term, times its correction."""
        losses, corrections = self.result.token_losses, self.fields.corrections
        return losses if corrections is None else losses * corrections

    @property
    def corrections(self) -> Tensor:
        """Factor on the policy term, 0 where rejected."""
        return self.fields.corrections if self.result.kept is None else self.result.kept.double()

    @cached_property
    def ratios(self) -> Tensor:
        """r = e^d, with d clamped as in the objective."""
        return ratio(self.result.log_ratios)

    @cached_property
    def sequence_ratios(self) -> Tensor:
        """R, the geometric mean of r over the token's sequence."""
        return ratio(self.result.sequence_log_ratios)

    @cached_property
    def outside(self) -> tuple[Tensor, Tensor]:
        """[T] bool each, above and below the objective's bounds."""
        objective = self.terms.objective
        return objective.outside(self._tokens, objective.parameters)

    @cached_property
    def gap(self) -> Mapping[str, Tensor]:
        """[T] each, what the sums of trainer against rollout engine add up, by `gap.SUMS`."""
        trainer, engine = self.fields.old_logprobs.double(), self.fields.rollout_logprobs.double()
        return dict(zip(gap.SUMS, gap.sums_of(trainer, engine), strict=True))

    @cached_property
    def own(self) -> Mapping[str, Tensor]:
        """[T] each, what a custom objective reports."""
        objective = self.terms.objective
        return objective.reports(self._tokens, objective.parameters)

    @cached_property
    def _tokens(self) -> Tokens:
        """What the objective saw."""
        result, sequences = self.result, self.fields.sequences
        reads = self.terms.objective.reads_sequences
        return Tokens(
            logprobs=result.logprobs,
            old_logprobs=self.fields.old_logprobs,
            advantages=self.fields.advantages,
            log_ratios=result.log_ratios,
            sequence_log_ratios=result.sequence_log_ratios,
            sequence_advantages=result.sequence_advantages,
            sequence_lengths=sequences.trained_tokens(result.log_ratios.dtype) if reads else None,
        )

    def of_term(self, name: str) -> tuple[Tensor, Tensor]:
        """Weights and losses of a loss term's tokens, 0 off them."""
        names = [term.name for term in self.terms.further]
        own = self.fields.of_term(name)
        return torch.where(own.mask, own.weights, 0), self.result.term_losses[names.index(name)]

    def teacher_mass(self, name: str) -> Tensor:
        """Σ_S p of the loss term's tokens, 0 off them."""
        return torch.where(self.fields.of_term(name).mask, 1.0 - self.fields.teacher_topk.tails, 0)

    def student_mass(self, name: str) -> Tensor:
        """Σ_S q of the loss term's tokens, 0 off them."""
        return torch.where(self.fields.of_term(name).mask, self.result.student_mass, 0)

    def is_floored(self, term: LossTerm) -> Tensor:
        """Whether the tail of a token's teacher is raised; False off the loss term's tokens, and where every token is named."""
        teacher = self.fields.teacher_topk
        is_low = self.fields.of_term(term.name).mask & (teacher.tails < term.tail_floor)
        return is_low if self.vocab_size is None else is_low & ((teacher.ids >= 0).sum(dim=1) < self.vocab_size)

    @property
    def total(self) -> Tensor:
        """[] the whole loss: the objective, all loss terms, and the losses over other tokens."""
        total = torch.where(self.fields.of_policy.mask, self.fields.weights * self.token_losses, 0)
        for term in self.terms.further:
            weights, losses = self.of_term(term.name)
            total = total + term.weight * weights * losses
        return torch.where(self.fields.mask, total, 0).sum() + self.totals.get("loss", 0.0)
