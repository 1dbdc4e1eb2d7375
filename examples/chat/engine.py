"""The rollout engine: transformers with its KV cache, which receives the trainer's weights before it samples.

Its forward is other code than Megatron's, in other shapes, so its log-probabilities differ from the trainer's as those
of any engine do. Each rank has an engine with the whole model, and samples a part of the prompts.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from chat import pretrained, weights
from torch import Tensor, nn
from transformers import DynamicCache

LEVELS = {"int8": 127, "int4": 7}  # largest magnitude of quantized weights


@dataclass
class Turn:
    """One turn of the model: token ids, their log-probabilities, and whether it ended by itself."""

    tokens: list[int]
    logprobs: list[float]
    has_ended: bool
    kept: list[list[int]] | None = None  # the ids that each token was drawn from, under top-p or top-k


class Engine:
    """A sampler on this rank's device.

    Args:
        folder: the pretrained model.
        dtype: of weights and activations.
        float32_head: compute the logits in float32.
        quantized: a key of LEVELS: the linear layers' weights are rounded to that many levels per output channel.
            Embedding, head and norms stay as they are. None: no weight is rounded.
        batch_size: sequences at a time.
        top_p: sample from the smallest set of tokens whose probability is at least this.
        top_k: sample from this many tokens, or fewer with top_p too; 0: from all.
    """

    def __init__(
        self,
        folder: str | Path,
        dtype: torch.dtype,
        *,
        float32_head: bool,
        quantized: str | None,
        batch_size: int,
        top_p: float = 1.0,
        top_k: int = 0,
    ):
        model, self.tokenizer = pretrained.read(folder, dtype)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)
        self.quantized = quantized
        self._float32_head, self._batch_size = float32_head, batch_size
        self._top_p, self._top_k = top_p, top_k
        self.stop = self.model.config.eos_token_id

    def refresh(self, chunks: list[nn.Module]) -> None:
        """Copy the weights of Megatron's model, on every rank at the same time."""
        weights.export(chunks, dict(self.model.named_parameters()))
        for layer in self.model.model.layers.modules() if self.quantized else ():
            if isinstance(layer, nn.Linear):
                layer.weight.copy_(rounded(layer.weight, LEVELS[self.quantized]))

    def tokens_of(self, messages: list[dict[str, str]]) -> list[int]:
        """The conversation in the model's chat template, up to where the assistant answers."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self.tokenizer(text, add_special_tokens=False).input_ids

    def text_of(self, tokens: list[int]) -> str:
        """The tokens as text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def sample(self, contexts: list[list[int]], max_tokens: int, generator: torch.Generator) -> list[Turn]:
        """One turn for each context, sampled at temperature 1."""
        order = sorted(range(len(contexts)), key=lambda i: len(contexts[i]))
        turns: dict[int, Turn] = {}
        for first in range(0, len(order), self._batch_size):
            part = order[first : first + self._batch_size]
            turns |= zip(part, self._sample([contexts[i] for i in part], max_tokens, generator), strict=True)
        return [turns[i] for i in range(len(contexts))]

    @torch.no_grad()
    def _sample(self, contexts: list[list[int]], max_tokens: int, generator: torch.Generator) -> list[Turn]:
        """Contexts are padded on the left, so that all rows continue in the same column."""
        device, width = self.model.device, max(map(len, contexts))
        filled = [[self.stop] * (width - len(row)) + row for row in contexts]
        read = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in contexts], device=device)
        inputs, cache = torch.tensor(filled, device=device), DynamicCache()
        positions = (read.cumsum(dim=1) - 1).clamp(min=0)
        drawn, logprobs, kept = [], [], []
        is_open = torch.ones(len(contexts), dtype=torch.bool, device=device)
        for k in range(max_tokens):
            hidden = self.model.model(
                input_ids=inputs, attention_mask=read, position_ids=positions, past_key_values=cache, use_cache=True
            ).last_hidden_state[:, -1]
            table = self._logits(hidden).float().log_softmax(dim=-1)
            if self._top_p < 1 or self._top_k:
                is_kept = truncated(table, self._top_p, self._top_k)
                table = table.where(is_kept, -torch.inf).log_softmax(dim=-1)
                kept.append([ids.tolist() for ids in is_kept.nonzero()[:, 1].split(is_kept.sum(dim=1).tolist())])
            inputs = torch.multinomial(table.exp(), 1, generator=generator)
            drawn.append(inputs[:, 0])
            logprobs.append(table.gather(1, inputs)[:, 0])
            is_open = is_open & (inputs[:, 0] != self.stop)
            if k % 4 == 3 and not is_open.any():  # a look at the device waits for it
                break
            read = torch.cat([read, torch.ones_like(inputs)], dim=1)
            positions = positions[:, -1:] + 1
        return self._turns(torch.stack(drawn, dim=1).tolist(), torch.stack(logprobs, dim=1).tolist(), kept)

    def _logits(self, hidden: Tensor) -> Tensor:
        weight = self.model.lm_head.weight
        if self._float32_head:
            hidden, weight = hidden.float(), weight.float()
        return nn.functional.linear(hidden, weight)

    def _turns(self, tokens: list[list[int]], logprobs: list[list[float]], kept: list[list[list[int]]]) -> list[Turn]:
        """Rows up to their stop token, which belongs to the turn; `kept` is by column, then by row."""
        turns = []
        for i, (row, values) in enumerate(zip(tokens, logprobs, strict=True)):
            has_ended = self.stop in row
            length = row.index(self.stop) + 1 if has_ended else len(row)
            sets = [column[i] for column in kept[:length]] if kept else None
            turns.append(Turn(row[:length], values[:length], has_ended, sets))
        return turns


def truncated(table: Tensor, top_p: float, top_k: int) -> Tensor:
    """[B, V] bool of log-probabilities [B, V]: what top-p and top-k leave, at least the most probable token."""
    values, order = table.sort(dim=-1, descending=True)
    probabilities = values.exp()
    is_kept = probabilities.cumsum(dim=-1) - probabilities < top_p  # of all tokens with a higher probability
    if top_k:
        is_kept[:, top_k:] = False
    return torch.zeros_like(is_kept).scatter(1, order, is_kept)


def rounded(weight: Tensor, levels: int) -> Tensor:
    """The nearest of 2·levels + 1 values per row, which are multiples of the row's largest magnitude over levels."""
    scale = (weight.float().abs().amax(dim=1, keepdim=True) / levels).clamp(min=torch.finfo(torch.float32).tiny)
    return ((weight.float() / scale).round() * scale).to(weight.dtype)
