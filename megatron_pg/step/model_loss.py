"""The loss inside the model, which has the hidden states and the logits of this tensor-parallel rank.

Megatron's models end in `compute_language_model_loss(labels, logits)`. On an instance it is replaced by the
policy-gradient loss, which returns S as a plain 0-d tensor, because schedules and wrappers only support tensors. The
diagnostics of a micro-batch are kept here.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.lm_head.output_layer import DeferredHead, HeadCall, check_layer, check_softcap, compute_in_float32
from megatron_pg.lm_head.teacher_file import TeacherHead
from megatron_pg.lm_head.value_head import check_role
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import Diagnostics, microbatch_head_loss, microbatch_loss
from megatron_pg.step.loss_scaling import LossScaling
from megatron_pg.step.mtp import DepthLoss, depth_head_loss, depth_loss, divergences, totals_of


@dataclass(slots=True, eq=False)
class _Forward:
    """The forward in progress."""

    local: LocalBatch
    depths: list[DepthLoss] = field(default_factory=list)  # of multi-token prediction, which is called first
    waiting: list[Tensor | HeadCall] = field(default_factory=list)  # of depths whose target is the policy


class ModelLoss:
    """Installs the loss in models, and keeps the diagnostics of each micro-batch of a step."""

    def __init__(self, settings: LossSettings):
        self._settings = settings
        self._layer: nn.Module | None = None  # the output layer, on the stage that has it
        self._float32_layer: nn.Module | None = None  # the same with our head
        self._take_run: Callable[[], bool] = lambda: True  # whether our head made the latest logits
        self._teacher_weight: Tensor | None = None  # [V / tp, H_T] this rank's rows
        self._scaling: LossScaling  # of the step in progress, from `begin` on
        self._tp_group: ProcessGroup | None = None  # None: one rank
        self._mtp_factor = 0.0  # λ
        self._forward: _Forward | None = None
        self._expected: dict[int, LocalBatch] = {}  # of forwards that run in pieces, by the id of their labels
        self.is_attached = False
        self.diagnostics: dict[LocalBatch, Diagnostics] = {}  # of the step's forwards, in order

    def attach(self, model: Any) -> None:
        """See `PolicyGradientStep.attach`."""
        if not callable(getattr(model, "compute_language_model_loss", None)):
            raise ScheduleError(
                f"the model provider gave a {type(model).__name__}, which has no compute_language_model_loss to "
                "replace. Return a megatron.core GPTModel or HybridModel, not yet wrapped."
            )
        self.is_attached = True
        self._layer = getattr(model, "output_layer", self._layer)
        if self._settings.float32_logits or self._settings.head_mode:  # logits for sampling have the loss's precision
            self._float32_layer = model.output_layer
            self._take_run = compute_in_float32(model.output_layer, backward=self._settings.head_backward)
        deferred = None
        if self._settings.head_mode:
            deferred = DeferredHead()
            deferred.put_into(model.output_layer, lambda: self._forward is not None)
        _keep_the_embeddings_gradient(model)
        language_model_loss = model.compute_language_model_loss

        def compute_language_model_loss(labels: Tensor, logits: Tensor) -> Tensor:
            if self._forward is None:
                return language_model_loss(labels, logits)
            if labels is not self._forward.local.inputs.labels:  # multi-token prediction has its own
                return self._of_depth(self._forward, labels, logits, deferred)
            return self._of_policy(self._forward, logits, deferred)

        model.compute_language_model_loss = compute_language_model_loss
        if postprocess := getattr(model, "_postprocess", None):

            def _postprocess(*positional: object, **keywords: object) -> Tensor:
                local = self._expected.pop(id(keywords.get("labels")), None)
                with nullcontext() if local is None else self.of(local):
                    return postprocess(*positional, **keywords)

            model._postprocess = _postprocess

    def check_layer(self, device: torch.device) -> None:
        """Check before the step that the output layer fits the loss; read the teacher's head, once."""
        if self.is_attached:
            check_role(self._layer, is_critic=self._settings.is_critic)
        if self._layer is not None:
            check_softcap(self._layer, self._settings.softcap)
        if self._float32_layer is None:
            return
        check_layer(self._float32_layer, is_fused=self._settings.head_mode is not None)
        if (head := self._settings.teacher_head) is not None and self._teacher_weight is None:
            self._teacher_weight = _teacher_weight(self._float32_layer, head, self._settings.vocab_size, device)

    def begin(self, scaling: LossScaling, config: Any, tp_group: ProcessGroup, settings: LossSettings) -> None:
        """Begin a step, or a part of an open one; `settings` may have another entropy coefficient than before."""
        self._settings = settings
        self._tp_group = tp_group if tp_group.size() > 1 else None
        self._scaling, self.diagnostics, self._expected = scaling, {}, {}
        self._mtp_factor = config.mtp_loss_scaling_factor if self._settings.mtp_depths else 0.0

    def take(self) -> dict[LocalBatch, Diagnostics]:
        """The diagnostics since `begin`, which are not kept any longer."""
        found, self.diagnostics, self._expected = self.diagnostics, {}, {}
        return found

    @contextmanager
    def of(self, local: LocalBatch) -> Iterator[None]:
        """Within this context the model's forward is over this micro-batch."""
        self._forward = _Forward(local)
        try:
            yield
        finally:
            self._forward = None

    def expect(self, local: LocalBatch) -> None:
        """Prepare for a forward over this micro-batch that the schedule ends later, in `_postprocess`."""
        self._expected[id(local.inputs.labels)] = local

    def _of_policy(self, forward: _Forward, logits: Tensor, deferred: DeferredHead | None) -> Tensor:
        local, depths = forward.local, forward.depths
        if (made := len(depths) + len(forward.waiting)) != len(local.depths):
            raise ScheduleError(
                f"the model made {made} of {len(local.depths)} predictions of --mtp-num-layers before its own, so the "
                "losses of the others are lost. Use a release of megatron-core that docs/parallelism.md lists."
            )
        call = deferred.take(logits) if deferred else None
        policy = _rows(logits) if call is None else call
        depths += divergences(forward.waiting, policy, local, self._settings, self._tp_group)
        totals = totals_of(depths, self._mtp_factor)
        shared: dict[str, Any] = {"grad_scale": self._scaling.grad_scale, "totals": totals}
        if call is not None:
            rows, weight = local.trained, self._teacher_weight
            total, diagnostics = microbatch_head_loss(
                call, local.fields, rows, self._settings, teacher_weight=weight, **shared
            )
        else:
            total, diagnostics = microbatch_loss(_rows(logits), local.fields, self._settings, self._tp_group, **shared)
            diagnostics = diagnostics._replace(is_bypassed=not self._take_run())
        self.diagnostics[local] = diagnostics
        return total + self._mtp_factor * sum(depth.total for depth in depths) if depths else total

    def _of_depth(self, forward: _Forward, labels: Tensor, logits: Tensor, deferred: DeferredHead | None) -> Tensor:
        """[b, s] cross-entropies for Megatron's own log; detached, so that Megatron does not train on them."""
        known, done = forward.local.depths, forward.depths
        if len(done) + len(forward.waiting) == len(known):
            raise ScheduleError(
                f"the model makes more predictions than the {len(known)} of --mtp-num-layers, so one has no weight. "
                "Call validate_args after mtp_num_layers is final."
            )
        if self._settings.mtp_target == "policy":
            call = deferred.take(logits) if deferred else None
            forward.waiting.append(_rows(logits) if call is None else call)
            return logits.new_zeros(labels.shape, dtype=torch.float32)
        depth = known[len(done)]
        if deferred and (call := deferred.take(logits)):
            done.append(depth_head_loss(call, depth, self._settings))
        else:
            done.append(depth_loss(_rows(logits), depth, self._settings, self._tp_group))
        return done[-1].losses.view(labels.t().shape).t()


def _keep_the_embeddings_gradient(model: Any) -> None:
    """Tell Megatron's hook that a tied weight has two gradients, on a stage with embedding and output layer.

    Megatron does this for a single pipeline stage only; multi-token prediction adds the embedding to the last of
    several.
    """
    if getattr(model, "mtp_process", False) and model.share_embeddings_and_output_weights:
        model.shared_embedding_or_output_weight().zero_out_wgrad = True


def _teacher_weight(layer: Any, head: TeacherHead, vocab_size: int | None, device: torch.device) -> Tensor:
    """This rank's rows of the teacher's head: the same rows as in the student's output layer."""
    columns, group = layer.output_size_per_partition, layer.tp_group
    rank, ranks = (0, 1) if group is None else (group.rank(), group.size())
    if vocab_size is None:
        head.check_vocabulary(columns * ranks)
    return head.read(rank * columns, columns, dtype=layer.config.params_dtype, device=device)


def _rows(logits: Tensor) -> Tensor:
    """[s·b, V / tp]: a view."""
    return logits.reshape(-1, logits.shape[-1])
