"""A user's own objective: the signature of ours, imported and tried on tiny sequences at startup."""

from argparse import Namespace
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_pg.declarations.choices import OBJECTIVE_PARAMETERS
from megatron_pg.declarations.objectives import numbers as declared_numbers
from megatron_pg.flags.errors import ArgumentError
from megatron_pg.flags.head import needs_recompute
from megatron_pg.flags.import_path import load_function
from megatron_pg.flags.loss_terms import objective_numbers
from megatron_pg.objectives.objective import Objective
from megatron_pg.objectives.tokens import Parameters, Tokens

_SIZE = 6


def custom_objective_of(args: Namespace) -> Objective:
    """The objective of `--pg-custom-objective-path`, from arguments without violations.

    Raises:
        ArgumentError: rule E16, or E55, when it reads whole sequences and the fused head cannot.
        ImportPathError: it cannot be imported or called.
    """
    objective = load_custom_objective(args.pg_custom_objective_path, **objective_numbers(args))
    if objective.reads_sequences and args.pg_fused_head == "forward":
        raise ArgumentError(list(needs_recompute(f"--pg-custom-objective-path {objective.name}")))
    return objective


def load_custom_objective(path: str, **numbers: float) -> Objective:
    """Import the objective at `path` and try it, without averages over whole sequences too.

    Raises:
        ArgumentError: rule E16, when it fails, has another shape or dtype, no gradient, or a token's loss depends on other
            tokens of the micro-batch.
        ImportPathError: it cannot be imported or called.
    """
    loss = load_function(path, OBJECTIVE_PARAMETERS)
    parameters = Parameters(**(dict.fromkeys(number.name for number in declared_numbers()) | numbers))
    if reason := _probe(loss, parameters):
        raise ArgumentError([("E16", f"custom objective {path!r} {reason}")])
    return Objective(name=path, loss=loss, reads_sequences=_reads_sequences(loss, parameters), parameters=parameters)


def _probe(loss: Callable, parameters: Parameters) -> str | None:
    """Why the objective is refused, or None: six tokens, together and two by two."""
    try:
        whole, gradient = _try(loss, parameters, torch.arange(_SIZE))
        parts = [_try(loss, parameters, torch.arange(start, start + 2)) for start in range(0, _SIZE, 2)]
    except Exception as error:  # the user's code may raise anything
        return f"fails on six tokens: {type(error).__name__}: {error}"
    if whole.shape != (_SIZE,) or whole.dtype != torch.float64:
        return f"gives shape {tuple(whole.shape)} and dtype {whole.dtype} for 6 tokens in float64; give the loss of each token"
    if not torch.isfinite(whole).all() or not torch.isfinite(gradient).all():
        return "gives a loss or gradient that is not finite for ordinary log-probabilities"
    if not gradient.any():
        return "has no gradient with respect to tokens.logprobs or tokens.log_ratios, so nothing would be trained"
    for of_whole, of_parts in zip((whole, gradient), zip(*parts, strict=True), strict=True):
        if not torch.allclose(of_whole, torch.cat(of_parts), rtol=1e-9, atol=1e-12):
            return (
                "gives a token another loss or gradient when other tokens are in the micro-batch; take no average or maximum over "
                "tokens (tokens.sequence_log_ratios and tokens.sequence_advantages are averages over the whole sequence)"
            )
    return None


def _reads_sequences(loss: Callable, parameters: Parameters) -> bool:
    """Whether it fails, or gives something else, where there are no averages over whole sequences."""
    index = torch.arange(_SIZE)
    try:
        without = _try(loss, parameters, index, averages=False)
    except Exception:  # whatever the user's code makes of None
        return True
    return not all(map(torch.equal, without, _try(loss, parameters, index)))


def _try(loss: Callable, parameters: Parameters, index: Tensor, *, averages: bool = True) -> tuple[Tensor, Tensor]:
    """Values and gradients of the tokens at `index` of a fixed list."""
    ramp = torch.linspace(-1.0, 1.0, _SIZE, dtype=torch.float64)
    logprobs = (ramp.cos() - 2.0)[index].requires_grad_()
    old_logprobs = (ramp.cos() - 2.0 - 0.03 * ramp)[index]
    log_ratios = logprobs - old_logprobs
    tokens = Tokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=(ramp + 0.3)[index],
        log_ratios=log_ratios,
        sequence_log_ratios=0.001 + log_ratios - log_ratios.detach() if averages else None,
        sequence_advantages=torch.full((len(index),), 0.3, dtype=torch.float64) if averages else None,
    )
    values = loss(tokens, parameters)
    if not isinstance(values, Tensor):
        raise TypeError(f"it returns a {type(values).__name__}, not a Tensor")
    if not values.requires_grad:
        return values, torch.zeros_like(logprobs)
    (gradient,) = torch.autograd.grad(values.sum(), logprobs, materialize_grads=True)
    return values.detach(), gradient
