"""An objective with its numbers, as the loss and the metrics take it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_pg.declarations.declaration import load
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.objectives.interface.row import Row
from megatron_pg.objectives.interface.tokens import Parameters, Tokens

_KIND = ("reads_sequences", "has_one_loss_per_sequence", "has_one_advantage_per_sequence")  # as declared


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective and its numbers. The same on every rank."""

    name: str
    loss: Callable[[Tokens, Parameters], Tensor]  # [T]
    outside: Callable[[Tokens, Parameters], tuple[Tensor, Tensor]] | None = None
    """[T] bool each, above and below its bounds; None: it has none."""
    reports: Callable[[Tokens, Parameters], dict[str, Tensor]] | None = None
    """[T] each, metrics of its own by name; None: it has none."""
    reported: tuple[str, ...] = ()  # their names
    reads_sequences: bool = False
    has_one_loss_per_sequence: bool = False
    has_one_advantage_per_sequence: bool = False
    averaged: Callable[[Tokens, Parameters], Tensor] | None = None
    """[T] whose average over the whole sequence the loss reads as `sequence_average`; None: it reads none."""
    row: Row | None = None  # as kernels compute it; None: they end in torch
    parameters: Parameters


def objective_of(name: str, **numbers: float | None) -> Objective:
    """The declared objective of that name, with its numbers, which `validate_args` has checked; one left out has its default."""
    declared = OBJECTIVES[name]
    numbers = {number.name: default for number, default in declared.numbers.items() if default is not None} | numbers
    loss, outside, averaged = declared.load()
    row = None
    if declared.row is not None and all(
        number.name in numbers for number in declared.numbers
    ):  # else the loss names it
        averaged_row = None if declared.averaged_row is None else functools.partial(load, declared.averaged_row)
        row = Row(functools.partial(load, declared.row), declared.row_numbers(numbers), averaged_row)
    return Objective(
        name=name,
        loss=loss,
        outside=outside,
        averaged=averaged,
        row=row,
        parameters=Parameters(**numbers),
        **{key: getattr(declared, key) for key in _KIND},
    )
