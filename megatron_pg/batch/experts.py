"""The engine's experts of the positions that one rank's routers see: sliced by the index that slices the tokens."""

import itertools

import torch
from torch import Tensor

from megatron_pg.batch.slicing import LocalBatch


def local_experts(local: LocalBatch, *, num_experts: int, layers: int, topk: int, tp_rank: int, tp_size: int) -> Tensor:
    """The experts of every layer for this rank's positions, in the order in which its routers see them.

    Positions of which an engine has none (the last token of a sample, padding) get distinct experts in turn, so that
    dispatchers find `topk` for every position and no expert is crowded; they have no part in the loss. All samples have
    `routed_experts`. `layers` are those of their records, layers without experts included. `tp_rank` and `tp_size` are
    0 and 1 unless the sequence is cut over the tensor-parallel group (sequence parallelism).

    Returns:
        [layers, W/C · B / tp_size, topk] int32, on the CPU.
    """
    whole = local.whole
    samples, positions = (
        rows[:, local.row_index].t().reshape(-1).chunk(tp_size)[tp_rank]
        for rows in (whole.sample_index, whole.position_ids)
    )
    records = [sample.routed_experts for sample in whole.samples if sample.routed_experts is not None]
    records_joined = torch.cat([torch.zeros(0, layers, topk, dtype=torch.int32), *records])
    lengths = torch.tensor([*map(len, records), 0])  # an index of -1, padding, takes the last: no token
    starts = torch.tensor([0, *itertools.accumulate(map(len, records))])
    is_known = positions < lengths[samples]
    turns = torch.arange(len(positions) * topk, dtype=torch.int32).remainder(num_experts).view(-1, 1, topk)
    experts = turns.repeat(1, layers, 1)
    experts[is_known] = records_joined[starts[samples[is_known]] + positions[is_known]]
    return experts.transpose(0, 1).contiguous()
