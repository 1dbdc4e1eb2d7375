"""Megatron's output layer with another head in it: `lm_head` on the instance, and what it refuses.

The layer's matrix product is `_forward_impl`, which every supported release calls with the same keywords. Here it is
replaced on one instance: by float32 logits, or, while a policy-gradient loss is being computed, by nothing, so that
the fused head takes hidden states and weight to the loss.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_pg.lm_head import fp32_logits

_MEGATRONS = (
    ("megatron.core.tensor_parallel.layers", "ColumnParallelLinear"),
    ("megatron.core.transformer.linear_cross_entropy", "LinearCrossEntropyModule"),  # the same, unless asked for a loss
)
_BRIDGE = "megatron.bridge.models.", ("Gemma2OutputLayer.forward", "Gemma4OutputLayer.forward")  # cap the logits
_STAND_INS = 0.0, 2.0**14  # exact in every dtype; a scale, a bias or a cap changes at least one of them


class HeadCall(NamedTuple):
    """What the output layer was called with."""

    hidden: Tensor  # [s, b, H], or this rank's part of the sequence
    weight: nn.Parameter  # [V / tp, H]
    tp_group: ProcessGroup | None
    sequence_parallel: bool
    softcap: float | None = None  # that the layer's forward applies to what it returns
    is_changed: Tensor | bool = False  # [] whether code after the layer changed what it returned, now or before

    @property
    def stand_in(self) -> Tensor:
        """[s, b, 2] without memory, for code between the layer and the loss that counts on logits."""
        ranks = self.tp_group.size() if self.tp_group is not None and self.sequence_parallel else 1
        return _stand_ins(self.hidden).expand(self.hidden.shape[0] * ranks, self.hidden.shape[1], 2)


def _stand_ins(like: Tensor) -> Tensor:
    """[2], without a copy from the host, for which it would wait."""
    zero, large = _STAND_INS
    return torch.arange(zero, 2 * large, large, dtype=like.dtype, device=like.device)


def compute_in_float32(layer: Any, *, backward: str) -> Callable[[], bool]:
    """Make `layer`, a ColumnParallelLinear, return float32 logits.

    Args:
        layer: the model's output layer.
        backward: "bf16" or "split", as in `lm_head.fp32_logits`.

    Returns:
        A function that reports whether the float32 product ran since its previous call. A subclass may compute its
        logits in another way.
    """
    has_run = False

    def forward_impl(**arguments: Any) -> Tensor:
        nonlocal has_run
        has_run = True
        call = _call(arguments)
        group, sequence_parallel = call.tp_group, call.sequence_parallel
        return fp32_logits(
            call.hidden, call.weight, backward=backward, tp_group=group, sequence_parallel=sequence_parallel
        )

    def take_run() -> bool:
        nonlocal has_run
        ran, has_run = has_run, False
        return ran

    _replace_product(layer, forward_impl)
    return take_run


class DeferredHead:
    """Lets output layers pass their hidden states on, and keeps what the latest of them was called with."""

    def __init__(self) -> None:
        self._call: HeadCall | None = None
        self._stand_in: Tensor | None = None
        self._is_changed: Tensor | bool = False

    def put_into(self, layer: Any, is_wanted: Callable[[], bool]) -> None:
        """Replace the product of an output layer.

        Args:
            layer: the model's output layer.
            is_wanted: whether a loss is being computed that takes hidden states; else the layer makes its logits.
        """
        make_logits = layer._forward_impl

        def forward_impl(**arguments: Any) -> Tensor:
            if not is_wanted():
                return make_logits(**arguments)
            self._call = _call(arguments)._replace(softcap=softcap_of(layer))
            self._stand_in = self._call.stand_in
            return self._stand_in

        _replace_product(layer, forward_impl)

    @property
    def is_waiting(self) -> bool:
        """Whether the latest call has not been taken."""
        return self._call is not None

    def take(self, returned: Tensor) -> HeadCall | None:
        """The latest call, once; None if there was none.

        Args:
            returned: the logits that the model returns, in any layout [.., .., 2]. Their values are checked on device.
        """
        call, stand_in = self._call, self._stand_in
        self._call = self._stand_in = None
        if call is None:
            return None
        if returned is not stand_in:
            expected = _stand_ins(call.hidden)  # of the layer's dtype, in which it caps them
            expected = expected if call.softcap is None else call.softcap * torch.tanh(expected / call.softcap)
            is_new = returned.shape[-1] != 2 or (returned != expected.to(returned)).any()
            self._is_changed = self._is_changed | is_new
        return call._replace(is_changed=self._is_changed)


def softcap_of(layer: Any) -> float | None:
    """The softcap that the layer's own forward applies after Megatron's; None: no softcap, or an unknown forward."""
    forwards = [vars(kind)["forward"] for kind in type(layer).__mro__ if "forward" in vars(kind)]
    known, (module, names) = getattr(layer.forward, "__func__", None), _BRIDGE
    is_bridges = known is forwards[0] and known.__module__.startswith(module) and known.__qualname__ in names
    if not (is_bridges and _is_megatrons(forwards[1], "forward")):
        return None
    return getattr(layer.config, "final_logit_softcapping", None) or None


def check_softcap(layer: Any, softcap: float | None) -> None:
    """Refuse --pg-logit-softcap for logits that the output layer caps, or may cap; every rank must report it.

    Raises:
        ValueError: the loss would cap them a second time.
    """
    if softcap is None or _is_megatrons(layer.forward, "forward"):
        return
    what = f"caps logits at {own:g}" if (own := softcap_of(layer)) else "may change logits"
    raise ValueError(
        f"--pg-logit-softcap {softcap:g} is for logits that the model has not capped, and the forward of the output "
        f"layer {type(layer).__qualname__} {what}. Remove the flag, or build the model with ColumnParallelLinear."
    )


def _replace_product(layer: Any, forward_impl: Any) -> None:
    forward_impl.replaces = getattr(layer, "_forward_impl", None)
    layer._forward_impl = forward_impl


def check_layer(layer: Any, *, is_fused: bool) -> None:
    """Check before the step, while every rank can still report it, whether a float32 or fused head can replace `layer`.

    Args:
        layer: the model's output layer.
        is_fused: whether the layer passes its hidden states on, so that nothing is done to logits.

    Raises:
        ValueError: `layer` does more than the product, or does not make it where the head is put.
    """
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if not hasattr(type(layer), "_forward_impl"):
        raise ValueError(
            "--fp32-lm-head and --pg-fused-head need Megatron's ColumnParallelLinear as the output layer, and it is "
            f"{name}. Build the model with that one (without --fp8-output-proj)."
        )
    product = layer._forward_impl
    while hasattr(product, "replaces"):  # ours
        product = product.replaces
    if not _is_megatrons(product, "_forward_impl"):
        raise ValueError(
            f"--fp32-lm-head and --pg-fused-head replace the product of the output layer, and {name} has its own "
            "_forward_impl. Remove the flag, or build the model with Megatron's ColumnParallelLinear."
        )
    if is_fused and not (_is_megatrons(layer.forward, "forward") or softcap_of(layer)):
        raise ValueError(
            f"--pg-fused-head computes the product of the output layer and a known softcap, and {name} has its own "
            "forward. Remove --pg-fused-head; --fp32-lm-head keeps that forward. If it only caps the logits, build the "
            "model with Megatron's ColumnParallelLinear and give --pg-logit-softcap."
        )
    names = ("bias", "grad_output_buffer", "sequence_parallel", "allreduce_dgrad", "tp_group")
    _call({"input": None, "weight": None} | {name: getattr(layer, name) for name in names})


def _is_megatrons(function: Any, name: str) -> bool:
    """Whether it is that of Megatron's output layers, which a subclass, an instance or a patch may have replaced."""
    plain = getattr(function, "__func__", function)
    origin = getattr(plain, "__module__", None), getattr(plain, "__qualname__", None)
    is_named = origin in [(module, f"{kind}.{name}") for module, kind in _MEGATRONS]
    return is_named and not hasattr(plain, "__wrapped__")


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
            "the output layer defers its weight gradient (--defer-embedding-wgrad-compute), which the float32 head "
            "adds at once. Remove that flag."
        )
    if tp_group is not None and not (sequence_parallel or arguments["allreduce_dgrad"]):
        raise ValueError(
            "the output layer leaves the sum of the hidden states' gradient to others (disable_grad_reduce), which the "
            "float32 head makes itself. Build the model without it."
        )
    return HeadCall(arguments["input"], arguments["weight"], tp_group, sequence_parallel)
