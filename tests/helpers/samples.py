"""The tiny step of docs/aggregation.md, random steps, and samples: each factory exists once."""

import random
from collections.abc import Sequence

from megatron_pg.rollouts.sample import Sample

# The worked example: M = 1, 3, 4, 24, 0; rollouts a1 = {s0, s1}, a2, b1, b2; groups A = {a1, a2}, B = {b1, b2}.
TINY_TOKENS = [1, 3, 4, 24, 0]
TINY_ROLLOUTS = ["a1", "a1", "a2", "b1", "b2"]
TINY_PROMPTS = ["A", "A", "A", "B", "B"]
TINY_DIVISOR = 16.0
TINY_DENOMINATORS = {
    "sample_mean": [16, 16, 16, 96, 4],
    "prompt_mean": [16, 16, 16, 48, 48],
    "token_mean": [32] * 5,
    "constant": [64] * 5,
}
# The same step in turns: six with a trained token; turn_mean, N_turn M_turn of each token
TINY_TURNS = [[1], [1, 2], [4], [8, 16], [1]]
TINY_TURN_DENOMINATORS = [[6], [6, 12, 12], [24] * 4, [48] * 8 + [96] * 16, []]
# J at a loss of 1 per token: live rollouts / rollouts, live prompts / prompts, 1, T / (N_r L)
TINY_OBJECTIVE = {"sample_mean": 3 / 4, "prompt_mean": 1.0, "token_mean": 1.0, "constant": 1 / 2}


def divisor_of(aggregation: str, divisor: float = TINY_DIVISOR) -> float | None:
    """L where the mode takes one."""
    return divisor if aggregation == "constant" else None


def plain_sample(length: int = 1, **changes: object) -> Sample:
    """One prompt token and `length` trained response tokens, as `Sample.build` takes them, with changes."""
    fields = {"tokens": [1] * (length + 1), "response_length": length, "loss_mask": [1] * length}
    return Sample.build(**fields | {"old_logprobs": [-1.0] * length, "advantage": 1.0} | changes)


def make_sample(
    *,
    prompt_length: int,
    mask: Sequence[int],
    rng: random.Random,
    vocabulary: int = 11,
    rollout_id=None,
    prompt_id=None,
    sample_id: str = "?",
    poison: bool = False,
    optional: Sequence[str] = (),
) -> Sample:
    """A sample with random tokens, log-probabilities and per-token advantages; masked slots are NaN with `poison`."""
    bad = float("nan") if poison else 0.0
    return Sample.build(
        tokens=[rng.randrange(vocabulary) for _ in range(prompt_length + len(mask))],
        response_length=len(mask),
        loss_mask=list(mask),
        old_logprobs=[rng.uniform(-4.0, -1.0) if m else bad for m in mask],
        advantage=[rng.choice([-1.0, 1.0]) * rng.uniform(0.1, 2.0) if m else bad for m in mask],
        rollout_id=rollout_id,
        prompt_id=prompt_id,
        sample_id=sample_id,
        step=0,
        # of two values: groups without variance occur
        reward=float(round(_draw_of(rollout_id, draw := rng.uniform(0.0, 1.0)))),
        truncated=[None, False, True][int(1000 * draw) % 3],
        **{name: [rng.uniform(-4.0, -1.0) if m else bad for m in mask] for name in optional},
    )


def _draw_of(rollout_id, own: float) -> float:
    """What samples of one rollout share; `own` for a sample without an id."""
    return own if rollout_id is None else random.Random(repr(rollout_id)).random()


def random_step(
    rng: random.Random, *, vocabulary: int = 11, poison: bool = True, most_tokens: int = 14
) -> list[Sample]:
    """A step with uneven groups, fan-out, holes in masks, a fully masked sample and one-token samples."""
    samples = []
    fields = rng.choice([(), ("ref_logprobs",), ("rollout_logprobs",), ("ref_logprobs", "rollout_logprobs")])
    for prompt in range(rng.randint(1, 4)):
        for rollout in range(rng.randint(1, 3)):
            begin = len(samples)
            for _ in range(rng.choice([1, 1, 1, 2])):
                length = rng.choice([1, 1, 2, rng.randint(1, most_tokens)])
                kind = rng.random()
                mask = [0] * length if kind < 0.12 else [int(kind < 0.5 or rng.random() < 0.7) for _ in range(length)]
                samples.append(
                    make_sample(
                        prompt_length=rng.choice([1, 2, rng.randint(1, 6)]),
                        mask=mask,
                        rng=rng,
                        vocabulary=vocabulary,
                        rollout_id=f"{prompt}/{rollout}",
                        prompt_id=prompt,
                        sample_id=str(len(samples)),
                        poison=poison,
                        optional=[name for name in fields if rng.random() < 0.8],
                    )
                )
            share_an_advantage(samples[begin:])
    if not any(sample.num_trained for sample in samples):
        return random_step(rng, vocabulary=vocabulary, poison=poison, most_tokens=most_tokens)
    return samples


def share_an_advantage(siblings: Sequence[Sample]) -> None:
    """That of their first trained token, by which a step knows the samples of a rollout for siblings."""
    trained = [sample for sample in siblings if sample.num_trained]
    firsts = [int(sample.loss_mask.nonzero()[0]) for sample in trained]
    for sample, first in zip(trained, firsts, strict=True):
        sample.advantages[first] = trained[0].advantages[firsts[0]]
