"""Advantages of rollouts, within their prompt groups or by a critic (GAE); in float64, without torch."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_pg.rollouts.fields import Id, is_id, is_number, plain
from megatron_pg.rollouts.printable import shorten


@dataclass(frozen=True, slots=True)
class AdvantageRule:
    """One rule: its formula, its source, and the advantages of one group's rewards."""

    formula: str  # R the rollout's reward, G the rollouts of its prompt group
    source: str
    of_group: Callable[[list[float]], list[float]]
    is_relative: bool = True  # to the group's other rewards: a group of equal rewards has advantage 0
    is_binary: bool = False  # for rewards of 0 and 1 alone


def _group_mean(rewards: list[float]) -> list[float]:
    if len(set(rewards)) == 1:
        return [0.0] * len(rewards)  # exactly, also if the mean is rounded
    mean = math.fsum(rewards) / len(rewards)
    return [reward - mean for reward in rewards]


def _group_norm(rewards: list[float]) -> list[float]:
    std = statistics.stdev(rewards)
    return [centred / (std + 1e-6) for centred in _group_mean(rewards)]


def _rloo(rewards: list[float]) -> list[float]:
    return [centred * len(rewards) / (len(rewards) - 1) for centred in _group_mean(rewards)]


def _max_rl(rewards: list[float]) -> list[float]:
    mean = math.fsum(rewards) / len(rewards) or 1.0  # no success: nothing to follow
    return [centred / mean for centred in _group_mean(rewards)]


RULES = {
    "group_mean": AdvantageRule("R - mean", "Dr. GRPO, arXiv 2503.20783", _group_mean),
    "group_norm": AdvantageRule("(R - mean)/(std + 1e-6), std over G - 1", "GRPO, arXiv 2402.03300", _group_norm),
    "rloo": AdvantageRule("R - mean of the G - 1 others", "RLOO, arXiv 2402.14740", _rloo),
    "max_rl": AdvantageRule("(R - mean)/mean, rewards 0 or 1", "MaxRL, arXiv 2602.02710", _max_rl, is_binary=True),
    "reward": AdvantageRule("R", "REINFORCE", list, is_relative=False),
}
_OF_PAPERS = {"grpo": "group_norm", "dr_grpo": "group_mean", "drgrpo": "group_mean", "reinforce": "reward"}


@dataclass(frozen=True, slots=True)
class Advantages:
    """Advantages of the samples of a step; its text is a summary."""

    values: list[float]  # [S] in the order of the rewards
    num_groups: int
    num_zero_variance: int  # groups with equal rewards: no gradient, except under `reward`

    def __str__(self) -> str:
        share = self.num_zero_variance / max(self.num_groups, 1)
        return f"{self.num_zero_variance} of {self.num_groups} prompt groups ({share:.0%}) have equal rewards"


def group_advantages(
    rewards: Sequence[float], prompt_ids: Sequence[Id], *, rule: str, rollout_ids: Sequence[Id] | None = None
) -> Advantages:
    """Advantages of rollouts relative to their prompt groups, one for each sample.

        group_mean  A = R - mean                           Dr. GRPO, arXiv 2503.20783
        group_norm  A = (R - mean)/(std + 1e-6)            GRPO, arXiv 2402.03300; std with G - 1
        rloo        A = R - mean of the G - 1 others       RLOO, arXiv 2402.14740
        max_rl      A = (R - mean)/mean, 0 where mean = 0  MaxRL, arXiv 2602.02710; rewards 0 or 1
        reward      A = R                                  REINFORCE

    Mean and std are over the G rollouts of a group; a rollout counts once, also if it has several samples. GRPO's paper
    does not define the divisor of its std; G - 1 and 1e-6 are from miles. If all rewards of a group are equal, every A
    is exactly 0, except under `reward`. Groups must be whole: a part of a group has another mean.

    Args:
        rewards: [S] finite numbers, one for each sample; the same for all samples of a rollout.
        prompt_ids: [S] the prompt group of each sample.
        rule: which of the above.
        rollout_ids: [S] the rollout of each sample; without it every sample is its own rollout.

    Raises:
        ValueError: lengths differ, a reward is not finite, samples of one rollout have different rewards, a group has
            one rollout, or the rule is unknown or not defined for the rewards.
    """
    if rule not in RULES:
        hint = f" Did you mean {_OF_PAPERS[rule]}?" if rule in _OF_PAPERS else ""
        raise ValueError(f"rule={shorten(rule)} is not one of {', '.join(RULES)}. Choose one.{hint}")
    values = [plain(reward) for reward in rewards]
    prompts = _ids("prompt_ids", prompt_ids, len(values))
    rollouts = list(range(len(values))) if rollout_ids is None else _ids("rollout_ids", rollout_ids, len(values))
    groups: dict[Id, dict[Id, float]] = {}
    for i, (reward, prompt, rollout) in enumerate(zip(values, prompts, rollouts, strict=True)):
        if not is_number(reward):
            raise ValueError(
                f"rewards[{i}]={shorten(reward)} is not a finite number, so its group has no mean. Was it scored?"
            )
        if groups.setdefault(prompt, {}).setdefault(rollout, float(reward)) != float(reward):
            raise ValueError(
                f"rollout {shorten(rollout)} of prompt {shorten(prompt)} has samples with different rewards, so "
                f"{rule} is not defined. Give all its samples the rollout's reward."
            )
    by_prompt = {prompt: _of_group(rule, prompt, group) for prompt, group in groups.items()}
    return Advantages(
        values=[by_prompt[prompt][rollout] for prompt, rollout in zip(prompts, rollouts, strict=True)],
        num_groups=len(groups),
        num_zero_variance=sum(len(set(group.values())) == 1 for group in groups.values()),
    )


def _of_group(rule: str, prompt: Id, group: dict[Id, float]) -> dict[Id, float]:
    rewards = list(group.values())
    if RULES[rule].is_relative and len(group) < 2:
        raise ValueError(
            f"prompt {shorten(prompt)} has one rollout, and {rule} compares several. Sample more, or use rule='reward'."
        )
    if RULES[rule].is_binary and (graded := [reward for reward in rewards if reward not in (0.0, 1.0)]):
        raise ValueError(
            f"prompt {shorten(prompt)} has the reward {graded[0]:g}, and {rule} is defined for rewards of 0 and 1. "
            "Choose another rule."
        )
    try:
        advantages = RULES[rule].of_group(rewards)
        if not all(map(math.isfinite, advantages)):
            raise OverflowError
    except OverflowError as error:
        raise ValueError(f"prompt {shorten(prompt)} has rewards too large for {rule}. Scale them.") from error
    return dict(zip(group, advantages, strict=True))


def _ids(name: str, ids: Sequence[Any], size: int) -> list[Id]:
    plain_ids = [plain(value) for value in ids]
    if len(plain_ids) != size:
        raise ValueError(
            f"{name} has {len(plain_ids)} entries for {size} rewards, so groups are unknown. Give one for each reward."
        )
    for i, value in enumerate(plain_ids):
        if not is_id(value):
            raise ValueError(
                f"{name}[{i}]={shorten(value)} is neither an integer nor a printable string. Give every sample an id."
            )
    return plain_ids


MASKED = ("skip", "pass")  # how `gae` treats masked tokens


@dataclass(frozen=True, slots=True)
class Gae:
    """Advantages and returns of a trajectory, by turn; 0 at tokens that are not steps."""

    advantages: list[list[float]]  # [R] of each turn
    returns: list[list[float]]  # that the critic learns
    lam: float  # the policy's λ


def gae(
    rewards: Sequence[Sequence[float]],
    values: Sequence[Sequence[float]],
    loss_masks: Sequence[Sequence[int]],
    *,
    gamma: float,
    next_value: float,
    lam: float | None = None,
    alpha: float | None = None,
    critic_lam: float | None = None,
    masked: str = "skip",
) -> Gae:
    """Generalized advantage estimation over the steps of one trajectory, through all its turns.

        δ_k = r_k + γ V_{k+1} - V_k,   A_k = δ_k + γλ A_{k+1},   R_k = V_k + A_k with the critic's λ

    A step is a trained token. `masked="skip"`: other tokens are not steps. V_{k+1} is the value at the next trained
    token, and a masked token's reward belongs to the step before it. `masked="pass"`: masked tokens are steps, too.

    Args:
        rewards: [turns][R] of each response token; a turn is a sample of the trajectory, in their order.
        values: [turns][R] of the critic, V of the state in which each token was sampled; whole under context
            parallelism (`cp_utils.all_gather_with_cp`).
        loss_masks: [turns][R] 1 where the token is trained.
        gamma: γ, from 0 to 1.
        next_value: V after the last token: 0 if the response ended, the critic's value if it was truncated.
        lam: λ, from 0 to 1.
        alpha: instead of `lam`, λ = max(0, 1 - 1/(alpha·l)) for a trajectory of l steps.
        critic_lam: the critic's λ, 1 in VAPO; None: the policy's.
        masked: skip or pass.

    Raises:
        ValueError: lengths differ, a number is not finite or out of its range, λ is given twice or not at all, or a
            skipped token with a reward has no step before it.

    Source: arXiv 1506.02438; two λ and `alpha`: VAPO, arXiv 2504.05118, without the bound at 0.
    """
    _check_choices(masked, alpha, {"gamma": gamma, "lam": lam, "critic_lam": critic_lam})
    lengths = _lengths("loss_masks", loss_masks)
    mask = [plain(trained) for turn in loss_masks for trained in turn]
    if bad := [trained for trained in mask if trained not in (0, 1)]:
        raise ValueError(f"loss_masks contain {shorten(bad[0])}, which is neither 0 nor 1. Give one of them.")
    steps = [k for k, trained in enumerate(mask) if trained or masked == "pass"]
    earned = _flat("rewards", rewards, lengths, range(len(mask)))
    known = _flat("values", values, lengths, steps)
    last = _finite("next_value", plain(next_value))
    if steps and any(earned[: steps[0]]):
        raise ValueError(
            "rewards at masked tokens before the first trained token have no step. Give them to a later token, or pass "
            'masked="pass".'
        )
    ends, baseline = [*steps[1:], len(mask)], [known[k] for k in steps]
    own = [math.fsum(earned[begin:end]) for begin, end in zip(steps, ends, strict=False)]  # without steps, none
    if lam is None:
        lam = max(0.0, 1 - 1 / ((alpha or 1.0) * max(len(steps), 1)))
    advantages, targets = (
        _discounted(own, baseline, gamma, each, last) for each in (lam, lam if critic_lam is None else critic_lam)
    )
    returns = [target + value for target, value in zip(targets, baseline, strict=True)]
    return Gae(_by_turn(steps, advantages, lengths), _by_turn(steps, returns, lengths), lam)


def _by_turn(steps: list[int], numbers: list[float], lengths: list[int]) -> list[list[float]]:
    at = dict(zip(steps, numbers, strict=True))
    spread = iter([at.get(k, 0.0) for k in range(sum(lengths))])
    return [list(islice(spread, length)) for length in lengths]


def _discounted(rewards: list[float], values: list[float], gamma: float, lam: float, next_value: float) -> list[float]:
    advantages, advantage = [0.0] * len(values), 0.0
    for k in reversed(range(len(values))):
        advantage = rewards[k] + gamma * next_value - values[k] + gamma * lam * advantage
        advantages[k], next_value = advantage, values[k]
    return advantages


def _check_choices(masked: str, alpha: float | None, numbers: dict[str, float | None]) -> None:
    if masked not in MASKED:
        raise ValueError(f"masked={shorten(masked)} is neither skip nor pass. Choose one.")
    if (numbers["lam"] is None) == (alpha is None):
        raise ValueError("lam and alpha both set λ, and exactly one of them is needed. Give one.")
    if alpha is not None and not (is_number(alpha) and alpha > 0):
        raise ValueError(f"alpha={shorten(alpha)} is not a finite number > 0. Give one, 0.05 in VAPO.")
    for name, number in numbers.items():
        if number is not None and not (is_number(number) and 0 <= number <= 1):
            raise ValueError(f"{name}={shorten(number)} is not a number from 0 to 1. Give one.")


def _lengths(name: str, turns: Sequence[Sequence[Any]]) -> list[int]:
    """R of each turn."""
    try:
        return [len(turn) for turn in turns]
    except TypeError as error:
        raise ValueError(f"{name}={shorten(turns)} is not a list for each turn. Give [[…]] for one turn.") from error


def _flat(name: str, turns: Sequence[Sequence[float]], lengths: list[int], read: Iterable[int]) -> list[float]:
    """The numbers of all turns, finite where they are read."""
    if (given := _lengths(name, turns)) != lengths:
        raise ValueError(
            f"{name} have {given} entries and loss_masks {lengths}. Give one per response token of each turn."
        )
    flat = [plain(number) for turn in turns for number in turn]
    for k in read:
        _finite(f"{name} of response token {k} of the trajectory", flat[k])
    return flat


def _finite(name: str, number: Any) -> float:
    if not is_number(number):
        raise ValueError(f"{name}={shorten(number)} is not a finite number. Repair it.")
    return number
