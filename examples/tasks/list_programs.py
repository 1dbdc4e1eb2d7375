"""A task with reasoning of free length: run a program on a list of digits, step by step or at once.

    prompt    5 0 3 9  . sort double =        response    0 3 5 9 ; 0 6 0 8 ; # 0 6 0 8 !

Tokens 0-9 are digits, then come the operations. A response may write lists, each ended by THEN, as many as it likes;
what counts is the list between ANSWER and STOP. Right answers without steps are hard for a small model, and those with
steps are longer.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

SORT, REVERSE, ROTATE, DOUBLE, INCREMENT, NOTHING, EQUALS, THEN, ANSWER, STOP = range(10, 20)
OPERATIONS: dict[int, Callable[[list[int]], list[int]]] = {
    SORT: sorted,
    REVERSE: lambda digits: digits[::-1],
    ROTATE: lambda digits: digits[1:] + digits[:1],
    DOUBLE: lambda digits: [2 * digit % 10 for digit in digits],
    INCREMENT: lambda digits: [(digit + 1) % 10 for digit in digits],
    NOTHING: lambda digits: digits,
}


@dataclass(frozen=True)
class ListPrograms:
    """Lists of `digits` digits, programs of 1 to `most_operations` operations."""

    digits: int
    most_operations: int
    vocabulary = 20
    stop = STOP

    @property
    def prompt_length(self) -> int:
        """Of every prompt: shorter programs have nothing before them."""
        return self.digits + self.most_operations + 1

    @property
    def max_response(self) -> int:
        """Room for every step twice, and a little."""
        return (2 * self.most_operations + 1) * (self.digits + 1) + 5

    @property
    def max_length(self) -> int:
        """Of a prompt and its longest response."""
        return self.prompt_length + self.max_response

    def prompts(self, count: int, generator: torch.Generator) -> list[list[int]]:
        """Random prompts."""
        prompts = []
        for _ in range(count):
            digits = torch.randint(0, 10, (self.digits,), generator=generator).tolist()
            length = int(torch.randint(1, self.most_operations + 1, (1,), generator=generator))
            program = torch.randint(SORT, NOTHING, (length,), generator=generator).tolist()
            prompts.append([*digits, *[NOTHING] * (self.most_operations - length), *program, EQUALS])
        return prompts

    def steps(self, prompt: list[int]) -> list[list[int]]:
        """The list after every operation of the program."""
        digits, steps = prompt[: self.digits], []
        for operation in prompt[self.digits : -1]:
            digits = OPERATIONS[operation](digits)
            if operation != NOTHING:
                steps.append(digits)
        return steps

    def answer(self, prompt: list[int]) -> list[int]:
        """How the right response ends."""
        return [ANSWER, *self.steps(prompt)[-1], STOP]

    def demonstration(self, prompt: list[int], generator: torch.Generator) -> list[int]:
        """A right response in one of four styles: at once, every other step, every step, every step twice."""
        style = int(torch.randint(0, 4, (1,), generator=generator))
        steps = self.steps(prompt)
        written = steps[::-1][::2][::-1] if style == 1 else steps * (style > 1)
        lists = [written_list for written_list in written for _ in range(2 if style == 3 else 1)]
        return [token for digits in lists for token in (*digits, THEN)] + self.answer(prompt)

    def exact(self, prompt: list[int], response: list[int]) -> float:
        """1 where the list between ANSWER and STOP is right, else 0."""
        end = self.answer(prompt)
        return float(response[-len(end) :] == end and response.count(ANSWER) == 1)

    reward = exact
