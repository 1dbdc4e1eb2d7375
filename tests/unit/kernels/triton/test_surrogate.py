"""The loss from log-probabilities in one launch, against `PolicyLoss` in float64, with every token kernel and term."""

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch
from launch_count import counted
from loss_terms import kl_and_entropy
from objective_parts import ESTIMATORS, build

from megatron_pg.batch import Sequences, TokenFields
from megatron_pg.batch.fields import TermFields
from megatron_pg.declarations.corrections import PENALTY
from megatron_pg.declarations.loss_terms import AS_POLICY, LossTerm
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.kernels.triton import segments
from megatron_pg.kernels.triton.surrogate import BLOCK, surrogate_and_slopes, surrogate_loss

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [name for name, declared in OBJECTIVES.items() if not declared.no_token_kernel]
PER_TOKEN = ("old_logprobs", "advantages", "weights", "corrections", "ref_logprobs")
COUNT = 2 * BLOCK + 17
LIMIT = 1e-5  # where a ratio at its clamp, e^20, multiplies e^-x - 1 + x of a small x


def scattered(generator: torch.Generator, mask: torch.Tensor) -> Sequences:
    """Six sequences whose tokens lie anywhere, one of them empty and one with one token, and tokens of none."""
    slots = torch.tensor([0, 1, 2, 3, 6])[torch.randint(0, 5, (COUNT,), generator=generator)]
    slots[COUNT // 2] = 5
    return Sequences(
        slots=slots,
        order=slots.argsort(stable=True),
        lengths=slots.bincount(minlength=7),
        counts=slots[mask].bincount(minlength=7)[:6].double().clamp(min=1),
    )


def drawn(name: str, seed: int, **terms) -> tuple[PolicyLoss, torch.Tensor, torch.Tensor]:
    """A loss of float32 values in float64 with log-probabilities and entropies, and tokens off the kinks trained."""
    generator = torch.Generator().manual_seed(seed)
    normal = lambda: torch.randn(COUNT, generator=generator).double()  # noqa: E731
    uniform = lambda: torch.rand(COUNT, generator=generator).double()  # noqa: E731
    old = -4 * uniform().float().double()
    spread = torch.tensor([0.01, 0.3, 1.0])[torch.arange(COUNT) % 3]
    logprobs = torch.minimum(old + spread * normal(), torch.tensor(-1e-3)).float().double()
    logprobs[::50] = (old[::50] + 25.0 * (-1.0) ** torch.arange(len(old[::50]))).float().double()  # beyond the clamp
    advantages = normal()
    advantages[::9] = 0.0
    mask = uniform() < 0.8
    fields = TokenFields(
        targets=torch.zeros(COUNT, dtype=torch.int64),
        mask=mask,
        sequences=scattered(generator, mask),
        old_logprobs=old,
        advantages=advantages,
        weights=uniform(),
        corrections=2 * uniform(),
        terms={each: TermFields(weights=uniform()) for each in ("kl", "entropy")},
        ref_logprobs=(logprobs - normal()).float().double(),
    )
    rest = {key: terms.pop(key) for key in ("grad_divisor", "opsm_anchor", "opsm_threshold") if key in terms}
    how = LossTerms(objective=build(name), further=kl_and_entropy(**terms), **rest)
    fields = replace(fields, mask=mask & (fields.sequences.slots < 6))  # what is trained has a sequence
    loss, entropy = PolicyLoss(how, fields), 3 * uniform()
    near = [evaluated(loss, logprobs + step, entropy)[1] for step in (-1e-5, 1e-5)]
    steady = (near[0] - near[1]).abs() <= 1e-3 * (1 + near[0].abs())
    return PolicyLoss(loss.terms, replace(fields, mask=fields.mask & steady)), logprobs, entropy


def evaluated(loss: PolicyLoss, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple:
    leaves = logprobs.clone().requires_grad_(), entropy.clone().requires_grad_()
    found = loss(*leaves)
    gradients = torch.autograd.grad(found.loss, leaves, materialize_grads=True, allow_unused=True)
    return found, *gradients


def poisoned(loss: PolicyLoss, logprobs: torch.Tensor, entropy: torch.Tensor) -> tuple:
    """As kernels receive it: float32; untrained tokens have NaN fields, and log-probability and entropy 0."""
    mask = loss.fields.mask
    known = loss.fields.per_token()
    names = (*PER_TOKEN, *(name for name in known if name.endswith(".weights")))
    fields = {name: known[name].float().masked_fill(~mask, math.nan).to(DEVICE) for name in names}
    fields |= {"mask": mask.to(DEVICE), "targets": known["targets"].to(DEVICE)}
    values = (v.float().masked_fill(~mask, 0).to(DEVICE).requires_grad_() for v in (logprobs, entropy))
    sequences = loss.fields.sequences
    moved = {each: getattr(sequences, each).to(DEVICE) for each in ("slots", "order", "lengths", "counts")}
    return PolicyLoss(loss.terms, TokenFields.of(fields, replace(sequences, **moved))), *values


def worst(found: torch.Tensor, expected: torch.Tensor) -> float:
    expected = expected.detach()
    return float(((found.detach().cpu().double() - expected).abs() / (1 + expected.abs())).max())


def of_sequences(found, expected) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What is known of sequences on both sides, which is the same."""
    names = ("sequence_log_ratios", "sequence_advantages", "kept")
    known = [name for name in names if getattr(expected, name) is not None]
    assert known == [name for name in names if getattr(found, name) is not None]
    return [(getattr(found, name), getattr(expected, name).double()) for name in known]


@pytest.mark.proof("Loss terms in one launch: every row with every KL estimator and the bonus, float32: within 1e-5")
@pytest.mark.parametrize("name", ROWS)
def test_one_launch_is_the_policy_loss_and_its_gradient(name, full, evidence, monkeypatch):
    monkeypatch.setattr(segments, "BLOCK", 32)  # so that a sequence has several
    errors, numbered = [], [*enumerate([None, *ESTIMATORS])]
    for number, estimator in numbered if full else numbered[ROWS.index(name) % 3 :: 3]:
        for seed in range(10 if full else 1):
            kl = {"kl_coef": 0.3, "kl_estimator": estimator} if estimator else {}
            terms = kl | ({"entropy_coef": 0.2} if (number + seed) % 2 else {})
            if (number + seed) % 3 and not OBJECTIVES[name].has_one_loss_per_sequence:
                terms |= {"opsm_anchor": "old_logprobs", "opsm_threshold": 0.02}
            loss, logprobs, entropy = drawn(name, 100 * seed + number, grad_divisor=4.0, **terms)
            assert loss.token_kernel is not None
            expected, by_logprob, by_entropy = evaluated(loss, logprobs, entropy)
            as_kernels, *leaves = poisoned(loss, logprobs, entropy)
            found = surrogate_loss(as_kernels, *leaves)
            gradients = torch.autograd.grad(found.loss, leaves, materialize_grads=True, allow_unused=True)
            pairs = [(gradients[0], by_logprob), (gradients[1], by_entropy), (found.log_ratios, expected.log_ratios)]
            pairs.append((found.token_losses, expected.token_losses))
            pairs += of_sequences(found, expected)
            assert (found.term_losses is None) == (expected.term_losses is None)
            further = [] if expected.term_losses is None else [(found.term_losses, expected.term_losses)]
            pairs += further
            errors += [worst(*pair) for pair in pairs]
            terms = [expected.token_losses, *(values for _, values in further)]
            size = sum(float(values.detach().abs().sum()) for values in terms)
            errors.append(abs(float(found.loss.detach()) - float(expected.loss.detach())) / (1 + size))
            again, (slope, bend) = surrogate_and_slopes(as_kernels, *(leaf.detach() for leaf in leaves))
            assert torch.equal(again.loss, found.loss.detach())
            assert torch.equal(slope, gradients[0])
            assert torch.equal(torch.zeros_like(slope) if bend is None else bend, gradients[1])
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("name", ["gspo", "gmpo", "grpo"])
def test_what_is_launched(name, monkeypatch):
    """Six of a sequence objective and four of tokens, with the 1 that the backward begins with; of torch a hundred."""
    slots = torch.tensor([0, 0, 1, 1])
    lengths, counts = torch.tensor([2, 2, 0]), torch.tensor([2.0, 2.0], dtype=torch.float64)
    sequences = Sequences(slots=slots, order=torch.arange(4), lengths=lengths, counts=counts)
    ones = torch.ones(4)
    fields = TokenFields(
        targets=slots, old_logprobs=-ones, advantages=ones, weights=ones, mask=ones > 0, sequences=sequences
    )
    leaf = torch.randn(4, 33, requires_grad=True)
    with counted(monkeypatch) as found:
        loss = PolicyLoss(LossTerms(objective=build(name)), fields)
        out = policy_gradient_loss(leaf.view_as(leaf), loss, Vocabulary.of(33), entropy=True)
        torch.autograd.grad(out.loss, leaf)
    kernels = ("token_loss_kernel",) if name == "grpo" else ("statistics_kernel", "segment_kernel", "surrogate_kernel")
    assert found == dict.fromkeys((*kernels, "gradient_kernel", "sum", "ones_like"), 1)


@pytest.mark.parametrize("bonus", [0.0, 0.2])
@pytest.mark.parametrize("name", ["reinforce_is", "grpo", "gspo_token"])
def test_the_penalty_of_chosen_tokens_is_a_divergence_from_the_anchor(name, bonus):
    """It has weights that are 0 off the chosen tokens, and no own tokens: the kernels take it."""
    loss, logprobs, entropy = drawn(name, 5, entropy_coef=bonus)
    penalty = LossTerm(name=PENALTY, kind=PENALTY, weight=0.7, on="rl", aggregation=AS_POLICY, estimator="abs")
    chosen = torch.arange(COUNT) % 3 == 0
    own = {PENALTY: TermFields(weights=loss.fields.weights * chosen)}
    fields = replace(loss.fields, terms={**loss.fields.terms, **own})
    loss = PolicyLoss(replace(loss.terms, further=(penalty, *loss.terms.further)), fields)
    assert loss.token_kernel is not None
    expected, by_logprob, _ = evaluated(loss, logprobs, entropy)
    as_kernels, *leaves = poisoned(loss, logprobs, entropy)
    found, (slope, _) = surrogate_and_slopes(as_kernels, *(leaf.detach() for leaf in leaves))
    assert max(worst(slope, by_logprob), worst(found.term_losses, expected.term_losses)) <= LIMIT
    _, without, _ = evaluated(
        PolicyLoss(replace(loss.terms, further=loss.terms.further[1:]), fields), logprobs, entropy
    )
    apart, trained = logprobs - fields.old_logprobs, chosen & fields.mask
    by_penalty = torch.where(trained, 0.7 * fields.weights * apart.sign(), 0)
    torch.testing.assert_close(by_logprob - without, by_penalty, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(expected.term_losses[0], torch.where(fields.mask, apart.abs(), 0))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("field", ["old_logprobs", "advantages", "weights", "ref_logprobs"])
def test_what_is_not_finite_at_a_trained_token_stays_visible(name, field):
    loss, logprobs, entropy = drawn(name, 3, kl_coef=0.1, kl_estimator="k3_weighted")
    at = int(loss.fields.mask.nonzero()[2])
    bad = getattr(loss.fields, field).clone()
    bad[at] = math.nan
    as_kernels, *leaves = poisoned(PolicyLoss(loss.terms, replace(loss.fields, **{field: bad})), logprobs, entropy)
    found, (slope, _) = surrogate_and_slopes(as_kernels, *(leaf.detach() for leaf in leaves))
    assert found.loss.isnan()
    broken = slope.isnan().nonzero().flatten().cpu()
    if OBJECTIVES[name].reads_sequences:  # what a sequence shares is broken in all of it
        assert (loss.fields.sequences.slots[broken] == loss.fields.sequences.slots[at]).all()
        assert len(broken) or name == "vespo"  # whose gradient stops where the product of ratios is clamped
    else:
        assert broken.tolist() == [at]


@pytest.mark.parametrize("name", [name for name in ROWS if not OBJECTIVES[name].reads_sequences])
def test_a_logprob_that_is_nan_has_a_nan_slope_under_every_objective(name):
    """Kernels take the whole row's gradient from it; reinforce and topr_token do not read the log-probability there."""
    loss, logprobs, entropy = drawn(name, 3)
    at = int(loss.fields.mask.nonzero()[2])
    loss.fields.advantages[at] = 0.0 if name == "reinforce" else 1.0
    as_kernels, *leaves = poisoned(loss, logprobs, entropy)
    logprobs, entropy = (leaf.detach().clone() for leaf in leaves)
    logprobs[at] = math.nan
    found, (slope, _) = surrogate_and_slopes(as_kernels, logprobs, entropy)
    assert found.loss.isnan()
    assert slope.isnan().nonzero().flatten().tolist() == [at]


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_loss_keeps_its_fields_no_longer_than_it_is_there(name):
    loss, logprobs, entropy = poisoned(*drawn(name, 5))
    known = weakref.ref(loss)
    found = surrogate_loss(loss, logprobs.detach(), entropy.detach())
    assert loss.is_by_token == (name == "grpo")
    gc.disable()
    try:
        del loss
        assert known() is None, gc.get_referrers(known())
    finally:
        gc.enable()
    assert found.loss.isfinite()


def test_no_token_at_all_is_a_loss_of_0():
    loss, logprobs, entropy = drawn("sapo", 1, kl_coef=0.1, kl_estimator="k1", entropy_coef=0.1)
    nothing = PolicyLoss(loss.terms, replace(loss.fields, mask=torch.zeros(COUNT, dtype=torch.bool)))
    as_kernels, *leaves = poisoned(nothing, logprobs, entropy)
    found, slopes = surrogate_and_slopes(as_kernels, *(leaf.detach() for leaf in leaves))
    assert float(found.loss) == 0.0
    assert not torch.stack([found.token_losses, *found.term_losses, *slopes]).any()
