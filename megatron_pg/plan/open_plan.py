"""The plan of an open step: its rollouts are trained before the numbers of the whole step are known.

A weight is 1/(N·m): N counts the rollouts, prompts or tokens of the step, m belongs to the token's own rollout or
prompt group, which is added as a whole. So tokens have the weights 1/(c·m) when they are added, with a guess c of N,
and the sum of their gradients is multiplied by c/N when N is known. A loss with a second number of the step in its
weights is refused, or waits for `close`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.batch import PackedBatch, samples_of
from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.declarations.loss_terms import AS_POLICY, OBJECTIVE, LossTerm
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings
from megatron_pg.plan.table import KEPT, LocalTable
from megatron_pg.rollouts.fields import Id
from megatron_pg.rollouts.printable import shorten
from megatron_pg.rollouts.sample import Sample

Check = Callable[[Sequence[PackedBatch]], None]


class OpenPlan:
    """This rank's part of an open step; `expected` is c. All arguments are the same on every rank.

    Raises:
        ScheduleError: the loss has denominators with a second number that is not known before the step ends.
    """

    def __init__(self, settings: LossSettings, expected: int, weight_version: int | None = None):
        rule = settings.plan_rule
        if isinstance(expected, bool) or not isinstance(expected, int) or expected < 1:
            raise ScheduleError(
                f"expected={expected!r} is not a whole number of {_unit(rule.aggregation)}s. Give about as many as a "
                "step has; the result does not depend on it."
            )
        _refuse_second_numbers(settings)
        self.rule = replace(rule, expected=expected, undivided=rule.units, weight_version=weight_version)
        self.settings, self.expected = settings, expected
        self._tables: list[LocalTable] = []  # of the adds
        self._seen: set[tuple[str, Id | None]] = set()  # the ids of their rollouts and counted prompts

    def add(self, batches: Sequence[PackedBatch], check: Check) -> PlannedStep:
        """Plan micro-batches of whole rollouts, and with a mean over prompts of whole groups, with 1/(c·m).

        Raises:
            StepPlanError: they cannot be planned, or need a number of the whole step.
        """
        planned = PlannedStep.of(
            lambda: batches,
            self.settings,
            group=None,
            rule=self.rule,
            check=lambda found: self._check(found, check, self._check_added),
            number=self.expected,
        )
        self._tables.append(replace(cast(LocalTable, planned.table), samples=None))
        self._seen |= self._units_of(samples_of(batches))
        return planned

    def close(self, rest: Callable[[], Sequence[PackedBatch]], check: Check, group: ProcessGroup | None) -> PlannedStep:
        """Plan the step by one exchange over `group`; returns this rank's `rest` with the weights of the whole step.

        Raises:
            StepPlanError: on every rank of `group`.
        """
        return PlannedStep.of(
            rest,
            self.settings,
            group=group,
            rule=self.rule,
            check=lambda found: self._check(found, check, self._check_rest),
            earlier=self._tables,
        )

    @property
    def sizes(self) -> list[int]:
        """Samples of each add."""
        return [len(table.keys) for table in self._tables]

    def count_kept(self, counts: Tensor) -> None:
        """Set the counted tokens of the added samples, [S] int64, which are known after their forwards."""
        for table, part in zip(self._tables, counts.split(self.sizes), strict=True):
            table.tokens[:, KEPT] = part

    def _units_of(self, samples: Sequence[Sample]) -> set[tuple[str, Id | None]]:
        return {(kind, getattr(sample, kind)) for sample in samples for kind in self.rule.undivided}

    def _check(self, batches: Sequence[PackedBatch], check: Check, check_samples: Callable) -> None:
        check(batches)
        samples = samples_of(batches)
        if without := [sample for sample in samples if sample.rollout_id is None]:
            raise ScheduleError(
                f"sample {without[0].sample_id} has no rollout_id, without which an open step cannot notice that a "
                "rollout is in two adds. Give every sample one."
            )
        if again := self._seen & self._units_of(samples):
            kind, name = min(again, key=repr)
            raise ScheduleError(
                f"{kind} {shorten(name)} has samples in two adds of an open step, so its number of trained tokens was "
                "not known in the first. Add all its samples together."
            )
        check_samples(samples)

    def _check_added(self, samples: Sequence[Sample]) -> None:
        others = [name for name in self.settings.trained if name not in self.settings.objective_tokens]
        if found := [(s, name) for s in samples for name in others if s.mask_of(name) is not None]:
            raise ScheduleError(
                f"sample {found[0][0].sample_id} has tokens of the loss term {found[0][1]}, whose denominators are "
                "known when the open step closes. Give its micro-batch to close()."
            )
        if self.settings.counts_after_forward and _unit(self.rule.aggregation) == "rollout":
            _check_rejected_whole(samples)

    def _check_rest(self, samples: Sequence[Sample]) -> None:
        rollouts = [sample for sample in samples if sample.term in self.settings.objective_tokens]
        if self.settings.counts_after_forward and rollouts:
            raise ScheduleError(
                f"close() has rollouts in its micro-batches (sample {rollouts[0].sample_id}), and --pg-denominator "
                "kept counts their tokens after the forward. Add them before."
            )


def _check_rejected_whole(samples: Sequence[Sample]) -> None:
    """Refuse rollouts of which a correction may reject a part: their weights would be known after the forward only."""
    seen = set()
    for sample in samples:
        signs = cast(Tensor, sample.advantages)[sample.loss_mask] < 0
        if sample.rollout_id in seen or (signs.any() and not signs.all()):
            raise ScheduleError(
                f"a part of rollout {shorten(sample.rollout_id)} may be rejected (several samples, or advantages of "
                "both signs), and --pg-denominator kept counts its remaining tokens. Use token_mean."
            )
        seen.add(sample.rollout_id)


def _unit(aggregation: str) -> str:
    return AGGREGATIONS[aggregation].unit


def _refuse_second_numbers(settings: LossSettings) -> None:
    """Refuse what has another number of the step in its weights than the objective, or chooses tokens of the step."""
    rule, selection = settings.plan_rule, settings.correction.declared.selection
    unit = _unit(rule.aggregation)
    has_other_depths = settings.mtp_aggregation != AS_POLICY or unit == "token" or rule.live_only or rule.others
    counts_groups = settings.counts_after_forward and unit == "prompt"
    refused = {
        f"--pg-correction {settings.correction.name}, which selects tokens of the whole step": selection,
        "a loss without the objective (--pg-term rl:rl,weight=0), whose number it would be": not rule.has_objective,
        "--mtp-num-layers, unless --pg-mtp-aggregation policy counts the same rollouts or prompts as the objective and "
        "no other tokens are trained": settings.mtp_depths and has_other_depths,
        f"--loss-aggregation {rule.aggregation}, whose turns it does not count": is_by_turn(rule.aggregation),
        "--pg-weight-denominator weights, whose sums it does not count": rule.sums_weights,
        "--pg-denominator varied, which leaves groups out after they are counted": rule.denominator == "varied",
        "--pg-denominator kept with prompt_mean, whose groups count the tokens that the forward keeps": counts_groups,
        **{
            f"{t.flag} with aggregation {t.aggregation}, which counts something else than the objective": True
            for t in rule.terms[rule.has_objective :]
            if _has_second_number(t, settings)
        },
    }
    if names := [name for name, is_on in refused.items() if is_on]:
        raise ScheduleError(
            f"an open step multiplies all gradients by one number when it ends, so it cannot have {names[0]}. Use "
            "forward_backward when all rollouts have arrived, or change the flag."
        )


def _has_second_number(term: LossTerm, settings: LossSettings) -> bool:
    """Whether a term over the objective's tokens has another N. Tokens of other terms are not added, but wait."""
    rule = settings.plan_rule
    if term.tokens != OBJECTIVE.tokens:
        return False
    if term.aggregation == AS_POLICY:  # its tokens of a rollout that the model rejects would have no weight
        return settings.counts_after_forward and _unit(rule.aggregation) == "rollout"
    return _unit(str(term.aggregation)) != _unit(rule.aggregation) or rule.denominator == "kept"
