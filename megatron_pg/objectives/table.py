"""The objectives by name: the whole list, on one screen."""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megatron_pg.objectives import cispo, dppo, dual_clip, grpo, gspo, gspo_token, reinforce, sapo, two_sided
from megatron_pg.objectives.tokens import Parameters, Tokens

Loss = Callable[[Tokens, Parameters], Tensor]
Outside = Callable[[Tokens, Parameters], tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Objective:
    """An objective and its numbers. The same on every rank."""

    name: str
    loss: Loss  # [T] from tokens and parameters
    outside: Outside | None = None  # [T] bool each, above and below its bounds; None: it has none
    reads_sequences: bool = False
    parameters: Parameters


# name: (loss, what the clip metrics count, whether it reads averages over whole sequences)
OBJECTIVES: dict[str, tuple[Loss, Outside | None, bool]] = {
    "grpo": (grpo.grpo, grpo.outside, False),
    "dual_clip": (dual_clip.dual_clip, grpo.outside, False),
    "two_sided": (two_sided.two_sided, grpo.outside, False),
    "gspo": (gspo.gspo, gspo.outside, True),
    "gspo_token": (gspo_token.gspo_token, gspo.outside, True),
    "cispo": (cispo.cispo, cispo.outside, False),
    "sapo": (sapo.sapo, None, False),
    "dppo_tv": (dppo.dppo_tv, dppo.outside_tv, False),
    "dppo_kl": (dppo.dppo_kl, dppo.outside_kl, False),
    "reinforce": (reinforce.reinforce, None, False),
    "reinforce_is": (reinforce.reinforce_is, None, False),
}


def objective_of(name: str, **parameters: float | None) -> Objective:
    """The objective of that name; `parameters` are fields of `Parameters`, which `validate_args` has checked."""
    loss, outside, reads_sequences = OBJECTIVES[name]
    return Objective(
        name=name,
        loss=loss,
        outside=outside,
        reads_sequences=reads_sequences,
        parameters=Parameters(**parameters),
    )
