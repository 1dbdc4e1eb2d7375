"""The float32 or fused head in the model of a host, which builds it and calls it without labels."""

from collections.abc import Callable, Sequence
from typing import Any

from torch.distributed import ProcessGroup

from megatron_pg.lm_head.output_layer import DeferredHead, check_layer, compute_in_float32
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.checks import check_agreement


class HostHead(DeferredHead):
    """Installs the head of the settings in a model. The fused head replaces the logits of every forward."""

    def __init__(self, settings: LossSettings):
        super().__init__()
        self._settings = settings
        self._runs: list[Callable[[], bool]] = []  # by layer: whether its float32 product ran

    def install(self, chunks: Sequence[Any], data: ProcessGroup | None = None) -> None:
        """Install the head in the chunk that has an output layer, if this rank has one.

        Every rank must call, with its data-parallel group `data` without context-parallel ranks; None: one process.

        Raises:
            ValueError: on every rank; the head cannot replace that layer.
        """
        is_fused, error = self._settings.head_mode is not None, None
        layers = output_layers(chunks) if is_fused or self._settings.float32_logits else []
        try:
            for layer in layers:
                check_layer(layer, is_fused=is_fused)
        except ValueError as failure:
            if data is None:
                raise
            error = StepPlanError(str(failure))
        if data is not None:  # stages without an output layer check none
            check_agreement((), None, error, data)
        for layer in layers:
            if is_fused:
                self.put_into(layer, lambda: True)
            else:
                self._runs.append(compute_in_float32(layer, backward=self._settings.head_backward))

    def is_bypassed(self) -> bool:
        """Whether the latest forward made logits without the head of the settings."""
        ran = [take_run() for take_run in self._runs]  # take all, so that none reports an older forward
        return bool(ran) and not any(ran)


def output_layers(chunks: Sequence[Any]) -> list[Any]:
    """The output layers of the chunks that have one."""
    layers = []
    for chunk in chunks:
        while hasattr(chunk, "module"):
            chunk = chunk.module
        layers.append(getattr(chunk, "output_layer", None))
    return [layer for layer in layers if layer is not None]
