"""Hidden states of a student and a teacher, heads of both, and the loss of a micro-batch written out row by row in
float64."""

import math
from dataclasses import dataclass

import token_oracle
import torch
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import TeacherStates, TermFields
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

KINDS = ("full_forward_kl", "full_reverse_kl", "full_jsd")
SHARE = 0.3
BONUS = 0.2


@dataclass(frozen=True)
class Parts:
    """Rows of which some are the objective's, some the teacher's, some both, and some nobody's, where everything is
    poison."""

    hidden: Tensor  # [T, H]
    weight: Tensor  # [V, H], and padding
    teacher_weight: Tensor  # [V, H_T], and padding
    policy_loss: PolicyLoss
    size: int  # columns that are no padding

    @classmethod
    def draw(
        cls,
        kind: str,
        dtype: torch.dtype,
        *,
        rows: int = 15,
        size: int = 43,
        padding: int = 5,
        width: int = 16,
        has_own_tokens: bool = True,
        objective: str = "reinforce",
    ) -> "Parts":
        """From torch's generator. Among the rows of both: probabilities that are 0 in float32, of either policy."""
        policy, taught = (torch.rand(rows) < 0.6 for _ in range(2))
        policy[:4], taught[:4] = torch.tensor([True, True, True, False]), torch.tensor([True, True, False, True])
        policy[-1] = taught[-1] = False
        taught = taught if has_own_tokens else policy
        mask = policy | taught
        hidden = torch.randn(rows, width, dtype=dtype)
        states = torch.randn(int(taught.sum()), 12, dtype=dtype)
        hidden[0], states[1] = 30 * hidden[0], 30 * states[1]
        hidden[~mask] = math.nan
        weight = torch.randn(size + padding, width, dtype=dtype) * width**-0.5
        weights = {
            name: torch.where(own, torch.rand(rows), 0).double() for name, own in (("rl", policy), ("t", taught))
        }
        share = SHARE if kind == "full_jsd" else None
        loss_terms = (
            LossTerm(name="t", kind=kind, weight=0.7, mixture=share, on=None if has_own_tokens else "rl"),
            LossTerm(name="h", kind="entropy", weight=BONUS, on="rl"),
        )
        fields = TokenFields(
            targets=torch.where(mask, torch.randint(0, size, (rows,)), -100),
            mask=mask,
            weights=weights["rl"],
            old_logprobs=torch.where(policy, -torch.rand(rows) - 2, math.nan).double(),
            advantages=torch.where(policy, torch.randn(rows), math.nan).double(),
            terms={
                "rl": TermFields(mask=policy if has_own_tokens else None),
                "t": TermFields(weights=weights["t"], mask=taught if has_own_tokens else None),
            },
            teacher_hidden=TeacherStates(slots=(taught.cumsum(0) - 1).clamp(min=0), states=states),
        )
        terms = LossTerms(objective=objective_of(objective), further=loss_terms, grad_divisor=2.0)
        teacher_weight = torch.randn(size + padding, 12, dtype=dtype) * 12**-0.5
        return cls(hidden, weight, teacher_weight, PolicyLoss(terms, fields), size)

    def expected(self, temperature: float) -> tuple[float, Tensor, Tensor]:
        """The loss, and its gradients by hidden states and weight, regardless of the gradient is divided by."""
        fields, (term, _) = self.policy_loss.fields, self.policy_loss.terms.further
        weight = self.weight[: self.size].double()
        hidden = torch.where(fields.mask[:, None], self.hidden.double(), 0)
        logits = (hidden @ weight.t()).requires_grad_()
        log_q = (logits / temperature).log_softmax(1)
        policy = fields.objective_mask
        targets, weights = fields.targets.clamp(min=0)[:, None], torch.where(policy, fields.weights, 0)
        bonus = BONUS * (log_q.exp() * log_q).sum(1)
        advantages = torch.where(policy, fields.advantages, 0)
        loss = (weights * (bonus - advantages * log_q.gather(1, targets)[:, 0])).sum()
        loss.backward()
        total, gradient = float(loss.detach()), logits.grad
        teacher = self.policy_loss.fields.teacher_hidden
        theirs = teacher.states.double() @ self.teacher_weight[: self.size].double().t()
        for t in fields.of_term("t").mask.nonzero()[:, 0].tolist():
            pair = logits[t].tolist(), theirs[teacher.slots[t]].tolist()
            row = token_oracle.full_divergence(term.kind, *pair, temperature=temperature, share=term.mixture)
            factor = term.weight * float(fields.of_term("t").weights[t])
            total += factor * row.value
            gradient[t] += factor * torch.from_numpy(row.gradient)
        of_weight = torch.zeros_like(self.weight, dtype=torch.float64)
        of_weight[: self.size] = gradient.t() @ hidden
        return total, gradient @ weight, of_weight
