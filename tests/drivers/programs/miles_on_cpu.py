"""miles' driver on a machine without a GPU."""

import argparse
from types import ModuleType
from typing import Any

import rollout_on_cpu

ABSENT = ("wandb", "torchft", "ring_flash_attn", "megatron.training.tokenizer")


class ServerArgs:
    """Options of the engine that miles' own validation reads, though it starts no engine."""

    @staticmethod
    def add_cli_args(parser: Any, **rest: Any) -> None:
        for name in ("dp", "pp", "ep"):
            parser.add_argument(f"--{name}-size", type=int, default=1)
        parser.add_argument("--enable-dp-attention", action="store_true")
        parser.add_argument("--cuda-graph-backend-prefill", default=None)


def prepare() -> None:
    """Called before miles is imported."""
    import torch

    rollout_on_cpu.prepare(
        "miles",
        data="miles.backends.training_utils.data",
        absent=ABSENT,
        contents={
            "sglang.srt.server_args": {"ServerArgs": ServerArgs},
            "megatron.training.tokenizer.tokenizer": {"_vocab_size_with_padding": lambda size, args: size},
        },
        after={"miles.backends.megatron_utils.arguments": _set_older_names},
    )
    torch.cuda.mem_get_info = lambda *rest: (8 << 30, 16 << 30)  # miles divides by the total


def _set_older_names(arguments: ModuleType) -> None:
    """miles reads arguments that megatron-core 0.17.1 has renamed."""
    set_defaults = arguments.set_default_megatron_args

    def set_default_megatron_args(args: argparse.Namespace) -> Any:
        args.enable_gloo_process_groups = True
        args.use_checkpoint_lr_scheduler = args.override_lr_scheduler = False
        return set_defaults(args)

    arguments.set_default_megatron_args = set_default_megatron_args
