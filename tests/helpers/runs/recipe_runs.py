"""The recipes of docs/quickstart.md and docs/migrating.md, run, and the errors of what they found."""

import json
import re
from collections.abc import Sequence
from pathlib import Path

from processes import ROOT, environment, on_ranks, run, wait_for, with_warm_python

RECIPES = ROOT / "examples" / "recipes"
LIMIT = 2e-6  # of gradients in float32 against float64


# --- into a plain pretrain script ---


def launch(*arguments: str, processes: int = 1, first: Sequence[Path] = (), **variables: str) -> str:
    env = environment(*first) if first else with_warm_python(environment())
    env |= {"PROCESSES": str(processes)} | variables
    return run(["bash", str(RECIPES / "launch_plain.sh"), *arguments], env).stdout


def steps_of(output: str) -> list[str]:
    return re.findall(r"^pg +\d+ \| .*$", output, re.MULTILINE)


def numbers_of(steps: list[str]) -> int:
    return sum(line.count(" | ") for line in steps)


CONSTANT = ("plain_after.py", "--loss-aggregation", "constant", "--loss-aggregation-divisor", "1000")


# --- on real ranks ---


def launch_ranks(out: Path, *first: Path) -> dict[str, dict]:
    """What `recipe_ranks` finds on two processes; `first` are folders that come before all others."""
    env = environment(*first) if first else with_warm_python(environment())
    for checkout in ("MEGATRON_LM", "SLIME", "MILES"):
        env.pop(checkout, None)
    names = ["rl_recipe", "slime_recipe"]
    script = [str(ROOT / "tests/hosts/programs/recipe_ranks.py"), str(out), *names]
    wait_for(on_ranks(2, env, *script))
    return {name: json.loads((out / f"{name}.json").read_text(encoding="utf-8")) for name in names}


def errors_in_train_rl(found: dict) -> list[float]:
    """Of our weights, after the error that the script has without them."""
    errors = {name: figure for name, figure in found.items() if name != "release"}
    assert errors.pop("as it is") > 0.1  # mean of micro-batch means, against the token mean of the step
    assert len(errors) == 6
    assert max(errors.values()) < LIMIT
    return list(errors.values())


def errors_in_their_trainer(found: dict) -> list[float]:
    """Of our reducers in a trainer that divides like slime and miles, two layouts."""
    errors = []
    for layout in ("dp2", "cp2"):
        of_layout = dict(found[layout])
        assert of_layout.pop("token_mean, a masked sample") > 0.02  # 1 / 38: their count takes it for one token
        errors += of_layout.values()
    assert len(errors) == 12
    assert max(errors) < LIMIT
    return errors


def errors_in_ours(found: dict) -> list[float]:
    """Of a reducer of their form in our flag; it asks Megatron for no context parallelism, and is told where it
    fails."""
    errors = list(found["theirs in ours"].values())
    assert len(errors) == 2
    assert max(errors) < LIMIT
    assert (
        "custom reducer 'their_reducer.reducer' fails on a tiny step of whole samples: AssertionError"
        in found["refused"]
    )
    return errors
