"""Recipes on real ranks over gloo: a script that leaves each one's figures as a file.

    python -m torch.distributed.run --nproc-per-node 2 tests/hosts/programs/recipe_ranks.py OUT_DIR rl_recipe
    slime_recipe

`tests`, `examples`, `examples/recipes` and the package are on PYTHONPATH.
"""

import json
import sys
from importlib import import_module
from pathlib import Path

from cpu import cpu_megatron

cpu_megatron.enable()

import megatron.core
import torch


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for name in sys.argv[2:]:
        found = {"release": megatron.core.__shortversion__, **import_module(name).figures()}
        if torch.distributed.get_rank() == 0:
            Path(sys.argv[1], f"{name}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
