"""The loss as a function of log-probabilities, in torch: the specification of the kernels, and where they do not apply.

    loss = sum_t w_t l_t + sum_s lambda_s sum_t w^s_t l^s_t

w, l: corrected weights and objective; w^s, l^s: weights and loss of another loss term s, for instance a KL divergence,
which no correction touches.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.adaptive_entropy import AdaptiveEntropy
from megatron_pg.declarations.loss_terms import KINDS, OBJECTIVE, LossTerm
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.kernels.teacher import Form
from megatron_pg.kernels.topk import TopKLogprobs
from megatron_pg.objectives import Objective, Tokens
from megatron_pg.objectives.interface.token_kernel import TokenKernel
from megatron_pg.objectives.terms.losses import Categories, TermTokens


@dataclass(frozen=True, kw_only=True, eq=False)
class LossTerms:
    """What the loss of a step is made of. The same on every rank.

    Use one object for all micro-batches: the settings are checked, and what follows from them is computed, once per
    object.
    """

    objective: Objective
    opsm_anchor: str | None = None  # field of TokenFields that off-policy sequences are measured from; None: not done
    opsm_threshold: float | None = None  # nats per token
    further: tuple[LossTerm, ...] = ()  # in addition to the objective, each with a weight > 0, or one that may rise
    has_objective: bool = True  # False: it is dropped
    grad_divisor: float = 1.0  # of the gradient, not the loss
    sampling_mask_entropy: str = "full"  # entropies are over the whole vocabulary, or "kept": over the sampling mask
    adaptive_entropy: AdaptiveEntropy | None = None  # which sets the weight of the term `entropy`; None: it is constant

    @property
    def all(self) -> tuple[LossTerm, ...]:
        """Every loss term, the objective first."""
        return (OBJECTIVE, *self.further) if self.has_objective else self.further

    @cached_property
    def reads_sequences(self) -> bool:
        """Whether a token's loss depends on its whole sequence."""
        return self.objective.reads_sequences or self.opsm_anchor is not None

    @cached_property
    def reads(self) -> frozenset[str]:
        """Fields of the samples that loss terms and OPSM need."""
        anchor = () if self.opsm_anchor is None else (self.opsm_anchor,)
        return frozenset((*anchor, *(name for term in self.further for name in term.reads)))

    @cached_property
    def reads_topk(self) -> bool:
        """Whether a loss term is over the teacher's top-k tokens."""
        return any(term.reads_topk for term in self.further)

    @cached_property
    def whole_form(self) -> Form | None:
        """The divergence from the teacher's hidden states; None: nothing reads them."""
        found = next((term for term in self.further if term.reads_hidden), None)
        return None if found is None else Form(str(KINDS[found.kind].whole_form), found.mixture)

    @cached_property
    def reads_entropy(self) -> bool:
        """Whether the entropy is in the loss."""
        return any(term.kind == "entropy" for term in self.further)

    @cached_property
    def token_kernel(self) -> TokenKernel | None:
        """The objective's token kernel where kernels compute all terms; None: the loss is computed in torch.

        Kernels compute at most one divergence and one entropy term. They average over sequences once, so they cannot
        first reject tokens by opsm and then average the weights of the kept ones.
        """
        kinds = [term.kind if KINDS[term.kind].against is None else "divergence" for term in self.further]
        has_more = not {*kinds} <= {"divergence", "entropy"} or len({*kinds}) < len(kinds)
        has_more |= self.opsm_anchor is not None and self.objective.has_one_loss_per_sequence
        return None if has_more else self.objective.token_kernel

    @cached_property
    def without_teacher(self) -> "LossTerms":
        """All but the loss terms over a teacher's distribution, of its top-k tokens or from its hidden states."""
        return replace(self, further=tuple(term for term in self.further if term.payload is None))


@dataclass(frozen=True, slots=True, eq=False)
class PolicyGradientLoss:
    """Loss of one micro-batch on one rank, and its per-token values: [T] each, detached, 0 where masked."""

    loss: Tensor  # [] sum of all terms, differentiable
    token_losses: Tensor  # of the policy term, before its weights; 0 where opsm rejects
    logprobs: Tensor  # nats, of the model being trained
    log_ratios: Tensor  # nats, new minus old, not clamped
    entropy: Tensor | None = None  # nats; None unless asked for or in the loss
    term_losses: Tensor | None = None  # [n, T] before weights, each 0 outside its tokens; None: n = 0
    kept: Tensor | None = None  # bool, not rejected by opsm; None without it
    sequence_log_ratios: Tensor | None = None  # None unless the objective reads them
    sequence_advantages: Tensor | None = None
    student_mass: Tensor | None = None  # Σ q over the top-k tokens; None: no term reads them

    @property
    def per_token(self) -> tuple[Tensor | None, ...]:
        """All but the loss, in their order."""
        return tuple(getattr(self, each.name) for each in fields(self) if each.name != "loss")

    def with_terms(
        self, policy_loss: "PolicyLoss", added: Iterable[Tensor], losses: Iterable[Tensor]
    ) -> "PolicyGradientLoss":
        """The loss of all terms, from this one of `LossTerms.without_teacher`.

        Args:
            policy_loss: with all terms.
            added: weighted sums [] of the terms over a teacher's distribution.
            losses: [T] of each of these terms, in their order.
        """
        others = iter(() if self.term_losses is None else self.term_losses)
        own, terms = iter(losses), policy_loss.terms.further
        every = [next(others if term.payload is None else own) for term in terms]
        return replace(self, loss=sum(added, start=self.loss), term_losses=torch.stack(every))


@dataclass(frozen=True, eq=False)
class PolicyLoss:
    """The loss of one micro-batch as a function of its log-probabilities, `loss(logprobs, entropy)`.

    Args:
        terms: what it is made of.
        fields: what is known of its tokens.
    """

    terms: LossTerms
    fields: TokenFields

    @cached_property
    def token_kernel(self) -> TokenKernel | None:
        """`LossTerms.token_kernel` where all terms are over the objective's tokens; None: the loss is in torch."""
        has_own_tokens = any(own.mask is not None for own in self.fields.terms.values())
        return None if has_own_tokens or self.fields.old_logprobs is None else self.terms.token_kernel

    @property
    def is_by_token(self) -> bool:
        """Whether kernels compute the whole loss of a token from its row of logits."""
        return bool(self.token_kernel) and not self.terms.reads_sequences and self.fields.sampling_mask is None

    @cached_property
    def topk_ids(self) -> Tensor | None:
        """[T, K] ids of the teacher's top-k tokens, -1 where no term reads one; None: no term reads any."""
        if not self.terms.reads_topk:
            return None
        readers = [self.fields.of_term(term.name).mask for term in self.terms.further if term.reads_topk]
        return torch.where(torch.stack(readers).any(dim=0)[:, None], self.fields.topk.ids, -1)

    def restriction(self, entropy: bool) -> Restriction | None:
        """What the log-probabilities, and the entropies, are over; None: the whole vocabulary everywhere.

        `entropy`: whether it is wanted as a metric; the loss may read it too.
        """
        if self.fields.sampling_mask is None:
            return None
        is_whole = (entropy or self.terms.reads_entropy) and self.terms.sampling_mask_entropy == "full"
        return Restriction(sampling_mask=self.fields.sampling_mask, whole_entropy=is_whole)

    def at(self, rows: Tensor | slice) -> "PolicyLoss":
        """The loss of some of the rows, for a loss that reads no sequences."""
        return PolicyLoss(self.terms, self.fields.at(rows))

    def __call__(
        self,
        logprobs: Tensor,
        entropy: Tensor | None = None,
        topk: TopKLogprobs | None = None,
        divergence: Tensor | None = None,
    ) -> PolicyGradientLoss:
        """Loss and per-token values, in the dtype of `logprobs`.

        Args:
            logprobs: [T] nats, differentiable.
            entropy: [T] nats, differentiable; needed by an entropy term, else only handed on.
            topk: of `topk_ids`, where those are; differentiable.
            divergence: [T] nats, the terms' `whole_form` from the teacher; differentiable. None: no token here has a
                teacher.
        """
        mask, dtype = self.fields.objective_mask, logprobs.dtype

        def select(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(dtype), 0)

        tokens, kept = self._tokens(logprobs, select)
        losses = torch.where(mask, self.terms.objective.loss(tokens, self.terms.objective.parameters), 0)
        loss, token_losses = self._policy_term(losses, kept, select)
        further, term_losses = self._terms(tokens, logprobs, entropy, topk, divergence)
        loss = loss if further is None else loss + further
        named = None if topk is None else torch.where(cast(Tensor, self.topk_ids) >= 0, topk.head.detach().exp(), 0)
        if (divisor := self.terms.grad_divisor) != 1.0:
            stopped = loss.detach()  # inf - inf would be NaN
            loss = torch.where(stopped.isfinite(), stopped + (loss - stopped) / divisor, loss / divisor)
        return PolicyGradientLoss(
            loss,
            token_losses.detach(),
            select(logprobs.detach()),
            tokens.log_ratios.detach(),
            None if entropy is None else select(entropy.detach()),
            term_losses,
            kept,
            None if tokens.sequence_log_ratios is None else tokens.sequence_log_ratios.detach(),
            tokens.sequence_advantages,
            None if named is None else named.sum(dim=1).to(dtype),
        )

    def _tokens(self, logprobs: Tensor, select: Callable[[Tensor], Tensor]) -> tuple[Tokens, Tensor | None]:
        """What the objective sees, and what opsm keeps; whole-sequence averages in one exchange for both."""
        fields, anchor = self.fields, self.terms.opsm_anchor
        old = select(logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs)
        advantages = select(fields.advantages)
        mask = fields.objective_mask
        log_ratios = torch.where(mask, logprobs - old, 0)
        tokens = {"logprobs": select(logprobs), "old_logprobs": old, "advantages": advantages, "log_ratios": log_ratios}
        rows = []
        if anchor:
            rows.append(torch.where(mask, select(getattr(fields, anchor)) - logprobs, 0).detach())
        objective = self.terms.objective
        if objective.reads_sequences:
            rows += [log_ratios.detach(), advantages]
        if objective.averaged is not None:
            own = torch.where(mask, objective.averaged(Tokens(**tokens), objective.parameters), 0)
            rows.append(own.detach())
        sequences = cast(Sequences, fields.sequences)  # where they are read
        averages = list(sequences.averages(torch.stack(rows))) if rows else []
        kept = ~((advantages < 0) & (averages.pop(0) > self.terms.opsm_threshold)) if anchor else None
        if averages:
            # the value of the sequence, the gradient of the token
            through = log_ratios - log_ratios.detach()
            tokens |= {"sequence_log_ratios": averages[0] + through, "sequence_advantages": averages[1]}
            tokens["sequence_lengths"] = sequences.trained_tokens(old.dtype)
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
        # Every token moves the one loss of its sequence, which weighs what all of them do: to share the average leaves
        # the sum as it is and makes the gradient its own, on tokens that are rejected too.
        weights = weights if kept is None else torch.where(kept, weights, 0)
        return (cast(Sequences, self.fields.sequences).averages(weights[None])[0] * losses).sum(), token_losses

    def _terms(
        self,
        policy: Tokens,
        logprobs: Tensor,
        entropy: Tensor | None,
        topk: TopKLogprobs | None,
        divergence: Tensor | None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The weighted sum of all loss terms' losses, and the losses; `policy` is what the objective sees."""
        sums, losses = [], []
        for term in self.terms.further:
            own = self.fields.of_term(term.name)
            shared = policy if own.mask is self.fields.objective_mask else None
            known = self._of_term(term, own.mask, shared, logprobs, entropy)
            if term.reads_topk:
                categories = self._categories(term, own.mask, cast(TopKLogprobs, topk))
                known = replace(known, categories=categories, mixture=term.mixture)
            if term.reads_hidden:
                zero = logprobs.new_zeros(())
                whole = torch.where(own.mask, zero if divergence is None else divergence, zero)
                known = replace(known, whole_divergence=whole)
            losses.append(KINDS[term.kind].load()(known))
            sums.append(term.weight * (torch.where(own.mask, own.weights.to(logprobs.dtype), 0) * losses[-1]).sum())
        return (sum(sums[1:], start=sums[0]), torch.stack(losses).detach()) if sums else (None, None)

    def _of_term(
        self, term: LossTerm, mask: Tensor, shared: Tokens | None, logprobs: Tensor, entropy: Tensor | None
    ) -> TermTokens:
        """What a loss term sees; where its tokens are the objective's, what that sees."""

        def select(values: Tensor) -> Tensor:
            return torch.where(mask, values.to(logprobs.dtype), 0)

        fields, against = self.fields, KINDS[term.kind].against
        log_ratios = None if shared is None else shared.log_ratios
        old = logprobs.detach() if fields.old_logprobs is None else fields.old_logprobs
        if log_ratios is None and "old_logprobs" in term.reads:
            log_ratios = torch.where(mask, logprobs - select(old), 0)
        return TermTokens(
            logprobs=select(logprobs) if shared is None else shared.logprobs,
            log_ratios=log_ratios,
            against=None if against is None else select(old if against == "old_logprobs" else getattr(fields, against)),
            entropy=select(cast(Tensor, entropy)) if term.kind == "entropy" else None,
            estimator=term.estimator,
        )

    def _categories(self, term: LossTerm, mask: Tensor, topk: TopKLogprobs) -> Categories:
        """The named tokens and the tail, of student and teacher, float64; none where the token is not of the term."""
        teacher = self.fields.topk
        floor = 1.0 if term.tail_floor is None else term.tail_floor  # without a tail nothing is read
        exist = torch.cat([teacher.ids >= 0, (topk.has_tail & (term.tail_floor is not None))[:, None]], dim=1)
        exist &= mask[:, None]
        log_p = torch.cat([teacher.logprobs.double(), teacher.tails.clamp(min=floor).log()[:, None]], dim=1)
        log_q = torch.cat([topk.head, topk.tail[:, None]], dim=1)
        return Categories(torch.where(exist, log_q, 0), torch.where(exist, log_p, 0), exist)
