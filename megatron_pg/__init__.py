"""Exactly normalised policy-gradient losses for Megatron-LM.

Names are imported when they are first used: reading flags needs neither torch nor Megatron, and only
`PolicyGradientStep` and `megatron_pg.pretrain` need Megatron.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_pg.args import ArgumentError, ArgumentNotice, ArgumentWarning, add_arguments, validate_args
    from megatron_pg.batch import PackedBatch, cut_steps, pack
    from megatron_pg.rollouts.file import RolloutWriter, read_rollouts
    from megatron_pg.rollouts.lines import RolloutFileError
    from megatron_pg.rollouts.sample import Sample
    from megatron_pg.step.contract import Contract
    from megatron_pg.step.documents import (
        DocumentAccumulator,
        Documents,
        EndOfDocuments,
        Packing,
        Position,
        StepRule,
    )
    from megatron_pg.step.errors import StepPlanError
    from megatron_pg.step.forward_step import PolicyGradientStep
    from megatron_pg.step.plan import StepPlan, plan_step
    from megatron_pg.step.settings import LossSettings

__version__ = "0.1.0"

_HOMES = {
    "ArgumentError": "args",
    "ArgumentNotice": "args",
    "ArgumentWarning": "args",
    "Contract": "step.contract",
    "DocumentAccumulator": "step.documents",
    "Documents": "step.documents",
    "EndOfDocuments": "step.documents",
    "LossSettings": "step.settings",
    "PackedBatch": "batch",
    "Packing": "step.documents",
    "PolicyGradientStep": "step.forward_step",
    "Position": "step.documents",
    "RolloutFileError": "rollouts.lines",
    "RolloutWriter": "rollouts.file",
    "Sample": "rollouts.sample",
    "StepPlan": "step.plan",
    "StepPlanError": "step.errors",
    "StepRule": "step.documents",
    "add_arguments": "args",
    "cut_steps": "batch",
    "pack": "batch",
    "plan_step": "step.plan",
    "read_rollouts": "rollouts.file",
    "validate_args": "args",
}

__all__ = [
    "ArgumentError",
    "ArgumentNotice",
    "ArgumentWarning",
    "Contract",
    "DocumentAccumulator",
    "Documents",
    "EndOfDocuments",
    "LossSettings",
    "PackedBatch",
    "Packing",
    "PolicyGradientStep",
    "Position",
    "RolloutFileError",
    "RolloutWriter",
    "Sample",
    "StepPlan",
    "StepPlanError",
    "StepRule",
    "__version__",
    "add_arguments",
    "cut_steps",
    "pack",
    "plan_step",
    "read_rollouts",
    "validate_args",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_pg' has no attribute {name!r}")
    return getattr(import_module(f"megatron_pg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
