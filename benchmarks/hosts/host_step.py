"""What the benchmarks of hosts share: a model, documents, an optimizer that steps nothing, and what is measured of a
step.

One process, no Transformer Engine. A step's micro-batches hold one document each; next to the peak memory is what
docs/kernels.md (Memory) expects of it: what was allocated when the hidden states left the layers, and what the head may
add.
"""

import argparse
import gc
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

TESTS = Path(__file__).parents[2] / "tests"
sys.path[:0] = [
    str(TESTS / folder)
    for folder in (
        "ranks/programs",
        "hosts/programs",
        "helpers",
        "helpers/cases",
        "helpers/files",
        "helpers/runs",
        "oracles",
    )
]
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "examples")]
GIB = 2**30


def options(description: str) -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--cpu", action="store_true", help="does it run: gloo, float32, PyTorch's kernels")
    for name, size in (("layers", 24), ("hidden", 896), ("heads", 14), ("columns", 151_936), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--documents", type=int, default=8)
    parser.add_argument("--steps", type=int, default=5, help="measured, after one that is not")
    return parser.parse_args()


def begin(given: argparse.Namespace) -> torch.device:
    """Start the one process's groups, and say where its tensors are."""
    if given.cpu:
        from cpu import cpu_megatron

        cpu_megatron.enable()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    torch.cuda.set_device(0)
    store = torch.distributed.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
    torch.distributed.init_process_group(
        "gloo" if given.cpu else "cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    return torch.device("cpu") if given.cpu else torch.device("cuda", 0)


def kernel(given: argparse.Namespace) -> dict[str, str]:
    """Ours, where it must be said: on a CPU a build of PyTorch for CUDA would choose Triton."""
    return {"pg_kernel": "torch"} if given.cpu else {}


# --- the model and its data ---


class CausalAttention(nn.Module):
    """Attention of a row that contains one document followed by padding, by torch."""

    def __init__(self, *positional: object, **keywords: object):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: object, **more: object) -> Tensor:
        """[t, h·d] from [t, h, d] each."""
        heads = [tensor.unsqueeze(0).transpose(1, 2) for tensor in (query, key, value)]  # [1, h, t, d]
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return attended.transpose(1, 2).flatten(2)[0]


class Idle:
    """An optimizer that steps nothing, so that what is measured is forward and backward."""

    chained_optimizers = ()

    def __init__(self) -> None:
        self.param_groups = [{"lr": 0.0}]

    def zero_grad(self) -> None:
        """Nothing."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """As it is."""
        return loss

    def step(self) -> tuple[bool, float, int]:
        """Done."""
        return True, 0.0, 0


def build(given: argparse.Namespace) -> nn.Module:
    """GPTModel with tied embeddings, in bfloat16 (float32 on a CPU), under Megatron's DDP."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.module import Float16Module

    config = TransformerConfig(
        num_layers=given.layers,
        hidden_size=given.hidden,
        num_attention_heads=given.heads,
        bf16=not given.cpu,
        params_dtype=torch.float32 if given.cpu else torch.bfloat16,
        use_cpu_initialization=given.cpu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        finalize_model_grads_func=finalize_model_grads,
    )
    spec = get_gpt_layer_local_spec()
    spec.submodules.self_attention.submodules.core_attention = CausalAttention
    model = GPTModel(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=given.columns,
        max_sequence_length=given.tokens,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if not given.cpu:
        model = Float16Module(config, model.cuda())
    return DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)


def documents(given: argparse.Namespace) -> list:
    """One rollout each, random tokens, the second half the response."""
    from megatron_pg import Sample

    generator, rng = torch.Generator().manual_seed(0), random.Random(0)
    half = given.tokens // 2
    return [
        Sample.build(
            tokens=torch.randint(0, given.columns, (given.tokens,), generator=generator),
            response_length=half,
            loss_mask=[1] * half,
            old_logprobs=[-12.0] * half,
            rollout_logprobs=[-12.0] * half,
            advantage=rng.uniform(-1, 1),
            reward=rng.uniform(-1, 1),
            rollout_id=i,
            prompt_id=0,
            sample_id=str(i),
        )
        for i in range(given.documents)
    ]


# --- what a head may add ---


def head_bytes(kind: str, weight: Tensor, tokens: int, rows: int) -> int:
    """Memory beyond weights, gradients' buffers and the layers' activations at the peak, by docs/kernels.md (Memory),
    in bytes.

    Args:
        kind: "fused", a fused head, or "split", one with that backward; "float32", stored float32 logits; "cast",
            stored bfloat16 logits, of which Float16Module makes float32 ones; "twice", stored float32 logits and once
            more their softmax or gradient.
        weight: [V, H], bfloat16.
        tokens: N, of the micro-batch.
        rows: N_t of them, for which the fused head makes logits.
    """
    from megatron_pg.lm_head.products import block_rows, chunk_rows

    columns, hidden = weight.shape
    logits, of_hidden = 4 * tokens * columns, 2 * tokens * hidden
    chunk = chunk_rows(weight, 1)
    block = min(block_rows(weight, chunk), tokens if kind == "float32" else rows)
    gradient = 2 * columns * block * (2 if kind == "split" else 1) + 2 * hidden * block
    return {
        "fused": 4 * columns * min(chunk, rows) + gradient + 36 * rows + of_hidden,
        "split": 4 * columns * min(chunk, rows) + gradient + 36 * rows + of_hidden,
        "float32": logits + gradient + of_hidden,
        "cast": logits + logits // 2,
        "twice": 2 * logits,
    }[kind]


# --- what is measured ---


@dataclass(slots=True)
class Meter:
    """Times and memory of the steps of one loss; on a CPU times alone."""

    name: str
    device: torch.device
    milliseconds: list[float] = field(default_factory=list)
    peaks: list[int] = field(default_factory=list)  # bytes
    at_head: list[int] = field(default_factory=list)  # allocated when the hidden states have left the layers

    def watch(self, model: nn.Module) -> None:
        """Note what is allocated at the head, in every micro-batch; the layers are Megatron's TransformerBlock."""
        inner = model
        while hasattr(inner, "module"):
            inner = inner.module
        if self.device.type == "cuda":
            note = lambda *given: self.at_head.append(torch.cuda.memory_allocated())  # noqa: E731
            inner.decoder.register_forward_hook(note)

    def timed(self, function: Callable) -> Callable:
        """The function, measured."""
        on_gpu = self.device.type == "cuda"

        def run(*positional: object, **keywords: object) -> object:
            if on_gpu:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            begun = time.perf_counter()
            result = function(*positional, **keywords)
            if on_gpu:
                torch.cuda.synchronize()
                self.peaks.append(torch.cuda.max_memory_allocated())
            self.milliseconds.append(1e3 * (time.perf_counter() - begun))
            return result

        return run

    def report(self, added: int | None) -> dict[str, Any]:
        """Median over the steps after the first one; `added`: bytes that the head is expected to add, None if not
        known."""
        times = self.milliseconds[1:]
        row: dict[str, Any] = {"loss": self.name, "ms": statistics.median(times), "ms, largest": max(times)}
        if self.peaks:
            head = max(self.at_head)
            row |= {"GiB": max(self.peaks[1:]) / GIB, "GiB at the head": head / GIB}
            row |= {} if added is None else {"GiB, expected": (head + added) / GIB}
        return row


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One of a host's losses."""

    name: str
    memory: str | None  # kind of `head_bytes`; None: not known
    run: Callable[[Meter], nn.Module]  # the steps, on a new model, which it returns
    all_rows: bool = False  # a fused head of rows without a loss, too


def compare(losses: Sequence[Loss], given: argparse.Namespace, device: torch.device) -> None:
    """Every loss in turn on its own model, compared with the first one's time and memory."""
    host: dict[str, Any] = {}
    for loss in losses:
        meter = Meter(loss.name, device)
        model = loss.run(meter)
        weight = next(
            parameter for key, parameter in model.named_parameters() if key.endswith("word_embeddings.weight")
        )
        rows = given.tokens if loss.all_rows else given.tokens // 2
        added = None if loss.memory is None else head_bytes(loss.memory, weight, given.tokens, rows)
        row = meter.report(added)
        host = host or row
        row["time, of the host's"] = row["ms"] / host["ms"]
        for name in ("GiB", "GiB, expected"):
            row |= {name.replace("GiB", "GiB lower"): host[name] - row[name]} if name in row else {}
        print(json.dumps({key: round(v, 3) if isinstance(v, float) else v for key, v in row.items()}), flush=True)
        del model, weight
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
