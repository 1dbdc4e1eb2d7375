"""Our part of verl's Megatron engine: the step's plan, the loss, the token count, log-probabilities and metrics.

verl passes a rank's whole mini-batch to its engine. The engine splits it, and gathers the log-probabilities or a
critic's values of whole samples on every context-parallel rank (only a rank's own part has a gradient). It takes D·S of
each micro-batch:

    flag off:  × K (verl), × C ÷ K (schedule), ÷ D·C (DDP)
    flag on:   × R / D (verl), ÷ Σ counts (finalize), which is R, the tokens of the step, with our token count
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.hosts.head import output_layers
from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.patching import attribute
from megatron_pg.hosts.startup import print_banner, rows_of
from megatron_pg.hosts.step import HostStep
from megatron_pg.hosts.verl.options import TRAINED, checked
from megatron_pg.hosts.verl.samples import samples_of
from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.lm_head import Head, heads
from megatron_pg.lm_head.inputs import enter
from megatron_pg.lm_head.output_layer import check_layer, softcap_of
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.findings import StepReport, before_finalize
from megatron_pg.step.loss import microbatch_logprobs_loss, vocabulary_of

SCALING = "takes D·Σwℓ over whole samples; verl, the schedule and DDP (or finalize) scale it to Σwℓ"
FUSED = "verl.models.mcore.model_forward_fused"


class _Role(NamedTuple):
    """verl's names."""

    section: str  # of its configuration
    loss: str  # function
    output: str  # of the model, that the loss reads
    metric: str  # the loss
    ours: str  # our name of that metric


_POLICY = _Role("actor", "ppo_loss", "log_probs", "actor/pg_loss", "pg/pg_loss")
_CRITIC = _Role("critic", "value_loss", "values", "critic/vf_loss", "pg/value_loss")
_ROW = "megatron_pg_row"  # column with a row's index, which verl's split into micro-batches keeps
_Theirs: Any = object  # `install` makes verl's class the second base


class PolicyGradientEngine(_Theirs):
    """Our part of an engine of a policy or a critic, before verl's own class in the method resolution order."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        self._trained = None if engine_config.forward_only else vars(engine_config).get(TRAINED)
        arguments = checked(engine_config, model_config, self._trained)
        self._settings = LossSettings.from_args(arguments.args)
        self._rows = rows_of("verl", arguments, SCALING, self._settings)
        self._role = _CRITIC if self._settings.is_critic else _POLICY
        if self._role is _POLICY:
            self._rows["temperature"] = "softmax(z / τ), τ of the rollouts  (verl's rollout.temperature)"
        self._metrics_file = arguments.args.pg_metrics_file
        self._step: HostStep | None = None
        self._places: dict[int, int] = {}  # index among the step's samples of a row of the mini-batch that is one
        self._factors: list[Tensor] = []  # of verl's own correction, by sample
        self._report: StepReport  # of the latest step
        self._log: HostLog | None = None
        self._batch, self._ends_batch = 1, True  # the global step, and whether this is its last mini-batch
        self._temperature = 1.0  # of the micro-batch in progress
        self._softcap: float | None = None  # of the output layer, which the fused head does not call
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def initialize(self) -> None:
        """Print the banner, then build the model."""
        if torch.distributed.get_rank() == 0 and self._trained is not None:
            print_banner(self._rows)
        super().initialize()
        if self.engine_config.use_fused_kernels:
            for layer in output_layers(self.module):
                check_layer(layer, is_fused=True)
                self._softcap = softcap_of(layer)
        if self._trained is not None and self.is_mp_src_rank_with_outputs() and self.get_data_parallel_rank() == 0:
            self._log = HostLog(self._settings, self._rows, self._metrics_file)

    def load_checkpoint(self, local_path: str, *rest: Any, **more: Any) -> None:
        """Load a checkpoint. Lines of metrics.jsonl after its global step are superseded."""
        super().load_checkpoint(local_path, *rest, **more)
        step = re.search(r"global_step_(\d+)", str(local_path))
        if step is None and self._metrics_file is not None:
            raise ValueError(
                f"pg_metrics_file {self._metrics_file} cannot be continued, because the checkpoint's path {local_path} "
                "has no folder global_step_N. Resume from a checkpoint that verl's trainer has named, or remove "
                "pg_metrics_file."
            )
        self._batch = int(step[1]) + 1 if step else 1

    def forward_backward_batch(self, data: Any, loss_function: Callable, forward_only: bool = False) -> dict:
        """Run verl's forward and backward; a training step is planned before, and checked and measured after."""
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._step = HostStep(
            self._settings, lambda: self._samples(data, loss_function), data=self.get_data_parallel_group()
        )
        self._step.weigh(self._factors)
        self._ends_batch = _ends_batch(data)
        set_value = attribute("verl.utils.tensordict_utils:assign_non_tensor")
        set_value(data, calculate_entropy=self._settings.metrics.needs_entropy or self._settings.terms.reads_entropy)
        data[_ROW] = torch.arange(len(data))
        found: list[Any] = []  # the step's report
        has_loss = parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        finish = partial(self._step.finish, reports=self.is_mp_src_rank_with_outputs(), has_loss=has_loss)
        try:
            with before_finalize(get_model_config(self.module[0]), lambda: found.append(finish())):
                output = super().forward_backward_batch(data, None, forward_only)
        finally:
            self._step = None
        (self._report,) = found
        if self.is_mp_src_rank_with_outputs():
            named = {f"pg/{name}": [value] for name, value in self._report.metrics.items()}
            output["metrics"] |= {self._role.metric: named[self._role.ours], **named}
        return output

    def optimizer_step(self) -> Any:
        """Step verl's optimizer, and log the step."""
        norm = super().optimizer_step()
        if self._log is not None:
            rate = attribute("verl.utils.megatron.optimizer:get_megatron_last_lr")(self.optimizer)
            self._log.write(self._batch, None, self._report, grad_norm=norm, learning_rate=rate, skipped=False)
        self._batch += self._ends_batch
        return norm

    def _samples(self, data: Any, loss_function: Any) -> list[Sample]:
        """The step's samples; the step raises the error on every rank."""
        function, given = getattr(loss_function, "func", loss_function), getattr(loss_function, "keywords", {})
        name = getattr(function, "__name__", function)
        # of a critic, verl sends the configurations of engine and loss function one by one
        is_own = self._role is _CRITIC or given.get("config") is self._trained
        if name != self._role.loss or not is_own:
            raise StepPlanError(
                f"verl trains with {name} of a configuration that the engine was not built from, and its flags have no "
                f"effect. Use the {self._role.section} of verl's PPO trainer, without distillation."
            )
        if self._settings.plan_rule.needs_prompt_ids and not _ends_batch(data):
            raise StepPlanError(
                "prompt_mean does not allow several mini-batches per batch, which split prompt groups. Set "
                f"{self._role.section}.ppo_mini_batch_size to the size of the batch, or use another aggregation."
            )
        samples, weights = samples_of(data), "rollout_is_weights"
        if weights in data and self._settings.correction.name != "none":
            raise StepPlanError(
                f"algorithm.rollout_correction.rollout_is and pg_correction {self._settings.correction.name} both "
                "weigh tokens. Remove one of them."
            )
        factors = data[weights].cpu().unbind() if weights in data and self._role is _POLICY else ()
        self._factors = [factors[row] for row in samples] if factors else []
        self._places = {row: place for place, row in enumerate(samples)}
        return [*samples.values()]

    def forward_step(
        self, batch_iter: Iterator, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: partial
    ) -> tuple:
        """verl's forward step, in training with our loss."""
        batch = next(batch_iter)
        if self._role is _POLICY:
            self._read_temperature(batch)
        if self._step is not None:
            loss = partial(self._loss, self._step, *self._slice(self._step, batch, next(model.parameters()).device))
            postprocess_micro_batch_func = partial(postprocess_micro_batch_func, loss_function=loss)
        return super().forward_step(iter([batch]), model, logits_processor_func, postprocess_micro_batch_func)

    def _read_temperature(self, batch: Any) -> None:
        temperatures = {float(value) for value in torch.as_tensor(batch["temperature"]).flatten()}
        if len(temperatures) != 1:
            raise ValueError(
                f"one micro-batch has the temperatures {sorted(temperatures)}. Use one rollout.temperature."
            )
        (self._temperature,) = temperatures
        if self.engine_config.use_fused_kernels:  # set in each call, because a process may have several engines
            vars(import_module(FUSED))["linear_cross_entropy"] = self._linear_cross_entropy

    def _slice(self, step: HostStep, batch: Any, device: torch.device) -> tuple[LocalBatch, int]:
        """This rank's slice of the micro-batch, and the number of positions of padding rows before it."""
        members: list[int] = []
        widths = [0]  # of the padding rows before it, and of each sample with the padding rows that follow
        for row, width in zip(batch[_ROW].tolist(), batch["input_ids"].offsets().diff().tolist(), strict=True):
            if (place := self._places.get(row)) is None:
                widths[-1] += width
            else:
                members.append(place)
                widths.append(width)
        return step.slice(members, widths[1:], device), widths[0]

    def _loss(
        self, step: HostStep, local: LocalBatch, skipped: int, model_output: dict, data: Any, dp_group: ProcessGroup
    ) -> tuple[Tensor, dict]:
        """D·S, without metrics, because each would cost a host sync."""
        entropy = model_output["entropy"].values()[skipped:] if "entropy" in model_output else None
        output = model_output[self._role.output].values()[skipped:]
        total = step.keep(local, microbatch_logprobs_loss(output, entropy, local.fields, self._settings))
        return total * self.get_data_parallel_size(), {}

    def postprocess_micro_batch_func(
        self, output: Any, data: Any, forward_only: bool, loss_function: Any, local_cp_size: int | None = None
    ) -> tuple:
        """Replace verl's token count ⌊n/C⌋, which loses up to C - 1 of n tokens, by this rank's own."""
        outputs = super().postprocess_micro_batch_func(output, data, forward_only, loss_function, local_cp_size)
        if len(outputs) == 2:
            return outputs
        group = self.get_context_parallel_group()
        total = self._routed_num_tokens(data)
        num_here = total // group.size() + (group.rank() < total % group.size())
        return outputs[0], num_here.to(torch.int), outputs[2]

    def _lm_head_logits_processor(
        self, logits: Tensor, label: Tensor, temperature: Tensor, *, calculate_entropy: bool, **rest: Any
    ) -> dict[str, Tensor]:
        """Log-probabilities by our kernel, which divides by the temperature itself and keeps the logits."""
        rows, group = logits.flatten(0, -2), parallel_state.get_tensor_model_parallel_group()
        vocabulary = self._vocabulary(rows.shape[1], group)
        logprobs, entropy = label_logprobs(rows, label.flatten(), vocabulary, impl=self._settings.impl)
        outputs = {"log_probs": logprobs.view(label.shape)}
        return outputs | ({"entropy": entropy.view(label.shape)} if calculate_entropy else {})

    def _linear_cross_entropy(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, reduction: str, group: ProcessGroup
    ) -> tuple[Tensor, Tensor]:
        """Our fused head for verl's [T, 1, H]: chunks of float32 logits, which the backward recomputes."""
        vocabulary = self._vocabulary(len(weight), group, self._softcap)
        head = Head(mode="recompute", backward=self._settings.head_backward, impl=self._settings.impl)
        if not self.tf_config.sequence_parallel:  # else verl has gathered them, and its backward reduce-scatters
            hidden = enter(hidden, vocabulary.tp_group, False)
        logprobs, entropy, _ = heads.rows_of(hidden.flatten(0, -2), weight, labels.flatten(), None, vocabulary, head)
        return logprobs, entropy

    def _vocabulary(self, columns: int, group: ProcessGroup | None, softcap: float | None = None) -> Vocabulary:
        group = group if group is not None and group.size() > 1 else None
        return vocabulary_of(columns, replace(self._settings, temperature=self._temperature), group, softcap)


def _ends_batch(data: Any) -> bool:
    """Whether a mini-batch is the last one of verl's batch."""
    return bool(attribute("verl.utils.tensordict_utils:get")(data, "update_lr_scheduler", True))
