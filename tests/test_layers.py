"""The house rules that a reader relies on: import arrows, no hidden collective, no host sync."""

import ast
import graphlib
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "megatron_pg"
FILES = sorted(PACKAGE.rglob("*.py"))

# Every room and the rooms it may import; a room that is not listed fails the test.
ALLOWED = {
    "__init__": set(),
    "import_path": set(),
    "objective_flags": set(),
    "head_flags": {"objective_flags"},
    "args": {"head_flags", "import_path", "objective_flags"},
    "explain": {"head_flags", "objective_flags"},
    "collectives": set(),
    "cp_utils": set(),
    "printable": set(),
    "rollout_lines": {"printable"},
    "rollouts": {"cp_utils", "printable", "rollout_lines"},
    "sequences": set(),
    "batch": {"cp_utils", "rollouts", "sequences"},
    "reducers": {"reducers", "args", "cp_utils", "import_path"},
    "plan": {"args", "collectives", "reducers", "rollouts"},
    "logprobs": set(),
    "objectives": {"args", "head_flags", "import_path", "objective_flags", "objectives"},
    "kl": {"objectives"},
    "corrections": {"objectives", "rollouts"},
    "kernels": {"args", "kernels", "kl", "logprobs", "objectives", "sequences"},
    "metrics": {"args", "metrics", "objectives"},
    "lm_head": {"args", "head_flags", "kernels", "lm_head", "logprobs"},
    "output_layer": {"lm_head"},
    "loss": {
        *(
            "batch",
            "corrections",
            "kernels",
            "lm_head",
            "metrics",
            "objective_flags",
            "objectives",
            "output_layer",
            "plan",
        ),
        "reducers",
    },
    "accumulation": {"batch", "collectives", "cp_utils", "rollouts"},
    "forward_step": {"accumulation", "batch", "collectives", "cp_utils", "loss", "output_layer", "plan"},
    "reporting": {"printable"},
    "pretrain": {"accumulation", "args", "collectives", "explain", "forward_step", "import_path", "loss", "reporting"},
    "cli": {
        *("args", "batch", "cli", "declarations", "flags", "metrics", "objectives", "reducers", "rollouts", "step")
    },
    "__main__": {"cli"},
}

# The same within two rooms of several.
WITHIN = {
    "kernels": {
        "__init__": {"policy_loss", "reference", "triton_loss"},
        "policy_loss": set(),
        "reference": {"policy_loss"},
        "tiles": set(),
        "vocab_parallel": {"tiles"},
        "surrogate": {"policy_loss", "tiles"},
        "ring": {"policy_loss", "tiles"},
        "triton_loss": {"policy_loss", "ring", "surrogate", "vocab_parallel"},
    },
    "lm_head": {
        "__init__": {"logits", "logprobs", "loss"},
        "products": set(),
        "chunking": {"products"},
        "inputs": set(),
        "readers": {"inputs"},
        "triton_reader": {"readers"},
        "chunks": {"chunking", "products", "readers", "triton_reader"},
        "gradients": {"chunking", "products"},
        "logits": {"chunking", "gradients", "inputs", "products"},
        "logprobs": {"chunks", "gradients", "inputs", "products", "readers"},
        "loss": {"chunks", "gradients", "inputs", "logprobs", "products", "readers"},
    },
}


def room_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_import_arrows_go_one_way(path):
    rooms = {name.split(".")[1] for name in imports_of(path) if name.startswith("megatron_pg.")} & set(ALLOWED)
    assert rooms <= ALLOWED[room_of(path)], f"{path.name} imports {rooms - ALLOWED[room_of(path)]}"


@pytest.mark.parametrize("package", WITHIN)
def test_import_arrows_go_one_way_within_a_room(package):
    allowed = WITHIN[package]
    assert {path.stem for path in (PACKAGE / package).glob("*.py")} == set(allowed)
    for path in (PACKAGE / package).glob("*.py"):
        imports = {name.split(".")[2] for name in imports_of(path) if name.startswith(f"megatron_pg.{package}.")}
        inner = imports & set(allowed)
        assert inner <= allowed[path.stem], f"{path.name} imports {inner - allowed[path.stem]}"
    assert tuple(graphlib.TopologicalSorter(allowed).static_order())  # raises on a cycle


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_megatron_is_imported_in_two_rooms_only(path):
    megatron = {name for name in imports_of(path) if name == "megatron" or name.startswith("megatron.")}
    if room_of(path) == "pretrain":
        return
    assert all(name.startswith("megatron.core") for name in megatron)
    assert not megatron or room_of(path) == "forward_step"


@pytest.mark.parametrize(
    ("rooms", "forbidden"),
    [
        ("reducers objectives kernels kl corrections", ("all_reduce", "get_rank", "cp_rank", "parallel_state")),
        ("objectives", (".mean(", "mask")),
        ("kernels objectives kl sequences logprobs loss", (".item()", ".tolist()", ".cpu()", "nonzero", "synchronize")),
    ],
)
def test_a_room_keeps_out_of_what_is_not_its_business(rooms, forbidden):
    for path in FILES:
        if room_of(path) in rooms.split():
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
        "[getattr(megatron_pg, name) for name in megatron_pg.__all__]\n"
        "import torch, megatron_pg.loss\n"
        "assert not [m for m in sys.modules if m == 'megatron' or m.startswith('megatron.')]\n"
        "assert not torch.cuda.is_initialized()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=PACKAGE.parent)


UNIT = Path(__file__).parent / "unit"
# The file of the modules that have none of their own: tests of a whole room, or of what only a whole step shows.
TOGETHER = {
    "declarations/*": "tests/unit/declarations/test_declarations.py",
    "flags/errors.py": "tests/unit/test_args.py",
    "flags/facts.py": "tests/unit/test_args.py",
    "flags/megatron.py": "tests/unit/flags/test_compatibility.py",
    "rollouts/fields.py": "tests/unit/rollouts/test_sample.py",
    "rollouts/file.py": "tests/unit/rollouts/test_sample.py",
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
