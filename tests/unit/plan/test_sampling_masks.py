"""What could be sampled, before a step is planned: what is refused, what is masked, and what reaches the loss."""

import dataclasses
from types import SimpleNamespace

import pytest
import simulation
import threads
import torch.distributed as dist
from loss_terms import kl_and_entropy
from namespaces import arguments
from samples import plain_sample

from megatron_pg import Sample, StepPlanError, pack, validate_args
from megatron_pg.batch import slice_batch
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms
from megatron_pg.plan.errors import ScheduleError
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.sampling_masks import without_missing
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.checks import check_vocabulary_of_sampling_masks

SETTINGS = simulation.settings("token_mean", per_token=True)
MASKS = dataclasses.replace(SETTINGS, sampling_mask_missing="mask")
TOKENS = [5, 6, 7, 8]  # of a response


def sample(sets, *, mask=(1, 1, 0, 1), **rest) -> Sample:
    fields = {"tokens": [1, *TOKENS], "loss_mask": list(mask), "sampling_mask": sets, "rollout_id": "r"}
    fields |= {"old_logprobs": [-0.5] * 4, "sample_id": "s", **rest}
    if fields.get("term"):
        fields |= {"old_logprobs": None, "advantage": None}
    return plain_sample(4, **fields)


GOOD = [[5, 9], [], [1], [8, 2, 6]]


def planned(samples, settings=SETTINGS, group=None) -> PlannedStep:
    return PlannedStep.of(lambda: [pack(samples, qkv_format="thd")], settings, group=group)


def cross_entropy(name: str, **rest) -> LossTerm:
    return LossTerm(name=name, kind="ce", aggregation="token_mean", **rest)


def with_terms(*loss_terms: LossTerm) -> LossSettings:
    terms = LossTerms(objective=SETTINGS.terms.objective, further=loss_terms)
    return dataclasses.replace(SETTINGS, terms=terms, terms_of_samples=frozenset({"rl", "sft", "echo"}))


REF = LossTerm(name="ref", kind="kl", aggregation="token_mean", estimator="k2")
OF_TOOL = {"masks": {"ref": [0, 0, 1, 0]}, "ref_logprobs": [-0.5] * 4}


def with_reference(*, on: str | None = None, has_objective: bool = True, **more) -> LossSettings:
    settings = with_terms(dataclasses.replace(REF, on=on))
    names = settings.terms_of_samples | {"ref"}
    settings = dataclasses.replace(settings, terms_of_samples=names, **more)
    return settings if has_objective else without_objective(settings)


def without_objective(settings: LossSettings) -> LossSettings:
    return dataclasses.replace(settings, terms=dataclasses.replace(settings.terms, has_objective=False))


CERTAIN = [-0.5, -0.5, -0.5, 0.0]  # the last token is the only one of its set


@pytest.mark.parametrize(
    ("sets", "changes", "message"),
    [
        ([[5], [9], [1], [8]], {}, r"does not hold token 6, its trained response token 1 \(1 of the sample's"),
        ([[4], [9], [1], [1]], {}, r"does not hold token 5, its trained response token 0 \(3 of the sample's"),
        ([[5], [], [1], [8, 2]], {}, "old_logprobs of sample s is -0.5 at response token 0, whose sampling mask has"),
        ([[5, 2], [], [1], [8]], {"rollout_logprobs": [*CERTAIN[:3], -0.002]}, "rollout_logprobs of sample s is -0.0"),
        ([[5, 2], [], [1], [8]], {"ref_logprobs": [*CERTAIN[:3], -0.1]}, "ref_logprobs of sample s is -0.1 at"),
        # of the reference's own tokens, without the objective
        ([[5], [], [1, 4], [8]], OF_TOOL, "does not hold token 7, its trained response token 2"),
        ([[5], [], [7, 7], [8]], OF_TOOL, "names a token twice, which would count twice: at response token 2"),
        ([[5], [], [7], [8]], OF_TOOL, "old_logprobs of sample s is -0.5 at response token 2"),
        ([[5], [], [7], [8]], OF_TOOL | {"old_logprobs": [0.0] * 4}, "ref_logprobs of sample s is -0.5 at response"),
    ],
    ids=range(9),
)
def test_what_could_not_have_been_sampled_is_refused_by_name(sets, changes, message):
    is_of_tool = "masks" in changes
    old = {"old_logprobs": CERTAIN} if changes and not is_of_tool else {}
    with pytest.raises(ValueError, match=message):
        planned([sample(sets, **old | changes)], with_reference(has_objective=False) if is_of_tool else SETTINGS)


def test_a_head_that_knows_whole_rows_only_refuses_it():
    """Before the step is planned, on every rank, and not where nothing reads it."""
    settings = dataclasses.replace(SETTINGS, head_mode="scaled_exp")
    with pytest.raises(ValueError, match=r"sample s has a sampling mask, and .* Use --pg-fused-head forward"):
        planned([sample(GOOD)], settings)
    planned([sample(None)], settings)
    planned(
        [sample(GOOD)], dataclasses.replace(settings, head_choice="auto: scaled_exp")
    )  # the loss then takes forward


def test_a_masked_token_may_lie_outside_and_a_certain_one_is_rounded():
    planned([sample(GOOD)])
    planned([sample([[5], [], [1], [8, 2]], old_logprobs=[-9e-4, -3.0, -7.0, -1.0], teacher_logprobs=[-3.0] * 4)])
    planned([sample([[9]] * 4, term="sft")], with_terms(cross_entropy("sft")))


def test_masked_before_the_plan_so_that_the_denominators_follow():
    sets = [[5, 9], [3], [1], [4, 2]]
    step = planned([sample(sets), sample(GOOD, sample_id="t", rollout_id="u")], MASKS)
    assert [s.loss_mask.int().tolist() for s in step.batches[0].samples] == [[1, 0, 0, 0], [1, 1, 0, 1]]
    plan = step.plan
    assert (plan.num_tokens, plan.num_missing, plan.denominators.tolist()) == (4, 2, [4.0, 4.0])
    untouched = pack([sample(sets)], qkv_format="thd")
    assert without_missing(untouched, SETTINGS) is untouched
    assert without_missing(untouched, without_objective(MASKS)) is untouched


def test_masked_tokens_of_all_ranks_are_counted():
    def work(rank: int) -> int:
        sets = [[[5, 9], [3], [1], [8]], [[4], [3], [1], [8]]][rank]
        mine = sample(sets, old_logprobs=[-0.5, -0.5, 0.0, 0.0], rollout_id=rank)
        return planned([mine], MASKS, dist.group.WORLD).plan.num_missing

    assert threads.run(2, work) == [3, 3]


def test_some_of_a_ranks_samples_or_of_the_ranks_have_one():
    known = {"ref_logprobs": [-0.5] * 4}
    for settings in (SETTINGS, with_reference(on="rl", has_objective=False)):
        with pytest.raises(ValueError, match="sample t has no sampling mask while others of the step have one"):
            planned([sample(GOOD, **known), sample(None, sample_id="t", **known)], settings)
    supervised = with_terms(cross_entropy("sft"))
    planned([sample(GOOD), sample(None, term="sft", sample_id="t")], supervised)

    def work(rank: int):
        samples = [[], [sample(None, rollout_id=1)], [sample(GOOD, rollout_id=2)]][rank]
        planned(samples, group=dist.group.WORLD)

    with pytest.raises(StepPlanError, match="rank 2 has samples with a sampling mask and rank 1 has none"):
        threads.run(3, work)


@pytest.mark.parametrize(
    ("term", "is_refused"),
    [
        (LossTerm(name="echo", kind="ce", on="rl"), True),
        (LossTerm(name="t", kind="opd", on="rl", estimator="k3_weighted"), True),
        (LossTerm(name="t", kind="topk_forward_kl", on="rl", tail_floor=1e-6), True),
        (LossTerm(name="sft", kind="topk_forward_kl", tail_floor=1e-6), True),
        (LossTerm(name="echo", kind="ce"), True),  # of a token that is the objective's too
        (LossTerm(name="sft", kind="ce"), False),
        (LossTerm(name="h", kind="entropy", on="rl"), False),
        (LossTerm(name="k", kind="kl", on="rl", estimator="k2"), False),
    ],
    ids=str,
)
def test_a_term_over_the_whole_vocabulary_has_tokens_of_its_own(term, is_refused):
    echo = {"echo": [0, 0, 1, int(term.name == "echo" and term.on is None)]}
    values = {name: [-0.5] * 4 for name in ("ref_logprobs", "teacher_logprobs")}
    values["teacher_topk"] = {"ids": [[1]] * 4, "logprobs": [[-0.5]] * 4}
    given = [sample(GOOD, masks=echo, **values), sample(None, term="sft", sample_id="t", **values)]
    settings = with_terms(dataclasses.replace(term, aggregation="token_mean"))
    if not is_refused:
        planned(given, settings)
        return
    flag = f"--pg-term {term.name}:{term.kind}"
    message = f"^{flag} reads log-probabilities over the whole vocabulary .* of sample s, where another term"
    with pytest.raises(ValueError, match=message):
        planned(given, settings)


def with_entropy(kept: str) -> LossSettings:
    settings = with_terms(LossTerm(name="echo", kind="entropy", aggregation="token_mean"))
    terms = dataclasses.replace(settings.terms, sampling_mask_entropy=kept)
    return without_objective(dataclasses.replace(settings, terms=terms))


TOOL = {"echo": [0, 0, 1, 0]}


@pytest.mark.parametrize(
    ("settings", "masks", "wanted"),
    [
        (with_reference(), OF_TOOL["masks"], [[5, 9], [7, 3], [8, 2]]),  # the objective's tokens and the term's own
        (with_reference(has_objective=False), OF_TOOL["masks"], [[7, 3]]),
        (with_reference(on="rl", has_objective=False), {}, [[5, 9], [8, 2]]),
        (with_entropy("kept"), TOOL, [[7, 3]]),
        (with_entropy("full"), TOOL, None),
        (with_terms(cross_entropy("echo")), TOOL, [[5, 9], [8, 2]]),  # over the whole vocabulary at tool tokens
        (without_objective(with_terms(cross_entropy("t", on="rl"))), {}, None),
    ],
    ids=range(7),
)
def test_the_sampling_mask_is_read_at_the_tokens_of_the_terms_that_read_it(settings, masks, wanted):
    given = sample([[5, 9], [], [7, 3], [8, 2]], masks=masks, ref_logprobs=[-0.5] * 4)
    (local,) = planned([given], settings).slices(lambda _: None)
    sets = local.fields.sampling_mask
    assert wanted == (None if sets is None else [row[row >= 0].tolist() for row in sets.table() if any(row >= 0)])


def test_two_terms_that_read_different_distributions_of_a_token_are_refused_without_the_objective_too():
    echo = cross_entropy("echo", on="rl")
    terms = LossTerms(objective=SETTINGS.terms.objective, further=(dataclasses.replace(REF, on="rl"), echo))
    settings = without_objective(dataclasses.replace(SETTINGS, terms=terms))
    with pytest.raises(ValueError, match=r"^--pg-term echo:ce reads log-probabilities over the whole vocabulary"):
        planned([sample(GOOD, ref_logprobs=[-0.5] * 4)], settings)


def test_tokens_of_the_reference_outside_their_sets_are_masked_there_alone():
    settings = with_reference(sampling_mask_missing="mask")
    given = sample([[4, 9], [], [1], [8, 2]], masks={"ref": [0, 1, 1, 0]}, ref_logprobs=[-0.5] * 4)
    step = planned([given], settings)
    (found,) = step.batches[0].samples
    assert found.loss_mask.int().tolist() == [0, 1, 0, 1]
    assert found.masks["ref"].int().tolist() == [0, 1, 0, 0]
    plan = step.plan
    assert (plan.num_tokens, plan.num_missing, plan.terms["ref"].num_tokens) == (2, 2, 1)


def test_ids_beyond_the_vocabulary_are_refused_where_a_token_is_trained():
    model = SimpleNamespace(vocab_size=16)
    batches = [pack([sample([[5, 15], [], [16], [8]])], qkv_format="thd")]
    check_vocabulary_of_sampling_masks(batches, model, SETTINGS)
    with pytest.raises(ScheduleError, match="holds token id 15 at response token 0, the vocabulary has 12"):
        check_vocabulary_of_sampling_masks(batches, model, dataclasses.replace(SETTINGS, vocab_size=12))
    tool = [pack([sample([[5], [], [16], [8]], **OF_TOOL)], qkv_format="thd")]
    with pytest.raises(ScheduleError, match="holds token id 16 at response token 2, the vocabulary has 16"):
        check_vocabulary_of_sampling_masks(tool, model, with_reference(has_objective=False))
    with pytest.raises(ScheduleError, match="holds token id 21 at response token 3"):
        check_vocabulary_of_sampling_masks([pack([sample([[5], [], [1], [8, 21]])], qkv_format="thd")], model, SETTINGS)


# ---- Layout ----


def test_what_restricts_nothing_is_left_out():
    for given in ([[], [], [3], []], None):
        batch = pack([sample(given)], qkv_format="thd")
        weights = {"weights": batch.loss_mask.double(), "sampling_mask": batch.loss_mask}
        assert slice_batch(batch, weights, cp_rank=0, cp_size=1).fields.sampling_mask is None


def test_peers_that_have_another_sampling_mask_have_another_digest():
    digests = {pack([sample(sets)], qkv_format="thd").digest for sets in (GOOD, [[5, 9], [], [1], [8, 6, 2]], None)}
    assert len(digests) == 3


# ---- Settings ----


def test_the_flags_reach_the_settings():
    plain = LossSettings.from_args(validate_args(arguments(pg_kernel="torch")))
    assert (plain.sampling_mask_missing, plain.terms.sampling_mask_entropy) == ("error", "full")
    given = arguments(
        pg_kernel="torch", pg_sampling_mask_missing="mask", pg_sampling_mask_entropy="kept", pg_metrics="with_entropy"
    )
    found = LossSettings.from_args(validate_args(given))
    assert (found.sampling_mask_missing, found.terms.sampling_mask_entropy) == ("mask", "kept")
    counted_by = [{metric.name for metric in each.metrics.metrics} for each in (plain, found)]
    assert ["num_tokens_missing" in names for names in counted_by] == [False, True]


@pytest.mark.parametrize(
    ("loss_terms", "entropy", "sampling_mask", "is_whole"),
    [
        ((), False, "full", False),
        ((), True, "full", True),
        ((), True, "kept", False),
        (kl_and_entropy(entropy_coef=0.1), False, "full", True),
        (kl_and_entropy(entropy_coef=0.1), False, "kept", False),
    ],
    ids=range(5),
)
def test_whole_rows_are_read_where_their_entropy_is_wanted_alone(loss_terms, entropy, sampling_mask, is_whole):
    from megatron_pg.kernels import PolicyLoss

    batch = pack([sample(GOOD)], qkv_format="thd")
    weights = {"weights": batch.loss_mask.double(), "sampling_mask": batch.loss_mask}
    local = slice_batch(batch, weights, cp_rank=0, cp_size=1)
    terms = LossTerms(objective=SETTINGS.terms.objective, further=loss_terms, sampling_mask_entropy=sampling_mask)
    assert PolicyLoss(terms, local.fields).restriction(entropy).whole_entropy == is_whole
    assert PolicyLoss(terms, dataclasses.replace(local.fields, sampling_mask=None)).restriction(entropy) is None
