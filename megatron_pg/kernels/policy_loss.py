"""From log-probabilities to the loss, in torch: what every implementation that ends in log-probabilities ends in.

    loss = sum_t w_t l_t + beta sum_t u_t kl_t - eta sum_t u_t H_t

w: the corrected weights; u: the weights of the KL and entropy terms.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.batch.fields import TokenFields
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.objectives import Objective, Tokens, objective_of
from megatron_pg.objectives.row import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What the loss of a step is made of. The same on every rank."""

    objective: Objective
    opsm_anchor: str | None = None  # field of TokenFields that off-policy sequences are measured from; None: not done
    opsm_threshold: float | None = None  # nats per token
    kl_coef: float = 0.0  # beta
    kl_estimator: str | None = None
    entropy_coef: float = 0.0  # eta
    grad_divisor: float = 1.0  # of the gradient, not the loss

    @property
    def reads_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence."""
        return self.objective.reads_sequences or self.opsm_anchor is not None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyGradientLoss:
    """Loss of one micro-batch on one rank, and the per-token values behind it, all [T] detached, 0 where masked."""

    loss: Tensor  # [] sum of all terms, differentiable
    token_losses: Tensor  # of the policy term, before its weights; 0 where opsm rejects
    logprobs: Tensor  # nats, of the model being trained
    log_ratios: Tensor  # nats, new minus old, not clamped
    entropy: Tensor | None = None  # nats; None unless asked for or in the loss
    kl: Tensor | None = None  # the estimator's values; None without a KL term
    kept: Tensor | None = None  # bool, not rejected by opsm; None without it
    sequence_log_ratios: Tensor | None = None  # None unless the objective reads them
    sequence_advantages: Tensor | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PolicyLoss:
    """The loss of one micro-batch as a function of its log-probabilities, `loss(logprobs, entropy)`.

    Args:
        terms: what it is made of.
        fields: what is known of its tokens.
    """

    terms: LossTerms
    fields: TokenFields

    @property
    def row(self) -> Row | None:
        """The objective as kernels compute it, where they compute all that the loss has; else None, and it ends in torch."""
        has_more = self.terms.opsm_anchor or self.fields.old_logprobs is None
        return None if has_more else self.terms.objective.row

    def at(self, rows: Tensor | slice) -> "PolicyLoss":
        """The loss of some of the rows, for a loss that reads no sequences."""
        return PolicyLoss(self.terms, self.fields.at(rows))

    def __call__(self, logprobs: Tensor, entropy: Tensor | None = None) -> PolicyGradientLoss:
        """Loss and per-token values, in the dtype of `logprobs`.

        Args:
            logprobs: [T] nats, differentiable.
            entropy: [T] nats, differentiable; needed by an entropy term, else only handed on.
        """
        mask = self.fields.mask

        def select(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(logprobs.dtype), 0)

        tokens, kept = self._tokens(logprobs, select)
        losses = torch.where(mask, self.terms.objective.loss(tokens, self.terms.objective.parameters), 0)
        loss, token_losses = self._policy_term(losses, kept, select)
        auxiliary, kl = self._auxiliary(tokens, entropy, select)
        loss = loss if auxiliary is None else loss + auxiliary
        if self.terms.grad_divisor != 1.0:
            loss = loss.detach() + (loss - loss.detach()) / self.terms.grad_divisor
        return PolicyGradientLoss(
            loss,
            token_losses.detach(),
            select(logprobs.detach()),
            tokens.log_ratios.detach(),
            None if entropy is None else select(entropy.detach()),
            kl,
            kept,
            None if tokens.sequence_log_ratios is None else tokens.sequence_log_ratios.detach(),
            tokens.sequence_advantages,
        )

    def _tokens(self, logprobs: Tensor, select: Callable[[Tensor], Tensor]) -> tuple[Tokens, Tensor | None]:
        """What the objective sees, and what opsm keeps; whole-sequence averages in one exchange for both."""
        fields, anchor = self.fields, self.terms.opsm_anchor
        old = select(logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs)
        advantages = select(fields.advantages)
        log_ratios = torch.where(fields.mask, logprobs - old, 0)
        tokens = {"logprobs": select(logprobs), "old_logprobs": old, "advantages": advantages, "log_ratios": log_ratios}
        rows = []
        if anchor:
            rows.append(torch.where(fields.mask, select(getattr(fields, anchor)) - logprobs, 0).detach())
        objective = self.terms.objective
        if objective.reads_sequences:
            rows += [log_ratios.detach(), advantages]
        if objective.averaged is not None:
            own = torch.where(fields.mask, objective.averaged(Tokens(**tokens), objective.parameters), 0)
            rows.append(own.detach())
        averages = list(fields.sequences.averages(torch.stack(rows))) if rows else []
        kept = ~((advantages < 0) & (averages.pop(0) > self.terms.opsm_threshold)) if anchor else None
        if averages:
            # the value of the sequence, the gradient of the token
            through = log_ratios - log_ratios.detach()
            tokens |= {"sequence_log_ratios": averages[0] + through, "sequence_advantages": averages[1]}
            tokens["sequence_lengths"] = fields.sequences.trained_tokens(old.dtype)
        if objective.averaged is not None:
            tokens["sequence_average"] = averages[2] + (own - own.detach())
        return Tokens(**tokens), kept

    def _policy_term(
        self, losses: Tensor, kept: Tensor | None, select: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor]:
        """The weighted sum of the losses, and the loss of each token that opsm keeps."""
        weights = select(self.fields.corrected_weights)
        token_losses = losses if kept is None else torch.where(kept, losses, 0)
        is_corrected = kept is not None or self.fields.corrections is not None
        if not (self.terms.objective.has_one_loss_per_sequence and is_corrected):
            return (weights * token_losses).sum(), token_losses
        # Every token moves the one loss of its sequence, which weighs what all of them do: to share the average leaves the
        # sum as it is and makes the gradient its own, on tokens that are rejected too.
        weights = weights if kept is None else torch.where(kept, weights, 0)
        return (self.fields.sequences.averages(weights[None])[0] * losses).sum(), token_losses

    def _auxiliary(
        self, tokens: Tokens, entropy: Tensor | None, select: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor | None, Tensor | None]:
        """The KL and entropy terms together, and the values of the KL estimator."""
        terms, fields, kl, sums = self.terms, self.fields, None, []
        if terms.kl_coef:
            x = torch.where(fields.mask, tokens.logprobs - select(fields.ref_logprobs), 0)
            kl = KL_ESTIMATORS[terms.kl_estimator].load()(x, tokens.log_ratios)
            sums.append(terms.kl_coef * (select(fields.term_weights) * kl).sum())
        if terms.entropy_coef:
            sums.append(-terms.entropy_coef * (select(fields.term_weights) * select(entropy)).sum())
        return (sum(sums) if sums else None), (None if kl is None else kl.detach())


def clipped_surrogate(
    fields: TokenFields, *, clip_eps_low: float, clip_eps_high: float, grad_divisor: float
) -> PolicyLoss:
    """The clipped surrogate and nothing else."""
    objective = objective_of("grpo", clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    return PolicyLoss(LossTerms(objective=objective, grad_divisor=grad_divisor), fields)
