"""From counts to weights: the weight of each response token of a micro-batch in each loss term."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from megatron_pg.batch import PackedBatch
from megatron_pg.declarations.aggregations import is_by_turn
from megatron_pg.declarations.loss_terms import SHORTHANDS, LossTerm
from megatron_pg.objectives.corrections.correction import correction_factors
from megatron_pg.objectives.corrections.selections import check_size
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.sampling_masks import check_sampling_masks
from megatron_pg.plan.settings import LossSettings
from megatron_pg.reducers.custom import reducer_weights
from megatron_pg.rollouts.fields import POLICY, is_int, plain
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.sample import Sample, check_range


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFactors:
    """What a micro-batch's response tokens get before the exchange, [sum of R] each."""

    reducer: Tensor | None  # float64, the custom reducer's weights, before 1/N_r or 1/T
    corrections: Tensor | None  # float64, factor on the policy term; None: no correction, or the model decides it
    kept: Tensor | None  # bool, trained and not rejected; None: every trained token is
    penalised: Tensor | None = None  # bool, trained and with the correction's further loss; None: it has none


def token_factors(batch: PackedBatch, settings: LossSettings) -> TokenFactors:
    """Reducer and correction of a micro-batch. It checks fields and runs the user's code, so the step calls it first.

    Raises:
        ValueError: a sample lacks a field that the loss needs, its advantages differ under an objective with one per
            sequence, or the reducer weighs its tokens unevenly under an objective with one loss per sequence.
    """
    check_terms(batch.samples, settings)
    _check_fields(batch, settings)
    check_sampling_masks(batch.samples, settings)
    members = [sample for sample in batch.samples if sample.term in settings.objective_tokens]
    if settings.terms.objective.has_one_advantage_per_sequence:
        _check_advantages(members, settings.terms.objective.name, settings.sequence_level)
    reducer = _whole(_reducer_weights(members, settings), batch, members)
    check_size(members, settings.correction)
    corrected = correction_factors(members, settings.correction, settings.sequence_level)
    corrections, kept = (None, None) if corrected is None else (_whole(each, batch, members) for each in corrected)
    return TokenFactors(
        reducer=reducer, corrections=corrections, kept=kept if settings.correction.declared.rejects == "data" else None
    )


def token_ages(batch: PackedBatch, version: int | None, settings: LossSettings) -> dict[str, Tensor]:
    """`TokenFields.ages`, [sum of R]: the trainer's weight version minus the tokens'; empty if not known or not read.

    Raises:
        ValueError: the trainer's version is not valid, or older than a token's.
    """
    if version is not None and not (is_int(version := plain(version)) and 0 <= version < 2**62):
        raise ValueError(f"weight_version={version!r} is not a number of optimizer steps. Give the trainer's.")
    if version is None or batch.versions is None:
        return {}
    if (newer := (batch.versions > version).nonzero()).numel():
        sample = batch.samples[int(batch.per_token(torch.arange(len(batch.samples)))[newer[0]])]
        raise ValueError(
            f"weight_version of sample {sample.sample_id} is {int(batch.versions[newer[0]])}, newer than the trainer's "
            f"weights, which have seen {version} optimizer steps. Record the steps of this run, or leave it out."
        )
    ages = torch.where(batch.versions < 0, -1, version - batch.versions)
    return {} if settings.metrics.level == "none" else {"ages": ages}


def _whole(values: Tensor | None, batch: PackedBatch, members: Sequence[Sample]) -> Tensor | None:
    """[sum of R] over all samples from the members' values, which are joined; 0 for other samples."""
    if values is None or len(members) == len(batch.samples):
        return values
    parts = iter(values.split([sample.response_length for sample in members]))
    is_member = {id(sample) for sample in members}
    nothing = partial(torch.zeros, dtype=values.dtype)
    of_samples = [next(parts) if id(s) in is_member else nothing(s.response_length) for s in batch.samples]
    return torch.cat([nothing(0), *of_samples])


def _check_fields(batch: PackedBatch, settings: LossSettings) -> None:
    """Samples have the fields that a loss term reads, finite at its tokens; those of the objective were checked."""
    for sample in () if settings.is_critic or not settings.terms.has_objective else batch.samples:
        if sample.term == POLICY and (sample.old_logprobs is None or sample.advantages is None):
            raise ValueError(
                f"sample {sample.sample_id} has returns for a critic and no old_logprobs or no advantages, which the "
                "objective needs. Give both, or --pg-role critic."
            )
    needs: list[tuple[str, str, str]] = []  # loss term of the tokens, field, who asks for it
    if field := settings.correction.declared.reads:
        needs.append((POLICY, field, f"--pg-correction {settings.correction.name}"))
    if settings.denominator == "varied":
        needs.append((POLICY, "reward", "--pg-denominator varied"))
    if settings.sequence_level == "turn":
        needs.append((POLICY, "turns", "--pg-sequence-level turn"))
    if is_by_turn(settings.aggregation):
        needs += [(name, "turns", f"--loss-aggregation {settings.aggregation}") for name in settings.objective_tokens]
    for term in settings.terms.further:
        needs += [(term.tokens, field, _asked_by(term)) for field in term.reads]
        needs += [(term.tokens, "turns", _asked_by(term))] if is_by_turn(term.aggregation) else []
    if settings.is_critic:
        needs += [(POLICY, field, "--pg-role critic") for field in settings.terms.objective.reads]
    for term_name, name, flag in needs:
        for sample in batch.samples:
            if (mask := sample.mask_of(term_name)) is None:
                continue
            values = getattr(sample, name)
            if values is None:
                raise ValueError(
                    f"sample {sample.sample_id} has no {name}, which {flag} needs. Give it to every sample, or "
                    "remove the flag."
                )
            if name in PAYLOADS:
                PAYLOADS[name].check_read(values, mask, sample.sample_id, flag)
            if name in PAYLOADS or name in ("turns", "reward"):
                continue
            if (bad := mask & ~torch.isfinite(values)).any():
                k = int(bad.nonzero()[0])
                raise ValueError(
                    f"{name} of sample {sample.sample_id} is {float(values[k])} at response token {k}, which {flag} "
                    "reads. Take the token out of the mask, or repair the value."
                )
            check_range(name, values[mask], sample.sample_id)


def _check_advantages(samples: Sequence[Sample], objective: str, level: str) -> None:
    for sample in samples:
        if sample.advantages is None:
            continue
        of_trained = torch.where(sample.loss_mask, sample.advantages, torch.nan).split(sample.sequence_lengths(level))
        for trained in (part[~part.isnan()] for part in of_trained):
            if len(trained) and trained.max() > trained.min():
                raise ValueError(
                    f"the advantages of sample {sample.sample_id} go from {trained.min():g} to {trained.max():g} in "
                    f"one {level}, and {objective} has one for the whole sequence. Use "
                    "--pg-objective gspo_token, which has one per token, or give it one advantage."
                )


def _asked_by(term: LossTerm) -> str:
    return f"{term.flag} {term.weight:g}" if term.name in SHORTHANDS else term.flag


def check_terms(samples: Sequence[Sample], settings: LossSettings) -> None:
    """Refuse tokens of a loss term that is not declared: nothing would be learned from them."""
    for sample in samples:
        if unknown := sorted({sample.term, *sample.masks} - settings.terms_of_samples):
            raise ValueError(
                f"sample {sample.sample_id} has tokens of the loss term {unknown[0]}, which no flag declares. Add "
                f"--pg-term {unknown[0]}:ce or another kind ({unknown[0]}:ce,weight=0 leaves them out), or rename the "
                "term."
            )


def _reducer_weights(samples: Sequence[Sample], settings: LossSettings) -> Tensor | None:
    if settings.reducer is None:
        return None
    weights = reducer_weights(
        settings.reducer,
        [len(sample.tokens) for sample in samples],
        [sample.loss_mask for sample in samples],
        calculate_per_token_loss=settings.per_token,
    )
    objective = settings.terms.objective
    if objective.has_one_loss_per_sequence:
        parts = weights.split([sample.response_length for sample in samples])
        for sample, part in zip(samples, parts, strict=True):
            trained = part[sample.loss_mask]
            if len(trained) and trained.max() - trained.min() > 1e-6 * trained.abs().max():
                raise ValueError(
                    f"the custom reducer weighs the tokens of sample {sample.sample_id} unevenly, and {objective.name} "
                    "has one loss for the whole sequence. Use --pg-objective gspo_token, or a reducer with one weight "
                    "per sample."
                )
    return weights


def token_weights(
    batch: PackedBatch, plan: StepPlan, first_sample: int, *, factors: TokenFactors, settings: LossSettings
) -> dict[str, Tensor]:
    """What the step adds to a micro-batch's fields, [sum of R] each, by name in `TokenFields.per_token`.

    Weights are 0 at masked tokens. `first_sample` is the index of the micro-batch's first sample among this process's.
    """
    policy = batch.mask_of(*settings.objective_tokens)
    shares = partial(_shares, batch, first_sample, settings)
    if factors.reducer is None:
        counted = factors.kept if settings.denominator == "kept" else None
        weights = shares(policy, plan.denominators, settings.aggregation, counted)
    else:
        units = max(plan.num_tokens if settings.per_token else plan.num_rollouts, 1)
        weights = batch.weighted(policy) * (factors.reducer / units)
    fields = {"weights": weights}
    if settings.is_critic:
        old, target = settings.terms.objective.reads
        fields |= {"old_logprobs": batch.response_values(old), "advantages": batch.response_values(target)}
    if factors.corrections is not None:
        fields["corrections"] = factors.corrections
    elif settings.terms.objective.has_one_loss_per_sequence and (
        "token_weights" in batch.values or is_by_turn(settings.aggregation)
    ):
        fields["corrections"] = torch.ones_like(weights)  # so that the loss averages uneven weights over the sequence
    if settings.trained != settings.objective_tokens:
        fields |= {"mask": batch.mask_of(*settings.trained), f"{POLICY}.mask": policy}
    if any(sample.sampling_mask is not None for sample in batch.samples):
        fields["sampling_mask"] = batch.mask_of(*settings.over_sampling_mask)
    for payload in dict.fromkeys(term.payload for term in settings.terms.further if term.payload):
        fields[payload] = batch.mask_of(*(t.tokens for t in settings.terms.further if t.payload == payload))
    for name in settings.terms.reads - PAYLOADS.keys():
        if all(getattr(sample, name) is None for sample in batch.samples):  # micro-batches have the same fields
            fields[name] = batch.response_values(name)
    for term in settings.terms.further:
        if term.tokens not in settings.objective_tokens:
            fields[f"{term.name}.mask"] = batch.mask_of(term.tokens)
        if (denominators := plan.terms[term.name].denominators) is not None:
            fields[f"{term.name}.weights"] = shares(batch.mask_of(term.tokens), denominators, term.aggregation)
        if factors.penalised is not None and term.is_of_a_correction:
            fields[f"{term.name}.weights"] = weights * factors.penalised
    return fields


def depth_weights(batch: PackedBatch, plan: StepPlan, first_sample: int, *, settings: LossSettings) -> list[Tensor]:
    """[sum of R] float64 for each of the N depths of multi-token prediction: weight / (N δ) of what it predicts."""
    depths, mask, by = plan.depth_denominators, batch.mask_of(*settings.trained), settings.plan_rule.depth_aggregation
    return [
        _shares(batch, first_sample, settings, mask, len(depths) * each, by, mask & batch.reached(depth))
        for depth, each in enumerate(depths, start=1)
    ]


def _shares(
    batch: PackedBatch,
    first_sample: int,
    settings: LossSettings,
    mask: Tensor,
    denominators: Tensor,
    aggregation: str | None,
    counted: Tensor | None = None,
) -> Tensor:
    """[sum of R] float64: the weight of each token in the mask over its denominator, 0 elsewhere.

    `counted`: the tokens that denominators of turns count, by default the mask; a turn without any has no weight.
    """
    per_token = batch.per_token(denominators[first_sample : first_sample + len(batch.samples)])
    if is_by_turn(aggregation):
        counted = mask if counted is None else counted
        amounts = batch.sums(batch.weighted(counted) if settings.sums_weights else counted, "turn").double()
        per_token = per_token * batch.per_token(torch.where(amounts > 0, amounts, torch.inf), "turn")
    return batch.weighted(mask) / per_token
