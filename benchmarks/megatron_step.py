"""One step of a real Megatron model on a GPU with each of the three heads: loss, gradient, time and peak memory.

    torchrun --nproc-per-node 1 benchmarks/megatron_step.py                      # TP = number of processes

GPTModel in bfloat16 under Megatron's DDP and schedule (megatron.core only), random tokens, an on-policy step: the old
log-probabilities are the model's own, so that every ratio should be 1. The heads are the stored bfloat16 logits,
`--fp32-lm-head` and `--pg-fused-head forward`.
"""

import argparse
import json
import os
import random
import statistics
import time
from dataclasses import replace

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import Float16Module

from megatron_pg import Sample, pack
from megatron_pg.args import add_arguments, validate_args
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.forward_step import PolicyGradientStep

HEADS = {
    "bfloat16 logits, stored": {},
    "--fp32-lm-head": {"float32_logits": True},
    "--pg-fused-head forward": {"head_mode": "forward"},
    "--pg-fused-head recompute": {"head_mode": "recompute"},
}
GIB = 2**30


def build(options: argparse.Namespace) -> GPTModel:
    """The model of this tensor-parallel rank."""
    config = TransformerConfig(
        num_layers=options.layers,
        hidden_size=options.hidden,
        num_attention_heads=options.hidden // 128,
        tensor_model_parallel_size=torch.distributed.get_world_size(),
        bf16=True,
        params_dtype=torch.bfloat16,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        normalization="RMSNorm",
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
    )
    return GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=options.vocabulary,
        max_sequence_length=options.sequence,
        position_embedding_type="rope",
    ).cuda()


def wrap(model: GPTModel) -> DistributedDataParallel:
    """The model as Megatron's training loop wraps it."""
    settings = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    model.config.finalize_model_grads_func = finalize_model_grads
    return DistributedDataParallel(model.config, settings, Float16Module(model.config, model))


def samples(options: argparse.Namespace, old: list[torch.Tensor] | None) -> list[Sample]:
    """One sample per row, half of it response."""
    rng, half = random.Random(0), options.sequence // 2
    return [
        Sample.build(
            tokens=[rng.randrange(options.vocabulary) for _ in range(options.sequence)],
            response_length=half,
            loss_mask=[1] * half,
            old_logprobs=[-1.0] * half if old is None else old[i].tolist(),
            advantage=rng.gauss(0, 1),
        )
        for i in range(options.rows)
    ]


def run(model: DistributedDataParallel, head: dict, options: argparse.Namespace, old=None) -> dict:
    """One step: metrics, gradients, milliseconds and peak memory."""
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--pg-metrics", "basic"])
    settings = replace(LossSettings.from_args(validate_args(args)), **head)
    reports = []
    inner = model.module.module
    forward_impl, loss = inner.output_layer._forward_impl, inner.compute_language_model_loss
    step = PolicyGradientStep(settings, reports.append)
    step.attach(inner)
    batch = pack(samples(options, old), qkv_format="bshd", max_seq_len=options.sequence)
    times = []
    for _ in range(options.repetitions):
        model.zero_grad_buffer()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        step.forward_backward(
            get_forward_backward_func(),
            forward_step_func=step.forward_step,
            data_iterator=iter([batch]),
            model=model,
            num_microbatches=1,
            seq_length=options.sequence,
            micro_batch_size=options.rows,
            forward_only=False,
        )
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() - before
    inner.output_layer._forward_impl, inner.compute_language_model_loss = forward_impl, loss
    gradients = torch.cat([buffer.grad_data.flatten().clone() for buffer in model.buffers])
    return {
        "metrics": reports[-1].metrics,
        "ms": 1e3 * statistics.median(times[1:]),
        "peak_gib": peak / GIB,
        "gradients": gradients,
    }


def old_logprobs(model: DistributedDataParallel, options: argparse.Namespace) -> list[torch.Tensor]:
    """The model's own log-probabilities, from float32 logits by true float32 products, as an exact sampler has them."""
    inner = model.module.module
    kept = {}
    handle = inner.output_layer.register_forward_pre_hook(lambda _, inputs: kept.update(hidden=inputs[0].detach()))
    batch = pack(samples(options, None), qkv_format="bshd", max_seq_len=options.sequence)
    with torch.no_grad():
        inner(batch.tokens.cuda(), batch.position_ids.cuda(), None, runtime_gather_output=True)
    handle.remove()
    weight = inner.output_layer.weight.detach().float()
    if torch.distributed.get_world_size() > 1:
        parts = [torch.empty_like(weight) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(parts, weight)
        weight = torch.cat(parts)
    hidden = kept["hidden"]
    logprobs, half = [], options.sequence // 2
    for i in range(options.rows):
        logits = hidden[options.sequence - half - 1 : -1, i].float() @ weight.t()
        targets = batch.tokens[i, -half:].cuda()
        logprobs.append(logits.log_softmax(-1).gather(1, targets[:, None])[:, 0].cpu())
    return logprobs


def main() -> None:
    """Every head, and how the others differ from the fused one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("layers", 4), ("hidden", 2048), ("vocabulary", 151936), ("sequence", 2048), ("rows", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repetitions", type=int, default=6)
    options = parser.parse_args()
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.distributed.init_process_group("nccl")
    parallel_state.initialize_model_parallel(torch.distributed.get_world_size())
    model_parallel_cuda_manual_seed(1)
    model = wrap(build(options))
    old = old_logprobs(model, options)
    results = {name: run(model, head, options, old) for name, head in HEADS.items()}
    reference = results["--pg-fused-head forward"]["gradients"]
    if torch.distributed.get_rank() == 0:
        print(
            f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {torch.distributed.get_world_size()} GPUs, "
            f"{vars(options)}"
        )
        for name, result in results.items():
            difference = float((result["gradients"] - reference).norm() / reference.norm())
            row = {"head": name, "ms": round(result["ms"], 1), "peak GiB": round(result["peak_gib"], 2)}
            metrics = ("pg_loss", "ratio_new_old", "mean_abs_log_ratio", "max_ratio", "clipped_ratio_fraction")
            row |= {name: result["metrics"][name] for name in metrics if name in result["metrics"]}
            print(json.dumps(row | {"gradient differs from the fused head's by": difference}))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
