"""The row that a user's own objective may have, for the kernels: its attributes `row` and `row_numbers`, tried like the objective.

fn.row = a function of triton.jit,   loss, slope = row(logprob, old_logprob, advantage, numbers)
fn.row_numbers = names of the numbers that it reads, as `parameters` has them; none by default
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_pg.objectives.interface.row import MOST_NUMBERS, Row, in_torch
from megatron_pg.objectives.interface.tokens import Parameters, Tokens

_COUNT = 4096
_TOLERANCE = 1e-9  # relative; both sides are float64


def custom_row(function: Callable, parameters: Parameters) -> Row | None:
    """The row of a user's function that has passed `row_refusal`, None where it has none."""
    row = getattr(function, "row", None)
    return None if row is None else Row(lambda: row, tuple(vars(parameters)[name] for name in _names(function)))


def row_refusal(function: Callable, parameters: Parameters, *, reads_sequences: bool) -> str | None:
    """Why the row of a user's function is refused, or None; `row_failure` tries it.

    Args:
        function: the user's.
        parameters: the objective's.
        reads_sequences: whether the loss reads averages over whole sequences, which no row has.
    """
    row, names = getattr(function, "row", None), _names(function)
    if row is None:
        return None
    if not callable(getattr(row, "fn", None)):
        return f"has a row that is a {type(row).__name__}, which kernels cannot call; give a function of triton.jit"
    if reads_sequences:
        return "reads averages over whole sequences and has a row, which knows one token; remove the row"
    if len(names) > MOST_NUMBERS:
        return f"has a row of {len(names)} numbers, and kernels pass {MOST_NUMBERS}; give what follows from them by one"
    for name in names:
        if vars(parameters).get(name) is None:
            return f"has a row that reads {name}, which no flag has given; give --pg-{name.replace('_', '-')}"
    return None


def row_failure(row: Row, loss: Callable, parameters: Parameters) -> str | None:
    """How the row differs from the loss and its gradient, or None: ordinary tokens, far ones, A = 0, and what is not trained."""
    logprobs, old, advantages = _drawn()
    leaf = logprobs.clone().requires_grad_()
    tokens = Tokens(logprobs=leaf, old_logprobs=old, advantages=advantages, log_ratios=leaf - old)
    expected = loss(tokens, parameters)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    nothing = torch.zeros(1, dtype=torch.float64)
    try:
        function = in_torch(row.load())
        found, slope = function(logprobs, old, advantages, row.numbers)
        at_rest = torch.cat(function(nothing, nothing, nothing, row.numbers))
    except Exception as error:  # the user's code may raise anything
        hint = f"; row_numbers names {len(row.numbers)} numbers" if isinstance(error, IndexError) else ""
        return f"has a row that fails on 4096 tokens: {type(error).__name__}: {error}{hint}"
    for what, ours, theirs in (("loss", expected.detach(), found), ("derivative by log π", gradient, slope)):
        bad = ~((ours - theirs).abs() <= _TOLERANCE * (1 + ours.abs()))
        if bad.any():
            at = int(bad.double().argmax())
            return (
                f"has a row whose {what} is {float(theirs[at]):g} where the function's is {float(ours[at]):g}, at log π "
                f"{float(logprobs[at]):g}, log π_old {float(old[at]):g}, A {float(advantages[at]):g}; mend the one that is wrong"
            )
    if not at_rest.isfinite().all():
        return "has a row that is not finite where all fields are 0, as they are at tokens that are not trained; choose by where"
    return None


def _names(function: Callable) -> tuple[str, ...]:
    return tuple(getattr(function, "row_numbers", ()))


def _drawn() -> tuple[Any, ...]:
    """Log-probabilities, old ones and advantages, [T] float64 each, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    normal, old = (torch.randn(_COUNT, dtype=torch.float64, generator=generator) for _ in range(2))
    spread = torch.tensor([0.01, 0.3, 3.0, 12.0], dtype=torch.float64).repeat(_COUNT // 4)
    advantages = torch.randn(_COUNT, dtype=torch.float64, generator=generator)
    advantages[::7] = 0.0
    old = -old.abs() - 0.01
    return torch.minimum(old + spread * normal, torch.zeros(())), old, advantages
