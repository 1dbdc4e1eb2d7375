"""A planned optimizer step, from this rank's micro-batches to their slices.

    token_factors    checks, the user's reducer and the correction of every micro-batch
    select_tokens    the tokens that a step-wide correction selects (collectives)
    local_table_of   what this rank contributes to the counts of the step
    plan_from_table  the metadata exchange and every denominator (collectives)
    token_weights    the weight of every response token
    slice_batch      what this rank computes on

Megatron's step and the hosts plan through `PlannedStep.of`. An error on one rank is raised on every rank.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import LocalBatch, PackedBatch, slice_batch
from megatron_pg.plan.plan import StepPlan, plan_from_table
from megatron_pg.plan.sampling_masks import without_missing
from megatron_pg.plan.selection import select_tokens
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import LocalTable, PlanRule, joined, local_table_of
from megatron_pg.plan.weights import TokenFactors, depth_weights, token_ages, token_factors, token_weights


@dataclass(frozen=True, kw_only=True, eq=False)
class PlannedStep:
    """The plan of an optimizer step, and what it adds to this rank's micro-batches."""

    settings: LossSettings
    plan: StepPlan
    table: LocalTable | None  # what this rank has contributed to the counts
    batches: Sequence[PackedBatch]
    starts: Sequence[int]  # of each micro-batch, the index of its first sample among all samples of this rank
    factors: Sequence[TokenFactors]  # of each micro-batch: what is known of its tokens without their weights
    fields: Sequence[dict[str, Tensor]]  # of each micro-batch, from `token_weights`

    @classmethod
    def of(
        cls,
        batches_of: Callable[[], Sequence[PackedBatch]],
        settings: LossSettings,
        *,
        group: ProcessGroup | None,
        rule: PlanRule | None = None,
        check: Callable[[Sequence[PackedBatch]], None] = lambda batches: None,
        number: int | None = None,
        earlier: Sequence[LocalTable] | None = None,
    ) -> "PlannedStep":
        """Plan a step, by one exchange over `group`: every rank that contributes its own samples; None: this process.

        `batches_of` makes this rank's micro-batches, and `check` raises where they are not valid for the caller. An
        open step gives `number`, as in `plan_from_table`, or the tables `earlier` of micro-batches that have run.

        Raises:
            StepPlanError: on every rank of `group`, for an error of any kind on any of them.
        """
        rule, batches = rule or settings.plan_rule, list[PackedBatch]()
        factors, ages = list[TokenFactors](), list[dict[str, Tensor]]()
        table: LocalTable | None = None
        error: Exception | None = None
        try:
            batches = [without_missing(batch, settings) for batch in batches_of()]
            check(batches)
            if settings.counts_after_forward and rule.expected is None:
                raise ValueError(
                    f"--pg-denominator kept with --pg-correction {settings.correction.name} counts what the forward "
                    "keeps, so it needs an open step. Use PolicyGradientStep.open_step, or --pg-denominator live."
                )
            factors = [token_factors(batch, settings) for batch in batches]
            ages = [token_ages(batch, rule.weight_version, settings) for batch in batches]
        except Exception as failure:  # the exchange raises it on every rank
            error = failure
        factors, selected = select_tokens(batches, factors, settings, group, error)
        try:
            if error is None:
                own = local_table_of(batches, rule, group, [of_batch.kept for of_batch in factors])
                table = replace(own if earlier is None else joined([*earlier, own]), selection=selected)
        except Exception as failure:  # as above
            error = failure
        plan = plan_from_table(table, rule, error=error, group=group, number=number)
        first = sum(len(each.keys) for each in earlier or ())
        starts = list(accumulate((len(batch.samples) for batch in batches), initial=first))[: len(batches)]
        fields = [
            token_weights(batch, plan, start, factors=of_batch, settings=settings) | own
            for batch, start, of_batch, own in zip(batches, starts, factors, ages, strict=True)
        ]
        return cls(
            settings=settings, plan=plan, table=table, batches=batches, starts=starts, factors=factors, fields=fields
        )

    def slices(
        self, group_of: Callable[[PackedBatch], ProcessGroup | None], device: torch.device | str = "cpu"
    ) -> list[LocalBatch]:
        """This rank's slice of every micro-batch; the context-parallel group `group_of` it splits it (None: whole)."""
        return [
            self._slice(
                batch, fields, group_of(batch), device, depth_weights(batch, self.plan, start, settings=self.settings)
            )
            for batch, fields, start in zip(self.batches, self.fields, self.starts, strict=True)
        ]

    def slice(
        self, batch: PackedBatch, members: Sequence[int], group: ProcessGroup | None, device: torch.device | str = "cpu"
    ) -> LocalBatch:
        """This rank's slice of a micro-batch packed from samples of the step, which was planned as one micro-batch.

        `members` are the indices of its samples among the step's; the context-parallel `group` splits it (None: whole).
        """
        fields = {name: torch.cat([parts[i] for i in (-1, *members)]) for name, parts in self._by_sample.items()}
        return self._slice(batch, fields, group, device)

    @cached_property
    def _by_sample(self) -> dict[str, list[Tensor]]:
        """Each field of the only micro-batch by sample; the last entry is empty."""
        (batch,), (fields,) = self.batches, self.fields
        lengths = [sample.response_length for sample in batch.samples]
        return {name: [*values.split(lengths), values[:0]] for name, values in fields.items()}

    def _slice(
        self,
        batch: PackedBatch,
        fields: dict[str, Tensor],
        group: ProcessGroup | None,
        device: torch.device | str,
        weights_of_depths: Sequence[Tensor] = (),
    ) -> LocalBatch:
        rank, size = (0, 1) if group is None else (group.rank(), group.size())
        return slice_batch(
            batch,
            fields,
            cp_rank=rank,
            cp_size=size,
            device=device,
            sequences=self.settings.sequence_level if self.settings.terms.reads_sequences else None,
            cp_group=group if size > 1 else None,
            depth_weights=weights_of_depths,
        )
