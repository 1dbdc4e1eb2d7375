"""A task whose answers can be checked: sort the digits of a number.

    prompt    3 1 2 =        response    1 2 3 .

Tokens 0-9 are the digits, EQUALS ends the prompt, STOP the answer. Answers have 2 to 5 digits, so that responses
differ in length and the aggregations differ from each other.
"""

from dataclasses import dataclass

import torch

EQUALS, STOP = 10, 11
MIN_DIGITS, MAX_DIGITS = 2, 5


@dataclass(frozen=True)
class DigitSort:
    """Numbers of 2 to 5 digits. A vocabulary that is larger has tokens that no prompt holds."""

    vocabulary: int = 12
    stop = STOP
    prompt_length = None  # prompts differ
    max_response = MAX_DIGITS + 1
    max_length = MAX_DIGITS + 1 + max_response

    def prompts(self, count: int, generator: torch.Generator) -> list[list[int]]:
        """Random prompts."""
        lengths = torch.randint(MIN_DIGITS, MAX_DIGITS + 1, (count,), generator=generator).tolist()
        return [[*torch.randint(0, 10, (n,), generator=generator).tolist(), EQUALS] for n in lengths]

    def answer(self, prompt: list[int]) -> list[int]:
        """The one right response."""
        return [*sorted(prompt[:-1]), STOP]

    def demonstration(self, prompt: list[int], generator: torch.Generator) -> list[int]:
        """The same, of which there is one."""
        return self.answer(prompt)

    def exact(self, prompt: list[int], response: list[int]) -> float:
        """1 for the right response, else 0."""
        return float(response == self.answer(prompt))

    def reward(self, prompt: list[int], response: list[int]) -> float:
        """Share of the answer that is right before the first mistake: 1 for the right response only."""
        right = self.answer(prompt)
        correct = next(
            (k for k, (a, b) in enumerate(zip(right, response, strict=False)) if a != b), min(len(right), len(response))
        )
        return correct / len(right)
