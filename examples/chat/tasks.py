"""Tasks for a chat model whose answers a program can check.

    times_table    What is 7 times 8?
    word_count     Write one sentence about the sea with exactly 7 words.
    word_problems  Start with 4. Add 5. Multiply by 3. What is the result? …
    calculator     What is 47 * 38 + 61? with a calculator, which is asked in a turn of its own

The model finds the first right answers of the first two by itself. The other two start from demonstrations
(`--imitate`).
"""

import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Problem:
    """One prompt: how an answer is checked, what a right one looks like, and what answers a turn."""

    prompt: str
    is_right: Callable[[list[str]], bool]  # of the assistant's turns
    demonstration: list[str]  # the assistant's turns of a right answer
    reply: Callable[[str], str | None] = field(default=lambda text: None)  # to a turn; None: it was the last one


@dataclass(frozen=True)
class Task:
    """A kind of problems."""

    problem: Callable[[random.Random], Problem]
    max_tokens: int  # of one turn
    max_turns: int = 1

    def with_length(self, max_tokens: int | None) -> "Task":
        """The task with another limit of a turn."""
        return self if max_tokens is None else replace(self, max_tokens=max_tokens)


def last_number(text: str) -> int | None:
    """The last integer in a text."""
    numbers = re.findall(r"-?\d+", text.replace(",", ""))
    return int(numbers[-1]) if numbers else None


def times_table(random_: random.Random) -> Problem:
    """A product of 2 to 9 and 2 to 12; the last number of the answer counts."""
    a, b = random_.randint(2, 9), random_.randint(2, 12)
    return Problem(
        f"What is {a} times {b}?", lambda turns: last_number(turns[-1]) == a * b, [f"{a} times {b} is {a * b}."]
    )


TOPICS = ("the sea", "a dog", "winter", "music", "bread", "a train", "the moon", "a garden", "rain", "a bridge")
_WORDS = ("I", "often", "think", "of", "{}", "when", "the", "evening", "comes", "around", "here", "again")


def word_count(random_: random.Random) -> Problem:
    """A sentence with exactly 4 to 12 words."""
    count, topic = random_.randint(4, 12), random_.choice(TOPICS)
    sentence = " ".join(_WORDS).format(topic).split()[:count]
    return Problem(
        f"Write one sentence about {topic} with exactly {count} words.",
        lambda turns: len(re.findall(r"[A-Za-z']+", turns[-1])) == count,
        [" ".join(sentence) + "."],
    )


def word_problems(random_: random.Random) -> Problem:
    """Two or three operations in words. The answer may reason as long as it likes before "Answer: ".

    Half of the demonstrations reason step by step, and half answer at once.
    """
    value = random_.randint(2, 9)
    text, steps = f"Start with {value}.", []
    for _ in range(random_.randint(2, 3)):
        sign = random_.choice("+-*")
        number = random_.randint(2, 3) if sign == "*" else random_.randint(2, 9)
        words = {"+": "Add {}", "-": "Subtract {}", "*": "Multiply by {}"}[sign].format(number)
        result = {"+": value + number, "-": value - number, "*": value * number}[sign]
        text, steps = f"{text} {words}.", [*steps, f"{value} {sign} {number} = {result}"]
        value = result
    reasoning = "\n".join(steps) + "\n" if random_.random() < 0.5 else ""
    return Problem(
        f'{text} What is the result? Work step by step and end with "Answer: " and the number.',
        lambda turns: re.search(rf"Answer: *{value}\b(?!.*Answer)", turns[-1], re.S) is not None,
        [f"{reasoning}Answer: {value}"],
    )


_CALL = re.compile(r"CALCULATE: *(-?\d{1,9}) *([-+*]) *(-?\d{1,9})\s*")


def calculate(text: str) -> str | None:
    """The calculator's reply to a turn that calls it; None if the turn is not a call."""
    call = _CALL.fullmatch(text)
    if call is None:
        return None
    a, b = int(call[1]), int(call[3])
    return f"RESULT: {({'+': a + b, '-': a - b, '*': a * b})[call[2]]}"


def calculator(random_: random.Random) -> Problem:
    """A product of two numbers and a sum, which take two calls of a calculator."""
    a, b, c = (random_.randint(11, 99) for _ in range(3))
    value = a * b + c
    return Problem(
        f"What is {a} * {b} + {c}? Ask the calculator one operation at a time.",
        lambda turns: re.search(rf"Answer: *{value}\b", turns[-1]) is not None,
        [f"CALCULATE: {a} * {b}", f"CALCULATE: {a * b} + {c}", f"Answer: {value}"],
        calculate,
    )


TASKS = {
    "times_table": Task(times_table, max_tokens=48),
    "word_count": Task(word_count, max_tokens=48),
    "word_problems": Task(word_problems, max_tokens=160),
    "calculator": Task(calculator, max_tokens=24, max_turns=4),
}
