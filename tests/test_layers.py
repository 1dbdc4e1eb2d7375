"""The rules of the code that a reader relies on: layers of imports, no hidden collective, no host sync."""

import ast
import graphlib
import re
import subprocess
import sys
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

import processes
import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_pg"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every package or module at the top, and those that it imports: exactly these, and only from lower layers.
IMPORTS = {
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
    "lm_head": {"declarations", "kernels"},
    "metrics": {"batch", "declarations", "kernels", "objectives", "rollouts"},
    "plan": {
        *("args", "batch", "declarations", "flags", "kernels", "lm_head", "metrics", "objectives", "reducers"),
        "rollouts",
    },
    "step": {"batch", "declarations", "flags", "kernels", "lm_head", "metrics", "plan"},
    "cli": {
        *("args", "batch", "declarations", "flags", "metrics", "mismatch", "objectives", "plan", "reducers"),
        "rollouts",
    },
    "pretrain": {"args", "batch", "declarations", "flags", "metrics", "plan", "rollouts", "step"},
    "hosts": {
        *("args", "batch", "cp_utils", "declarations", "flags", "kernels", "lm_head", "metrics", "plan", "rollouts"),
        "step",
    },
    "slime": {"hosts"},
    "miles": {"hosts"},
    "nemo_rl": {"hosts"},
    "verl": {"hosts"},
    "__init__": {  # lazily, and for type checkers
        *("args", "batch", "declarations", "flags", "lm_head", "metrics", "plan", "rollouts", "step")
    },
    "__main__": {"cli"},
}
_OF_DATA = ("correction.py", "selections.py")
MOST_LAYERS, MOST_ENTRIES, MOST_FILES = 10, 24, 16
MODULES = {path.relative_to(PACKAGE).with_suffix("").parts: path for path in FILES}


@cache
def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def modules_imported(path: Path) -> set[tuple[str, ...]]:
    """The modules of the package that a file imports, packages by their `__init__`."""
    modules = set()
    for name in imports_of(path):
        parts = tuple(name.split(".")[1:])
        if name.startswith("megatron_pg."):
            modules |= {module for module in (parts, (*parts, "__init__")) if module in MODULES}
    return modules


def test_packages_import_exactly_what_is_declared():
    imported = {package: set() for package in IMPORTS}
    for module, path in MODULES.items():
        imported[module[0]] |= {other[0] for other in modules_imported(path)} - {module[0]}
    assert imported == IMPORTS


def layers() -> dict[str, int]:
    heights: dict[str, int] = {}
    for package in graphlib.TopologicalSorter(IMPORTS).static_order():  # raises on a cycle
        heights[package] = 1 + max((heights[below] for below in IMPORTS[package]), default=-1)
    return heights


def test_imports_point_down_over_few_layers():
    assert max(height for package, height in layers().items() if not package.startswith("__")) < MOST_LAYERS
    assert len({module[0] for module in MODULES} | {"py.typed"}) <= MOST_ENTRIES


def test_contributing_draws_the_layers():
    page = (PACKAGE.parent / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| .+ \| (.*) \|$", page, re.MULTILINE)
    drawn = {package: (int(height), set(re.findall(r"`(\w+)`", imports))) for height, package, imports in rows}
    assert drawn == {package: (height, IMPORTS[package]) for package, height in layers().items()}


def test_no_cycle_of_modules():
    imported = {}
    for module, path in MODULES.items():
        below = {(*module[:n], "__init__") for n in range(len(module))}  # a module's own packages
        imported[module] = modules_imported(path) - {module} - below
    assert tuple(graphlib.TopologicalSorter(imported).static_order())


@pytest.mark.parametrize("top", ["megatron_pg", "examples", "benchmarks", "papers", "tests"])
def test_no_folder_is_crowded(top):
    root = PACKAGE.parent / top
    for folder in [root, *(path for path in root.rglob("*") if path.is_dir())]:
        files = [path for path in folder.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
        assert len(files) <= MOST_FILES, folder


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_megatron_is_imported_in_few_modules_only(path):
    megatron = {name for name in imports_of(path) if name == "megatron" or name.startswith("megatron.")}
    if path.relative_to(PACKAGE).with_suffix("").parts[0] == "pretrain":
        return
    assert all(name.startswith("megatron.core") for name in megatron)
    assert not megatron or path.relative_to(PACKAGE).parts in {
        *(
            ("step", "forward_step.py"),
            ("step", "checks.py"),
            ("step", "open_step.py"),
            ("step", "synchronization.py"),
            ("hosts", "rollout", "trainer.py"),
            ("hosts", "nemo_rl", "loss.py"),
            ("hosts", "verl", "engine.py"),
        )
    }


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        (
            "reducers/* objectives/* objectives/*/* kernels/* kernels/triton/*",
            ("all_reduce", "get_rank", "cp_rank", "parallel_state"),
        ),
        ("objectives/* objectives/*/*", (".mean(", "mask")),
        (
            "kernels/* kernels/triton/* objectives/* objectives/*/* batch/sequences.py batch/fields.py "
            "metrics/values.py step/loss.py step/loss_scaling.py",
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
        allowed = {"run.py": ["get_args()"], "dumps.py": ["torch.load("]}
        assert found == allowed.get(path.name, []), path.name


def test_what_others_saved_is_loaded_as_tensors_and_plain_values_only():
    source = (PACKAGE / "cli/rollouts/dumps.py").read_text(encoding="utf-8")
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func) == "torch.load"]
    assert len(loads) == 1
    assert {k.arg: ast.unparse(k.value) for k in loads[0].keywords}["weights_only"] == "True"
    assert "safe_globals" not in source


def test_importing_the_package_needs_neither_megatron_nor_cuda():
    code = (
        "import sys, megatron_pg\n"
        "assert 'torch' not in sys.modules\n"
        "free = [name for name in megatron_pg.__all__ if name not in ('OpenStep', 'PolicyGradientStep')]\n"
        "[getattr(megatron_pg, name) for name in free]\n"
        "import torch, megatron_pg.step.loss\n"
        "assert not [m for m in sys.modules if m == 'megatron' or m.startswith('megatron.')]\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=processes.PACKAGE)


UNIT = Path(__file__).parent / "unit"
# The file of the modules without their own: tests of a whole package, or of what only a whole step shows.
TOGETHER = {
    "declarations/*": "tests/unit/declarations/test_declarations.py",
    "flags/errors.py": "tests/unit/test_args.py",
    "flags/megatron.py": "tests/unit/flags/test_compatibility.py",
    "flags/*": "tests/unit/flags/test_rules.py",
    "rollouts/fields.py": "tests/unit/rollouts/test_sample.py",
    "rollouts/file.py": "tests/unit/rollouts/test_sample.py",
    "rollouts/payloads/*": "tests/unit/rollouts/test_payloads.py",
    "batch/fields.py": "tests/unit/batch/test_pack.py",
    "batch/slicing.py": "tests/unit/batch/test_pack.py",
    "batch/zigzag.py": "tests/unit/test_cp_utils.py",
    "reducers/*": "tests/unit/reducers/test_reducers.py",
    "objectives/*": "tests/unit/objectives/test_formulas.py",
    "kernels/api.py": "tests/unit/kernels/test_reference.py",
    "kernels/checks.py": "tests/unit/kernels/test_reference.py",
    "kernels/vocabulary.py": "tests/unit/kernels/test_label_logprobs.py",
    "kernels/*": "tests/unit/kernels/triton/test_loss.py",
    "lm_head/*": "tests/unit/lm_head/test_lm_head.py",
    "metrics/*": "tests/unit/metrics/test_table.py",
    "plan/*": "tests/properties/test_partition_invariance.py",
    "pretrain/*": "tests/unit/pretrain/test_run.py",
    "step/*": "tests/properties/test_partition_invariance.py",
    "cli/*": "tests/cli",
    "mismatch/*": "tests/unit/mismatch/test_diagnosis.py",
    "hosts/verl/*": "tests/hosts/test_verl.py",
    "hosts/nemo_rl/*": "tests/hosts/test_nemo_rl.py",
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
    shared = [file for pattern, file in TOGETHER.items() if fnmatch(module.as_posix(), pattern)]
    own = UNIT / module.parent / f"test_{module.name}"
    assert own.exists() or (shared and (UNIT.parents[1] / shared[0]).exists()), f"{own.relative_to(UNIT)} is missing"


def test_no_test_file_imports_another():
    for path in Path(__file__).parent.rglob("*.py"):
        assert not [name for name in imports_of(path) if name.startswith("test_")], path.name
