"""A step in a host's loop, on one process and on threads."""

import copy
import dataclasses
import math
import random

import host_cases as hosts
import pytest
import simulation
import threads
import torch
from compare import OF_RANKS
from simulation import Layout

from megatron_pg.hosts.startup import check
from megatron_pg.hosts.step import HostLossError, HostStep
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.errors import NonFiniteLossError, StepPlanError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import microbatch_head_loss, microbatch_logprobs_loss, microbatch_loss


def farthest(*ranks: list) -> tuple[int, float]:
    """The rank of samples with the largest mean |o - b| next to the other one, and the factor."""
    gaps = [[(s.old_logprobs - s.rollout_logprobs).abs()[s.loss_mask].clamp(max=3) for s in rank] for rank in ranks]
    first, second = (float(torch.cat(each).mean()) for each in gaps)
    number = int(second > first)
    return number, pytest.approx([first / second, second / first][number], rel=1e-9)


def settings(**given) -> LossSettings:
    return LossSettings.from_args(check("host", given | {"pg_metrics": "with_entropy"}, megatron={}).args)


def logits_of(samples) -> list[torch.Tensor]:
    embedding, head = hosts.parameters()
    return [(embedding[sample.tokens] @ head.T).clone().requires_grad_() for sample in samples]


def planned(loss: LossSettings, samples, **more) -> HostStep:
    return HostStep(loss, lambda: samples, data=torch.distributed.group.WORLD, **more)


def loss_of(step: HostStep, samples, logits, members) -> torch.Tensor:
    """Of a micro-batch with these samples of a rank."""
    local = step.slice(members, [len(samples[i].tokens) for i in members])
    return step.keep(
        local, microbatch_loss(torch.cat([logits[i] for i in members]), local.fields, step._settings, None)
    )


def on_two_ranks(loss: LossSettings, samples, cuts) -> tuple[list[dict], list[torch.Tensor]]:
    """Metrics of each rank, and the gradient of every sample: every second is a rank's, in `cuts(rank, count)`."""

    def work(rank: int):
        mine = samples[rank::2]
        logits, step = logits_of(mine), planned(loss, mine)
        for members in cuts(rank, len(mine)):
            loss_of(step, mine, logits, members).backward()
        return step.finish(reports=True).metrics, [each.grad for each in logits]

    metrics, gradients = zip(*threads.run(2, work), strict=True)
    return list(metrics), [gradients[k % 2][k // 2] for k in range(len(samples))]


def whole_step(loss: LossSettings, samples) -> simulation.Outcome:
    logits = [each.detach() for each in logits_of(samples)]
    return simulation.run_step(samples, logits, Layout(), loss, random.Random(1))


@pytest.mark.parametrize("aggregation", hosts.AGGREGATIONS)
def test_samples_in_any_order_and_cut_are_one_step(aggregation):
    """Denominators follow their samples into every micro-batch in which the host puts them."""
    loss, samples = settings(**hosts.AGGREGATIONS[aggregation]), hosts.samples()
    whole = whole_step(loss, samples)

    def cuts(rank: int, count: int) -> list[list[int]]:
        order = random.Random(rank).sample(range(count), count)
        return [order[:2], order[2:]]

    (metrics, again), gradients = on_two_ranks(loss, samples, cuts)
    assert metrics == again
    of_ranks = [metrics.pop(name) for name in sorted(OF_RANKS)]
    assert {name: pytest.approx(value, rel=1e-6) for name, value in whole.metrics.items()} == metrics
    assert of_ranks == [*farthest(samples[::2], samples[1::2])]
    for found, expected in zip(gradients, whole.gradients, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("cut", [[[0, 1, 2, 3, 4, 5]], [[3, 0], [5, 1, 4], [2]]])
@pytest.mark.parametrize("aggregation", hosts.AGGREGATIONS)
def test_a_critics_step_is_one_in_any_cut(aggregation, cut):
    """From values as from a model's output, in float64 as the oracle."""
    given = {**hosts.AGGREGATIONS[aggregation], "pg_value_clip": hosts.VALUE_CLIP}
    loss = LossSettings.from_args(check("host", given, megatron={}, role="critic").args)
    samples = hosts.with_returns(hosts.samples(), skips=False)
    embedding, head = hosts.parameters(critic=True)

    def work(rank: int):
        mine, step = samples[rank::2], planned(loss, samples[rank::2])
        values = [(embedding[sample.tokens] @ head[0]).clone().requires_grad_() for sample in mine]
        for number, members in enumerate(cut):
            local = step.slice(members, [len(mine[i].tokens) for i in members])
            joined = torch.cat([values[i] for i in members])
            if number % 2:
                step.keep(local, microbatch_logprobs_loss(joined, None, local.fields, loss)).backward()
            else:
                step.keep(local, microbatch_loss(joined[:, None], local.fields, loss, None)).backward()
        return step.finish(reports=True).metrics, [each.grad for each in values]

    (metrics, first), (again, second) = threads.run(2, work)
    expected = hosts.of_critic(samples, hosts.Case(aggregation=aggregation))
    assert metrics == again
    assert {
        name: pytest.approx(value, rel=1e-12) for name, value in expected.metrics.items()
    }.items() <= metrics.items()
    for k, (sample, slope) in enumerate(zip(samples, expected.gradients, strict=True)):
        found = [first, second][k % 2][k // 2][-sample.response_length - 1 : -1]
        assert torch.allclose(found, torch.from_numpy(slope), rtol=1e-12, atol=1e-14)


def test_on_policy_ratios_are_exactly_one_and_the_gradient_equals_the_first_steps():
    loss, samples = settings(), hosts.samples()[:4]

    def work(rank: int):
        found = []
        for on_policy in (False, True):
            logits = logits_of(samples)
            own = [each.detach().log_softmax(-1) for each in logits]
            pairs = zip(samples, own, strict=True)
            given = samples if on_policy else [_with_old(sample, values) for sample, values in pairs]
            step = planned(loss, given, on_policy=on_policy)
            loss_of(step, samples, logits, range(4)).backward()
            found.append((step.finish(reports=True).metrics, [each.grad for each in logits]))
        return found

    (((_, first), (metrics, second)),) = threads.run(1, work)
    assert (metrics["ratio_new_old"], metrics["kl_new_old"], metrics["mean_abs_log_ratio"]) == (1.0, 0.0, 0.0)
    assert metrics["old_logprobs"] == metrics["new_logprobs"]
    assert all(torch.allclose(a, b, rtol=1e-6, atol=1e-12) for a, b in zip(first, second, strict=True))


CHOICES = {"m2po": "m2po,high=0.01", "clip_cov": "clip_cov,low=0.0,fraction=0.2", "kl_cov": "kl_cov,fraction=0.3"}


@pytest.mark.parametrize("name", CHOICES)
def test_tokens_are_chosen_over_the_ranks_of_a_host(name):
    loss, samples = settings(pg_objective="reinforce_is", pg_correction=CHOICES[name]), hosts.samples()
    whole = whole_step(loss, samples)
    (metrics, _), gradients = on_two_ranks(loss, samples, lambda rank, count: [range(count)])
    assert 0 < metrics["selected_fraction"] == whole.metrics["selected_fraction"] < 1
    for found, expected in zip(gradients, whole.gradients, strict=True):
        assert torch.allclose(found, expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("rewards", [(-1.0, 0.25, 0.5), (-3.0, -2.0, -1.0)])
def test_the_largest_score_of_a_rollout_whose_rows_are_scored_one_by_one_counts(rewards):
    rows = [dataclasses.replace(each, rollout_id="r", prompt_id="p", term="rl") for each in hosts.samples()[:3]]
    scored = [dataclasses.replace(each, reward=reward) for each, reward in zip(rows, rewards, strict=True)]

    for facts in threads.run(2, lambda rank: planned(settings(), scored[rank::2]).plan.facts):
        assert (facts.num_rewards, facts.reward) == (1, rewards[-1])


@pytest.mark.parametrize("name", [*CHOICES, "tis", "seq_tis", "icepop", "seq_mask_tis", "rejection"])
def test_nothing_can_be_chosen_by_log_probabilities_that_are_not_made(name):
    """The error reaches every rank."""
    options = ",level=seq_mean,estimator=k3,high=0.5" if name == "rejection" else ""
    loss = settings(pg_objective="reinforce_is", pg_correction=name + options)
    samples = [dataclasses.replace(each, rollout_logprobs=each.old_logprobs - 0.1) for each in hosts.samples()[:4]]
    with pytest.raises(StepPlanError, match=f"--pg-correction {name} reads old_logprobs before the forward"):
        threads.run(2, lambda rank: planned(loss, samples, on_policy=True))


def _with_old(sample, logprobs):
    length = sample.response_length
    old = logprobs[-length - 1 : -1].gather(1, sample.tokens[-length:, None])[:, 0]
    return dataclasses.replace(sample, old_logprobs=old.double(), rollout_logprobs=None, ref_logprobs=None)


@pytest.mark.parametrize("head", ["forward", "recompute"])
def test_padded_rows_have_one_gradient_by_the_head_and_from_logits(head):
    """The head takes hidden states [s, b, H], and a host gives logits [b, s, V]."""
    samples, members = hosts.samples()[:4], [2, 0, 3, 1]
    width = max(len(sample.tokens) for sample in samples) + 2
    tokens = [torch.nn.functional.pad(samples[i].tokens, (0, width - len(samples[i].tokens))) for i in members]
    embedding, weight = hosts.parameters()
    found = []

    def work(rank: int):
        for loss in (settings(), settings(pg_fused_head=head)):
            step = planned(loss, samples)
            hidden = embedding[torch.stack(tokens, dim=1)].requires_grad_()  # [s, b, H]
            local = step.slice(members, [width] * 4, side_by_side=loss.head_mode is not None)
            matrix = weight.clone().requires_grad_()
            if loss.head_mode:
                call = HeadCall(hidden, matrix, None, False)
                step.keep(local, microbatch_head_loss(call, local.fields, local.trained, loss)).backward()
            else:
                logits = (hidden @ matrix.T).transpose(0, 1).flatten(0, 1)
                step.keep(local, microbatch_loss(logits, local.fields, loss, None)).backward()
            found.append((step.finish(reports=True).metrics, hidden.grad, matrix.grad))

    threads.run(1, work)
    (metrics, *gradients), (again, *others) = found
    assert metrics == pytest.approx(again, rel=1e-5, abs=1e-7)
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-8) for a, b in zip(gradients, others, strict=True))


def test_a_rank_that_has_no_samples_stops_all():
    def work(rank: int):
        def samples():
            if rank == 1:
                raise KeyError("log_probs")
            return hosts.samples()[:2]

        with pytest.raises(StepPlanError, match=r"data-parallel rank 1.*KeyError: 'log_probs'"):
            HostStep(settings(), samples, data=torch.distributed.group.WORLD)

    threads.run(2, work)


def test_a_loss_that_is_not_finite_names_its_sample_on_every_rank():
    def work(rank: int):
        samples = hosts.samples()[rank * 2 : rank * 2 + 2]
        step, logits = planned(settings(), samples), [each.detach() for each in logits_of(samples)]
        if rank == 1:
            logits[0][len(samples[0].tokens) - samples[0].response_length - 1] = math.nan
        loss_of(step, samples, [each.requires_grad_() for each in logits], range(2))
        with pytest.raises(NonFiniteLossError, match="non-finite loss at rank 1, sample 2 "):
            step.finish(reports=True)

    threads.run(2, work)


@pytest.mark.parametrize("forwards", [[], [[0, 1]], [[0, 1], [2, 3], [0, 1]]])
def test_a_loss_that_did_not_run_once_for_every_sample_stops_every_rank(forwards):
    """Rank 0 computes other micro-batches than the host has planned."""

    def work(rank: int):
        samples = hosts.samples()[rank * 4 : rank * 4 + 4]
        step, logits = planned(settings(), samples), logits_of(samples)
        for members in forwards if rank == 0 else [[0, 1], [2, 3]]:
            loss_of(step, samples, logits, members)
        with pytest.raises(HostLossError, match="was not computed exactly once for every sample of the step"):
            step.finish(reports=True)

    threads.run(2, work)


def test_an_error_keeps_its_text_when_ray_makes_it_again_in_the_driver():
    error = HostLossError("The problem.")
    assert str(error) == "The problem. Use a release of the trainer that docs/hosts lists."
    assert str(copy.copy(error)) == str(error)  # by the same protocol as pickle


def test_a_stage_without_the_loss_takes_part_in_the_exchange_alone():
    def work(rank: int):
        loss, samples = settings(), hosts.samples()[:2]
        group = torch.distributed.new_group([0])
        if rank == 1:
            return HostStep(loss).finish(reports=False)
        step = HostStep(loss, lambda: samples, data=group)
        loss_of(step, samples, logits_of(samples), range(2))
        return step.finish(reports=True).metrics["num_samples"]

    assert threads.run(2, work) == [2, None]
