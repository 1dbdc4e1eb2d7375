"""Exactly normalised policy-gradient losses for Megatron-LM.

Names are imported when they are first used: reading flags needs neither torch nor Megatron, and only
`megatron_pg.step.forward_step` and `megatron_pg.pretrain` need Megatron.
"""

from importlib import import_module

__version__ = "0.1.0"

_HOMES = {
    "Documents": "step.documents",
    "EndOfDocuments": "step.documents",
    "ArgumentError": "args",
    "ArgumentNotice": "args",
    "ArgumentWarning": "args",
    "add_arguments": "args",
    "validate_args": "args",
    "PackedBatch": "batch.pack",
    "cut_steps": "batch.pack",
    "pack": "batch.pack",
    "StepPlan": "step.plan",
    "StepPlanError": "step.plan",
    "plan_step": "step.plan",
    "RolloutFileError": "rollouts.lines",
    "RolloutWriter": "rollouts.sample",
    "Sample": "rollouts.sample",
    "read_rollouts": "rollouts.sample",
}

__all__ = ["__version__", *sorted(_HOMES)]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'megatron_pg' has no attribute {name!r}")
    return getattr(import_module(f"megatron_pg.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
