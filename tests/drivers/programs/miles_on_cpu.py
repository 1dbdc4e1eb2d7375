"""miles' driver on a machine without a GPU."""

from typing import Any

import rollout_on_cpu

ABSENT = ("wandb", "torchft", "ring_flash_attn")


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
        contents={"sglang.srt.server_args": {"ServerArgs": ServerArgs}},
    )
    torch.cuda.mem_get_info = lambda *rest: (8 << 30, 16 << 30)  # miles divides by the total
