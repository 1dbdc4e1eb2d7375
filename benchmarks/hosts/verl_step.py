"""Step time and peak memory of verl's own Megatron engine with its own loss, with ours, and with ours and the float32
head.

    python benchmarks/hosts/verl_step.py                      # one GPU, a model of 0.5 billion parameters
    python benchmarks/hosts/verl_step.py --cpu --layers 1 --hidden 64 --heads 1 --columns 64 --tokens 32  # does it run

verl's `TrainingWorker.train_mini_batch` from its wheel (constraints/verl.txt, on PYTHONPATH): one mini-batch, one
document in a micro-batch, random tokens, the optimizer does nothing (`host_step`). verl has a float32 head where it has
fused kernels.
"""

import argparse
from functools import partial
from types import SimpleNamespace

import host_step
import torch
from host_step import Idle, Loss, Meter
from torch import nn

LOSSES = {  # what the head keeps at its peak (`host_step.head_bytes`), options of ours, verl's use_fused_kernels
    "verl's own loss": ("twice", None, False),  # the logits' gradient, before and after the division by the temperature
    "ours": ("cast", {}, False),
    "ours, use_fused_kernels": ("fused", {}, True),
    "ours, use_fused_kernels, split backward": ("split", {"fp32_lm_head_backward": "split"}, True),
}
THEIRS = {"verl's own loss, use_fused_kernels": (None, None, True)}  # its own Triton kernels, which no CPU runs


def run(
    verl: SimpleNamespace,
    options: dict | None,
    fused: bool,
    given: argparse.Namespace,
    device: torch.device,
    meter: Meter,
) -> nn.Module:
    """verl's steps with one loss, on a new model."""
    import verl_host

    engine = {"max_token_len_per_gpu": given.tokens, "infer_max_token_len_per_gpu": given.tokens}
    ours = None if options is None else host_step.kernel(given) | options
    actor = verl_host.actor_config(verl, options=ours, engine=engine)
    verl.fused.linear_cross_entropy = verl.linear_cross_entropy  # which ours replaces
    engine_class = verl.engine.MegatronEngineWithLMHead if options is None else None
    model, samples = host_step.build(given), host_step.documents(given)
    meter.watch(model)
    worker = verl_host.worker(verl, actor, fused=fused, engine=engine_class, model=model, optimizer=Idle())
    step = meter.timed(worker.train_mini_batch)
    for _ in range(1 + given.steps):
        step(verl_host.batch_of(verl, samples, actor, mini_batch_size=given.documents))
    return model


def main() -> None:
    """Every loss in turn."""
    given = host_step.options(__doc__.partition("\n")[0])
    device = host_step.begin(given)
    import verl_host

    verl = verl_host.load()
    verl.linear_cross_entropy = verl.fused.linear_cross_entropy
    import megatron_pg.verl  # noqa: F401, what model.external_lib does

    every = LOSSES if given.cpu else LOSSES | THEIRS
    losses = [
        Loss(name=name, memory=memory, run=partial(run, verl, flags, fused, given, device), all_rows=fused)
        for name, (memory, flags, fused) in every.items()
    ]
    host_step.compare(losses, given, device)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
