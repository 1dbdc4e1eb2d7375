"""Objective × weights, handed to Megatron as the one scalar that survives its divisions.

S is the sum of w·ℓ over this rank's tokens of one micro-batch; the gradient of the step must be the sum of all
∇S. Megatron divides on the way, and the two contracts below undo exactly that:

    flag off:  return (K·D·S, report);     Megatron: × C (schedule), ÷ K, ÷ D·C (DDP)
    flag on:   return (Q·S, n, report);    Megatron: ÷ Q, where Q is the sum of all n

K micro-batches, D data-parallel ranks, C context-parallel ranks. The flag is `calculate_per_token_loss` of the
config that wrapped the model. The other two combinations of tuple and flag are wrong in Megatron: a 3-tuple with the
flag off is divided by a *local* count, a 2-tuple with the flag on is never divided.
"""

import os
from argparse import Namespace
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch
from megatron_pg.kernels import GRPOLoss, grpo_loss
from megatron_pg.metrics import Reduction, TokenValues
from megatron_pg.plan import StepPlan
from megatron_pg.reducers.custom import CustomReducer, load_custom_reducer, token_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the validated arguments say about the loss. The same on every rank."""

    aggregation: str
    divisor: float | None
    reducer: CustomReducer | None  # replaces the aggregation for pg_loss
    per_token: bool  # Megatron's calculate_per_token_loss: which contract
    clip_eps_low: float
    clip_eps_high: float
    temperature: float
    kernel: str
    metrics: Reduction

    @classmethod
    def from_args(cls, args: Namespace) -> "LossSettings":
        """Settings from arguments that `validate_args` has accepted; loads and probes the custom reducer (rule E16)."""
        path = args.custom_pg_loss_reducer_function_path
        per_token = vars(args).get("calculate_per_token_loss", False)
        return cls(
            aggregation=args.loss_aggregation,
            divisor=args.loss_aggregation_divisor,
            reducer=load_custom_reducer(path, calculate_per_token_loss=per_token) if path else None,
            per_token=per_token,
            clip_eps_low=args.pg_clip_eps_low,
            clip_eps_high=args.pg_clip_eps_high,
            temperature=args.pg_temperature,
            kernel=_available_kernel(args.pg_kernel),
            metrics=Reduction(args.pg_metrics),
        )

    @property
    def plan_aggregation(self) -> str:
        """The aggregation that the step is planned with: a custom reducer needs only N_r and T."""
        return self.aggregation if self.reducer is None else "token_mean" if self.per_token else "sample_mean"


def _available_kernel(asked: str | None) -> str:
    cuda = torch.version.cuda is not None and torch.cuda.is_available()
    if asked is None:
        return "triton" if cuda else "torch"
    if asked == "triton" and not cuda and os.environ.get("TRITON_INTERPRET") != "1":
        raise ValueError(
            "--pg-kernel triton cannot run here: no CUDA device is visible (TRITON_INTERPRET=1 runs it on a CPU, to test). Use "
            "--pg-kernel torch or leave the flag out"
        )
    return asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Contract:
    """The factors that Megatron will apply to this step, as host integers."""

    per_token: bool
    num_microbatches: int  # K
    data_parallel_size: int  # D
    context_parallel_size: int  # C
    count: int  # Q, the sum of the counts that the per-token contract returns

    @property
    def upstream(self) -> float:
        """The gradient that the schedule's backward brings to S, but for the loss scale of float16."""
        return float(self.count if self.per_token else self.data_parallel_size * self.context_parallel_size)

    def outputs(self, total: Tensor, local_count: int) -> tuple:
        """Megatron's tuple from S = `total` (0-d, differentiable) and this rank's count.

        The returned loss is a fresh tensor, because the schedule scales it in place; the report is a detached clone
        whose sum over micro-batches and ranks, divided by Megatron, is the objective.
        """
        share = 1.0 / (self.num_microbatches * self.data_parallel_size * self.context_parallel_size)
        value = total.detach()
        report = {"pg_loss": torch.stack([value, torch.full_like(value, share)])}
        if not self.per_token:
            return total * (self.num_microbatches * self.data_parallel_size), report
        count = torch.full((), local_count, dtype=torch.int32, device=total.device)  # no host sync
        return total * self.count, count, report


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchLoss:
    """What the model returns on the last stage for one micro-batch."""

    total: Tensor  # [] S, differentiable
    partial: Tensor  # [width] float64 metrics of this rank and micro-batch
    nonfinite: Tensor  # [2] float64: number of trained tokens whose loss is not finite, first of them (inf: none)


def reducer_weights(batch: PackedBatch, settings: LossSettings) -> Tensor | None:
    """[sum of R] float64: what a custom reducer weighs each response token, before 1/N_r or 1/T; None without one.

    It runs the user's code, so the step asks for it before anything is exchanged.
    """
    if settings.reducer is None:
        return None
    return token_weights(
        settings.reducer,
        [len(sample.tokens) for sample in batch.samples],
        [sample.loss_mask for sample in batch.samples],
        calculate_per_token_loss=settings.per_token,
    )


def response_weights(
    batch: PackedBatch, plan: StepPlan, first_sample: int, *, custom: Tensor | None, per_token: bool
) -> Tensor:
    """[sum of R] float64: the weight of each response token of a micro-batch in the step's objective, 0 where masked.

    Args:
        batch: the micro-batch.
        plan: the step's plan.
        first_sample: index of the micro-batch's first sample among this process's samples of the step.
        custom: `reducer_weights` of the micro-batch.
        per_token: Megatron's flag; a custom reducer is divided by T instead of N_r.
    """
    if custom is not None:
        return custom / (plan.num_tokens if per_token else plan.num_rollouts)
    denominators = plan.denominators[first_sample : first_sample + len(batch.samples)]
    return batch.loss_mask / batch.per_token(denominators)


def microbatch_loss(
    logits: Tensor,
    local: LocalBatch,
    settings: LossSettings,
    tp_group: ProcessGroup | None,
    *,
    upstream: float = 1.0,
) -> MicrobatchLoss:
    """Loss and diagnostics of one micro-batch on this rank; no host sync.

    Args:
        logits: [T, V / tp]. The Triton kernels write the gradient over them.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        tp_group: tensor-parallel group.
        upstream: the contract's, so that the gradient is made in its final scale.
    """
    out = grpo_loss(
        logits,
        local.targets,
        local.old_logprobs,
        local.advantages,
        local.weights,
        mask=local.mask,
        clip_eps_low=settings.clip_eps_low,
        clip_eps_high=settings.clip_eps_high,
        temperature=settings.temperature,
        tp_group=tp_group,
        grad_scale=upstream,
        entropy=settings.metrics.needs_entropy,
        inplace=settings.kernel == "triton" and logits.requires_grad and not logits.is_leaf,
        impl=settings.kernel,
    )
    with torch.no_grad():
        tokens = _token_values(out, local, settings)
        return MicrobatchLoss(out.loss, settings.metrics.partial(tokens), _count_nonfinite(tokens))


def _token_values(out: GRPOLoss, local: LocalBatch, settings: LossSettings) -> TokenValues:
    return TokenValues(
        mask=local.mask,
        document_weights=local.document_weights,
        weights=local.weights,
        token_losses=out.token_losses.double(),
        logprobs=out.logprobs.double(),
        old_logprobs=local.old_logprobs,
        log_ratios=out.log_ratios.double(),
        advantages=local.advantages,
        entropy=None if out.entropy is None else out.entropy.double(),
        ref_logprobs=local.ref_logprobs,
        rollout_logprobs=local.rollout_logprobs,
        clip_eps_low=settings.clip_eps_low,
        clip_eps_high=settings.clip_eps_high,
    )


def _count_nonfinite(tokens: TokenValues) -> Tensor:
    # the log-ratio too: its clamp would hide an infinite one from the loss
    bad = tokens.mask & ~(torch.isfinite(tokens.token_losses) & torch.isfinite(tokens.log_ratios))
    position = torch.arange(len(bad), dtype=torch.float64, device=bad.device)
    none = torch.full((1,), torch.inf, dtype=torch.float64, device=bad.device)
    return torch.stack([bad.sum().double(), torch.cat([torch.where(bad, position, none), none]).amin()])
