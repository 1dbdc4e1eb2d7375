"""A user's own objective: tried at startup, refused by name, or trained like ours."""

import argparse
import dataclasses
import random

import pytest
import torch
from objective_parts import build, drawn

from megatron_pg.args import ArgumentError, add_arguments
from megatron_pg.declarations.choices import AT_ONCE
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives.custom.loading import load_custom_objective
from megatron_pg.plan.settings import LossSettings


def write_module(tmp_path, monkeypatch, body: str) -> str:
    (tmp_path / "user_objective.py").write_text(f"import torch\n\n\ndef mine(tokens, parameters):\n    {body}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "user_objective", raising=False)
    return "user_objective:mine"


def test_a_users_objective_equals_ours_when_it_is_ours(tmp_path, monkeypatch):
    path = write_module(tmp_path, monkeypatch, "return -tokens.ratios.detach() * tokens.advantages * tokens.logprobs")
    custom = load_custom_objective(path, clip_eps_low=0.2)
    assert custom.parameters.clip_eps_low == 0.2
    loss, logprobs, _ = drawn("cispo", random.Random(2))
    wide = build("cispo", clip_eps_low=1.0, cap=1e9)
    values = [
        dataclasses.replace(loss, terms=LossTerms(objective=objective))(logprobs).loss for objective in (custom, wide)
    ]
    assert torch.equal(*values)


BATCH = "gives a token another loss or gradient when other tokens"
TRIED = "fails on six tokens: "
REFUSED = {
    "return (tokens.advantages * tokens.logprobs).mean()": "gives shape () and dtype torch.float64 for 6 tokens",
    "return tokens.logprobs.float()": "gives shape (6,) and dtype torch.float32",
    "return tokens.advantages * tokens.old_logprobs": "has no gradient",
    "return tokens.logprobs.detach()": "has no gradient",
    "return tokens.logprobs / tokens.advantages.std()": BATCH,
    "return tokens.logprobs * tokens.logprobs.mean()": BATCH,
    "return torch.log(tokens.logprobs)": "gives a loss or gradient that is not finite",
    "return -tokens.ratios * tokens.advantages / tokens.advantages": "not finite for ordinary log-probabilities and",
    "return tokens.rewards": f"{TRIED}AttributeError",
    "return 0.0": f"{TRIED}TypeError: it returns a float",
    "return tokens.logprobs * parameters.clip_eps_low": "'clip_eps_low' is not given; given are: none. Add --pg-clip-",
    "return tokens.logprobs * parameters.knee": "'knee' is not given; given are: none. Add the option knee=… to the",
    "raise SystemExit(3)": f"{TRIED}SystemExit: 3",
    "return tokens.logprobs, tokens.ratios": f"{TRIED}TypeError: it returns a tuple that is not a pair",
    "return tokens.logprobs, {'a': 0.5}": "reports 'a' with a float for 6 tokens",
    "return tokens.logprobs, {'a': tokens.ratios.mean()}": "reports 'a' with shape () for 6 tokens",
    "return tokens.logprobs, {'a': tokens.ratios / tokens.ratios.sum()}": "reports 'a' of a token differently when",
    "return tokens.logprobs, {1: tokens.ratios}": "reports a metric whose name is 1",
    "return tokens.logprobs, {str(len(tokens.ratios)): tokens.ratios}": "reports other metrics for other tokens",
}


@pytest.mark.parametrize("body", REFUSED)
def test_a_users_objective_that_cannot_work_is_refused_at_startup(tmp_path, monkeypatch, body):
    path = write_module(tmp_path, monkeypatch, body)
    with pytest.raises(ArgumentError) as caught:
        load_custom_objective(path)
    ((rule, message),) = caught.value.violations
    assert rule == "E16"
    assert REFUSED[body] in message


@pytest.mark.parametrize(
    ("body", "unread"),
    [
        ("return tokens.logprobs * parameters.knee", "scale=3"),
        ("return tokens.logprobs * parameters.knee * getattr(parameters, 'scalar', 1.0)", "scale=3"),
        ("return tokens.logprobs * parameters.knee * parameters.scale", None),
        ("return tokens.logprobs * parameters.knee * getattr(parameters, 'scale', 1.0)", None),
        ("return tokens.logprobs * parameters.knee, {'a': tokens.ratios * parameters.scale}", None),
        ("return tokens.logprobs * sum(vars(parameters).values())", None),
    ],
)
def test_an_option_that_a_users_objective_does_not_read_is_refused(tmp_path, monkeypatch, body, unread):
    path = write_module(tmp_path, monkeypatch, body)
    numbers = {"knee": 2.0, "scale": 3.0, "clip_eps_low": 0.2}
    if unread is None:
        assert vars(load_custom_objective(path, **numbers).parameters) == numbers
        return
    with pytest.raises(ArgumentError, match=rf"does not read its option {unread}\. Remove it\."):
        load_custom_objective(path, **numbers)


@pytest.mark.parametrize(
    ("body", "reads"),
    [
        ("return -tokens.ratios * tokens.advantages", False),
        ("return -tokens.sequence_ratios * tokens.advantages", True),
        ("return -tokens.ratios * tokens.sequence_advantages", True),
        ("return -tokens.ratios * (tokens.advantages if tokens.sequence_advantages is None else 1)", True),
        ("return -tokens.ratios * tokens.advantages, {'a': tokens.ratios}", False),
        ("return -tokens.ratios * tokens.advantages, {'a': tokens.sequence_ratios}", True),
    ],
)
@pytest.mark.parametrize("mode", AT_ONCE)
def test_the_fused_head_takes_a_users_objective_that_reads_no_sequences(tmp_path, monkeypatch, body, reads, mode):
    words = ["--pg-custom-objective-path", write_module(tmp_path, monkeypatch, body)]
    parser = add_arguments(argparse.ArgumentParser())
    for head in ([], ["--pg-fused-head", "recompute"]):
        settings = LossSettings.from_args(parser.parse_args([*words, *head]))
        assert settings.terms.reads_sequences == reads
        assert any(metric.name == "num_segments" for metric in settings.metrics.metrics) == reads
    fused = parser.parse_args([*words, "--pg-fused-head", mode])
    if not reads:
        assert LossSettings.from_args(fused).head_mode == mode
        return
    with pytest.raises(
        ArgumentError, match="--pg-custom-objective-path user_objective:mine reads whole sequences"
    ) as caught:
        LossSettings.from_args(fused)
    assert [rule for rule, _ in caught.value.violations] == ["E55"]


def test_what_a_users_objective_gives_for_masked_tokens_is_not_used(tmp_path, monkeypatch):
    path = write_module(tmp_path, monkeypatch, "return tokens.logprobs + 1.0 / tokens.old_logprobs")
    loss, logprobs, _ = drawn("grpo", random.Random(4))
    out = dataclasses.replace(loss, terms=LossTerms(objective=load_custom_objective(path)))(logprobs)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    assert torch.isfinite(out.loss)
    assert not out.token_losses[~loss.fields.mask].any()
    assert not gradient[~loss.fields.mask].any()
