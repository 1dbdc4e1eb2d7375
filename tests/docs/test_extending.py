"""docs/extending.md and docs/design.md, executed: a custom objective, and an objective and an aggregation that are
declared while the test runs."""

import argparse
import dataclasses
import json
import random
import re
import sys
from pathlib import Path

import metric_oracle
import pytest
import simulation
import torch
from compare import gradient_error
from loss_terms import kl_and_entropy
from samples import random_step
from simulation import Layout
from step_cases import VOCABULARY, document_of, poisoned_logits

from megatron_pg import plan_step
from megatron_pg.args import ArgumentError, add_arguments, validate_args
from megatron_pg.cli import main
from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.declarations.choices import DENOMINATORS
from megatron_pg.declarations.corrections import CORRECTIONS, KL_ESTIMATORS
from megatron_pg.declarations.declaration import load
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.flags.banner import banner
from megatron_pg.flags.import_path import source_of
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import Tokens, objective_of
from megatron_pg.objectives.custom.loading import load_custom_objective
from megatron_pg.plan.settings import LossSettings

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = DOCS.parent / "megatron_pg"


def blocks() -> dict[str, str]:
    """The pages' python blocks by the file name in their first line."""
    pages = "".join((DOCS / name).read_text(encoding="utf-8") for name in ("extending.md", "design.md"))
    found = re.findall(r"```python(?: excerpt)?\n(# ([\w/]+\.py)\b.*?)```", pages, re.DOTALL)
    return {name: source for source, name in found}


def parse(*words: str) -> argparse.Namespace:
    return add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(words)


@pytest.fixture
def settings(tmp_path, monkeypatch):
    """What the page's user's file and its flags come to."""
    (flags,) = re.findall(r"```bash\nGRPO_ARGS=\((.*?)\)\n```", (DOCS / "extending.md").read_text("utf-8"), re.DOTALL)
    (tmp_path / "my_rl").mkdir()
    (tmp_path / "my_rl" / "objectives.py").write_text(blocks()["my_rl/objectives.py"], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    args = parse(*flags.split())
    with pytest.warns(match=r"ℓ is the objective my_rl.objectives:soft_clip \(objectives.py, sha256"):
        validate_args(args)
    assert "--pg-custom-objective-path my_rl.objectives:soft_clip" in banner(args)
    assert LossSettings.from_args(args).terms.objective.parameters.knee == 2
    return LossSettings.from_args(args)


@pytest.fixture
def declared(tmp_path, monkeypatch):
    """The page's objective and aggregation, in the tables while the test runs."""
    for name in ("root_clip.py", "root_mean.py"):
        (tmp_path / name).write_text(blocks()[name], encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    exec(blocks()["objectives.py"], {})
    exec(blocks()["aggregations.py"], {})
    yield
    del OBJECTIVES["root_clip"], AGGREGATIONS["root_mean"]
    for name in ("root_clip", "root_mean"):
        sys.modules.pop(name, None)
    load.cache_clear()


def test_the_users_objective_is_what_the_page_says(settings):
    objective = settings.terms.objective
    log_ratios = torch.tensor([0.0, 0.2, 0.7, -0.5], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(4, dtype=torch.float64)
    tokens = Tokens(logprobs=log_ratios - 1, old_logprobs=-ones, advantages=ones, log_ratios=log_ratios)
    found = objective.loss(tokens, objective.parameters)
    r = log_ratios.detach().exp()
    wanted = -torch.stack([r[0], r[1], (r[2] * 2).sqrt(), r[3]])
    assert torch.allclose(found, wanted, rtol=1e-14)


def trains_alike_in_every_layout(loss: LossSettings) -> simulation.Outcome:
    rng = random.Random(5)
    samples = random_step(rng, vocabulary=VOCABULARY)
    logits = poisoned_logits(samples, rng)
    layouts = (Layout(), Layout(data=2, context=2, tensor=2, microbatches=2))
    whole, cut = (simulation.run_step(samples, logits, layout, loss, rng) for layout in layouts)
    assert gradient_error(cut.gradients, whole.gradients) <= 1e-12
    assert cut.reported == pytest.approx(whole.reported, rel=1e-12)
    assert any(table.any() for table in whole.gradients)
    return whole


def test_the_users_objective_does_not_depend_on_the_layout(settings):
    terms = LossTerms(objective=settings.terms.objective, further=kl_and_entropy(entropy_coef=0.1))
    trains_alike_in_every_layout(simulation.settings("sample_mean", per_token=False, terms=terms))


def test_the_users_metric_is_exact_in_every_layout(settings, tmp_path):
    (tmp_path / "my_rl" / "watched.py").write_text(blocks()["my_rl/watched.py"], encoding="utf-8")
    args = parse("--pg-custom-objective-path", "my_rl.watched:watched,knee=1.28")
    with pytest.warns(match="ℓ is the objective my_rl.watched:watched"):
        validate_args(args)
    objective = LossSettings.from_args(args).terms.objective
    assert objective.reported == ("softened_fraction",)
    assert not objective.reads_sequences
    assert source_of(objective.loss)[0] == "watched.py"  # what the ranks compare
    loss = simulation.settings("sample_mean", per_token=False, terms=LossTerms(objective=objective))
    rng = random.Random(6)
    samples = random_step(rng, vocabulary=VOCABULARY)
    logits = poisoned_logits(samples, rng)
    documents = [document_of(*pair) for pair in zip(samples, logits, strict=True)]
    tokens = metric_oracle.policy_tokens(documents, 1.0)
    expected = metric_oracle.document_mean(tokens, lambda token: token.ratio > 1.28)
    assert 0 < expected < 1
    for layout in (Layout(), Layout(data=2, context=2, tensor=2, microbatches=2)):
        found = simulation.run_step(samples, logits, layout, loss, rng).metrics["softened_fraction"]
        assert found == pytest.approx(expected, rel=1e-14)


@pytest.mark.usefixtures("small_tiles")
def test_the_users_row_is_the_users_objective_in_the_kernels(settings, tmp_path):
    (tmp_path / "my_rl" / "kernel.py").write_text(blocks()["my_rl/kernel.py"], encoding="utf-8")
    found = load_custom_objective("my_rl.kernel:soft_clip_by_kernel", knee=2.0)
    assert found.token_kernel.numbers == (2.0,)
    losses = []
    for objective in (settings.terms.objective, found):
        rng = random.Random(7)
        samples = random_step(rng, vocabulary=VOCABULARY)
        logits = [table.float() for table in poisoned_logits(samples, rng)]
        loss = simulation.settings("sample_mean", per_token=False, terms=LossTerms(objective=objective))
        loss = dataclasses.replace(loss, impl="triton")
        losses.append(simulation.run_step(samples, logits, Layout(), loss, rng))
    by_torch, by_row = losses
    assert by_row.reported == pytest.approx(by_torch.reported, rel=1e-6)
    assert gradient_error(by_row.gradients, by_torch.gradients) <= 1e-5


@pytest.mark.usefixtures("declared")
def test_a_declared_objective_is_in_flags_checks_banner_and_help():
    text = add_arguments(argparse.ArgumentParser()).format_help()
    assert "root_clip[,knee=]" in re.sub(r"\s+", "", text)
    args = validate_args(parse("--pg-objective", "root_clip,knee=0.5"))
    assert "s = √(r·(1 + knee))" in banner(args)
    assert "s = r up to 1 + 0.5  (knee)" in banner(args)
    refused = {
        "--pg-objective root_clip,knee=11": "--pg-objective root_clip,knee=11 is out of range. It must be between 0 "
        "and 10",
        "--pg-objective grpo,knee=0.5": "--pg-objective grpo,knee=0.5 has no effect. Remove it.",
        "--pg-objective root_clip,cap=2": "--pg-objective root_clip,cap=2 has no effect. Remove it.",
    }
    for words, message in refused.items():
        with pytest.raises(ArgumentError, match=re.escape(message)):
            validate_args(parse(*words.split()))


@pytest.mark.usefixtures("declared")
def test_a_declared_aggregation_is_in_flags_checks_and_banner():
    args = validate_args(parse("--loss-aggregation", "root_mean"))
    assert "(1/N_r) Σ_rollouts (Σ m·ℓ)/√M_rollout  (--loss-aggregation root_mean)" in banner(args)
    args.loss_aggregation = "sqrt_mean"  # from a YAML file
    del args.megatron_pg_validated
    with pytest.raises(ArgumentError, match="Did you mean root_mean"):
        validate_args(args)
    with pytest.raises(ArgumentError, match="has no effect with --loss-aggregation root_mean"):
        validate_args(parse("--loss-aggregation", "root_mean", "--loss-aggregation-divisor", "4"))


@pytest.mark.usefixtures("declared")
def test_the_console_explains_and_validates_what_is_declared(capsys):
    words = ["--loss-aggregation", "root_mean", "--pg-objective", "root_clip,knee=0.5"]
    assert main(["validate", *words]) == 0
    capsys.readouterr()
    assert main(["explain", *words, "--lengths", "4,100", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["objective"]["knee"] == "s = r up to 1 + 0.5  (knee)"
    assert found["elsewhere"] == "no flag of other frameworks"
    assert [row["answer"] for row in found["weights"]] == [2.0, 10.0]  # √M, in units of 1/N_r
    assert main(["validate", "--loss-aggregation", "sqrt_mean"]) == 2
    assert "Did you mean root_mean?" in capsys.readouterr().err


@pytest.mark.usefixtures("declared")
def test_what_is_declared_trains_and_has_metrics():
    assert plan_step([4, 9, 0], aggregation="root_mean").denominators.tolist() == [6.0, 9.0, 3.0]
    args = validate_args(parse("--loss-aggregation", "root_mean", "--pg-objective", "root_clip,knee=0.05"))
    settings = LossSettings.from_args(args)
    assert settings.terms.objective.parameters.knee == 0.05
    assert "clipped_high_fraction" in [metric.name for metric in settings.metrics.metrics]
    terms = LossTerms(objective=objective_of("root_clip", knee=0.05))
    found = trains_alike_in_every_layout(simulation.settings("root_mean", per_token=False, terms=terms))
    plain = trains_alike_in_every_layout(simulation.settings("sample_mean", per_token=False))
    assert found.metrics["clipped_low_fraction"] == 0.0
    assert found.metrics["clipped_ratio_fraction"] > 0
    assert found.reported != plain.reported


def test_the_guides_name_every_choice_and_number():
    guides = ("objectives.md", "corrections.md", "loss_terms.md")
    text = "".join((DOCS / name).read_text(encoding="utf-8") for name in guides)
    names = [*OBJECTIVES, *KL_ESTIMATORS, *DENOMINATORS, *({*CORRECTIONS} - {"none"})]
    assert [name for name in names if f"`{name}" not in text] == []
    numbers = {number for each in (*OBJECTIVES.values(), *CORRECTIONS.values()) for number in each.numbers}
    assert [number for number in numbers if (number.flag or f"{number.name}=") not in text] == []


def test_a_structural_term_is_at_most_twelve_files_each_of_which_has_its_counterpart():
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    section = page.partition("### A structural loss term")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(.+?)` \| .+ \| `(.+?)` \|$", section, re.MULTILINE)
    assert 6 < len(rows) <= 12
    for path, counterpart in rows:
        if counterpart.endswith(".py"):
            assert (PACKAGE / counterpart).exists()
        else:
            assert counterpart in (PACKAGE / path).read_text(encoding="utf-8"), (path, counterpart)
