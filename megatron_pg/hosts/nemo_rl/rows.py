"""The driver's part of NeMo-RL: it has all rows of a train call, so it plans the optimizer steps without any exchange.

Row k·B + i is row i of step k, with B rows per step, however NeMo-RL shards and packs them. The weights of a row are
sent as columns of the batch. The workers return sums, from which the step's exact metrics are computed.
"""

import hashlib
import math
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from megatron_pg.batch import TokenFields, pack
from megatron_pg.plan.errors import NonFiniteLossError
from megatron_pg.plan.plan import StepPlan
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import needs_prompt_ids
from megatron_pg.rollouts.sample import Sample

COLUMN, SUM = "megatron_pg_", "megatron_pg_sum/"  # prefixes of our columns and sums
# A token's values: their names in NeMo-RL.
FIELDS = {"old_logprobs": "prev_logprobs", "advantages": "advantages", "rollout_logprobs": "generation_logprobs"}


def fields_of(settings: LossSettings) -> dict[str, str]:
    """`FIELDS`, and those that a loss term needs in addition."""
    return FIELDS | ({"ref_logprobs": "reference_policy_logprobs"} if "ref_logprobs" in settings.terms.reads else {})


def plan_steps(data: MutableMapping[str, Any], settings: LossSettings, rows_per_step: int) -> list[StepPlan]:
    """Plan the steps of a train call, and add their weights to `data` as columns [rows, s] float32."""
    every = range(len(data["input_ids"]))
    return [_plan_step(data, settings, every[first : first + rows_per_step]) for first in every[::rows_per_step]]


def _plan_step(data: MutableMapping[str, Any], settings: LossSettings, rows: range) -> StepPlan:
    samples = list(_samples(data, settings, rows))
    step = PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], settings, group=None)
    for name, values in step.fields[0].items():
        column = data.setdefault(COLUMN + name, torch.zeros(data["input_ids"].shape))
        for sample, part in zip(samples, values.split([s.response_length for s in samples]), strict=True):
            column[sample.rollout_id, len(sample.tokens) - len(part) : len(sample.tokens)] = part
    return step.plan


def _samples(data: Mapping[str, Any], settings: LossSettings, rows: range) -> Iterator[Sample]:
    """The samples of a step: the rows that the sample mask keeps, each a rollout with its number."""
    with_prompts = needs_prompt_ids(settings.aggregation)
    for row in rows:
        scale, length = float(data["sample_mask"][row]), int(data["input_lengths"][row])
        if scale not in (0.0, 1.0):
            raise ValueError(
                f"sample_mask of row {row} is {scale:g}, and it must be 0 or 1. Set loss_multiplier to 0 or 1, and put "
                "weights into the advantages."
            )
        mask = data["token_mask"][row, :length].bool()
        mask[:1] = False  # no logits predict it, and NeMo-RL does not count it
        start = int(mask.int().argmax()) if mask.any() else length - 1
        if scale == 0.0 or (with_prompts and not mask.any()):  # without a trained token its prompt is not known
            continue
        tokens = data["input_ids"][row, :length].long()
        prompt = hashlib.blake2b(tokens[:start].numpy().tobytes()).hexdigest() if with_prompts else None
        values = {field: data[name][row, start:length].double() for field, name in fields_of(settings).items()}
        yield Sample(
            tokens=tokens, loss_mask=mask[start:], sample_id=str(row), rollout_id=row, prompt_id=prompt, **values
        )


def mismatch(fields: TokenFields, estimator: str) -> dict[str, Tensor]:
    """NeMo-RL's metrics of trainer against rollout engine, summed over the trained tokens."""
    from nemo_rl.algorithms.utils import calculate_kl

    old, rollout = cast(Tensor, fields.old_logprobs).double(), cast(Tensor, fields.rollout_logprobs).double()
    mixture = torch.logaddexp(old, rollout) - math.log(2.0)
    of_tokens = {
        "token_mult_prob_error": (rollout - old).abs().exp(),
        "gen_kl_error": calculate_kl(rollout, old, estimator, None, None),
        "policy_kl_error": calculate_kl(old, rollout, estimator, None, None),
        "js_divergence_error": 0.5 * sum((x - mixture).exp() - (x - mixture) - 1 for x in (old, rollout)),
        "sampling_importance_ratio": (old - rollout).exp(),
    }
    return {name: torch.where(fields.mask, values, 0).sum() for name, values in of_tokens.items()}


def exact(metrics: MutableMapping[str, list[float]], settings: LossSettings, plans: Sequence[StepPlan]) -> None:
    """Replace the sums of all micro-batches by metrics `pg/…`, each the mean over the call's steps.

    A mean over samples is over all steps. Extrema are left out, and ratios of sums where there are several steps.
    """
    reduction = settings.metrics
    totals = [sum(metrics.pop(f"{SUM}{i}")) for i in range(reduction.width)]
    if bad := sum(metrics.pop(f"{SUM}nonfinite")) * len(plans):
        raise NonFiniteLossError(
            f"non-finite loss at {bad:.0f} trained tokens of this train call, and NeMo-RL has moved the optimizer "
            "before it reported to the driver. Resume from the last checkpoint; check the learning rate and the "
            "model's log-probabilities."
        )
    left_out = {m.name for m in reduction.metrics if m.kind in ("max", "min") or (m.kind == "ratio" and len(plans) > 1)}
    reports = [reduction.finish(totals, plan) for plan in plans]
    for name in reports[0].keys() - left_out:
        if all(name in report for report in reports):
            metrics[f"pg/{name}"] = [sum(report[name] for report in reports) / len(reports)]
