"""The float32 or fused head in the model of a host, which builds it and calls it without labels."""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from megatron_pg.lm_head.output_layer import DeferredHead, HeadCall, check_layer, compute_in_float32
from megatron_pg.plan.collectives import all_gather_rows, broadcast_text
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.settings import LossSettings


class HostHead:
    """Installs the head of the settings in output layers. The fused head replaces the logits of every forward."""

    def __init__(self, settings: LossSettings):
        self._settings = settings
        self._layers: WeakSet[Any] = WeakSet()  # with the head installed
        self._deferred = DeferredHead()  # of all layers: a loss takes the call of the latest forward
        self._runs: list[Callable[[], bool]] = []  # by layer: whether its float32 product ran
        self._has_agreed = False

    def install(self, chunks: Sequence[Any]) -> None:
        """Install the head in the chunk that has an output layer, if this rank has one; every rank must call.

        Raises:
            ValueError: the head cannot replace that layer; in the first call on every rank.
        """
        if not (self._settings.float32_logits or self._settings.head_mode):
            return
        error = None
        try:
            for layer in output_layers(chunks):
                self._install(layer)
        except ValueError as failure:
            error = failure
        if not self._has_agreed and torch.distributed.is_initialized():
            _agree(error)
        self._has_agreed = True
        if error is not None:
            raise error

    def _install(self, layer: Any) -> None:
        check_layer(layer, is_fused=self._settings.head_mode is not None)
        if layer in self._layers:
            return
        self._layers.add(layer)
        if self._settings.head_mode:
            self._deferred.put_into(layer, lambda: True)
        else:
            self._runs.append(compute_in_float32(layer, backward=self._settings.head_backward))

    def take(self, logits: Tensor) -> HeadCall | None:
        """The arguments of the layer in the latest forward, which returned `logits`; None where it computed logits."""
        return self._deferred.take(logits)

    @property
    def is_waiting(self) -> bool:
        """Whether nobody has taken the hidden states of the latest forward."""
        return self._deferred.is_waiting

    def is_bypassed(self) -> bool:
        """Whether the latest forward made logits without the head of the settings."""
        ran = [take_run() for take_run in self._runs]  # take all, so that none reports an older forward
        return bool(self._layers) and not any(ran)


def output_layers(chunks: Sequence[Any]) -> list[Any]:
    """The output layers of the chunks that have one."""
    layers = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        layers.append(getattr(chunk, "output_layer", None))
    return [layer for layer in layers if layer is not None]


def _agree(error: ValueError | None) -> None:
    """Raise on every rank where one has failed: stages without an output layer check none."""
    failed = all_gather_rows(torch.tensor([float(error is not None)]), error=error)[:, 0].nonzero()[:, 0].tolist()
    if failed:
        raise ScheduleError(broadcast_text(str(error or ""), failed[0])) from error
