"""Exactly normalized policy-gradient losses for Megatron-LM.

Names are imported when they are first used: reading flags needs neither torch nor Megatron, and only
`PolicyGradientStep` and `megatron_pg.pretrain` need Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_pg.args import ArgumentError as ArgumentError
    from megatron_pg.args import ArgumentNotice as ArgumentNotice
    from megatron_pg.args import ArgumentWarning as ArgumentWarning
    from megatron_pg.args import add_arguments as add_arguments
    from megatron_pg.args import validate_args as validate_args
    from megatron_pg.batch import ContextRanks as ContextRanks
    from megatron_pg.batch import PackedBatch as PackedBatch
    from megatron_pg.batch import cut_microbatches as cut_microbatches
    from megatron_pg.batch import cut_over_ranks as cut_over_ranks
    from megatron_pg.batch import cut_steps as cut_steps
    from megatron_pg.batch import read_steps as read_steps
    from megatron_pg.batch.pack import pack as pack  # a static reader takes batch.pack for the module
    from megatron_pg.declarations.loss_terms import LossTerm as LossTerm
    from megatron_pg.flags.banner import describe as describe
    from megatron_pg.lm_head.value_head import add_value_head as add_value_head
    from megatron_pg.metrics.file import MetricsFile as MetricsFile
    from megatron_pg.metrics.reporting import CallbackError as CallbackError
    from megatron_pg.plan.documents import DocumentAccumulator as DocumentAccumulator
    from megatron_pg.plan.documents import Documents as Documents
    from megatron_pg.plan.documents import EndOfDocuments as EndOfDocuments
    from megatron_pg.plan.documents import Packing as Packing
    from megatron_pg.plan.documents import Position as Position
    from megatron_pg.plan.documents import StepRule as StepRule
    from megatron_pg.plan.errors import LostPeerError as LostPeerError
    from megatron_pg.plan.errors import NonFiniteLossError as NonFiniteLossError
    from megatron_pg.plan.errors import ScheduleError as ScheduleError
    from megatron_pg.plan.errors import StepPlanError as StepPlanError
    from megatron_pg.plan.plan import StepPlan as StepPlan
    from megatron_pg.plan.plan import plan_step as plan_step
    from megatron_pg.plan.settings import LossSettings as LossSettings
    from megatron_pg.plan.shared_documents import SharedDocumentAccumulator as SharedDocumentAccumulator
    from megatron_pg.plan.whitening import whiten_advantages as whiten_advantages
    from megatron_pg.rollouts.advantages import Advantages as Advantages
    from megatron_pg.rollouts.advantages import Gae as Gae
    from megatron_pg.rollouts.advantages import gae as gae
    from megatron_pg.rollouts.advantages import group_advantages as group_advantages
    from megatron_pg.rollouts.file import RolloutWriter as RolloutWriter
    from megatron_pg.rollouts.file import read_rollouts as read_rollouts
    from megatron_pg.rollouts.lines import RolloutFileError as RolloutFileError
    from megatron_pg.rollouts.lines import RolloutWriteError as RolloutWriteError
    from megatron_pg.rollouts.sample import Sample as Sample
    from megatron_pg.step.experts import RoutingReplay as RoutingReplay
    from megatron_pg.step.findings import StepReport as StepReport
    from megatron_pg.step.forward_step import PolicyGradientStep as PolicyGradientStep
    from megatron_pg.step.log import StepLog as StepLog
    from megatron_pg.step.log import step_record as step_record
    from megatron_pg.step.loss_scaling import LossScaling as LossScaling
    from megatron_pg.step.open_step import OpenStep as OpenStep

__version__ = "0.3.0"

_NAMES = {
    "args": "ArgumentError ArgumentNotice ArgumentWarning add_arguments validate_args",
    "batch": "ContextRanks PackedBatch cut_microbatches cut_over_ranks cut_steps pack read_steps",
    "declarations.loss_terms": "LossTerm",
    "flags.banner": "describe",
    "metrics.file": "MetricsFile",
    "metrics.reporting": "CallbackError",
    "plan.documents": "DocumentAccumulator Documents EndOfDocuments Packing Position StepRule",
    "plan.errors": "LostPeerError NonFiniteLossError ScheduleError StepPlanError",
    "plan.plan": "StepPlan plan_step",
    "plan.settings": "LossSettings",
    "plan.shared_documents": "SharedDocumentAccumulator",
    "plan.whitening": "whiten_advantages",
    "rollouts.advantages": "Advantages Gae gae group_advantages",
    "rollouts.file": "RolloutWriter read_rollouts",
    "rollouts.lines": "RolloutFileError RolloutWriteError",
    "rollouts.sample": "Sample",
    "lm_head.value_head": "add_value_head",
    "step.experts": "RoutingReplay",
    "step.findings": "StepReport",
    "step.forward_step": "PolicyGradientStep",
    "step.log": "StepLog step_record",
    "step.loss_scaling": "LossScaling",
    "step.open_step": "OpenStep",
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names.split()}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_pg' has no attribute {name!r}")
    return getattr(import_module(f"megatron_pg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
