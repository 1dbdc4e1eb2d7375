"""Routing replay (R3) with Megatron's own RouterReplay: train on the experts that the rollout engine chose.

    pretrain(..., routing_replay=MegatronReplay())

The model is built with `--moe-enable-routing-replay`, and every sample has `routed_experts`. Gates are recomputed, and
have gradients; only the choice is the engine's.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn


class MegatronReplay:
    """A `megatron_pg.RoutingReplay` for models of megatron-core."""

    @contextmanager
    def forward(self, model: nn.Module, experts: Tensor) -> Iterator[None]:
        """The routers of this chunk take `experts`; where their layers are recomputed, each takes the same once
        more."""
        replays = _replays_of(model)
        for layer, replay in replays.items():
            replay.set_target_indices(experts[layer].long())  # which also queues them for a recomputation
            replay.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        yield
        recomputes = get_attr_wrapped_model(model, "config").recompute_granularity is not None
        for replay in replays.values():
            replay.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
            if not recomputes:
                replay.clear_indices()

    def end(self) -> None:
        """Samplers and evaluations of other code choose by themselves again."""
        RouterReplay.clear_global_router_replay_action()
        RouterReplay.clear_global_indices()


@torch.no_grad()
def chosen_experts(model: nn.Module, tokens: Tensor) -> Tensor:
    """What the model itself chooses for one sample, as a rollout engine returns it: [tokens - 1, layers, topk] int32.

    Args:
        model: of one chunk, without tensor, context or pipeline parallelism.
        tokens: [n] int64, prompt and response.
    """
    config, replays = get_attr_wrapped_model(model, "config"), _replays_of(model)
    for replay in replays.values():
        replay.set_router_replay_action(RouterReplayAction.RECORD)
    model(tokens[None], torch.arange(len(tokens), device=tokens.device)[None], None)
    experts = torch.zeros(len(tokens) - 1, config.num_layers, config.moe_router_topk, dtype=torch.int32)
    for layer, replay in replays.items():
        experts[:, layer] = replay.get_recorded_indices()[:-1]  # an engine never reads the last token
        replay.clear_router_replay_action()
    return experts


def _replays_of(model: nn.Module) -> dict[int, RouterReplay]:
    """By the layer's number in the whole model, from 0; layers without experts have none."""
    config, replays = get_attr_wrapped_model(model, "config"), {}
    if not config.moe_enable_routing_replay or config.moe_router_fusion:
        raise ValueError(
            f"moe_enable_routing_replay is {config.moe_enable_routing_replay} and moe_router_fusion "
            f"{config.moe_router_fusion}, so the router does not read the experts. Build the model with "
            "--moe-enable-routing-replay and without --moe-router-fusion."
        )
    for layer in get_attr_wrapped_model(model, "decoder").layers:
        router = getattr(layer.mlp, "router", None)
        if router is not None:
            replays[layer.layer_number - 1] = router.router_replay
    return replays
