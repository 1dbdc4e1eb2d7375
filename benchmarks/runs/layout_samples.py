"""Rollouts with a reference policy, a teacher, a rollout engine and a critic, whose numbers are random; of
gpu_layouts.py.

Layouts are compared on them with each other, so the numbers need no model, and only have to be the same everywhere.
"""

from dataclasses import replace
from pathlib import Path

import torch

from megatron_pg import RolloutWriter, Sample, read_rollouts
from megatron_pg.rollouts.payloads.topk import TokenSets

VOCABULARY = 12  # of digit_sort
TOP_K = 4
# Largest for the teacher. Old log-probabilities that are the policy's own would leave signs of kl_cov to rounding.
DISTANCES = {"old_logprobs": 0.05, "ref_logprobs": 0.2, "teacher_logprobs": 0.5, "rollout_logprobs": 0.1}
MIDDLES = {"values": 0.0, "returns": 1.0}  # apart: the gradient of errors that cancel would be rounding


def write_scored(source: Path, target: Path) -> Path:
    """Write the samples of a rollout file with the further fields; returns the new file's path."""
    generator = torch.Generator().manual_seed(0)
    target.unlink(missing_ok=True)
    with RolloutWriter(target, version=3) as writer:
        writer.write([scored(sample, generator) for sample in read_rollouts(source)])
    return target


def scored(sample: Sample, generator: torch.Generator) -> Sample:
    """The sample of an older policy, with further log-probabilities near its own, and a teacher's top-k tokens."""
    length = sample.response_length
    near = {
        name: sample.old_logprobs - scale * torch.randn(length, generator=generator).abs().double()
        for name, scale in DISTANCES.items()
    }
    scores = (2 * torch.randn(length, VOCABULARY, generator=generator)).log_softmax(dim=1)
    logprobs, ids = scores.topk(TOP_K, dim=1)
    entropies = 0.5 + 1.5 * torch.rand(length, generator=generator).double()
    critic = {name: middle + torch.randn(length, generator=generator).double() for name, middle in MIDDLES.items()}
    topk = TokenSets(ids=ids.int(), logprobs=logprobs)
    return replace(sample, **near, **critic, old_entropies=entropies, teacher_topk=topk)
