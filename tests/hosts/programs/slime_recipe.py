"""Reducers both ways on real ranks (`recipe_ranks`): gradients through Megatron's schedule, DDP and finalize.

Ours in a trainer that divides like slime and miles, theirs in our flag. The trainer is a stand-in, and so is their
reducer file; with SLIME or MILES naming a checkout the trainer is their own (`their_trainers`), and the file the one of
the examples of miles.
"""

import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path

import host_cases as hosts
import recipe_files
import stand_ins
import their_trainers
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from recipe_files import THEIR_DIVISOR
from their_trainers import EPS_HIGH, EPS_LOW
from torch import Tensor

from megatron_pg import ArgumentError, pack
from megatron_pg.cp_utils import response_index
from megatron_pg.kernels import LossTerms
from megatron_pg.metrics import Reduction
from megatron_pg.objectives import objective_of
from megatron_pg.plan.settings import LossSettings
from megatron_pg.reducers.custom import load_custom_reducer
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.forward_step import PolicyGradientStep

ROWS = 2
LAYOUTS = {"dp2": 1, "cp2": 2}  # context-parallel size
SAMPLE_MEAN = "megatron_pg.cp_utils.get_sum_of_sample_mean"
OF_MILES = "examples.experimental.DrGRPO.custom_reducer.get_pg_loss_reducer"  # divides by 1000 too


# --- what the gradients should be ---


def trained(samples: Sequence[Sample]) -> list[int]:
    return [sum(sample.loss_mask.tolist()) for sample in samples]


def num_rollouts(samples: Sequence[Sample]) -> int:
    return len({sample.rollout_id for sample in samples})


def oracle(samples: Sequence[Sample], denominators: Sequence[float]) -> list[Tensor]:
    """Gradients of the sum over samples i and trained tokens t of loss_it / d_i, by plain loops in float64."""
    embedding, head = (parameter.requires_grad_() for parameter in hosts.parameters())
    total = torch.zeros((), dtype=torch.float64)
    for sample, denominator in zip(samples, denominators, strict=True):
        tokens = sample.tokens.tolist()
        start = len(tokens) - sample.response_length
        for k in range(sample.response_length):
            if not sample.loss_mask[k]:
                continue
            logits = head @ embedding[tokens[start + k - 1]]
            ratio = (logits[tokens[start + k]] - logits.logsumexp(0) - sample.old_logprobs[k]).exp()
            clipped = ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH)
            total = total - torch.minimum(ratio * sample.reward, clipped * sample.reward) / denominator
    return list(torch.autograd.grad(total, (embedding, head)))


# --- one step ---


def micro_batches(samples: Sequence[Sample]) -> list[list[Sample]]:
    """This data-parallel rank's samples, two by two."""
    mine = samples[parallel_state.get_data_parallel_rank() :: parallel_state.get_data_parallel_world_size()]
    return [list(mine[k : k + ROWS]) for k in range(0, len(mine), ROWS)]


def schedule(forward_step, batches: Iterator, model: DistributedDataParallel, count: int) -> dict:
    return {
        "forward_step_func": forward_step,
        "data_iterator": batches,
        "model": model,
        "num_microbatches": count,
        "seq_length": 16,
        "micro_batch_size": 1,
        "forward_only": False,
    }


def stand_in(samples: Sequence[Sample], path: str, *, per_token: bool) -> list[Tensor]:
    """Our reducer in a trainer that divides like `loss_function` of slime and miles."""
    module, _, name = path.rpartition(".")
    reducer = getattr(import_module(module), name)
    batches, cp_size = micro_batches(samples), parallel_state.get_context_parallel_world_size()
    ranks = parallel_state.get_data_parallel_world_size(with_context_parallel=True)

    def forward_step(data_iterator, model):
        batch = next(data_iterator)
        before = [s.tokens[-s.response_length - 1 : -1][index_of(s)] for s in batch]
        return model(torch.cat(before)[None]), partial(loss_func, batch)

    def loss_func(batch, logits):
        x = token_losses(batch, logits[0])
        masks = [sample.loss_mask.int() for sample in batch]
        loss = reducer([len(s.tokens) for s in batch], [s.response_length for s in batch], masks, per_token)(x)
        if per_token:  # whole samples are counted, on every context-parallel rank
            return loss * cp_size, sum(mask.sum().clamp(min=1) for mask in masks).int(), {}
        return loss * len(batches) / num_rollouts(samples) * ranks, torch.tensor(1, dtype=torch.int), {}

    model = hosts.model(per_token=per_token)
    get_forward_backward_func()(**schedule(forward_step, iter(batches), model, len(batches)))
    return hosts.gradients(model)


def index_of(sample: Sample) -> Tensor:
    """The response tokens of this context-parallel rank."""
    return response_index(len(sample.tokens), sample.response_length)


def token_losses(batch: Sequence[Sample], logits: Tensor) -> Tensor:
    """[this rank's response tokens] clipped surrogate."""
    index = [index_of(sample) for sample in batch]
    targets = torch.cat([s.tokens[-s.response_length :][i] for s, i in zip(batch, index, strict=True)])
    old = torch.cat([s.old_logprobs[i] for s, i in zip(batch, index, strict=True)]).float()
    advantages = torch.cat([s.advantages[i] for s, i in zip(batch, index, strict=True)]).float()
    ratio = (logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0] - old).exp()
    return -torch.minimum(ratio * advantages, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * advantages)


def ours(samples: Sequence[Sample], path: str, *, per_token: bool) -> list[Tensor]:
    """Their reducer in our flag."""
    settings = LossSettings(
        aggregation="token_mean" if per_token else "sample_mean",
        divisor=None,
        reducer=load_custom_reducer(path, calculate_per_token_loss=per_token),
        per_token=per_token,
        terms=LossTerms(objective=objective_of("grpo", clip_eps_low=EPS_LOW, clip_eps_high=EPS_HIGH)),
        temperature=1.0,
        impl="torch",
        metrics=Reduction("none"),
    )
    step = PolicyGradientStep(settings)
    wrap = lambda *given, module: DistributedDataParallel(*given, step.attach(module))  # noqa: E731
    model = hosts.model(per_token=per_token, wrap=wrap)
    cp_size = parallel_state.get_context_parallel_world_size()
    batches = [pack(batch, qkv_format="thd", cp_size=cp_size) for batch in micro_batches(samples)]
    step.forward_backward(
        get_forward_backward_func(), **schedule(step.forward_step, iter(batches), model, len(batches))
    )
    return hosts.gradients(model)


# --- the cases ---

Train = Callable[..., list[Tensor]]  # (samples, path of the reducer or None, per_token=) -> gradients


def exact(train: Train) -> dict[str, float]:
    """Our reducers, against the aggregation that each of them is."""
    samples = hosts.samples(masked=None)
    counts = trained(samples)
    n = num_rollouts(samples)
    cases = {
        "sample_mean": (SAMPLE_MEAN, False, [n * count for count in counts]),
        "token_mean": (SAMPLE_MEAN, True, [sum(counts)] * len(counts)),
        "constant, L = 4096": ("my_reducers.dr_grpo", False, [n * 4096.0] * len(counts)),
        "constant, L = 1": ("my_reducers.token_sum", False, [float(n)] * len(counts)),
    }
    return {
        name: hosts.error(train(samples, path, per_token=per_token), oracle(samples, denominators))
        for name, (path, per_token, denominators) in cases.items()
    }


def edges(train: Train) -> dict[str, float]:
    """Limits of four arguments: a masked sample counts one token, and samples of a rollout are not known."""
    masked, siblings = hosts.samples(), hosts.samples(masked=None, fan_out=True)
    found, tokens = train(masked, SAMPLE_MEAN, per_token=True), sum(trained(masked))
    apart = [num_rollouts(siblings) * count for count in trained(siblings)]
    of_siblings = train(siblings, SAMPLE_MEAN, per_token=False)
    return {
        "token_mean, a masked sample": hosts.error(found, oracle(masked, [tokens] * len(masked))),
        "a masked sample counted as one token": hosts.error(found, oracle(masked, [tokens + 1] * len(masked))),
        "mean over rollouts of sums of sample means": hosts.error(of_siblings, oracle(siblings, apart)),
    }


def default(train: Train) -> dict[str, float]:
    """Their trainer without a custom reducer, two samples a rollout."""
    samples = hosts.samples(masked=None, fan_out=True)
    totals: dict[object, int] = {}
    for sample, count in zip(samples, trained(samples), strict=True):
        totals[sample.rollout_id] = totals.get(sample.rollout_id, 0) + count
    denominators = [len(totals) * totals[sample.rollout_id] for sample in samples]
    error = hosts.error(train(samples, None, per_token=False), oracle(samples, denominators))
    return {"no reducer: mean over rollouts": error}


def theirs_in_ours(path: str) -> dict[str, float]:
    samples = hosts.samples(masked=None)
    n, tokens = num_rollouts(samples), sum(trained(samples))
    denominators = {"flag off": n * THEIR_DIVISOR, "flag on": tokens}
    return {
        flag: hosts.error(ours(samples, path, per_token=flag == "flag on"), oracle(samples, [each] * len(samples)))
        for flag, each in denominators.items()
    }


def refusal(path: str) -> str:
    """What we say to a reducer that asks Megatron for no context parallelism where there is some."""
    try:
        load_custom_reducer(path, calculate_per_token_loss=False)
    except ArgumentError as refused:
        return str(refused)
    raise AssertionError(f"{path} was accepted")


def figures() -> dict[str, object]:
    """Errors by trainer and layout, of their reducer in ours, and what stood in for packages of theirs."""
    path = OF_MILES if "MILES" in os.environ else "their_reducer.reducer"
    steps = their_trainers.load(os.environ)
    result: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        recipe_files.write(Path(folder))
        sys.path.append(folder)
        for layout, cp_size in LAYOUTS.items():
            parallel_state.initialize_model_parallel(context_parallel_size=cp_size)
            if not steps:
                result[layout] = exact(stand_in) | edges(stand_in)
            for name, their_step in steps.items():
                train = partial(their_trainers.train, their_step)
                result[f"{name}, {layout}"] = exact(train) | edges(train) | default(train)
            if cp_size == 1:
                result["theirs in ours"] = theirs_in_ours(path)
            else:
                result["refused"] = refusal(path)
            parallel_state.destroy_model_parallel()
    return result | ({"stand-ins": sorted(stand_ins.USED)} if steps else {})
