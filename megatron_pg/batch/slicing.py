"""This rank's slice of a micro-batch: one index takes tokens, masks, advantages and weights alike, so they cannot come apart."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.pack import PackedBatch
from megatron_pg.batch.sequences import Sequences
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.rollouts.fields import OPTIONAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """What the model reads: this rank's columns of the B rows."""

    tokens: Tensor  # [B, W/C] int64
    labels: Tensor  # [B, W/C] int64
    position_ids: Tensor  # [B, W/C] int64
    loss_mask: Tensor  # [B, W/C] float32, for Megatron's own auxiliary losses
    boundaries: Tensor | None  # [samples + 1] int32, padded, of the whole row; thd only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """What one rank computes on, on its device: model inputs, token fields, and where they came from."""

    inputs: ModelInputs
    fields: TokenFields  # [T] each, in the order of the logits [W/C, B, V] flattened over their first two dimensions
    trained: Tensor  # [n] int64, rows of the fields whose mask is True
    whole: PackedBatch
    row_index: Tensor  # [W/C] int64, CPU: positions of the whole row

    @property
    def num_positions(self) -> int:
        """Positions that this rank holds, padding included."""
        return self.inputs.tokens.numel()

    def locate(self, flat: int) -> str:
        """Sample and response token of an entry of the [T] fields, for error messages."""
        column, row = divmod(flat, self.inputs.tokens.shape[0])
        position = int(self.row_index[column])
        i = int(self.whole.sample_index[row, position])
        sample = self.whole.samples[i]
        prompt_length = len(sample.tokens) - sample.response_length
        k = int(self.whole.position_ids[row, position]) + 1 - prompt_length
        given = ", ".join(f"{name} {float(getattr(sample, name)[k]):g}" for name in ("old_logprobs", "advantages"))
        return f"sample {sample.sample_id} (number {i} of its micro-batch), response token {k} with {given}"


def slice_batch(
    batch: PackedBatch,
    fields: Mapping[str, Tensor | None],
    *,
    cp_rank: int,
    cp_size: int,
    device: torch.device | str = "cpu",
    sequences: bool = False,
    cp_group: ProcessGroup | None = None,
) -> LocalBatch:
    """This rank's part of a micro-batch.

    Args:
        batch: the whole micro-batch.
        fields: [sum of R] each, what the step adds to the samples' own fields, by its name in `TokenFields`: at least `weights`.
        cp_rank: rank in the context-parallel group.
        cp_size: size of that group.
        device: where the model runs.
        sequences: whether the loss needs averages over whole sequences.
        cp_group: the context-parallel group, over which they are added up; None: every sequence is whole.
    """
    index = zigzag_index(batch.padded_lengths, cp_rank=cp_rank, cp_size=cp_size)
    found = {name: values for name, values in {**_sample_fields(batch), **fields}.items() if values is not None}
    flat = {name: batch.spread(values)[:, index].t().reshape(-1) for name, values in found.items()}
    inputs = _model_inputs(batch, index, flat["mask"])
    flat["targets"] = inputs["labels"].t().reshape(-1)
    trained = flat["mask"].nonzero()[:, 0]
    return LocalBatch(
        inputs=ModelInputs(
            **{name: None if values is None else _to_device(values, device) for name, values in inputs.items()}
        ),
        fields=TokenFields(
            **{name: _to_device(values, device) for name, values in flat.items()},
            sequences=_sequences(batch, index, device, cp_group) if sequences else None,
        ),
        trained=_to_device(trained, device),
        whole=batch,
        row_index=index,
    )


def _sample_fields(batch: PackedBatch) -> dict[str, Tensor | None]:
    """[sum of R] each, what the samples bring, by their names in `TokenFields`; None where no sample has the field."""
    counts = torch.tensor(batch.tokens_per_sample, dtype=torch.float64).clamp(min=1)
    return {
        "mask": batch.loss_mask,
        "old_logprobs": batch.response_values("old_logprobs"),
        "advantages": batch.response_values("advantages"),
        "sample_weights": batch.loss_mask / batch.per_token(counts),
        **{name: batch.optional_values(name) for name in OPTIONAL},
    }


def _model_inputs(batch: PackedBatch, index: Tensor, mask: Tensor) -> dict[str, Tensor | None]:
    return {
        "tokens": batch.tokens[:, index],
        "labels": batch.labels[:, index],
        "position_ids": batch.position_ids[:, index],
        "loss_mask": mask.view(-1, len(batch.tokens)).t().float(),
        "boundaries": torch.tensor([0, *batch.padded_lengths]).cumsum(0).int() if batch.qkv_format == "thd" else None,
    }


def _sequences(
    batch: PackedBatch, index: Tensor, device: torch.device | str, cp_group: ProcessGroup | None
) -> Sequences:
    size = len(batch.samples)
    rows = batch.sample_index[:, index].t().reshape(-1)
    slots = torch.where(rows < 0, size, rows)
    found = {
        "slots": slots,
        "order": slots.argsort(stable=True),
        "lengths": torch.bincount(slots, minlength=size + 1),
        "counts": torch.tensor(batch.tokens_per_sample, dtype=torch.float64).clamp(min=1),
    }
    return Sequences(**{name: _to_device(values, device) for name, values in found.items()}, group=cp_group)


def _to_device(values: Tensor, device: torch.device | str) -> Tensor:
    if torch.device(device).type == "cpu":
        return values
    return values.pin_memory().to(device, non_blocking=True)  # does not wait for the device
