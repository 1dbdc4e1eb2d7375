"""The objective oracle against finite differences of its own values, and against figures that others published.

Finite differences hold what is stopped (ratios of cispo and dppo, corrections) at its value before the step, so they
check the algebra from g to the logits and that each g belongs to its value.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from objective_oracle import (
    KL_ESTIMATORS,
    OBJECTIVES,
    Document,
    Settings,
    Tokens,
    correction,
    document_weights,
    log_softmax,
    step,
)

CORRECTIONS = ("none", "tis", "seq_tis", "icepop", "mis", "seq_mask_tis", "opsm")
AGGREGATIONS = ("sample_mean", "prompt_mean", "token_mean", "constant")
EVERY_OBJECTIVE = Settings(
    divisor=7.0,
    eps_low=0.2,
    eps_high=0.28,
    dual_clip=1.6,
    cispo_cap=1.4,
    dppo_delta_low=0.05,
    dppo_delta_high=0.05,
    dro_beta=0.5,
    ipo_low=0.05,
    ipo_high=0.05,
    ipo_tau=0.3,
    temperature=0.8,
)
CORRECTED = {  # bounds that keep some tokens of the random documents and reject others
    "none": {},
    "tis": {"correction_low": 0.8, "correction_high": 1.1},
    "seq_tis": {"correction_low": 0.8, "correction_high": 1.1},
    "icepop": {"correction_low": 0.8, "correction_high": 1.3},
    "mis": {"correction_low": 0.7, "correction_high": 1.8},
    "seq_mask_tis": {"correction_low": 0.9, "correction_high": 1.2},
    "opsm": {"correction_high": 0.0},
}


def random_document(rng, n, vocabulary, temperature, *, shift=0.4, **ids):
    """A document whose three other policies stray from its own by about `shift` nats a token, with holes in the mask."""
    logits = rng.normal(size=(n, vocabulary)) * 1.5
    targets = rng.integers(vocabulary, size=n)
    new = log_softmax(logits, temperature)[np.arange(n), targets]
    old, rollout, ref = (np.minimum(new + shift * rng.normal(size=n), -1e-3) for _ in range(3))
    mask = rng.random(n) < 0.75
    return Document(logits, targets, mask, old, rng.normal(size=n), rollout, ref, **ids)


def random_step(seed, temperature=0.8, **kwargs):
    """Six documents, siblings and uneven groups among them; the last one is fully masked."""
    rng = np.random.default_rng(seed)
    ids = [("a", "A"), ("a", "A"), ("b", "A"), ("c", "B"), ("d", "C"), ("e", "B")]
    documents = [
        random_document(rng, n, 7, temperature, rollout_id=r, prompt_id=p, **kwargs)
        for n, (r, p) in zip((3, 5, 1, 9, 4, 3), ids, strict=True)
    ]
    documents[2].mask[:] = True
    documents[5].mask[:] = False
    return documents


def with_logits(documents, logits):
    return [replace(document, logits=z) for document, z in zip(documents, logits, strict=True)]


def with_one_advantage(documents):
    return [replace(d, advantages=np.full_like(d.advantages, d.advantages[0])) for d in documents]


def differentiable_value(documents, settings, base):
    """The value whose gradient is taken, at these logits, with all that is stopped as in `base`, (documents, Result)."""
    before, result = base
    now = step(documents, replace(settings, correction="none", denominator="scheduled", kl_coef=0.0))
    total = []
    for i, (document, held) in enumerate(zip(documents, before, strict=True)):
        rows = np.flatnonzero(document.mask)
        new, fixed = (
            log_softmax(d.logits, settings.temperature)[np.arange(len(d.mask)), d.targets][rows]
            for d in (document, held)
        )
        old, ref, advantages = document.old[rows], document.ref[rows], document.advantages[rows]
        losses, factors = now.token_losses[i][rows], result.factors[i][rows]
        if settings.objective in ("cispo", "dppo_tv", "dppo_kl", "topr", "topr_token", "vespo"):
            losses = result.token_losses[i][rows] / fixed * new
        if settings.objective in ("gspo", "gspo_token") and len(rows):
            ratio = np.exp((fixed - old).mean()) * np.exp(new - fixed)
            if settings.objective == "gspo":  # nothing held: the ratio moves with every token
                advantages = np.full_like(advantages, advantages.mean())
                ratio = np.full_like(ratio, np.exp((new - old).mean()))
            bounded = np.clip(ratio, 1 - settings.eps_low, 1 + settings.eps_high)
            losses = -np.minimum(ratio * advantages, bounded * advantages)
        if settings.objective == "gmpo" and len(rows):
            shared = new - old if advantages[0] < 0 else -(new - old)
            shared = np.maximum(shared, -settings.gmpo_low if advantages[0] < 0 else -settings.gmpo_high)
            losses = -advantages * np.exp((shared if advantages[0] < 0 else -shared).mean())
        x, r = new - ref, np.exp(new - old)
        kl = {
            "k1": x,
            "k2": x**2 / 2,
            "k3": np.exp(-x) - 1 + x,
            "abs": np.abs(x),
            "k1_weighted": r * x,
            "k3_weighted": r * (np.exp(-x) - 1 + x),
        }[settings.kl_estimator]
        total.extend(result.weights[i] * factors * losses + settings.kl_coef * result.aux_weights[i] * kl)
        p = np.exp(log_softmax(document.logits[rows], settings.temperature))
        total.extend(settings.entropy_coef * result.aux_weights[i] * (p * np.log(p)).sum(axis=1))
    return math.fsum(total)


def finite_differences(documents, settings, direction, h=1e-6):
    """Derivative of `differentiable_value` along `direction`, a list of arrays like the logits."""
    base = (documents, step(documents, settings))
    ahead, behind = (
        differentiable_value(
            with_logits(documents, [d.logits + s * h * u for d, u in zip(documents, direction, strict=True)]),
            settings,
            base,
        )
        for s in (1, -1)
    )
    return (ahead - behind) / (2 * h)


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("name", CORRECTIONS)
def test_gradient_is_that_of_the_value(objective, name):
    estimators = itertools.cycle(KL_ESTIMATORS)
    for seed, aggregation in enumerate(AGGREGATIONS * 2):
        settings = replace(
            EVERY_OBJECTIVE,
            objective=objective,
            aggregation=aggregation,
            correction=name,
            **CORRECTED[name],
            denominator=("scheduled", "live")[seed % 2],
            kl_coef=0.3,
            kl_estimator=next(estimators),
            entropy_coef=0.2,
            aux_aggregation=("default", "policy")[seed // 4],
            per_token=bool(seed % 3),
            grad_divisor=3.0,
        )
        documents = random_step(seed)
        if objective == "gmpo":
            documents = with_one_advantage(documents)
        rng = np.random.default_rng(seed + 100)
        result = step(documents, settings)
        for _ in range(2):
            direction = [rng.normal(size=d.logits.shape) for d in documents]
            got = math.fsum(float((g * u).sum()) for g, u in zip(result.gradients, direction, strict=True))
            expected = finite_differences(documents, settings, direction) / settings.grad_divisor
            assert got == pytest.approx(expected, rel=2e-6, abs=1e-9)


def test_worked_example_of_weights():
    """notes: trained tokens 1, 3, 4, 24, 0; rollouts a1, a1, a2, b1, b2; prompts A, A, A, B, B; L = 16."""
    ids = [("a1", "A"), ("a1", "A"), ("a2", "A"), ("b1", "B"), ("b2", "B")]
    documents = [
        Document(np.zeros((24, 2)), np.zeros(24, int), np.arange(24) < k, None, None, rollout_id=r, prompt_id=p)
        for k, (r, p) in zip((1, 3, 4, 24, 0), ids, strict=True)
    ]
    trained = (1, 3, 4, 24, 0)
    expected = {
        "sample_mean": (16, 16, 16, 96),
        "prompt_mean": (16, 16, 16, 48),
        "token_mean": (32, 32, 32, 32),
        "constant": (64, 64, 64, 64),
    }
    for aggregation, deltas in expected.items():
        weights = document_weights(documents, aggregation, 16, "scheduled", trained)
        assert weights == [1 / d for d in deltas] + [0.0]
    # b2 leaves N_r under live; under kept, with all of b1 and a token of s2 rejected, b1 and B leave too.
    assert document_weights(documents, "sample_mean", None, "live", trained) == [1 / 12] * 3 + [1 / 72, 0.0]
    kept = (1, 3, 3, 0, 0)
    assert document_weights(documents, "sample_mean", None, "kept", kept) == [1 / 8, 1 / 8, 1 / 6, 0.0, 0.0]
    assert document_weights(documents, "prompt_mean", None, "kept", kept) == [1 / 7] * 3 + [0.0, 0.0]
    assert document_weights(documents, "token_mean", None, "kept", kept) == [1 / 7] * 4 + [0.0]
    assert document_weights(documents, "constant", 16, "kept", kept) == [1 / 32] * 3 + [0.0, 0.0]


def test_six_of_sixty_four_fully_masked_samples():
    """scheduled is 0.906 of live: a scale, not another direction."""
    rng = np.random.default_rng(0)
    documents = [random_document(rng, 4, 5, 1.0, rollout_id=i, prompt_id=0) for i in range(64)]
    for i, document in enumerate(documents):
        document.mask[:] = i >= 6
    scheduled, live = (step(documents, Settings(denominator=name)) for name in ("scheduled", "live"))
    for a, b in zip(scheduled.gradients, live.gradients, strict=True):
        np.testing.assert_allclose(a, b * 58 / 64, rtol=1e-13)
    assert scheduled.loss == pytest.approx(0.90625 * live.loss, rel=1e-13)


# (value bias, distance of the expected gradient from that of KL), as published to four digits.
KL_FIGURES = {
    "k1": (0.0, 0.3080),
    "k2": (-0.0147, 0.0),
    "k3": (0.0, 0.0947),
    "abs": (0.4450, 0.0869),
    "k1_weighted": (0.0, 0.0),
    "k3_weighted": (0.0, 0.0),
}


@pytest.mark.parametrize("estimator", KL_FIGURES)
def test_expected_kl_gradient_by_enumeration(estimator):
    logits, ref_logits = np.array([1, 0, -1, 0.5]), np.array([0, 0.5, 0, -0.5])
    new, ref = log_softmax(logits, 1.0), log_softmax(ref_logits, 1.0)
    p = np.exp(new)
    kl = float(p @ (new - ref))
    true = p * (new - ref - kl)
    assert kl == pytest.approx(0.3117, abs=5e-5)
    assert np.linalg.norm(true) == pytest.approx(0.3080, abs=5e-5)
    value, gradient = 0.0, np.zeros(4)
    for y in range(4):
        document = Document(logits[None], np.array([y]), np.ones(1, bool), new[[y]], np.zeros(1), ref=ref[[y]])
        result = step([document], Settings(kl_coef=1.0, kl_estimator=estimator))
        value += p[y] * result.kl_loss
        gradient += p[y] * result.gradients[0][0]
    bias, distance = KL_FIGURES[estimator]
    assert value - kl == pytest.approx(bias, abs=5e-5 if bias else 1e-14)
    assert np.linalg.norm(gradient - true) == pytest.approx(distance, abs=5e-5 if distance else 1e-14)


def tokens_of(old, new, advantages, rollout=None):
    """Tokens of given log-probabilities, without logits."""
    old, new, advantages = (np.array(x, dtype=float) for x in (old, new, advantages))
    return Tokens(np.zeros((len(new), 1)), np.zeros(len(new), int), new, old, advantages, rollout, None)


def test_sapo_weights():
    ratios = np.array([0.5, 0.8, 1, 1.28, 2, 3])
    _, g = OBJECTIVES["sapo"](tokens_of(np.full(6, -5.0), np.log(ratios) - 5, np.ones(6)), Settings(objective="sapo"))
    np.testing.assert_allclose(-g, [0.470, 0.792, 1, 1.255, 1.573, 1.260], atol=5e-4)


def test_dppo_judges_probabilities_where_ppo_judges_ratios():
    """Ratio 10 of a rare token is 9e-4 of probability, ratio .81 of a sure one is .19."""
    tokens = tokens_of(np.log([1e-4, 0.99]), np.log([1e-3, 0.8]), [1, -1])
    _, ppo = OBJECTIVES["grpo"](tokens, Settings())
    _, tv = OBJECTIVES["dppo_tv"](tokens, Settings(objective="dppo_tv", dppo_delta_low=0.18, dppo_delta_high=0.18))
    assert ppo[0] == 0
    assert ppo[1] > 0
    assert tv[0] == pytest.approx(-10)
    assert tv[1] == 0
    kl = 0.99 * math.log(0.99 / 0.8) + 0.01 * math.log(0.01 / 0.2)
    for threshold, kept in ((kl * 0.999, False), (kl * 1.001, True)):
        settings = Settings(objective="dppo_kl", dppo_delta_low=threshold, dppo_delta_high=threshold)
        assert (OBJECTIVES["dppo_kl"](tokens, settings)[1][1] != 0) == kept


@pytest.mark.parametrize(
    ("name", "bounds", "expected"),
    [("tis", (0, 2), 0.032), ("icepop", (0.5, 2), 0.325), ("icepop", (0.5, 5), 0.0), ("none", (None, None), 0.494)],
)
def test_bias_of_corrections(name, bounds, expected):
    """V = 512: relative bias of the expected gradient under samples of another rollout policy, as published."""
    j = np.arange(512)
    z = 2 * np.sin(j)
    new = log_softmax(z, 1.0)
    rollout = log_softmax(z + 0.5 * math.sqrt(2) * np.sin(7 * j + 1), 1.0)
    p, q = np.exp(new), np.exp(rollout)
    a = np.cos(3 * j)
    a = a - p @ a
    settings = Settings(correction=name, correction_low=bounds[0], correction_high=bounds[1])
    gamma, kappa = correction(tokens_of(new, new, a, rollout=rollout), settings)
    true, seen = p * a, q * gamma * kappa * a
    true, seen = (x - p * x.sum() for x in (true, seen))
    assert np.linalg.norm(seen - true) / np.linalg.norm(true) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize(
    ("name", "low", "high", "expected"),
    [  # rho = 2, 1/4, 4: product 2, geometric mean 2 ** (1/3) = 1.26
        ("none", None, None, [1, 1, 1]),
        ("tis", None, None, [2, 0.25, 2]),
        ("tis", 0.5, 3, [2, 0.5, 3]),
        ("seq_tis", 0, 3, [2, 2, 2]),
        ("seq_tis", 0, 1.5, [1.5, 1.5, 1.5]),
        ("icepop", None, None, [2, 0, 4]),
        ("icepop", 0.2, 2.1, [2, 0.25, 0]),
        ("mis", None, None, [2, 2, 2]),
        ("mis", 0, 1.9, [0, 0, 0]),
        ("seq_mask_tis", 1.2, 1.3, [2, 0.25, 4]),
        ("seq_mask_tis", 1.3, 2.5, [0, 0, 0]),
        ("opsm", None, 0.19, [1, 0, 1]),  # sampled by the rollout engine: mean of b - l = 0.2
        ("opsm", None, 0.21, [1, 1, 1]),
    ],
)
def test_factors_by_hand(name, low, high, expected):
    log_rho = np.log([2.0, 0.25, 4.0])
    rollout = np.array([-2.0, -3.0, -4.0])
    tokens = tokens_of(rollout + log_rho, rollout - [0.5, -0.4, 0.5], [1, -1, 0], rollout)
    gamma, kappa = correction(tokens, Settings(correction=name, correction_low=low, correction_high=high))
    np.testing.assert_allclose(gamma * kappa, expected, rtol=1e-14)


def test_kl_penalty_acts_far_below_the_reference():
    """Only the exponent of k3 is clamped: pi << pi_ref is still pushed up, and the weighted form keeps g = r x."""
    x = np.array([-40.0])
    assert KL_ESTIMATORS["k3"](x, None)[1] == 1 - math.exp(20)
    assert KL_ESTIMATORS["k3_weighted"](x, np.array([1.5]))[1] == -60


def all_gradients(documents, settings):
    return np.concatenate([g.ravel() for g in step(documents, settings).gradients])


@pytest.mark.parametrize("name", CORRECTIONS)
def test_gspo_token_is_gspo_when_the_advantage_is_constant(name):
    """But for the gradient under a factor that differs inside a document: gspo spreads its mean over all tokens."""
    of_whole_documents = name in ("none", "seq_tis", "mis", "opsm")
    apart = 0.0
    for seed in range(10):
        documents = random_step(seed)
        for document in documents:
            document.advantages[:] = document.advantages[0]
        base = replace(EVERY_OBJECTIVE, correction=name, **CORRECTED[name], eps_low=0.1, eps_high=0.1)
        both = [replace(base, objective=objective) for objective in ("gspo", "gspo_token")]
        assert step(documents, both[0]).loss == pytest.approx(step(documents, both[1]).loss, rel=1e-12, abs=1e-15)
        apart = max(apart, np.abs(np.subtract(*(all_gradients(documents, s) for s in both))).max())
    assert apart < 1e-14 if of_whole_documents else apart > 1e-3


def test_every_objective_has_the_gradient_of_reinforce_on_policy():
    documents = random_step(3, shift=0.0)
    expected = all_gradients(documents, replace(EVERY_OBJECTIVE, objective="reinforce"))
    negative_sapo = 4 * 0.25  # 4 s (1 - s) at r = 1, whatever tau
    for objective in set(OBJECTIVES) - {"gspo", "gmpo"}:
        got = all_gradients(documents, replace(EVERY_OBJECTIVE, objective=objective))
        np.testing.assert_allclose(got, expected * negative_sapo if objective == "sapo" else expected, atol=1e-14)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_masked_values_do_not_matter(objective):
    settings = replace(EVERY_OBJECTIVE, objective=objective, correction="icepop", kl_coef=0.1, entropy_coef=0.1)
    documents, poisoned = random_step(5), random_step(5)
    for document in poisoned:
        for field in (document.logits, document.old, document.advantages, document.rollout, document.ref):
            field[~document.mask] = np.nan
        document.targets[~document.mask] = -99
    clean, dirty = step(documents, settings), step(poisoned, settings)
    assert clean.loss == dirty.loss
    for a, b, document in zip(clean.gradients, dirty.gradients, documents, strict=True):
        np.testing.assert_array_equal(a, b)
        assert not b[~document.mask].any()


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_clamped_ratio_has_no_gradient(objective):
    """Beyond 20 nats only what reads no ratio, or none above 1, still trains, and the pull of ipo."""
    for old, advantage in ((-30.0, -1.0), (-30.0, 1.0), (-1e-9, 1.0), (-1e-9, -1.0)):
        logits = np.array([[0.0, 1.0]]) if old == -30.0 else np.array([[0.0, 25.0]])
        document = Document(logits, np.array([0]), np.ones(1, bool), np.array([old]), np.array([advantage]))
        settings = replace(EVERY_OBJECTIVE, objective=objective, temperature=1.0)
        trains = objective in ("reinforce", "dro", "topr", "topr_token", "ipo")
        assert bool(step([document], settings).gradients[0].any()) == trains


def test_column_that_cannot_be_sampled():
    """A logit of -inf changes nothing and gets no gradient."""
    settings = replace(EVERY_OBJECTIVE, kl_coef=0.1, entropy_coef=0.1)
    documents = random_step(6)
    padded = with_logits(documents, [np.pad(d.logits, ((0, 0), (0, 1)), constant_values=-np.inf) for d in documents])
    narrow, wide = step(documents, settings), step(padded, settings)
    assert wide.loss == pytest.approx(narrow.loss, rel=1e-13)
    for a, b in zip(narrow.gradients, wide.gradients, strict=True):
        np.testing.assert_allclose(np.pad(a, ((0, 0), (0, 1))), b, atol=1e-15)


def test_corrections_leave_kl_and_entropy_alone():
    """All tokens rejected: the policy gradient is gone, the other two terms are as without a correction."""
    documents = random_step(8)
    for denominator in ("scheduled", "live", "kept"):
        base = replace(EVERY_OBJECTIVE, kl_coef=0.3, entropy_coef=0.2, denominator=denominator)
        rejected = replace(base, correction="icepop", correction_low=100.0, correction_high=101.0)
        plain, none = step(documents, base), step(documents, rejected)
        assert none.pg_loss == 0
        assert (none.kl_loss, none.entropy_loss) == (plain.kl_loss, plain.entropy_loss)
        flat = [replace(d, advantages=np.zeros_like(d.advantages)) for d in documents]
        np.testing.assert_allclose(all_gradients(documents, rejected), all_gradients(flat, base), atol=1e-16)


def test_bounds_are_inclusive():
    on_low, on_high = math.log(0.5), math.log(2.0)  # exp of both is exact
    tokens = tokens_of([0, 0], [on_low, on_high], [-1, 1])
    assert list(OBJECTIVES["grpo"](tokens, Settings(eps_low=0.5, eps_high=1.0))[1]) == [0.5, -2.0]
    capped = tokens_of([0], [on_high], [-1])
    assert OBJECTIVES["dual_clip"](capped, Settings(objective="dual_clip", dual_clip=2.0))[1] == [2.0]
    assert OBJECTIVES["dual_clip"](capped, Settings(objective="dual_clip", dual_clip=1.9))[1] == [0.0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"objective": "ppo2"}, "objective='ppo2'"),
        ({"objective": "cispo"}, "cispo_cap=None"),
        ({"objective": "cispo", "cispo_cap": 0.28}, "cap itself"),
        ({"objective": "dual_clip", "dual_clip": 1.0}, "dual_clip=1.0"),
        ({"aggregation": "constant"}, "divisor=None"),
        ({"correction": "opsm", "correction_high": 0.1, "denominator": "kept"}, "opsm"),
    ],
)
def test_undefined_settings_raise(fields, message):
    with pytest.raises(ValueError, match=message):
        Settings(**fields)


def test_undefined_steps_raise():
    document = random_step(1)[2]
    with pytest.raises(ValueError, match="no trained token"):
        step([replace(document, mask=np.zeros(1, bool))], Settings())
    with pytest.raises(ValueError, match="not finite"):
        step([replace(document, old=np.array([np.nan]))], Settings())
    with pytest.raises(ValueError, match="rollout log-probabilities"):
        step([replace(document, rollout=None)], Settings(correction="tis"))
    with pytest.raises(ValueError, match="reference log-probabilities"):
        step([replace(document, ref=None)], Settings(kl_coef=0.1))
