"""Mixture of experts: the scale of the router's losses in every release, and replay of the engine's routing.

The router adds its losses to the gradient itself. Under the per-token loss scaling it multiplies them by the number of
its positions, because Megatron divides by Q, the positions of the step. Up to 0.18 these are the positions of one
tensor- and context-parallel rank, and of one row in `seq_aux_loss`. Its losses are linear in their coefficients, which
it reads in every call, also when a layer is recomputed. So the coefficients are multiplied while the step runs, and
only then: evaluation, logs, arguments and checkpoints keep the user's.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatron_pg.batch import LocalBatch, PackedBatch, samples_of
from megatron_pg.flags.megatron import SCALES_ROUTER_LOSSES, core_version
from megatron_pg.plan.errors import ScheduleError


class RoutingReplay(Protocol):
    """Makes the user's model use the engine's experts instead of its router's choice (R3, arXiv:2510.11370).

    `examples/loop/routing_replay.py` is one for Megatron's own `RouterReplay`.
    """

    def forward(self, model: nn.Module, experts: Tensor) -> AbstractContextManager[None]:
        """Entered around one forward of one chunk.

        Args:
            model: the chunk, as the schedule has it: wrapped.
            experts: [layers, positions, topk] int32 on the model's device, for the positions of this rank's routers, in
                their order. Layers are the engine's: those of the whole model, from 0. Layers that are recomputed in
                the backward must get the same experts again; the backwards of a chunk come in the order of its
                forwards.
        """

    def end(self) -> None:
        """Called when the step has ended or failed."""


_COEFFICIENTS = ("moe_aux_loss_coeff", "moe_z_loss_coeff")


def needs_router_scale(config: Any) -> bool:
    """Whether this release leaves the router's losses too small under the loss scaling of the config."""
    has_router = bool(getattr(config, "num_moe_experts", None))
    return has_router and config.calculate_per_token_loss and core_version() < SCALES_ROUTER_LOSSES


def check_rows(batches: Sequence[PackedBatch], config: Any) -> None:
    """Refuse micro-batches that need different coefficients: a layer may be recomputed after another one has run.

    Raises:
        ScheduleError: unequal numbers of rows with seq_aux_loss, which this release divides once too often by the rows.
    """
    rows = sorted({len(batch.tokens) for batch in batches})
    if len(rows) > 1 and needs_router_scale(config) and "seq_aux_loss" in config.moe_router_load_balancing_type:
        raise ScheduleError(
            f"micro-batches of {rows[0]} and of {rows[-1]} rows in one step: this megatron-core (before 0.19) divides "
            "seq_aux_loss by the rows once too often, which one coefficient cannot undo for both. Pack all with the "
            "same number of rows, or into packed rows (thd). You can also use aux_loss, or megatron-core 0.19."
        )


@contextmanager
def router_losses_to_scale(chunks: Iterable[nn.Module], *, rows: int, ranks: int) -> Iterator[None]:
    """Set the coefficients of the router's losses for this release while the step runs.

    `rows` is B of the step's micro-batches, and `ranks` is TP · C, of which one has a given position. A config that
    several modules of the chunks share is changed once.
    """

    def scaled(kind: str, coefficient: float) -> float:
        return coefficient * ranks * (rows if kind == "seq_aux_loss" else 1)

    found = (getattr(module, "config", None) for chunk in chunks for module in chunk.modules())
    configs = {id(config): config for config in found if config is not None and needs_router_scale(config)}
    before = [(config, {name: getattr(config, name) for name in _COEFFICIENTS}) for config in configs.values()]
    try:
        for config, _ in before:
            kinds, aux, z = (getattr(config, name) for name in ("moe_router_load_balancing_type", *_COEFFICIENTS))
            config.moe_aux_loss_coeff = list(map(scaled, kinds, aux)) if isinstance(kinds, list) else scaled(kinds, aux)
            config.moe_z_loss_coeff = None if z is None else z * ranks
        yield
    finally:
        for config, coefficients in before:
            vars(config).update(coefficients)


def check_experts(batches: Sequence[PackedBatch], config: Any, replay: RoutingReplay | None) -> None:
    """Refuse experts that cannot be replayed.

    Raises:
        ScheduleError: a sample without experts, with experts that the model does not have, or experts without a replay.
    """
    samples = samples_of(batches)
    if replay is None:
        if given := [sample for sample in samples if sample.routed_experts is not None]:
            raise ScheduleError(
                f"sample {given[0].sample_id} has routed_experts, and without routing_replay the router chooses "
                "experts itself. Give routing_replay (docs/parallelism.md), or remove the field."
            )
        return
    overlaps = getattr(config, "overlap_moe_expert_parallel_comm", False)
    if not config.num_moe_experts or overlaps:
        raise ScheduleError(
            "routing_replay needs a model with experts whose forwards run one at a time, but num_moe_experts is "
            f"{config.num_moe_experts} and overlap_moe_expert_parallel_comm {overlaps}. Change it, or remove the "
            "replay."
        )
    for sample in samples:
        if sample.routed_experts is None:
            raise ScheduleError(
                f"sample {sample.sample_id} has no routed_experts, which routing_replay needs of every sample. Let the "
                "rollout engine return them."
            )
        shape, most = tuple(sample.routed_experts.shape[1:]), int(sample.routed_experts.max())
        if shape != (config.num_layers, config.moe_router_topk) or most >= config.num_moe_experts:
            raise ScheduleError(
                f"routed_experts of sample {sample.sample_id} are of {shape[0]} layers with {shape[1]} experts up to "
                f"number {most}, and the model has {config.num_layers} layers with {config.moe_router_topk} of "
                f"{config.num_moe_experts} experts. Sample with the model that is trained."
            )


def local_experts(local: LocalBatch, config: Any, *, tp_rank: int, tp_size: int) -> Tensor:
    """The engine's experts of every layer for this rank's positions, in the order in which its routers see them.

    Positions of which an engine has none (the last token of a sample, padding) get distinct experts in turn, so that
    dispatchers find `topk` for every position and no expert is crowded; they have no part in the loss. All samples have
    `routed_experts`, of all layers of the model. `tp_rank` and `tp_size` are 0 and 1 unless the sequence is cut over
    the tensor-parallel group (sequence parallelism).

    Returns:
        [layers, W/C · B / tp_size, topk] int32, on the CPU.
    """
    whole, layers, topk = local.whole, config.num_layers, config.moe_router_topk
    samples, positions = (
        rows[:, local.row_index].t().reshape(-1).chunk(tp_size)[tp_rank]
        for rows in (whole.sample_index, whole.position_ids)
    )
    records = [sample.routed_experts for sample in whole.samples if sample.routed_experts is not None]
    records_joined = torch.cat([torch.zeros(0, layers, topk, dtype=torch.int32), *records])
    lengths = torch.tensor([*map(len, records), 0])  # an index of -1, padding, takes the last: no token
    starts = torch.tensor([0, *itertools.accumulate(map(len, records))])
    is_known = positions < lengths[samples]
    turns = torch.arange(len(positions) * topk, dtype=torch.int32).remainder(config.num_moe_experts).view(-1, 1, topk)
    experts = turns.repeat(1, layers, 1)
    experts[is_known] = records_joined[starts[samples[is_known]] + positions[is_known]]
    return experts.transpose(0, 1).contiguous()
