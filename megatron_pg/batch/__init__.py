"""One micro-batch: samples laid out as Megatron wants them, and this rank's slice of it."""

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.pack import PackedBatch, check_boundaries, cut_steps, pack
from megatron_pg.batch.sequences import Sequences
from megatron_pg.batch.slicing import LocalBatch, ModelInputs, slice_batch

__all__ = [
    "LocalBatch",
    "ModelInputs",
    "PackedBatch",
    "Sequences",
    "TokenFields",
    "check_boundaries",
    "cut_steps",
    "pack",
    "slice_batch",
]
