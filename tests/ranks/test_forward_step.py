"""The whole step through Megatron's schedules, DDP and finalize, on real ranks over gloo."""

import launches
import processes
import pytest
import rank_cases
from processes import gradients, report, worst_difference
from rank_cases import (
    ALIKE,
    BALANCED,
    BALANCED_FULL,
    EVALUATIONS,
    FAULTS,
    GROUPS,
    LIMIT,
    MODES,
    MTP_ORACLES,
    MTP_PLAIN,
    PIECES,
    PIECES_4,
    STARTUP,
    Group,
    compare,
    compare_metrics,
    compare_pieces,
    hybrid,
    in_pieces,
    parts_of,
    reference_of,
    references_of,
)
from rank_model import OPTIONS

PREDICTED = ("mtp_loss", "mtp_acceptance", "loss")


# Of one launch: Megatron-FSDP keeps some groups of its cases, and the threads of gloo's groups wake up all the time.
MOST_CASES = 80


@launches.launch
def results(folder, full):
    """Folders of one launch of two ranks and one of a single rank, which run at the same time."""
    two, one = folder / "two", folder / "one"
    balanced = BALANCED_FULL if full else BALANCED
    cases = {case for group in GROUPS for case in group.cases(full)}
    cases |= {*balanced, *MTP_PLAIN, *PIECES, *in_pieces(PIECES), *EVALUATIONS}
    cases = sorted(cases)  # consecutive cases of one layout share its groups
    references = {*references_of({*cases} - {*balanced}, oracles_of(full)), *ALIKE, *hybrid(ALIKE), *CHOICE}
    with processes.finished([processes.start(1, one, [*sorted(references), *parts_of(balanced)])]):
        for first in range(0, len(cases), MOST_CASES):
            with processes.finished([processes.start(2, two, cases[first : first + MOST_CASES])]):
                pass
    return two, one


def oracles_of(full: bool) -> list[str]:
    return MTP_ORACLES if full else MTP_ORACLES[::3]


@launches.launch
def faulty(folder, full):
    """The folder of a launch of two ranks, one of which makes mistakes."""
    startups = [f"startup-{name}" for name in [*STARTUP, "source", "nothing", "sourceless", "nan"]]
    with processes.finished([processes.start(2, folder, [*FAULTS, *startups])]):
        return folder


@pytest.mark.parametrize("group", [pytest.param(g, marks=pytest.mark.proof(g.row)) for g in GROUPS])
def test_every_parameters_gradient_on_two_ranks_equals_that_of_one_process(results, group: Group, full, evidence):
    cases = group.cases(full)
    evidence(cases=len(cases), worst=compare(*results, cases, group.limit), tolerance=group.limit)
    if group.has_metrics:
        compare_metrics(*results, cases, ranks=2)


@pytest.mark.full_tier("four ranks are started by `make prove`")
@pytest.mark.parametrize("group", [pytest.param(g, marks=pytest.mark.proof(g.row_of_four)) for g in GROUPS if g.four])
def test_every_parameters_gradient_on_four_ranks_equals_that_of_one_process(results, group: Group, tmp_path, evidence):
    with processes.finished([processes.start(4, tmp_path, group.four)]):
        worst = compare(tmp_path, results[1], group.four, group.limit)
        evidence(cases=len(group.four), worst=worst, tolerance=group.limit)
        if group.has_metrics:
            compare_metrics(tmp_path, results[1], group.four, ranks=4)


@pytest.mark.proof("Real ranks: every rank reports the metrics of one process")
def test_every_rank_reports_the_metrics_of_one_process(results, full, evidence):
    cases = rank_cases.PLAIN.cases(full)
    compare_metrics(*results, cases, ranks=2)
    evidence(cases=len(cases))


@pytest.mark.proof("Real ranks, HybridModel: one rank has the GPTModel's gradients and metrics, bit for bit")
def test_a_hybrid_model_is_the_gpt_model_of_its_layers(results, evidence):
    rank_cases.compare_alike(results[1], ALIKE)
    evidence(cases=len(ALIKE))


@pytest.mark.proof(
    "Real ranks, mixture of experts: gradients of the router's losses on 2 ranks equal their mean over micro-batches"
)
def test_the_routers_own_losses_are_averaged_over_the_micro_batches(results, full, evidence):
    cases = BALANCED_FULL if full else BALANCED
    evidence(cases=len(cases), worst=rank_cases.compare_balanced(*results, cases), tolerance=LIMIT)


def test_the_mean_of_the_routers_losses_depends_on_the_contract_where_micro_batches_differ_in_size(results):
    found = [gradients(results[0], f"dp2t-{mode}-experts-balance") for mode in ("sample_mean", "token_mean")]
    assert worst_difference(*found) > 1000 * LIMIT


CHOICE = [f"dp1-sample_mean-experts{kind}" for kind in ("", "-choice", "-replay")]


def test_the_models_own_choice_replayed_is_the_same_step_bit_for_bit_and_another_choice_is_not(results):
    plain, chosen, replayed = (gradients(results[1], case) for case in CHOICE)
    assert worst_difference(chosen, plain) == 0
    assert worst_difference(replayed, plain) > 1000 * LIMIT


@pytest.mark.proof("Multi-token prediction: gradient and metrics of one process equal loops over samples in float64")
def test_multi_token_prediction_equals_loops_over_the_samples(results, full, evidence):
    _, one = results
    for case in oracles_of(full):
        expected, found = (report(one, name, 0)["metrics"] for name in (case, case.removesuffix("-oracle")))
        assert {name: found[name] for name in PREDICTED} == pytest.approx(expected, rel=1e-6)
    worst = rank_cases.compare_oracles(one, oracles_of(full))
    evidence(cases=len(oracles_of(full)), worst=worst, tolerance=LIMIT)


@pytest.mark.proof(
    "Overlapped experts: gradients by a schedule plan equal the plain schedule's, bit for bit without MTP (2 ranks)"
)
def test_a_model_that_runs_in_pieces_has_the_gradient_of_the_plain_schedule(results, evidence):
    evidence(cases=len(PIECES), worst=compare_pieces(results[0], PIECES), tolerance=LIMIT)


@pytest.mark.full_tier("four ranks are started by `make prove`")
@pytest.mark.proof("Overlapped experts, PP2 x EP2 with virtual stages: gradients equal the plain schedule's (4 ranks)")
def test_pieces_of_virtual_stages_have_the_gradient_of_the_plain_schedule(tmp_path, evidence):
    with processes.finished([processes.start(4, tmp_path, [*PIECES_4, *in_pieces(PIECES_4)])]):
        evidence(cases=len(PIECES_4), worst=compare_pieces(tmp_path, PIECES_4), tolerance=LIMIT)


def test_megatrons_own_divisors_of_multi_token_prediction_are_those_of_slices(results):
    """What docs/benchmarks.md shows compared with ours; where one of these becomes exact, Megatron has changed."""
    two, one = results
    errors = {case: worst_difference(gradients(two, case), gradients(one, reference_of(case))) for case in MTP_PLAIN}
    assert min(errors.values()) > 1e-3, errors


@pytest.mark.parametrize("mode", MODES)
def test_megatrons_own_average_of_the_report_is_the_objective(results, mode):
    two, _ = results
    reported = [pair for rank in (0, 1) for pair in report(two, f"dp2-{mode}", rank)["reported"]]
    value = sum(a for a, _ in reported) / sum(b for _, b in reported)
    assert value == pytest.approx(report(two, f"dp2-{mode}", 0)["metrics"]["pg_loss"], rel=1e-5, abs=1e-7)


@pytest.mark.parametrize("case", EVALUATIONS)
def test_evaluation_reports_the_metrics_of_a_training_step_and_leaves_no_gradient(results, case):
    two, one = results
    expected = report(one, reference_of(case), 0)["metrics"]
    assert report(two, case, 0)["metrics"] == pytest.approx(expected, rel=2e-5, abs=2e-6)
    assert all(not copy.any() for copies in gradients(two, case).values() for copy in copies)


def test_a_missing_or_nan_gradient_passes_no_comparison(results):
    good = gradients(results[1], "dp1-constant")
    name = next(iter(good))
    assert worst_difference(good, good) == 0
    assert worst_difference({k: v for k, v in good.items() if k != name}, good) == float("inf")
    assert worst_difference(good | {name: [good[name][0] * float("nan")]}, good) == float("inf")
    assert worst_difference(good, good | {name: [good[name][0] * float("nan")]}) == float("inf")
    assert worst_difference(good | {name: [good[name][0] * 1.01]}, good) > LIMIT
    assert worst_difference(good | {name: [good[name][0], good[name][0] + 1]}, good) > LIMIT


@pytest.mark.proof("Faults: a mistake on one rank is a named error on every rank")
@pytest.mark.parametrize("case", FAULTS)
def test_a_fault_on_one_rank_is_a_named_error_on_every_rank(faulty, case, evidence):
    errors = processes.errors(faulty, case, ranks=2)
    for error in errors:
        assert FAULTS[case] in error["message"]
    evidence(cases=1, slowest=max(error["seconds"] for error in errors))


@pytest.mark.proof("Faults: an argument or a reducer's source that differs between ranks stops every rank at startup")
@pytest.mark.parametrize("name", [*STARTUP, "source"])
def test_an_argument_that_differs_between_ranks_stops_every_rank_at_startup(faulty, name, evidence):
    shown = "source of the custom reducer" if name == "source" else name
    for error in processes.errors(faulty, f"startup-{name}", ranks=2):
        assert f"[E23] ranks disagree on {shown}: rank 0 has " in error["message"]
        assert ", rank 1 has " in error["message"]
    evidence(cases=1)


def test_one_ranks_own_mistake_stops_every_rank_at_startup(faulty):
    errors = processes.errors(faulty, "startup-sourceless", ranks=2)
    assert "[E23] rank 1: " in errors[0]["message"]
    for error in errors:
        assert "'rank_reducer:reducer' cannot be imported" in error["message"]


def test_equal_arguments_start(faulty):
    assert not list(faulty.glob("startup-nothing.*.error"))


def test_values_that_are_equal_and_refused_meet_their_own_rule(faulty):
    for error in processes.errors(faulty, "startup-nan", ranks=2):
        assert "[E8] --loss-aggregation-divisor is nan. It must be finite and > 0" in error["message"]


def test_every_word_of_a_case_is_known():
    """An option that no model knows would leave the case without it, and the case would pass."""
    known = {*OPTIONS, "docs", "gspo", "klcov", "uneven", "evaluate", "plain", "unevenplain", "oracle"}
    cases = [case for group in GROUPS for case in (*group.cases(full=True), *group.four)]
    cases += [*references_of(cases), *MTP_ORACLES, *MTP_PLAIN, *in_pieces(PIECES), *BALANCED, *BALANCED_FULL]
    cases += EVALUATIONS
    assert {word for case in cases for word in case.split("-")[2:]} <= known
