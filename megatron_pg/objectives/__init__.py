"""Objectives: the loss of one token. No average over tokens, no selection of tokens and no collective inside.

A user's own has the same signature as ours, `fn(tokens, parameters) -> [T]`; docs/extending.md shows one.
"""

from megatron_pg.objectives.interface.objective import Objective, objective_of
from megatron_pg.objectives.interface.tokens import MAX_LOG_RATIO, Parameters, Tokens

__all__ = ["MAX_LOG_RATIO", "Objective", "Parameters", "Tokens", "objective_of"]
