"""A small GPT, trained on pages of this repository, and documents that it samples: distributions of a real model on a
CPU.

Everything is plain torch and independent of the package. A model is a function of its parameters, so that a second set
of them (rounded, or of later steps) gives the other side's logits.
"""

import lzma
import math
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

PAGES = Path(__file__).with_suffix(".txt.xz")
PROMPT, CONTEXT = 8, 160  # tokens of a prompt; of prompt and response at most
Parameters = dict[str, Tensor]


@dataclass(frozen=True)
class Text:
    """A tokenised text: the most frequent pieces are tokens, everything else is spelt."""

    ids: Tensor  # [n] int64
    vocabulary: int


def read_text(vocabulary: int = 1024) -> Text:
    """Pages of this repository as they were once, as tokens: an edit of a page does not change the model."""
    text = lzma.decompress(PAGES.read_bytes()).decode()
    pieces = re.findall(r" ?[A-Za-z]+|[0-9]|\n+| +|.", text)
    letters = sorted(set(text))[: vocabulary // 2]
    frequent = [piece for piece, _ in Counter(pieces).most_common(vocabulary - len(letters)) if piece not in letters]
    number = {piece: i for i, piece in enumerate([*letters, *frequent])}
    ids = [number[part] for piece in pieces for part in ([piece] if piece in number else piece) if part in number]
    return Text(torch.tensor(ids), len(number))


def initial(vocabulary: int, width: int, layers: int, seed: int) -> Parameters:
    """Random parameters; the head is tied to the embedding."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: 0.1 * torch.randn(*shape, generator=generator)  # noqa: E731
    found = {"embedding": draw(vocabulary, width), "position": draw(CONTEXT, width), "scale": torch.ones(width)}
    for layer in range(layers):
        found |= {f"{layer}.qkv": draw(width, 3 * width), f"{layer}.out": draw(width, width)}
        found |= {f"{layer}.up": draw(width, 4 * width), f"{layer}.down": draw(4 * width, width)}
    return found


def hidden(
    parameters: Parameters, rows: Tensor, cache: dict[int, Tensor] | None = None, drop: Callable = lambda x: x
) -> Tensor:
    """[B, W, D] the final hidden states of rows [B, W]; `cache` holds keys and values of the tokens before them.

    `drop` is applied to the embedding and to the output of each attention and MLP block, where a trainer has its
    dropout.
    """
    norm = lambda x: functional.layer_norm(x, x.shape[-1:])  # noqa: E731
    done = cache[0].shape[3] if cache else 0
    x = drop(parameters["embedding"][rows] + parameters["position"][done : done + rows.shape[1]])
    for layer in range(sum(name.endswith("qkv") for name in parameters)):
        parts = (norm(x) @ parameters[f"{layer}.qkv"]).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        keys = parts[1:]
        if cache is not None:
            keys = cache[layer] = torch.cat([cache[layer], keys], dim=3) if layer in cache else keys
        mixed = functional.scaled_dot_product_attention(parts[0], keys[0], keys[1], is_causal=rows.shape[1] > 1)
        x = x + drop(mixed.transpose(1, 2).flatten(2) @ parameters[f"{layer}.out"])
        x = x + drop(functional.gelu(norm(x) @ parameters[f"{layer}.up"]) @ parameters[f"{layer}.down"])
    return norm(x) * parameters["scale"]


def head(parameters: Parameters, states: Tensor) -> Tensor:
    """[…, V] the logits of hidden states."""
    return states @ parameters["embedding"].T


def train(text: Text, parameters: Parameters, steps: int, *, rate: float = 3e-3, seed: int = 0) -> Parameters:
    """The parameters after so many steps of Adam on the text."""
    generator = torch.Generator().manual_seed(seed)
    ours = {name: value.clone().requires_grad_() for name, value in parameters.items()}
    optimizer = torch.optim.Adam(ours.values(), lr=rate)
    for step in range(steps):
        begin = torch.randint(0, len(text.ids) - CONTEXT - 1, (10,), generator=generator)
        rows = text.ids[begin[:, None] + torch.arange(CONTEXT + 1)]
        loss = functional.cross_entropy(head(ours, hidden(ours, rows[:, :-1])).flatten(0, 1), rows[:, 1:].flatten())
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * 0.5 * (1 + math.cos(math.pi * step / max(steps, 1)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return {name: value.detach() for name, value in ours.items()}


def sample(
    parameters: Parameters,
    prompts: Tensor,
    length: int,
    generator: torch.Generator,
    choose: Callable[[Tensor], Tensor] = lambda logits: logits,
) -> Tensor:
    """[B, PROMPT + length] prompts [B, PROMPT] and what is drawn after them from softmax(choose(logits))."""
    cache: dict[int, Tensor] = {}
    tokens, rest = prompts, prompts
    for _ in range(length):
        last = head(parameters, hidden(parameters, rest, cache)[:, -1])
        rest = torch.multinomial(choose(last).softmax(-1), 1, generator=generator)
        tokens = torch.cat([tokens, rest], dim=1)
    return tokens
