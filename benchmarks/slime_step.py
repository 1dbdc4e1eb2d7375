"""Step time and peak memory of slime's own trainer with its own loss, with ours, and with ours and the fused head.

    SLIME=checkout python benchmarks/slime_step.py                      # one GPU, a model of 0.5 billion parameters
    SLIME=checkout python benchmarks/slime_step.py --cpu --layers 1 --hidden 64 --heads 1 --columns 64 --tokens 32  # does it run

slime's `train_actor` of an unmodified checkout: one optimizer step of a rollout, one document in a micro-batch, random tokens, the
optimizer does nothing. The largest of three steps after a first one that is not counted.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS / folder) for folder in ("ranks", "support", "oracles")]
sys.path.insert(0, str(TESTS.parent / "examples"))
GIB = 2**30
LOSSES = {
    "slime's own loss": None,
    "ours": {},
    "ours, --fp32-lm-head": {"fp32_lm_head": True},
    "ours, --pg-fused-head": {"pg_fused_head": "forward"},
    "ours, --pg-fused-head recompute": {"pg_fused_head": "recompute"},
}


def options() -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--cpu", action="store_true")
    for name, size in (("layers", 24), ("hidden", 896), ("heads", 14), ("columns", 151_936), ("tokens", 8192)):
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--documents", type=int, default=8)
    return parser.parse_args()


class CausalAttention(nn.Module):
    """The core of a row that holds one document and padding behind it, by torch."""

    def __init__(self, *positional: object, **keywords: object):
        super().__init__()

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *rest: object, **more: object) -> Tensor:
        """[t, h·d] from [t, h, d] each."""
        heads = [each.unsqueeze(0).transpose(1, 2) for each in (query, key, value)]  # [1, h, t, d]
        found = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        return found.transpose(1, 2).flatten(2)[0]


class Idle:
    """An optimizer that steps nothing, so that what is measured is forward and backward."""

    param_groups = ()
    chained_optimizers = ()

    def zero_grad(self) -> None:
        """Nothing."""

    def scale_loss(self, loss: Tensor) -> Tensor:
        """As it is."""
        return loss

    def step(self) -> tuple[bool, float, int]:
        """Done."""
        return True, 0.0, 0


def build(given: argparse.Namespace) -> nn.Module:
    """GPTModel in bfloat16 (float32 on a CPU) under Megatron's DDP."""
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


def rollout(given: argparse.Namespace) -> list:
    """One document per rollout, its second half the response."""
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


def measured(function: Callable, device: torch.device, found: dict) -> Callable:
    """slime's train_actor, timed."""

    def run(*positional: object, **keywords: object) -> object:
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        begin = time.perf_counter()
        result = function(*positional, **keywords)
        if device.type == "cuda":
            torch.cuda.synchronize()
            found.setdefault("GiB", []).append(torch.cuda.max_memory_allocated() / GIB)
        found.setdefault("ms", []).append(1e3 * (time.perf_counter() - begin))
        return result

    return run


def main() -> None:
    """Every loss in turn, on one model."""
    given = options()
    if given.cpu:
        import cpu_megatron

        cpu_megatron.enable()
    import rollout_hosts
    import slime_host
    import their_trainers
    from host_cases import Case
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29555", "RANK": "0", "WORLD_SIZE": "1"}
    torch.distributed.init_process_group("gloo" if given.cpu else "nccl")
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    their_trainers.load({"SLIME": os.environ["SLIME"]})
    from slime.backends.megatron_utils import actor

    device = torch.device("cpu" if given.cpu else "cuda")
    theirs, samples, model = actor.MegatronTrainRayActor.train_actor, rollout(given), build(given)
    layer = (model.module if given.cpu else model.module.module).output_layer
    makes_logits = {
        name: value for name, value in vars(layer).items() if name == "_forward_impl"
    }  # which heads replace
    for name, flags in LOSSES.items():
        found: dict[str, list[float]] = {}
        actor.MegatronTrainRayActor.train_actor = measured(theirs, device, found)
        vars(layer).pop("_forward_impl", None)
        vars(layer).update(makes_logits)
        for _ in range(4):
            args = rollout_hosts.arguments(
                "slime",
                Case(rollouts_per_step=given.documents),
                **(flags or {}),
                custom_megatron_init_path=None if flags is None else "megatron_pg.slime.init",
                max_tokens_per_gpu=given.tokens,
                seq_length=given.tokens,
                n_samples_per_prompt=given.documents,
                rollout_batch_size=1,
            )
            slime_host.run(samples, args, model, Idle(), device)
        largest = {unit: round(max(values[1:]), 3) for unit, values in found.items()}
        print(json.dumps({"loss": name, **largest}), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
