"""Megatron-LM's own RL script (train_rl.py) on weights of the whole optimizer step.

train_rl.py returns one micro-batch's loss over that micro-batch's tokens. Without --calculate-per-token-loss Megatron
averages those means over micro-batches and ranks, so a token's weight depends on how rows fell into micro-batches, and
an empty bin counts as one token. Wrap its forward step, and every trained token has the weight of an aggregation:

    from megatron_rl import ExactLoss          # this file, on PYTHONPATH
    forward_step = ExactLoss("sample_mean")(forward_step)      # below train_rl.py's own

Its objective, KL and entropy terms and metrics stay as they are; all terms get the one weight.
"""

from collections import deque
from collections.abc import Callable, Iterator
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_pg import plan_step
from megatron_pg.step.loss_scaling import LossScaling

AGGREGATIONS = ("sample_mean", "token_mean", "constant")


class ExactLoss:
    """Wraps train_rl.py's `forward_step`.

        loss of the step = sum over rows i and their trained tokens t of loss_it / d_i

    A row of the script is a sample; rows without a trained token are its padding and don't count. The first call of a
    step takes all K micro-batches from the iterator and counts them over the data-parallel group, once.

    Args:
        aggregation: sample_mean, token_mean or constant. The script's batches carry no prompt, so no prompt_mean.
        divisor: L of constant.
    """

    def __init__(self, aggregation: str, divisor: float | None = None):
        if aggregation not in AGGREGATIONS:
            raise ValueError(
                f"aggregation={aggregation!r} is not one of {', '.join(AGGREGATIONS)}, which train_rl.py's batches "
                "have counts for."
            )
        self._aggregation, self._divisor = aggregation, divisor
        self._planned: deque[tuple[object, Tensor]] = deque()  # batch, weights

    def __call__(self, forward_step: Callable) -> Callable:
        """The forward step with exact weights; same arguments, same outputs."""

        def exact_forward_step(data_iterator: Iterator, model, *rest: object, **keywords: object):
            if not self._planned:
                self._plan(data_iterator)
            batch, weights = self._planned.popleft()
            output, loss_func = forward_step(iter([batch]), model, *rest, **keywords)
            scaling = self._scaling(model[0] if isinstance(model, list) else model)
            return output, partial(_weighted, loss_func, weights, scaling)

        return exact_forward_step

    def _plan(self, data_iterator: Iterator) -> None:
        if mpu.get_context_parallel_world_size() > 1 or (mpu.get_virtual_pipeline_model_parallel_world_size() or 1) > 1:
            raise ValueError(
                "context and virtual-pipeline parallelism are not verified with train_rl.py; switch them off."
            )
        batches = [next(data_iterator) for _ in range(get_num_microbatches())]
        masks, owners = zip(*(_mask_and_owner(batch) for batch in batches), strict=True)
        counts = [torch.bincount(owner[mask]).cpu() for mask, owner in zip(masks, owners, strict=True)]
        live = [count[count > 0] for count in counts]
        plan = plan_step(
            torch.cat(live), aggregation=self._aggregation, divisor=self._divisor, group=mpu.get_data_parallel_group()
        )
        per_batch = plan.denominators.split([len(count) for count in live])
        for batch, mask, owner, count, denominators in zip(batches, masks, owners, counts, per_batch, strict=True):
            per_sample = torch.zeros(len(count), dtype=torch.float64)
            per_sample[count > 0] = 1 / denominators
            weights = torch.zeros(mask.shape, dtype=torch.float64, device=mask.device)
            weights[mask] = per_sample.to(mask.device)[owner[mask]]
            self._planned.append((batch, weights))

    def _scaling(self, model) -> LossScaling:
        return LossScaling(
            per_token=get_model_config(model).calculate_per_token_loss,
            num_microbatches=get_num_microbatches(),
            data_parallel_size=mpu.get_data_parallel_world_size(),
            context_parallel_size=1,
        )


def _weighted(loss_func: Callable, weights: Tensor, scaling: LossScaling, losses: Tensor) -> tuple:
    """Megatron's tuple: the script's own metrics, and the loss by the step's weights."""
    *_, report = loss_func(losses)
    total = (torch.where(weights != 0, losses.float(), 0) * weights.float()).sum()  # select, then weigh: no 0 * inf
    *loss_and_count, ours = scaling.outputs(total)
    return *loss_and_count, report | ours


def _mask_and_owner(batch: object) -> tuple[Tensor, Tensor]:
    """[rows, s - 1] trained positions, as train_rl.py aligns them, and the sample that each position belongs to."""
    if len(batch) == 1:
        return _of_bin(int(batch[0]))
    mask = batch[3][:, 1:].bool()
    return mask, torch.arange(len(mask), device=mask.device)[:, None].expand_as(mask)


def _of_bin(index: int) -> tuple[Tensor, Tensor]:
    from megatron.rl.rl_utils import get_rl_runtime_state  # in Megatron's source tree only, not in its wheels

    packing = get_rl_runtime_state().packing_context
    mask = packing.packed_loss_mask[index : index + 1, 1:].bool()
    starts = torch.tensor(packing.packing_info.seq_starts[index], device=mask.device)
    tokens = torch.arange(1, mask.shape[1] + 1, device=mask.device)  # position k predicts token k + 1
    return mask, (torch.searchsorted(starts, tokens, right=True) - 1).clamp(min=0)[None]
