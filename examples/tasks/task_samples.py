"""The example's samples: imitated, sampled and shown right answers of its task, and those of all ranks together.

Prompts and draws are those of the whole step, of which a rank takes its part: they do not depend on the number of
ranks.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import torch
from megatron.core import parallel_state as mpu
from tasks.digit_sort import DigitSort
from tasks.list_programs import ListPrograms
from tasks.sampling import Policy

from megatron_pg import Sample, group_advantages
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.rollouts.payloads.sampling_masks import RecordedMask

T = TypeVar("T", list, torch.Tensor)
TASKS = {
    "digit_sort": DigitSort(),
    "list_programs": ListPrograms(digits=4, most_operations=3),
    "long_programs": ListPrograms(digits=5, most_operations=5),
}
OPTIONAL = ("teacher_logprobs", "old_entropies")  # fields that samples of a run may have
DEMONSTRATIONS = "sft"  # the term of right answers, in addition to the rollouts


def task_of(args) -> DigitSort | ListPrograms:
    """The one of --task."""
    return TASKS[args.task]


def of_this_rank(everyones: T) -> T:
    """This rank's part of a step's values, in order, the same number for each."""
    count = len(everyones) // mpu.get_data_parallel_world_size()
    return everyones[mpu.get_data_parallel_rank() * count :][:count]


def _sample(prompt: list[int], response: list[int], **fields: Any) -> Sample:
    """All of whose response is trained."""
    length = len(response)
    return Sample.build(tokens=prompt + response, response_length=length, loss_mask=[1] * length, **fields)


def imitation(policy: Policy, step: int, count: int, args, generator: torch.Generator) -> list[Sample]:
    """Right answers with advantage 1: on-policy, the loss then has the gradient of cross-entropy."""
    prompts, answers = _shown(count, args, generator)
    logprobs = policy.score(prompts, answers)
    first = mpu.get_data_parallel_rank() * count
    return [
        _sample(
            prompt,
            response,
            old_logprobs=old,
            advantage=1.0,
            prompt_id=f"{step}-{first + i}",
            rollout_id=f"{step}-{first + i}",
            sample_id=f"warm-up {step}/{first + i}",
            step=step,
            reward=1.0,
        )
        for i, (prompt, response, old) in enumerate(zip(prompts, answers, logprobs, strict=True))
    ]


def rollout(policy: Policy, step: int, args, generator: torch.Generator) -> list[Sample]:
    """Groups of responses to this rank's prompts; the advantage is the reward minus the group's mean."""
    task, rank = task_of(args), mpu.get_data_parallel_rank()
    count = args.prompts_per_rollout // mpu.get_data_parallel_world_size()
    everyones = task.prompts(args.prompts_per_rollout, generator)
    prompts = [prompt for prompt in of_this_rank(everyones) for _ in range(args.group_size)]
    uniforms = torch.rand(args.prompts_per_rollout * args.group_size, task.max_response, generator=generator)
    done = policy.sample(prompts, of_this_rank(uniforms), stop=task.stop, top_p=args.top_p)
    rewards = [task.reward(prompt, response) for prompt, response in zip(prompts, done.responses, strict=True)]
    prompt_ids = [f"{step}-{rank * count + i // args.group_size}" for i in range(len(prompts))]
    advantages = group_advantages(rewards, prompt_ids, rule="group_mean").values
    samples = []
    for i, (prompt, response, logprobs) in enumerate(zip(prompts, done.responses, done.logprobs, strict=True)):
        samples.append(
            _sample(
                prompt,
                response,
                old_logprobs=logprobs,
                advantage=advantages[i],
                prompt_id=prompt_ids[i],
                rollout_id=f"{step}-{rank * len(prompts) + i}",
                sample_id=f"{step}-{rank * len(prompts) + i}",
                reward=rewards[i],
                sampling_mask=done.sampling_masks[i] if args.top_p < 1 else None,
            )
        )
    return samples


def demonstrations(step: int, args, generator: torch.Generator) -> list[Sample]:
    """This rank's right answers of a step, which the loss term of demonstrations trains."""
    count = args.demonstrations_per_step // mpu.get_data_parallel_world_size()
    first = args.prompts_per_rollout * args.group_size + mpu.get_data_parallel_rank() * count  # after the rollouts
    prompts, answers = _shown(count, args, generator)
    return [
        _sample(
            prompt,
            answer,
            term=DEMONSTRATIONS,
            prompt_id=f"{step}-{first + i}",
            rollout_id=f"{step}-{first + i}",
            sample_id=f"demonstration {step}-{first + i}",
        )
        for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def _shown(count: int, args, generator: torch.Generator) -> tuple[list[list[int]], list[list[int]]]:
    """This rank's `count` prompts and right answers."""
    task = task_of(args)
    prompts = task.prompts(count * mpu.get_data_parallel_world_size(), generator)
    answers = [task.demonstration(prompt, generator) for prompt in prompts]
    return of_this_rank(prompts), of_this_rank(answers)


def with_values(samples: list[Sample], name: str, values_of: Callable[..., list[list[float]]]) -> list[Sample]:
    """The samples with a field that a policy gives for prompts and responses."""
    cuts = [len(sample.tokens) - sample.response_length for sample in samples]
    whole = [sample.tokens.tolist() for sample in samples]
    values = values_of(
        [row[:n] for row, n in zip(whole, cuts, strict=True)], [row[n:] for row, n in zip(whole, cuts, strict=True)]
    )
    return [
        replace(sample, **{name: torch.tensor(numbers, dtype=torch.float64)})
        for sample, numbers in zip(samples, values, strict=True)
    ]


def gather_samples(samples: list[Sample], args) -> list[Sample]:
    """All data-parallel ranks' samples of a step, as one table of numbers per rank, NaN for what a sample does not
    have."""
    width = args.seq_length
    table = torch.full((len(samples), 7 + (3 + len(OPTIONAL)) * width), math.nan, dtype=torch.float64)
    for row, sample in zip(table, samples, strict=True):
        n, r = len(sample.tokens), sample.response_length
        prompt_numbers = [int(part) for part in sample.prompt_id.split("-")]
        rollout_number = int(sample.rollout_id.split("-")[1])
        row[:5] = torch.tensor([*prompt_numbers, rollout_number, n, r])
        if sample.term != DEMONSTRATIONS:
            row[5], row[6] = sample.reward, sample.advantages[0]
        optional = (getattr(sample, name) for name in OPTIONAL)
        for k, values in enumerate((sample.tokens, sample.old_logprobs, *optional, _bits(sample.sampling_mask))):
            if values is not None:
                row[7 + k * width :][: len(values)] = values
    everyone = all_gather_rows(table, mpu.get_data_parallel_group()).flatten(0, 1)
    return [_sample_of(row, samples[0].step, width) for row in everyone.tolist()]


def _bits(sampling_mask: RecordedMask | None) -> torch.Tensor | None:
    """One number per token, with a bit for each id of this small vocabulary."""
    if sampling_mask is None:
        return None
    return (
        torch.zeros(len(sampling_mask.counts))
        .double()
        .index_add_(0, sampling_mask.positions, 2.0 ** sampling_mask.ids.double())
    )


def _ids(bits: float) -> list[int]:
    return [j for j in range(int(bits).bit_length()) if int(bits) >> j & 1]


def _sample_of(row: list[float], step: int, width: int) -> Sample:
    batch, prompt, number, n, r = (int(value) for value in row[:5])
    reward, advantage = (None if math.isnan(value) else value for value in row[5:7])
    names = ("old_logprobs", *OPTIONAL)
    fields = {name: row[7 + k * width :][:r] for k, name in enumerate(names, start=1)}
    kept = row[7 + (1 + len(names)) * width :][:r]
    return Sample.build(
        tokens=[int(token) for token in row[7 : 7 + n]],
        response_length=r,
        loss_mask=[1] * r,
        term=DEMONSTRATIONS if advantage is None else "rl",
        advantage=advantage,
        sampling_mask=None if math.isnan(kept[0]) else list(map(_ids, kept)),
        **{name: values for name, values in fields.items() if not math.isnan(values[0])},
        prompt_id=f"{batch}-{prompt}",
        rollout_id=f"{batch}-{number}",
        step=step,
        reward=reward,
    )
