"""This rank's slice of a micro-batch: one index takes tokens, masks, advantages and weights alike, so they cannot come apart."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.fields import SAMPLED, TAUGHT, TeacherStates, TokenFields, TokenSupport
from megatron_pg.batch.pack import PackedBatch
from megatron_pg.batch.sequences import Sequences
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.rollouts.fields import LOGPROBS, OPTIONAL


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """What the model reads: this rank's columns of the B rows."""

    tokens: Tensor  # [B, W/C] int64
    labels: Tensor  # [B, W/C] int64
    position_ids: Tensor  # [B, W/C] int64
    loss_mask: Tensor  # [B, W/C] float32, for Megatron's own auxiliary losses
    boundaries: Tensor | None = None  # [samples + 1] int32, padded, of the whole row; thd only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DepthFields:
    """What multi-token prediction of one depth trains here: a position's target is the token `depth` behind its label."""

    targets: Tensor  # [T] int64, global ids
    weights: Tensor  # [T] float64, 0 where nothing is trained
    trained: Tensor  # [n] int64, rows whose target is trained


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """What one rank computes on, on its device: model inputs, token fields, and where they came from."""

    inputs: ModelInputs
    fields: TokenFields  # [T] each, in the order of the logits [W/C, B, V] flattened over their first two dimensions
    trained: Tensor  # [n] int64, rows of the fields whose mask is True
    whole: PackedBatch
    row_index: Tensor  # [W/C] int64, CPU: positions of the whole row
    depths: tuple[DepthFields, ...] = ()  # of multi-token prediction, from 1 on

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
        holders = sample, self.fields
        known = [
            name
            for name in ("old_logprobs", "advantages")
            if all(getattr(holder, name) is not None for holder in holders)
        ]
        given = ", ".join(f"{name} {float(getattr(sample, name)[k]):g}" for name in known)
        where = f"sample {sample.sample_id} (number {i} of its micro-batch), response token {k}"
        return f"{where} with {given}" if given else where


def slice_batch(
    batch: PackedBatch,
    fields: Mapping[str, Tensor | None],
    *,
    cp_rank: int,
    cp_size: int,
    device: torch.device | str = "cpu",
    sequences: bool = False,
    cp_group: ProcessGroup | None = None,
    depth_weights: Sequence[Tensor] = (),
) -> LocalBatch:
    """This rank's part of a micro-batch.

    Args:
        batch: the whole micro-batch.
        fields: [sum of R, …] each, what the step adds to the samples' own fields, by its name in `TokenFields.per_token`: at least
            `weights`.
        cp_rank: rank in the context-parallel group.
        cp_size: size of that group.
        device: where the model runs.
        sequences: whether the loss needs averages over whole sequences.
        cp_group: the context-parallel group, over which they are added up; None: every sequence is whole.
        depth_weights: [sum of R] float64 for each depth of multi-token prediction.
    """
    index = zigzag_index(batch.padded_lengths, cp_rank=cp_rank, cp_size=cp_size)
    counts = torch.tensor(batch.tokens_per_sample, dtype=torch.float64).clamp(min=1)
    known = {
        "mask": batch.loss_mask,
        "old_logprobs": batch.response_values("old_logprobs"),
        "advantages": batch.response_values("advantages"),
        "sample_weights": batch.loss_mask / batch.per_token(counts),
        **{name: batch.optional_values(name) for name in OPTIONAL if name in LOGPROBS},
        **fields,
    }
    rows = {name: batch.spread(values) for name, values in known.items() if values is not None}
    rows |= {"targets": batch.labels, "slots": batch.sample_index}
    if TAUGHT in known:
        rows["number"] = batch.spread(torch.arange(len(known[TAUGHT])))
    if (support := batch.support()) is not None:
        rows |= {"starts": batch.spread(support.starts), "counts": batch.spread(support.counts)}
    flat = {name: values[:, index].transpose(0, 1).flatten(0, 1) for name, values in rows.items()}
    inputs = {name: getattr(batch, name)[:, index] for name in ("tokens", "labels", "position_ids")}
    inputs["loss_mask"] = flat["mask"].view(-1, len(batch.tokens)).t().float()
    if batch.qkv_format == "thd":
        inputs["boundaries"] = torch.tensor([0, *batch.padded_lengths]).cumsum(0).int()
    slots, trained = flat.pop("slots"), flat["mask"].nonzero()[:, 0]
    support = None if support is None else _support_here(support, flat, device)
    taught = _states_here(batch, flat, device) if TAUGHT in flat else None
    whole = _sequences(slots, counts, device, cp_group) if sequences else None
    return LocalBatch(
        inputs=ModelInputs(**_on(device, **inputs)),
        fields=replace(TokenFields.of(_on(device, **flat), whole), support=support, teacher_hidden=taught),
        **_on(device, trained=trained),
        whole=batch,
        row_index=index,
        depths=tuple(
            _depth_fields(batch, index, depth, weights, known["mask"], device)
            for depth, weights in enumerate(depth_weights, start=1)
        ),
    )


def _support_here(support: TokenSupport, flat: dict[str, Tensor], device: torch.device | str) -> TokenSupport | None:
    """Of this rank's rows, where a term reads it; None: it restricts none of them. Its own rows are taken out of `flat`."""
    starts, counts = flat.pop("starts"), torch.where(flat.pop(SAMPLED, flat["mask"]), flat.pop("counts"), 0)
    sets = _on(device, starts=starts, counts=counts, ids=support.ids)
    return TokenSupport(**sets, longest=support.longest) if counts.any() else None


def _states_here(batch: PackedBatch, flat: dict[str, Tensor], device: torch.device | str) -> TeacherStates:
    """Of this rank's rows, where a loss term that reads them trains. Its own rows are taken out of `flat`.

    The states stay on the host, from where each micro-batch takes its own: a step's would be as large as its activations.
    """
    taught, numbers = flat.pop(TAUGHT), flat.pop("number")
    slots, states = (taught.cumsum(0) - 1).clamp(min=0), batch.teacher_hidden(numbers[taught])
    states = states if torch.device(device).type == "cpu" else states.pin_memory()
    return TeacherStates(**_on(device, slots=slots), states=states)


def _depth_fields(
    batch: PackedBatch, index: Tensor, depth: int, weights: Tensor, trained: Tensor, device: torch.device | str
) -> DepthFields:
    labels = batch.labels.flatten()[batch.response_positions]
    rows = {"targets": batch.spread(labels, depth), "weights": batch.spread(weights, depth)}
    flat = {name: values[:, index].t().reshape(-1) for name, values in rows.items()}
    mask = batch.spread(trained, depth)[:, index].t().reshape(-1)
    return DepthFields(**_on(device, **flat, trained=mask.nonzero()[:, 0]))


def _sequences(slots: Tensor, counts: Tensor, device: torch.device | str, cp_group: ProcessGroup | None) -> Sequences:
    slots = torch.where(slots < 0, len(counts), slots)
    order, lengths = slots.argsort(stable=True), torch.bincount(slots, minlength=len(counts) + 1)
    return Sequences(**_on(device, slots=slots, order=order, lengths=lengths, counts=counts), group=cp_group)


def _on(device: torch.device | str, **tensors: Tensor) -> dict[str, Tensor]:
    """The tensors on the device, without waiting for it."""
    if torch.device(device).type == "cpu":
        return tensors
    return {name: values.pin_memory().to(device, non_blocking=True) for name, values in tensors.items()}
