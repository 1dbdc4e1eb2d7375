"""Open steps on real ranks over gloo, against the closed step and one process; steps with `--pg-entropy-target`."""

import itertools
import json

import launches
import processes
import pytest
from processes import gradients, report, worst_difference
from rank_cases import LIMIT, crossed, reference_of, references_of, words

FAST = words("""
    dp2-sample_mean dp2-token_mean-dist-overlap dp2-sample_mean-nothing dp2t-constant-sft
    cp2t-prompt_mean tp2s-constant-fused-tied pp2-token_mean-tied pp2v-sample_mean dp2-sample_mean-mtp-own
""")
FULL = [
    *crossed("dp2 dp2t", "sample_mean prompt_mean token_mean constant", ". dist overlap dist-overlap nothing sft"),
    *crossed("tp2s cp2 cp2t pp2 pp2v", "sample_mean prompt_mean token_mean constant", ". fused tied"),
    *crossed("dp2t pp2", "sample_mean prompt_mean constant", "mtp-own mtp2-own"),
    *crossed("dp2 tp2s", "sample_mean token_mean", "fp32 recompute activations hybrid gspo experts experts-replay"),
]
FULL_4 = crossed("dp2pp2 dp2tp2s dp2cp2t", "sample_mean token_mean", ". fused")
SCRIPT = "open_ranks.py"
STEPS = ("", "-open0", "-open1", "-exact")
OTHERS = ("dp2-sample_mean-faults", "tp2-token_mean-faults", "dp2-sample_mean-memory")
ENTROPY = words("dp2-sample_mean-entropy cp2t-token_mean-entropy-gspo pp2-constant-fused-entropy")
ENTROPY_FULL = [
    *ENTROPY,
    *crossed("dp2t tp2s cp2 pp2v", "sample_mean token_mean", "entropy fused-entropy entropy-gspo"),
]
TARGET, STEP, MOST, FIRST = 2.2, 0.04, 0.1, 0.05  # of the entropy cases


def references(cases: list[str]) -> list[str]:
    """The one process for each case; demonstrations are trained in the closed step alone."""
    return references_of(case for case in cases if "sft" not in case and "hybrid" not in case)


@launches.launch
def results(folder, full):
    """The folders of two ranks and of one."""
    two, one, cases = folder / "two", folder / "one", sorted(FULL if full else FAST)
    of_two = [*cases, *OTHERS, *(ENTROPY_FULL if full else ENTROPY)]
    runs = processes.start(1, one, references(cases)), processes.start(2, two, of_two, script=SCRIPT)
    with processes.finished(runs):
        return two, one


def check(folder, one, cases: list[str], ranks: int) -> float:
    """Worst error of every step of the cases, against the closed step and against one process."""
    worst = {}
    for case in cases:
        closed, found = gradients(folder, case), report(folder, case, 0)["metrics"]
        is_alone = bool(references([case]))
        alone = gradients(one, reference_of(case)) if is_alone else closed
        for suffix in STEPS:
            own = gradients(folder, case + suffix)
            worst[case + suffix] = max(worst_difference(own, closed), worst_difference(own, alone))
            for rank in range(ranks):
                metrics = report(folder, case + suffix, rank)["metrics"]
                assert metrics == pytest.approx(found, rel=2e-5, abs=2e-6), case + suffix
        if is_alone:
            expected = report(one, reference_of(case), 0)["metrics"]
            assert found == pytest.approx(expected, rel=2e-5, abs=2e-6), case
        if "token_mean" not in case:  # with the flag on, Megatron multiplies and divides the closed step by Q
            assert worst_difference(gradients(folder, f"{case}-exact"), closed) <= 1e-6, case
    assert {case: error for case, error in worst.items() if not error <= LIMIT} == {}
    return max(worst.values())


@pytest.mark.proof("Open steps, real ranks: every parameter's gradient and report on 2 ranks equal one process")
def test_open_steps_have_the_gradient_of_the_closed_step_and_of_one_process(results, full, evidence):
    two, one = results
    cases = FULL if full else FAST
    evidence(cases=len(cases) * len(STEPS), worst=check(two, one, cases, ranks=2), tolerance=LIMIT)


@pytest.mark.full_tier("four ranks are started by `make prove`")
@pytest.mark.proof("Open steps, real ranks: every parameter's gradient and report on 4 ranks equal one process")
def test_open_steps_on_four_ranks_equal_one_process(results, tmp_path, evidence):
    with processes.finished([processes.start(4, tmp_path, FULL_4, script=SCRIPT)]):
        worst = check(tmp_path, results[1], FULL_4, ranks=4)
    evidence(cases=len(FULL_4) * len(STEPS), worst=worst, tolerance=LIMIT)


MESSAGES = {
    "twice": "StepPlanError: data-parallel rank 1: an add of the open step failed: rollout_id '1/0' has samples in",
    "shared": "StepPlanError: rollout_id '0/0' has samples on data-parallel ranks 0 and 1",
    "notfinite": "NonFiniteLossError: non-finite loss at rank 1, sample 6 (number 0 of its micro-batch), response",
    "failing": "StepPlanError: data-parallel rank 1: an add of the open step failed: ArithmeticError: broken in",
    "peers": "ScheduleError: step plan differs between ranks 0 and 1",
    "ended": "ScheduleError: close: this open step has ended",
    "while open": "ScheduleError: an open step has not ended",
    "abandoned": "ScheduleError: abandon: this open step has ended",
}


def test_a_mistake_on_one_rank_is_the_same_error_on_every_rank_and_leaves_no_trace(results):
    """The program asserts that the closed step after each has the bits of the one before."""
    seen = set()
    for case in OTHERS[:2]:
        first, second = (report(results[0], case, rank) for rank in (0, 1))
        assert first == second
        assert all(text.startswith(MESSAGES[name]) for name, text in first.items()), first
        seen |= first.keys()
    assert seen == MESSAGES.keys()


@pytest.mark.proof("Open steps: 20 adds keep no micro-batch; each sample 72 bytes, each micro-batch less than 1 KiB")
def test_memory_does_not_grow_with_adds(results, evidence):
    """Keys and counts of a sample, for the exchange, and the metrics of a micro-batch are all that is kept."""
    for rank in (0, 1):
        found = report(results[0], OTHERS[2], rank)
        assert found["left"] == [0] * 20
        (step,) = {after - before for before, after in itertools.pairwise(found["bytes"])}
        assert 72 * found["samples"] < step < 72 * found["samples"] + 2 * 1024
        evidence(cases=20)


# --- --pg-entropy-target ---


def coefficients_of(entropies: list[float]) -> list[tuple[float, float]]:
    """c and η of every step and of the one after the last, from the steps' entropies."""
    found, c, eta = [], FIRST, FIRST
    for e in entropies:
        found.append((c, eta))
        if e < TARGET:
            c = min(c + STEP, MOST)
        if e > TARGET:
            c = max(c - STEP, 0.0)
        eta = c if e <= TARGET else 0.0
    return [*found, (c, eta)]


@pytest.mark.proof(
    "Adaptive entropy coefficient, 2 ranks: the rule's sequence on every rank, each step's gradient that of the "
    "constant coefficient bit for bit, resumed in the middle (steps)"
)
def test_every_step_has_the_coefficient_of_the_rule_on_every_rank(results, full, evidence):
    cases, num_steps = ENTROPY_FULL if full else ENTROPY, 0
    for case in cases:
        found, other = (json.loads((results[0] / f"{case}.{rank}.json").read_text()) for rank in range(2))
        assert other == found  # the program compares the gradients
        is_dp = case.startswith("dp2")
        assert ("terms" if is_dp else "step plan differs between ranks 0 and 1") in found["message"]
        records = found["steps"]
        expected = coefficients_of([record["entropy_mean"] for record in records])
        assert [record["entropy_coef"] for record in records] == [eta for _, eta in expected[:-1]]
        assert [record["state"]["entropy_coef"] for record in records] == [c for c, _ in expected[1:]]
        for record, (_, eta) in zip(records, expected, strict=False):
            assert record["state"]["entropy"] == record["entropy_mean"]
            assert record["loss"] == pytest.approx(record["pg_loss"] - eta * record["entropy_loss"], rel=1e-6)
        assert {0.0, MOST} < {c for c, _ in expected}
        assert any(eta == 0 < c for c, eta in expected)
        num_steps += len(records)
    evidence(cases=num_steps)
