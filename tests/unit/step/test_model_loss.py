"""The loss inside a model that is a stand-in: what is folded into S, and which micro-batch it is of."""

import dataclasses
import random
from types import SimpleNamespace

import pytest
import simulation
import torch
from samples import make_sample

from megatron_pg.batch import LocalBatch, pack, slice_batch
from megatron_pg.metrics import Reduction
from megatron_pg.step.loss_scaling import LossScaling
from megatron_pg.step.model_loss import ModelLoss

FACTOR, VOCABULARY = 0.25, 12
ALONE = SimpleNamespace(size=lambda: 1)


class Model:
    """Makes its predictions before its own logits, as Megatron's do, from given tables [depths + 1, T, V]."""

    def __init__(self, tables: dict[int, torch.Tensor]):
        self._tables = tables

    def compute_language_model_loss(self, labels, logits):
        raise AssertionError("Megatron's own loss was called")

    def _postprocess(self, *, labels):
        *depths, own = self._tables[id(labels)]
        self.returned = [self.compute_language_model_loss(labels.clone(), table[:, None]) for table in depths]
        return self.compute_language_model_loss(labels, own[:, None])


def microbatch(rng: random.Random, depths: int) -> LocalBatch:
    batch = pack([make_sample(prompt_length=3, mask=[1, 0, 1, 1], rng=rng)], qkv_format="thd")
    weights = [torch.full((4,), 0.5 * (depth + 1), dtype=torch.float64) for depth in range(depths)]
    return slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1, depth_weights=weights)


def prepared(depths: int, **changes: object) -> tuple[ModelLoss, Model, list[LocalBatch], dict[int, torch.Tensor]]:
    rng = random.Random(1)
    locals_ = [microbatch(rng, depths) for _ in range(2)]
    shape = depths + 1, locals_[0].num_positions, VOCABULARY
    tables = {id(local.inputs.labels): torch.randn(shape, dtype=torch.float64, requires_grad=True) for local in locals_}
    settings = simulation.settings("sample_mean", per_token=False)
    metrics = Reduction("basic", {"clip", "mtp", "further"} if depths else {"clip"})
    settings = dataclasses.replace(settings, mtp_depths=depths, metrics=metrics, **changes)
    loss = ModelLoss(settings)
    model = Model(tables)
    loss.attach(model)
    scaling = LossScaling(per_token=False, num_microbatches=2, data_parallel_size=1, context_parallel_size=1)
    loss.begin(scaling, SimpleNamespace(mtp_loss_scaling_factor=FACTOR), ALONE, settings)
    return loss, model, locals_, tables


def test_predictions_are_folded_in_with_their_factor_and_megatron_gets_values_only():
    """Against log_softmax; a depth predicts labels[p] at p - depth."""
    loss, model, (local, _), tables = prepared(2)
    with loss.of(local):
        total = model._postprocess(labels=local.inputs.labels)
    table, policy = tables[id(local.inputs.labels)], loss.diagnostics[local].policy
    expected, sums = policy.clone(), []
    for depth in (1, 2):
        logprobs = table[depth - 1].log_softmax(-1)
        rows = [p for p in local.trained.tolist() if p >= depth]
        sums.append(-sum(logprobs[p - depth, local.inputs.labels[0, p]] for p in rows) * 0.5 * depth)
        found = model.returned[depth - 1]
        assert not found.requires_grad
        assert found.shape == local.inputs.labels.shape
        assert found[0].nonzero()[:, 0].tolist() == [p - depth for p in rows]
    expected = expected + FACTOR * sum(sums)
    torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
    by_depth = torch.autograd.grad(total, table)[0][:2]
    torch.testing.assert_close(by_depth, torch.autograd.grad(FACTOR * sum(sums), table)[0][:2], rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize(("impl", "dtype"), [("torch", torch.float64), ("triton", torch.float32)])
def test_with_the_policy_as_target_a_depth_learns_its_distribution(impl, dtype):
    """Before the policy's loss overwrites its logits, which get the gradient of that loss alone."""
    loss, model, (local, _), tables = prepared(2, mtp_target="policy", impl=impl, softcap=2.0)
    alone, other, *_ = prepared(0, impl=impl, softcap=2.0)
    key = id(local.inputs.labels)
    table = tables[key] = tables[key].detach().to(dtype).requires_grad_()
    with loss.of(local):
        total = model._postprocess(labels=local.inputs.labels)
    assert not any(found.any() for found in model.returned)
    found = torch.autograd.grad(total, table)[0]
    own = table.detach()[2:].clone().requires_grad_()
    other._tables = {key: own}
    with alone.of(dataclasses.replace(local, depths=())):
        policy = other._postprocess(labels=local.inputs.labels)
    torch.testing.assert_close(found[2], torch.autograd.grad(policy, own)[0][0], rtol=1e-6, atol=1e-9)
    leaf, losses = table.detach().double().requires_grad_(), []
    logprobs = (2 * torch.tanh(leaf / 2)).log_softmax(-1)
    for depth in (1, 2):
        for p in (p for p in local.trained.tolist() if p >= depth):
            log_p, log_q = logprobs[2, p].detach(), logprobs[depth - 1, p - depth]
            losses.append(0.5 * depth * (log_p.exp() * (log_p - log_q)).sum())
    wanted = FACTOR * sum(losses)
    limit = {"rtol": 1e-12, "atol": 1e-14} if impl == "torch" else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(found[:2].double(), torch.autograd.grad(wanted, leaf)[0][:2], **limit)
    torch.testing.assert_close((total - policy).double(), wanted, **limit)


def test_the_metric_loss_is_what_the_gradient_is_of():
    loss, model, (local, _), _ = prepared(2)
    with loss.of(local):
        total = model._postprocess(labels=local.inputs.labels)
    metrics = Reduction("basic", {"clip", "mtp", "further"})
    values = dict(
        zip([metric.name for metric in metrics._added], loss.diagnostics[local].partial.tolist(), strict=False)
    )
    assert values["mtp_loss"] != 0
    assert values["loss"] == pytest.approx(float(total.detach()), rel=1e-12)
    assert values["loss"] == pytest.approx(values["pg_loss"] + FACTOR * values["mtp_loss"], rel=1e-12)


def test_a_forward_that_runs_later_ends_in_the_loss_of_its_own_micro_batch():
    """A schedule plan comes to the end of the first forward when the second has begun."""
    loss, model, locals_, tables = prepared(0)
    for local in locals_:
        loss.expect(local)
    totals = [model._postprocess(labels=local.inputs.labels) for local in reversed(locals_)][::-1]
    assert list(loss.diagnostics) == locals_[::-1]
    for total, local in zip(totals, locals_, strict=True):
        with loss.of(local):
            again = model._postprocess(labels=local.inputs.labels)
        assert torch.equal(total, again)
        assert torch.autograd.grad(total, tables[id(local.inputs.labels)])[0].any()
