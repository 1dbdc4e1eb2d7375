"""Exactly normalized policy-gradient losses in plain PyTorch, without Megatron, under DDP and FSDP2.

    torchrun --standalone --nproc-per-node 2 examples/plain_torch.py --wrap fsdp2 --head fused

The step's gradient is Σ w·∇ℓ over the trained tokens of all ranks and micro-batches. The weights w = mask/δ are those
of the whole step, so nothing is divided by a number of micro-batches, samples or tokens. DDP and FSDP2 average
gradients over the ranks, so every rank multiplies its loss by their number. docs/plain_torch.md explains the parts.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron_pg import Sample, plan_step, read_steps
from megatron_pg.kernels import grpo_loss
from megatron_pg.lm_head import grpo_head_loss

ROLLOUTS = Path(__file__).parent / "recipes" / "rollouts.jsonl"
VOCABULARY, LENGTH, HIDDEN = 12, 12, 32
HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if HAS_GPU else torch.device("cpu")
OPTIONS = {"clip_eps_low": 0.2, "clip_eps_high": 0.28, "impl": "triton" if HAS_GPU else "torch"}


class Batch(NamedTuple):
    """One micro-batch of padded samples. A position holds the fields of the token that it predicts, the next one."""

    tokens: Tensor  # [rows, LENGTH] int64
    targets: Tensor  # [T] int64, T = rows * LENGTH
    old_logprobs: Tensor  # [T] float32
    advantages: Tensor  # [T] float32
    weights: Tensor  # [T] float32, mask / δ; 0 at padding, prompts and masked tokens


Loss = Callable[[Tensor, Tensor, Batch], Tensor]


# --- the data of one step ---


def cut(samples: Sequence[Sample], *, rows: int, aggregation: str) -> list[Batch]:
    """This rank's micro-batches of one optimizer step; every rank passes all samples and gets the same number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mine = samples[rank::ranks]
    plan = plan_step(
        [int(sample.loss_mask.sum()) for sample in mine],
        aggregation=aggregation,
        rollout_ids=[sample.rollout_id for sample in mine],
        prompt_ids=[sample.prompt_id for sample in mine],
        group=dist.group.WORLD,  # the ranks that have different samples
    )
    starts = [k * rows for k in range(-(-len(samples) // (ranks * rows)))]
    return [pad(mine[i : i + rows], plan.denominators[i : i + rows], rows) for i in starts]


def pad(samples: Sequence[Sample], denominators: Tensor, rows: int) -> Batch:
    """The samples as rows; rows without a sample have no weight."""
    tokens, targets = torch.zeros(2, rows, LENGTH, dtype=torch.int64)
    old_logprobs, advantages, weights = torch.zeros(3, rows, LENGTH, dtype=torch.float64)
    for row, (sample, denominator) in enumerate(zip(samples, denominators, strict=True)):
        length = len(sample.tokens)
        tokens[row, :length] = sample.tokens
        targets[row, : length - 1] = sample.tokens[1:]
        response = slice(length - len(sample.loss_mask) - 1, length - 1)
        old_logprobs[row, response] = sample.old_logprobs
        advantages[row, response] = sample.advantages
        weights[row, response] = sample.loss_mask / denominator
    fields = (field.flatten().float().to(DEVICE) for field in (old_logprobs, advantages, weights))
    return Batch(tokens.to(DEVICE), targets.flatten().to(DEVICE), *fields)


# --- the model and its loss ---


def loss_of_logits(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """S = Σ w·ℓ of this micro-batch; the logits are stored."""
    fields = batch.targets, batch.old_logprobs, batch.advantages, batch.weights
    return grpo_loss(hidden @ weight.T, *fields, grad_scale=dist.get_world_size(), **OPTIONS).loss


def loss_of_hidden_states(hidden: Tensor, weight: Tensor, batch: Batch) -> Tensor:
    """The same S from the fused head, which never stores the logits."""
    fields = batch.targets, batch.old_logprobs, batch.advantages, batch.weights
    return grpo_head_loss(hidden, weight, *fields, grad_scale=dist.get_world_size(), **OPTIONS).loss


class Policy(nn.Module):
    """A tiny causal transformer. Its forward returns the loss: only there FSDP2 has gathered `output.weight`."""

    def __init__(self, loss: Loss):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        options = {"dropout": 0.0, "batch_first": True, "norm_first": True}
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(HIDDEN, 4, 4 * HIDDEN, **options) for _ in range(2))
        self.norm, self.output = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.loss = loss

    def hidden_states(self, tokens: Tensor) -> Tensor:
        """[rows, LENGTH, HIDDEN], each of the tokens up to its position."""
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH, tokens.device, self.positions.weight.dtype)
        hidden = self.embedding(tokens) + self.positions.weight
        for layer in self.layers:
            hidden = layer(hidden, src_mask=mask, is_causal=True)
        return self.norm(hidden)

    def forward(self, batch: Batch) -> Tensor:
        """The loss S of a micro-batch."""
        return self.loss(self.hidden_states(batch.tokens).flatten(0, 1), self.output.weight, batch)


def wrap_with_ddp(policy: Policy) -> nn.Module:
    """A copy of the model on every rank."""
    return DistributedDataParallel(policy)


def wrap_with_fsdp2(policy: Policy) -> nn.Module:
    """A shard of the model on every rank; `output` belongs to the root, whose forward calls the loss."""
    for layer in policy.layers:
        fully_shard(layer)
    return fully_shard(policy)


LOSSES: dict[str, Loss] = {"logits": loss_of_logits, "fused": loss_of_hidden_states}
WRAPPERS = {"ddp": wrap_with_ddp, "fsdp2": wrap_with_fsdp2}


def build(wrap: str, head: str) -> nn.Module:
    """The wrapped model, with the same weights on every rank."""
    torch.manual_seed(1)
    return WRAPPERS[wrap](Policy(LOSSES[head]).to(DEVICE))


# --- the step ---


def reduction(policy: nn.Module, *, is_last: bool) -> AbstractContextManager:
    """Reduce gradients over the ranks after the last micro-batch only. Without it the gradient is the same."""
    if isinstance(policy, DistributedDataParallel):
        return nullcontext() if is_last else policy.no_sync()
    policy.set_requires_gradient_sync(is_last)
    return nullcontext()


def accumulate(policy: nn.Module, batches: Sequence[Batch]) -> float:
    """Add the gradient of the step to `.grad`; returns the step's objective, the same on every rank."""
    ranks = dist.get_world_size()
    objective = torch.zeros((), dtype=torch.float64, device=DEVICE)
    for k, batch in enumerate(batches):
        with reduction(policy, is_last=k == len(batches) - 1):
            loss = policy(batch)
            (ranks * loss).backward()  # DDP and FSDP2 divide by the number of ranks; `grad_scale` announces it
        objective += loss.detach()  # unscaled
    dist.all_reduce(objective)
    return objective.item()


def train(args: argparse.Namespace) -> None:
    """One optimizer step for every recorded step."""
    policy = build(args.wrap, args.head)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    for number, samples in enumerate(read_steps(ROLLOUTS), start=1):  # here your sampler gives the samples
        objective = accumulate(policy, cut(samples, rows=args.rows, aggregation=args.aggregation))
        nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if dist.get_rank() == 0:
            print(f"step {number}: pg_loss {objective:+.6f}")


def start_processes() -> None:
    """Join the default process group."""
    if HAS_GPU:
        torch.cuda.set_device(DEVICE)
    dist.init_process_group("nccl" if HAS_GPU else "gloo")


def parse_arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """The wrapper, the head and the sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--wrap", choices=WRAPPERS, default="ddp")
    parser.add_argument("--head", choices=LOSSES, default="logits")
    parser.add_argument("--aggregation", default="sample_mean", help="sample_mean, prompt_mean or token_mean")
    parser.add_argument("--rows", type=int, default=4, help="samples of a micro-batch")
    return parser.parse_args(words)


if __name__ == "__main__":
    start_processes()
    train(parse_arguments())
    dist.destroy_process_group()
