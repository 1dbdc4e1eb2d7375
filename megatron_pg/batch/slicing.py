"""This rank's slice of a micro-batch: one index slices tokens, masks, advantages and weights, so they stay aligned."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch.fields import TokenFields
from megatron_pg.batch.pack import PackedBatch
from megatron_pg.batch.sequences import Sequences
from megatron_pg.batch.zigzag import zigzag_index
from megatron_pg.rollouts.fields import LOGPROBS, OPTIONAL
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.base import Layout


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelInputs:
    """The model's input: this rank's columns of the B rows."""

    tokens: Tensor  # [B, W/C] int64
    labels: Tensor  # [B, W/C] int64
    position_ids: Tensor  # [B, W/C] int64
    loss_mask: Tensor  # [B, W/C] float32, for Megatron's own auxiliary losses
    boundaries: Tensor | None = None  # [samples + 1] int32, padded, of the whole row; thd only


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DepthFields:
    """Targets of multi-token prediction at one depth: the token `depth` positions after a position's label."""

    targets: Tensor  # [T] int64, global ids
    weights: Tensor  # [T] float64, 0 where nothing is trained
    trained: Tensor  # [n] int64, rows whose target is trained
    sources: Tensor  # [n] int64, rows at which the policy predicts that target: of this rank, or T + that of `Remote`


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Remote:
    """Rows at which the policy predicts what a depth predicts on another context-parallel rank; the same on each."""

    rows: Tensor  # [m] int64, of this rank's
    slots: Tensor  # [m] int64, their places among the rows of all ranks
    size: int  # rows of all ranks
    group: ProcessGroup | None  # the context-parallel group

    def exchange(self, values: Tensor) -> Tensor:
        """[size, n] of all ranks from this rank's values [T, n]; a collective if there is any."""
        table = values.new_zeros(self.size, values.shape[1]).index_copy_(0, self.slots, values[self.rows])
        if self.size:
            torch.distributed.all_reduce(table, group=self.group)
        return table


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LocalBatch:
    """The input of one rank, on its device: model inputs, token fields, and their origin."""

    inputs: ModelInputs
    fields: TokenFields  # [T] each, in the order of the logits [W/C, B, V] flattened over their first two dimensions
    trained: Tensor  # [n] int64, rows of the fields whose mask is True
    whole: PackedBatch
    row_index: Tensor  # [W/C] int64, CPU: positions of the whole row
    depths: tuple[DepthFields, ...] = ()  # of multi-token prediction, from 1 on
    remote: Remote | None = None  # of multi-token prediction

    @property
    def num_positions(self) -> int:
        """Positions of this rank, padding included."""
        return self.inputs.tokens.numel()

    def locate(self, flat: int) -> str:
        """Sample and response token of an entry of the [T] fields, for error messages."""
        column, row = divmod(flat, self.inputs.tokens.shape[0])
        position = int(self.row_index[column])
        i = int(self.whole.sample_index[row, position])
        sample = self.whole.samples[i]
        prompt_length = len(sample.tokens) - sample.response_length
        k = int(self.whole.position_ids[row, position]) + 1 - prompt_length
        known = [
            name
            for name in ("old_logprobs", "advantages", "values", "returns")
            if getattr(sample, name) is not None and getattr(self.fields, name, k) is not None
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
    sequences: str | None = None,
    cp_group: ProcessGroup | None = None,
    depth_weights: Sequence[Tensor] = (),
) -> LocalBatch:
    """This rank's part of a micro-batch.

    Args:
        batch: the whole micro-batch.
        fields: [sum of R] each, what the step adds to the samples' own fields, by its name in `TokenFields.per_token`:
            at least `weights`. The name of a payload gives a bool mask: the tokens at which a loss term reads it.
        cp_rank: rank in the context-parallel group.
        cp_size: size of that group.
        device: where the model runs.
        sequences: "sample" or "turn" if the loss needs averages over whole samples or turns; None: it needs none.
        cp_group: the context-parallel group, over which they are added up; None: every sequence is whole.
        depth_weights: [sum of R] float64 for each depth of multi-token prediction.
    """
    index = zigzag_index(batch.padded_lengths, cp_rank=cp_rank, cp_size=cp_size)
    counts = batch.sums(batch.loss_mask).double().clamp(min=1)
    known = {
        "mask": batch.loss_mask,
        "old_logprobs": batch.response_values("old_logprobs"),
        "advantages": batch.response_values("advantages"),
        "sample_weights": batch.loss_mask / batch.per_token(counts),
        **{name: batch.values[name] for name in OPTIONAL if name in LOGPROBS and name in batch.values},
        **{name: values for name, values in fields.items() if values is not None},
    }
    here = _rows_of(batch, index)
    flat = {name: here(values) for name, values in known.items()}
    layout = Layout(batch.lengths.tolist(), here)
    read = [name for name in PAYLOADS if name in flat]
    payloads = {name: PAYLOADS[name].rows(batch.records_of(name), layout, flat.pop(name)) for name in read}
    flat["targets"], slots = _columns(batch.labels, index), _columns(batch.sample_index, index)
    inputs = {name: getattr(batch, name)[:, index] for name in ("tokens", "labels", "position_ids")}
    inputs["loss_mask"] = flat["mask"].view(-1, len(batch.tokens)).t().float()
    if batch.qkv_format == "thd":
        inputs["boundaries"] = torch.tensor([0, *batch.padded_lengths]).cumsum(0).int()
    if sequences == "turn":
        counts = batch.sums(batch.loss_mask, "turn").double().clamp(min=1)
        slots = here(batch.per_token(torch.arange(1, len(counts) + 1), "turn")) - 1
    whole = _sequences(slots, counts, device, cp_group) if sequences else None
    depths, remote = _depths_of(batch, index, depth_weights, known["mask"], (cp_size, cp_group), device)
    return LocalBatch(
        inputs=ModelInputs(**_on(device, **inputs)),
        fields=TokenFields.of(
            _on(device, **flat) | {name: rows and rows.to(partial(_moved, device)) for name, rows in payloads.items()},
            whole,
        ),
        **_on(device, trained=flat["mask"].nonzero()[:, 0]),
        whole=batch,
        row_index=index,
        depths=depths,
        remote=remote,
    )


def _columns(values: Tensor, index: Tensor) -> Tensor:
    """[T, …] this rank's columns of [B, W, …], in the order of the logits."""
    return values[:, index].transpose(0, 1).flatten(0, 1)


def _rows_of(batch: PackedBatch, index: Tensor) -> Callable[[Tensor], Tensor]:
    """Takes response-aligned values [sum of R, …] to this rank's rows [T, …], 0 elsewhere."""
    numbers = _columns(batch.spread(torch.arange(1, len(batch.response_positions) + 1)), index)
    rows = numbers.nonzero()[:, 0]
    tokens = numbers[rows] - 1

    def here(values: Tensor) -> Tensor:
        return values.new_zeros(len(numbers), *values.shape[1:]).index_copy_(0, rows, values[tokens])

    return here


def _depths_of(
    batch: PackedBatch,
    index: Tensor,
    weights: Sequence[Tensor],
    trained: Tensor,
    context: tuple[int, ProcessGroup | None],
    device: torch.device | str,
) -> tuple[tuple[DepthFields, ...], Remote | None]:
    """`depths` and `remote`; weights [sum of R] of each depth, and which tokens are trained."""
    if not weights:
        return (), None
    size, group = context
    owners = torch.zeros(batch.tokens.shape[1], dtype=torch.int64)
    for rank in range(size):
        owners[zigzag_index(batch.padded_lengths, cp_rank=rank, cp_size=size)] = rank
    owners, at = owners.repeat(len(batch.tokens)), batch.response_positions
    before = {d: (at - d).clamp(min=0) for d in range(1, len(weights) + 1)}  # 0: not reached, in the first sample
    far = [batch.reached(d) & trained & (owners[at] != owners[before[d]]) for d in before]
    places = at[torch.stack(far).any(dim=0)]
    numbers = _columns(torch.arange(batch.tokens.numel()).view(batch.tokens.shape), index)
    rows_of = torch.full((batch.tokens.numel(),), -1).index_copy_(0, numbers, torch.arange(len(numbers)))
    sources = rows_of.clone()
    missing = rows_of[places] < 0
    sources[places[missing]] = len(numbers) + torch.arange(len(places))[missing]
    depths = []
    for depth, own in enumerate(weights, start=1):
        rows = {"targets": batch.labels.flatten()[at], "weights": own, "trained": trained, "sources": sources[at]}
        flat = {name: _columns(batch.spread(values, depth), index) for name, values in rows.items()}
        chosen = flat["trained"].nonzero()[:, 0]
        depths.append(DepthFields(**_on(device, **flat | {"trained": chosen, "sources": flat["sources"][chosen]})))
    remote = _on(device, rows=rows_of[places][~missing], slots=(~missing).nonzero()[:, 0])
    return tuple(depths), Remote(**remote, size=len(places), group=group)


def _sequences(slots: Tensor, counts: Tensor, device: torch.device | str, cp_group: ProcessGroup | None) -> Sequences:
    slots = torch.where(slots < 0, len(counts), slots)
    order, lengths = slots.argsort(stable=True), torch.bincount(slots, minlength=len(counts) + 1)
    return Sequences(**_on(device, slots=slots, order=order, lengths=lengths, counts=counts), group=cp_group)


def _on(device: torch.device | str, **tensors: Tensor) -> dict[str, Tensor]:
    """The tensors on the device, without waiting for it."""
    return {name: _moved(device, values) for name, values in tensors.items()}


def _moved(device: torch.device | str, values: Tensor) -> Tensor:
    is_host = torch.device(device).type == "cpu"
    return values if is_host else values.pin_memory().to(device, non_blocking=True)
