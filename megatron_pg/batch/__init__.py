"""Steps and their micro-batches: samples laid out as Megatron requires, and this rank's slice of them."""

from megatron_pg.batch.context_ranks import ContextRanks
from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.pack import PackedBatch, pack, pack_row, samples_of
from megatron_pg.batch.sequences import Sequences
from megatron_pg.batch.slicing import LocalBatch, ModelInputs, slice_batch
from megatron_pg.batch.steps import check_boundaries, cut_microbatches, cut_over_ranks, cut_steps, read_steps

__all__ = [
    "ContextRanks",
    "LocalBatch",
    "ModelInputs",
    "PackedBatch",
    "Sequences",
    "TokenFields",
    "check_boundaries",
    "cut_microbatches",
    "cut_over_ranks",
    "cut_steps",
    "pack",
    "pack_row",
    "read_steps",
    "samples_of",
    "slice_batch",
]
