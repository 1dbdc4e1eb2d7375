"""examples/train_grpo.py with a rollout engine at another temperature: it draws the rollouts and reports their
log-probabilities.

ENGINE_TEMPERATURE=1.4
"""

import os
from dataclasses import replace

import torch
import train_grpo
from tasks.sampling import Policy

TEMPERATURE = float(os.environ["ENGINE_TEMPERATURE"])
rollout = train_grpo.rollout


def mismatched(policy, step, args, generator):
    engine = Policy(policy._chunks, width=args.seq_length, temperature=TEMPERATURE)
    samples = rollout(engine, step, args, generator)
    cuts = [len(sample.tokens) - sample.response_length for sample in samples]
    pairs = [(s.tokens[:n].tolist(), s.tokens[n:].tolist()) for s, n in zip(samples, cuts, strict=True)]
    scores = policy.score([prompt for prompt, _ in pairs], [response for _, response in pairs])
    return [
        replace(sample, rollout_logprobs=sample.old_logprobs, old_logprobs=torch.tensor(score, dtype=torch.float64))
        for sample, score in zip(samples, scores, strict=True)
    ]


train_grpo.rollout = mismatched

if __name__ == "__main__":
    train_grpo.main()
