"""One optimizer step through Megatron's schedule: plan, run, check.

    1. take this step's K micro-batches and plan them: one exchange over the data-parallel group; under --docs-per-step K is
       found first (`megatron_pg.plan.documents`)
    2. run Megatron's forward-backward function over them, with the weights that came out
    3. one all-gather for the checks and all metrics, one host read, before the optimizer moves

Needs megatron.core only. `megatron_pg.pretrain` hooks it into `megatron.training.pretrain`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch, local_experts
from megatron_pg.plan.documents import DocumentAccumulator, EndOfDocuments, StepDocuments, schedulable_count
from megatron_pg.plan.errors import ContractError, StepPlanError, lost_peer_named
from megatron_pg.plan.microbatches import Counted, count, slice_step
from megatron_pg.plan.plan import StepPlan, check_count, plan_from_table
from megatron_pg.plan.selection import select
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.shared_documents import SharedDocumentAccumulator
from megatron_pg.plan.support import without_missing
from megatron_pg.plan.table import LocalTable, PlanRule
from megatron_pg.step.checks import (
    agree,
    always_averages,
    check_batches,
    check_cuts,
    check_dynamic_cp,
    check_model,
    check_packing,
    check_teachers,
    check_vocabulary_of_supports,
    source_of,
    take,
)
from megatron_pg.step.context_groups import ContextGroups
from megatron_pg.step.experts import (
    RoutingReplay,
    check_experts,
    check_rows,
    needs_router_scale,
    router_losses_to_scale,
)
from megatron_pg.step.findings import Gathered, StepReport, before_finalize, gather_found, report_of
from megatron_pg.step.loss_scaling import Contract
from megatron_pg.step.model_loss import ModelLoss


class PolicyGradientStep:
    """The policy-gradient loss for Megatron's schedules.

    Args:
        settings: from `LossSettings.from_args`, after `validate_args`.
        on_report: called with a `StepReport` after every forward-backward, on every rank.
        documents: takes the steps under `--docs-per-step`, under `dynamic_cp` a SharedDocumentAccumulator; None: a step is
            what the schedule asks for.
        routing_replay: gives the model the experts of the rollout engine; None: its router chooses.
        dynamic_cp: every micro-batch is cut over ranks of its own (`PackedBatch.cp_ranks`); the same on every rank.
    """

    def __init__(
        self,
        settings: LossSettings,
        on_report: Callable[[StepReport], None] | None = None,
        documents: DocumentAccumulator | SharedDocumentAccumulator | None = None,
        routing_replay: RoutingReplay | None = None,
        dynamic_cp: bool = False,
    ):
        self.settings = settings
        self.documents = documents
        self._replay = routing_replay
        self._dynamic_cp = dynamic_cp
        self._groups: ContextGroups | None = None  # under dynamic_cp, from the first step on
        self._on_report = on_report or (lambda report: None)
        self._loss = ModelLoss(settings)
        self._contract: Contract | None = None  # of the step in progress
        self.steps = 0  # that have begun, without evaluations; for messages
        self._has_warned = False  # of ids that may not be unique

    # --- the model ---

    def attach(self, model: Any) -> Any:
        """Compute the loss inside `model` (a GPTModel or HybridModel, not yet wrapped), where logits are not gathered over TP.

        Raises:
            ContractError: the model does not compute its loss in `compute_language_model_loss`.
        """
        self._loss.attach(model)
        return model

    def forward_step(
        self, data_iterator: Iterator[LocalBatch], model: Any, return_schedule_plan: bool = False
    ) -> tuple[object, Callable]:
        """Megatron's `forward_step_func`, over the micro-batches that `forward_backward` has planned.

        `return_schedule_plan`: Megatron's --overlap-moe-expert-parallel-comm runs the model in pieces, beside another backward.
        """
        local = next(data_iterator)
        if not isinstance(local, LocalBatch):
            raise ContractError(
                f"the data iterator gave a {type(local).__name__} that no plan has seen, so its denominators are unknown; "
                "run the schedule through PolicyGradientStep.forward_backward (megatron_pg.pretrain does)"
            )
        inputs = (local.inputs.tokens, local.inputs.position_ids, None)
        rest = {"labels": local.inputs.labels, "loss_mask": local.inputs.loss_mask}
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
        config = get_attr_wrapped_model(model, "config")
        is_cut = config.sequence_parallel
        experts = local_experts(
            local,
            num_experts=config.num_moe_experts,
            layers=config.num_layers,
            topk=config.moe_router_topk,
            tp_rank=parallel_state.get_tensor_model_parallel_rank() if is_cut else 0,
            tp_size=parallel_state.get_tensor_model_parallel_world_size() if is_cut else 1,
        )
        return self._replay.forward(model, experts.to(local.inputs.tokens.device))

    def _loss_func(self, local: LocalBatch, total: Tensor) -> tuple:
        if local not in self._loss.found:
            raise ContractError(
                f"the model returned a {type(total).__name__} without the policy-gradient loss; call PolicyGradientStep.attach on "
                "the GPTModel or HybridModel before it is wrapped"
            )
        if torch.is_grad_enabled() and not total.requires_grad:
            raise ContractError(
                "loss does not require grad, so Megatron would skip this rank's backward and the others would wait; unfreeze a "
                "parameter of the model"
            )
        return self._contract.outputs(total, num_positions=local.num_positions, policy=self._loss.found[local].policy)

    # --- the step ---

    def forward_backward(self, forward_backward_func: Callable, **arguments: object) -> list:
        """Megatron's forward-backward function with the plan before it and the checks behind it.

        Args:
            forward_backward_func: what `get_forward_backward_func()` returned.
            arguments: its keyword arguments. `data_iterator` yields `PackedBatch`es (documents, where the step takes
                them: `num_microbatches` is then its own), on every rank, the same on tensor-, context- and
                pipeline-parallel peers; `forward_step_func` is `self.forward_step`.

        Raises:
            EndOfDocuments: on every rank, before the schedule runs.
            StepPlanError, ContractError, NonFiniteLossError: on every rank.
            LostPeerError: on the ranks that survive one that was killed, failed or hangs.
        """
        if arguments.get("collect_non_loss_data"):  # on this rank alone, so before any collective
            raise ContractError(
                "collect_non_loss_data asks for outputs instead of losses, on the last rank alone; run such a forward without "
                "PolicyGradientStep"
            )
        place = f"in an evaluation {self.progress}"
        if not arguments.get("forward_only"):
            self.steps += 1
            place = f"in its step {self.steps}, before the optimizer moved"
        with lost_peer_named(lambda: place):
            return self._run(forward_backward_func, arguments)

    @property
    def progress(self) -> str:
        """How far this rank is, in words for an error."""
        return f"after its step {self.steps}" if self.steps else "before its first step"

    def _run(self, forward_backward_func: Callable, arguments: dict) -> list:
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        if self._dynamic_cp and self._groups is None:
            self._groups = ContextGroups(parallel_state.get_data_parallel_group(with_context_parallel=True))
        plan, local, documents = self._plan(chunks, arguments)
        self._contract = self._contract_of(plan, chunks[0])
        group = parallel_state.get_tensor_model_parallel_group()
        self._loss.begin(plan, self._contract, chunks[0].config, group)
        # every virtual pipeline chunk runs over the same micro-batches
        iterators = [iter(local) for _ in chunks]
        arguments["data_iterator"] = iterators if isinstance(arguments["data_iterator"], list) else iterators[0]
        found: list[Gathered] = []
        # with gradients on, the fused head adds to main_grad in the forward
        trains = torch.is_grad_enabled() and not arguments.get("forward_only")
        with (
            self._checked_before_finalize(chunks[0].config, found),
            _router_losses_to_scale(chunks, local),
            self._replay_ended(),
            self._groups.in_layers(chunks) if self._groups else nullcontext(),
            torch.set_grad_enabled(trains),
        ):
            losses = forward_backward_func(**arguments)
        gathered = found[0] if found else self._gather_and_check()
        forward_only = bool(arguments.get("forward_only"))
        report = report_of(plan, self.settings.metrics, gathered, forward_only=forward_only, documents=documents)
        self._on_report(report)
        return losses

    @contextmanager
    def _replay_ended(self) -> Iterator[None]:
        try:
            yield
        finally:
            if self._replay is not None:
                self._replay.end()

    def _checked_before_finalize(self, config: Any, found: list[Gathered]) -> AbstractContextManager[None]:
        return before_finalize(config, lambda: found.append(self._gather_and_check()))

    def _plan(self, chunks: list[Any], arguments: dict) -> tuple[StepPlan, list[LocalBatch], StepDocuments | None]:
        """The step's plan and this rank's planned micro-batches; a mistake on any rank is raised on every rank."""
        try:
            batches, documents, error = self._fetch(chunks, arguments)
        except EndOfDocuments:
            agree([], None, None, self._counting_group)  # unless a peer goes on
            raise
        counted: Counted | None = None
        if error is None:
            try:
                batches = [without_missing(batch, self.settings) for batch in batches]
                check_cuts(batches, self._groups)
                check_batches(batches, chunks[0], arguments, self.settings.vocab_size)
                check_teachers(batches, chunks[0], self.settings)
                check_vocabulary_of_supports(batches, chunks[0], self.settings)
                check_packing(batches, chunks)
                check_rows(batches, chunks[0].config)
                check_experts(batches, chunks[0].config, self._replay)
                counted = count(batches, self.settings, self._counting_group)
            except Exception as failure:  # travels to the other ranks, so that all of them stop
                error = failure
        table, factors = select(batches, counted, self.settings, self._counting_group, error)
        # under dynamic_cp every rank takes whole units, and any rank may count their samples
        undivided = () if documents is None or self._groups else self._units
        plan = self._exchange(table, replace(self.settings.plan_rule, undivided=undivided), error, batches)
        device = next(chunks[0].parameters()).device
        local = slice_step(batches, plan, factors, self.settings, group_of=self._context_group, device=device)
        return plan, local, documents

    def _exchange(
        self, table: LocalTable | None, rule: PlanRule, error: Exception | None, batches: Sequence[PackedBatch]
    ) -> StepPlan:
        """The plan from every rank's table, or every rank's error."""
        plan, failure = None, None
        try:
            plan = plan_from_table(table, rule, error=error, group=self._counting_group)
        except StepPlanError as raised:
            failure = raised
        agree(batches, plan, failure, self._counting_group)
        if plan.warning is not None and not self._has_warned and torch.distributed.get_rank() == 0:
            warnings.warn(plan.warning, stacklevel=2)
            self._has_warned = True
        return plan

    def _fetch(
        self, chunks: list[Any], arguments: dict
    ) -> tuple[list[PackedBatch], StepDocuments | None, Exception | None]:
        """This rank's micro-batches, the documents that they were taken from, and this rank's error."""
        forward_only = bool(arguments.get("forward_only"))
        takes_documents = self.documents is not None and not forward_only
        batches, source, error = [], None, None
        try:
            check_model(chunks, self.settings, forward_only=forward_only, is_attached=self._loss.is_attached)
            self._loss.check_layer(next(chunks[0].parameters()).device)
            if self._groups:
                takes_a_ranks_own = takes_documents and not isinstance(self.documents, SharedDocumentAccumulator)
                check_dynamic_cp(chunks, self.settings, takes_documents=takes_a_ranks_own)
            source = source_of(arguments["data_iterator"])
            if not takes_documents:
                batches = take(source, arguments["num_microbatches"])
        except Exception as failure:  # travels to the other ranks, so that all of them stop
            error = failure
        if not takes_documents:
            return batches, None, error
        batches, documents, error = self._take_documents(source, chunks, error)
        arguments["num_microbatches"] = len(batches)
        return batches, documents, error

    def _take_documents(
        self, source: Iterator | None, chunks: list[Any], error: Exception | None
    ) -> tuple[list[PackedBatch], StepDocuments | None, Exception | None]:
        """The step's documents, packed into as many micro-batches as Megatron's schedule can run."""
        schedulable = partial(
            schedulable_count,
            num_stages=parallel_state.get_pipeline_model_parallel_world_size(),
            group_size=chunks[0].config.microbatch_group_size_per_vp_stage if len(chunks) > 1 else None,
        )
        group = self._counting_group
        return self.documents.take(source, group=group, error=error, undivided=self._units, schedulable=schedulable)

    @property
    def _counting_group(self) -> ProcessGroup:
        """The ranks that bring samples of their own."""
        return self._groups.plane if self._groups else parallel_state.get_data_parallel_group()

    @property
    def _units(self) -> tuple[str, ...]:
        """What a step of documents must hold whole, because a denominator counts it."""
        return ("rollout_id", "prompt_id") if self.settings.plan_rule.needs_prompt_ids else ("rollout_id",)

    def _contract_of(self, plan: StepPlan, model: Any) -> Contract:
        has_router = bool(getattr(model.config, "num_moe_experts", None))
        if has_router and self.settings.per_token:
            check_count(plan.num_positions)
        return Contract(
            per_token=self.settings.per_token,
            num_microbatches=plan.num_microbatches,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            num_positions=plan.num_positions if has_router else None,
            averages=always_averages(model),
        )

    def _context_group(self, batch: PackedBatch) -> ProcessGroup:
        return self._groups.of(batch) if self._groups else parallel_state.get_context_parallel_group()

    def _gather_and_check(self) -> Gathered:
        """What every rank found, after the checks."""
        found, reports = self._loss.found, _reports()
        counted = sum(self._contract.local_count(local.num_positions) for local in found) if reports else 0
        data_rank = self._counting_group.rank()
        gathered = gather_found(found, self.settings.metrics, reports=reports, data_rank=data_rank, returned=counted)
        if self.settings.per_token and gathered.returned != self._contract.count:
            raise ContractError(
                f"returned counts sum to {gathered.returned}, not to {self._contract.count}, so Megatron would divide by the "
                "wrong number; do not wrap or replace the forward step's loss function"
            )
        return gathered


def _router_losses_to_scale(chunks: list[Any], local: Sequence[LocalBatch]) -> AbstractContextManager[None]:
    if not needs_router_scale(chunks[0].config):
        return nullcontext()
    sizes = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
    return router_losses_to_scale(chunks, rows=len(local[0].inputs.tokens), ranks=sizes[0] * sizes[1])


def _packed_seq_params(local: LocalBatch, cp_group: ProcessGroup | None = None) -> PackedSeqParams | None:
    """`cp_group`: the micro-batch's own, where it has one."""
    boundaries = local.inputs.boundaries
    if boundaries is None:
        return None
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(local.whole.padded_lengths))
    document = {} if cp_group is None else {"cp_group": cp_group, "local_cp_size": cp_group.size()}
    if "seq_idx" in PackedSeqParams.__dataclass_fields__:  # given, because Megatron makes it with a host sync
        number = torch.repeat_interleave(boundaries.diff(), output_size=local.whole.num_positions)
        document["seq_idx"] = number[None]  # of every position of the whole row, where layers with a state begin anew
    return PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, boundaries), **longest, **document)


def _reports() -> bool:
    """Whether this rank's sums count: tensor-parallel peers hold copies."""
    return parallel_state.get_tensor_model_parallel_rank() == 0
