"""The loss that the validated arguments describe."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron_pg.declarations.adaptive_entropy import AdaptiveEntropy
from megatron_pg.declarations.aggregations import STEP_MEANS, is_by_turn
from megatron_pg.declarations.choices import AUTO
from megatron_pg.declarations.loss_terms import AS_POLICY, OBJECTIVE, SHORTHANDS
from megatron_pg.declarations.objectives import VALUE_LOSS
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import chosen_head
from megatron_pg.kernels import LossTerms
from megatron_pg.kernels.checks import check_triton
from megatron_pg.kernels.device import chosen
from megatron_pg.lm_head.inputs import check_scaled_exp_kernel, is_tried_gpu
from megatron_pg.lm_head.teacher_file import TeacherHead
from megatron_pg.metrics import Reduction
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import NONE as NO_CORRECTION
from megatron_pg.objectives.corrections.correction import Correction
from megatron_pg.objectives.custom.loading import custom_objective_of
from megatron_pg.plan.table import PlanRule
from megatron_pg.reducers.custom import CustomReducer, load_custom_reducer
from megatron_pg.rollouts.fields import POLICY


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """The loss that the validated arguments describe. The same on every rank."""

    aggregation: str
    divisor: float | None
    reducer: CustomReducer | None  # replaces the aggregation for pg_loss
    per_token: bool  # Megatron's calculate_per_token_loss
    terms: LossTerms
    correction: Correction = NO_CORRECTION
    seed: int = 0  # of a correction's draws
    denominator: str = "scheduled"  # what the objective's denominators count
    sums_weights: bool = False  # denominators sum weights of tokens, instead of counting tokens
    sequence_level: str = "sample"  # or "turn": what a sequence is
    terms_of_samples: frozenset[str] = frozenset({POLICY})  # that samples may name, also those of weight 0
    sampling_mask_missing: str = "error"  # how a trained token outside its sample's sampling mask is treated
    temperature: float
    vocab_size: int | None = None  # columns beyond it are padding
    softcap: float | None = None  # of logits that the output layer has not capped
    impl: str  # of log-probabilities and loss
    float32_logits: bool = False
    head_mode: str | None = None  # of the fused head; None: the model computes logits
    head_choice: str | None = None  # the banner's text for a mode that `auto` chose; None: the user chose it
    head_backward: str = "bf16"
    teacher_head: TeacherHead | None = None  # of the teacher whose hidden states samples carry
    mtp_depths: int = 0  # of the model's multi-token prediction
    mtp_aggregation: str = "token_mean"  # or "policy"
    mtp_target: str = "token"  # or "policy"
    metrics: Reduction
    warns_of_mismatch: bool = True  # while trainer and rollout engine disagree
    arguments: tuple[tuple[str, str], ...] = ()  # the validated flags with their values

    @classmethod
    def from_args(cls, args: Namespace) -> "LossSettings":
        """Settings from arguments that `validate_args` has accepted; loads and probes the user's functions (E16)."""
        facts = Facts(args)
        path = args.custom_pg_loss_reducer_function_path
        per_token = vars(args).get("calculate_per_token_loss", False)
        words = tuple(facts.correction_words.values())
        correction = Correction(name=str(facts.selected_correction.name), words=words, **facts.correction_numbers)
        anchor = correction.declared.anchor
        opsm: dict[str, Any] = {"opsm_anchor": anchor, "opsm_threshold": correction.high} if anchor else {}
        depths = vars(args).get("mtp_num_layers") or 0
        name = VALUE_LOSS if facts.is_critic else str(facts.selected_objective.name)
        terms = LossTerms(
            objective=objective_of(name, **facts.objective_numbers)
            if facts.custom_objective is None
            else custom_objective_of(facts),
            **opsm,
            further=facts.further,
            has_objective=facts.has_objective,
            grad_divisor=args.pg_grad_divisor,
            sampling_mask_entropy=args.pg_sampling_mask_entropy,
            adaptive_entropy=facts.adaptive_entropy,
        )
        return cls(
            aggregation=args.loss_aggregation,
            divisor=args.loss_aggregation_divisor,
            reducer=load_custom_reducer(path, calculate_per_token_loss=per_token) if path else None,
            per_token=per_token,
            terms=terms,
            correction=correction,
            seed=vars(args).get("seed") or 0,
            denominator=args.pg_denominator,
            sums_weights=args.pg_weight_denominator == "weights",
            sequence_level=args.pg_sequence_level,
            terms_of_samples=facts.terms_of_samples,
            sampling_mask_missing=args.pg_sampling_mask_missing,
            temperature=args.pg_temperature,
            vocab_size=args.pg_vocab_size,
            softcap=args.pg_logit_softcap,
            float32_logits=args.fp32_lm_head,
            head_backward=args.fp32_lm_head_backward or "bf16",
            teacher_head=_teacher_head(args, str(facts.teacher_head)) if terms.whole_form else None,
            **_kernel_and_head(facts, terms),
            mtp_depths=depths,
            mtp_aggregation=args.pg_mtp_aggregation,
            mtp_target=args.pg_mtp_target,
            metrics=metrics_of(
                args.pg_metrics, terms, correction, depths, masks_missing=args.pg_sampling_mask_missing == "mask"
            ),
            warns_of_mismatch=not args.pg_no_mismatch_advice,
            arguments=tuple(
                (name, f"{value}") for name, value in json.loads(vars(args).get("megatron_pg_validated", "{}")).items()
            ),
        )

    @property
    def kernel(self) -> str:
        """`impl`, and which kernels compute the losses on this GPU."""
        if self.impl != "triton" or (device := chosen("triton").device).type == "cpu":
            return self.impl
        from megatron_pg.kernels.triton.loss import path_on  # torch alone must not need Triton

        return f"{self.impl}, {path_on(device).text}"

    def in_force(self, args: Namespace) -> Namespace:
        """The arguments with the kernel in force and, if it was chosen, the fused head instead of the defaults."""
        head = {} if self.head_choice is None else {"pg_fused_head": self.head_choice}
        return Namespace(**vars(args) | {"pg_kernel": self.kernel} | head)

    def with_entropy(self, adaptive: AdaptiveEntropy) -> "LossSettings":
        """The same loss with another coefficient of the entropy term."""
        further = tuple(replace(t, weight=adaptive.value) if t.name == "entropy" else t for t in self.terms.further)
        return replace(self, terms=replace(self.terms, further=further, adaptive_entropy=adaptive))

    @property
    def masked_head_mode(self) -> str | None:
        """The mode of micro-batches with sampling masks: `auto` takes forward there, because scaled_exp has none."""
        is_unfit = self.head_choice is not None and self.head_mode == "scaled_exp"
        return "forward" if is_unfit else self.head_mode

    @property
    def is_critic(self) -> bool:
        """Whether the model is a critic, which gives one value per token."""
        return self.terms.objective.role == "critic"

    @property
    def objective_tokens(self) -> tuple[str, ...]:
        """The loss terms whose tokens the objective trains: its own, or none."""
        return (OBJECTIVE.tokens,) if self.terms.has_objective else ()

    @property
    def trained(self) -> tuple[str, ...]:
        """The loss terms whose tokens are trained, the objective's first."""
        return tuple(dict.fromkeys(term.tokens for term in self.terms.all))

    @property
    def over_sampling_mask(self) -> tuple[str, ...]:
        """The loss terms whose tokens need a sampling mask: a term there reads the policy over the mask."""
        if self.is_critic:
            return ()
        keeps = self.terms.sampling_mask_entropy == "kept"
        readers = [t for t in self.terms.all if t.is_over_sampling_mask or (keeps and t.kind == "entropy")]
        return tuple(dict.fromkeys(term.tokens for term in readers))

    @property
    def counts_after_forward(self) -> bool:
        """Whether the denominators count what the model itself rejects: only an open step can divide by that."""
        return self.denominator == "kept" and self.correction.declared.rejects == "model"

    @property
    def plan_rule(self) -> PlanRule:
        """What a step counts; for a custom reducer, only N_r and T."""
        step_mean = STEP_MEANS[self.per_token]  # the mean that the per-token flag alone gives
        shares_weights = self.reducer is None and self.denominator != "kept" and self.terms.has_objective
        weights = OBJECTIVE.tokens, self.aggregation, self.divisor
        aggregations = self.aggregation, *(term.aggregation for term in self.terms.further)
        return PlanRule(
            aggregation=self.aggregation if self.reducer is None else step_mean,
            divisor=self.divisor,
            denominator=self.denominator,
            sums_weights=self.sums_weights,
            counts_turns=self.sequence_level == "turn" or any(map(is_by_turn, aggregations)),
            over_sampling_mask=self.over_sampling_mask,
            terms=tuple(
                replace(term, aggregation=AS_POLICY)
                if shares_weights and (term.tokens, term.aggregation, term.divisor) == weights
                else term
                for term in self.terms.all
            ),
            depths=self.mtp_depths,
            depth_aggregation=self.aggregation if self.mtp_aggregation == "policy" else STEP_MEANS[True],
            arguments=self.arguments,
        )


def metrics_of(
    level: str, terms: LossTerms, correction: Correction, mtp_depths: int = 0, *, masks_missing: bool = False
) -> Reduction:
    """The metrics of a loss."""
    features = features_of(terms, correction, mtp_depths, masks_missing=masks_missing)
    return Reduction(level, features, terms.objective.reported, terms.further, terms.objective.role)


def features_of(
    terms: LossTerms, correction: Correction, mtp_depths: int = 0, *, masks_missing: bool = False
) -> frozenset[str]:
    """What the loss contains, under the names that metrics ask for."""
    selects = correction.declared.selection is not None
    features = {
        "clip": terms.objective.outside is not None,
        "sequence": terms.objective.reads_sequences,
        "correction": correction.name != "none" and not selects,
        "selection": selects,
        **{name: any(term.name == name for term in terms.further) for name in SHORTHANDS},
        "adaptive_entropy": terms.adaptive_entropy is not None,
        "further": bool(terms.further) or mtp_depths > 0,
        "mtp": mtp_depths > 0,
        "sampling_mask_missing": masks_missing,
    }
    return frozenset(name for name, present in features.items() if present)


def _teacher_head(args: Namespace, path: str) -> TeacherHead:
    head = TeacherHead.of(path)
    columns = args.pg_vocab_size or vars(args).get("padded_vocab_size")
    if columns is not None:  # else the model checks it
        head.check_vocabulary(columns)
    return head


def _kernel_and_head(facts: Facts, terms: LossTerms) -> dict[str, Any]:
    """The settings that depend on the GPU of this process."""
    args, mode, text, kernel, gpu = facts.args, facts.args.pg_fused_head, None, "torch", None
    if args.pg_kernel != "torch" and not facts.is_critic:  # else no GPU is touched: a process that plans may have none
        choice = chosen(args.pg_kernel)
        kernel, gpu = choice.kernel, choice.device if choice.device.type == "cuda" else None
        if kernel == "triton":
            check_triton("--pg-kernel triton")
    if mode == AUTO:
        has_kernel = gpu is not None and facts.megatron("params_dtype") == torch.bfloat16 and is_tried_gpu(gpu)
        mode, text = chosen_head(facts, reads_sequences=terms.reads_sequences, has_kernel=has_kernel)
    elif mode == "scaled_exp" and gpu is not None:
        check_scaled_exp_kernel(facts.megatron("params_dtype", torch.bfloat16), gpu)
    return {"impl": kernel, "head_mode": mode, "head_choice": text}


def agreed(settings: LossSettings, modes: Sequence[str | None]) -> LossSettings:
    """The settings with forward if `auto` chose scaled_exp on some of the ranks only; `modes`: of every rank."""
    number = modes.count("scaled_exp")
    if settings.head_choice is None or number in (0, len(modes)):
        return settings
    return replace(settings, head_mode="forward", head_choice=f"{AUTO}: forward because of GPUs that differ")
