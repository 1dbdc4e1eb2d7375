"""Multi-token prediction against the policy's own distribution, by stored logits and the fused head, in every layout.

A row of the simulation's logits holds the policy's logits and those of every depth, so the simulation's schedules, loss
scalings and slices apply to all of them. Everything expected is `prediction_oracle`'s, in float64.
"""

import dataclasses
import random
import threading
from types import SimpleNamespace

import prediction_oracle
import pytest
import simulation
import step_cases
import torch
from compare import gradient_error, scalar_error
from simulation import LAYOUTS, Layout
from step_cases import VOCABULARY, StepCase

from megatron_pg.declarations.aggregations import AGGREGATIONS
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.step import mtp
from megatron_pg.step.loss import microbatch_loss

LIMIT, FACTOR = 1e-12, 0.3
FULL = {1: 240, 2: 140, 4: 100, 8: 60}  # cases of a layout, by the size of its world: 1,200
pytestmark = pytest.mark.usefixtures("rank_zero")


def drawn(rng: random.Random, layout: Layout) -> tuple[StepCase, int]:
    """A step with so many depths, and logits [n, TP · (1 + depths) · V / TP] of its samples."""
    aggregation, per_token = rng.choice(sorted(set(AGGREGATIONS) - {"turn_mean"})), rng.random() < 0.5
    case, depths = step_cases.random_case(rng, aggregation, per_token=per_token), rng.choice([1, 2, 3])
    own, cap = rng.random() < 0.5, rng.choice([None, None, 2.0])
    loss = dataclasses.replace(
        case.loss,
        mtp_depths=depths,
        mtp_target="policy",
        mtp_aggregation="policy" if own else "token_mean",
        softcap=cap,
    )
    asked = dataclasses.replace(case.asked, softcap=cap, divisor=case.loss.divisor)
    return dataclasses.replace(case, loss=loss, asked=asked), depths


def tables_of(case: StepCase, depths: int, rng: random.Random) -> list[list[torch.Tensor]]:
    """[n, V] of each depth of each sample, NaN where nothing is predicted."""
    generator, found = torch.Generator().manual_seed(rng.getrandbits(60)), []
    for sample in case.samples:
        own = [1.5 * torch.randn(len(sample.tokens), VOCABULARY, dtype=torch.float64, generator=generator)]
        own += [own[0].roll(d, 1) * rng.choice([0.5, 1.0]) for d in range(1, depths)]
        for depth, table in enumerate(own, start=1):
            used = {position for position, _ in prediction_oracle.predicted(sample, depth)}
            table[[p for p in range(len(table)) if p not in used]] = torch.nan
        found.append(own)
    return found


def expected(case: StepCase, tables: list[list[torch.Tensor]], depths: int) -> tuple[list[torch.Tensor], float]:
    """Gradients [1 + depths, n, V] of every sample, the policy's first, and λ times the loss of the depths."""
    leaves, total = [[table.clone().requires_grad_() for table in own] for own in tables], 0.0
    cap = case.asked.softcap
    for depth in range(1, depths + 1):
        counts = [len(prediction_oracle.predicted(sample, depth)) for sample in case.samples]
        aggregation = case.asked.aggregation if case.loss.mtp_aggregation == "policy" else "token_mean"
        weights = prediction_oracle.weights(case.samples, counts, aggregation, case.asked.divisor)
        for i, sample in enumerate(case.samples):
            for position, _ in prediction_oracle.predicted(sample, depth):
                pair = case.logits[i][position + depth], leaves[i][depth - 1][position]
                log_p, log_q = ((z if cap is None else cap * torch.tanh(z / cap)).log_softmax(0) for z in pair)
                total = total + FACTOR / depths * weights[i] * prediction_oracle.divergence(log_p, log_q)
    total = torch.as_tensor(total)
    if total.requires_grad:
        total.backward()
    gradients = [[torch.zeros_like(x) if x.grad is None else x.grad for x in own] for own in leaves]
    return [torch.stack([mine, *own]) for mine, own in zip(case.gradients, gradients, strict=True)], float(
        total.detach()
    )


def joined(case: StepCase, tables: list[list[torch.Tensor]], shards: int) -> list[torch.Tensor]:
    """[n, shards · (1 + depths) · V / shards] of every sample: what a tensor-parallel rank holds is contiguous."""
    stacked = [torch.stack([z, *own], dim=1) for z, own in zip(case.logits, tables, strict=True)]
    return [each.unflatten(2, (shards, -1)).permute(0, 2, 1, 3).flatten(1) for each in stacked]


def parted(gradient: torch.Tensor, depths: int, shards: int) -> torch.Tensor:
    return gradient.view(len(gradient), shards, 1 + depths, -1).permute(2, 0, 1, 3).flatten(2)


@pytest.fixture
def predicts(monkeypatch):
    """The simulation's loss with depths; gives the sum of the depths' losses, and whether they go through the head."""
    locals_, state, lock = {}, SimpleNamespace(total=0.0, is_fused=False), threading.Lock()
    slices = PlannedStep.slices

    def remembered(self, *args):
        found = slices(self, *args)
        locals_.update({id(local.fields): local for local in found})
        return found

    def loss_of(rows, fields, loss, tp_group):
        local, parts = locals_[id(fields)], rows.unflatten(1, (1 + loss.mtp_depths, -1)).unbind(1)
        head = dataclasses.replace(loss, head_mode="recompute")
        weight = torch.nn.Parameter(torch.eye(parts[0].shape[1], dtype=rows.dtype))
        if state.is_fused:
            made = [HeadCall(z[:, None], weight, tp_group, sequence_parallel=False) for z in parts]
        else:
            made = parts
        losses = mtp.divergences(made[1:], made[0], local, head, tp_group)
        total, found = microbatch_loss(parts[0], fields, loss, tp_group)
        depths = sum(each.total for each in losses)
        with lock:
            state.total += FACTOR * float(depths.detach()) / (1 if tp_group is None else tp_group.size())
        return total + FACTOR * depths, found

    monkeypatch.setattr(PlannedStep, "slices", remembered)
    monkeypatch.setattr(simulation, "microbatch_loss", loss_of)
    # a rank's hidden states are its own columns of the logits: there is nothing to add over the ranks
    monkeypatch.setattr(mtp, "enter", lambda hidden, *_: hidden)
    return state


@pytest.mark.proof("Multi-token prediction against the policy, float64: loss and gradient within 1e-12 of the oracle")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("is_fused", [False, True], ids=["stored", "fused"])
def test_the_policy_as_target_equals_the_oracle(is_fused, layout, predicts, full, evidence):
    """Under context parallelism some of the policy's rows are on another rank than the depth's."""
    predicts.is_fused, worst, rng = is_fused, 0.0, random.Random(f"mtp {layout}")
    for _ in range(FULL[layout.world_size] // 2 if full else 3):
        case, depths = drawn(rng, layout)
        tables = tables_of(case, depths, rng)
        step = dataclasses.replace(case.step(layout, rng), logits=joined(case, tables, layout.tensor))
        predicts.total = 0.0
        (found,) = simulation.run_steps([step], layout)
        gradients, total = expected(case, tables, depths)
        ours = [parted(each, depths, layout.tensor) for each in found.gradients]
        worst = max(worst, gradient_error([each.flatten() for each in ours], [each.flatten() for each in gradients]))
        worst = max(worst, scalar_error(predicts.total, total, max(total, 0.1)))
        assert found.num_nonfinite == 0
        assert worst <= LIMIT, case.asked
        evidence(cases=1, worst=worst, tolerance=LIMIT)
