"""The factors that cancel Megatron's divisions of the loss. Imports no module of this package.

S is the sum of w·ℓ over this rank's tokens of one micro-batch, including all other losses. The gradient of the step
must be the sum of all ∇S. Megatron divides on the way, and the two forms below cancel these divisions exactly:

    flag off:  return (K·D·S, report);     Megatron: × C (schedule), ÷ K, ÷ D·C (DDP)
    flag on:   return (Q·S, n, report);    Megatron: ÷ Q, where Q is the sum of all n

for K micro-batches, D data-parallel ranks and C context-parallel ranks. The weights already include every denominator,
so any counts are exact: every forward counts n = 1, and Q = K·D·C. The router of a mixture of experts multiplies its
own losses by the number of its positions, so there n and Q count positions. `experts` adds the factors that old routers
leave out.

torch's FSDP2 (`--use-torch-fsdp2`) averages gradients regardless of the flag, and finalize cannot divide them by Q,
because its `scale_gradients` does nothing:

    flag on, FSDP2:  return (D·C·S, n, report);    Megatron: ÷ D·C (FSDP2)

The router's own losses would keep their factor there, so a mixture of experts is refused under it with the flag on.

In an open step every add is a call of the schedule with its own K, and finalize gets no count:

    flag off:  return (K·D·S, report);     Megatron: × C (schedule), ÷ K, ÷ D·C (DDP, when the step closes)
    flag on:   return (S, n, report);      Megatron: no division

The flag is `calculate_per_token_loss` of the config that wrapped the model. The other two combinations of tuple and
flag are wrong in Megatron: a 3-tuple with the flag off is divided by a *local* count, and a 2-tuple with the flag on is
never divided.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class LossScaling:
    """The sizes that Megatron divides a step by, as host integers."""

    per_token: bool
    num_microbatches: int  # K
    data_parallel_size: int  # D
    context_parallel_size: int  # C
    num_positions: int | None = None  # of all ranks and micro-batches, under a mixture of experts
    name: str = "pg_loss"  # of the policy term in Megatron's log
    averages: bool = False  # with the flag on the wrapper divides by D·C, and nothing else divides
    is_open: bool = False  # K is that of one add, the step's is not known: with the flag on nothing divides

    @property
    def num_forwards(self) -> int:
        """Slices of micro-batches in the step, K·D·C."""
        return self.num_microbatches * self._num_ranks

    @property
    def _num_ranks(self) -> int:
        return self.data_parallel_size * self.context_parallel_size

    @property
    def count(self) -> int:
        """Q, the sum of the counts that the per-token form returns; 1 where Megatron does not divide by it."""
        if self.is_open:
            return 1
        return self.num_forwards if self.num_positions is None else self.num_positions

    @property
    def grad_scale(self) -> float:
        """The gradient of S in the schedule's backward, without the loss scale of float16."""
        return float(self.count if self.per_token and not self.averages else self._num_ranks)

    def local_count(self, num_positions: int) -> int:
        """n of a forward over `num_positions`."""
        return 1 if self.num_positions is None else num_positions

    def outputs(self, total: Tensor, *, num_positions: int = 0, policy: Tensor | None = None) -> tuple:
        """Megatron's tuple from S = `total` (0-d, differentiable) of a forward over `num_positions`.

        The returned loss is a new tensor, because the schedule scales it in place. The report is a detached clone; its
        sum over micro-batches and ranks, divided by Megatron, is the objective. `policy` is the policy term if S has
        others.
        """
        value = total.detach() if policy is None else policy
        report = {self.name: torch.stack([value, torch.full_like(value, 1.0 / self.num_forwards)])}
        if not self.per_token:
            return total * (self.num_microbatches * self.data_parallel_size), report
        count = self.local_count(num_positions)  # on the device without a host sync
        factor = self._num_ranks if self.averages else self.count
        return total * factor, torch.full((), count, dtype=torch.int32, device=total.device), report
