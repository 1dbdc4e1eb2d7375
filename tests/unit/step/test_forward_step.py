"""The step without a launch. On real ranks: tests/ranks/test_forward_step.py."""

import argparse
import contextlib
import itertools
import math
import random
import types
from functools import partial

import pytest
import threads
import torch
from samples import make_sample, random_step

from megatron_pg.args import ArgumentError, add_arguments
from megatron_pg.batch import pack, slice_batch
from megatron_pg.metrics import Reduction
from megatron_pg.plan.errors import LostPeerError, NonFiniteLossError, ScheduleError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step import forward_step
from megatron_pg.step.findings import StepFindings, gather_found
from megatron_pg.step.forward_step import PolicyGradientStep, _packed_seq_params
from megatron_pg.step.loss import Diagnostics
from megatron_pg.step.loss_scaling import LossScaling

CALL = {"model": None, "data_iterator": None, "num_microbatches": 1, "seq_length": 4, "micro_batch_size": 1}


@pytest.mark.parametrize("words", [["--pg-fused-head"], ["--fp32-lm-head"], ["--fp32-lm-head", "--pg-fused-head"], []])
def test_logits_without_a_loss_have_the_precision_of_the_loss(words):
    """What a sampler reads: rounded, they would put the ratio of an on-policy step off 1."""
    layer = types.SimpleNamespace(_forward_impl=lambda *, input, weight, **_: input @ weight.t())
    model = types.SimpleNamespace(output_layer=layer, compute_language_model_loss=print)
    args = add_arguments(argparse.ArgumentParser()).parse_args(words)
    PolicyGradientStep(LossSettings.from_args(args)).attach(model)
    states, weight = (torch.randn(3, 1, 8, dtype=torch.bfloat16), torch.randn(5, 8, dtype=torch.bfloat16))
    options = dict.fromkeys(("bias", "grad_output_buffer", "sequence_parallel", "tp_group"), None)
    logits = layer._forward_impl(input=states, weight=weight, **options)
    exact = states.double() @ weight.double().t()
    assert logits.dtype == (torch.float32 if words else torch.bfloat16)
    assert ((logits.double() - exact).abs().max() < 1e-5) == bool(words)


def test_a_model_without_its_own_loss_is_refused_by_name():
    args = add_arguments(argparse.ArgumentParser()).parse_args([])
    with pytest.raises(ScheduleError, match="gave a Linear, which has no compute_language_model_loss"):
        PolicyGradientStep(LossSettings.from_args(args)).attach(torch.nn.Linear(1, 1))


def test_a_forward_on_one_rank_alone_is_refused_before_any_collective():
    """Megatron's process_non_loss_data_func asks the last rank for one."""
    step = PolicyGradientStep(types.SimpleNamespace(metrics=None))
    with pytest.raises(ScheduleError, match=r"^collect_non_loss_data asks for outputs"):
        step.forward_backward(print, collect_non_loss_data=True, forward_only=True)


@pytest.mark.parametrize("cp_size", [1, 2])
def test_a_state_that_restarts_at_document_boundaries_belongs_to_one_document(cp_size):
    """Under context parallelism too: such layers undo the cut first."""
    samples = random_step(random.Random(3))
    batch = pack(samples, qkv_format="thd", cp_size=cp_size, multiple_of=8)
    weights = {"weights": torch.zeros(len(batch.loss_mask))}
    local = slice_batch(batch, weights, cp_rank=cp_size - 1, cp_size=cp_size)
    (documents,) = _packed_seq_params(local).seq_idx.tolist()
    states = _states(batch.tokens[0].tolist(), documents)
    for sample, (begin, end) in zip(samples, itertools.pairwise(local.inputs.boundaries.tolist()), strict=True):
        alone = sample.tokens.tolist()
        assert states[begin:end][: len(alone)] == _states(alone, [0] * len(alone))
    assert len(states) == batch.num_positions


def _states(tokens: list[int], documents: list[int]) -> list[float]:
    """Those of a recurrence."""
    found, state, before = [], 0.0, None
    for token, document in zip(tokens, documents, strict=True):
        state = token + (0.5 * state if document == before else 0.0)
        found.append(state)
        before = document
    return found


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("enabled", [False, True])
def test_gradients_are_made_in_training_only(monkeypatch, forward_only, enabled):
    """Megatron's schedule leaves them on in an evaluation, where the fused head would add to the next step's."""
    gathered = StepFindings(rows=torch.zeros(1), data_ranks=torch.zeros(1), returned=0)
    metrics = types.SimpleNamespace(
        combine=lambda rows: rows,
        finish=lambda totals, plan, ranks: {},
        by_rank=lambda rows, ranks: [],
        nonfinite=lambda rows: {},
    )
    terms = types.SimpleNamespace(adaptive_entropy=None)
    step, seen = PolicyGradientStep(types.SimpleNamespace(metrics=metrics, terms=terms)), []
    monkeypatch.setattr(step, "_plan", lambda call: (None, [], None))
    monkeypatch.setattr(step, "_scaling_of_step", lambda plan, model: None)
    monkeypatch.setattr(step._loss, "begin", lambda *rest: None)
    monkeypatch.setattr(forward_step.parallel_state, "get_tensor_model_parallel_group", lambda: None)
    monkeypatch.setattr(step, "_gather_and_check", lambda: gathered)
    model = types.SimpleNamespace(config=types.SimpleNamespace(finalize_model_grads_func=None))
    with torch.set_grad_enabled(enabled):
        step.forward_backward(
            lambda **_: seen.append(torch.is_grad_enabled()), **CALL | {"model": model}, forward_only=forward_only
        )
        assert torch.is_grad_enabled() == enabled
    assert seen == [enabled and not forward_only]


@pytest.mark.parametrize(("microbatch", "row"), [(0, 1), (0, 2), (1, 1), (2, 2)])
def test_a_loss_that_is_not_finite_is_named_by_the_first_of_its_samples(microbatch, row):
    """Micro-batches from that one on have such a token at their first position, which comes before it in its own."""
    results = {}
    for k in range(3):
        sample = make_sample(prompt_length=1, mask=[1, 1, 1], rng=random.Random(k), sample_id=f"of micro-batch {k}")
        batch = pack([sample], qkv_format="thd")
        local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1)
        found = [0.0, math.inf, 0.0] if k < microbatch else [1.0, float(row if k == microbatch else 0), 0.0]
        partial = torch.zeros(Reduction("none").width, dtype=torch.float64)
        results[local] = Diagnostics(None, partial, torch.tensor(found, dtype=torch.float64))

    def work(rank: int) -> None:
        gather_found(results, Reduction("none"), reports=True)

    with pytest.raises(NonFiniteLossError, match=rf"sample of micro-batch {microbatch} .* response token {row} "):
        threads.run(1, work)


def step_with(*flags: str) -> PolicyGradientStep:
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--pg-kernel", "torch", *flags])
    return PolicyGradientStep(LossSettings.from_args(args))


TARGETED = ("--pg-entropy-coef", "0.25", "--pg-entropy-target", "2,step=0.25,max=0.5")


def test_a_training_step_moves_the_entropy_coefficient_before_its_report_is_handed_on(monkeypatch):
    step, seen = step_with(*TARGETED), []
    monkeypatch.setattr(step, "_on_report", lambda report: seen.append(step.state_dict()))
    monkeypatch.setattr(step, "_run", lambda report, call: step._finish(report))
    coefficients = []
    for entropy, is_evaluation in ((1.0, False), (9.0, True), (None, False), (3.0, False), (2.0, False)):
        metrics = {} if entropy is None else {"entropy_mean": entropy}  # none: no token has a weight
        report = types.SimpleNamespace(metrics=metrics, forward_only=is_evaluation)
        step.forward_backward(report, **CALL, forward_only=is_evaluation)
        coefficients.append([term.weight for term in step.settings.terms.further])
    assert coefficients == [[0.5], [0.5], [0.5], [0.0], [0.25]]
    assert [state["entropy_coef"] for state in seen] == [0.5, 0.5, 0.5, 0.25, 0.25]
    assert [state["entropy"] for state in seen] == [1.0, 1.0, 1.0, 3.0, 2.0]


def test_a_state_is_loaded_by_a_run_with_the_same_flags_only():
    targeted, constant = step_with(*TARGETED), step_with("--pg-entropy-coef", "0.25")
    assert targeted.state_dict() == {"entropy_coef": 0.25, "entropy": None}
    assert constant.state_dict() == {}
    constant.load_state_dict({})
    targeted.load_state_dict({"entropy_coef": 0.5, "entropy": 1.5})
    assert targeted.state_dict() == {"entropy_coef": 0.5, "entropy": 1.5}
    assert targeted.settings.terms.further[0].weight == 0.5
    with pytest.raises(ValueError, match=r"^the state has \[\], not \['entropy_coef', 'entropy'\]"):
        targeted.load_state_dict({})
    with pytest.raises(ValueError, match=r"^the state has \['entropy_coef', 'entropy'\], not \[\]"):
        constant.load_state_dict(targeted.state_dict())
    with pytest.raises(ArgumentError, match=r"\[E42\] the checkpoint's coefficient is 0.75, above max=0.5 of --pg-ent"):
        targeted.load_state_dict({"entropy_coef": 0.75, "entropy": 1.5})
    targeted._open = types.SimpleNamespace(has_ended=False)
    with pytest.raises(ScheduleError, match="an open step has not ended"):
        targeted.load_state_dict({"entropy_coef": 0.5, "entropy": 1.5})


def test_an_evaluation_is_not_counted_as_a_step_when_a_rank_is_lost(monkeypatch):
    args = add_arguments(argparse.ArgumentParser()).parse_args(["--pg-kernel", "torch"])
    step = PolicyGradientStep(LossSettings.from_args(args))
    monkeypatch.setattr(step, "_run", lambda function, call: function())

    def lose() -> None:
        raise RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")

    def said(function, **arguments) -> str:
        with pytest.raises(LostPeerError) as error:
            step.forward_backward(function, **CALL, **arguments)
        return str(error.value)

    assert "lost another rank in an evaluation before its first step, in" in said(lose, forward_only=True)
    for _ in range(10):
        step.forward_backward(lambda: None, **CALL, forward_only=True)
    assert "lost another rank in its step 1, before the optimizer moved, in" in said(lose, forward_only=False)
    assert "lost another rank in an evaluation after its step 1, in" in said(lose, forward_only=True)
    assert "lost another rank in its step 2, before the optimizer moved, in" in said(lose)


@pytest.mark.parametrize("per_token", [False, True])
@pytest.mark.parametrize("called", [0, 1, 2])
def test_every_loss_function_is_called_and_no_input_of_the_step_is_kept(monkeypatch, per_token, called):
    """A function that replaces ours is not counted, with any of Megatron's divisors."""
    step, sample = step_with(), make_sample(prompt_length=1, mask=[1], rng=random.Random(0))
    batch = pack([sample], qkv_format="thd")
    sliced = partial(slice_batch, batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1)
    partial_of = torch.zeros(step.settings.metrics.width, dtype=torch.float64)
    fine = Diagnostics(torch.zeros(()), partial_of, torch.tensor([0.0, math.inf, 0.0], dtype=torch.float64))
    monkeypatch.setattr(forward_step.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    monkeypatch.setattr(PolicyGradientStep, "_counting_group", types.SimpleNamespace(rank=lambda: 0))
    sizes = {"num_microbatches": 2, "data_parallel_size": 1, "context_parallel_size": 1}
    step._scaling = LossScaling(per_token=per_token, **sizes)
    step._loss.diagnostics = {sliced(): fine, sliced(): fine}
    for local in [*step._loss.diagnostics][:called]:
        step._loss_func(local, torch.zeros((), requires_grad=True))
    refused = pytest.raises(ScheduleError, match=f"loss function has counted {called} of 2, so another one")
    with refused if called < 2 else contextlib.nullcontext():
        threads.run(1, lambda rank: step._gather_and_check())
    assert not step._loss.diagnostics
