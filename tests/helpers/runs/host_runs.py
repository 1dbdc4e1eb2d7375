"""Launches of the hosts' proofs on two real ranks, from checkouts where the environment names them."""

import json
import os
from pathlib import Path

from processes import ROOT, environment, on_ranks, wait_for, with_warm_python

LIMIT = 1e-6  # of gradients in float32 against float64
CHECKOUTS = ("SLIME", "MILES", "NEMO_RL")


def checkout(name: str) -> str | None:
    """The folder of a host's checkout: the variable of its name, or a folder of HOSTS, where it is one."""
    folder = os.path.join(os.environ.get("HOSTS", ""), name.lower())
    return os.environ.get(name) or (folder if os.environ.get("HOSTS") and os.path.isdir(folder) else None)


def figures(folder: Path, module: str, *, full: bool, **variables: str) -> dict:
    """What `tests/hosts/programs/MODULE.py` finds."""
    env = {name: value for name, value in environment().items() if name not in CHECKOUTS}
    env = with_warm_python(env) | variables | ({"FULL": "1"} if full else {})
    wait_for(on_ranks(2, env, str(ROOT / "tests/hosts/programs/recipe_ranks.py"), str(folder), module))
    return json.loads((folder / f"{module}.json").read_text(encoding="utf-8"))
