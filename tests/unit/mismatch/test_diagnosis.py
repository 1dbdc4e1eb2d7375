"""Faults seeded into a small GPT's rollouts are named, with their sizes; the statistics agree with plain sums."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from mismatch_cases import FAULTS, World, clean, faulty, of_tokens, top_k, top_p
from mismatch_table import SEEDED, cases, gap_of_drawn, language, named, outcomes
from samples import plain_sample

from megatron_pg import Sample
from megatron_pg.mismatch import alignment, diagnosis, documents, repeats, values
from megatron_pg.mismatch.causes import CAUSES, Answer
from megatron_pg.mismatch.diagnosis import LEVEL, diagnose
from megatron_pg.mismatch.gap import Gap, gap_of
from megatron_pg.mismatch.inference import FEWEST, binomial_tail, mean_over, tail


@pytest.fixture(scope="module")
def world() -> World:
    """A GPT of one layer, trained for a few seconds, which is enough for distributions of all shapes."""
    text, parameters = language(vocabulary=300, width=32, layers=1, steps=60)
    return World(text, parameters, sharpness=2.0, documents=64, seed=3)


def diagnosed(world: World, full: bool, **faults: str) -> dict[str, Answer]:
    """The tests' results; in the default tier without top-k, whose test takes most of the time."""
    with torch.no_grad():
        drawn = faulty(world, faults)
    drawn = drawn if full or "sampling" in faults else replace(drawn, topk=None)
    return {test.cause: test for test in diagnose(gap_of_drawn(drawn)).tests}


def found_causes(tests: dict[str, Answer]) -> set[str]:
    return {cause for cause, test in tests.items() if test.outcome == "found"}


def gap_from(engine, trainer, *, documents: int = 40, **rest) -> Gap:
    """Columns of documents of equal length."""
    engine, trainer = np.asarray(engine, float), np.asarray(trainer, float)
    length = len(engine) // documents
    fields = {
        "ids": np.arange(len(engine)) % 97,
        "position": np.tile(np.arange(length), documents),
        "document": np.repeat(np.arange(documents), length),
        "step": np.zeros(documents, int),
        "weight_version": np.full(documents, np.nan),
    }
    return Gap(engine=engine, trainer=trainer, **fields | rest)


def contexts(seed: int, count: int = 6000, vocabulary: int = 150):
    """[N, V] logits of contexts between certain and flat, the tokens drawn from them, and the generator."""
    rng = np.random.default_rng(seed)
    logits = -1.1 * np.log(np.arange(1, vocabulary + 1)) + rng.normal(0, 1, (count, vocabulary))
    logits[np.arange(count), rng.integers(0, vocabulary, count)] += rng.choice([0, 4, 8, 12], count)
    return logits, (logits + rng.gumbel(size=logits.shape)).argmax(-1), rng


def near(engine, noise) -> np.ndarray:
    """A trainer's log-probabilities: the engine's with noise."""
    return np.minimum(engine + noise, 0)


def logprobs(logits, tokens):
    shifted = logits - logits.max(-1, keepdims=True)
    return (shifted - np.log(np.exp(shifted).sum(-1, keepdims=True)))[np.arange(len(tokens)), tokens]


# --- seeded faults ---


@pytest.mark.proof("Mismatch: strong faults in a small GPT's rollouts are named, alone")
@pytest.mark.parametrize("cause", SEEDED)
def test_a_strong_fault_is_named_and_nothing_else(cause, world, full, evidence):
    assert found_causes(diagnosed(world, full, **{cause: "strong"})) == {cause}
    evidence(cases=1)


@pytest.mark.proof("Mismatch: rollouts without a fault raise no alarm")
def test_rounding_alone_is_noise(world, full, evidence):
    seeds = range(40 if full else 3)
    for seed in seeds:
        variant = replace(world, seed=seed, sharpness=1.2 + 0.3 * (seed % 6), noise=(0.3, 1.0, 2.0)[seed % 3])
        with torch.no_grad():
            result = diagnose(gap_of_drawn(clean(variant)))
        assert (result.verdict, result.found) == ("noise", []), seed
        assert [test.cause for test in result.tests] == sorted(CAUSES, key=[t.cause for t in result.tests].index)
    evidence(cases=len(seeds))


def test_two_causes_are_both_named(world, full):
    pairs = [("template", "shift"), ("routing", "group"), ("shift", "temperature"), ("bfloat16_grid", "truncation")]
    for pair in pairs if full else pairs[:2]:
        assert found_causes(diagnosed(world, full, **dict.fromkeys(pair, "strong"))) == set(pair)


@pytest.mark.proof("Mismatch: seeded faults of a GPT at three strengths, pairs and clean rollouts")
def test_the_table_of_faults(full, evidence):
    if not full:
        pytest.skip("minutes: the full tier, and `python tests/helpers/cases/mismatch_table.py`")
    all_outcomes = outcomes(*language(), cases(4), seed=1)
    for kind, least in (("strong", 0.9), ("medium", 0.8)):
        hits, seeded = named(all_outcomes, kind)
        assert hits >= least * seeded, (kind, hits, seeded)
    assert not [outcome for outcome in all_outcomes if outcome.kind == "clean" and outcome.found]
    evidence(cases=len(all_outcomes))


def test_a_quarter_of_the_rows_swapped_hides_no_temperature(world, full):
    """Rows that fit elsewhere are moved there before other causes are tested."""
    tests = diagnosed(world, full, other_samples="medium", temperature="strong")
    assert found_causes(tests) == {"other_samples", "temperature"}
    assert tests["other_samples"].estimate["share"] == pytest.approx(0.25, abs=0.02)
    ratio = tests["temperature"].estimate["trainer_over_engine"]
    assert max(ratio, 1 / ratio) == pytest.approx(1.3, rel=0.05)


@pytest.mark.parametrize("order", ["rows of other files", "tokens in reverse"])
def test_values_of_other_tokens_are_named_and_no_cause_that_assumes_alignment(order, world):
    """No document of the file fits, but both ratios are above 1, which draws from either side exclude."""
    with torch.no_grad():
        drawn = clean(world)
        other = clean(replace(world, seed=world.seed + 1)).trainer if "rows" in order else drawn.trainer.flip(1)
        tests = {test.cause: test for test in diagnose(gap_of_drawn(replace(drawn, trainer=other))).tests}
    assert found_causes(tests) == {"other_samples"}
    told = {cause for cause, test in tests.items() if test.outcome != "cannot tell"}
    assert told <= {"bfloat16_grid", "shift", "other_samples", "sampling"}


def test_a_minority_of_doubtful_values_leaves_other_causes_untold():
    """Too few rows to be named; E[π/q] above 1 still excludes that all values are of these tokens."""
    logits, tokens, rng = contexts(17)
    engine = logprobs(logits, tokens)
    trainer = near(engine, rng.normal(0, 0.01, len(engine)))
    bad = np.arange(len(engine)) % 20 == 0
    trainer[bad] = trainer[np.roll(np.flatnonzero(bad), 1)]
    gap = gap_from(engine, trainer, ids=tokens)
    assert alignment.doubt(gap, LEVEL).startswith("some values may belong to different tokens")
    assert not alignment.doubt(gap.where(~bad), LEVEL)


def test_a_few_permuted_ids_are_not_called_routing(world):
    """Six frequent tokens are permuted for the trainer, which expects them; no test of the vocabulary notices it."""
    with torch.no_grad():
        drawn = clean(world)
        frequent = drawn.tokens.flatten().bincount().argsort(descending=True)[6:12]
        meaning = torch.arange(world.text.vocabulary)
        meaning[frequent] = frequent.roll(1)
        read = meaning[drawn.tokens]
        trainer = of_tokens(world.noisy_logits(read), read)
        result = diagnose(gap_of_drawn(replace(drawn, trainer=trainer)))
    (routing,) = (test for test in result.tests if test.cause == "routing")
    assert (result.verdict, result.found, routing.outcome) == ("unexplained", [], "cannot tell")
    assert routing.evidence.endswith("as with other token ids or weights")


@pytest.mark.parametrize(("scattered", "outcome"), [(True, "cannot tell"), (False, "found")])
def test_outliers_are_routing_where_they_crowd_in_documents(scattered, outcome):
    """Tokens that are far apart in all documents alike may be weak dropout's."""
    logits, tokens, rng = contexts(21)
    engine, document = logprobs(logits, tokens), np.arange(6000) // 150
    rate = 0.02 if scattered else np.where(document % 2 == 0, 0.04, 0.0)
    far = np.where(rng.random(6000) < rate, rng.choice([-0.6, 0.6], 6000), 0.0)
    gap = gap_from(engine, near(engine, far + rng.normal(0, 0.005, 6000)), ids=tokens)
    result = diagnose(gap)
    assert {test.cause: test.outcome for test in result.tests}["routing"] == outcome
    assert result.verdict == ("unexplained" if scattered else "found")


def test_dropout_is_no_other_cause(world, full):
    """It may pass unnamed, but it is never the rounding of logits or another expert."""
    for strength in ("weak", "medium") if full else ("weak",):
        tests = diagnosed(replace(world, seed=31, noise=0.5), full, dropout=strength)
        assert found_causes(tests) <= {"dropout"}


def test_two_swapped_rows_are_found_at_any_temperature():
    """Correlations do not change with a temperature, and unrelated documents do not reach them."""
    logits, tokens, _ = contexts(22)
    engine = logprobs(logits, tokens).reshape(60, 100)
    trainer = logprobs(logits / 1.3, tokens).reshape(60, 100)
    trainer[3, 5] = 1e-7  # rounding of a sum of probabilities
    right = trainer.ravel().copy()
    trainer[[7, 40]] = trainer[[40, 7]]
    gap = gap_from(engine.ravel(), trainer.ravel(), documents=60, ids=tokens)
    test, aligned = alignment.other_samples(gap, LEVEL / 14)
    assert (test.outcome, test.estimate["share"]) == ("found", pytest.approx(2 / 60))
    np.testing.assert_array_equal(aligned.trainer, right)
    np.testing.assert_array_equal(aligned.engine, engine.ravel())
    assert alignment.other_samples(aligned, LEVEL)[0].outcome == "not found"


def test_other_weights_of_one_age_are_no_dropout_and_no_head(world, full):
    """Their d repeats at the same tokens, which neither chance nor rounding does."""
    for size in (0.01, 0.03, 0.1) if full else (0.03,):
        with torch.no_grad():
            drawn, later = clean(world), world.disturbed(size, world.generator(20))
            moved = of_tokens(world.logits(drawn.tokens, later), drawn.tokens)
            gap = gap_of_drawn(replace(drawn, trainer=moved))
        assert diagnose(gap).found == []
        assert repeats.at_pairs(gap).value > repeats.OF_WEIGHTS


def test_dropout_varies_where_the_tokens_so_far_are_the_same(world):
    """Samples of one prompt: log π of a token differs between them, log q does not; no noise model is needed."""
    several = replace(world, group=4, documents=96, sharpness=3.0)
    with torch.no_grad():
        gap = gap_of_drawn(faulty(several, {"dropout": "strong"}))
        fine = gap_of_drawn(clean(several))
    trainer, engine = repeats.at_places(gap, gap.trainer, 0.2), repeats.at_places(gap, gap.engine, 0.1)
    assert trainer.value > 0.4
    assert trainer.p_above < 1e-3
    assert engine.value < 1e-6
    assert {test.cause for test in diagnose(gap).found} == {"dropout"}
    assert repeats.at_places(replace(gap, place=None), gap.trainer, 0.25) is None
    assert diagnose(fine).found == []


@pytest.mark.parametrize(
    ("shape", "verdict"),
    [("rounding", "noise"), ("weights", "unexplained"), ("dropout", "found"), ("alone", "unexplained")],
)
def test_what_a_trained_policys_rounding_looks_like(shape, verdict):
    """A scale of 0.1 nats is rounding if d does not repeat at the same tokens, but does with the same tokens so far."""
    logits, tokens, rng = contexts(23)
    prompt, position = np.arange(6000) // 40, np.arange(6000) % 10
    place = np.where(position < 3, prompt * 10 + position, 10_000 + np.arange(6000))  # four samples start alike
    first = np.unique(place, return_inverse=True)[1]
    engine = logprobs(logits, tokens)[first]
    pair = rng.integers(0, 300, 6000)[first]
    same = {"weights": pair, "dropout": np.arange(6000)}.get(shape, first)
    gap = gap_from(engine, near(engine, rng.normal(0, 0.1, 6000)[same]), documents=600, ids=tokens[first])
    result = diagnose(replace(gap, pair=pair, place=None if shape == "alone" else place.astype(np.uint64)))
    assert (result.verdict, {test.cause for test in result.found} - {"dropout"}) == (verdict, set())


@pytest.mark.parametrize("scale", [0.4, 2.6])
def test_a_spread_beyond_rounding_is_no_head(scale):
    logits, tokens, rng = contexts(18)
    engine = logprobs(logits, tokens)
    gap = gap_from(engine, near(engine, rng.uniform(-scale, scale, len(engine))), ids=tokens)
    gap = replace(gap, pair=rng.integers(0, 500, len(engine)))
    assert "head_precision" not in {test.cause for test in diagnose(gap).found}


def test_tokens_at_the_edge_of_a_template_are_kept():
    """`lasts` tokens are left out, and not one more; the spread at the first tokens is not taken for the head's."""
    logits, tokens, rng = contexts(16)
    engine, position = logprobs(logits, tokens), np.tile(np.arange(150), 40)
    trainer = near(engine, rng.normal(0, 1, 6000) * (0.005 + 0.5 * np.exp(-position / 6)))
    gap = gap_from(engine, trainer, ids=tokens)
    course = diagnosis._Course(gap, LEVEL)
    diagnosis._test_documents(course)
    assert course.gap.position.min() == course.tests[0].estimate["lasts"]
    (test,) = diagnose(gap).found
    assert test.cause == "template"
    assert 16 <= test.estimate["lasts"] <= 64


def test_of_two_files_the_one_that_is_further_is_named():
    logits, tokens, rng = contexts(19)
    engine, labels = logprobs(logits, tokens), ["a.jsonl"] * 20 + ["b.jsonl"] * 20
    noise = rng.normal(0, 0.01, len(engine)) * np.where(np.arange(len(engine)) < len(engine) // 2, 1.0, 4.0)
    gap = gap_from(engine, near(engine, noise), ids=tokens, groups={"file": labels})
    test, fine = documents.groups(gap, LEVEL)
    assert test.outcome == "found"
    assert [group["group"] for group in test.estimate["groups"]] == ["b.jsonl"]
    assert fine.tolist() == [True] * 20 + [False] * 20


# --- noise of other shapes ---

NOISES = {
    "normal": lambda rng, p: rng.normal(size=len(p)),
    "heavy tails": lambda rng, p: rng.standard_t(4, len(p)) * (1 - p),
    "Laplace": lambda rng, p: rng.laplace(size=len(p)) * 0.7,
    "documents differ": lambda rng, p: rng.normal(size=len(p)) * np.exp(rng.normal(0, 0.4, 60)).repeat(len(p) // 60),
}


@pytest.mark.proof("Mismatch: noise of other shapes and levels raises no alarm")
@pytest.mark.parametrize("shape", NOISES)
def test_noise_of_any_shape_is_no_finding(shape, full, evidence):
    seeds = range(25) if full else [list(NOISES).index(shape) % 3]  # in the default tier one level for each shape
    for seed in seeds:
        logits, tokens, rng = contexts(seed)
        engine = logprobs(logits, tokens)
        level = (0.001, 0.01, 0.03)[seed % 3]
        trainer = near(engine, level * NOISES[shape](rng, np.exp(engine)))
        groups = {"worker": [f"w{i % 5}" for i in range(60)], "data_parallel_rank": [i % 4 for i in range(60)]}
        ages = {"step": np.arange(60) // 8, "weight_version": np.arange(60) // 8 - (np.arange(60) % 3)}
        gap = gap_from(engine, trainer, documents=60, ids=tokens, groups=groups, **ages)
        assert diagnose(gap).found == [], seed
    evidence(cases=len(seeds))


# --- estimates ---


@pytest.mark.proof("Mismatch: the temperature's estimate")
@pytest.mark.parametrize("temperature", [0.7, 0.9, 0.95, 1.05, 1.1, 1.3])
@pytest.mark.parametrize("drawn_from", ["reported", "trained"])
def test_the_ratio_of_temperatures_is_estimated(temperature, drawn_from, evidence):
    """Drawn from what the engine reports; or the engine reports before its temperature, which the trainer has, too."""
    logits, tokens, rng = contexts(7)
    if drawn_from == "trained":
        tokens = (logits / temperature + rng.gumbel(size=logits.shape)).argmax(-1)
    trainer = logprobs(logits / temperature, tokens) + rng.normal(0, 0.005, len(tokens))
    gap = gap_from(logprobs(logits, tokens), np.minimum(trainer, 0), ids=tokens)
    (test,) = diagnose(gap).found
    assert test.cause == "temperature"
    worst = abs(test.estimate["trainer_over_engine"] / temperature - 1)
    evidence(cases=1, worst=worst, tolerance=0.03)


@pytest.mark.parametrize("choose", [top_p(0.8), top_p(0.9), top_k(8), top_k(1)])
def test_the_kept_mass_is_estimated(choose):
    logits, _, rng = contexts(11)
    kept = choose(torch.from_numpy(logits)).numpy()
    tokens = (kept + rng.gumbel(size=kept.shape)).argmax(-1)
    mass = np.exp(logprobs(logits, tokens) - logprobs(kept, tokens)).mean()
    trainer = np.minimum(logprobs(logits, tokens) + rng.normal(0, 0.005, len(tokens)), 0)
    (test,) = diagnose(gap_from(logprobs(kept, tokens), trainer, ids=tokens)).found
    assert test.cause == "truncation"
    assert test.estimate["kept"] == pytest.approx(mass, abs=0.005)


def test_an_engine_that_leaves_one_token_at_most_places_is_related_to_its_trainer():
    """A trained policy at top-p 0.9: log q is 0 at most tokens, where log π has only noise."""
    logits, _, rng = contexts(24)
    certain = rng.random(len(logits)) < 0.9
    logits[certain, rng.integers(0, logits.shape[1], certain.sum())] += 14
    kept = top_p(0.9)(torch.from_numpy(logits)).numpy()
    tokens = (kept + rng.gumbel(size=kept.shape)).argmax(-1)
    trainer = near(logprobs(logits, tokens), rng.normal(0, 0.02, len(tokens)))
    gap = gap_from(logprobs(kept, tokens), trainer, ids=tokens)
    assert (gap.engine == 0).mean() > 0.8
    assert alignment.agreement(gap) > 0.8
    assert {test.cause for test in diagnose(gap).found} == {"truncation"}
    assert alignment.agreement(replace(gap, trainer=rng.permutation(gap.trainer))) < 0.1


@pytest.mark.parametrize("side", ["trainer", "engine"])
def test_padded_columns_of_either_side(side):
    logits, tokens, rng = contexts(12)
    masses = np.log(np.exp(logits).sum(-1, keepdims=True)) + np.log(0.06) + rng.normal(0, 0.5, (len(logits), 1))
    more = np.concatenate([logits, masses], axis=1)
    sides = {"trainer": logprobs(logits, tokens), "engine": logprobs(logits, tokens)}
    missing = 1 - np.exp(logprobs(more, tokens) - sides[side]).mean()
    sides[side] = logprobs(more, tokens)
    noisy = np.minimum(sides["trainer"] + rng.normal(0, 0.003, len(tokens)), 0)
    (test,) = diagnose(gap_from(sides["engine"], noisy, ids=tokens)).found
    assert test.cause == "padding"
    assert test.estimate["missing"] == pytest.approx(missing, abs=0.004)


@pytest.mark.parametrize("lag", [-2, -1, 1, 2])
def test_a_shift_is_measured_and_undone(lag):
    logits, tokens, rng = contexts(13)
    engine = logprobs(logits, tokens).reshape(60, 100)
    trainer = np.roll(near(engine, rng.normal(0, 0.01, engine.shape)), -lag, axis=1)
    right = gap_from(engine.ravel(), np.roll(trainer, lag, axis=1).ravel(), documents=60, ids=tokens)
    test, undone = values.shift(gap_from(engine.ravel(), trainer.ravel(), documents=60, ids=tokens), LEVEL)
    assert (test.outcome, test.estimate["lag"]) == ("found", lag)
    inside = right.where((right.position >= max(lag, 0)) & (right.position < 100 + min(lag, 0)))
    for name in ("engine", "trainer", "ids", "position", "document"):
        np.testing.assert_array_equal(getattr(undone, name), getattr(inside, name))
    assert values.shift(undone, LEVEL)[0].outcome == "not found"


@pytest.mark.parametrize("side", ["trainer", "engine"])
@pytest.mark.parametrize("token", [0, 1, 8, 9])
def test_a_token_at_the_end_of_short_answers_is_no_shift(side, token):
    """Any lag leaves it out, and the certain tokens agree at every lag."""
    rng = np.random.default_rng(25)
    engine, trainer = -rng.exponential(1e-3, (2, 200, 10))
    {"trainer": trainer, "engine": engine}[side][:60, token] -= 8.0
    gap = gap_from(engine.ravel(), trainer.ravel(), documents=200)
    test, same = values.shift(gap, LEVEL)
    assert (test.outcome, test.estimate["share"]) == ("not found", 0)
    assert same is gap


def test_holes_in_the_loss_mask_are_no_neighbours():
    """Tokens adjacent in the columns but not in the document are not compared."""
    logits, tokens, rng = contexts(14)
    engine = logprobs(logits, tokens)
    gap = gap_from(engine, near(engine, rng.normal(0, 0.01, len(engine))), ids=tokens)
    test, _ = values.shift(replace(gap, position=2 * gap.position), LEVEL)
    assert test.outcome == "cannot tell"


# --- bits ---


def test_the_grid_is_that_of_bfloat16():
    rng = np.random.default_rng(0)
    drawn = -rng.exponential(3.0, 20_000)
    coarse = torch.from_numpy(drawn).bfloat16().double().numpy()
    fine = torch.from_numpy(drawn).float()
    assert values.on_grid(coarse).all()
    np.testing.assert_array_equal(values.on_grid(fine.double().numpy()), (fine.bfloat16().float() == fine).numpy())


def test_rounding_explains_its_own_spread():
    """The error of rounding has the standard deviation that is subtracted."""
    drawn = -np.random.default_rng(1).uniform(0.25, 16.0, 200_000)
    coarse = torch.from_numpy(drawn).bfloat16().double().numpy()
    scale = values.rounding_scale(gap_from(coarse, drawn))
    assert np.mean(((drawn - coarse) / scale) ** 2) == pytest.approx(1.0, abs=0.03)


# --- what cannot be told ---


def test_without_fields_nothing_is_said_of_groups_and_age(world):
    with torch.no_grad():
        drawn = clean(world)
    none = [None] * len(drawn.step)
    bare = replace(drawn, topk=None, step=[0] * len(none), weight_version=none, worker=none, rank=none)
    outcome = {test.cause: test.outcome for test in diagnose(gap_of_drawn(bare)).tests}
    assert [cause for cause, result in outcome.items() if result == "cannot tell"] == ["group", "staleness", "sampling"]


@pytest.mark.parametrize("documents", [1, FEWEST - 1])
def test_too_few_documents_prove_nothing(documents):
    logits, tokens, _ = contexts(15, count=documents * 20)
    gap = gap_from(logprobs(logits, tokens), logprobs(logits / 1.3, tokens), documents=documents, ids=tokens)
    result = diagnose(gap)
    assert (result.verdict, result.found) == ("unexplained", [])


@pytest.mark.parametrize("values_", [np.zeros(3000), np.full(3000, -1.1), np.linspace(-5, 0, 3000)])
def test_equal_sides_are_noise(values_):
    assert diagnose(gap_from(values_, values_)).verdict == "noise"


def test_a_group_is_named_with_its_ratio(world, full):
    test = diagnosed(replace(world, seed=5), full, group="strong")["group"]
    (only,) = test.estimate["groups"]
    assert (only["factor"], only["group"]) in {("worker", "engine-3"), ("data_parallel_rank", 2)}
    assert only["ratio"] > 1.5


# --- statistics against plain sums ---


def test_a_mean_over_documents_is_that_of_a_loop():
    rng = random.Random(0)
    rows = [[rng.gauss(i % 3, 1) for _ in range(rng.randint(1, 9))] for i in range(30)]
    flat = [x for row in rows for x in row]
    mean = math.fsum(flat) / len(flat)
    squares = math.fsum(math.fsum(x - mean for x in row) ** 2 for row in rows)
    found_ = mean_over(np.array(flat), np.repeat(np.arange(30), [len(row) for row in rows]))
    assert found_.value == pytest.approx(mean)
    assert found_.error == pytest.approx(math.sqrt(squares * 30 / 29) / len(flat))


@pytest.mark.parametrize("freedom", [11, 20, 63, 500])
@pytest.mark.parametrize("t", [0.0, 1.0, 2.5, 4.0, -1.5])
def test_the_tail_is_that_of_students_t(t, freedom):
    x = np.linspace(t, t + 400.0, 100_001)
    log_density = math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2) - 0.5 * math.log(freedom * math.pi)
    density = np.exp(log_density - (freedom + 1) / 2 * np.log1p(x * x / freedom))
    exact = float(((density[1:] + density[:-1]) / 2).sum() * (x[1] - x[0]))
    assert tail(t, freedom) == pytest.approx(exact, rel=0.03)


@pytest.mark.parametrize(("hits", "trials", "chance"), [(3, 40, 0.01), (10, 200, 0.02), (40, 40, 0.5), (0, 5, 0.1)])
def test_the_bound_of_a_count_is_above_its_tail(hits, trials, chance):
    exact = math.fsum(math.comb(trials, k) * chance**k * (1 - chance) ** (trials - k) for k in range(hits, trials + 1))
    assert exact <= binomial_tail(hits, trials, chance) <= 1.0


def test_one_document_is_as_many_observations_as_it_has_blocks():
    gap = gap_from(np.full(2000, -1.0), np.full(2000, -1.0), documents=1)
    assert len(np.unique(gap.observation)) == 4


# --- from samples ---


def sample(**rest) -> Sample:
    engine = {"old_logprobs": [-1.0, -2.0, -3.0], "rollout_logprobs": [-1.5, -2.5, -3.5]}
    return plain_sample(3, **{"tokens": [5, 6, 7, 8], "loss_mask": [1, 0, 1]} | engine | rest)


def test_columns_hold_the_trained_tokens():
    samples = [sample(step=4, weight_version=2, worker="e0"), sample(data_parallel_rank=1, step=5)]
    gap = gap_of(samples, ["a", "b"])
    assert gap.ids.tolist() == [6, 8, 6, 8]
    assert gap.position.tolist() == [0, 2, 0, 2]
    assert gap.document.tolist() == [0, 0, 1, 1]
    assert gap.difference.tolist() == [0.5] * 4
    assert gap.step.tolist() == [4, 5]
    assert gap.weight_version[0] == 2
    assert np.isnan(gap.weight_version[1])
    by_token = [sample(weight_version=[5, 90, 8]), sample(weight_version=[1, 2, 9], loss_mask=[0, 0, 0]), samples[0]]
    assert gap_of(by_token).weight_version.tolist() == [6, 4, 2]  # means over the trained tokens, or all, rounded
    assert gap.groups == {"worker": ["e0", None], "data_parallel_rank": [None, 1], "file": ["a", "b"]}


# --- the generator itself ---


def test_the_generator_draws_from_what_the_engine_reports(world):
    """E[π/q] is 1 without a fault and the kept mass with truncation: what the tests of missing mass rest on."""
    with torch.no_grad():
        drawn = clean(world, top_p(0.8))
        logits = world.logits(drawn.tokens)
    kept = (logits.softmax(-1) * torch.isfinite(top_p(0.8)(logits))).sum(-1).double()
    ratio = (of_tokens(logits, drawn.tokens) - drawn.engine).exp()
    assert float((ratio - kept).abs().max()) < 1e-4


def test_every_cause_has_a_fault_and_words():
    assert set(CAUSES) == set(SEEDED) == {*FAULTS, "truncation", "sampling"}
    assert all(cause.title and cause.advice.endswith(".") for cause in CAUSES.values())


def test_documents_without_uncertain_tokens_say_nothing():
    engine = np.full(4000, -1e-6)
    gap = gap_from(engine, engine - 1e-7, groups={"worker": ["a", "b"] * 20}, step=np.arange(40))
    assert documents.template(gap, LEVEL)[0].outcome == "cannot tell"
    assert diagnose(gap).verdict == "noise"
