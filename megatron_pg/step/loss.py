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
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.pack import LocalBatch, PackedBatch
from megatron_pg.objectives.corrections import NONE as NO_CORRECTION
from megatron_pg.objectives.corrections import Correction, correction_factors
from megatron_pg.kernels import LossTerms, PolicyGradientLoss, PolicyLoss, may_be_overwritten, policy_gradient_loss
from megatron_pg.lm_head import policy_gradient_head_loss
from megatron_pg.metrics import Reduction, TokenValues
from megatron_pg.flags.loss_terms import REJECTS_BY_DATA, correction_numbers, objective_numbers
from megatron_pg.objectives import Objective, Tokens, objective_of
from megatron_pg.objectives.custom import custom_objective_of
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.step.plan import StepPlan
from megatron_pg.reducers.custom import CustomReducer, load_custom_reducer, token_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """What the validated arguments say about the loss. The same on every rank."""

    aggregation: str
    divisor: float | None
    reducer: CustomReducer | None  # replaces the aggregation for pg_loss
    per_token: bool  # Megatron's calculate_per_token_loss: which contract
    terms: LossTerms
    correction: Correction = NO_CORRECTION
    denominator: str = "scheduled"  # what the policy term's denominators count
    aux_aggregation: str = "default"  # or "policy": the KL and entropy terms take the policy term's
    temperature: float
    vocab_size: int | None = None  # columns beyond it are padding
    kernel: str
    float32_logits: bool = False
    fused_head: str | None = None  # a mode of `lm_head`; None: the model makes its logits
    head_backward: str = "bf16"
    metrics: Reduction

    @classmethod
    def from_args(cls, args: Namespace) -> "LossSettings":
        """Settings from arguments that `validate_args` has accepted; loads and probes the user's functions (rule E16)."""
        path = args.custom_pg_loss_reducer_function_path
        per_token = vars(args).get("calculate_per_token_loss", False)
        correction = Correction(
            name=args.pg_correction, **{n.removeprefix("correction_"): v for n, v in correction_numbers(args).items()}
        )
        terms = _terms(args, correction)
        return cls(
            aggregation=args.loss_aggregation,
            divisor=args.loss_aggregation_divisor,
            reducer=load_custom_reducer(path, calculate_per_token_loss=per_token) if path else None,
            per_token=per_token,
            terms=terms,
            correction=correction,
            denominator=args.pg_denominator,
            aux_aggregation=args.pg_aux_aggregation,
            temperature=args.pg_temperature,
            vocab_size=args.pg_vocab_size,
            float32_logits=args.fp32_lm_head,
            fused_head=args.pg_fused_head,
            head_backward=args.fp32_lm_head_backward or "bf16",
            kernel=_available_kernel(args.pg_kernel),
            metrics=Reduction(args.pg_metrics, features_of(terms, correction)),
        )

    @property
    def plan_aggregation(self) -> str:
        """The aggregation that the step is planned with: a custom reducer needs only N_r and T."""
        return self.aggregation if self.reducer is None else self.step_mean

    @property
    def step_mean(self) -> str:
        """What the per-token flag by itself means: the aggregation of the KL and entropy terms."""
        return "token_mean" if self.per_token else "sample_mean"

    @property
    def plan_auxiliary_aggregation(self) -> str | None:
        """The aggregation of the KL and entropy terms; None where there are none, or their weights are the policy term's."""
        if not (self.terms.kl_coef or self.terms.entropy_coef) or self.aux_aggregation == "policy":
            return None
        same = self.reducer is None and self.denominator != "kept" and self.aggregation == self.step_mean
        return None if same else self.step_mean


def features_of(terms: LossTerms, correction: Correction) -> frozenset[str]:
    """What the loss has, by the names under which metrics ask for it."""
    features = {
        "clip": terms.objective.outside is not None,
        "sequence": terms.objective.reads_sequences,
        "correction": correction.name != "none",
        "kl": terms.kl_coef != 0,
        "entropy": terms.entropy_coef != 0,
        "auxiliary": terms.kl_coef != 0 or terms.entropy_coef != 0,
    }
    return frozenset(name for name, present in features.items() if present)


def _terms(args: Namespace, correction: Correction) -> LossTerms:
    opsm = {"opsm": "rollout_logprobs", "opsm_old": "old_logprobs"}.get(correction.name)
    return LossTerms(
        objective=_objective(args),
        opsm_anchor=opsm,
        opsm_threshold=correction.high if opsm else None,
        kl_coef=args.pg_kl_coef,
        kl_estimator=args.pg_kl_estimator,
        entropy_coef=args.pg_entropy_coef,
        grad_divisor=args.pg_grad_divisor,
    )


def _objective(args: Namespace) -> Objective:
    if args.pg_custom_objective_path is not None:
        return custom_objective_of(args)
    return objective_of(args.pg_objective, **objective_numbers(args))


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


@dataclass(frozen=True, slots=True, eq=False)
class MicrobatchLoss:
    """What the model returns on the last stage for one micro-batch."""

    total: Tensor  # [] S, differentiable
    policy: Tensor  # [] its policy term
    partial: Tensor  # [width] float64 metrics of this rank and micro-batch
    nonfinite: Tensor  # [2] float64: number of trained tokens whose loss is not finite, first of them (inf: none)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFactors:
    """What is known of a micro-batch's response tokens before anything is exchanged, [sum of R] each."""

    reducer: Tensor | None  # float64, what a custom reducer weighs, before 1/N_r or 1/T
    corrections: Tensor | None  # float64, factor on the policy term; None: data do not decide, or there is none
    kept: Tensor | None  # bool, trained and not rejected; None: every trained token is

    def kept_per_sample(self, batch: PackedBatch) -> list[int]:
        """Trained tokens of each sample that no correction rejects."""
        if self.kept is None:
            return batch.tokens_per_sample
        return [int(part.sum()) for part in self.kept.split([sample.response_length for sample in batch.samples])]


def token_factors(batch: PackedBatch, settings: LossSettings) -> TokenFactors:
    """Reducer and correction of a micro-batch; it checks fields and runs the user's code, so the step asks for it first.

    Raises:
        ValueError: a sample lacks a field that the loss needs, or the reducer weighs tokens of a sequence unevenly under
            an objective of whole sequences.
    """
    _check_fields(batch, settings)
    reducer = _reducer_weights(batch, settings)
    corrected = correction_factors(batch.samples, settings.correction)
    corrections, kept = (None, None) if corrected is None else corrected
    return TokenFactors(
        reducer=reducer,
        corrections=corrections,
        kept=kept if settings.correction.name in REJECTS_BY_DATA else None,
    )


def _check_fields(batch: PackedBatch, settings: LossSettings) -> None:
    needs = {}
    if settings.terms.kl_coef:
        needs["ref_logprobs"] = f"--pg-kl-coef {settings.terms.kl_coef:g}"
    if settings.correction.name not in ("none", "opsm_old"):
        needs["rollout_logprobs"] = f"--pg-correction {settings.correction.name}"
    for name, flag in needs.items():
        for sample in batch.samples:
            if getattr(sample, name) is None:
                raise ValueError(
                    f"sample {sample.sample_id} has no {name}, which {flag} needs. Give it to every sample, or remove the flag."
                )


def _reducer_weights(batch: PackedBatch, settings: LossSettings) -> Tensor | None:
    if settings.reducer is None:
        return None
    weights = token_weights(
        settings.reducer,
        [len(sample.tokens) for sample in batch.samples],
        [sample.loss_mask for sample in batch.samples],
        calculate_per_token_loss=settings.per_token,
    )
    if settings.terms.objective.name == "gspo":
        parts = weights.split([sample.response_length for sample in batch.samples])
        for sample, part in zip(batch.samples, parts, strict=True):
            trained = part[sample.loss_mask]
            if len(trained) and trained.max() - trained.min() > 1e-6 * trained.abs().max():
                raise ValueError(
                    f"the custom reducer weighs the tokens of sample {sample.sample_id} unevenly, and gspo has one loss for the whole "
                    "sequence. Use --pg-objective gspo_token, or a reducer with one weight per sample."
                )
    return weights


def response_weights(
    batch: PackedBatch, plan: StepPlan, first_sample: int, *, factors: TokenFactors, settings: LossSettings
) -> Tensor:
    """[sum of R] float64: the weight of each response token of a micro-batch in the policy term, 0 where masked.

    Args:
        batch: the micro-batch.
        plan: the step's plan.
        first_sample: index of the micro-batch's first sample among this process's samples of the step.
        factors: `token_factors` of the micro-batch.
        settings: the loss settings.
    """
    if factors.reducer is not None:
        return factors.reducer / (plan.num_tokens if settings.per_token else plan.num_rollouts)
    return batch.loss_mask / _per_token(batch, plan.denominators, first_sample)


def auxiliary_weights(batch: PackedBatch, plan: StepPlan, first_sample: int) -> Tensor | None:
    """[sum of R] float64: the weight of each response token in the KL and entropy terms; None: the policy term's."""
    if plan.auxiliary_denominators is None:
        return None
    return batch.loss_mask / _per_token(batch, plan.auxiliary_denominators, first_sample)


def _per_token(batch: PackedBatch, denominators: Tensor, first_sample: int) -> Tensor:
    return batch.per_token(denominators[first_sample : first_sample + len(batch.samples)])


def microbatch_loss(
    logits: Tensor,
    local: LocalBatch,
    settings: LossSettings,
    tp_group: ProcessGroup | None,
    *,
    cp_group: ProcessGroup | None = None,
    upstream: float = 1.0,
) -> MicrobatchLoss:
    """Loss and diagnostics of one micro-batch on this rank; no host sync.

    Args:
        logits: [T, V / tp]. The Triton kernels write the gradient over them.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        tp_group: tensor-parallel group.
        cp_group: context-parallel group, for sequence-level terms; every rank of it must call. None: no such ranks.
        upstream: the contract's, so that the gradient is made in its final scale.
    """
    out = policy_gradient_loss(
        logits,
        local.targets,
        policy_loss_of(local, settings, cp_group),
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        tp_group=tp_group,
        grad_scale=upstream,
        entropy=settings.metrics.needs_entropy,
        inplace=settings.kernel == "triton" and may_be_overwritten(logits),
        impl=settings.kernel,
    )
    return _with_diagnostics(out, local, settings)


def microbatch_head_loss(
    head: HeadCall,
    local: LocalBatch,
    settings: LossSettings,
    *,
    cp_group: ProcessGroup | None = None,
    upstream: float = 1.0,
) -> MicrobatchLoss:
    """The same from what the output layer was called with, by the fused head.

    Args:
        head: hidden states and weight.
        local: this rank's slice of the micro-batch.
        settings: the loss settings.
        cp_group: context-parallel group.
        upstream: the contract's; the mode "forward" makes the weight gradient for it.
    """
    out = policy_gradient_head_loss(
        head.hidden,
        head.weight,
        local.targets,
        policy_loss_of(local, settings, cp_group),
        rows=local.trained,
        temperature=settings.temperature,
        vocab_size=settings.vocab_size,
        grad_scale=upstream,
        tp_group=head.tp_group,
        entropy=settings.metrics.needs_entropy,
        sequence_parallel=head.sequence_parallel,
        mode=settings.fused_head,
        backward=settings.head_backward,
        impl=settings.kernel,
    )
    return _with_diagnostics(out, local, settings)


def _with_diagnostics(out: PolicyGradientLoss, local: LocalBatch, settings: LossSettings) -> MicrobatchLoss:
    with torch.no_grad():
        tokens = _token_values(out, local, settings)
        is_whole = tokens.kl is None and not settings.terms.entropy_coef
        policy = out.loss.detach() if is_whole else _policy_term(tokens)
        return MicrobatchLoss(out.loss, policy, settings.metrics.partial(tokens), _count_nonfinite(tokens))


def policy_loss_of(local: LocalBatch, settings: LossSettings, cp_group: ProcessGroup | None = None) -> PolicyLoss:
    """The micro-batch's loss as a function of log-probabilities and entropies."""
    return PolicyLoss(
        terms=settings.terms,
        mask=local.mask,
        old_logprobs=local.old_logprobs,
        advantages=local.advantages,
        weights=local.weights if local.corrections is None else local.weights * local.corrections,
        auxiliary_weights=local.weights if local.auxiliary_weights is None else local.auxiliary_weights,
        ref_logprobs=local.ref_logprobs,
        rollout_logprobs=local.rollout_logprobs,
        sequences=None if local.sequences is None else replace(local.sequences, group=cp_group),
    )


def _token_values(out: PolicyGradientLoss, local: LocalBatch, settings: LossSettings) -> TokenValues:
    objective, double = settings.terms.objective, _as_double
    tokens = Tokens(
        logprobs=out.logprobs.double(),
        old_logprobs=local.old_logprobs,
        advantages=local.advantages,
        log_ratios=out.log_ratios.double(),
        sequence_log_ratios=double(out.sequence_log_ratios),
        sequence_advantages=double(out.sequence_advantages),
    )
    above, below = objective.outside(tokens, objective.parameters) if settings.metrics.needs_bounds else (None, None)
    token_losses = out.token_losses.double()
    return TokenValues(
        mask=local.mask,
        document_weights=local.document_weights,
        weights=local.weights,
        token_losses=token_losses if local.corrections is None else token_losses * local.corrections,
        logprobs=tokens.logprobs,
        old_logprobs=local.old_logprobs,
        log_ratios=tokens.log_ratios,
        advantages=local.advantages,
        entropy=double(out.entropy),
        ref_logprobs=local.ref_logprobs,
        rollout_logprobs=local.rollout_logprobs,
        above=above,
        below=below,
        auxiliary_weights=local.weights if local.auxiliary_weights is None else local.auxiliary_weights,
        kl=double(out.kl),
        corrections=local.corrections if out.kept is None else out.kept.double(),
        sequence_log_ratios=tokens.sequence_log_ratios,
        kl_coef=settings.terms.kl_coef,
        entropy_coef=settings.terms.entropy_coef,
    )


def _as_double(values: Tensor | None) -> Tensor | None:
    return None if values is None else values.double()


def _policy_term(tokens: TokenValues) -> Tensor:
    return torch.where(tokens.mask, tokens.weights * tokens.token_losses, 0).sum()


def _count_nonfinite(tokens: TokenValues) -> Tensor:
    # the log-ratio too: its clamp would hide an infinite one from the loss
    finite = torch.isfinite(tokens.token_losses) & torch.isfinite(tokens.log_ratios)
    bad = tokens.mask & ~(finite if tokens.kl is None else finite & torch.isfinite(tokens.kl))
    position = torch.arange(len(bad), dtype=torch.float64, device=bad.device)
    none = torch.full((1,), torch.inf, dtype=torch.float64, device=bad.device)
    return torch.stack([bad.sum().double(), torch.cat([torch.where(bad, position, none), none]).amin()])
