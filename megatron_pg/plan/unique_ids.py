"""Detects ids that are not unique over the step, because every rank numbers its own samples from 0.

If two ranks give one rollout_id to different rollouts, these are counted as one: fewer rollouts are counted, and
`sample_mean` and `constant` weigh each token too much. In this case every rank has the same ids. Turns and branches of
a rollout on several ranks look similar, but they begin alike or share the rollout's advantage.
"""

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.plan.collectives import gathered_parts
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.exchange import Units
from megatron_pg.rollouts.sample import Sample

_ENOUGH = 4  # ids repeated on another rank that are not a coincidence
_WAY_OUT = (
    "Number them over the whole step: put the data-parallel rank, or the prompt's number in the data set, into the id"
)


def _repeated(units: Units) -> int:
    """How often an id is repeated on another rank if that is not a coincidence; else 0.

    All ranks have the same ids, or one rank with a few more samples has all ids.
    """
    repeated = units.brought - units.most
    needed = 2 if units.fewest == units.most else _ENOUGH
    return repeated if repeated >= needed and units.distinct == units.most else 0


def rollouts_message(
    rollouts: Units, keys: Tensor, sizes: Sequence[int], samples: Sequence[Sample] | None, group: ProcessGroup
) -> str | None:
    """A warning about rollout ids that every rank has, equal on every rank; every rank must call.

    `keys` [S] int64 are the rollouts of this rank's samples, `sizes` the numbers of samples of all ranks. Without
    `samples` only the ids are known.

    Raises:
        StepPlanError: they are the ids of different rollouts.
    """
    if not (repeated := _repeated(rollouts)):
        return None
    what = (
        f"every data-parallel rank has the same rollout_ids ({repeated} are repeated on another rank), so samples of "
        "different ranks are counted as one rollout and weigh too much"
    )
    if samples is None:
        return f"{what}, unless those rollouts are on several ranks. {_WAY_OUT}."
    begins_alike, shares_advantage = _evidence(keys, sizes, samples, group)
    if shares_advantage:
        return None
    if begins_alike or repeated < _ENOUGH:
        return f"{what}, unless they are turns or branches of one rollout. {_WAY_OUT}."
    raise StepPlanError(
        f"{what}; their contexts begin differently and have no common advantage, so they are different rollouts. "
        f"{_WAY_OUT}. If they are the same rollout, give all its samples to one rank."
    )


def prompts_message(
    prompts: Units, keys: Tensor, sizes: Sequence[int], samples: Sequence[Sample] | None, group: ProcessGroup
) -> str | None:
    """A warning about prompt ids that every rank has, as `rollouts_message`."""
    if samples is None or _repeated(prompts) < _ENOUGH or _evidence(keys, sizes, samples, group)[0]:
        return None
    return (
        "every data-parallel rank has the same prompt_ids, and the prompts of most begin differently, so different "
        f"prompts may be counted as one group. {_WAY_OUT}."
    )


def _evidence(keys: Tensor, sizes: Sequence[int], samples: Sequence[Sample], group: ProcessGroup) -> tuple[bool, bool]:
    """Whether samples of most units begin alike, and whether each unit has one advantage while the units differ.

    A sample without a trained token of the objective has no advantage.
    """

    def everyones(values: Sequence[int]) -> Tensor:
        return torch.cat(gathered_parts(torch.tensor(values, dtype=torch.int64), sizes, group))

    _, units = torch.unique(everyones(keys.tolist()), return_inverse=True)
    start = sum(sizes[: torch.distributed.get_rank(group)])
    shortest = _least(everyones([len(sample.tokens) - sample.response_length for sample in samples]), units)
    of_samples = shortest[units[start : start + len(samples)]].tolist()
    alike = _is_one(everyones([_digest(s.tokens[:n]) for s, n in zip(samples, of_samples, strict=True)]), units)
    trained = [None if s.advantages is None else s.advantages[s.loss_mask] for s in samples]
    firsts = everyones([_digest(values[:1]) if values is not None and len(values) else -1 for values in trained])
    known = firsts >= 0
    _, units = torch.unique(units[known], return_inverse=True)
    shares = _is_one(firsts[known], units).all() and len(torch.unique(firsts[known])) > 1
    return bool(alike.double().mean() >= 0.5), bool(shares)


def _least(values: Tensor, units: Tensor) -> Tensor:
    """[U]"""
    return torch.full((len(units.unique()),), 2**62).scatter_reduce(0, units, values, "amin")


def _is_one(values: Tensor, units: Tensor) -> Tensor:
    """[U] bool: all values of the unit are equal."""
    return _least(values, units) == -_least(-values, units)


def _digest(values: Tensor) -> int:
    """61 bits, so that its negative is valid too, below the start value of `_least`."""
    return int.from_bytes(hashlib.blake2b(values.numpy().tobytes(), digest_size=8).digest(), "big") >> 3
