"""A user's own objective: the signature of ours, imported and tried on tiny sequences at startup.

It returns the loss of each token, or a pair of the losses and its own metrics: [T] values by name.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor

from megatron_pg.declarations.choices import AT_ONCE, OBJECTIVE_PARAMETERS
from megatron_pg.declarations.objectives import CLIP_EPS_HIGH, CLIP_EPS_LOW
from megatron_pg.flags.errors import ArgumentError, numbered
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.head import recompute_violation
from megatron_pg.flags.import_path import load_function
from megatron_pg.flags.objective import unread_turns
from megatron_pg.flags.option_text import Selection
from megatron_pg.objectives.custom.token_kernel import custom_token_kernel, token_kernel_failure, token_kernel_refusal
from megatron_pg.objectives.interface.objective import Objective
from megatron_pg.objectives.interface.tokens import Parameters, Tokens

_ADVANTAGES = torch.tensor([-0.7, -0.3, 0.0, 0.5, 0.9, 1.3], dtype=torch.float64)  # 0: groups of equal rewards have it
_SIZE = len(_ADVANTAGES)
_ALL, _PAIRS = torch.arange(_SIZE), torch.arange(_SIZE).split(2)  # the tokens together, and two by two


def custom_objective_of(facts: Facts) -> Objective:
    """The objective of `--pg-custom-objective-path`, from arguments without violations.

    Raises:
        ArgumentError: rule E16; E55, when it reads whole sequences and the fused head cannot; or E43, when it reads no
            turns.
        ImportPathError: it cannot be imported or called.
    """
    head_mode = facts.args.pg_fused_head
    objective = load_custom_objective(str(cast(Selection, facts.custom_objective).name), **facts.objective_numbers)
    if objective.reads_sequences and head_mode in AT_ONCE:
        reader = f"--pg-custom-objective-path {objective.name}"
        raise ArgumentError(numbered(recompute_violation(reader, head_mode)))
    if facts.args.pg_sequence_level == "turn" and not (objective.reads_sequences or facts.corrects_sequences):
        raise ArgumentError(numbered(unread_turns(facts)))
    return objective


def load_custom_objective(path: str, **numbers: float) -> Objective:
    """Import the objective at `path` and try it, without averages over whole sequences too.

    Raises:
        ArgumentError: rule E16, when it fails, has another shape or dtype, no gradient, a token's loss or metric
            depends on other tokens of the micro-batch, it does not read one of its options, or its token kernel
            differs from it.
        ImportPathError: it cannot be imported or called.
    """
    function = load_function(path, OBJECTIVE_PARAMETERS)
    parameters = Parameters(**numbers)

    @functools.wraps(function)  # whose source the ranks compare
    def loss(tokens: Tokens, parameters: Parameters) -> Tensor:
        return _both(function(tokens, parameters))[0]

    def reports(tokens: Tokens, parameters: Parameters) -> dict[str, Tensor]:
        return _both(function(tokens, parameters))[1]

    def refuse_for(reason: str | None) -> None:
        if reason:
            raise ArgumentError([("E16", f"custom objective {path!r} {reason}")])

    refuse_for(_probe(loss, parameters) or _probe_reports(reports, parameters) or _unread_option(function, numbers))
    names = tuple(reports(_tokens(_ALL), parameters))
    reads_sequences = _reads_sequences(loss, reports, parameters)
    refuse_for(token_kernel_refusal(function, parameters, reads_sequences=reads_sequences))
    token_kernel = custom_token_kernel(function, parameters)
    refuse_for(None if token_kernel is None else token_kernel_failure(token_kernel, loss, parameters))
    return Objective(
        name=path,
        loss=loss,
        reports=reports if names else None,
        reported=names,
        reads_sequences=reads_sequences,
        token_kernel=token_kernel,
        parameters=parameters,
    )


def _both(returned: Any) -> tuple[Any, dict[str, Tensor]]:
    """Loss and metrics of what the user's function returned."""
    if not isinstance(returned, tuple):
        return returned, {}
    if len(returned) != 2 or not isinstance(returned[1], dict):
        raise TypeError("it returns a tuple that is not a pair of losses and a dict of metrics")
    return returned


def _unread_option(function: Callable, numbers: dict[str, float]) -> str | None:
    """Why a function is refused that does not read one of its options on six tokens, or None.

    Clip ranges are left out: a host passes its own, whether the function reads them or not.
    """
    read: set[str] = set()

    class Watched(Parameters):
        def __getattribute__(self, name: str) -> Any:
            read.add(name)
            return super().__getattribute__(name)

        def __getattr__(self, name: str) -> None:  # the function has passed `_probe`, so it takes a default here
            raise AttributeError(name)

    function(_tokens(_ALL), Watched(**numbers))
    if "__dict__" in read:  # vars(parameters) may read any of them
        return None
    for name in sorted(numbers.keys() - {CLIP_EPS_LOW.name, CLIP_EPS_HIGH.name} - read):
        return f"does not read its option {name}={numbers[name]:g}. Remove it."
    return None


def _probe_reports(reports: Callable, parameters: Parameters) -> str | None:
    """Why the metrics of an objective whose loss is accepted are refused, or None."""
    whole, *parts = (reports(_tokens(index), parameters) for index in (_ALL, *_PAIRS))
    for name, values in whole.items():
        if not isinstance(name, str) or not name.isprintable() or not name.strip():
            return f"reports a metric whose name is {name!r}. Give a printable text."
        if not isinstance(values, Tensor) or values.shape != (_SIZE,):
            shape = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
            return f"reports {name!r} with {shape} for 6 tokens. Give one value per token, without an average."
    if any(part.keys() != whole.keys() for part in parts):
        return "reports other metrics for other tokens. Always give the same names."
    for name, values in whole.items():
        if not torch.equal(values.detach(), torch.cat([part[name] for part in parts]).detach()):
            return f"reports {name!r} of a token differently when other tokens are in the micro-batch. Take no average."
    return None


def _probe(loss: Callable, parameters: Parameters) -> str | None:
    """Why the objective is refused, or None: six tokens, together and two by two."""
    try:
        (whole, gradient), *parts = (_try(loss, parameters, index) for index in (_ALL, *_PAIRS))
    except (Exception, SystemExit) as error:  # the user's code may raise anything
        return f"fails on six tokens: {type(error).__name__}: {error}"
    if whole.shape != (_SIZE,) or whole.dtype != torch.float64:
        given = f"shape {tuple(whole.shape)} and dtype {whole.dtype}"
        return f"gives {given} for 6 tokens in float64. Give the loss of each token."
    if not torch.isfinite(whole).all() or not torch.isfinite(gradient).all():
        return (
            "gives a loss or gradient that is not finite for ordinary log-probabilities and advantages, one of them 0. "
            "Correct it."
        )
    if not gradient.any():
        return (
            "has no gradient with respect to tokens.logprobs or tokens.log_ratios, so it trains nothing. Compute with "
            "one of them."
        )
    for of_whole, of_parts in zip((whole, gradient), zip(*parts, strict=True), strict=True):
        if not torch.allclose(of_whole, torch.cat(of_parts), rtol=1e-9, atol=1e-12):
            return (
                "gives a token another loss or gradient when other tokens are in the micro-batch. Take no average or "
                "maximum over tokens: tokens.sequence_log_ratios and tokens.sequence_advantages are averages over the "
                "whole sequence."
            )
    return None


def _reads_sequences(loss: Callable, reports: Callable, parameters: Parameters) -> bool:
    """Whether it fails, or gives something else, where there are no averages over whole sequences."""

    def everything(*, averages: bool) -> list[Tensor]:
        own = reports(_tokens(_ALL, averages=averages), parameters)
        return [*_try(loss, parameters, _ALL, averages=averages), *own.values()]

    try:
        without = everything(averages=False)
    except Exception:  # the user's code may fail on None in any way
        return True
    return not all(map(torch.equal, without, everything(averages=True)))


def _try(loss: Callable, parameters: Parameters, index: Tensor, *, averages: bool = True) -> tuple[Tensor, Tensor]:
    """Values and gradients of the tokens at `index` of a fixed list."""
    tokens = _tokens(index, averages=averages)
    values = loss(tokens, parameters)
    if not isinstance(values, Tensor):
        raise TypeError(f"it returns a {type(values).__name__}, not a Tensor")
    if not values.requires_grad:
        return values, torch.zeros_like(tokens.old_logprobs)
    (gradient,) = torch.autograd.grad(values.sum(), tokens.logprobs, materialize_grads=True)
    return values.detach(), gradient


def _tokens(index: Tensor, *, averages: bool = True) -> Tokens:
    """The tokens at `index` of a fixed list."""
    ramp = torch.linspace(-1.0, 1.0, _SIZE, dtype=torch.float64)
    logprobs = (ramp.cos() - 2.0)[index].requires_grad_()
    old_logprobs = (ramp.cos() - 2.0 - 0.03 * ramp)[index]
    log_ratios = logprobs - old_logprobs
    return Tokens(
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        advantages=_ADVANTAGES[index],
        log_ratios=log_ratios,
        sequence_log_ratios=0.001 + log_ratios - log_ratios.detach() if averages else None,
        sequence_advantages=torch.full((len(index),), 0.3, dtype=torch.float64) if averages else None,
        sequence_lengths=torch.full((len(index),), 40.0, dtype=torch.float64) if averages else None,
    )
