"""A teacher for on-policy distillation: another model of transformers, which scores the student's conversations."""

from dataclasses import replace
from pathlib import Path

import torch
from chat import pretrained

from megatron_pg import PackedBatch, Sample

ROWS = 64  # conversations at a time


class Teacher:
    """A model that stays as it is.

    Args:
        folder: a pretrained model with the student's tokenizer, for instance what a run wrote with --export.
        dtype: of weights and activations.
    """

    def __init__(self, folder: str | Path, dtype: torch.dtype):
        model, _ = pretrained.read(folder, dtype)
        self.model = model.to("cuda" if torch.cuda.is_available() else "cpu").requires_grad_(False)

    def scored(self, batch: PackedBatch) -> PackedBatch:
        """The micro-batch with `teacher_logprobs` of every sampled conversation."""
        samples = list(batch.samples)
        chosen = [i for i, sample in enumerate(samples) if sample.term == "rl"]
        for first in range(0, len(chosen), ROWS):
            part = chosen[first : first + ROWS]
            for i, logprobs in zip(part, self._logprobs([samples[i] for i in part]), strict=True):
                samples[i] = replace(samples[i], teacher_logprobs=logprobs)
        return batch.with_samples(samples)

    @torch.no_grad()
    def _logprobs(self, samples: list[Sample]) -> list[torch.Tensor]:
        """[R] of each sample's response; a causal model needs no mask for padding on the right."""
        tokens = torch.nn.utils.rnn.pad_sequence([sample.tokens for sample in samples], batch_first=True)
        tokens = tokens.to(self.model.device)
        table = self.model(tokens[:, :-1], use_cache=False).logits.float().log_softmax(dim=-1)
        values = table.gather(2, tokens[:, 1:, None])[..., 0].cpu().double()
        rows = zip(values, samples, strict=True)
        return [row[len(s.tokens) - s.response_length - 1 : len(s.tokens) - 1] for row, s in rows]
