"""Megatron's output layer with another head in it: `lm_head` on the instance, and what it refuses.

The layer's matrix product is its `_forward_impl`, which every supported release calls with the same keywords. Here it is
replaced on one instance: by float32 logits, or, while a policy-gradient loss is being computed, by nothing, so that
the fused head takes hidden states and weight to the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_pg.lm_head import fp32_logits


class HeadCall(NamedTuple):
    """What the output layer was called with."""

    hidden: Tensor  # [s, b, H], or this rank's part of the sequence
    weight: nn.Parameter  # [V / tp, H]
    tp_group: ProcessGroup | None
    sequence_parallel: bool

    @property
    def stand_in(self) -> Tensor:
        """[s, b, 1] without memory, for code between the layer and the loss that counts on logits."""
        ranks = self.tp_group.size() if self.tp_group is not None and self.sequence_parallel else 1
        return self.hidden.new_zeros(1).expand(self.hidden.shape[0] * ranks, self.hidden.shape[1], 1)


def compute_in_float32(layer: Any, *, backward: str) -> None:
    """Make `layer`, a ColumnParallelLinear, return float32 logits.

    Args:
        layer: the model's output layer.
        backward: "bf16" or "split", as in `lm_head.fp32_logits`.
    """

    def forward_impl(**arguments: Any) -> Tensor:
        hidden, weight, group, sequence_parallel = _call(arguments)
        return fp32_logits(hidden, weight, backward=backward, tp_group=group, sequence_parallel=sequence_parallel)

    layer._forward_impl = forward_impl


class DeferredHead:
    """Lets an output layer pass its hidden states on, and keeps what it was called with.

    Args:
        layer: the model's output layer.
        is_wanted: whether a loss is being computed that takes hidden states; else the layer makes its logits.
    """

    def __init__(self, layer: Any, is_wanted: Callable[[], bool]):
        self._call: HeadCall | None = None
        make_logits = layer._forward_impl

        def forward_impl(**arguments: Any) -> Tensor:
            if not is_wanted():
                return make_logits(**arguments)
            self._call = _call(arguments)
            return self._call.stand_in

        layer._forward_impl = forward_impl

    def take(self) -> HeadCall:
        """The latest call, once."""
        call, self._call = self._call, None
        return call


def check_layer(layer: Any) -> None:
    """Find out before the step, when every rank can still be told, whether the float32 head can stand for `layer`.

    Raises:
        ValueError: `layer` does more than the product, or does not make it where the head is put.
    """
    if not hasattr(type(layer), "_forward_impl"):
        raise ValueError(
            f"the output layer is a {type(layer).__name__}, not Megatron's ColumnParallelLinear, so the float32 head would not be "
            "used. Build the model with that one (without --fp8-output-proj)."
        )
    names = ("bias", "grad_output_buffer", "sequence_parallel", "allreduce_dgrad", "tp_group")
    _call({"input": None, "weight": None} | {name: getattr(layer, name) for name in names})


def _call(arguments: dict[str, Any]) -> HeadCall:
    """The call of these keywords, where a head can take it."""
    tp_group, sequence_parallel = arguments["tp_group"], bool(arguments["sequence_parallel"])
    tp_group = None if tp_group is None or tp_group.size() == 1 else tp_group
    if arguments["bias"] is not None:
        raise ValueError(
            "the output layer has a bias, which the float32 head would leave out. Build the model without it."
        )
    if arguments["grad_output_buffer"] is not None:
        raise ValueError(
            "the output layer defers its weight gradient (--defer-embedding-wgrad-compute), which the float32 head adds at "
            "once. Remove that flag."
        )
    if tp_group is not None and not (sequence_parallel or arguments["allreduce_dgrad"]):
        raise ValueError(
            "the output layer leaves the sum of the hidden states' gradient to others (disable_grad_reduce), which the float32 head "
            "makes itself, so it would count twice. Build the model without it."
        )
    return HeadCall(arguments["input"], arguments["weight"], tp_group, sequence_parallel)
