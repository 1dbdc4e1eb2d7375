"""From counts to weights: what each response token of a micro-batch weighs in the terms of the loss."""

from dataclasses import dataclass

from torch import Tensor

from megatron_pg.batch import PackedBatch
from megatron_pg.declarations.corrections import CORRECTIONS
from megatron_pg.objectives.corrections import correction_factors
from megatron_pg.reducers.custom import reducer_weights
from megatron_pg.step.plan import StepPlan
from megatron_pg.step.settings import LossSettings


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
        ValueError: a sample lacks a field that the loss needs, its advantages differ under an objective that has one per
            sequence, or the reducer weighs its tokens unevenly under an objective that has one loss per sequence.
    """
    _check_fields(batch, settings)
    reducer = _reducer_weights(batch, settings)
    corrected = correction_factors(batch.samples, settings.correction)
    corrections, kept = (None, None) if corrected is None else corrected
    return TokenFactors(
        reducer=reducer,
        corrections=corrections,
        kept=kept if CORRECTIONS[settings.correction.name].rejects == "data" else None,
    )


def _check_fields(batch: PackedBatch, settings: LossSettings) -> None:
    needs = {}
    if settings.terms.kl_coef:
        needs["ref_logprobs"] = f"--pg-kl-coef {settings.terms.kl_coef:g}"
    if field := CORRECTIONS[settings.correction.name].reads:
        needs[field] = f"--pg-correction {settings.correction.name}"
    for name, flag in needs.items():
        for sample in batch.samples:
            if getattr(sample, name) is None:
                raise ValueError(
                    f"sample {sample.sample_id} has no {name}, which {flag} needs. Give it to every sample, or remove the flag."
                )
    if settings.terms.objective.has_one_advantage_per_sequence:
        _check_advantages(batch, settings.terms.objective.name)


def _check_advantages(batch: PackedBatch, objective: str) -> None:
    for sample in batch.samples:
        trained = sample.advantages[sample.loss_mask]
        if len(trained) and trained.max() > trained.min():  # NaN is not more, and is found in the loss
            raise ValueError(
                f"the advantages of sample {sample.sample_id} go from {trained.min():g} to {trained.max():g}, and {objective} has one for "
                "the whole sequence. Use --pg-objective gspo_token, which has one per token, or give the sample one advantage."
            )


def _reducer_weights(batch: PackedBatch, settings: LossSettings) -> Tensor | None:
    if settings.reducer is None:
        return None
    weights = reducer_weights(
        settings.reducer,
        [len(sample.tokens) for sample in batch.samples],
        [sample.loss_mask for sample in batch.samples],
        calculate_per_token_loss=settings.per_token,
    )
    objective = settings.terms.objective
    if objective.has_one_loss_per_sequence:
        parts = weights.split([sample.response_length for sample in batch.samples])
        for sample, part in zip(batch.samples, parts, strict=True):
            trained = part[sample.loss_mask]
            if len(trained) and trained.max() - trained.min() > 1e-6 * trained.abs().max():
                raise ValueError(
                    f"the custom reducer weighs the tokens of sample {sample.sample_id} unevenly, and {objective.name} has one loss for the "
                    "whole sequence. Use --pg-objective gspo_token, or a reducer with one weight per sample."
                )
    return weights


def token_weights(
    batch: PackedBatch, plan: StepPlan, first_sample: int, *, factors: TokenFactors, settings: LossSettings
) -> dict[str, Tensor | None]:
    """[sum of R] float64 each, 0 where masked: what the step adds to a micro-batch's fields, by its name in `TokenFields`.

    Args:
        batch: the micro-batch.
        plan: the step's plan.
        first_sample: index of the micro-batch's first sample among this process's samples of the step.
        factors: `token_factors` of the micro-batch.
        settings: the loss settings.
    """

    def weights(denominators: Tensor) -> Tensor:
        return batch.loss_mask / _per_token(batch, denominators, first_sample)

    if factors.reducer is None:
        of_policy = weights(plan.denominators)
    else:
        of_policy = factors.reducer / (plan.num_tokens if settings.per_token else plan.num_rollouts)
    auxiliary = plan.auxiliary_denominators
    return {
        "weights": of_policy,
        "auxiliary_weights": None if auxiliary is None else weights(auxiliary),
        "corrections": factors.corrections,
    }


def depth_weights(batch: PackedBatch, plan: StepPlan, first_sample: int) -> list[Tensor]:
    """[sum of R] float64 for each of the N depths of multi-token prediction: mask / (N d), of tokens that the depth can predict."""
    depths = plan.depth_denominators
    return [batch.loss_mask / (len(depths) * _per_token(batch, each, first_sample)) for each in depths]


def _per_token(batch: PackedBatch, denominators: Tensor, first_sample: int) -> Tensor:
    return batch.per_token(denominators[first_sample : first_sample + len(batch.samples)])
