"""One optimizer step through Megatron's schedule: plan, run, check.

    1. take the step's K micro-batches and plan them: one exchange over the data-parallel group. Under --docs-per-step
       the documents determine K (`megatron_pg.plan.documents`).
    2. run Megatron's forward-backward function over them, with the planned weights
    3. one all-gather for the checks and all metrics, one host read, before the optimizer moves

Needs megatron.core only. `megatron_pg.pretrain` hooks it into `megatron.training.pretrain`.
"""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch
from megatron_pg.declarations.choices import ROLES
from megatron_pg.flags.errors import ArgumentError
from megatron_pg.plan.documents import DocumentAccumulator, EndOfDocuments, StepDocuments
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.plan import StepPlan, check_count
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.shared_documents import SharedDocumentAccumulator
from megatron_pg.step import checks
from megatron_pg.step.context_groups import ContextGroups
from megatron_pg.step.experts import (
    RoutingReplay,
    check_experts,
    check_rows,
    local_experts,
    needs_router_scale,
    router_losses_to_scale,
)
from megatron_pg.step.findings import StepFindings, StepReport, before_finalize, gather_found, report_of
from megatron_pg.step.loss_scaling import LossScaling
from megatron_pg.step.lost_peers import lost_peer_named
from megatron_pg.step.model_loss import ModelLoss
from megatron_pg.step.open_step import OpenStep, StepParts
from megatron_pg.step.schedule import ScheduleCall


class PolicyGradientStep:
    """The policy-gradient loss for Megatron's schedules.

    Args:
        settings: from `LossSettings.from_args`, after `validate_args`.
        on_report: called with a `StepReport` after every forward-backward, on every rank.
        documents: takes the steps under `--docs-per-step`, a SharedDocumentAccumulator under `dynamic_cp`; None: a step
            is `num_microbatches` of the schedule.
        routing_replay: gives the model the experts of the rollout engine; None: its router chooses.
        dynamic_cp: every micro-batch is split over its own ranks (`PackedBatch.cp_ranks`); the same on every rank.
    """

    def __init__(
        self,
        settings: LossSettings,
        on_report: Callable[[StepReport], None] | None = None,
        documents: DocumentAccumulator | SharedDocumentAccumulator | None = None,
        routing_replay: RoutingReplay | None = None,
        dynamic_cp: bool = False,
    ):
        self.settings = settings  # of the next training step, and of evaluations before it
        self.documents = documents
        self._replay = routing_replay
        self._dynamic_cp = dynamic_cp
        self._groups: ContextGroups | None = None  # under dynamic_cp, from the first step on
        self._on_report = on_report or (lambda report: None)
        self._loss = ModelLoss(settings)
        self._before = settings  # of the last training step, which Megatron's rerun machinery may repeat
        self._scaling: LossScaling  # of the step in progress
        self._returned = 0  # sum of its counts that went to Megatron
        self._open: OpenStep | None = None
        self.steps = 0  # training steps that have begun; for messages
        self._has_warned = False  # about ids that may not be unique

    # --- the model ---

    def attach(self, model: Any) -> Any:
        """Compute the loss inside `model`, a GPTModel or HybridModel that is not yet wrapped; returns it.

        Raises:
            ScheduleError: the model does not compute its loss in `compute_language_model_loss`.
        """
        self._loss.attach(model)
        return model

    def forward_step(
        self, data_iterator: Iterator[LocalBatch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[object, Callable]:
        """Megatron's `forward_step_func`, over the micro-batches that `forward_backward` has planned.

        Args:
            data_iterator: yields this rank's slices of the planned micro-batches.
            model: the wrapped model.
            return_schedule_plan: Megatron's --overlap-moe-expert-parallel-comm runs the model in pieces, during a
                backward.
        """
        local = next(data_iterator)
        if not isinstance(local, LocalBatch):
            raise ScheduleError(
                f"the data iterator gave a {type(local).__name__} that was not planned, so its denominators are "
                "unknown. Run the schedule through PolicyGradientStep.forward_backward (megatron_pg.pretrain does)."
            )
        inputs = (local.inputs.tokens, local.inputs.position_ids, None)
        rest: dict[str, Any] = {"labels": local.inputs.labels, "loss_mask": local.inputs.loss_mask}
        rest["packed_seq_params"] = _packed_seq_params(local, self._groups.use(local.whole) if self._groups else None)
        if return_schedule_plan:
            self._loss.expect(local)
            return model.build_schedule_plan(*inputs, **rest), partial(self._loss_func, local)
        with self._loss.of(local), self._replayed(local, model):
            output = model(*inputs, **rest)
        return output, partial(self._loss_func, local)

    def _replayed(self, local: LocalBatch, model: nn.Module) -> AbstractContextManager[None]:
        if self._replay is None:
            return nullcontext()
        config, tp_rank, tp_size = get_attr_wrapped_model(model, "config"), 0, 1
        if config.sequence_parallel:
            tp_rank = parallel_state.get_tensor_model_parallel_rank()
            tp_size = parallel_state.get_tensor_model_parallel_world_size()
        experts = local_experts(local, config, tp_rank=tp_rank, tp_size=tp_size)
        return self._replay.forward(model, experts.to(local.inputs.tokens.device))

    def _loss_func(self, local: LocalBatch, total: Tensor) -> tuple:
        if local not in self._loss.diagnostics:
            raise ScheduleError(
                f"the model returned a {type(total).__name__} without the policy-gradient loss. Call "
                "PolicyGradientStep.attach on the GPTModel or HybridModel before it is wrapped."
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            raise ScheduleError(
                "loss does not require grad, so Megatron skips this rank's backward and the other ranks wait. Unfreeze "
                "a parameter of the model."
            )
        self._returned += self._scaling.local_count(local.num_positions)
        return self._scaling.outputs(
            total, num_positions=local.num_positions, policy=self._loss.diagnostics[local].policy
        )

    def state_dict(self) -> dict[str, float | None]:
        """With `--pg-entropy-target`, c (`entropy_coef`) and the last training step's e, in nats (`entropy`); else {}.

        Equal on every rank. A checkpoint must contain it.
        """
        own = self.settings.terms.adaptive_entropy
        return {} if own is None else {"entropy_coef": own.coefficient, "entropy": own.entropy}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state_dict()` of an earlier run; every rank must call, with the same state.

        Raises:
            ValueError: the state does not fit `--pg-entropy-target`; rule E42 if its coefficient is above `max`.
            ScheduleError: an open step has not ended.
        """
        self._check_not_open(is_training=True)
        if state.keys() != (now := self.state_dict()).keys():
            raise ValueError(f"the state has {[*state]}, not {[*now]}. Load it if both runs have --pg-entropy-target.")
        if own := self.settings.terms.adaptive_entropy:
            own = replace(own, coefficient=state["entropy_coef"], entropy=state["entropy"])
            if not 0 <= own.coefficient <= own.max:
                text = (
                    f"the checkpoint's coefficient is {own.coefficient:g}, above max={own.max:g} of --pg-entropy-target"
                )
                raise ArgumentError([("E42", f"{text}. Raise max.")])
            self.settings = self._before = self.settings.with_entropy(own)

    def _finish(self, report: StepReport) -> None:
        """Move the entropy coefficient after a training step, and hand on the report."""
        if not report.forward_only:
            self._before = self.settings
            if (own := self.settings.terms.adaptive_entropy) and "entropy_mean" in report.metrics:
                self.settings = self.settings.with_entropy(own.after(report.metrics["entropy_mean"]))
        self._on_report(report)

    # --- the step ---

    def forward_backward(
        self, forward_backward_func: Callable, *, weight_version: int | None = None, **arguments: object
    ) -> list:
        """Plan the step, run Megatron's forward-backward function over it, and check it.

        Args:
            forward_backward_func: what `get_forward_backward_func()` returned.
            weight_version: optimizer steps applied to the model's weights since the start of training, the same on
                every rank. Metrics of staleness subtract `Sample.weight_version`; None: there are none.
            arguments: its keyword arguments. `data_iterator` yields `PackedBatch`es on every rank, the same on tensor-,
                context- and pipeline-parallel peers. It yields documents where the step takes them, and
                `num_microbatches` is then not read. `forward_step_func` is `self.forward_step`.

        Raises:
            EndOfDocuments: on every rank, before the schedule runs.
            StepPlanError, ScheduleError, NonFiniteLossError: on every rank.
            LostPeerError: on the ranks that survive one that was killed, failed or hangs.
        """
        self._check_not_open(is_training=not arguments.get("forward_only"))
        if arguments.get("collect_non_loss_data"):  # on this rank alone, so before any collective
            raise ScheduleError(
                "collect_non_loss_data asks for outputs instead of losses, on the last rank only. Run such a forward "
                "without PolicyGradientStep."
            )
        place = f"in an evaluation {self.progress}"
        if not arguments.get("forward_only"):
            self.steps += 1
            place = f"in its step {self.steps}, before the optimizer moved"
        with lost_peer_named(lambda: place):
            return self._run(forward_backward_func, ScheduleCall.of(arguments, weight_version))

    def open_step(self, model: Any, *, expected: int, weight_version: int | None = None, **arguments: Any) -> OpenStep:
        """Open a step whose rollouts are trained as they arrive, by Megatron's `get_forward_backward_func()`.

        Gradient, checks and report are those of `forward_backward` over all the micro-batches. Every rank must call.
        The gradient buffers are zeroed. Until the step has ended, only evaluations may run.

        Args:
            model: the wrapped model, or the list of its virtual pipeline stages.
            expected: about how many rollouts the step will have; prompts with `prompt_mean`, trained tokens with
                `token_mean`. It scales gradients until the step closes: the result depends on it by rounding only.
            weight_version: as in `forward_backward`.
            arguments: of Megatron's function, at least `seq_length` and `micro_batch_size`.

        Raises:
            ScheduleError: on every rank; the model, the parallelism or the loss needs the whole step first.
        """
        self._check_not_open(is_training=True)
        iterators = [None] * len(model) if isinstance(model, list) and len(model) > 1 else None
        given = {"forward_step_func": self.forward_step, "data_iterator": iterators, "num_microbatches": 0}
        call = ScheduleCall.of({**arguments, **given, "model": model}, weight_version)
        checks.check_model(call.chunks, self.settings, forward_only=False, is_attached=self._loss.is_attached)
        checks.check_open(call.chunks, takes_documents=self.documents is not None, dynamic_cp=self._dynamic_cp)
        self._loss.check_layer(call.device)
        self.steps += 1
        function = get_forward_backward_func()
        parts = StepParts(
            settings=self.settings,
            loss=self._loss,
            group=self._counting_group,
            check=partial(self._check, call),
            slices=partial(self._slices, call),
            run=lambda local: self._forwards(function, call, local, self._scaling_of(len(local), is_open=True)),
            on_report=self._finish,
            place=f"in its step {self.steps}, before the optimizer moved",
        )
        self._open = OpenStep(parts, call, expected)
        return self._open

    def _check_not_open(self, *, is_training: bool) -> None:
        if is_training and self._open is not None and not self._open.has_ended:
            raise ScheduleError("an open step has not ended. Call its close() or abandon() on every rank first.")

    @property
    def progress(self) -> str:
        """The progress of this rank, for an error message."""
        return f"after its step {self.steps}" if self.steps else "before its first step"

    def _run(self, forward_backward_func: Callable, call: ScheduleCall) -> list:
        if self._dynamic_cp and self._groups is None:
            self._groups = ContextGroups(parallel_state.get_data_parallel_group(with_context_parallel=True))
        plan, local, documents = self._plan(call)
        findings: list[StepFindings] = []
        with (
            before_finalize(call.config, lambda: findings.append(self._gather_and_check())),
            _router_losses_to_scale(call.chunks, local) if needs_router_scale(call.config) else nullcontext(),
            self._groups.in_layers(call.chunks) if self._groups else nullcontext(),
        ):
            losses = self._forwards(forward_backward_func, call, local, self._scaling_of_step(plan, call.chunks[0]))
        gathered = findings[0] if findings else self._gather_and_check()
        report = report_of(plan, self.settings.metrics, gathered, forward_only=call.forward_only, documents=documents)
        self._finish(report)
        return losses

    def _forwards(
        self, forward_backward_func: Callable, call: ScheduleCall, local: Sequence[LocalBatch], scaling: LossScaling
    ) -> list:
        """Run the schedule over this rank's slices."""
        self._scaling, self._returned = scaling, 0
        self._loss.begin(scaling, call.config, parallel_state.get_tensor_model_parallel_group(), self.settings)
        # with gradients on, the fused head adds to main_grad in the forward
        trains = torch.is_grad_enabled() and not call.forward_only
        with ExitStack() as ending, torch.set_grad_enabled(trains):
            if self._replay is not None:
                ending.callback(self._replay.end)
            return forward_backward_func(**call.over(local))

    def _plan(self, call: ScheduleCall) -> tuple[StepPlan, list[LocalBatch], StepDocuments | None]:
        """The step's plan and this rank's planned micro-batches; an error on any rank is raised on every rank."""
        group = self._counting_group
        try:
            batches, documents, error = self._fetch(call)
        except EndOfDocuments:
            checks.check_agreement([], None, None, group)  # unless a peer goes on
            raise
        # under dynamic_cp every rank takes whole groups, and any rank may count their samples
        rule = self.settings.plan_rule
        undivided = () if documents is None or self._groups else rule.units
        rule = replace(rule, undivided=undivided, weight_version=call.weight_version)

        def fetched() -> Sequence[PackedBatch]:
            if error is not None:
                raise error
            return batches

        check = partial(self._check, call)
        planned = checks.planned_alike(
            lambda: PlannedStep.of(fetched, self.settings, group=group, rule=rule, check=check), group
        )
        if planned.plan.warning is not None and not self._has_warned and torch.distributed.get_rank() == 0:
            warnings.warn(planned.plan.warning, stacklevel=2)
            self._has_warned = True
        return planned.plan, self._slices(call, planned), documents

    def _slices(self, call: ScheduleCall, planned: PlannedStep) -> list[LocalBatch]:
        of_all = None if self._groups else parallel_state.get_context_parallel_group()
        return planned.slices(lambda batch: self._groups.of(batch) if self._groups else of_all, call.device)

    def _check(self, call: ScheduleCall, batches: Sequence[PackedBatch]) -> None:
        model = call.chunks[0]
        checks.check_cuts(batches, self._groups)
        checks.check_batches(batches, call, self.settings.vocab_size)
        checks.check_teachers(batches, model, self.settings)
        checks.check_vocabulary_of_sampling_masks(batches, model, self.settings)
        checks.check_packing(batches, call.chunks)
        check_rows(batches, call.config)
        check_experts(batches, call.config, self._replay)

    def _fetch(self, call: ScheduleCall) -> tuple[Sequence[PackedBatch], StepDocuments | None, Exception | None]:
        """This rank's micro-batches, the documents that they were packed from, and its error."""
        takes_documents = self.documents is not None and not call.forward_only
        batches: Sequence[PackedBatch] = []
        source: Iterator = iter(())
        error: Exception | None = None
        try:
            checks.check_model(
                call.chunks, self.settings, forward_only=call.forward_only, is_attached=self._loss.is_attached
            )
            self._loss.check_layer(call.device)
            if self._groups:
                takes_a_ranks_own = takes_documents and not isinstance(self.documents, SharedDocumentAccumulator)
                checks.check_dynamic_cp(call.chunks, self.settings, takes_documents=takes_a_ranks_own)
            source = checks.source_of(call.keywords["data_iterator"])
            if getattr(source, "replaying", False) and not call.forward_only:
                self.settings = self._before
            if not takes_documents:
                batches = checks.take_microbatches(source, call.keywords["num_microbatches"])
        except Exception as failure:  # the exchange raises it on every rank
            error = failure
        if self.documents is None or not takes_documents:
            return batches, None, error
        return self.documents.take(
            source,
            group=self._counting_group,
            error=error,
            undivided=self.settings.plan_rule.units,
            schedulable=call.schedulable(parallel_state.get_pipeline_model_parallel_world_size()),
        )

    @property
    def _counting_group(self) -> ProcessGroup:
        """The ranks that contribute their own samples."""
        return self._groups.plane if self._groups else parallel_state.get_data_parallel_group()

    def _scaling_of_step(self, plan: StepPlan, model: Any) -> LossScaling:
        has_router = bool(getattr(model.config, "num_moe_experts", None))
        if has_router and self.settings.per_token:
            check_count(plan.num_positions)
        num_positions = plan.num_positions if has_router else None
        return self._scaling_of(
            plan.num_microbatches, num_positions=num_positions, averages=checks.always_averages(model)
        )

    def _scaling_of(self, num_microbatches: int, **rest: Any) -> LossScaling:
        return LossScaling(
            per_token=self.settings.per_token,
            num_microbatches=num_microbatches,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            name=ROLES[self.settings.terms.objective.role],
            **rest,
        )

    def _gather_and_check(self) -> StepFindings:
        reports = parallel_state.get_tensor_model_parallel_rank() == 0  # other ranks hold copies of its sums
        gathered = gather_found(
            self._loss.take(),  # no LocalBatch outlives the step
            self.settings.metrics,
            reports=reports,
            data_rank=self._counting_group.rank(),
            returned=self._returned if reports else 0,
        )
        if gathered.returned != self._scaling.count:
            raise ScheduleError(
                f"the step's loss function has counted {gathered.returned} of {self._scaling.count}, so another one "
                "has scaled losses for Megatron. Do not replace the loss function of forward_step."
            )
        return gathered


def _router_losses_to_scale(chunks: list[Any], local: Sequence[LocalBatch]) -> AbstractContextManager[None]:
    ranks = parallel_state.get_tensor_model_parallel_world_size() * parallel_state.get_context_parallel_world_size()
    return router_losses_to_scale(chunks, rows=len(local[0].inputs.tokens), ranks=ranks)


def _packed_seq_params(local: LocalBatch, cp_group: ProcessGroup | None = None) -> PackedSeqParams | None:
    """`cp_group`: the micro-batch's own group, if it has one."""
    boundaries = local.inputs.boundaries
    if boundaries is None:
        return None
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(local.whole.padded_lengths))
    document = {} if cp_group is None else {"cp_group": cp_group, "local_cp_size": cp_group.size()}
    if "seq_idx" in PackedSeqParams.__dataclass_fields__:  # given here, because Megatron computes it with a host sync
        number = torch.repeat_interleave(boundaries.diff(), output_size=local.whole.num_positions)
        document["seq_idx"] = number[None]  # of every position of the whole row; layers with a state reset by it
    return PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, boundaries), **longest, **document)
