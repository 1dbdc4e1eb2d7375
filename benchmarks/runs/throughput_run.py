"""examples/train_grpo.py on random rollouts with a vocabulary of real size; benchmarks/runs/throughput.py launches it.

With --cross-entropy the same model trains on the same micro-batches by Megatron's own loss, as in pretraining.
"""

import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_grpo
from layout_run import fill, write_peak
from megatron.core import parallel_state as mpu
from megatron.core.datasets import utils as dataset_utils
from megatron.core.enums import ModelType
from megatron.training import arguments, get_args, training
from tasks import task_samples
from tasks.digit_sort import DigitSort

from megatron_pg import PackedBatch, Sample
from megatron_pg.args import add_arguments
from megatron_pg.cp_utils import zigzag_index
from megatron_pg.pretrain import chain_args_providers

VOCABULARY = 151_936


def random_sample(name: str, length: int, generator: torch.Generator, step: int) -> Sample:
    """A row of random tokens, the second half of it the response."""
    half = length // 2
    return Sample.build(
        tokens=torch.randint(0, VOCABULARY, (length,), generator=generator),
        response_length=half,
        loss_mask=[1] * half,
        old_logprobs=[-12.0] * half,
        advantage=float(torch.randn((), generator=generator)),
        prompt_id=name,
        rollout_id=name,
        sample_id=name,
        step=step,
        reward=0.0,
    )


class RandomRollouts(train_grpo.Example):
    """The example without a sampler; with SAME_WEIGHTS in the environment, from weights that their names determine."""

    def model_provider(self, *positional, **keywords):
        """The example's model."""
        model = super().model_provider(*positional, **keywords)
        if "SAME_WEIGHTS" in os.environ:
            fill(model)
        return model

    def recorded_steps(self, args) -> Iterator[PackedBatch]:
        """This rank's micro-batches of each step."""
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        for step in range(args.train_iters + 1):
            numbers = range(rank, args.global_batch_size, size)
            generators = [torch.Generator().manual_seed(step * args.global_batch_size + i) for i in numbers]
            samples = [
                random_sample(f"{step}-{i}", args.seq_length, generator, step)
                for i, generator in zip(numbers, generators, strict=True)
            ]
            yield from train_grpo.microbatches(samples, args)


def mean_of_response(mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict]:
    """Megatron's usual loss of a micro-batch."""
    total = (losses * mask).sum()
    return total / mask.sum(), {"lm loss": torch.stack([total.detach(), mask.sum()])}


def forward_step(data_iterator, model):
    """Cross-entropy of the response."""
    batch = next(data_iterator)
    mask = torch.zeros(batch.tokens.shape)
    mask[:, mask.shape[1] // 2 :] = 1
    rank, size = mpu.get_context_parallel_rank(), mpu.get_context_parallel_world_size()
    index = zigzag_index([mask.shape[1]], cp_rank=rank, cp_size=size)
    whole = batch.tokens, batch.position_ids, batch.tokens.roll(-1, 1), mask
    tokens, positions, labels, mask = (values[:, index].cuda(non_blocking=True) for values in whole)
    return model(tokens, positions, None, labels=labels, loss_mask=mask), partial(mean_of_response, mask)


def train_by_cross_entropy() -> None:
    """Megatron's pretrain() without megatron_pg, as releases from 0.18 on have it."""
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    example = RandomRollouts()

    def datasets(num_samples, vp_stage=None):
        args = get_args()
        return example.recorded_steps(args), None, None

    datasets.is_distributed = True
    dataset_utils.compile_helpers = lambda: None  # a wheel has them built and ships no Makefile
    provider = chain_args_providers(train_grpo.add_example_arguments, add_arguments)
    args = arguments.parse_and_validate_args(extra_args_provider=provider)
    training.pretrain(
        cfg_container=pretrain_cfg_container_from_args(args),
        train_valid_test_dataset_provider=datasets,
        model_provider=example.model_provider,
        model_type=ModelType.encoder_or_decoder,
        forward_step_func=forward_step,
    )


if __name__ == "__main__":
    train_grpo.Example, task_samples.TASKS["digit_sort"] = RandomRollouts, DigitSort(VOCABULARY)
    folder = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    if "--cross-entropy" in sys.argv:
        sys.argv.remove("--cross-entropy")
        train_by_cross_entropy()
    else:
        train_grpo.main()
    write_peak(folder)
