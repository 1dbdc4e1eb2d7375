"""The experts that the rollout engine's routers chose, for every token but the last, which an engine never reads."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_pg.rollouts.payloads.base import Payload, integers, is_plain, shown


class RoutedExperts(Payload[Tensor]):
    """[n - 1, layers, topk] int32; a layer without experts has zeros."""

    form = (
        "are not numbers of experts, a list per token of lists per layer. Give the engine's array "
        "[tokens - 1, layers, topk]."
    )

    def parse(self, values: Any) -> Tensor:
        """From nested lists, an array or a tensor of integers."""
        return torch.from_numpy(integers(values if isinstance(values, Tensor) else np.array(values)))

    def check(self, record: Any, sample: Any) -> None:
        """Raise ValueError for other shapes, negative numbers, and an expert that a token has twice."""
        label, num_tokens = f"{self.name} of sample {sample.sample_id}", len(sample.tokens)
        if not is_plain(record, 3, torch.int32):
            raise ValueError(
                f"{label} are {shown(record)}, not [tokens - 1, layers, topk] int32 on the CPU. Use Sample.build."
            )
        if len(record) != num_tokens - 1 or record.numel() == 0:
            raise ValueError(
                f"{label} have shape {tuple(record.shape)} for {num_tokens} tokens, so they do not align: an engine "
                "has experts for every token but the last, which it never reads. Give [tokens - 1, layers, topk]."
            )
        if record.min() < 0:
            raise ValueError(f"{label} contain a negative number, which is not an expert. Record all tokens.")
        ordered = record.sort(dim=-1).values
        is_dense = (record == 0).all(dim=2).all(dim=0)  # engines leave the zeros of layers without experts
        twice = (ordered[..., 1:] == ordered[..., :-1]).any(dim=-1) & ~is_dense
        if twice.any():
            token, layer = twice.nonzero()[0].tolist()
            raise ValueError(
                f"{label} name an expert twice at token {token}, layer {layer}. Was the record taken whole, prompt and "
                "cached prefixes included?"
            )

    def to_json(self, record: Tensor) -> list:
        """A list per token of lists per layer."""
        return record.tolist()
