"""The token kernel that a custom objective may bring: its attributes `token_kernel` and `token_kernel_numbers`.

fn.token_kernel = a function of triton.jit,   loss, slope = token_kernel(logprob, old_logprob, advantage, numbers)
fn.token_kernel_numbers = names of the numbers that it reads, as `parameters` has them; none by default
"""

from collections.abc import Callable
from typing import Any

import torch

from megatron_pg.objectives.interface.token_kernel import MOST_NUMBERS, TokenKernel, in_torch
from megatron_pg.objectives.interface.tokens import Parameters, Tokens, given_by

_COUNT = 4096
_TOLERANCE = 1e-9  # relative; both sides are float64


def custom_token_kernel(function: Callable, parameters: Parameters) -> TokenKernel | None:
    """The token kernel of a user's function that has passed `token_kernel_refusal`, None where it has none."""
    token_kernel = getattr(function, "token_kernel", None)
    numbers = tuple(vars(parameters)[name] for name in _names(function))
    return None if token_kernel is None else TokenKernel(lambda: token_kernel, numbers)


def token_kernel_refusal(function: Callable, parameters: Parameters, *, reads_sequences: bool) -> str | None:
    """Why the token kernel of a user's function is refused, or None; `token_kernel_failure` tries it.

    Args:
        function: the user's.
        parameters: the objective's.
        reads_sequences: whether the loss reads averages over whole sequences, which no token kernel has.
    """
    token_kernel, names = getattr(function, "token_kernel", None), _names(function)
    if token_kernel is None and getattr(function, "row", None) is not None:
        return "has an attribute row, which is called token_kernel since 0.3.0. Rename row and row_numbers."
    if token_kernel is None:
        return None
    if not callable(getattr(token_kernel, "fn", None)):
        kind = type(token_kernel).__name__
        return f"has a token kernel that is a {kind}, which kernels cannot call. Give a function of triton.jit."
    if reads_sequences:
        return (
            "reads averages over whole sequences and has a token kernel, which sees one token. Remove the token kernel."
        )
    if len(names) > MOST_NUMBERS:
        return f"has a token kernel of {len(names)} numbers, and kernels pass {MOST_NUMBERS}. Combine some of them."
    for name in names:
        if vars(parameters).get(name) is None:
            return f"has a token kernel that reads {name}, which is not given. Add {given_by(name)}."
    return None


def token_kernel_failure(token_kernel: TokenKernel, loss: Callable, parameters: Parameters) -> str | None:
    """How the token kernel differs from the loss and its gradient on drawn tokens, or None."""
    logprobs, old, advantages = _drawn()
    leaf = logprobs.clone().requires_grad_()
    tokens = Tokens(logprobs=leaf, old_logprobs=old, advantages=advantages, log_ratios=leaf - old)
    expected = loss(tokens, parameters)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    nothing = torch.zeros(1, dtype=torch.float64)
    try:
        function = in_torch(token_kernel.load())
        found, slope = function(logprobs, old, advantages, token_kernel.numbers)
        at_rest = torch.cat(function(nothing, nothing, nothing, token_kernel.numbers))
    except Exception as error:  # the user's code may raise anything
        names = f"Name every number that it reads in token_kernel_numbers, which has {len(token_kernel.numbers)}."
        fix = names if isinstance(error, IndexError) else "Correct it."
        return f"has a token kernel that fails on 4096 tokens ({type(error).__name__}: {error}). {fix}"
    for what, ours, theirs in (("loss", expected.detach(), found), ("derivative by log π", gradient, slope)):
        bad = ~((ours - theirs).abs() <= _TOLERANCE * (1 + ours.abs()))
        if bad.any():
            at = int(bad.double().argmax())
            where = f"log π {float(logprobs[at]):g}, log π_old {float(old[at]):g}, A {float(advantages[at]):g}"
            return (
                f"has a token kernel whose {what} is {float(theirs[at]):g} where the function's is "
                f"{float(ours[at]):g}, at {where}. Correct the wrong one."
            )
    if not at_rest.isfinite().all():
        return "has a token kernel that is not finite where all fields are 0, as at untrained tokens. Choose by where."
    return None


def _names(function: Callable) -> tuple[str, ...]:
    return tuple(getattr(function, "token_kernel_numbers", ()))


def _drawn() -> tuple[Any, ...]:
    """Log-probabilities, old ones and advantages, [T] float64 each, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    normal, old = (torch.randn(_COUNT, dtype=torch.float64, generator=generator) for _ in range(2))
    spread = torch.tensor([0.01, 0.3, 3.0, 12.0], dtype=torch.float64).repeat(_COUNT // 4)
    advantages = torch.randn(_COUNT, dtype=torch.float64, generator=generator)
    advantages[::7] = 0.0
    old = -old.abs() - 0.01
    return torch.minimum(old + spread * normal, torch.zeros(())), old, advantages
