"""A task whose answers can be checked: sort the digits of a number.

    prompt    3 1 2 =        response    1 2 3 .

Tokens 0-9 are the digits, EQUALS ends the prompt, STOP the answer. Answers have 2 to 5 digits, so that responses
differ in length and the aggregations differ from each other.
"""

import torch

EQUALS, STOP, VOCABULARY = 10, 11, 12
MIN_DIGITS, MAX_DIGITS = 2, 5
MAX_RESPONSE = MAX_DIGITS + 1
MAX_LENGTH = MAX_DIGITS + 1 + MAX_RESPONSE


def prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """Random prompts."""
    lengths = torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (count,), generator=generator).tolist()
    return [[*torch.randint(0, 10, (n,), generator=generator).tolist(), EQUALS] for n in lengths]


def answer(prompt: list[int]) -> list[int]:
    """The one right response."""
    return [*sorted(prompt[:-1]), STOP]


def demonstration(prompt: list[int], generator: torch.Generator) -> list[int]:
    """The same, of which there is one."""
    return answer(prompt)


def exact(prompt: list[int], response: list[int]) -> float:
    """1 for the right response, else 0."""
    return float(response == answer(prompt))


def reward(prompt: list[int], response: list[int]) -> float:
    """Share of the answer that is right before the first mistake: 1 for the right response only."""
    right = answer(prompt)
    correct = next(
        (k for k, (a, b) in enumerate(zip(right, response, strict=False)) if a != b), min(len(right), len(response))
    )
    return correct / len(right)
