"""Objectives, KL and entropy terms: hand-worked values, gradients in float64, the papers' identities, a user's own."""

import math
import random
from unittest import mock

import pytest
import torch
from objective_parts import ESTIMATORS, SIZES, build, drawn, sequences_of, with_fields
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError, gradcheck

from megatron_pg.batch import TokenFields
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.objectives import objective_of


class Frozen:
    """A function whose stopped gradients are constants: `detach` returns what it returned in the first call."""

    def __init__(self, function):
        self._function, self._tape = function, None

    def __call__(self, *inputs: Tensor) -> Tensor:
        first = self._tape is None
        tape, detach = [] if first else iter(self._tape), torch.Tensor.detach

        def frozen(values: Tensor) -> Tensor:
            if not first:
                return next(tape)
            tape.append(detach(values).clone())
            return tape[-1]

        with mock.patch.object(torch.Tensor, "detach", frozen):
            result = self._function(*inputs)
        self._tape = tape if first else self._tape
        return result


CHECK = {"eps": 1e-6, "atol": 1e-6, "rtol": 1e-5, "nondet_tol": 0.0}
EXTRAS = [
    {},
    {"entropy_coef": 0.3, "grad_divisor": 8.0},
    *({"kl_coef": 0.2, "kl_estimator": name} for name in ESTIMATORS),
    {"opsm_anchor": "rollout_logprobs", "opsm_threshold": 0.0},
]


@pytest.mark.proof("gradcheck: every objective with KL, entropy, opsm and divisor, stopped gradients held fixed")
@pytest.mark.parametrize("name", OBJECTIVES)
def test_the_gradient_is_that_of_the_equation_with_its_stopped_parts_fixed(name, full, evidence):
    rng, first = random.Random(name), list(OBJECTIVES).index(name)
    extras = 20 * EXTRAS if full else [EXTRAS[(first + i) % len(EXTRAS)] for i in range(3)]
    for extra in extras:
        loss, logprobs, entropy = drawn(name, rng, **extra)
        function = Frozen(lambda new, h, loss=loss: loss(new, h).loss)
        function(logprobs, entropy)
        inputs = (logprobs, entropy) if "entropy_coef" in extra else (logprobs,)
        assert gradcheck(lambda new, h=entropy, f=function: f(new, h), inputs, **CHECK), extra
    evidence(cases=len(extras))


def test_a_gradient_that_is_not_that_of_the_equation_would_be_seen():
    loss, logprobs, entropy = drawn("cispo", random.Random(1))
    with pytest.raises(GradcheckError):  # nothing held fixed: the weight moves with the ratio
        gradcheck(lambda new: loss(new, entropy).loss, (logprobs,), **CHECK)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rejects", [None, "by data", "by the model"])
@pytest.mark.parametrize("name", ["gspo", "gmpo"])
def test_one_loss_per_sequence_has_the_true_gradient_of_its_value(name, seed, rejects):
    """Nothing held fixed: the ratio of a sequence moves with every token of it, for any factor its tokens have."""
    opsm = {"opsm_anchor": "rollout_logprobs", "opsm_threshold": 0.0} if rejects == "by the model" else {}
    loss, logprobs, _ = drawn(name, random.Random(seed), **opsm)
    if rejects == "by data":
        factors = torch.rand(sum(SIZES), dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) * 2
        loss = with_fields(loss, corrections=torch.where(factors < 0.6, 0, factors))
    assert gradcheck(lambda new: loss(new).loss, (logprobs,), **CHECK)


def fields_of(sizes: list[int], *, old_logprobs, advantages, weight: float = 0.5, **rest) -> TokenFields:
    """Trained tokens of sequences one after the other, of one weight."""
    given = {"old_logprobs": old_logprobs, "advantages": advantages} | rest
    return TokenFields(
        targets=torch.zeros(sum(sizes), dtype=torch.int64),
        mask=torch.ones(sum(sizes), dtype=torch.bool),
        weights=torch.full((sum(sizes),), weight, dtype=torch.float64),
        sequences=sequences_of(sizes),
        **{name: torch.tensor(values, dtype=torch.float64) for name, values in given.items()},
    )


def test_gspo_shares_the_factors_of_a_sequence_by_hand():
    """Factors 3 and 0 of two tokens, weight 1/2 each, R = 1.1 inside the clip, A = 2: loss -3.3, each token -1.65."""
    fields = fields_of([2], old_logprobs=[-1.0, -2.0], advantages=[2.0, 2.0], corrections=[3.0, 0.0])
    expected = {"gspo": [-1.65, -1.65], "gspo_token": [-3.3, 0.0]}
    for name, gradient in expected.items():
        logprobs = (fields.old_logprobs + math.log(1.1)).requires_grad_()
        found = PolicyLoss(LossTerms(objective=build(name)), fields)(logprobs)
        found.loss.backward()
        assert float(found.loss.detach()) == pytest.approx(-3.3, rel=1e-14)
        assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-14, abs=1e-15)


def coefficient(name: str, *, log_ratio: float, advantage: float, old: float = -1.0, **numbers) -> tuple[float, float]:
    """Loss of one token and its derivative by the log-probability."""
    logprob = torch.tensor([old + log_ratio], dtype=torch.float64, requires_grad=True)
    fields = fields_of([1], old_logprobs=[old], advantages=[advantage], weight=1.0)
    value = PolicyLoss(LossTerms(objective=build(name, **numbers)), fields)(logprob).loss
    value.backward()
    return float(value.detach()), float(logprob.grad)


@pytest.mark.parametrize(
    ("name", "r", "advantage", "loss", "gradient"),
    [
        ("grpo", 1.0, -2.0, 2.0, 2.0),
        ("grpo", 1.1, 1.0, -1.1, -1.1),
        ("grpo", 1.5, 1.0, -1.28, 0.0),  # clipped high, A > 0: dead
        ("grpo", 1.5, -1.0, 1.5, 1.5),  # above the band, A < 0: live
        ("grpo", 0.5, -1.0, 0.8, 0.0),  # clipped low, A < 0: dead
        ("grpo", 0.5, 1.0, -0.5, -0.5),  # below the band, A > 0: live
        ("dual_clip", 4.0, -1.0, 3.0, 0.0),  # beyond c
        ("dual_clip", 2.5, -1.0, 2.5, 2.5),  # below c: live, as ppo
        ("dual_clip", 4.0, 1.0, -1.28, 0.0),  # A > 0: the ppo clip
        ("dual_clip", 0.5, -2.0, 1.6, 0.0),
        ("gspo", 1.1, 2.0, -2.2, -2.2),
        ("gspo", 1.5, 2.0, -2.56, 0.0),
        ("gspo_token", 0.5, -2.0, 1.6, 0.0),
        ("cispo", 4.0, 2.0, -1.5 * 2.0 * (math.log(4) - 1), -3.0),  # the cap
        ("cispo", 0.5, 2.0, -0.8 * 2.0 * (math.log(0.5) - 1), -1.6),  # 1 - clip_eps_low
        ("sapo", 1.0, 1.0, -2.0, -1.0),  # -2 A / tau, gradient of ppo
        ("sapo", 1.0, -1.0, 2.0 / 1.05, 1.0),
        ("sapo", 2.0, 1.0, -4.0 / (1 + math.exp(-1)), -8 * math.exp(-1) / (1 + math.exp(-1)) ** 2),
        ("reinforce", 3.0, 2.0, -2.0 * (math.log(3) - 1), -2.0),
        ("reinforce_is", 3.0, 2.0, -6.0, -6.0),
        ("dppo_tv", 1.1, 1.0, -1.1 * (math.log(1.1) - 1), -1.1),  # moved by 0.037
        ("dppo_tv", 1.5, 1.0, 0.0, 0.0),  # moved by 0.18
        ("dppo_tv", 1.5, -1.0, 1.5 * (math.log(1.5) - 1), 1.5),  # against A: kept
        ("dppo_tv", 4.0, -1.0, 3.0 * (math.log(4) - 1), 3.0),  # the cap of the weight
        ("dppo_kl", 4.0, -1.0, 3.0 * (math.log(4) - 1), 3.0),
        ("dppo_kl", 2.0, 1.0, 0.0, 0.0),  # KL of 0.368 from 0.736: 0.297
        ("dppo_kl", 2.0, -1.0, 2.0 * (math.log(2) - 1), 2.0),
        ("dro", 3.0, 2.0, -2.0 * (math.log(3) - 1) + 0.25 * math.log(3) ** 2, -2.0 + 0.5 * math.log(3)),
        ("dro", 3.0, 0.0, 0.25 * math.log(3) ** 2, 0.5 * math.log(3)),  # the pull alone
        ("topr", 4.0, -1.0, math.log(4) - 1, 1.0),  # the cap
        ("topr", 0.25, -1.0, 0.25 * (math.log(0.25) - 1), 0.25),
        ("topr", 0.25, 1.0, -(math.log(0.25) - 1), -1.0),  # A > 0: the whole gradient
        ("topr_token", 0.25, -1.0, 0.25 * (math.log(0.25) - 1), 0.25),
        ("topr_token", 4.0, 1.0, -(math.log(4) - 1), -1.0),
        ("ipo", 1.1, 2.0, -2.2 + 0.1 * math.log(1.1) ** 2, -2.2 + 0.2 * math.log(1.1)),  # moved by 0.037
        ("ipo", 1.5, 1.0, 0.1 * math.log(1.5) ** 2, 0.2 * math.log(1.5)),  # moved by 0.18: the pull alone
        ("ipo", 1.5, -1.0, 0.1 * math.log(1.5) ** 2, 0.2 * math.log(1.5)),  # against A: dropped too
        ("ipo", 0.5, 1.0, 0.1 * math.log(2) ** 2, -0.2 * math.log(2)),
        ("vespo", 2.0, 1.0, -4 * math.exp(-3) * (math.log(2) - 1), -4 * math.exp(-3)),
        ("vespo", 0.5, -1.0, math.exp(1) / 8 * (math.log(0.5) - 1), math.exp(1) / 8),
        ("gmpo", 1.4, 2.0, -2.8, -2.8),
        ("gmpo", 2.0, 2.0, -2 * math.exp(0.4), 0.0),
        ("gmpo", 2.0, -1.0, 2.0, 2.0),  # the other side is not clipped
        ("gmpo", 0.5, -1.0, math.exp(-0.3), 0.0),
    ],
)
def test_hand_worked_tokens(name, r, advantage, loss, gradient):
    found = coefficient(name, log_ratio=math.log(r), advantage=advantage)
    assert found == pytest.approx((loss, gradient), rel=1e-12, abs=1e-14)


PULLED = ("dro", "ipo")  # back to the sampling policy, regardless of the advantage


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in PULLED])
def test_a_token_without_advantage_has_neither_loss_nor_gradient(name):
    assert coefficient(name, log_ratio=0.7, advantage=0.0) == (0.0, 0.0)


NOT_CLAMPED = ("reinforce", "dro", "topr", "topr_token", "ipo")  # no ratio above 1 in it, or a pull that must act there


@pytest.mark.parametrize("name", [name for name in OBJECTIVES if name not in NOT_CLAMPED])
@pytest.mark.parametrize("log_ratio", [21.0, -21.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_a_meaningless_ratio_gives_a_finite_loss_and_no_gradient(name, log_ratio, advantage):
    loss, gradient = coefficient(name, log_ratio=log_ratio, advantage=advantage, old=-22.0)
    assert math.isfinite(loss)
    assert gradient == 0.0


@pytest.mark.parametrize(("log_ratio", "advantage"), [(30.0, -1.0), (-30.0, -1.0), (30.0, 1.0), (-30.0, 1.0)])
def test_what_has_no_clamp_is_finite_far_from_the_sampling_policy(log_ratio, advantage):
    arguments = {"log_ratio": log_ratio, "advantage": advantage, "old": -31.0}
    weight = math.exp(min(log_ratio, 0)) if advantage < 0 else 1.0
    expected = {
        "dro": -advantage + 0.5 * log_ratio,
        "topr": -weight * advantage,
        "topr_token": -weight * advantage,
        "ipo": 0.2 * log_ratio,
    }
    for name, gradient in expected.items():
        assert coefficient(name, **arguments)[1] == pytest.approx(gradient, rel=1e-12)


def test_products_and_averages_are_over_the_whole_sequence_by_hand():
    """Two tokens with r = 1.25 and 0.4, so W = 1/2, and one token in its own sequence."""
    fields = fields_of([2, 1], old_logprobs=[-1.0, -2.0, -1.0], advantages=[-2.0, -2.0, 1.0])
    ratios = torch.tensor([1.25, 0.4, 1.0], dtype=torch.float64)
    mean = math.exp((math.log(1.25) - 0.3) / 2)
    expected = {"topr": [0.5, 0.5, -0.5], "vespo": [math.exp(1) / 8] * 2 + [-0.5], "gmpo": [mean, 0.0, -0.5]}
    for name, gradient in expected.items():
        logprobs = (fields.old_logprobs + ratios.log()).requires_grad_()
        PolicyLoss(LossTerms(objective=build(name)), fields)(logprobs).loss.backward()
        assert logprobs.grad.tolist() == pytest.approx(gradient, rel=1e-14, abs=1e-15), name


@pytest.mark.parametrize("name", OBJECTIVES)
def test_on_policy_every_gradient_is_that_of_reinforce(name):
    for advantage in (1.3, -0.7):
        assert coefficient(name, log_ratio=0.0, advantage=advantage)[1] == pytest.approx(-advantage, rel=1e-14)


@pytest.mark.proof("LUSPO, 2602.05261: gspo with constant, L = 1, is its equation, value and gradient")
def test_luspo_is_gspo_with_constant_and_divisor_1(evidence):
    """-(1/G) Σ_i |y_i| min(s_i A_i, clip(s_i) A_i), s_i = (Π r)^(1/|y_i|), of G = 3 responses, in plain float64."""
    worst = 0.0
    for seed in range(20):
        loss, logprobs, _ = drawn("gspo", random.Random(seed))
        lengths, mask = torch.tensor(SIZES), torch.ones(sum(SIZES), dtype=torch.bool)
        advantages = torch.repeat_interleave(torch.randn(3, dtype=torch.float64), lengths)
        step = with_fields(
            loss, mask=mask, advantages=advantages, sequences=sequences_of(SIZES), weights=mask.double() / 3
        )
        ours = step(logprobs).loss
        (gradient,) = torch.autograd.grad(ours, logprobs)
        terms = []
        for new, old, a in zip(
            *(x.split(SIZES) for x in (logprobs, loss.fields.old_logprobs, advantages)), strict=True
        ):
            s = ((new - old).sum() / len(new)).exp()
            terms.append(len(new) * torch.minimum(s * a[0], s.clamp(0.8, 1.28) * a[0]))
        theirs = -sum(terms) / 3
        (expected,) = torch.autograd.grad(theirs, logprobs)
        worst = max(worst, abs(float((ours - theirs).detach())), float((gradient - expected).abs().max()))
    evidence(cases=20, worst=worst, tolerance=5e-15)


def test_a_certain_token_has_a_divergence():
    """π_old = 1 has no rest, π = 1 an infinite divergence from less; neither gives NaN."""
    assert coefficient("dppo_kl", old=0.0, log_ratio=-0.001, advantage=-1.0)[1] == pytest.approx(math.exp(-0.001))
    assert coefficient("dppo_kl", old=-0.5, log_ratio=0.5, advantage=1.0)[1] == 0.0


@pytest.mark.parametrize("name", OBJECTIVES)
def test_masked_tokens_may_hold_anything(name):
    terms = {"kl_coef": 0.1, "kl_estimator": "k3", "entropy_coef": 0.1, "opsm_anchor": "rollout_logprobs"}
    loss, logprobs, entropy = drawn(name, random.Random(5), **terms, opsm_threshold=0.0)
    bad = [math.nan, math.inf, -math.inf, 1e30]
    fields = ("old_logprobs", "advantages", "weights", "ref_logprobs", "rollout_logprobs")
    found = []
    for filling in (0.0, *bad):
        change = lambda values, f=filling: torch.where(loss.fields.mask, values.detach(), f)  # noqa: E731
        poisoned = with_fields(loss, **{field: change(getattr(loss.fields, field)) for field in fields})
        at, h = change(logprobs).requires_grad_(), change(entropy).requires_grad_()
        out = poisoned(at, h)
        gradients = torch.autograd.grad(out.loss, (at, h))
        found.append(torch.cat([out.loss.detach()[None], *gradients, out.term_losses.flatten(), out.token_losses]))
    assert all(torch.equal(found[0], other) for other in found[1:])


@pytest.mark.parametrize("name", OBJECTIVES)
def test_a_value_that_is_not_finite_at_a_trained_token_stays_visible(name):
    loss, logprobs, _ = drawn(name, random.Random(6))
    first = int(loss.fields.mask.nonzero()[0])
    bad = logprobs.detach().clone()
    bad[first] = math.nan
    assert torch.isnan(loss(bad).loss)


others_in_full_tier = pytest.mark.full_tier("the other objectives belong to `make prove`")


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(
    "name",
    [  # by default a token's loss, one with an average of its sequence, and one loss for a sequence
        name if name in ("grpo", "gspo_token", "gmpo") else pytest.param(name, marks=others_in_full_tier)
        for name in OBJECTIVES
    ],
)
def test_triton_equals_torch_in_float32(name):
    """tests/unit/kernels/triton/test_surrogate.py has every objective, from the log-probability on."""
    generator = torch.Generator().manual_seed(7)
    logits = torch.randn(sum(SIZES), 40, generator=generator)
    targets = torch.randint(0, 40, (sum(SIZES),), generator=generator)
    extra = {"kl_coef": 0.2, "kl_estimator": "k3_weighted", "entropy_coef": 0.3, "grad_divisor": 4.0}
    loss, _, _ = drawn(name, random.Random(7), **extra)
    old = logits.log_softmax(1).gather(1, targets[:, None])[:, 0].double() - 0.3 * loss.fields.advantages
    factors = torch.rand(sum(SIZES), generator=generator).double()
    loss = with_fields(loss, old_logprobs=old, targets=targets, corrections=factors)
    found = []
    for impl in ("torch", "triton"):
        leaf = logits.clone().requires_grad_()
        out = policy_gradient_loss(leaf, loss, Vocabulary.of(40), impl=impl)
        (gradient,) = torch.autograd.grad(out.loss, leaf)
        found.append((out, gradient))
    (a, ga), (b, gb) = found
    assert float(a.loss.detach()) == pytest.approx(float(b.loss.detach()), rel=1e-5)
    assert torch.allclose(ga, gb, atol=2e-6 * float(ga.abs().max()))
    assert torch.allclose(a.term_losses[0], b.term_losses[0], rtol=1e-4, atol=1e-5)


def test_a_number_that_is_left_out_has_its_default():
    assert vars(objective_of("dppo_kl", delta_low=0.1, delta_high=0.2).parameters)["cap"] == math.inf
    assert vars(objective_of("cispo", cap=5.0, clip_eps_low=0.2).parameters) == {"clip_eps_low": 0.2, "cap": 5.0}
    assert vars(objective_of("dual_clip").parameters) == {"clip_eps_low": 0.2, "clip_eps_high": 0.2}  # c is required
