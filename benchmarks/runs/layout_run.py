"""examples/train_grpo.py from weights that are the same under every layout; benchmarks/runs/gpu_layouts.py launches it.

A parameter's values follow from its global name alone, so that runs on other numbers of GPUs start from the same model.
At the end every rank's peak memory is written to the run's folder. With DYNAMIC_CP in the environment, and
--docs-per-step, every micro-batch has its own context-parallel ranks. With OPEN_STEP every step is an open step.
"""

import hashlib
import os
import re
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

import train_grpo
from cpu.hybrid_layers import HybridModel
from layout_open import in_open_step
from loop.rollout_documents import groups_of, skip_documents
from megatron.core import parallel_state as mpu
from megatron.training import get_args

from megatron_pg import Documents, PolicyGradientStep, add_value_head, read_rollouts


def global_name(model, name: str) -> str:
    """The parameter's name in a GPTModel, with its layer and its expert counted over all ranks."""
    if match := re.match(r"decoder\.layers\.(\d+)\.", name):
        number = model.decoder.layers[int(match[1])].layer_number
        if isinstance(model, HybridModel):  # attention and MLP apart
            number = (number + 1) // 2
        name = name.replace(match[0], f"decoder.layers.{number}.", 1)
    grouped = re.search(r"experts\.(linear_fc\d)\.(weight|bias)(\d+)$", name)
    if grouped:
        name = name.replace(grouped[0], f"experts.local_experts.{grouped[3]}.{grouped[1]}.{grouped[2]}")
    if match := re.search(r"local_experts\.(\d+)\.", name):
        experts = get_args().num_experts // mpu.get_expert_model_parallel_world_size()
        number = mpu.get_expert_model_parallel_rank() * experts + int(match[1])
        name = name.replace(match[0], f"experts.{number}.", 1)
    return "embedding.word_embeddings.weight" if name == "output_layer.weight" else name


def fill(model) -> None:
    """Values by global name; a tensor-parallel rank takes its part."""
    for name, parameter in model.named_parameters():
        name = global_name(model, name)
        split = getattr(parameter, "tensor_model_parallel", False) and "experts" not in name
        shape, axis = list(parameter.shape), getattr(parameter, "partition_dim", 0)
        if split:
            shape[axis] *= mpu.get_tensor_model_parallel_world_size()
        generator = torch.Generator().manual_seed(int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16))
        scale, middle = (
            (0.0, 1.0) if "norm" in name and "weight" in name else (0.0, 0.0) if "bias" in name else (0.05, 0.0)
        )
        whole = torch.randn(shape, generator=generator) * scale + middle
        mine = (
            whole.chunk(mpu.get_tensor_model_parallel_world_size(), axis)[mpu.get_tensor_model_parallel_rank()]
            if split
            else whole
        )
        with torch.no_grad():  # the data of an FP8 parameter require a gradient too
            parameter.copy_(mine)
        if hasattr(parameter, "get_high_precision_init_val"):  # an FP8 parameter, whose optimizer starts from this copy
            parameter.get_high_precision_init_val().copy_(mine)


class SameEverywhere(train_grpo.Example):
    """The example with those weights, and a value head for a critic."""

    def model_provider(self, *positional, **keywords):
        """The example's model, filled."""
        model = super().model_provider(*positional, **keywords)
        model = add_value_head(model) if get_args().pg_role == "critic" else model
        fill(model)
        return model


class SharedDocuments(SameEverywhere):
    """The same, with all documents on every rank, as `dynamic_cp` needs them."""

    def recorded_documents(self, args) -> Documents:
        """The rollouts of the file, in its order."""
        groups = groups_of(read_rollouts(args.rollouts), "rollout_id")
        return Documents(begin=lambda position: skip_documents(groups, position))


def write_peak(folder: Path) -> None:
    """This rank's peak memory, in bytes."""
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    (folder / f"peak.{os.environ['RANK']}").write_text(str(peak))


if __name__ == "__main__":
    train_grpo.Example = SameEverywhere
    if "OPEN_STEP" in os.environ:
        PolicyGradientStep.forward_backward = in_open_step
    if "DYNAMIC_CP" in os.environ:
        train_grpo.Example, train_grpo.pretrain = SharedDocuments, partial(train_grpo.pretrain, dynamic_cp=True)
    train_grpo.main()
    write_peak(Path(sys.argv[sys.argv.index("--run-dir") + 1]))
