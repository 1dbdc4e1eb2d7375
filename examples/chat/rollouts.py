"""Conversations of a step: sampled or demonstrated on all ranks, gathered, and made into samples."""

import random
from dataclasses import dataclass, field

import torch
from chat.engine import Engine
from chat.tasks import TASKS, Problem, Task

from megatron_pg import Sample, group_advantages
from megatron_pg.plan.collectives import all_gather_rows


@dataclass
class Conversation:
    """One rollout: the prompt, then all turns of the assistant, with the environment's replies between them."""

    prompt: list[int]
    response: list[int] = field(default_factory=list)
    mask: list[int] = field(default_factory=list)  # 1 at tokens of the assistant
    logprobs: list[float] = field(default_factory=list)  # of the engine; 0 where the mask is 0
    reward: float = 0.0
    is_truncated: bool = False

    def add(self, tokens: list[int], logprobs: list[float] | None = None) -> None:
        """Append the assistant's tokens, or, without log-probabilities, the environment's."""
        self.response += tokens
        self.mask += [int(logprobs is not None)] * len(tokens)
        self.logprobs += [0.0] * len(tokens) if logprobs is None else logprobs


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
            conversations[k].add(turn.tokens, turn.logprobs)
            conversations[k].is_truncated = not turn.has_ended
            turns[k].append(engine.text_of(turn.tokens))
            reply = problems[mine[k]].reply(turns[k][-1]) if turn.has_ended and number + 1 < task.max_turns else None
            if reply is not None:
                conversations[k].add(_reply_tokens(engine, reply))
                going_on.append(k)
        still_open = going_on
    for k, i in enumerate(mine):
        conversations[k].reward = float(problems[i].is_right(turns[k]))
    return _gathered(conversations, len(problems), width_of(engine, task))


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


def width_of(engine: Engine, task: Task) -> int:
    """Most tokens of a conversation: the longest prompt of many, all turns, and the longest replies."""
    prompt = max(len(engine.tokens_of(_question(p))) for p in problems_of(task, "widths", 256)) + 8
    return prompt + task.max_turns * task.max_tokens + (task.max_turns - 1) * 48


def samples_of(
    conversations: list[Conversation], step: int, *, group_size: int, rule: str | None, environment: str
) -> list[Sample]:
    """A step's samples, with the engine's log-probabilities in place of the trainer's, which come later.

    Args:
        conversations: groups of `group_size`, one after another.
        step: optimizer steps that the run has done.
        group_size: conversations of a prompt.
        rule: of the advantages (`megatron_pg.group_advantages`); None: demonstrations, whose advantage is 1. On-policy,
            the loss then has the gradient of cross-entropy.
        environment: the task's name.
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


def _question(problem: Problem) -> list[dict[str, str]]:
    return [{"role": "user", "content": problem.prompt}]


def _reply_tokens(engine: Engine, text: str) -> list[int]:
    """What the chat template puts between two turns of the assistant, after the end of the first one."""
    before = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    start = engine.tokens_of(before[:1])
    whole = engine.tokens_of([*before, {"role": "user", "content": text}])
    return whole[len(start) + 1 :]  # after the stop token, which the turn has


def _gathered(conversations: list[Conversation], count: int, width: int) -> list[Conversation]:
    """All ranks' conversations in the order of their problems, as one table of numbers per rank."""
    size = torch.distributed.get_world_size()
    table = torch.zeros(-(-count // size), 4 + 3 * width, dtype=torch.float64)
    for row, c in zip(table, conversations, strict=False):
        whole = c.prompt + c.response
        row[:4] = torch.tensor([len(whole), len(c.response), c.reward, c.is_truncated])
        for k, values in enumerate((whole, c.mask, c.logprobs)):
            row[4 + k * width :][: len(values)] = torch.tensor(values, dtype=torch.float64)
    everyone = all_gather_rows(table).transpose(0, 1).flatten(0, 1)[:count]  # rank r has the problems r, r + size, …
    return [_conversation(row, width) for row in everyone.tolist()]


def _conversation(row: list[float], width: int) -> Conversation:
    n, r = int(row[0]), int(row[1])
    tokens = [int(token) for token in row[4 : 4 + n]]
    mask = [int(bit) for bit in row[4 + width :][:r]]
    return Conversation(tokens[: n - r], tokens[n - r :], mask, row[4 + 2 * width :][:r], row[2], bool(row[3]))


__all__ = ["TASKS", "Conversation", "demonstrated", "problems_of", "sampled", "samples_of", "width_of"]
