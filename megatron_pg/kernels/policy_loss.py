"""From log-probabilities to the loss, in torch: what every implementation that ends in log-probabilities ends in.

    loss = sum_t w_t l_t + beta sum_t u_t kl_t - eta sum_t u_t H_t

w: the policy loss's weights, with the data's correction in them; u: the auxiliary weights.
"""

from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from megatron_pg.objectives.kl import ESTIMATORS
from megatron_pg.objectives import Objective, Tokens, objective_of
from megatron_pg.batch.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True)
class LossTerms:
    """What the loss of a step is made of. The same on every rank."""

    objective: Objective
    opsm_anchor: str | None = None  # field of PolicyLoss that off-policy sequences are measured from; None: not done
    opsm_threshold: float | None = None  # nats per token
    kl_coef: float = 0.0  # beta
    kl_estimator: str | None = None
    entropy_coef: float = 0.0  # eta
    grad_divisor: float = 1.0  # of the gradient, not the loss

    @property
    def reads_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence."""
        return self.objective.reads_sequences or self.opsm_anchor is not None

    @property
    def is_plain_grpo(self) -> bool:
        """Whether the clipped surrogate of PPO is all there is."""
        only = not (self.opsm_anchor or self.kl_coef or self.entropy_coef)
        return only and self.objective.name == "grpo"


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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PolicyLoss:
    """The loss of one micro-batch as a function of its log-probabilities, `loss(logprobs, entropy)`.

    Args:
        terms: what it is made of.
        mask: [T] bool, trained tokens; the others are selected away before any exp.
        old_logprobs: [T] nats, of the sampling policy.
        advantages: [T].
        weights: [T] of the policy term.
        auxiliary_weights: [T] of the KL and entropy terms; None: `weights`.
        ref_logprobs: [T] nats, of the reference; a KL term needs them.
        rollout_logprobs: [T] nats, as the rollout engine reported them; `opsm_anchor` may name them.
        sequences: which sequence each token belongs to; sequence-level terms need it.
    """

    terms: LossTerms
    mask: Tensor
    old_logprobs: Tensor
    advantages: Tensor
    weights: Tensor
    auxiliary_weights: Tensor | None = None
    ref_logprobs: Tensor | None = None
    rollout_logprobs: Tensor | None = None
    sequences: Sequences | None = None

    def at(self, rows: Tensor | slice) -> "PolicyLoss":
        """The loss of some of the rows, for a loss that reads no sequences."""
        per_token = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        return replace(self, **{name: getattr(self, name)[rows] for name in per_token})

    def __call__(self, logprobs: Tensor, entropy: Tensor | None = None) -> PolicyGradientLoss:
        """Loss and per-token values, in the dtype of `logprobs`.

        Args:
            logprobs: [T] nats, differentiable.
            entropy: [T] nats, differentiable; needed by an entropy term, else only handed on.
        """
        select = partial(_select, self.mask, logprobs.dtype)
        tokens, kept = self._tokens(logprobs, select)
        token_losses = self.terms.objective.loss(tokens, self.terms.objective.parameters)
        token_losses = torch.where(self.mask if kept is None else self.mask & kept, token_losses, 0)
        loss = (select(self.weights) * token_losses).sum()
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

    def _tokens(self, logprobs: Tensor, select: partial) -> tuple[Tokens, Tensor | None]:
        """What the objective sees, and what opsm keeps; whole-sequence averages in one exchange for both."""
        old, advantages = select(self.old_logprobs), select(self.advantages)
        log_ratios = torch.where(self.mask, logprobs - old, 0)
        tokens = {"logprobs": select(logprobs), "old_logprobs": old, "advantages": advantages, "log_ratios": log_ratios}
        rows = []
        if self.terms.opsm_anchor:
            rows.append(torch.where(self.mask, select(getattr(self, self.terms.opsm_anchor)) - logprobs, 0).detach())
        if self.terms.objective.reads_sequences:
            rows += [log_ratios.detach(), advantages]
        averages = list(self.sequences.averages(torch.stack(rows))) if rows else []
        kept = None
        if self.terms.opsm_anchor:
            kept = ~((advantages < 0) & (averages.pop(0) > self.terms.opsm_threshold))
        if averages:
            # the value of the sequence, the gradient of the token
            through = log_ratios - log_ratios.detach()
            tokens |= {"sequence_log_ratios": averages[0] + through, "sequence_advantages": averages[1]}
        return Tokens(**tokens), kept

    def _auxiliary(
        self, tokens: Tokens, entropy: Tensor | None, select: partial
    ) -> tuple[Tensor | None, Tensor | None]:
        """The KL and entropy terms together, and the values of the KL estimator."""
        terms, kl, sums = self.terms, None, []
        weights = self.weights if self.auxiliary_weights is None else self.auxiliary_weights
        if terms.kl_coef:
            x = torch.where(self.mask, tokens.logprobs - select(self.ref_logprobs), 0)
            kl = ESTIMATORS[terms.kl_estimator](x, tokens.log_ratios)
            sums.append(terms.kl_coef * (select(weights) * kl).sum())
        if terms.entropy_coef:
            sums.append(-terms.entropy_coef * (select(weights) * select(entropy)).sum())
        return (sum(sums) if sums else None), (None if kl is None else kl.detach())


def _select(mask: Tensor, dtype: torch.dtype, values: Tensor) -> Tensor:
    return torch.where(mask, values.to(dtype), 0)


def plain_grpo(
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor,
    clip_eps_low: float,
    clip_eps_high: float,
    grad_divisor: float,
) -> PolicyLoss:
    """The clipped surrogate and nothing else."""
    objective = objective_of("grpo", clip_eps_low=clip_eps_low, clip_eps_high=clip_eps_high)
    terms = LossTerms(objective=objective, grad_divisor=grad_divisor)
    return PolicyLoss(terms=terms, mask=mask, old_logprobs=old_logprobs, advantages=advantages, weights=weights)


def grpo_fields(policy_loss: PolicyLoss) -> tuple[Tensor, ...]:
    """What a kernel of the clipped surrogate reads per token: [T] each and contiguous, because kernels have no strides."""
    fields = (policy_loss.old_logprobs, policy_loss.advantages, policy_loss.weights, policy_loss.mask)
    return tuple(values.contiguous() for values in fields)


def clip_bounds(policy_loss: PolicyLoss) -> tuple[float, float]:
    """Between which ratios the clipped surrogate has a gradient whatever the advantage's sign."""
    clip = policy_loss.terms.objective.parameters
    return 1.0 - clip.clip_eps_low, 1.0 + clip.clip_eps_high
