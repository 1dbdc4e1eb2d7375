"""An objective with its numbers, as the loss and the metrics take it."""

import functools
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_pg.declarations.declaration import load
from megatron_pg.declarations.objectives import CRITIC, OBJECTIVES, VALUE_LOSS
from megatron_pg.objectives.interface.token_kernel import TokenKernel
from megatron_pg.objectives.interface.tokens import Parameters, Tokens

TOKEN_KERNELS = "megatron_pg.kernels.triton.token_kernels"
# as declared
_KIND = ("reads_sequences", "has_one_loss_per_sequence", "has_one_advantage_per_sequence", "role", "reads")


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective and its numbers. The same on every rank."""

    name: str
    loss: Callable[[Tokens, Parameters], Tensor]  # [T]
    outside: Callable[[Tokens, Parameters], tuple[Tensor, Tensor]] | None = None
    """[T] bool each, above and below its bounds; None: it has none."""
    reports: Callable[[Tokens, Parameters], dict[str, Tensor]] | None = None
    """[T] each, its own metrics by name; None: it has none."""
    reported: tuple[str, ...] = ()  # their names
    reads_sequences: bool = False
    has_one_loss_per_sequence: bool = False
    has_one_advantage_per_sequence: bool = False
    role: str = "policy"
    reads: tuple[str, str] = ("old_logprobs", "advantages")
    averaged: Callable[[Tokens, Parameters], Tensor] | None = None
    """[T] whose average over the whole sequence the loss reads as `sequence_average`; None: it reads none."""
    token_kernel: TokenKernel | None = None  # None: the kernels end in torch
    parameters: Parameters


def objective_of(name: str, **numbers: float) -> Objective:
    """The declared objective with its numbers, which `validate_args` has checked; a missing one has its default."""
    declared = CRITIC if name == VALUE_LOSS else OBJECTIVES[name]
    numbers = {number.name: default for number, default in declared.numbers.items() if default is not None} | numbers
    loss, outside, averaged = declared.load(name)
    token_kernel = None
    has_all_numbers = {number.name for number in declared.numbers} <= numbers.keys()  # else the loss names the missing
    if not declared.no_token_kernel and has_all_numbers:
        of_average = None if averaged is None else functools.partial(load, f"{TOKEN_KERNELS}:{name}_averaged")
        load_kernel = functools.partial(load, f"{TOKEN_KERNELS}:{name}")
        token_kernel = TokenKernel(load_kernel, declared.token_kernel_numbers(numbers), of_average)
    return Objective(
        name=name,
        loss=loss,
        outside=outside,
        averaged=averaged,
        token_kernel=token_kernel,
        parameters=Parameters(**numbers),
        **{key: getattr(declared, key) for key in _KIND},
    )
