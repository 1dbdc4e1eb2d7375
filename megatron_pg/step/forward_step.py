"""One optimizer step through Megatron's schedule: plan, run, check.

    1. take this step's K micro-batches and plan them: one exchange over the data-parallel group; under --docs-per-step K is
       found first (`megatron_pg.step.documents`)
    2. run Megatron's forward-backward function over them, with the weights that came out
    3. one all-gather for the checks and all metrics, one host read, before the optimizer moves

Needs megatron.core only. `megatron_pg.pretrain` hooks it into `megatron.training.pretrain`.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn

from megatron_pg.batch import LocalBatch, PackedBatch, slice_batch
from megatron_pg.lm_head.output_layer import DeferredHead, check_layer, compute_in_float32
from megatron_pg.step.checks import agree, check_batches, check_model, source_of, take
from megatron_pg.step.collectives import all_gather_rows, broadcast_text, device_of
from megatron_pg.step.contract import Contract
from megatron_pg.step.documents import DocumentAccumulator, EndOfDocuments, StepDocuments, schedulable_count
from megatron_pg.step.errors import ContractError, NonFiniteLossError, StepPlanError, lost_peer_named
from megatron_pg.step.loss import MicrobatchLoss, microbatch_head_loss, microbatch_loss
from megatron_pg.step.plan import (
    LocalTable,
    PlanRule,
    StepPlan,
    check_count,
    local_table_of,
    needs_prompt_ids,
    plan_from_table,
)
from megatron_pg.step.settings import LossSettings
from megatron_pg.step.weights import TokenFactors, token_factors, token_weights


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """What one step's forward-backward found, equal on every rank."""

    plan: StepPlan
    metrics: dict[str, float]  # by name, in the order of docs/metrics.md; one without a contribution is absent
    nonfinite: dict[str, list[int]]  # metric: the ranks whose contribution is NaN or inf
    forward_only: bool  # an evaluation step
    documents: StepDocuments | None = None  # what the step took; None without --docs-per-step


class PolicyGradientStep:
    """The policy-gradient loss for Megatron's schedules.

    Args:
        settings: from `LossSettings.from_args`, after `validate_args`.
        on_report: called with a `StepReport` after every forward-backward, on every rank.
        documents: takes the steps under `--docs-per-step`; None: a step is what the schedule asks for.
    """

    def __init__(
        self,
        settings: LossSettings,
        on_report: Callable[[StepReport], None] | None = None,
        documents: DocumentAccumulator | None = None,
    ):
        self.settings = settings
        self.documents = documents
        self._on_report = on_report or (lambda report: None)
        self._attached = False
        self._float32_layer: nn.Module | None = None  # the output layer that has another head in it
        self._contract: Contract | None = None  # of the step in progress
        self._local: LocalBatch | None = None  # of the forward in progress
        self._results: list[tuple[LocalBatch, Tensor, Tensor]] = []  # batch, metrics, non-finite tokens of each forward
        self._counts_positions = False  # mixture of experts: the router counts positions
        self._calls = 0  # of forward_backward, for messages
        self._has_warned = False  # of ids that may not be unique

    # --- the model ---

    def attach(self, model: Any) -> Any:
        """Compute the loss inside `model` (a GPTModel, before it is wrapped), where logits are not gathered over TP.

        Raises:
            ContractError: the model does not compute its loss in `compute_language_model_loss`.
        """
        if not callable(getattr(model, "compute_language_model_loss", None)):
            raise ContractError(
                f"the model provider gave a {type(model).__name__}, which has no compute_language_model_loss, so the loss has no place in "
                "it; return a megatron.core GPTModel, not yet wrapped"
            )
        self._attached = True
        if self.settings.float32_logits or self.settings.head_mode:  # a sampler's logits have the loss's precision
            self._float32_layer = model.output_layer
            compute_in_float32(model.output_layer, backward=self.settings.head_backward)
        deferred = None
        if self.settings.head_mode:
            deferred = DeferredHead(model.output_layer, lambda: self._local is not None)
        language_model_loss = model.compute_language_model_loss

        def compute_language_model_loss(labels: Tensor, logits: Tensor):
            # multi-token prediction brings its own labels
            if self._local is None or labels is not self._local.inputs.labels:
                return language_model_loss(labels, logits)
            grad_scale = self._contract.grad_scale
            if deferred:
                return microbatch_head_loss(deferred.take(), self._local, self.settings, grad_scale=grad_scale)
            rows = logits.reshape(-1, logits.shape[-1])  # [s, b, V/tp]: a view
            tp_group = _group_of_several(parallel_state.get_tensor_model_parallel_group())
            return microbatch_loss(rows, self._local, self.settings, tp_group, grad_scale=grad_scale)

        model.compute_language_model_loss = compute_language_model_loss
        return model

    def forward_step(self, data_iterator: Iterator[LocalBatch], model: nn.Module) -> tuple[object, Callable]:
        """Megatron's `forward_step_func`, over the micro-batches that `forward_backward` has planned."""
        local = next(data_iterator)
        if not isinstance(local, LocalBatch):
            raise ContractError(
                f"the data iterator gave a {type(local).__name__} that no plan has seen, so its denominators are unknown; "
                "run the schedule through PolicyGradientStep.forward_backward (megatron_pg.pretrain does)"
            )
        self._local = local
        try:
            output = model(
                local.inputs.tokens,
                local.inputs.position_ids,
                None,
                labels=local.inputs.labels,
                loss_mask=local.inputs.loss_mask,
                packed_seq_params=_packed_seq_params(local),
            )
        finally:
            self._local = None
        return output, partial(self._loss_func, local)

    def _loss_func(self, local: LocalBatch, output: MicrobatchLoss) -> tuple:
        if not isinstance(output, MicrobatchLoss):
            raise ContractError(
                f"the model returned a {type(output).__name__}, not the policy-gradient loss; call PolicyGradientStep.attach on "
                "the GPTModel before it is wrapped"
            )
        if torch.is_grad_enabled() and not output.total.requires_grad:
            raise ContractError(
                "loss does not require grad, so Megatron would skip this rank's backward and the others would wait; unfreeze a "
                "parameter of the model"
            )
        self._results.append((local, output.partial, output.nonfinite))
        return self._contract.outputs(output.total, self._local_count(local), output.policy)

    def _local_count(self, local: LocalBatch) -> int:
        return local.num_positions if self._counts_positions else len(local.trained)

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
        self._calls += 1
        with lost_peer_named(self._calls):
            return self._run(forward_backward_func, arguments)

    def _run(self, forward_backward_func: Callable, arguments: dict) -> list:
        model = arguments["model"]
        chunks = model if isinstance(model, list) else [model]
        self._counts_positions = bool(getattr(chunks[0].config, "num_moe_experts", None))
        plan, local, documents = self._plan(chunks, arguments)
        self._contract, self._results = self._contract_of(plan), []
        # every virtual pipeline chunk runs over the same micro-batches
        iterators = [iter(local) for _ in chunks]
        arguments["data_iterator"] = iterators if isinstance(arguments["data_iterator"], list) else iterators[0]
        found: list[Tensor] = []
        # with gradients on, the fused head adds to main_grad in the forward
        trains = torch.is_grad_enabled() and not arguments.get("forward_only")
        with self._checked_before_finalize(chunks[0].config, found), torch.set_grad_enabled(trains):
            losses = forward_backward_func(**arguments)
        rows = found[0] if found else self._gather_and_check()
        metrics = self.settings.metrics
        report = StepReport(
            plan=plan,
            metrics=metrics.finish(metrics.combine(rows).tolist(), plan) | (asdict(documents) if documents else {}),
            nonfinite=metrics.nonfinite(rows.tolist()),
            forward_only=bool(arguments.get("forward_only")),
            documents=documents,
        )
        self._on_report(report)
        return losses

    @contextmanager
    def _checked_before_finalize(self, config: Any, found: list[Tensor]) -> Iterator[None]:
        """Check before gradients are reduced: Megatron's own NaN check stops the one rank that sees it."""
        finalize = config.finalize_model_grads_func

        def check_and_finalize(*positional: object, **keywords: object) -> None:
            found.append(self._gather_and_check())
            finalize(*positional, **keywords)

        if finalize is not None:
            config.finalize_model_grads_func = check_and_finalize
        try:
            yield
        finally:
            config.finalize_model_grads_func = finalize

    def _plan(self, chunks: list[Any], arguments: dict) -> tuple[StepPlan, list[LocalBatch], StepDocuments | None]:
        """The step's plan and this rank's planned micro-batches; a mistake on any rank is raised on every rank."""
        try:
            batches, documents, error = self._fetch(chunks, arguments)
        except EndOfDocuments:
            agree([], None, None)  # unless a peer goes on
            raise
        table: LocalTable | None = None
        factors: list[TokenFactors] = []
        if error is None:
            try:
                check_batches(batches, chunks[0], arguments, self.settings.vocab_size)
                factors = [token_factors(batch, self.settings) for batch in batches]
                kept = [n for batch, own in zip(batches, factors, strict=True) for n in own.kept_per_sample(batch)]
                group = parallel_state.get_data_parallel_group()
                table = local_table_of(batches, self.settings.plan_rule, group, kept)
            except Exception as failure:  # travels to the other ranks, so that all of them stop
                error = failure
        undivided = () if documents is None else self._units
        plan = self._exchange(table, replace(self.settings.plan_rule, undivided=undivided), error, batches)
        return plan, self._slice(plan, batches, factors, next(chunks[0].parameters()).device), documents

    def _exchange(
        self, table: LocalTable | None, rule: PlanRule, error: Exception | None, batches: Sequence[PackedBatch]
    ) -> StepPlan:
        """The plan from every rank's table, or every rank's error."""
        plan, failure = None, None
        try:
            plan = plan_from_table(table, rule, error=error, group=parallel_state.get_data_parallel_group())
        except StepPlanError as raised:
            failure = raised
        agree(batches, plan, failure)
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
            check_model(chunks, self.settings, forward_only=forward_only, is_attached=self._attached)
            if self._float32_layer is not None:
                check_layer(self._float32_layer)
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
        group = parallel_state.get_data_parallel_group()
        return self.documents.take(source, group=group, error=error, undivided=self._units, schedulable=schedulable)

    @property
    def _units(self) -> tuple[str, ...]:
        """What a step of documents must hold whole, because a denominator counts it."""
        return ("rollout_id", "prompt_id") if needs_prompt_ids(self.settings.plan_rule.aggregation) else ("rollout_id",)

    def _contract_of(self, plan: StepPlan) -> Contract:
        # the router of a mixture of experts scales its losses by the positions it saw, so Q must count those
        count = plan.num_positions if self._counts_positions else plan.num_tokens
        if self.settings.per_token:
            check_count(count)
        return Contract(
            per_token=self.settings.per_token,
            num_microbatches=plan.num_microbatches,
            data_parallel_size=parallel_state.get_data_parallel_world_size(),
            context_parallel_size=parallel_state.get_context_parallel_world_size(),
            count=count,
        )

    def _slice(
        self, plan: StepPlan, batches: Sequence[PackedBatch], factors: Sequence[TokenFactors], device: torch.device
    ) -> list[LocalBatch]:
        local, first = [], 0
        for batch, own in zip(batches, factors, strict=True):
            sliced = slice_batch(
                batch,
                token_weights(batch, plan, first, factors=own, settings=self.settings),
                cp_rank=parallel_state.get_context_parallel_rank(),
                cp_size=parallel_state.get_context_parallel_world_size(),
                device=device,
                sequences=self.settings.terms.reads_sequences,
                cp_group=_group_of_several(parallel_state.get_context_parallel_group()),
            )
            local.append(sliced)
            first += len(batch.samples)
        return local

    def _gather_and_check(self) -> Tensor:
        """The step's one all-gather and one host read: checks, and [world, width] partial results of the metrics."""
        device = device_of(None)
        rows = all_gather_rows(torch.cat([self._check_values(device), self._partial_result(device)]))
        checks = rows[:, :3].tolist()
        self._raise_nonfinite(checks)
        returned = sum(row[2] for row in checks)
        if self.settings.per_token and returned != self._contract.count:
            raise ContractError(
                f"returned token counts sum to {returned:.0f}, the plan has {self._contract.count}, so Megatron would divide by the "
                "wrong number; do not wrap or replace the forward step's loss function"
            )
        return rows[:, 3:]

    def _check_values(self, device: torch.device) -> Tensor:
        """[3]: trained tokens whose loss is not finite, code of the first one, returned counts."""
        if not self._results:
            return torch.tensor([0.0, torch.inf, 0.0], dtype=torch.float64, device=device)
        found = torch.stack([nonfinite for _, _, nonfinite in self._results])  # [K, 2]
        microbatch = torch.arange(len(found), dtype=torch.float64, device=device)
        counted = sum(self._local_count(local) for local, _, _ in self._results) if _reports() else 0
        returned = torch.full((), float(counted), dtype=torch.float64, device=device)
        # the code of a token is exact in float64: fewer than 2^21 micro-batches of fewer than 2^32 tokens
        return torch.stack([found[:, 0].sum(), (found[:, 1] + microbatch * 2.0**32).amin(), returned])

    def _partial_result(self, device: torch.device) -> Tensor:
        metrics = self.settings.metrics
        if not self._results or not _reports():
            return torch.tensor(metrics.identity(), dtype=torch.float64, device=device)
        return metrics.combine(torch.stack([metrics_of for _, metrics_of, _ in self._results]))

    def _raise_nonfinite(self, checks: list[list[float]]) -> None:
        bad = [rank for rank, (count, _, _) in enumerate(checks) if count > 0]
        if not bad:
            return
        where = ""
        if torch.distributed.get_rank() == bad[0]:
            microbatch, flat = divmod(int(checks[bad[0]][1]), 2**32)
            where = self._results[microbatch][0].locate(flat)
        where = broadcast_text(where, bad[0])
        raise NonFiniteLossError(
            f"non-finite loss at rank {bad[0]}, {where} ({checks[bad[0]][0]:.0f} trained tokens on that rank, {len(bad)} ranks), "
            "so the step means nothing and the optimizer has not moved. Look at that sample's logits and log-probabilities."
        )


def _packed_seq_params(local: LocalBatch) -> PackedSeqParams | None:
    boundaries = local.inputs.boundaries
    if boundaries is None:
        return None
    names = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
    longest = dict.fromkeys(("max_seqlen_q", "max_seqlen_kv"), max(local.whole.padded_lengths))
    return PackedSeqParams(qkv_format="thd", **dict.fromkeys(names, boundaries), **longest)


def _group_of_several(group: torch.distributed.ProcessGroup) -> torch.distributed.ProcessGroup | None:
    return group if group.size() > 1 else None


def _reports() -> bool:
    """Whether this rank's sums count: tensor-parallel peers hold copies."""
    return parallel_state.get_tensor_model_parallel_rank() == 0
