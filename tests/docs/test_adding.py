"""docs/adding.md, executed: its objective is loaded as a user's, refused nowhere, and trains in every layout alike."""

import argparse
import random
import re
from pathlib import Path

import cases
import pytest
import simulation
import torch
from compare import gradient_error
from samples import random_step
from simulation import Layout

from megatron_pg.args import add_arguments, validate_args
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.objectives import OBJECTIVES, numbers
from megatron_pg.flags.banner import banner
from megatron_pg.kernels import LossTerms
from megatron_pg.step.settings import LossSettings

DOCS = Path(__file__).parents[2] / "docs"


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """What the page's file and flags come to."""
    page = (DOCS / "adding.md").read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (flags,) = re.findall(r"```bash\nGRPO_ARGS=\((.*?)\)\n```", page, re.DOTALL)
    (tmp_path / "my_rl").mkdir()
    (tmp_path / "my_rl" / "objectives.py").write_text(source, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags.split())
    with pytest.warns(match=r"ℓ is the objective my_rl.objectives:soft_clip \(objectives.py, sha256"):
        validate_args(args)
    assert "--pg-custom-objective-path my_rl.objectives:soft_clip" in banner(args)
    return LossSettings.from_args(args)


def test_the_pages_objective_is_what_it_says(settings):
    objective = settings.terms.objective
    from megatron_pg.objectives import Tokens

    log_ratios = torch.tensor([0.0, 0.2, 0.7, -0.5], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(4, dtype=torch.float64)
    tokens = Tokens(logprobs=log_ratios - 1, old_logprobs=-ones, advantages=ones, log_ratios=log_ratios)
    found = objective.loss(tokens, objective.parameters)
    r = log_ratios.detach().exp()
    wanted = -torch.stack([r[0], r[1], (r[2] * 1.28).sqrt(), r[3]])
    assert torch.allclose(found, wanted, rtol=1e-14)


def test_the_pages_objective_does_not_depend_on_the_layout(settings):
    rng = random.Random(5)
    samples = random_step(rng, vocabulary=cases.VOCABULARY)
    logits = cases.poisoned_logits(samples, rng)
    loss = simulation.settings(
        "sample_mean", per_token=False, terms=LossTerms(objective=settings.terms.objective, entropy_coef=0.1)
    )
    whole, cut = (
        simulation.run_step(samples, logits, layout, loss, rng)
        for layout in (Layout(), Layout(data=2, context=2, tensor=2, microbatches=2))
    )
    assert gradient_error(cut.gradients, whole.gradients) <= 1e-12
    assert cut.reported == pytest.approx(whole.reported, rel=1e-12)


@pytest.mark.parametrize("names", [OBJECTIVES, KL_ESTIMATORS, DENOMINATORS])
def test_the_page_of_objectives_names_every_choice(names):
    page = (DOCS / "objectives.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in page] == []


def test_the_page_of_objectives_names_every_flag_and_correction():
    page = (DOCS / "objectives.md").read_text(encoding="utf-8")
    assert [name for name in CORRECTIONS if f"`{name}`" not in page] == []
    stems = {re.sub("-(low|high|pos|neg)$", "", number.flag) for number in numbers()}
    assert [stem for stem in stems if stem not in page] == []
