"""The loss in the training loop of slime and miles, which split a rollout into steps before they train.

Both pass the samples of one micro-batch to a loss function and scale its return value:

    flag off:  × K/N·D·C (host), ÷ K·D·C (Megatron)
    flag on:   × C (host), ÷ C·T̃ (Megatron)

for K micro-batches, N rollouts and D·C ranks. So the loss function returns N·S, or T̃·S under
--calculate-per-token-loss. T̃ counts a fully masked sample as one token, as the hosts do. Their value loss has no 1/2,
so that of a critic is twice ours, and its gradient stays what it is in their own loop.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_pg.cp_utils import padded_length
from megatron_pg.hosts.head import HostHead
from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.rollout.samples import Rollout
from megatron_pg.hosts.step import HostLossError, HostStep
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.findings import before_finalize
from megatron_pg.step.loss import microbatch_head_loss, microbatch_loss

SCALING = "takes N·Σwℓ, with --calculate-per-token-loss T̃·Σwℓ; the host and Megatron bring it back to Σwℓ"
SCALING_OF_CRITICS = f"{SCALING}; times 2, because its value loss has no ½"
_NO_HEAD = "Use a release of the trainer that docs/hosts lists, or remove --pg-fused-head."


class _Work(NamedTuple):
    """A micro-batch of the step in progress."""

    step: HostStep
    members: list[int]  # indices of its samples among the step's
    scale: float  # factor of S in the returned loss
    row_width: int | None


class RolloutTrainer:
    """The loss in the training loop of one host.

    `log` is None on ranks that do not write the steps; `per_token` is the host's --calculate-per-token-loss.
    """

    def __init__(self, settings: LossSettings, log: HostLog | None, *, per_token: bool):
        self.settings, self.head = settings, HostHead(settings)
        self._log, self._per_token = log, per_token
        self._work: dict[int, _Work] = {}  # by the id of its first sample's tokens, which the host passes on

    def install(self, model: Sequence[Any]) -> None:
        """Install the head of the settings in a model; every rank must call."""
        self.head.install(model, parallel_state.get_data_parallel_group())

    def loss(self, tokens: Sequence[Tensor], logits: Tensor) -> Tensor:
        """The returned loss of a micro-batch: N·S, with the per-token flag T̃·S.

        `tokens` are whole samples, the same tensors as in the rollout data; `logits` [b, s, V / tp] the model's output.
        """
        work = self._work.get(id(tokens[0])) if len(tokens) else None
        if work is None:
            raise HostLossError(
                "the trainer computes the loss of a micro-batch that is not part of the current optimizer step, or it "
                "has copied the samples' tokens."
            )
        step, members, scale, width = work
        size = parallel_state.get_context_parallel_world_size()
        lengths = [padded_length(len(each), size) if width is None else width for each in tokens]
        filling = logits.shape[0] * logits.shape[1] * size - sum(lengths)
        if len(tokens) != len(members) or filling < 0:
            raise HostLossError(
                f"the trainer's micro-batch has {len(tokens)} samples and {logits.shape[0] * logits.shape[1]} rows of "
                f"logits, and the rollout's schedule has {len(members)} samples and {sum(lengths) // size} tokens on "
                "this rank."
            )
        call = self.head.take(logits)  # with hidden states [s, b, H], where logits are [b, s, V / tp]
        padded = [*lengths, *([filling] if filling else [])]
        local = step.slice(members, padded, logits.device, side_by_side=call is not None and width is not None)
        grad_scale = size * (scale if self._per_token else parallel_state.get_data_parallel_world_size())
        if call is not None:
            rows = local.trained
            computed = microbatch_head_loss(call, local.fields, rows, self.settings, grad_scale=grad_scale)
        else:
            group, rows = parallel_state.get_tensor_model_parallel_group(), logits.flatten(0, 1)
            group = group if group.size() > 1 else None
            total, found = microbatch_loss(rows, local.fields, self.settings, group, grad_scale=grad_scale)
            computed = total, found._replace(is_bypassed=self.head.is_bypassed())
        return scale * step.keep(local, computed)

    def head_call(self, logits: Tensor) -> HeadCall:
        """The call of the fused head, which has replaced the model's output `logits`, for log-probabilities."""
        if (call := self.head.take(logits)) is None:
            raise HostLossError(
                "the trainer computes log-probabilities of a model without megatron_pg's fused head.", _NO_HEAD
            )
        return call

    def run(self, rollout: Rollout, train: Callable[[], Any], *given: Any) -> Any:
        """An optimizer step: what the host's `train_one_step`, called by `train`, returns; every rank must call.

        The step is planned before it, checked before its gradients are reduced, and logged after it. `given` are the
        arguments of `train_one_step`.
        """
        _, rollout_id, number, _, model, optimizer, scheduler, *_ = given
        if self.head.is_waiting:
            raise HostLossError(
                "the trainer has computed log-probabilities by another function than megatron_pg's, and "
                "--pg-fused-head leaves it no logits.",
                _NO_HEAD,
            )
        step = self._plan(rollout, number)
        found: list[Any] = []  # the step's report
        reports = parallel_state.get_tensor_model_parallel_rank() == 0
        groups, position = optimizer.param_groups, scheduler.num_steps  # which moves with the optimizer
        rate = float(groups[0]["lr"]) if groups else None
        with before_finalize(get_model_config(model[0]), lambda: found.append(step.finish(reports=reports))):
            returned = train()
        self._work = {}
        if not found or not isinstance(returned, tuple) or len(returned) < 2:
            raise HostLossError(
                f"train_one_step has not finalized gradients, or it returned {type(returned).__name__}, not (losses, "
                "gradient norm, …)."
            )
        if self._log is not None:
            own, skipped = rollout_id * len(rollout.counts) + number, scheduler.num_steps == position
            self._log.write(rollout_id, own, found[0], grad_norm=returned[1], learning_rate=rate, skipped=skipped)
        return returned

    def _plan(self, rollout: Rollout, number: int) -> HostStep:
        """Plan a step; its samples are those of its micro-batches, in order."""
        microbatches = rollout.steps()[number]
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            return HostStep(self.settings)
        data, context = parallel_state.get_data_parallel_group(), parallel_state.get_context_parallel_group()
        needs_prompts = self.settings.plan_rule.needs_prompt_ids
        samples = partial(rollout.samples, [*chain(*microbatches)], context, needs_prompts=needs_prompts)
        step = HostStep(self.settings, samples, data=data, context=context, on_policy=rollout.is_on_policy)
        scale, first = float(rollout.counts[number]), 0
        if self._per_token:  # T̃: trained tokens of the step, at least one of each sample
            mine = torch.tensor([sum(max(sample.num_trained, 1) for sample in step.samples)])
            scale = float(all_gather_rows(mine, data).sum())
        scale *= 2.0 if self.settings.is_critic else 1.0
        for members in microbatches:
            places = list(range(first, first := first + len(members)))
            self._work[id(rollout.data["tokens"][members[0]])] = _Work(step, places, scale, rollout.row_width)
        return step


def is_writer() -> bool:
    """Whether this rank writes the log of the steps: the first rank of the last pipeline stage."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )
