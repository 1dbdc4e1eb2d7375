"""The loss in the training loop of slime and miles, which split a rollout into steps before they train.

Both pass the samples of one micro-batch to a loss function and scale its return value:

    flag off:  × K/N·D·C (host), ÷ K·D·C (Megatron)
    flag on:   × C (host), ÷ C·T̃ (Megatron)

for K micro-batches, N rollouts and D·C ranks. So the loss function returns N·S, or T̃·S under
--calculate-per-token-loss. T̃ counts a fully masked sample as one token, as the hosts do.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config
from torch import Tensor

from megatron_pg.cp_utils import padded_length
from megatron_pg.hosts.head import HostHead
from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.rollout.logprobs import Responses
from megatron_pg.hosts.rollout.samples import Rollout
from megatron_pg.hosts.step import HostLossError, HostStep
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.findings import StepReport

SCALING = "takes N·Σwℓ, with --calculate-per-token-loss T̃·Σwℓ; the host and Megatron bring it back to Σwℓ"
_NO_HEAD = "Use a release of the trainer that docs/hosts lists, or remove --pg-fused-head."


class _Work(NamedTuple):
    """A micro-batch of a planned step."""

    step: HostStep
    members: list[int]  # indices of its samples among the step's
    scale: float  # factor of S in the returned loss
    row_width: int | None


class RolloutTrainer:
    """The loss in the training loop of one host.

    Args:
        settings: the loss settings.
        log: on the rank that writes the steps; None elsewhere.
        per_token: the host's --calculate-per-token-loss.
    """

    def __init__(self, settings: LossSettings, log: HostLog | None, *, per_token: bool):
        self._settings, self._log, self._per_token = settings, log, per_token
        self.head = HostHead(settings)
        self._steps: list[HostStep] = []
        self._work: dict[int, _Work] = {}  # by the id of its first sample's tokens, which the host passes on
        self._numbers, self._current = (0, 0), HostStep(settings)  # the host's numbers of rollout and step
        self._report: StepReport  # of the latest step
        self._rollout: Rollout | None = None  # kept, because `_work` uses the ids of its tokens

    @property
    def corrects(self) -> bool:
        """Whether the loss compares old log-probabilities with the rollout engine's."""
        return self._settings.correction.name != "none"

    def plan(self, rollout: Rollout) -> None:
        """Plan every optimizer step of a rollout; every rank must call.

        Raises:
            StepPlanError: on every rank of the data-parallel group.
            HostLossError: the rollout data have a form that the adapter does not support.
        """
        rollout.check_schedule()
        self._steps, self._work, self._rollout = [], {}, rollout
        if not parallel_state.is_pipeline_last_stage(ignore_virtual=True):
            self._steps = [HostStep(self._settings) for _ in rollout.counts]
            return
        data, context = parallel_state.get_data_parallel_group(), parallel_state.get_context_parallel_group()
        samples, error = [], None
        try:
            samples = rollout.samples(context)
            if self._settings.plan_rule.needs_prompt_ids:
                _check_numbers(samples)
        except Exception as failure:  # raised on every rank by the first step's plan
            error = failure
        for microbatches, count in zip(rollout.steps(), rollout.counts, strict=True):
            of_step = partial(_samples_or_error, samples, [i for members in microbatches for i in members], error)
            groups = {"data": data, "context": context}
            step = HostStep.planned(self._settings, of_step, **groups, on_policy=rollout.is_on_policy)
            self._steps.append(step)
            scale, first = float(count), 0
            if self._per_token:  # T̃: trained tokens of the step, at least one of each sample
                mine = torch.tensor([sum(max(sample.num_trained, 1) for sample in of_step())])
                scale = float(all_gather_rows(mine, data).sum())
            for members in microbatches:
                places = list(range(first, first := first + len(members)))
                self._work[id(rollout.data["tokens"][members[0]])] = _Work(step, places, scale, rollout.row_width)

    def loss(self, tokens: Sequence[Tensor], logits: Tensor) -> Tensor:
        """The returned loss of a micro-batch: N·S, with the per-token flag T̃·S.

        Args:
            tokens: whole tokens of its samples, the same tensors as in the rollout data.
            logits: [b, s, V / tp], the model's output.
        """
        work = self._work.get(id(tokens[0])) if len(tokens) else None
        if work is None or work.step is not self._current:
            raise HostLossError(
                "the trainer computes the loss of a micro-batch that is not part of the current optimizer step: it has "
                "copied the samples' tokens, or has not called the hook before the step."
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
            return scale * step.head_loss(local, call, grad_scale)
        group = parallel_state.get_tensor_model_parallel_group()
        return scale * step.loss(local, logits.flatten(0, 1), group, grad_scale, is_bypassed=self.head.is_bypassed())

    def logprobs(self, responses: Responses, logits: Tensor, *, with_entropy: bool) -> dict[str, list[Tensor]]:
        """`Responses.logprobs` by the fused head, which has replaced the model's output `logits`."""
        if (call := self.head.take(logits)) is None:
            raise HostLossError(
                "the trainer computes log-probabilities of a model without megatron_pg's fused head.", _NO_HEAD
            )
        return responses.logprobs(call, self._settings, with_entropy=with_entropy)

    def begin_step(self, rollout_id: int, number: int, model: Sequence[Any], optimizer: Any) -> None:
        """Prepare optimizer step `number` of the rollout: install the head, the checks before finalize, and the log."""
        if self.head.is_waiting:
            raise HostLossError(
                "the trainer has computed log-probabilities by another function than megatron_pg's, and "
                "--pg-fused-head leaves it no logits.",
                _NO_HEAD,
            )
        self._current, self._numbers = self._steps[number], (rollout_id, rollout_id * len(self._steps) + number)
        self.head.install(model)
        _wrap(get_model_config(model[0]), "finalize_model_grads_func", before=self._check)
        if (log := self._log) is not None:
            _wrap(optimizer, "step", after=lambda result: self._write(log, optimizer, result))

    def _check(self) -> None:
        report = self._current.finish(reports=parallel_state.get_tensor_model_parallel_rank() == 0)
        if report is not None:
            self._report = report
        if self._current is self._steps[-1]:  # the host frees the rollout data before its rollout engine wakes up
            self._rollout, self._work = None, {}

    def _write(self, log: HostLog, optimizer: Any, result: Any) -> None:
        if not (isinstance(result, tuple) and len(result) == 3):
            raise HostLossError(
                f"optimizer.step returned {type(result).__name__}, not (success, gradient norm, number of zeros)."
            )
        is_done, grad_norm, _ = result
        groups = optimizer.param_groups
        log.write(
            *self._numbers,
            self._report,
            grad_norm=None if grad_norm is None else float(grad_norm),
            learning_rate=float(groups[0]["lr"]) if groups else None,
            skipped=not is_done,
        )


def _wrap(
    owner: Any,
    name: str,
    *,
    before: Callable[[], None] = lambda: None,
    after: Callable[[Any], None] = lambda result: None,
) -> None:
    """Add a call before or after a function, once."""
    function = getattr(owner, name)
    if getattr(function, "is_wrapped", False):
        return

    def wrapped(*positional: object, **keywords: object) -> Any:
        before()
        result = function(*positional, **keywords)
        after(result)
        return result

    wrapped.is_wrapped = True  # type: ignore[attr-defined]
    setattr(owner, name, wrapped)


def is_writer() -> bool:
    """Whether this rank writes the log of the steps: the first rank of the last pipeline stage."""
    return (
        parallel_state.get_data_parallel_rank(with_context_parallel=True) == 0
        and parallel_state.get_tensor_model_parallel_rank() == 0
        and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
    )


def _check_numbers(samples: Sequence[Sample]) -> None:
    """Refuse sample indices that two rollouts share, because they do not identify prompts.

    Raises:
        ValueError: for the first such index.
    """
    first: dict[str, object] = {}
    for sample in [sample for sample in samples if sample.prompt_id is not None]:
        if first.setdefault(sample.sample_id, sample.rollout_id) != sample.rollout_id:
            raise ValueError(
                f"sample index {sample.sample_id} is in rollouts {first[sample.sample_id]} and {sample.rollout_id}, so "
                "prompt groups (n consecutive indices) are not known, which prompt_mean needs. Leave the index of a "
                "sample as the data source set it, or use another aggregation."
            )


def _samples_or_error(samples: Sequence[Sample], mine: Sequence[int], error: Exception | None) -> list[Sample]:
    if error is not None:
        raise error
    return [samples[i] for i in mine]
