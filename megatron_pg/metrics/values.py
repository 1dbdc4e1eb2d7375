"""The input of the metrics' formulas: fields, result and terms of one micro-batch on one rank."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels.policy_loss import LossTerms, PolicyGradientLoss
from megatron_pg.metrics import gap
from megatron_pg.objectives.interface.tokens import Tokens, ratio


@dataclass(frozen=True, eq=False)
class TokenValues:
    """[T] float64 per token, arbitrary where masked: the `fields`, the `result`, and values derived from both."""

    fields: TokenFields
    result: PolicyGradientLoss
    terms: LossTerms
    totals: Mapping[str, Tensor] = field(default_factory=dict)  # [] of losses over other tokens, by metric
    vocab_size: int | None = None  # None: larger than any set of named tokens

    def __post_init__(self):
        known = {field.name: getattr(self.result, field.name) for field in fields(self.result)}
        exact = {name: v.double() for name, v in known.items() if v is not None and v.dtype != torch.bool}
        object.__setattr__(self, "result", replace(self.result, **exact))

    @cached_property
    def token_losses(self) -> Tensor:
        """ℓ of the policy term, times its correction."""
        losses, corrections = self.result.token_losses, self.fields.corrections
        return losses if corrections is None else losses * corrections

    @property
    def corrections(self) -> Tensor:
        """Factor on the policy term, 0 where rejected."""
        return _known(self.fields.corrections) if self.result.kept is None else self.result.kept.double()

    @property
    def sample_weights(self) -> Tensor:
        """v, which sums to 1 over a sample."""
        return _known(self.fields.sample_weights)

    @property
    def sequence_weights(self) -> Tensor:
        """v of a sequence, which sums to 1 over it: over a sample, or over a turn."""
        return 1.0 / cast(Sequences, self.fields.sequences).trained_tokens(torch.float64)

    @cached_property
    def ratios(self) -> Tensor:
        """r = e^d, with d clamped as in the objective."""
        return ratio(self.result.log_ratios)

    @cached_property
    def sequence_ratios(self) -> Tensor:
        """R, the geometric mean of r over the token's sequence."""
        return ratio(_known(self.result.sequence_log_ratios))

    @cached_property
    def outside(self) -> tuple[Tensor, Tensor]:
        """[T] bool each, above and below the objective's bounds."""
        objective = self.terms.objective
        return cast(Callable, objective.outside)(self._tokens, objective.parameters)

    @cached_property
    def gap(self) -> Mapping[str, Tensor]:
        """[T] each, the summands of the comparison with the rollout engine, by `gap.SUMS`."""
        sides = _known(self.fields.old_logprobs), _known(self.fields.rollout_logprobs)
        return dict(zip(gap.SUMS, gap.sums_of(*(side.double() for side in sides)), strict=True))

    @cached_property
    def own(self) -> Mapping[str, Tensor]:
        """[T] each, the values that a custom objective reports."""
        objective = self.terms.objective
        return cast(Callable, objective.reports)(self._tokens, objective.parameters)

    @cached_property
    def _tokens(self) -> Tokens:
        """The objective's input."""
        result, sequences = self.result, self.fields.sequences
        reads = self.terms.objective.reads_sequences
        return Tokens(
            logprobs=result.logprobs,
            old_logprobs=_known(self.fields.old_logprobs),
            advantages=self.fields.advantages,
            log_ratios=result.log_ratios,
            sequence_log_ratios=_known(result.sequence_log_ratios),
            sequence_advantages=_known(result.sequence_advantages),
            sequence_lengths=_known(sequences.trained_tokens(result.log_ratios.dtype) if sequences and reads else None),
        )

    def of_term(self, name: str) -> tuple[Tensor, Tensor]:
        """Weights and losses of a loss term's tokens, 0 elsewhere."""
        names, own = [term.name for term in self.terms.further], self.fields.of_term(name)
        weights = torch.where(own.mask, own.weights, 0)
        return weights, _known(self.result.term_losses)[names.index(name)]

    def teacher_mass(self, name: str) -> Tensor:
        """Σ_S p of the loss term's tokens, 0 elsewhere."""
        return torch.where(self.fields.of_term(name).mask, 1.0 - self.fields.topk.tails, 0)

    def student_mass(self, name: str) -> Tensor:
        """Σ_S q of the loss term's tokens, 0 elsewhere."""
        return torch.where(self.fields.of_term(name).mask, _known(self.result.student_mass), 0)

    def is_floored(self, term: LossTerm) -> Tensor:
        """Whether a token's teacher tail is raised: only at the term's tokens, and if some ids are not named."""
        is_low = self.fields.of_term(term.name).mask & (self.fields.topk.tails < cast(float, term.tail_floor))
        return (
            is_low if self.vocab_size is None else is_low & ((self.fields.topk.ids >= 0).sum(dim=1) < self.vocab_size)
        )

    @property
    def total(self) -> Tensor:
        """[] the whole loss: the objective, all loss terms, and the losses over other tokens."""
        total = torch.where(self.fields.objective_mask, self.fields.weights * self.token_losses, 0)
        for term in self.terms.further:
            weights, losses = self.of_term(term.name)
            total = total + term.weight * weights * losses
        return torch.where(self.fields.mask, total, 0).sum() + self.totals.get("loss", 0.0)


def _known(values: Tensor | None) -> Tensor:
    return cast(Tensor, values)  # the metric's declaration requires it
