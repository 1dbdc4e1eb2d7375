"""The recipes of docs/quickstart.md and docs/migrating.md, run: into a plain pretrain script, into train_rl.py, and
reducers both ways."""

import difflib
import importlib
import os
import re
import sys
from types import ModuleType, SimpleNamespace

import launches
import pytest
import recipe_files
import torch
from processes import ROOT, environment
from recipe_files import block_of
from recipe_runs import (
    CONSTANT,
    LIMIT,
    RECIPES,
    errors_in_ours,
    errors_in_their_trainer,
    errors_in_train_rl,
    launch,
    launch_ranks,
    numbers_of,
    steps_of,
)

from megatron_pg.cp_utils import response_index


@launches.launch
def constant(folder, full):
    """What the script on our loss prints, with Dr. GRPO's constant."""
    return launch(*CONSTANT)


@launches.launch
def before(folder, full):
    """What the script prints on Megatron's loss."""
    return launch("plain_before.py", processes=2)


@launches.launch
def theirs(folder, full):
    """What the script on our loss prints, with a reducer file of slime's and miles's form."""
    recipe_files.write(folder)
    flag = "--custom-pg-loss-reducer-function-path"
    path = environment()["PYTHONPATH"] + os.pathsep + str(folder)
    return launch("plain_after.py", flag, "their_reducer.reducer", PYTHONPATH=path)


def test_the_plain_script_takes_five_new_lines_which_the_page_shows():
    before, after = ((RECIPES / f"plain_{name}.py").read_text(encoding="utf-8") for name in ("before", "after"))
    changes = list(difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm=""))[2:]
    new = [line[1:] for line in changes if line.startswith("+") and line[1:].strip()]
    assert len(new) == 5
    page = (ROOT / "docs" / "quickstart.md").read_text(encoding="utf-8")
    shown = block_of(page, "-from megatron.training import get_args, pretrain").splitlines()
    assert [line[1:] for line in shown if line.startswith("+")] == new
    gone = {line[1:] for line in changes if line.startswith("-")}
    assert {line[1:] for line in shown if line.startswith("-")} <= gone


def test_the_plain_script_trains_before_and_after(before, constant):
    assert "lm loss: 2." in before
    assert "(Σ m·ℓ)/(N_r·L)  (--loss-aggregation constant --loss-aggregation-divisor 1000)" in constant
    assert [re.search(r"\| pg_loss (-0)", line)[1] for line in steps_of(constant)] == ["-0"] * 2


@pytest.mark.parametrize("page", ["quickstart.md", "install.md"])
def test_the_pages_explain_the_red_flags_of_the_recipes_first_step(constant, page):
    raised = re.findall(
        r"^red flag: (\w+) .* or rollouts of other weights \(docs/metrics\.md\)$", constant, re.MULTILINE
    )
    assert raised
    assert len(raised) == constant.count("red flag: ")
    paragraphs = (ROOT / "docs" / page).read_text(encoding="utf-8").split("\n\n")
    (explained,) = (text for text in paragraphs if "red flags" in text and "not sampled by this model" in text)
    assert all(f"`{name}`" in explained for name in raised)


# --- their reducer file as ours ---


@pytest.mark.proof("Recipes: a reducer file of slime's and miles's form prints what `constant` prints (numbers)")
def test_a_reducer_file_of_slime_or_miles_trains_as_ours_and_is_constant_with_its_divisor(constant, theirs, evidence):
    assert len(steps_of(theirs)) == 2
    assert steps_of(theirs) == steps_of(constant)
    evidence(cases=numbers_of(steps_of(theirs)))


# --- our reducers as theirs ---

LENGTHS = [(9, 6), (4, 1), (12, 7)]  # total, response
MASKS = [torch.tensor(m, dtype=torch.int32) for m in ([1, 0, 1, 1, 1, 0], [1], [0, 1, 1, 1, 1, 1, 1])]


@pytest.fixture
def my_reducers(tmp_path, monkeypatch):
    """The user's file that the page shows."""
    recipe_files.write(tmp_path)
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


CALLED = pytest.mark.proof("Recipes: our reducers, called as slime and miles call them, equal plain loops")


def error_of(value: float, of: float) -> float:
    return abs(value - of) / abs(of)


@CALLED
@pytest.mark.parametrize(("path", "divisor"), PATHS)
def test_our_reducers_work_as_theirs(path, divisor, my_reducers, evidence):
    x = torch.randn(14, dtype=torch.float64, requires_grad=True)
    value = called_like_slime(path, x)
    error = error_of(value.item(), expected(x, divisor))
    (gradient,) = torch.autograd.grad(value, x)
    assert gradient[torch.cat(MASKS) == 0].eq(0).all()
    evidence(cases=1, worst=error, tolerance=1e-12)


@CALLED
@pytest.mark.parametrize(("path", "divisor"), PATHS)
def test_our_reducers_read_the_context_parallel_rank_from_megatron(path, divisor, my_reducers, monkeypatch, evidence):
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
    evidence(cases=1, worst=error_of(total, expected(x, divisor)), tolerance=1e-12)


@CALLED
def test_the_flag_gives_their_token_sum_and_no_second_normaliser(my_reducers, evidence):
    x = torch.randn(14, dtype=torch.float64)
    value = called_like_slime("megatron_pg.cp_utils.get_sum_of_sample_mean", x, per_token=True)
    evidence(cases=1, worst=error_of(value.item(), expected(x, 1.0)), tolerance=1e-12)
    with pytest.raises(ValueError, match="choose one normalizer"):
        called_like_slime("my_reducers.dr_grpo", x, per_token=True)


@launches.launch
def on_ranks(folder, full):
    """What two processes found."""
    return launch_ranks(folder)


@pytest.mark.proof("Recipes: train_rl.py's form on exact weights, gradients on 2 real ranks equal plain loops")
def test_train_rl_becomes_exact_on_two_ranks(on_ranks, evidence):
    errors = errors_in_train_rl(on_ranks["rl_recipe"])
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@pytest.mark.proof("Recipes: our reducers divided like slime and miles, gradients on 2 real ranks equal plain loops")
def test_our_reducers_are_exact_in_a_trainer_that_divides_like_theirs(on_ranks, evidence):
    errors = errors_in_their_trainer(on_ranks["slime_recipe"])
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@pytest.mark.proof("Recipes: a reducer file of their form in our flag, gradients on 2 real ranks equal plain loops")
def test_a_reducer_of_their_form_is_exact_in_our_flag(on_ranks, evidence):
    errors = errors_in_ours(on_ranks["slime_recipe"])
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


# --- into Megatron's own RL script ---


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
