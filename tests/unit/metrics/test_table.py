"""Declarations, reduction, and the page that describes them. Values over layouts: test_partition_invariance."""

import dataclasses
import math
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loss_terms import kl_and_entropy
from objective_parts import sequences_of

from megatron_pg.batch import TokenFields
from megatron_pg.declarations.choices import METRIC_LEVELS as LEVELS
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyGradientLoss
from megatron_pg.metrics import METRICS, Reduction, TokenValues
from megatron_pg.metrics.limits import LIMITS, Limit, red_flags
from megatron_pg.objectives import objective_of
from megatron_pg.plan.facts import SampleFacts, encode_facts, fact_sums, largest_facts, unit_facts
from megatron_pg.rollouts.sample import Sample

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"
TERMS = LossTerms(objective=objective_of("grpo", clip_eps_low=0.2, clip_eps_high=0.28))
NONE = unit_facts(encode_facts([]))
FACTS = SampleFacts.of(fact_sums(NONE), largest_facts(NONE), torch.zeros(2, dtype=torch.int64))
PLAN = SimpleNamespace(
    num_turns=None,
    num_tokens=2,
    num_trained=2,
    num_response_tokens=3,
    num_samples=1,
    num_rollouts=1,
    num_prompts=None,
    facts=FACTS,
)


def tokens(mask, *, terms: LossTerms = TERMS, **changes) -> TokenValues:
    """Token values of one sample; every field is 0.5 unless given."""
    size = len(mask)
    trained = torch.tensor(mask, dtype=torch.bool)
    names = ("weights", "token_losses", "logprobs", "old_logprobs", "log_ratios", "advantages", "entropy")
    known = {name: torch.full((size,), 0.5, dtype=torch.float64) for name in names}
    known["sample_weights"] = trained / max(int(trained.sum()), 1)
    known |= {name: torch.tensor(values, dtype=torch.float64) for name, values in changes.items()}
    of_result = ("token_losses", "logprobs", "log_ratios", "entropy", "term_losses", "sequence_log_ratios")
    result = {name: known.pop(name) for name in of_result if name in known}
    fields = {"targets": torch.zeros(size, dtype=torch.int64), "mask": trained, **known}
    fields = TokenFields.of(fields, sequences_of([size], [int(trained.sum())]))
    return TokenValues(fields, PolicyGradientLoss(torch.zeros(()), **result), terms)


def finished(*batches: TokenValues, features=("clip",)) -> dict[str, float]:
    reduction = Reduction("with_entropy", features)
    partials = torch.stack([reduction.partial(batch) for batch in batches])
    return reduction.finish(reduction.combine(partials).tolist(), PLAN)


def value(name: str, *batches: TokenValues, features=("clip",)) -> float | None:
    return finished(*batches, features=features).get(name)


def test_names_are_unique_and_levels_are_nested():
    names = [metric.name for metric in METRICS]
    assert len(set(names)) == len(names)
    sets = [{metric.name for metric in Reduction(level).metrics} for level in LEVELS]
    assert sets[0] < sets[1] < sets[2]
    assert sets[0] == {"pg_loss"}
    assert sets[2] - sets[1] == {"entropy"}


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("kl_new_old", tokens([1], log_ratios=[math.log(2)]), 2 - 1 - math.log(2)),
        ("ratio_new_old", tokens([1, 1, 0], log_ratios=[0.0, math.log(3), 9.0]), 2.0),
        ("ess", tokens([1, 1], log_ratios=[0.0, math.log(3)]), 16 / (10 * 2)),
        ("clipped_high_fraction", tokens([1, 1], log_ratios=[1.0, 1.0], advantages=[1.0, -1.0]), 0.5),
        ("clipped_low_fraction", tokens([1, 1], log_ratios=[-1.0, -1.0], advantages=[1.0, -1.0]), 0.5),
        # without an advantage there is no gradient to lose
        ("clipped_high_fraction", tokens([1, 1], log_ratios=[1.0, 1.0], advantages=[1.0, 0.0]), 0.5),
        ("clipped_low_fraction", tokens([1, 1], log_ratios=[-1.0, -1.0], advantages=[0.0, -1.0]), 0.5),
        ("clipped_ratio_fraction", tokens([1, 1], log_ratios=[-1.0, 1.0], advantages=[1.0, -1.0]), 1.0),
        ("clamped_log_ratio_fraction", tokens([1, 1], log_ratios=[-20.5, 20.0]), 0.5),
        ("max_advantage", tokens([1, 1, 0], advantages=[-3.0, -2.0, 9.0]), -2.0),
        ("min_advantage", tokens([1, 1, 0], advantages=[3.0, 2.0, -9.0]), 2.0),
        ("aggregation_ess", tokens([1, 1], weights=[1.0, 3.0]), 16 / (2 * 10)),
        ("kl_new_ref", tokens([1], logprobs=[-1.0], ref_logprobs=[-1.0 + math.log(2)]), 2 - 1 - math.log(2)),
        ("ratio_new_ref", tokens([1], logprobs=[-1.0], ref_logprobs=[-1.0 + math.log(2)]), 0.5),
        ("mismatch_kl", tokens([1], old_logprobs=[-1.0 + math.log(2)], rollout_logprobs=[-1.0]), 2 - 1 - math.log(2)),
        ("mismatch_max", tokens([1, 1, 0], old_logprobs=[-1.0, -2.0, 0], rollout_logprobs=[-1.5, -1.0, 99]), 1.0),
        ("num_tokens_masked", tokens([1, 1]), 1),
    ],
)
def test_hand_worked_values(name, batch, expected):
    assert value(name, batch) == pytest.approx(expected, rel=1e-14)


def test_sequence_metrics_count_turns_where_turns_are_the_sequences():
    batch = tokens([1, 1, 0, 1], sequence_log_ratios=[0.0, 0.0, 9.0, math.log(3)])
    batch = dataclasses.replace(batch, fields=dataclasses.replace(batch.fields, sequences=sequences_of([3, 1], [2, 1])))
    found = finished(batch, features=("sequence",))
    sums = [found[name] for name in ("num_segments", "segment_ratio_sum", "segment_ratio_squared_sum")]
    assert sums == pytest.approx([2.0, 4.0, 10.0], rel=1e-14)


ALL = ("clip", "kl", "entropy", "further", "sequence", "correction")
KL_AND_ENTROPY = dataclasses.replace(TERMS, further=kl_and_entropy(kl_coef=0.1, kl_estimator="k3", entropy_coef=0.01))
OF_TERMS = {"term_losses": [[2.0, 4.0, 0.0], [-2.0, -4.0, 0.0]]}
U = [0.5, 0.25, 0.0]


def with_zeros(known: object, *names: str) -> object:
    """The values, with zeros where one of these is not known."""
    size = len(known.weights if isinstance(known, TokenFields) else known.logprobs)
    missing = [name for name in names if getattr(known, name) is None]
    return dataclasses.replace(known, **{name: torch.zeros(size, dtype=torch.float64) for name in missing})


@pytest.mark.parametrize(
    ("name", "batch", "expected"),
    [
        ("kl_loss", tokens([1, 1, 0], **OF_TERMS, **{"kl.weights": U}), 2.0),
        ("entropy_loss", tokens([1, 1, 0], **OF_TERMS, **{"entropy.weights": U}), 2.0),
        ("segment_ratio_sum", tokens([1, 1, 0], sequence_log_ratios=[math.log(3)] * 2 + [9.0]), 3.0),
        ("segment_ratio_squared_sum", tokens([1, 1, 0], sequence_log_ratios=[math.log(3)] * 2 + [9.0]), 9.0),
        ("num_segments", tokens([1, 1, 0]), 1.0),
        ("correction_factor", tokens([1, 1, 0], corrections=[0.5, 2.0, 9.0]), 1.25),
        ("rejected_fraction", tokens([1, 1, 1, 1, 0], corrections=[0.0, 2.0, 1.0, 1.0, 0.0]), 0.25),
        ("rejected_fraction", tokens([1, 1], corrections=[0.0, 2e-9]), 0.5),  # e^-20, a small factor, is kept
    ],
)
def test_hand_worked_values_of_further_terms(name, batch, expected):
    batch = dataclasses.replace(
        batch,
        fields=with_zeros(batch.fields, "corrections"),
        result=with_zeros(batch.result, "sequence_log_ratios"),
        terms=KL_AND_ENTROPY,
    )
    if batch.result.term_losses is None:
        losses = torch.zeros(2, len(batch.fields.mask), dtype=torch.float64)
        batch = dataclasses.replace(batch, result=dataclasses.replace(batch.result, term_losses=losses))
    assert value(name, batch, features=ALL) == pytest.approx(expected, rel=1e-14)
    assert value(name, batch) is None  # without the term


def test_the_loss_is_the_sum_of_its_terms():
    fields = {"weights": [1.0, 2.0], "token_losses": [3.0, 4.0], "term_losses": [[1.0, 2.0], [-5.0, -6.0]]}
    weights = {"kl.weights": [0.5, 0.25], "entropy.weights": [0.5, 0.25]}
    batch = tokens([1, 1], terms=KL_AND_ENTROPY, **fields, **weights)
    expected = 11.0 + 0.1 * (0.5 + 0.5) - 0.01 * (2.5 + 1.5)
    assert value("loss", batch, features=("kl", "entropy", "further")) == pytest.approx(expected, rel=1e-14)


def test_an_objective_without_bounds_has_no_clip_metrics():
    names = {metric.name for metric in Reduction("with_entropy", ()).metrics}
    assert not {name for name in names if name.startswith("clipped_")}


def test_extrema_survive_batches_and_ranks_without_a_token():
    empty = tokens([0, 0], advantages=[7.0, -7.0])
    none = tokens([])
    assert value("max_advantage", empty, tokens([1], advantages=[-3.0]), none) == -3.0
    assert value("min_advantage", none, tokens([1], advantages=[3.0]), empty) == 3.0


def test_a_metric_without_a_contribution_is_absent_never_zero():
    reduction = Reduction("with_entropy")
    of_the_plan = {"num_tokens", "num_tokens_masked", "num_samples", "num_rollouts"}
    assert reduction.finish(reduction.identity(), PLAN).keys() == of_the_plan
    found = reduction.finish(reduction.partial(tokens([1, 1])).tolist(), PLAN)
    assert not {"kl_new_ref", "mismatch_kl", "mismatch_max", "num_prompts"} & found.keys()
    assert reduction.lacking(found) == {
        "ref_logprobs": ["kl_new_ref", "ratio_new_ref"],
        "rollout_logprobs": [m.name for m in METRICS if m.needs == "rollout_logprobs" and m.is_reported],
        "reward": ["reward", "reward_std", "max_reward", "min_reward"],
        "truncated": ["truncated_fraction"],
    }


def test_metrics_of_the_step_need_no_trained_token_of_the_objective():
    """Every sample of the objective is masked while a term trains; without the objective, other metrics stay."""
    masked = SimpleNamespace(**vars(PLAN) | {"num_tokens": 0, "num_rollouts": 3, "num_prompts": 2})
    dropped = SimpleNamespace(**vars(PLAN) | {"num_tokens": 0, "num_rollouts": 0, "num_prompts": 0})
    masked.depth_counts = dropped.depth_counts = (3, 1)
    facts = unit_facts(encode_facts([sample_of_the_objective()]))
    masked.facts = SampleFacts.of(fact_sums(facts), largest_facts(facts), torch.zeros(2, dtype=torch.int64))
    reduction, nothing = Reduction("basic", ("mtp", "further")), tokens([0, 0])
    nothing.totals.update(mtp_loss=torch.tensor(2.0), mtp_accepted=torch.tensor(2), loss=torch.tensor(0.2))
    totals = reduction.partial(nothing).tolist()
    of_terms = {"mtp_loss": 2.0, "mtp_acceptance": 0.5, "loss": pytest.approx(0.2)}
    of_plan = {"num_tokens_masked": 1, "num_samples": 1}
    assert reduction.finish(totals, dropped) == of_terms | of_plan
    rewards = dict.fromkeys(("reward", "max_reward", "min_reward", "num_rewards"), 1.0) | {"reward_std": 0.0}
    lengths = {"response_length": 3.0, "max_response_length": 3.0, "truncated_fraction": 1.0}
    counts = {"num_tokens": 0, "num_rollouts": 3, "num_prompts": 2}
    assert reduction.finish(totals, masked) == of_terms | of_plan | rewards | lengths | counts


def sample_of_the_objective() -> Sample:
    rest = {"old_logprobs": [0.0] * 3, "advantage": 1.0, "reward": 1.0, "truncated": True}
    return Sample.build(tokens=[1, 2, 3, 4], response_length=3, loss_mask=[0, 0, 0], **rest)


@pytest.mark.parametrize("name", ["mtp", "clip", "further"])
def test_a_term_may_be_called_like_a_feature(name):
    term = LossTerm(name=name, kind="ce", aggregation="token_mean")
    names = [metric.name for metric in Reduction("basic", ("clip", "mtp", "further"), (), (term,)).metrics]
    assert {f"{name}/loss", f"{name}/num_tokens"} <= {*names}


def test_a_ratio_without_a_denominator_is_absent_and_takes_nothing_else_with_it():
    found, usual = (finished(tokens([1, 1], weights=weights)) for weights in ([0.0, 0.0], [1.0, 1.0]))
    assert usual.keys() - found.keys() == {"aggregation_ess"}
    assert math.isfinite(found["ess"])


def test_documents_without_the_field_do_not_dilute_its_mean():
    with_ref = tokens([1], logprobs=[-1.0], ref_logprobs=[-1.0 + math.log(2)])
    assert value("ratio_new_ref", with_ref, tokens([1]), tokens([1, 1])) == pytest.approx(0.5)


def test_a_metric_that_is_not_finite_stays_so_and_names_its_ranks():
    reduction = Reduction("with_entropy")
    good, bad = reduction.partial(tokens([1])), reduction.partial(tokens([1], entropy=[math.nan]))
    rows = torch.stack([good, torch.tensor(reduction.identity()), bad])
    assert math.isnan(reduction.finish(reduction.combine(rows).tolist(), PLAN)["entropy"])
    assert reduction.nonfinite(rows.tolist()) == {"entropy": [2]}


def test_masked_slots_may_hold_anything():
    bad = [0.5, math.nan]
    poisoned = dict.fromkeys(("token_losses", "logprobs", "old_logprobs", "log_ratios", "advantages", "entropy"), bad)
    reduction = Reduction("with_entropy")
    assert torch.equal(reduction.partial(tokens([1, 0])), reduction.partial(tokens([1, 0], **poisoned)))


# --- red flags ---


def test_a_limit_is_exceeded_beyond_its_bounds_only():
    limit = Limit(low=0.5, high=2.0, cause="here")
    exceeded = {0.5: False, 2.0: False, 0.4999: True, 2.0001: True, math.inf: True, math.nan: False}
    assert {value: limit.is_exceeded(value, 7) for value in exceeded} == exceeded
    first = Limit(high=0.01, in_step_1=True, cause="here")
    assert [first.is_exceeded(1.0, step) for step in (1, 2)] == [True, False]
    assert (str(limit), str(first)) == ("< 0.5 or > 2: here", "> 0.01 in step 1: here")


def test_the_red_flags_of_a_step():
    record = {"iteration": 1, "kl_new_old": 0.5, "ess": 0.9, "clipped_ratio_fraction": None, "grad_norm": 1e9}
    assert red_flags(record) == {"kl_new_old": LIMITS["kl_new_old"]}
    assert red_flags(record | {"iteration": 2, "ess": 0.1}) == {"ess": LIMITS["ess"]}


def test_the_pages_hold_the_limits_that_are_checked():
    page = PAGE.read_text(encoding="utf-8")
    assert len(LIMITS) >= 8
    for name, limit in LIMITS.items():
        assert re.search(rf"^\| `{name}` \| .* \| {re.escape(str(limit))} \|$", page, re.MULTILINE)


# --- a user's own ---


def test_an_objectives_own_metric_is_a_mean_over_documents():
    reports = lambda tokens, parameters: {"high": tokens.ratios > 1.5}  # noqa: E731
    own = dataclasses.replace(TERMS.objective, reports=reports, reported=("high",))
    terms = dataclasses.replace(TERMS, objective=own)
    one, two = tokens([1, 1, 0], log_ratios=[1.0, 0.0, 9.0], terms=terms), tokens([1], log_ratios=[0.0], terms=terms)
    reduction = Reduction("basic", (), own.reported)
    partials = torch.stack([reduction.partial(batch) for batch in (one, two)])
    assert reduction.finish(reduction.combine(partials).tolist(), PLAN)["high"] == 0.25  # of 0.5 and 0
    assert "high" not in [metric.name for metric in Reduction("none", (), own.reported).metrics]


def test_a_metric_of_ours_cannot_be_reported_by_another():
    with pytest.raises(ValueError, match="the custom objective reports 'ess', which is a metric of megatron_pg"):
        Reduction("none", (), ("ess",))
