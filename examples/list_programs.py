"""A task with reasoning of free length: run a program on a list of digits, step by step or at once.

    prompt    5 0 3 9  . sort double =        response    0 3 5 9 ; 0 6 0 8 ; # 0 6 0 8 !

Tokens 0-9 are digits, then come the operations. A response may write lists, each ended by THEN, as many as it likes; what counts is
the list between ANSWER and STOP. Right answers without steps are hard for a small model, and those with steps are longer.
"""

from collections.abc import Callable

import torch

DIGITS, MOST_OPERATIONS = 4, 3
SORT, REVERSE, ROTATE, DOUBLE, INCREMENT, NOTHING, EQUALS, THEN, ANSWER, STOP = range(10, 20)
VOCABULARY = 20
PROMPT = DIGITS + MOST_OPERATIONS + 1
MAX_RESPONSE = 40  # room for every step twice, and a little
MAX_LENGTH = PROMPT + MAX_RESPONSE
OPERATIONS: dict[int, Callable[[list[int]], list[int]]] = {
    SORT: sorted,
    REVERSE: lambda digits: digits[::-1],
    ROTATE: lambda digits: digits[1:] + digits[:1],
    DOUBLE: lambda digits: [2 * digit % 10 for digit in digits],
    INCREMENT: lambda digits: [(digit + 1) % 10 for digit in digits],
    NOTHING: lambda digits: digits,
}


def prompts(count: int, generator: torch.Generator) -> list[list[int]]:
    """Random prompts, all of one length: programs of 1 to 3 operations, with nothing before shorter ones."""
    found = []
    for _ in range(count):
        digits = torch.randint(0, 10, (DIGITS,), generator=generator).tolist()
        length = int(torch.randint(1, MOST_OPERATIONS + 1, (1,), generator=generator))
        program = torch.randint(SORT, NOTHING, (length,), generator=generator).tolist()
        found.append([*digits, *[NOTHING] * (MOST_OPERATIONS - length), *program, EQUALS])
    return found


def steps(prompt: list[int]) -> list[list[int]]:
    """The list behind every operation of the program."""
    digits, found = prompt[:DIGITS], []
    for operation in prompt[DIGITS:-1]:
        digits = OPERATIONS[operation](digits)
        if operation != NOTHING:
            found.append(digits)
    return found


def answer(prompt: list[int]) -> list[int]:
    """How the right response ends."""
    return [ANSWER, *steps(prompt)[-1], STOP]


def demonstration(prompt: list[int], generator: torch.Generator) -> list[int]:
    """A right response in one of four styles: at once, every other step, every step, every step twice."""
    style = int(torch.randint(0, 4, (1,), generator=generator))
    written = steps(prompt)[::-1][::2][::-1] if style == 1 else steps(prompt) * (style > 1)
    lists = [each for each in written for _ in range(2 if style == 3 else 1)]
    return [token for each in lists for token in (*each, THEN)] + answer(prompt)


def exact(prompt: list[int], response: list[int]) -> float:
    """1 where the list between ANSWER and STOP is right, else 0."""
    end = answer(prompt)
    return float(response[-len(end) :] == end and response.count(ANSWER) == 1)


reward = exact
