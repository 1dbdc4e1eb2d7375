"""A critic's output layer: one value per position instead of logits."""

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from megatron_pg.lm_head.inputs import gather_sequence
from megatron_pg.lm_head.products import logits_dtype

Model = TypeVar("Model", bound=nn.Module)


class ValueHead(nn.Module):
    """The value of each position, v = h·w, in float32 for hidden states of fewer bits, too; w begins at 0.

    Every tensor-parallel rank has the whole w and all values. Under sequence parallelism a rank computes those of its
    positions, and Megatron sums the gradient of w over the ranks as it does for norms.

    Args:
        layer: the ColumnParallelLinear that it replaces.
        device: of its weight.
    """

    def __init__(self, layer: Any, device: torch.device):
        super().__init__()
        self.sequence_parallel, self._tp_group = bool(layer.sequence_parallel), layer.tp_group
        shape = (1, layer.input_size)
        self.weight = nn.Parameter(torch.zeros(shape, dtype=layer.config.params_dtype, device=device))
        self.weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: Tensor, weight: None = None, runtime_gather_output: bool | None = None) -> tuple:
        """[s, b, 1] values of all positions from hidden states [s, b, H] or [s / tp, b, H], and no bias.

        The other arguments are Megatron's: no weight is shared, and values are never cut over vocabulary columns.
        """
        wide = logits_dtype(hidden)
        values = nn.functional.linear(hidden.to(wide), self.weight.to(wide))
        if self.sequence_parallel and self._tp_group is not None and self._tp_group.size() > 1:
            # every rank then has the same loss, so its gradient is not summed over them
            values = gather_sequence(values, self._tp_group, sums_gradient=False)
        return values, None


def add_value_head(model: Model) -> Model:
    """Make a critic of `model`: replace its output layer by a `ValueHead`; returns it.

    Args:
        model: a megatron.core GPTModel or HybridModel, not yet wrapped, on any pipeline stage; without an output layer
            there it is left as it is.

    Raises:
        ValueError: the output layer shares the embedding's weight.
    """
    if model.share_embeddings_and_output_weights:
        raise ValueError(
            "the model's output layer shares the weight of its embedding, and a value head has its own. Build the "
            "model with --untie-embeddings-and-output-weights."
        )
    if model.post_process:
        model.output_layer = ValueHead(model.output_layer, next(model.parameters()).device)
    return model


def check_role(layer: Any, *, is_critic: bool) -> None:
    """Raise ValueError if the model has an output layer for the other role."""
    if is_critic and not isinstance(layer, ValueHead):
        raise ValueError(
            f"--pg-role critic needs a model with a value head, and its output layer is a {type(layer).__name__}. "
            "Return megatron_pg.add_value_head(model) from the model provider."
        )
    if isinstance(layer, ValueHead) and not is_critic:
        raise ValueError(
            "the model has a value head, and the loss is that of a policy. Give --pg-role critic, or leave "
            "add_value_head out."
        )
