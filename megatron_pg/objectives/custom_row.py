"""The row that a user's own objective may have, for the kernels: its attributes `row` and `row_numbers`, tried like the objective.

fn.row = a function of triton.jit,   loss, slope = row(logprob, old_logprob, advantage, numbers)
fn.row_numbers = names of the numbers that it reads, as `parameters` has them; none by default
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_pg.objectives.row import MOST_NUMBERS, Row, in_torch
from megatron_pg.objectives.tokens import Parameters, Tokens

_COUNT = 4096
_TOLERANCE = 1e-9  # relative; both sides are float64


def custom_row(function: Callable, loss: Callable, parameters: Parameters, *, reads_sequences: bool) -> Row | None:
    """The row of a user's function, None where it has none.

    Args:
        function: the user's, which may have the attributes.
        loss: from Tokens and parameters to [T]; what the row is held to.
        parameters: the objective's.
        reads_sequences: whether the loss reads averages over whole sequences, which no row has.

    Raises:
        ValueError: why it is refused, as the end of a sentence that begins with the objective.
    """
    row = getattr(function, "row", None)
    if row is None:
        return None
    if not callable(getattr(row, "fn", None)):
        raise ValueError(f"has a row that is a {type(row).__name__}; give a function of triton.jit")
    if reads_sequences:
        raise ValueError("reads averages over whole sequences and has a row, which knows one token; remove the row")
    names = tuple(getattr(function, "row_numbers", ()))
    if len(names) > MOST_NUMBERS:
        raise ValueError(
            f"has a row of {len(names)} numbers, and kernels pass {MOST_NUMBERS}; give what follows from them by one"
        )
    missing = [name for name in names if vars(parameters).get(name) is None]
    if missing:
        raise ValueError(
            f"has a row that reads {missing[0]}, which no flag has given; give --pg-{missing[0].replace('_', '-')}"
        )
    found = Row(lambda: row, tuple(vars(parameters)[name] for name in names))
    _try(in_torch(row), found.numbers, loss, parameters)
    return found


def _try(row: Callable, numbers: tuple[float, ...], loss: Callable, parameters: Parameters) -> None:
    """Holds it to the loss and its gradient, on ordinary tokens, far ones, A = 0, and where nothing is trained."""
    logprobs, old, advantages = _drawn()
    leaf = logprobs.clone().requires_grad_()
    tokens = Tokens(logprobs=leaf, old_logprobs=old, advantages=advantages, log_ratios=leaf - old)
    expected = loss(tokens, parameters)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    try:
        found, slope = row(logprobs, old, advantages, numbers)
        nothing = torch.zeros(1, dtype=torch.float64)
        resting = torch.cat(row(nothing, nothing, nothing, numbers))
    except Exception as error:  # the user's code may raise anything
        raise ValueError(f"has a row that fails on 4096 tokens: {type(error).__name__}: {error}") from error
    for what, ours, theirs in (("loss", expected.detach(), found), ("derivative by log π", gradient, slope)):
        bad = ~((ours - theirs).abs() <= _TOLERANCE * (1 + ours.abs()))
        if bad.any():
            at = int(bad.nonzero()[0])
            raise ValueError(
                f"has a row that gives the {what} {float(theirs[at]):g} where the function gives {float(ours[at]):g}: log π "
                f"{float(logprobs[at]):g}, log π_old {float(old[at]):g}, A {float(advantages[at]):g}"
            )
    if not resting.isfinite().all():
        raise ValueError(
            "has a row that is not finite where all fields are 0, as they are at tokens that are not trained"
        )


def _drawn() -> tuple[Any, ...]:
    """Log-probabilities, old ones and advantages, [T] float64 each, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    normal, old = (torch.randn(_COUNT, dtype=torch.float64, generator=generator) for _ in range(2))
    spread = torch.tensor([0.01, 0.3, 3.0, 12.0], dtype=torch.float64).repeat(_COUNT // 4)
    advantages = torch.randn(_COUNT, dtype=torch.float64, generator=generator)
    advantages[::7] = 0.0
    old = -old.abs() - 0.01
    return torch.minimum(old + spread * normal, torch.zeros(())), old, advantages
