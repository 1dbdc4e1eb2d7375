"""verl's Megatron engine on our loss: `actor_rollout_ref.model.external_lib=megatron_pg.verl`.

verl hands its engine a rank's whole mini-batch. The engine cuts it, gathers the log-probabilities of whole samples on every
context-parallel rank (only a rank's own part has a gradient), and takes D·S of each micro-batch:

    flag off:  × K (verl), × C ÷ K (schedule), ÷ D·C (DDP)
    flag on:   × R / D (verl), ÷ Σ counts (finalize), which is R, the tokens of the step, once `own_count` has mended verl's count
"""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from megatron.core import parallel_state
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch
from megatron_pg.declarations.declaration import load
from megatron_pg.flags.banner import banner_of
from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.startup import check_signature, start
from megatron_pg.hosts.step import HostStep
from megatron_pg.hosts.verl_options import checked
from megatron_pg.hosts.verl_samples import samples_of
from megatron_pg.kernels import Vocabulary
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.lm_head import Head
from megatron_pg.lm_head.heads import logprobs_of_rows
from megatron_pg.lm_head.inputs import enter
from megatron_pg.step.errors import StepPlanError
from megatron_pg.step.findings import StepReport

VERSION = "verl 0.9.1"  # with which this was run
CONTRACT = "takes D·Σwℓ over whole samples; verl, the schedule and DDP (or finalize) bring it back to Σwℓ"
ROW = "megatron_pg_row"  # column that carries a row's place through verl's cut into micro-batches
_ENGINE = "verl.workers.engine.megatron.transformer_impl:MegatronEngineWithLMHead"
_FUSED = "verl.models.mcore.model_forward_fused"
_SIGNATURES = {
    f"{_ENGINE}.__init__": ("self", "model_config", "engine_config", "optimizer_config", "checkpoint_config"),
    f"{_ENGINE}.forward_backward_batch": ("self", "data", "loss_function", "forward_only"),
    f"{_ENGINE}.forward_step": (
        *("self", "batch_iter", "model", "logits_processor_func", "postprocess_micro_batch_func"),
    ),
    f"{_ENGINE}.postprocess_micro_batch_func": (
        *("self", "output", "data", "forward_only", "loss_function", "local_cp_size"),
    ),
    f"{_ENGINE}._lm_head_logits_processor": (
        *("self", "logits", "label", "temperature", "calculate_sum_pi_squared", "calculate_entropy"),
        *("distillation_use_topk", "distillation_only", "logits_processor_func", "batch", "data_format"),
    ),
    f"{_ENGINE}._routed_num_tokens": ("self", "data"),
    f"{_ENGINE}.optimizer_step": ("self",),
    f"{_ENGINE}.load_checkpoint": ("self", "local_path"),
    "verl.utils.kernel.linear_cross_entropy:LinearCrossEntropy.forward": (
        *("ctx", "hidden", "weight", "labels", "temperature", "reduction", "dist_process_group"),
    ),
    "verl.workers.utils.losses:ppo_loss": ("config", "model_output", "data", "dp_group"),
    "verl.workers.engine.base:EngineRegistry.register": ("model_type", "backend", "device", "vendor"),
}
_actors: dict[int, Any] = {}  # their McoreActorConfigs, by the id of the engine's part


def install() -> None:
    """Put `PolicyGradientEngine` before verl's engine of language models under Megatron, in this process.

    Raises:
        ArgumentError: verl's functions are others than the adapter was written for.
    """
    for path, parameters in _SIGNATURES.items():
        module, _, name = path.partition(":")
        function = load(f"{module}:{name.partition('.')[0]}")
        for part in name.split(".")[1:]:
            function = getattr(function, part)
        check_signature(VERSION, f"{path} of verl {metadata.version('verl')}", function, parameters)
    theirs, registry = load(_ENGINE), load("verl.workers.engine.base:EngineRegistry")
    ours = type(theirs.__name__, (PolicyGradientEngine, theirs), {})
    engines = registry._engines["language_model"]["megatron"]
    engines |= {device: ours for device, found in engines.items() if found is theirs}
    config = load("verl.workers.config:McoreActorConfig")
    finish = config.__post_init__

    def remember(actor: Any) -> None:
        finish(actor)
        _actors[id(actor.engine)] = actor

    config.__post_init__ = remember


class PolicyGradientEngine:
    """What is ours of an engine; verl's own class comes behind it."""

    def __init__(self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any):
        self._actor = None if engine_config.forward_only else _actors.get(id(engine_config))
        found = checked(engine_config, model_config, self._actor)
        self._settings, self._rows = start("verl", found, contract=CONTRACT, says=False)
        self._rows["temperature"] = "softmax(z / τ), τ of the rollouts  (verl's rollout.temperature)"
        self._metrics_file = found.args.pg_metrics_file
        self._step: HostStep | None = None
        self._places: list[int | None] = []  # of the mini-batch's rows among the step's samples
        self._report: StepReport | None = None
        self._log: HostLog | None = None
        self._iteration, self._temperature = 0, 1.0
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)

    def initialize(self) -> None:
        """verl's, with the banner before the model is built."""
        is_first = torch.distributed.get_rank() == 0
        if is_first and self._actor is not None:
            sys.stdout.write(banner_of([*self._rows.items()]) + "\n")
            sys.stdout.flush()
        super().initialize()
        if self._actor is not None and self.is_mp_src_rank_with_outputs() and self.get_data_parallel_rank() == 0:
            self._log = HostLog(self._settings, self._rows, self._metrics_file)

    def load_checkpoint(self, local_path: str, *rest: Any, **more: Any) -> None:
        """verl's; the steps go on where metrics.jsonl ends."""
        super().load_checkpoint(local_path, *rest, **more)
        if self._log is not None and self._metrics_file and Path(self._metrics_file).exists():
            lines = Path(self._metrics_file).read_bytes().splitlines()
            self._iteration = json.loads(lines[-1])["iteration"] if lines else 0

    def forward_backward_batch(self, data: Any, loss_function: Callable, forward_only: bool = False) -> dict:
        """verl's; a training step is planned before it, and checked and measured behind it."""
        if forward_only:
            return super().forward_backward_batch(data, loss_function, forward_only)
        self._step = HostStep.planned(
            self._settings, lambda: self._samples(data, loss_function), data=self.get_data_parallel_group()
        )
        set_value = load("verl.utils.tensordict_utils:assign_non_tensor")
        set_value(data, calculate_entropy=self._settings.metrics.needs_entropy or self._settings.terms.entropy_coef != 0)
        data[ROW] = torch.arange(len(data))
        try:
            output = super().forward_backward_batch(data, None, forward_only)
            self._report = self._step.finish(reports=self.is_mp_src_rank_with_outputs())
        finally:
            self._step = None
        if self.is_mp_src_rank_with_outputs():
            named = {f"pg/{name}": [value] for name, value in self._report.metrics.items()}
            output["metrics"] |= {"actor/pg_loss": named["pg/pg_loss"], **named}
        return output

    def optimizer_step(self) -> Any:
        """verl's, and the step's line."""
        norm = super().optimizer_step()
        self._iteration += 1
        if self._log is not None:
            number = None if norm is None else float(norm)
            self._log.write(self._iteration, self._report, grad_norm=number, learning_rate=None, skipped=False)
        return norm

    def _samples(self, data: Any, loss_function: Any) -> list:
        """The step's samples; what cannot be trained is refused here, on every rank."""
        function, given = getattr(loss_function, "func", loss_function), getattr(loss_function, "keywords", {})
        if getattr(function, "__name__", "") != "ppo_loss" or given.get("config") is not self._actor:
            raise StepPlanError(
                f"verl trains by {getattr(function, '__name__', function)} of a configuration that was not seen when the engine was built, so its "
                "flags would be lost; use the actor of verl's PPO trainer, without distillation"
            )
        get = load("verl.utils.tensordict_utils:get")
        if self._settings.plan_rule.needs_prompt_ids and not get(data, "update_lr_scheduler", True):
            raise StepPlanError(
                "prompt_mean with several mini-batches in a batch, which cut prompt groups; make actor.ppo_mini_batch_size the "
                "batch's, or use another aggregation"
            )
        rows = samples_of(data)
        counted: Iterator[int] = iter(range(len(rows)))
        self._places = [None if row is None else next(counted) for row in rows]
        return [row for row in rows if row is not None]

    def forward_step(
        self, batch_iter: Iterator, model: Any, logits_processor_func: Any, postprocess_micro_batch_func: partial
    ) -> tuple:
        """verl's, with our loss for its own while a step is trained."""
        batch = next(batch_iter)
        temperatures = {float(value) for value in torch.as_tensor(batch["temperature"]).flatten()}
        if len(temperatures) != 1:
            raise ValueError(f"one micro-batch has the temperatures {sorted(temperatures)}; use one rollout.temperature")
        (self._temperature,) = temperatures
        sys.modules[_FUSED].linear_cross_entropy = self._linear_cross_entropy
        if self._step is not None:
            loss = partial(self._loss, self._step, *self._slice(batch, next(model.parameters()).device))
            postprocess_micro_batch_func = partial(postprocess_micro_batch_func, loss_function=loss)
        return super().forward_step(iter([batch]), model, logits_processor_func, postprocess_micro_batch_func)

    def _slice(self, batch: Any, device: torch.device) -> tuple[LocalBatch, int]:
        """The micro-batch as the step knows it, and how many positions of filling rows are before it."""
        members: list[int] = []
        widths: list[int] = []
        skipped = 0
        for row, width in zip(batch[ROW].tolist(), batch["input_ids"].offsets().diff().tolist(), strict=True):
            if (place := self._places[row]) is not None:
                members.append(place)
                widths.append(width)
            elif members:
                widths[-1] += width
            else:
                skipped += width
        return self._step.slice(members, widths, device), skipped

    def _loss(
        self, step: HostStep, local: LocalBatch, skipped: int, model_output: dict, data: Any, dp_group: ProcessGroup
    ) -> tuple[Tensor, dict]:
        """D·S; metrics go another way, where each would cost a host sync."""
        entropy = model_output["entropy"].values()[skipped:] if "entropy" in model_output else None
        total = step.logprobs_loss(local, model_output["log_probs"].values()[skipped:], entropy)
        return total * self.get_data_parallel_size(), {}

    def postprocess_micro_batch_func(
        self, output: Any, data: Any, forward_only: bool, loss_function: Any, local_cp_size: int | None = None
    ) -> tuple:
        """verl's, with this context-parallel rank's own count of tokens: ⌊n/C⌋ everywhere would lose up to C - 1 of n."""
        found = super().postprocess_micro_batch_func(output, data, forward_only, loss_function, local_cp_size)
        if len(found) == 2:
            return found
        group = self.get_context_parallel_group()
        count = self._routed_num_tokens(data)
        own = count // group.size() + (group.rank() < count % group.size())
        return found[0], own.to(torch.int), found[2]

    def _lm_head_logits_processor(
        self, logits: Tensor, label: Tensor, temperature: Tensor, *, calculate_entropy: bool, **rest: Any
    ) -> dict[str, Tensor]:
        """Log-probabilities and entropies by our kernel, which divides by the temperature itself."""
        rows = logits.flatten(0, -2)
        vocabulary = self._vocabulary(rows.shape[1], parallel_state.get_tensor_model_parallel_group())
        logprobs, entropy = label_logprobs(rows, label.flatten(), vocabulary, impl=self._settings.impl)
        found = {"log_probs": logprobs.view(label.shape)}
        return found | ({"entropy": entropy.view(label.shape)} if calculate_entropy else {})

    def _linear_cross_entropy(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        temperature: float = 1.0,
        reduction: str = "none",
        dist_process_group: ProcessGroup | None = None,
    ) -> tuple[Tensor, Tensor]:
        """verl's fused head, by ours: log-probabilities and entropies from chunks of float32 logits, made again in the backward."""
        group = dist_process_group if dist_process_group is not None and dist_process_group.size() > 1 else None
        head = Head(mode="recompute", backward=self._settings.head_backward, impl=self._settings.impl)
        if not self.tf_config.sequence_parallel:  # else verl has gathered, and sums the gradient where it scatters it
            hidden = enter(hidden, group, False)
        rows, vocabulary = hidden.flatten(0, -2), self._vocabulary(len(weight), group)
        return logprobs_of_rows(rows, weight, labels.flatten(), None, vocabulary, head)[:2]

    def _vocabulary(self, columns: int, group: ProcessGroup | None) -> Vocabulary:
        group = group if group is not None and group.size() > 1 else None
        return Vocabulary.of(
            columns, temperature=self._temperature, vocab_size=self._settings.vocab_size, tp_group=group
        )
