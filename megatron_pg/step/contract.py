"""The one scalar that survives Megatron's divisions. Imports nothing of ours.

S is the sum of w·ℓ over this rank's tokens of one micro-batch; the gradient of the step must be the sum of all
∇S. Megatron divides on the way, and the two contracts below undo exactly that:

    flag off:  return (K·D·S, report);     Megatron: × C (schedule), ÷ K, ÷ D·C (DDP)
    flag on:   return (Q·S, n, report);    Megatron: ÷ Q, where Q is the sum of all n

K micro-batches, D data-parallel ranks, C context-parallel ranks. The flag is `calculate_per_token_loss` of the
config that wrapped the model. The other two combinations of tuple and flag are wrong in Megatron: a 3-tuple with the
flag off is divided by a *local* count, a 2-tuple with the flag on is never divided.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The factors that Megatron will apply to this step, as host integers."""

    per_token: bool
    num_microbatches: int  # K
    data_parallel_size: int  # D
    context_parallel_size: int  # C
    count: int  # Q, the sum of the counts that the per-token contract returns

    @property
    def grad_scale(self) -> float:
        """The gradient that the schedule's backward brings to S, but for the loss scale of float16."""
        return float(self.count if self.per_token else self.data_parallel_size * self.context_parallel_size)

    def outputs(self, total: Tensor, local_count: int, policy: Tensor | None = None) -> tuple:
        """Megatron's tuple from S = `total` (0-d, differentiable) and this rank's count.

        The returned loss is a fresh tensor, because the schedule scales it in place; the report is a detached clone
        whose sum over micro-batches and ranks, divided by Megatron, is the objective: `policy` where S has more terms.
        """
        share = 1.0 / (self.num_microbatches * self.data_parallel_size * self.context_parallel_size)
        value = total.detach() if policy is None else policy
        report = {"pg_loss": torch.stack([value, torch.full_like(value, share)])}
        if not self.per_token:
            return total * (self.num_microbatches * self.data_parallel_size), report
        count = torch.full((), local_count, dtype=torch.int32, device=total.device)  # no host sync
        return total * self.count, count, report
