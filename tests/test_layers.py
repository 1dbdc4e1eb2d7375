"""The house rules that a reader relies on: import arrows, no hidden collective, no host sync."""

import ast
import graphlib
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_pg"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every room, from the ground upwards, and the rooms that it imports: exactly these, and only from lower floors.
ARROWS = {
    "contract": set(),  # of the step, a room of its own: it imports nothing of ours
    "declarations": set(),
    "rollouts": set(),
    "mismatch": set(),  # numpy alone
    "batch": {"rollouts"},
    "flags": {"declarations", "rollouts"},
    "args": {"declarations", "flags"},
    "cp_utils": {"batch", "rollouts"},
    "objectives": {"declarations", "flags", "rollouts"},
    "kernels": {"batch", "declarations", "objectives"},
    "reducers": {"cp_utils", "declarations", "flags"},
    "lm_head": {"batch", "declarations", "kernels"},
    "metrics": {"batch", "declarations", "kernels", "objectives", "rollouts"},
    "step": {
        *("batch", "contract", "declarations", "flags", "kernels", "lm_head", "metrics", "objectives", "reducers"),
        "rollouts",
    },
    "cli": {
        *("args", "batch", "declarations", "flags", "metrics", "mismatch", "objectives", "reducers", "rollouts"),
        "step",
    },
    "pretrain": {"args", "batch", "declarations", "flags", "metrics", "rollouts", "step"},
    "hosts": {
        *("args", "batch", "cp_utils", "declarations", "flags", "kernels", "lm_head", "metrics", "rollouts"),
        "step",
    },
    "slime": {"hosts"},
    "miles": {"hosts"},
    "nemo_rl": {"hosts"},
    "verl": {"hosts"},
    "__init__": {"args", "batch", "rollouts", "step", "contract"},  # lazily, and for type checkers
    "__main__": {"cli"},
}
_OF_DATA = ("corrections.py", "selections.py")
MOST_FLOORS, MOST_ENTRIES = 9, 23  # a host's adapter has a face in the root


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return "contract" if parts == ("step", "contract") else parts[0]


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def ours(path: Path) -> set[tuple[str, ...]]:
    """The modules of the package that a file imports."""
    named = {tuple(name.split(".")[1:]) for name in imports_of(path) if name.startswith("megatron_pg.")}
    modules = {each.relative_to(PACKAGE).with_suffix("").parts for each in FILES}
    return {parts[:n] for parts in named for n in (1, 2) if parts[:n] in modules or (*parts[:n], "__init__") in modules}


def test_rooms_import_exactly_what_the_drawing_says():
    found = {room: set() for room in ARROWS}
    for path in FILES:
        rooms = {"contract" if parts == ("step", "contract") else parts[0] for parts in ours(path)}
        alone = ours(path) <= {("step",), ("step", "contract")} | {p for p in ours(path) if p[0] != "step"}
        found[room_of(path)] |= rooms - ({"step"} if alone and ("step", "contract") in ours(path) else set())
    assert {room: rooms - {room} for room, rooms in found.items()} == ARROWS


def floors_of_rooms() -> dict[str, int]:
    floors: dict[str, int] = {}
    for room in graphlib.TopologicalSorter(ARROWS).static_order():  # raises on a circle
        floors[room] = 1 + max((floors[below] for below in ARROWS[room]), default=-1)
    return floors


def test_arrows_go_down_over_few_floors():
    floors = floors_of_rooms()
    assert max(floors[room] for room in ARROWS if not room.startswith("__")) < MOST_FLOORS
    assert len({path.relative_to(PACKAGE).parts[0] for path in FILES} | {"py.typed"}) <= MOST_ENTRIES


def test_the_page_for_contributors_has_the_floors_and_arrows():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| (.*) \|$", page, re.MULTILINE)
    shown = {room: (int(floor), set(re.findall(r"`(\w+)`", imports))) for floor, room, imports in rows}
    assert shown == {room: (floor, ARROWS[room]) for room, floor in floors_of_rooms().items()}


@pytest.mark.parametrize("room", sorted({path.parent.name for path in FILES if path.parent != PACKAGE}))
def test_no_circle_within_a_room(room):
    files = {path.stem: path for path in FILES if path.parent.name == room and path.stem != "__init__"}
    arrows = {
        name: {p[1] for p in ours(path) if p[0] == room and len(p) > 1} & set(files) for name, path in files.items()
    }
    assert tuple(graphlib.TopologicalSorter(arrows).static_order())


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_megatron_is_imported_in_few_modules_only(path):
    megatron = {name for name in imports_of(path) if name == "megatron" or name.startswith("megatron.")}
    if room_of(path) == "pretrain":
        return
    assert all(name.startswith("megatron.core") for name in megatron)
    assert not megatron or path.relative_to(PACKAGE).parts in {
        *(
            ("step", "forward_step.py"),
            ("step", "checks.py"),
            ("hosts", "rollout_trainer.py"),
            ("hosts", "nemo_loss.py"),
            ("hosts", "verl_engine.py"),
        )
    }


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        ("reducers/* objectives/* kernels/*", ("all_reduce", "get_rank", "cp_rank", "parallel_state")),
        ("objectives/*", (".mean(", "mask")),
        (
            "kernels/* objectives/* batch/sequences.py batch/fields.py metrics/values.py step/loss.py step/contract.py",
            (".item()", ".tolist()", ".cpu()", "nonzero", "synchronize"),
        ),
    ],
)
def test_a_module_keeps_out_of_what_is_not_its_business(modules, forbidden):
    for path in FILES:
        module = path.relative_to(PACKAGE)
        if any(map(module.match, modules.split())) and module.name not in _OF_DATA:  # which see data, no losses
            source = path.read_text(encoding="utf-8")
            assert not [word for word in forbidden if word in source], path.name


def test_nothing_hides_a_bad_value_or_runs_stored_code():
    for path in FILES:
        source = path.read_text(encoding="utf-8")
        found = [
            word for word in ("nan_to_num", "import pickle", "torch.load(", "_object(", "get_args()") if word in source
        ]
        allowed = {"pretrain.py": ["get_args()"], "dumps.py": ["torch.load("]}
        assert found == allowed.get(path.name, []), path.name


def test_what_others_saved_is_loaded_as_tensors_and_plain_values_only():
    source = (PACKAGE / "cli" / "dumps.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert len(loads) == 1
    assert {k.arg: ast.unparse(k.value) for k in loads[0].keywords}["weights_only"] == "True"
    assert "safe_globals" not in source


def test_importing_the_package_needs_neither_megatron_nor_cuda():
    code = (
        "import sys, megatron_pg\n"
        "assert 'torch' not in sys.modules\n"
        "[getattr(megatron_pg, name) for name in megatron_pg.__all__ if name not in ('PolicyGradientStep', 'StepLog')]\n"
        "import torch, megatron_pg.step.loss\n"
        "assert not [m for m in sys.modules if m == 'megatron' or m.startswith('megatron.')]\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=processes.PACKAGE)


UNIT = Path(__file__).parent / "unit"
# The file of the modules that have none of their own: tests of a whole room, or of what only a whole step shows.
TOGETHER = {
    "declarations/*": "tests/unit/declarations/test_declarations.py",
    "flags/errors.py": "tests/unit/test_args.py",
    "flags/facts.py": "tests/unit/test_args.py",
    "flags/megatron.py": "tests/unit/flags/test_compatibility.py",
    "rollouts/fields.py": "tests/unit/rollouts/test_sample.py",
    "rollouts/file.py": "tests/unit/rollouts/test_sample.py",
    "payloads/*": "tests/unit/rollouts/test_payloads.py",
    "batch/fields.py": "tests/unit/batch/test_pack.py",
    "batch/slicing.py": "tests/unit/batch/test_pack.py",
    "batch/zigzag.py": "tests/unit/test_cp_utils.py",
    "reducers/*": "tests/unit/reducers/test_reducers.py",
    "objectives/*": "tests/unit/objectives/test_formulas.py",
    "kernels/api.py": "tests/unit/kernels/test_reference.py",
    "kernels/checks.py": "tests/unit/kernels/test_reference.py",
    "kernels/vocabulary.py": "tests/unit/kernels/test_logprobs.py",
    "kernels/*": "tests/unit/kernels/test_triton_loss.py",
    "lm_head/*": "tests/unit/lm_head/test_lm_head.py",
    "metrics/*": "tests/unit/metrics/test_table.py",
    "step/*": "tests/properties/test_partition_invariance.py",
    "cli/*": "tests/cli",
    "mismatch/*": "tests/unit/mismatch/test_diagnosis.py",
    "hosts/verl*": "tests/hosts/test_verl.py",
    "hosts/nemo_*.py": "tests/hosts/test_nemo_rl.py",
    "nemo_rl.py": "tests/hosts/test_nemo_rl.py",
    "hosts/*": "tests/hosts/test_rollout_hosts.py",
    "verl.py": "tests/hosts/test_verl.py",
    **dict.fromkeys(("slime.py", "miles.py"), "tests/hosts/test_rollout_hosts.py"),
}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_every_module_has_its_unit_file(path):
    module = path.relative_to(PACKAGE)
    if path.stem in ("__init__", "__main__"):
        return
    shared = [file for pattern, file in TOGETHER.items() if module.match(pattern)]
    own = UNIT / module.parent / f"test_{module.name}"
    assert own.exists() or (shared and (UNIT.parents[1] / shared[0]).exists()), f"{own.relative_to(UNIT)} is missing"


def test_no_test_file_imports_another():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith("test_")], path.name
