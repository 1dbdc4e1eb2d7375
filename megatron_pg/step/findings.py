"""The diagnostics of a step's losses, exchanged once: checks, and the step's exact metrics."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_pg.metrics import Reduction
from megatron_pg.plan.collectives import all_gather_rows, broadcast_text, device_of
from megatron_pg.plan.documents import StepDocuments
from megatron_pg.plan.errors import NonFiniteLossError, ScheduleError
from megatron_pg.plan.plan import StepPlan
from megatron_pg.step.loss import Diagnostics

# of this rank's micro-batches, in the order of their forwards; an open step has its own keys, with `locate`
DiagnosticsOfStep = Mapping[Any, Diagnostics]
_CHECKS = 7  # values before the metrics in what is gathered
_UNFIT_HEADS = {  # by column of the checks
    3: "--pg-fused-head takes the hidden states of the output layer, and the model changes the layer's output before "
    "the loss {ranks}: an unknown softcap, a scale or a forward hook, which the fused head leaves out. Remove "
    "--pg-fused-head; --fp32-lm-head supports it.",
    4: "--fp32-lm-head and --pg-fused-head replace the product of the output layer, and the model made its logits "
    "without that product {ranks}, for example in a layer whose forward does not call _forward_impl. Remove the flag, "
    "or build the model with Megatron's ColumnParallelLinear.",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFindings:
    """The diagnostics of every rank."""

    rows: Tensor  # [world, width] float64, partial results of the metrics
    data_ranks: Tensor  # [world] int64, the data-parallel rank of each
    returned: int  # sum of the counts that the ranks returned to Megatron


@dataclass(frozen=True, slots=True, kw_only=True)
class StepReport:
    """The result of one step's forward-backward, equal on every rank."""

    plan: StepPlan
    metrics: dict[str, float]  # by name, in the order of docs/metrics.md; without those that have no contribution
    nonfinite: dict[str, list[int]]  # metric: the ranks with a NaN or inf contribution
    forward_only: bool = False  # an evaluation step
    documents: StepDocuments | None = None  # None without --docs-per-step


def report_of(
    plan: StepPlan,
    metrics: Reduction,
    findings: StepFindings,
    *,
    forward_only: bool = False,
    documents: StepDocuments | None = None,
) -> StepReport:
    """The report from every rank's partial results."""
    rows = findings.rows
    values = metrics.finish(metrics.combine(rows).tolist(), plan, metrics.by_rank(rows, findings.data_ranks))
    return StepReport(
        plan=plan,
        metrics=values | (asdict(documents) if documents else {}),
        nonfinite=metrics.nonfinite(rows.tolist()),
        forward_only=forward_only,
        documents=documents,
    )


def gather_found(
    diagnostics: DiagnosticsOfStep, metrics: Reduction, *, reports: bool, data_rank: int = 0, returned: int = 0
) -> StepFindings:
    """Every rank's partial results of the metrics: one all-gather, one host read.

    Every rank of the default group must call, before the optimizer moves, also pipeline stages without a loss. The sums
    of a rank that holds copies do not count: it does not report. `data_rank` is this rank's number among those that
    contribute their own samples, `returned` the sum of the counts that it returned to Megatron.

    Raises:
        NonFiniteLossError: on every rank, for a loss of any of them.
        ScheduleError: on every rank; a model changed the output of the output layer, or made logits without the head.
    """
    device = device_of(None)
    counts = torch.tensor([returned, data_rank], dtype=torch.float64, device=device)
    partial = torch.tensor(metrics.identity(), dtype=torch.float64, device=device)
    if diagnostics and reports:
        partial = metrics.combine(torch.stack([one.partial for one in diagnostics.values()]))
    rows = all_gather_rows(torch.cat([_checks(diagnostics, device), counts, partial]))
    checks = rows[:, :_CHECKS].tolist()
    for column, text in _UNFIT_HEADS.items():
        if bad := [rank for rank, row in enumerate(checks) if row[column] > 0]:
            raise ScheduleError(text.format(ranks=f"(rank {bad[0]}, {len(bad)} ranks)"))
    _raise_nonfinite(checks, diagnostics)
    return StepFindings(
        rows=rows[:, _CHECKS:], data_ranks=rows[:, _CHECKS - 1].long(), returned=round(sum(row[5] for row in checks))
    )


@contextmanager
def before_finalize(config: Any, check: Callable[[], object]) -> Iterator[None]:
    """Call `check` before gradients are reduced, where Megatron's own NaN check would stop one rank only."""
    finalize = config.finalize_model_grads_func

    def check_and_finalize(*positional: object, **keywords: object) -> None:
        check()
        finalize(*positional, **keywords)

    if finalize is not None:
        config.finalize_model_grads_func = check_and_finalize
    try:
        yield
    finally:
        config.finalize_model_grads_func = finalize


def _checks(diagnostics: DiagnosticsOfStep, device: torch.device) -> Tensor:
    """[5]: non-finite losses of tokens, code of the first, other non-finite losses, changed outputs, bypassed heads."""
    if not diagnostics:
        return torch.tensor([0.0, torch.inf, 0.0, 0.0, 0.0], dtype=torch.float64, device=device)
    bad = torch.stack([one.nonfinite for one in diagnostics.values()])  # [K, 3]
    microbatch = torch.arange(len(bad), dtype=torch.float64, device=device)
    counts = sum(one.is_changed for one in diagnostics.values()), sum(one.is_bypassed for one in diagnostics.values())
    changed, bypassed = (torch.as_tensor(count, dtype=torch.float64, device=device) for count in counts)
    # the code of a token is exact in float64: fewer than 2^21 micro-batches of fewer than 2^32 tokens
    return torch.stack([bad[:, 0].sum(), (bad[:, 1] + microbatch * 2.0**32).amin(), bad[:, 2].sum(), changed, bypassed])


def _raise_nonfinite(checks: list[list[float]], diagnostics: DiagnosticsOfStep) -> None:
    bad, further = ([rank for rank, row in enumerate(checks) if row[column] > 0] for column in (0, 2))
    if not bad and further:
        raise NonFiniteLossError(
            f"non-finite loss of multi-token prediction at rank {further[0]} ({len(further)} ranks), while the policy "
            "loss is finite. The optimizer has not moved. Check the weights of the mtp layers."
        )
    if not bad:
        return
    where = ""
    if torch.distributed.get_rank() == bad[0]:
        microbatch, flat = divmod(int(checks[bad[0]][1]), 2**32)
        where = list(diagnostics)[microbatch].locate(flat)
    where = broadcast_text(where, bad[0])
    raise NonFiniteLossError(
        f"non-finite loss at rank {bad[0]}, {where} ({checks[bad[0]][0]:.0f} trained tokens on that rank, {len(bad)} "
        "ranks). The optimizer has not moved. Check that sample's logits and log-probabilities. With "
        "--pg-fused-head scaled_exp, a log-probability below -103 can be NaN; forward computes it."
    )
