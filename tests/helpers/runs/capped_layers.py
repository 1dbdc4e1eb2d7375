"""Megatron-Bridge's way to cap the logits of Gemma: a class that is put before the output layer's own."""

from typing import Any

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear


class Gemma2OutputLayer(ColumnParallelLinear):
    """Named as Megatron-Bridge's."""

    def forward(self, *args, **kwargs):
        output, bias = super().forward(*args, **kwargs)
        cap = self.config.final_logit_softcapping
        return cap * torch.tanh(output / cap), bias


Gemma2OutputLayer.forward.__module__ = "megatron.bridge.models.gemma.gemma2_provider"


def put_cap_into(layer: Any, cap: float) -> None:
    """As the bridge's provider does."""
    layer.__class__ = type("ColumnParallelLinear", (Gemma2OutputLayer, ColumnParallelLinear), {})
    layer.config.final_logit_softcapping = cap
