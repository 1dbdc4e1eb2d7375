"""Conversations of a step: sampled or demonstrated on all ranks, gathered, and made into samples."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import torch
from chat.engine import Engine
from chat.tasks import Problem, Task

from megatron_pg import Sample, group_advantages
from megatron_pg.plan.collectives import all_gather_rows, all_reduced


@dataclass
class Conversation:
    """One rollout: the prompt, then all turns of the assistant, with the environment's replies between them."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 at tokens of the assistant
    logprobs: list[float] = field(default_factory=list)  # of the engine; 0 where the mask is 0
    kept: list[list[int]] = field(default_factory=list)  # what each token was drawn from; empty: the whole vocabulary
    reward: float = 0.0
    is_truncated: bool = False

    def add(self, tokens: list[int], logprobs: list[float] | None = None, kept: list[list[int]] | None = None) -> None:
        """Append the assistant's tokens, or, without log-probabilities, the environment's."""
        self.response += tokens
        self.mask += [int(logprobs is not None)] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs
        self.kept += [[] for _ in tokens] if kept is None else kept

    def numbers(self) -> list[float]:
        """The conversation as numbers, for other ranks."""
        ids = [token for row in self.kept for token in row]
        head = [len(self.prompt), len(self.response), self.reward, self.is_truncated]
        return [*head, *self.prompt, *self.response, *self.mask, *self.logprobs, *map(len, self.kept), *ids]

    @classmethod
    def of(cls, numbers: Iterator[float]) -> "Conversation":
        """The conversation of `numbers`."""

        def next_integers(count: int) -> list[int]:
            return [int(value) for value in islice(numbers, count)]

        p, r = next_integers(2)
        reward, is_truncated = islice(numbers, 2)
        prompt, response, mask = next_integers(p), next_integers(r), next_integers(r)
        logprobs, counts = list(islice(numbers, r)), next_integers(r)
        kept = [next_integers(count) for count in counts]
        return cls(prompt, response, mask, logprobs, kept, reward, bool(is_truncated))


def problems_of(task: Task, seed: object, count: int) -> list[Problem]:
    """Problems that depend on the seed alone."""
    generator = random.Random(repr(seed))
    return [task.problem(generator) for _ in range(count)]


def sampled(engine: Engine, task: Task, problems: list[Problem], seed: int) -> list[Conversation]:
    """One conversation for each problem, whose turns are sampled on all ranks, every rank a part."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    generator = torch.Generator(engine.model.device).manual_seed(seed * size + rank)
    mine = list(range(rank, len(problems), size))
    conversations = [Conversation(engine.tokens_of(_question(problems[i]))) for i in mine]
    turns: list[list[str]] = [[] for _ in mine]
    still_open = list(range(len(mine)))
    for number in range(task.max_turns):
        contexts = [conversations[k].prompt + conversations[k].response for k in still_open]
        said = engine.sample(contexts, task.max_tokens, generator) if contexts else []
        going_on = []
        for k, turn in zip(still_open, said, strict=True):
            conversations[k].add(turn.tokens, turn.logprobs, turn.kept)
            conversations[k].is_truncated = not turn.has_ended
            turns[k].append(engine.text_of(turn.tokens))
            reply = problems[mine[k]].reply(turns[k][-1]) if turn.has_ended and number + 1 < task.max_turns else None
            if reply is not None:
                conversations[k].add(_reply_tokens(engine, reply))
                going_on.append(k)
        still_open = going_on
    for k, i in enumerate(mine):
        conversations[k].reward = float(problems[i].is_right(turns[k]))
    return _gathered(conversations, len(problems))


def demonstrated(engine: Engine, problems: list[Problem]) -> list[Conversation]:
    """Right answers; the log-probabilities are filled in by the trainer."""
    conversations = []
    for problem in problems:
        conversation = Conversation(engine.tokens_of(_question(problem)), reward=1.0)
        for number, text in enumerate(problem.demonstration):
            if number:
                conversation.add(_reply_tokens(engine, problem.reply(problem.demonstration[number - 1])))
            tokens = [*engine.tokenizer(text, add_special_tokens=False).input_ids, engine.stop]
            conversation.add(tokens, [0.0] * len(tokens))
        conversations.append(conversation)
    return conversations


def samples_of(
    conversations: list[Conversation],
    step: int,
    *,
    group_size: int,
    rule: str | None,
    environment: str,
    has_masks: bool = True,
) -> list[Sample]:
    """A step's samples, with the engine's log-probabilities in place of the trainer's, which come later.

    Args:
        conversations: groups of `group_size`, one after another.
        step: optimizer steps that the run has done.
        group_size: conversations of a prompt.
        rule: of the advantages (`megatron_pg.group_advantages`); None: demonstrations, whose advantage is 1. On-policy,
            the loss then has the gradient of cross-entropy.
        environment: the task's name.
        has_masks: record what truncated sampling left as the samples' sampling masks.
    """
    prompt_ids = [f"{step}-{i // group_size}" for i in range(len(conversations))]
    if rule is None:
        advantages = [1.0] * len(conversations)
    else:
        advantages = group_advantages([c.reward for c in conversations], prompt_ids, rule=rule).values
    return [
        Sample.build(
            tokens=c.prompt + c.response,
            response_length=len(c.response),
            loss_mask=c.mask,
            old_logprobs=c.logprobs,
            rollout_logprobs=None if rule is None else c.logprobs,
            sampling_mask=c.kept if has_masks and any(c.kept) else None,
            advantage=advantages[i],
            reward=c.reward,
            prompt_id=prompt_ids[i],
            rollout_id=f"{step}-{i}",
            step=step,
            truncated=c.is_truncated,
            environment=environment,
            weight_version=step,
        )
        for i, c in enumerate(conversations)
    ]


def demonstrations_of(conversations: list[Conversation], step: int, environment: str) -> list[Sample]:
    """Samples of the loss term `sft`, which count in no denominator of the policy loss."""
    return [
        Sample.build(
            tokens=c.prompt + c.response,
            response_length=len(c.response),
            loss_mask=c.mask,
            term="sft",
            prompt_id=f"{step}-shown-{i}",
            rollout_id=f"{step}-shown-{i}",
            step=step,
            environment=environment,
        )
        for i, c in enumerate(conversations)
    ]


def _question(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def _reply_tokens(engine: Engine, text: str) -> list[int]:
    """What the chat template puts between two turns of the assistant, after the end of the first one."""
    before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    start = engine.tokens_of(before[:1])
    whole = engine.tokens_of([*before, {"role": "user", "content": text}])
    return whole[len(start) + 1 :]  # after the stop token, which the turn has


def _gathered(conversations: list[Conversation], count: int) -> list[Conversation]:
    """All ranks' conversations in the order of their problems, as one table of numbers per rank."""
    size = torch.distributed.get_world_size()
    rows = [conversation.numbers() for conversation in conversations]
    longest, world = torch.tensor([max(map(len, rows), default=0)]), torch.distributed.group.WORLD
    width = int(all_reduced(longest, torch.distributed.ReduceOp.MAX, world))
    table = torch.zeros(-(-count // size), width, dtype=torch.float64)
    for line, row in zip(table, rows, strict=False):
        line[: len(row)] = torch.tensor(row, dtype=torch.float64)
    everyone = all_gather_rows(table).transpose(0, 1).flatten(0, 1)[:count]  # rank r has the problems r, r + size, …
    return [Conversation.of(iter(line)) for line in everyone.tolist()]
