"""A training loop around Megatron-Core without `megatron.training`: model, loss, optimizer, metrics file.

    torchrun --standalone --nproc-per-node 2 examples/own_loop.py --loss-aggregation sample_mean

Trains a tiny GPTModel on recorded samples, data-parallel over any number of processes: over NCCL on GPUs, over gloo
on a machine without one. docs/own_loop.md explains the parts.
"""

import argparse
import os
import sys
from pathlib import Path

import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    sys.path.append(str(Path(__file__).parent))
    from cpu import cpu_megatron

    cpu_megatron.enable()

from megatron.core import parallel_state as mpu
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_pg import (
    LossSettings,
    MetricsFile,
    PolicyGradientStep,
    Sample,
    StepLog,
    StepReport,
    add_arguments,
    add_value_head,
    cut_microbatches,
    describe,
    read_steps,
    step_record,
    validate_args,
)

VOCABULARY, SEQUENCE_LENGTH = 12, 12  # of the recorded samples


def parse_arguments() -> argparse.Namespace:
    """The flags of this script and of megatron_pg, validated."""
    parser = add_arguments(argparse.ArgumentParser(description=__doc__))
    parser.add_argument("--rollouts", default=Path(__file__).parent / "recipes" / "rollouts.jsonl", type=Path)
    parser.add_argument("--metrics-file", default="runs/own_loop/metrics.jsonl", type=Path)
    parser.add_argument("--micro-batch-size", default=4, type=int, help="samples of one forward")
    parser.add_argument("--lr", default=1e-3, type=float)
    parser.add_argument("--backend", default="nccl" if HAS_GPU else "gloo", help="of torch.distributed")
    parser.set_defaults(calculate_per_token_loss=False)  # Megatron's flag; validate_args sets it for token_mean
    args = validate_args(parser.parse_args())
    if "LOCAL_RANK" not in os.environ:
        parser.error("LOCAL_RANK is not set. Start this script with torchrun, as its --help shows.")
    return args


def start_processes(backend: str) -> None:
    """Join the process groups. Tensor, pipeline and context parallelism are sizes of `initialize_model_parallel`."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group(backend)
    mpu.initialize_model_parallel()
    torch.manual_seed(1)  # of the weights, which are the same on every rank
    model_parallel_cuda_manual_seed(1)


def build_model(step: PolicyGradientStep, args: argparse.Namespace) -> DistributedDataParallel:
    """The model with the policy-gradient loss in it, wrapped for data parallelism."""
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        attention_dropout=0.0,  # the log-probabilities of old, reference and rollout policy have no dropout
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        calculate_per_token_loss=args.calculate_per_token_loss,
        finalize_model_grads_func=finalize_model_grads,  # reduces gradients over the ranks
    )
    model = GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=SEQUENCE_LENGTH)
    model = add_value_head(model) if args.pg_role == "critic" else model
    step.attach(model)  # before the model is wrapped
    return DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())


def forward_backward(
    step: PolicyGradientStep, model: DistributedDataParallel, samples: list[Sample], micro_batch_size: int, steps: int
) -> None:
    """Accumulate the gradient of one optimizer step. Every rank passes all samples and trains its own part.

    `steps` are the optimizer steps that the weights have seen.
    """
    ranks = mpu.get_data_parallel_world_size()
    num_microbatches = -(-len(samples) // (micro_batch_size * ranks))  # rounded up: the last may have empty rows
    batches = cut_microbatches(
        samples,
        num_microbatches=num_microbatches,
        qkv_format="bshd",
        rows=micro_batch_size,
        max_seq_len=SEQUENCE_LENGTH,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=ranks,
    )
    model.zero_grad_buffer()
    step.forward_backward(
        get_forward_backward_func(),
        weight_version=steps,  # for metrics of staleness, where samples have a weight_version
        forward_step_func=step.forward_step,
        data_iterator=iter(batches),
        model=[model],
        num_microbatches=num_microbatches,
        seq_length=SEQUENCE_LENGTH,
        micro_batch_size=micro_batch_size,
    )


def train(args: argparse.Namespace) -> None:
    """One optimizer step for every recorded step; rank 0 writes the metrics."""
    reports: list[StepReport] = []
    step = PolicyGradientStep(LossSettings.from_args(args), on_report=reports.append)
    model = build_model(step, args)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=args.lr, clip_grad=1.0), [model])
    objective = dict(describe(args))
    loss = "value_loss" if args.pg_role == "critic" else "pg_loss"
    is_first = torch.distributed.get_rank() == 0
    if is_first:
        print("\n".join(f"{name}: {text}" for name, text in objective.items()))
    file = MetricsFile(args.metrics_file) if is_first else None
    for iteration, samples in enumerate(read_steps(args.rollouts), start=1):  # here your sampler gives the samples
        optimizer.zero_grad()
        forward_backward(step, model, samples, args.micro_batch_size, iteration - 1)
        was_updated, grad_norm, _ = optimizer.step()
        log = StepLog(
            iteration=iteration,
            report=reports[-1],  # the same on every rank
            learning_rate=args.lr,
            grad_norm=grad_norm,
            skipped=not was_updated,
            objective=objective,
        )
        if file is not None:
            file.write(step_record(log))
            print(f"step {iteration}: {loss} {log.report.metrics[loss]:+.6f}, gradient norm {grad_norm:.6f}")
    if file is not None:
        file.close()


@record  # torchrun shows the error of the rank that failed first
def main() -> None:
    """Train."""
    args = parse_arguments()
    start_processes(args.backend)
    train(args)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
