"""The drop-in recipes of docs/recipes.md, run: into a plain pretrain script, into train_rl.py, and reducers both ways."""

import difflib
import importlib
import json
import re
import subprocess
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from processes import ROOT, environment

from megatron_pg.cp_utils import response_index

RECIPES = ROOT / "examples" / "recipes"
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")


def block_of(page: str, first_line: str) -> str:
    """The code block of a page that begins with this line."""
    (found,) = (b for b in re.findall(r"```[^\n]*\n(.*?)```", page, re.DOTALL) if b.startswith(first_line))
    return found


# --- into a plain pretrain script ---


def launch(*arguments: str, processes: int = 1, path: str = "") -> str:
    done = subprocess.run(
        ["bash", str(RECIPES / "launch_plain.sh"), *arguments],
        env=(environment(path) if path else environment()) | {"PYTHON": sys.executable, "PROCESSES": str(processes)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def steps_of(output: str) -> list[str]:
    return re.findall(r"^pg +\d+ \| .*$", output, re.MULTILINE)


@pytest.fixture(scope="module")
def constant():
    """What the script on our loss prints, with Dr. GRPO's constant."""
    return launch("plain_after.py", "--loss-aggregation", "constant", "--loss-aggregation-divisor", "1000")


def test_the_plain_script_takes_five_new_lines_which_the_page_shows():
    before, after = ((RECIPES / f"plain_{name}.py").read_text(encoding="utf-8") for name in ("before", "after"))
    changes = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    new = [line[1:] for line in changes if line.startswith("+") and line[1:].strip()]
    assert len(new) == 5
    shown = block_of(PAGE, "-from megatron.training import get_args, pretrain").splitlines()
    assert [line[1:] for line in shown if line.startswith("+")] == new
    gone = {line[1:] for line in changes if line.startswith("-")}
    assert {line[1:] for line in shown if line.startswith("-")} <= gone


def test_the_plain_script_trains_before_and_after(constant):
    assert "lm loss: 2." in launch("plain_before.py", processes=2)
    assert "(Σ m·ℓ)/(N_r·L)  (--loss-aggregation constant --loss-aggregation-divisor 1000)" in constant
    assert [line.split(" | ")[1][:10] for line in steps_of(constant)] == ["pg_loss -0"] * 2


def test_a_forward_step_that_would_never_be_called_is_refused():
    code = (
        "import cpu_megatron; cpu_megatron.enable()\n"
        "from megatron_pg.pretrain import pretrain\n"
        "def f(*arguments): pass\n"
        "f.is_distributed = True\n"
        "given = dict(train_valid_test_dataset_provider=f, model_provider=f, model_type=None)\n"
        "pretrain(**given, forward_step_func=f)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True)
    assert done.returncode == 1
    assert "ValueError: forward_step_func has no effect here" in done.stderr


# --- their reducer file as ours ---

THEIRS = """
from megatron.core import mpu

DIVISOR = 1000.0

def reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    assert mpu.get_context_parallel_world_size() == 1
    def token_sum(x):
        return sum((part * mask).sum() for part, mask in zip(x.split(response_lengths, dim=0), loss_masks, strict=False))
    return token_sum if calculate_per_token_loss else lambda x: token_sum(x) / DIVISOR
"""


def test_a_reducer_file_of_slime_or_miles_trains_as_ours_and_is_constant_with_its_divisor(constant, tmp_path):
    (tmp_path / "their_reducer.py").write_text(THEIRS, encoding="utf-8")
    flag = "--custom-pg-loss-reducer-function-path"
    theirs = launch("plain_after.py", flag, "their_reducer.reducer", path=str(tmp_path))
    assert len(steps_of(theirs)) == 2
    assert steps_of(theirs) == steps_of(constant)


# --- our reducers as theirs ---

LENGTHS = [(9, 6), (4, 1), (12, 7)]  # total, response
MASKS = [torch.tensor(m, dtype=torch.int32) for m in ([1, 0, 1, 1, 1, 0], [1], [0, 1, 1, 1, 1, 1, 1])]


@pytest.fixture
def my_reducers(tmp_path, monkeypatch):
    """The user's file that the page shows."""
    (tmp_path / "my_reducers.py").write_text(block_of(PAGE, "# my_reducers.py"), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("my_reducers", None)


def called_like_slime(path: str, x: torch.Tensor, *, per_token: bool = False) -> torch.Tensor:
    """slime and miles: the path is split at its last dot, the four arguments are positional, x is this rank's."""
    module, _, name = path.rpartition(".")
    function = getattr(importlib.import_module(module), name)
    return function([t for t, _ in LENGTHS], [r for _, r in LENGTHS], MASKS, per_token)(x)


def expected(x: torch.Tensor, divisor: float | None) -> float:
    total, start = 0.0, 0
    for mask in MASKS:
        for k, trained in enumerate(mask.tolist()):
            total += trained * x[start + k].item() / (divisor or sum(mask.tolist()))
        start += len(mask)
    return total


PATHS = [
    ("megatron_pg.cp_utils.get_sum_of_sample_mean", None),
    ("my_reducers.dr_grpo", 4096.0),
    ("my_reducers.token_sum", 1.0),
]


@pytest.mark.parametrize(("path", "divisor"), PATHS)
def test_our_reducers_work_as_theirs(path, divisor, my_reducers):
    x = torch.randn(14, dtype=torch.float64, requires_grad=True)
    value = called_like_slime(path, x)
    assert value.item() == pytest.approx(expected(x, divisor), rel=1e-12)
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient[torch.cat(MASKS) == 0].eq(0).all()


@pytest.mark.parametrize(("path", "divisor"), PATHS)
def test_our_reducers_read_the_context_parallel_rank_from_megatron(path, divisor, my_reducers, monkeypatch):
    x, total = torch.randn(14, dtype=torch.float64), 0.0
    for rank in range(2):
        state = SimpleNamespace(
            model_parallel_is_initialized=lambda: True,
            get_context_parallel_rank=lambda rank=rank: rank,
            get_context_parallel_world_size=lambda: 2,
        )
        monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", state)
        parts = zip(x.split([r for _, r in LENGTHS]), LENGTHS, strict=True)
        mine = torch.cat([values[response_index(t, r, cp_rank=rank, cp_size=2)] for values, (t, r) in parts])
        total += called_like_slime(path, mine).item()
    assert total == pytest.approx(expected(x, divisor), rel=1e-12)


def test_the_flag_gives_their_token_sum_and_no_second_normaliser(my_reducers):
    x = torch.randn(14, dtype=torch.float64)
    value = called_like_slime("megatron_pg.cp_utils.get_sum_of_sample_mean", x, per_token=True)
    assert value.item() == pytest.approx(expected(x, 1.0), rel=1e-12)
    with pytest.raises(ValueError, match="choose one normaliser"):
        called_like_slime("my_reducers.dr_grpo", x, per_token=True)


# --- into Megatron's own RL script ---


def test_train_rl_becomes_exact_on_two_ranks(tmp_path):
    runner = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    env = environment(RECIPES)
    env.pop("MEGATRON_LM", None)
    script = [str(ROOT / "tests" / "rl_recipe.py"), str(tmp_path / "errors.json")]
    done = subprocess.run([*runner, *script], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    errors = json.loads((tmp_path / "errors.json").read_text(encoding="utf-8"))
    assert errors.pop("as it is") > 0.1  # mean of micro-batch means, against the token mean of the step
    assert len(errors) == 6
    assert max(errors.values()) < 2e-6


@pytest.fixture
def megatron_rl(monkeypatch):
    monkeypatch.syspath_prepend(RECIPES)
    return importlib.import_module("megatron_rl")


def test_the_rows_of_a_packed_bin_are_told_apart(megatron_rl, monkeypatch):
    packing = SimpleNamespace(
        packed_loss_mask=torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0], [0] * 8]),
        packing_info=SimpleNamespace(seq_starts={0: [0, 3], 1: []}),
    )
    stand_in = ModuleType("megatron.rl.rl_utils")
    stand_in.get_rl_runtime_state = lambda: SimpleNamespace(packing_context=packing)
    monkeypatch.setitem(sys.modules, "megatron.rl", ModuleType("megatron.rl"))
    monkeypatch.setitem(sys.modules, "megatron.rl.rl_utils", stand_in)
    mask, owner = megatron_rl._mask_and_owner((torch.tensor(0),))
    assert mask.tolist() == [[True, True, False, False, True, False, False]]  # position k predicts token k + 1
    assert owner.tolist() == [[0, 0, 1, 1, 1, 1, 1]]
    mask, _ = megatron_rl._mask_and_owner((torch.tensor(1),))
    assert not mask.any()


def test_train_rl_has_no_prompts(megatron_rl):
    with pytest.raises(ValueError, match="aggregation='prompt_mean' is not one of sample_mean, token_mean, constant"):
        megatron_rl.ExactLoss("prompt_mean")
