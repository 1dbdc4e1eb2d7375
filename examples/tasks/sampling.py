"""Sampling from a Megatron model under any tensor-, sequence-, context- and pipeline-parallel layout.

Every model-parallel peer ends with the same samples: logits are brought to all of them, and they draw with the same
random numbers. The whole row is computed again for every token, which a task of 16 tokens can afford.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from megatron.core import parallel_state as mpu
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.pipeline_parallel import get_forward_backward_func

from megatron_pg.cp_utils import zigzag_index
from megatron_pg.plan.collectives import all_gather_rows

Reader = Callable[[list[list[int]], list[int]], torch.Tensor]


@dataclass
class Completions:
    """Sampled responses: token ids and their log-probabilities at the sampling temperature."""

    responses: list[list[int]]
    logprobs: list[list[float]]
    sampling_masks: list[list[list[int]]]  # the ids that each token was drawn from, under a top-p


class Policy:
    """The model under training, as a sampler. `chunks` are its (virtual) pipeline stages on this rank.

    Where ranks with other prompts share its experts, all ranks must sample at the same time, and the same number of
    prompts.
    """

    def __init__(self, chunks: list, *, width: int, temperature: float):
        self._chunks, self._width, self._temperature = chunks, width, temperature

    @torch.no_grad()
    def logprobs(self, rows: torch.Tensor) -> torch.Tensor:
        """[B, W, V] float32 log-probabilities of every next token, on the CPU, for rows [B, W]."""
        for chunk in self._chunks:
            chunk.eval()
        logits = self._whole_logits(rows)
        for chunk in self._chunks:
            chunk.train()
        return torch.log_softmax(logits.cpu() / self._temperature, dim=-1)

    def score(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        """Log-probability of every token of given responses."""
        rows = self._rows([p + r for p, r in zip(prompts, responses, strict=True)])
        values = self.logprobs(rows)[:, :-1].gather(2, rows[:, 1:, None])[..., 0]  # of the next token in every place
        return [
            row[len(p) - 1 : len(p) - 1 + len(r)].tolist() for row, p, r in zip(values, prompts, responses, strict=True)
        ]

    def entropies(self, prompts: list[list[int]], responses: list[list[int]]) -> list[list[float]]:
        """Entropy in nats of the distribution in the place of every token of given responses."""
        table = self.logprobs(self._rows([p + r for p, r in zip(prompts, responses, strict=True)]))
        values = -(table.exp() * table).sum(dim=-1)
        return [
            row[len(p) - 1 : len(p) - 1 + len(r)].tolist() for row, p, r in zip(values, prompts, responses, strict=True)
        ]

    def sample(self, prompts: list[list[int]], uniforms: torch.Tensor, *, stop: int, top_p: float = 1.0) -> Completions:
        """One response per prompt, drawn token by token until `stop`, with top-p sampling.

        `uniforms`: [prompts, most tokens], the number in [0, 1) that decides every draw, so a row does not depend on
        the rank that draws it.
        """
        done = Completions(*([[] for _ in prompts] for _ in range(3)))
        reader = self._reader(prompts, uniforms.shape[1])
        for k in range(uniforms.shape[1]):
            open_rows = [i for i, r in enumerate(done.responses) if not r or r[-1] != stop]
            if not (_any_rank_has(open_rows) if _shares_experts(self._chunks[0]) else open_rows):
                break
            last = reader(done.responses, open_rows)
            if top_p < 1:
                kept = _likeliest(last, top_p)
                last = last.where(kept, -torch.inf).log_softmax(dim=-1)
                for i, row in zip(open_rows, kept, strict=True):
                    done.sampling_masks[i].append(row.nonzero()[:, 0].tolist())
            tokens = _drawn(last, uniforms[open_rows, k])
            drawn = zip(open_rows, tokens[:, 0].tolist(), last.gather(1, tokens)[:, 0].tolist(), strict=True)
            for i, token, logprob in drawn:
                done.responses[i].append(token)
                done.logprobs[i].append(logprob)
        return done

    def _reader(self, prompts: list[list[int]], max_tokens: int) -> Reader:
        """From all responses so far and the rows that are open to the open rows' [n, V] next log-probabilities."""
        shares_experts = _shares_experts(self._chunks[0])

        def read(responses: list[list[int]], open_rows: list[int]) -> torch.Tensor:
            computed = range(len(prompts)) if shares_experts else open_rows  # dispatchers want equal shapes
            table = self.logprobs(self._rows([prompts[i] + responses[i] for i in computed]))
            ends = torch.tensor([len(prompts[i]) + len(responses[i]) - 1 for i in open_rows], dtype=torch.int64)
            return table[open_rows if shares_experts else range(len(open_rows)), ends]

        return read

    def _rows(self, sequences: list[list[int]]) -> torch.Tensor:
        rows = torch.zeros(len(sequences), self._width, dtype=torch.int64)
        for row, sequence in zip(rows, sequences, strict=True):
            row[: len(sequence)] = torch.tensor(sequence)
        return rows

    def _whole_logits(self, rows: torch.Tensor) -> torch.Tensor:
        cp_rank, cp_size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
        device = next(self._chunks[0].parameters()).device
        index = zigzag_index([self._width], cp_rank=cp_rank, cp_size=cp_size)
        local, positions = rows[:, index].to(device), index.expand(len(rows), -1).to(device)
        is_virtual = len(self._chunks) > 1  # then Megatron wants a micro-batch per stage at least: the same rows again
        data = get_forward_backward_func()(
            forward_step_func=partial(_forward, local, positions),
            data_iterator=[None] * len(self._chunks) if is_virtual else None,
            model=self._chunks,
            num_microbatches=mpu.get_pipeline_model_parallel_world_size() if is_virtual else 1,
            seq_length=self._width,
            micro_batch_size=len(rows),
            forward_only=True,
            collect_non_loss_data=True,
        )
        logits = data[0].float().contiguous() if data else None  # of bfloat16 or, with --fp32-lm-head, float32
        return self._gather(logits, len(rows), index, device)

    def _gather(self, logits: torch.Tensor | None, count: int, index: torch.Tensor, device) -> torch.Tensor:
        """Whole logits on every rank from [B, W/C, V/tp] on the last stage."""
        if mpu.get_pipeline_model_parallel_world_size() > 1:
            vocabulary = self._chunks[0].vocab_size // mpu.get_tensor_model_parallel_world_size()
            if logits is None:
                logits = torch.empty(count, len(index), vocabulary, device=device)
            source = mpu.get_pipeline_model_parallel_last_rank()
            torch.distributed.broadcast(logits, source, group=mpu.get_pipeline_model_parallel_group())
        logits = torch.cat(_all_gather(logits, mpu.get_tensor_model_parallel_group()), dim=-1)
        parts = _all_gather(logits, mpu.get_context_parallel_group())
        whole = torch.empty(count, self._width, logits.shape[-1], dtype=logits.dtype, device=device)
        for rank, part in enumerate(parts):
            whole[:, zigzag_index([self._width], cp_rank=rank, cp_size=len(parts))] = part
        return whole


class CachedPolicy(Policy):
    """The same on one pipeline stage without context or sequence parallelism, for prompts of one length: keys and
    values of what was read are kept, so that a token costs one position of every row."""

    def _reader(self, prompts: list[list[int]], max_tokens: int) -> Reader:
        (model,) = self._chunks
        context = StaticInferenceContext(len(prompts), len(prompts[0]) + max_tokens)
        device = next(model.parameters()).device

        @torch.no_grad()
        def read(responses: list[list[int]], open_rows: list[int]) -> torch.Tensor:
            first = context.sequence_len_offset
            further = [response[-1:] for response in responses] if first else prompts  # what has ended goes on unread
            tokens = torch.tensor(further, device=device)
            positions = torch.arange(first, first + tokens.shape[1], device=device).expand(len(tokens), -1)
            if first:
                context.enable_decode_mode()
            model.eval()
            logits = model(tokens, positions, None, inference_context=context, runtime_gather_output=True)
            model.train()
            context.sequence_len_offset += tokens.shape[1]
            return torch.log_softmax(logits[open_rows, -1].float().cpu() / self._temperature, dim=-1)

        return read


def _drawn(logprobs: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[n, 1] tokens of [n, V] log-probabilities: the first one whose cumulated probability exceeds the row's number."""
    cumulated = logprobs.double().exp().cumsum(dim=-1)
    return torch.searchsorted(cumulated, uniforms.double()[:, None] * cumulated[:, -1:], right=True)


def _likeliest(logprobs: torch.Tensor, top_p: float) -> torch.Tensor:
    """[n, V] bool: the fewest tokens of each row that have the probability together; all of them for 1."""
    probabilities, order = logprobs.exp().sort(dim=-1, descending=True)
    before = probabilities.cumsum(dim=-1) - probabilities
    return torch.zeros_like(logprobs, dtype=torch.bool).scatter_(1, order, (before < top_p) | (top_p == 1))


def _shares_experts(model) -> bool:
    """Whether ranks need each other's experts, or parts of them, for every token."""
    return bool(model.config.num_moe_experts) and mpu.get_expert_tensor_and_model_parallel_world_size() > 1


def _any_rank_has(rows: list[int]) -> bool:
    return bool(all_gather_rows(torch.tensor([len(rows)])).any())


def _forward(tokens, positions, data_iterator, model):
    return model(tokens, positions, None), lambda output, non_loss_data=False: output


def _all_gather(values: torch.Tensor, group) -> list[torch.Tensor]:
    if group.size() == 1:
        return [values]
    gathered = [torch.empty_like(values) for _ in range(group.size())]
    torch.distributed.all_gather(gathered, values.contiguous(), group=group)
    return gathered
