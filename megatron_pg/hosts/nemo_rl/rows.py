"""The driver's side of NeMo-RL: it holds all rows of a train call, so it plans the optimizer steps, without any exchange.

Row k·B + i is row i of step k, B rows a step, however NeMo-RL shards and packs them. What the plan makes of a row travels with
it as columns of the batch; what the losses found comes back as sums, of which the step's exact metrics are made.
"""

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_pg.batch import pack
from megatron_pg.plan.errors import NonFiniteLossError
from megatron_pg.plan.microbatches import count
from megatron_pg.plan.plan import StepPlan, plan_from_table
from megatron_pg.plan.selection import select
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import needs_prompt_ids
from megatron_pg.plan.weights import token_weights
from megatron_pg.rollouts.sample import Sample

COLUMN, SUM = "megatron_pg_", "megatron_pg_sum/"  # what names of columns and of sums begin with


class _Place(NamedTuple):
    """Where a sample's response is."""

    row: int
    start: int
    end: int
    sample: Sample


def plan_steps(data: MutableMapping[str, Any], settings: LossSettings, rows_per_step: int) -> list[StepPlan]:
    """Plan the steps of a train call, and put their weights into `data` as columns [rows, s] float32.

    Raises:
        StepPlanError, ValueError: the rows lack what the loss needs, or a trained token has a value that is not finite.
    """
    plans, shape = [], data["input_ids"].shape
    for first in range(0, shape[0], rows_per_step):
        places = list(_places(data, settings, range(first, min(first + rows_per_step, shape[0]))))
        whole = pack([place.sample for place in places], qkv_format="thd")
        table, (factors,) = select([whole], count([whole], settings, None), settings, None)
        plans.append(plan_from_table(table, settings.plan_rule, error=None, group=None))
        fields = token_weights(whole, plans[-1], 0, factors=factors, settings=settings)
        for name, values in fields.items():
            if values is None:
                continue
            column = data.setdefault(COLUMN + name, torch.zeros(shape))
            for place, part in zip(places, values.split([p.end - p.start for p in places]), strict=True):
                column[place.row, place.start : place.end] = part
    return plans


def _places(data: Mapping[str, Any], settings: LossSettings, rows: range) -> Iterator[_Place]:
    """The samples of a step: rows that the sample mask leaves in."""
    with_prompts = needs_prompt_ids(settings.aggregation)
    for row in rows:
        scale, length = float(data["sample_mask"][row]), int(data["input_lengths"][row])
        if scale not in (0.0, 1.0):
            raise ValueError(
                f"sample_mask of row {row} is {scale:g}, and a sample is in the step or not. Give loss_multiplier 0 or 1, and weights in "
                "the advantages."
            )
        mask = data["token_mask"][row, :length].bool()
        mask[:1] = False  # no logits predict it, and NeMo-RL does not count it
        start = int(mask.int().argmax()) if mask.any() else length - 1
        if scale == 0.0 or (with_prompts and not mask.any()):  # then nobody could tell its prompt
            continue
        names = {"old_logprobs": "prev_logprobs", "advantages": "advantages", "rollout_logprobs": "generation_logprobs"}
        if "ref_logprobs" in settings.terms.reads:
            names["ref_logprobs"] = "reference_policy_logprobs"
        tokens = data["input_ids"][row, :length].long()
        prompt = hashlib.blake2b(tokens[:start].numpy().tobytes()).hexdigest() if with_prompts else None
        values = {name: data[theirs][row, start:length].double() for name, theirs in names.items()}
        sample = Sample(
            tokens=tokens, loss_mask=mask[start:], sample_id=str(row), rollout_id=row, prompt_id=prompt, **values
        )
        yield _Place(row, start, length, sample)


def mismatch(data: Mapping[str, Any], rows_per_step: int, estimator: str) -> dict[str, list[float]]:
    """NeMo-RL's metrics of trainer and rollout engine, which need no model: means over the trained tokens of each step."""
    from nemo_rl.algorithms.utils import calculate_kl

    mask = (data["token_mask"] * data["sample_mask"][:, None])[:, 1:].bool()
    old, rollout = (data[name][:, 1:].double() for name in ("prev_logprobs", "generation_logprobs"))
    mixture = torch.logaddexp(old, rollout) - torch.full_like(old, 2.0).log()
    found = {
        "token_mult_prob_error": (rollout - old).abs().exp(),
        "gen_kl_error": calculate_kl(rollout, old, estimator, None, None),
        "policy_kl_error": calculate_kl(old, rollout, estimator, None, None),
        "js_divergence_error": 0.5 * sum((x - mixture).exp() - (x - mixture) - 1 for x in (old, rollout)),
        "sampling_importance_ratio": (old - rollout).exp(),
    }
    return {
        name: [_mean_of_means(values.split(rows_per_step), mask.split(rows_per_step))] for name, values in found.items()
    }


def _mean_of_means(values: Sequence[Tensor], masks: Sequence[Tensor]) -> float:
    return sum(float(v[m].mean()) for v, m in zip(values, masks, strict=True)) / len(values)


def exact(metrics: MutableMapping[str, list[float]], settings: LossSettings, plans: Sequence[StepPlan]) -> None:
    """Make the sums of all micro-batches into metrics, `pg/…`, each the mean over the call's steps.

    A mean over documents is over those of all its steps. Ratios of sums are left out of several steps, and extrema always.

    Raises:
        NonFiniteLossError: a trained token's loss was not finite; the optimizer has moved.
    """
    reduction = settings.metrics
    totals = [sum(metrics.pop(f"{SUM}{i}")) for i in range(reduction.width)]
    if bad := sum(metrics.pop(f"{SUM}nonfinite")) * len(plans):
        raise NonFiniteLossError(
            f"non-finite loss at {bad:.0f} trained tokens of this train call, and NeMo-RL has moved the optimizer before it told the driver. "
            "Resume from the last checkpoint, and look at the learning rate and the model's log-probabilities."
        )
    left_out = {m.name for m in reduction.metrics if m.kind in ("max", "min") or (m.kind == "ratio" and len(plans) > 1)}
    reports = [reduction.finish(totals, plan) for plan in plans]
    for name in reports[0].keys() - left_out:
        if all(name in report for report in reports):
            metrics[f"pg/{name}"] = [sum(report[name] for report in reports) / len(reports)]
