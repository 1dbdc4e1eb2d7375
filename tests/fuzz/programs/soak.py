"""Steps of documents through the package's whole step, and how much of anything they leave in their process.

    python tests/fuzz/programs/soak.py MICROBATCHES EVERY

prints a JSON object: the micro-batches that were run, and what the process holds more of than after a fifth of them.
One of EVERY steps is trained; the others are only taken and packed. Nothing else runs in the process, because a test
session opens files and starts threads for its launches.
"""

import argparse
import gc
import itertools
import json
import os
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import document_streams as streams
import torch
from megatron.core import parallel_state
from torch import Tensor, nn

from megatron_pg.args import add_arguments, validate_args
from megatron_pg.plan.documents import DocumentAccumulator, Packing, Position, StepRule
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.forward_step import PolicyGradientStep

VOCABULARY, ROW = 11, 32
PACKING = Packing(qkv_format="thd", seq_length=ROW, micro_batch_size=1)


class Table(nn.Module):
    """Logits by token: everything after them is the package's."""

    vocab_size, post_process, position_embedding_type = VOCABULARY, True, "rope"

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.randn(VOCABULARY, VOCABULARY))
        self.config = SimpleNamespace(
            calculate_per_token_loss=True,
            finalize_model_grads_func=finalize,
            num_moe_experts=None,
            context_parallel_size=1,
        )

    def compute_language_model_loss(self, labels: Tensor, logits: Tensor) -> Tensor:
        raise AssertionError("the package's loss is not in its place")

    def forward(self, tokens, position_ids, attention_mask, labels, loss_mask, packed_seq_params):
        return self.compute_language_model_loss(labels, self.logits[tokens].transpose(0, 1))


def finalize(chunks: list, count: Tensor) -> None:
    chunks[0].logits.grad.div_(count)


def schedule(*, forward_step_func, data_iterator, model, num_microbatches: int, **sizes: object) -> list[dict]:
    """Megatron's without pipelining: forward and backward of each micro-batch, then finalize."""
    reports, total = [], 0
    for _ in range(num_microbatches):
        output, loss_func = forward_step_func(data_iterator, model)
        loss, count, report = loss_func(output)
        loss.backward()
        total += count
        reports.append(report)
    model.config.finalize_model_grads_func([model], total)
    return reports


def endless_documents(rng: random.Random) -> Iterator[list[Sample]]:
    """Documents of skewed lengths with ids that no earlier one has: a thousand in turn, which is cheap."""
    longest = [rng.choice([4, 8, ROW]) for _ in range(1000)]
    known = [streams.document(rng, f"{i}", f"{i}", longest=length) for i, length in enumerate(longest)]
    for number in itertools.count():
        document = known[number % len(known)]
        object.__setattr__(document, "rollout_id", number)
        yield [document]


def new_step() -> PolicyGradientStep:
    words = "--loss-aggregation token_mean --docs-per-step 100 --docs-per-step-policy at_least --pg-kernel torch"
    args = add_arguments(argparse.ArgumentParser()).parse_args(words.split())
    args.calculate_per_token_loss = True
    rule = StepRule(num_documents=args.docs_per_step, policy=args.docs_per_step_policy, end="partial")
    documents = DocumentAccumulator(rule=rule, packing=PACKING, position=Position(0, (0,)))
    return PolicyGradientStep(LossSettings.from_args(validate_args(args)), documents=documents)


def traces(model: nn.Module) -> dict[str, int]:
    """What steps could leave behind in this process."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    hooks = [value for name, value in vars(model).items() if name.endswith("_hooks")]
    hooks += [model.logits._backward_hooks, model.logits._post_accumulate_grad_hooks]
    return {
        "memory": pages * os.sysconf("SC_PAGE_SIZE"),
        "objects": len(gc.get_objects()),
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "hooks": sum(map(len, filter(None, hooks))),
        "wrappers of finalize": depth(model.config.finalize_model_grads_func),
        "wrappers of the loss": depth(model.compute_language_model_loss),
    }


def depth(function: Callable) -> int:
    """How many functions are inside each other."""
    inside = [cell.cell_contents for cell in getattr(function, "__closure__", None) or ()]
    return 1 + max(map(depth, filter(callable, inside)), default=0)


def grown(model: nn.Module, *, wanted: int, every: int) -> tuple[int, dict[str, int]]:
    """How many micro-batches were run, and how much of each trace came after a fifth of them."""
    step, source = new_step(), endless_documents(random.Random(0))
    step.attach(model)
    count, before = 0, {}
    arguments = {"data_iterator": source, "model": model, "num_microbatches": 1}
    sizes = {"micro_batch_size": 1, "seq_length": ROW, "forward_only": False}
    while count < wanted:
        for number in range(every):
            if number:
                batches, *_ = step.documents.take(source, group=parallel_state.get_data_parallel_group())
            else:
                batches = step.forward_backward(schedule, forward_step_func=step.forward_step, **arguments, **sizes)
            count += len(batches)
        if not before and count >= wanted / 5:
            before = traces(model)
    return count, {name: now - before[name] for name, now in traces(model).items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    trained = Table()
    microbatches, growth = grown(trained, wanted=int(sys.argv[1]), every=int(sys.argv[2]))
    is_finite = bool(trained.logits.grad.isfinite().all())
    print(json.dumps({"microbatches": microbatches, "grown": growth, "is_finite": is_finite}))
