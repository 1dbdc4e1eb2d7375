"""Step time and peak memory of slime's own trainer with its own loss, with ours, and with ours and each head.

    SLIME=checkout python benchmarks/hosts/slime_step.py  # one GPU, a model of 0.5 billion parameters
    SLIME=checkout python benchmarks/hosts/slime_step.py --cpu --layers 1 --hidden 64 --heads 1 --columns 64 --tokens 32

slime's `train_actor` of an unmodified checkout: one optimizer step of a rollout, one document in a micro-batch, random
tokens, the optimizer does nothing (`host_step`).
"""

import argparse
import os
from functools import partial

import host_step
import torch
from host_step import Idle, Loss, Meter
from torch import nn

LOSSES = {  # what the head keeps at its peak (`host_step.head_bytes`), flags of ours
    "slime's own loss": ("twice", None),  # logits, and the softmax that the backward reads
    "ours": ("cast", {}),
    "ours, --fp32-lm-head": ("float32", {"fp32_lm_head": True}),
    "ours, --pg-fused-head forward": ("fused", {"pg_fused_head": "forward"}),
    "ours, --pg-fused-head recompute": ("fused", {"pg_fused_head": "recompute"}),
}


def run(flags: dict | None, given: argparse.Namespace, device: torch.device, meter: Meter) -> nn.Module:
    """slime's steps with one loss, on a new model."""
    import rollout_hosts
    import slime_host
    from host_cases import Case
    from slime.backends.megatron_utils import actor

    args = rollout_hosts.arguments(
        "slime",
        Case(rollouts_per_step=given.documents),
        **host_step.kernel(given) | (flags or {}),
        custom_megatron_init_path=None if flags is None else "megatron_pg.slime.init",
        max_tokens_per_gpu=given.tokens,
        seq_length=given.tokens,
        n_samples_per_prompt=given.documents,
        rollout_batch_size=1,
    )
    slime_host.begin(args, device)
    model, samples = host_step.build(given), host_step.documents(given)
    meter.watch(model)
    trainer, train_actor = actor.MegatronTrainRayActor, actor.MegatronTrainRayActor.train_actor
    trainer.train_actor = meter.timed(train_actor)
    for _ in range(1 + given.steps):
        slime_host.roll(samples, args, model, Idle())
    trainer.train_actor = train_actor
    return model


def main() -> None:
    """Every loss in turn."""
    given = host_step.options(__doc__.partition("\n")[0])
    device = host_step.begin(given)
    import their_trainers

    their_trainers.load({"SLIME": os.environ["SLIME"]})
    losses = [
        Loss(name=name, memory=memory, run=partial(run, flags, given, device))
        for name, (memory, flags) in LOSSES.items()
    ]
    host_step.compare(losses, given, device)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
