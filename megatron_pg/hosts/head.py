"""The float32 or fused head in the model of a host, which builds it and calls it without labels."""

from collections.abc import Sequence
from typing import Any

from megatron_pg.lm_head.output_layer import DeferredHead, HeadCall, check_layer, compute_in_float32
from megatron_pg.step.settings import LossSettings


class HostHead:
    """Puts the head of the settings into output layers, each once.

    In training the fused head takes the place of the logits; in evaluation mode, in which hosts make log-probabilities, the layer
    returns float32 logits.
    """

    def __init__(self, settings: LossSettings):
        self._settings = settings
        self._layer: Any = None  # that has the head
        self._deferred: DeferredHead | None = None

    def install(self, chunks: Sequence[Any]) -> None:
        """Put the head into the chunk that has an output layer, if there is one here.

        Raises:
            ValueError: the head cannot stand for that layer.
        """
        if not (self._settings.float32_logits or self._settings.head_mode):
            return
        for chunk in chunks:
            layer = getattr(_unwrapped(chunk), "output_layer", None)
            if layer is None or layer is self._layer:
                continue
            check_layer(layer)
            compute_in_float32(layer, backward=self._settings.head_backward)
            self._layer, self._deferred = layer, _deferred(layer) if self._settings.head_mode else None

    def take(self) -> HeadCall | None:
        """What the layer was called with in the latest forward; None where it made logits."""
        return None if self._deferred is None else self._deferred.take()


def _deferred(layer: Any) -> DeferredHead:
    return DeferredHead(layer, lambda: layer.training)


def _unwrapped(chunk: Any) -> Any:
    while hasattr(chunk, "module"):
        chunk = chunk.module
    return chunk
