"""Sampling settings from the engine's top-k log-probabilities, and stated settings against log-probabilities."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
from samples import plain_sample

from megatron_pg import Sample
from megatron_pg.mismatch import sampling as module
from megatron_pg.mismatch.causes import CAUSES, Answer
from megatron_pg.mismatch.diagnosis import diagnose
from megatron_pg.mismatch.gap import Gap, gap_of
from megatron_pg.mismatch.sampling import sampling
from megatron_pg.mismatch.settings import Settings, against

LEVEL = 0.01 / len(CAUSES)
VOCABULARY, TOP = 60, 32


def drawn(
    seed: int, count: int = 4000, *, temperature: float = 1.0, top_p: float = 1.0, top_k: int = VOCABULARY
) -> Gap:
    """Tokens drawn so, and the log-probabilities at temperature 1 of the top 32."""
    rng = np.random.default_rng(seed)
    logits = -1.6 * np.log(np.arange(1, VOCABULARY + 1)) + rng.normal(0, 0.7, (count, VOCABULARY))
    logits = -np.sort(-logits, axis=1)
    log_q = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    weights = np.exp(log_q / temperature)
    weights /= weights.sum(axis=1, keepdims=True)
    kept = (weights.cumsum(axis=1) - weights < top_p) & (np.arange(VOCABULARY) < top_k)
    chosen = np.where(kept, np.log(weights) + rng.gumbel(size=weights.shape), -np.inf).argmax(axis=1)
    values = log_q[np.arange(count), chosen]
    return Gap(
        engine=values,
        trainer=values,
        ids=chosen,
        position=np.tile(np.arange(40), count // 40),
        document=np.repeat(np.arange(count // 40), 40),
        step=np.zeros(count // 40, int),
        weight_version=np.full(count // 40, np.nan),
        topk=log_q[:, :TOP].astype(np.float32),
        rank=np.minimum(chosen, TOP),
    )


@pytest.mark.proof("Mismatch: temperature and truncation that an engine does not report are estimated")
@pytest.mark.parametrize(
    "way",
    [
        *({"temperature": 0.7}, {"temperature": 1.4}, {"top_p": 0.9}, {"top_p": 0.8}),
        *({"top_k": 10}, {"top_k": 32}, {"temperature": 0.7, "top_p": 0.9}),
    ],
    ids=str,
)
def test_a_way_of_drawing_is_estimated(way, full, evidence):
    if not full and way in ({"temperature": 1.4}, {"top_p": 0.8}, {"top_k": 10}):
        pytest.skip("runs in the full tier")
    answer = sampling(drawn(1, **way), LEVEL)
    assert answer.outcome == "found"
    assert answer.estimate["temperature"] == pytest.approx(way.get("temperature", 1.0), rel=0.06)
    assert answer.estimate["top_p"] == pytest.approx(way.get("top_p"), abs=0.026)
    assert answer.estimate["top_k"] == way.get("top_k")
    evidence(cases=1)


@pytest.mark.proof("Mismatch: tokens drawn as reported are rarely reported as drawn otherwise")
def test_what_is_drawn_as_reported_has_large_p(full, evidence):
    ps = [sampling(drawn(100 + seed, 400), LEVEL).p for seed in range(400 if full else 30)]
    assert sum(p <= 0.05 for p in ps) <= 0.05 * len(ps)
    assert min(ps) > LEVEL
    evidence(cases=len(ps))


@pytest.mark.parametrize("way", [module._Way(0.8), module._Way(1.0, 0.7), module._Way(1.25, None, 5)])
def test_a_likelihood_is_that_of_a_loop(way):
    gap = drawn(3, 40)
    probabilities = module._probabilities(gap.topk.astype(float), way.temperature)
    kept, wanted = module._kept(probabilities, way), []
    for row, is_kept in zip(gap.topk.astype(float), kept, strict=True):
        q = [math.exp(value) for value in row]
        weights = [p ** (1 / way.temperature) for p in q]
        weights.append((1 - sum(q)) / q[-1] * q[-1] ** (1 / way.temperature))  # so many like the last
        total = sum(weights)
        wanted.append([weight / total for weight in weights])
        before = 0.0
        for k, probability in enumerate(wanted[-1]):
            can_be = (way.share is None or before < way.share) and (way.count is None or k < way.count)
            assert is_kept[k] == can_be
            before += probability
    np.testing.assert_allclose(probabilities, wanted, rtol=1e-6)


def test_without_topk_the_test_cannot_tell():
    bare = replace(drawn(4), topk=None, rank=None)
    assert sampling(bare, LEVEL).outcome == "cannot tell"
    few = drawn(5, 4000)
    few.rank[100:] = -1
    assert "fewer than 200" in sampling(few, LEVEL).evidence


def sample(number: int, topk: dict | None) -> Sample:
    logprobs = {name: [-1.0, -2.0, -3.0] for name in ("old_logprobs", "rollout_logprobs")}
    return plain_sample(3, tokens=[1, 4, 7, 9], loss_mask=[1, 1, 0], **logprobs, rollout_topk=topk, rollout_id=number)


def test_columns_hold_the_topk_in_order_and_the_rank_of_the_sampled_token():
    known = {"ids": [[2, 4, 3], [1, 2], [9, 8]], "logprobs": [[-2.0, -1.0, -3.0], [-0.5, -1.5], [-0.1, -3.0]]}
    gap = gap_of([sample(0, None), sample(1, known)])
    assert gap.rank.tolist() == [-1, -1, 0, 3]
    assert gap.topk[2].tolist() == [-1.0, -2.0, -3.0]
    assert gap.topk[3].tolist() == [-0.5, -1.5, -math.inf]
    assert gap_of([sample(0, None)]).rank is None
    assert gap_of([sample(0, {"ids": [[], [], []], "logprobs": [[], [], []]})]).rank is None


def test_a_drawn_token_that_the_engine_has_added_is_none_of_the_likeliest():
    known = {"ids": [[4, 3], [1, 2, 7], [9, 8]], "logprobs": [[-0.5, -3.0], [-0.5, -1.5, -2.0], [-0.1, -3.0]]}
    gap = gap_of([sample(0, known)])
    assert gap.rank.tolist() == [0, 3]
    assert gap.topk[1].tolist() == [-0.5, -1.5, -math.inf]


def test_an_empty_row_of_the_likeliest_changes_no_estimate():
    """At one position the engine reports nothing: that position is not used."""

    def gap(rows: int) -> Gap:
        rng = np.random.default_rng(9)
        samples = []
        for number in range(40):
            logprobs = np.log(rng.dirichlet(np.full(8, 0.5), 12))
            ids = np.argsort(-logprobs, axis=1)[:, :4]
            tokens = [int(rng.choice(row[:2])) for row in ids]
            values = [float(logprobs[t, token]) for t, token in enumerate(tokens)]
            shown = [[] if number == 0 and t < rows else row.tolist() for t, row in enumerate(ids)]
            topk = {"ids": shown, "logprobs": [logprobs[t, row].tolist() for t, row in enumerate(shown)]}
            both = {"old_logprobs": values, "rollout_logprobs": values, "rollout_topk": topk}
            samples.append(plain_sample(12, tokens=[0, *tokens], rollout_id=number, **both))
        return gap_of(samples)

    whole, holed = sampling(gap(0), LEVEL), sampling(gap(1), LEVEL)
    assert gap(1).rank[0] == -1
    assert (whole.estimate["top_k"], whole.estimate["top_p"]) == (2, None)
    assert (holed.estimate["top_k"], holed.estimate["top_p"]) == (2, None)
    assert holed.estimate["temperature"] == pytest.approx(whole.estimate["temperature"], rel=0.02)


# --- settings ---


def answers(**outcomes: str) -> list[Answer]:
    estimates = {"temperature": {"trainer_over_engine": 1.25}}
    return [
        Answer(cause, outcomes.get(cause, "not found"), "numbers", 0.5, estimates.get(cause, {})) for cause in CAUSES
    ]


@pytest.mark.parametrize(
    ("engine", "trainer", "outcomes", "cause", "outcome", "says"),
    [
        ("temperature=0.8", 1.0, {"temperature": "found"}, "temperature", "found", "as the settings state"),
        ("temperature=0.5", 1.0, {"temperature": "found"}, "temperature", "found", "state 2.000, but another"),
        ("temperature=0.5", 1.0, {}, "sampling", "found", "temperatures 0.5 .engine. and 1 .trainer."),
        ("temperature=0.5", 0.5, {}, "sampling", "not found", "numbers$"),
        ("temperature=0.5", 1.0, {"temperature": "cannot tell"}, "temperature", "found", "too few to show it$"),
        ("temperature=1", 1.01, {"temperature": "cannot tell"}, "temperature", "cannot tell", "numbers$"),
        ("top_p=0.9,top_k=50", None, {}, "sampling", "found", "top_p 0.9 and top_k 50, but no probability is missing"),
        ("top_p=0.9", None, {"truncation": "found"}, "sampling", "not found", "numbers$"),
        ("top_p=0.9", None, {"truncation": "cannot tell"}, "sampling", "not found", "numbers$"),
        ("top_p=1", None, {}, "sampling", "not found", "numbers$"),
        ("top_p=0.9", None, {"sampling": "found"}, "sampling", "found", "numbers; the settings state top_p 0.9$"),
    ],
)
def test_settings_are_held_against_the_numbers(engine, trainer, outcomes, cause, outcome, says):
    tests = {test.cause: test for test in against(Settings.parse(engine, trainer), answers(**outcomes))}
    assert [*tests] == [*CAUSES]
    assert tests[cause].outcome == outcome
    assert re.search(says, tests[cause].evidence)


def test_a_truncation_that_the_trainer_replays_needs_no_trace():
    settings = Settings.parse("top_p=0.9")
    tests = {test.cause: test for test in against(settings, answers(), has_sampling_mask=True)}
    assert tests["sampling"].outcome == "not found"


@pytest.mark.parametrize(
    ("engine", "trainer", "message"),
    [
        ("top_p", None, "'top_p' is not one of temperature="),
        ("top_p=0.9,top_p=0.8", None, "each given once"),
        ("min_p=0.1", None, "'min_p=0.1' is not one of"),
        ("top_p=x", None, "top_p=x is not a number above 0 and at most 1"),
        ("top_p=0", None, "above 0 and at most 1"),
        ("temperature=0", None, "temperature=0 is not a finite number above 0"),
        ("temperature=inf", None, "temperature=inf is not a finite number above 0"),
        ("temperature=1_0", None, "temperature=1_0 is not a finite number above 0"),
        ("temperature=٣", None, "temperature=٣ is not a finite number above 0"),
        ("top_k=0", None, "top_k=0 is not a whole number of at least 1"),
        ("top_k=-1", None, "top_k=-1 is not a whole number of at least 1 .leave it out if it is off"),
        ("top_k=1e400", None, "top_k=1e400 is not a whole number of at least 1"),
        ("top_k=1.5", None, "top_k=1.5 is not a whole number of at least 1"),
        ("top_p=0.9", 1.0, "give both or none"),
        ("temperature=0.5", None, "give both or none"),
        ("temperature=1", 0.0, "0 is not a finite number above 0"),
        ("temperature=1", math.inf, "inf is not a finite number above 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(engine, trainer, message):
    with pytest.raises(ValueError, match=message):
        Settings.parse(engine, trainer)


def test_what_is_drawn_otherwise_leaves_no_word_on_missing_mass():
    outcome = {test.cause: test.outcome for test in diagnose(drawn(6, top_p=0.8)).tests}
    causes = ("sampling", "truncation", "padding")
    assert [outcome[cause] for cause in causes] == ["found", "cannot tell", "cannot tell"]
