"""Distributions over what could be sampled: properties of every implementation. Values and gradients:
`test_readers`."""

import dataclasses

import pytest
import sampling_mask_oracle
import torch
from compare import tensor_error
from reader_cases import ReaderCase

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import SamplingMask, TopK
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, policy_gradient_loss
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.lm_head import Head, logprobs_and_entropy, policy_gradient_head_loss, products
from megatron_pg.objectives import objective_of

DTYPES = {"torch": torch.float64, "triton": torch.float32}
PADDING, TEMPERATURE = 3, 0.8

pytestmark = pytest.mark.usefixtures("on_the_device", "small_tiles")
BY_EVERY_IMPL = pytest.mark.parametrize(("impl", "inplace"), [("torch", False), ("triton", False), ("triton", True)])


def draw_logits(case: ReaderCase, impl: str) -> torch.Tensor:
    """Poison in masked rows, and likely tokens in the columns of padding."""
    logits = 2 * torch.randn(len(case.sets), case.size + PADDING, dtype=DTYPES[impl])
    logits[~case.policy_loss.fields.mask] = torch.nan
    logits[:, case.size :] = 50.0
    return logits


def run(case: ReaderCase, logits: torch.Tensor, impl: str, *, inplace: bool = False):
    leaf = logits.clone().requires_grad_()
    vocabulary = Vocabulary.of(logits.shape[1], temperature=TEMPERATURE, vocab_size=case.size)
    out = policy_gradient_loss(leaf * 1, case.policy_loss, vocabulary, impl=impl, inplace=inplace, entropy=True)
    out.loss.backward()
    return out, leaf.grad


def sets_of(*counts: int, reader: str = "mask_kept") -> ReaderCase:
    return ReaderCase.draw(reader, 30, counts=counts)


@pytest.mark.parametrize("reader", ["mask_full", "mask_kept"])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_one_exchange_of_four_numbers_a_row_or_eight(impl, reader, monkeypatch):
    shapes = []
    gather = Vocabulary.gather
    monkeypatch.setattr(Vocabulary, "gather", lambda self, shares: shapes.append(shares.shape) or gather(self, shares))
    case = sets_of(0, 1, 2, 5, reader=reader)
    run(case, draw_logits(case, impl), impl)
    assert [shape.numel() for shape in shapes] == [4 * (8 if reader == "mask_full" else 4)]


@BY_EVERY_IMPL
def test_a_sampling_mask_of_all_tokens_is_none(impl, inplace):
    case = sets_of(-1, -1, -1)
    logits = draw_logits(case, impl)
    with_sets = run(case, logits, impl, inplace=inplace)
    fields = dataclasses.replace(case.policy_loss.fields, sampling_mask=None)
    plain = dataclasses.replace(case, policy_loss=dataclasses.replace(case.policy_loss, fields=fields))
    without = run(plain, logits, impl, inplace=inplace)
    limit = 4 * torch.finfo(DTYPES[impl]).eps  # sums in another order
    assert tensor_error(with_sets[1], without[1]) <= limit
    assert tensor_error(with_sets[0].logprobs, without[0].logprobs) <= limit
    assert tensor_error(with_sets[0].entropy, without[0].entropy) <= limit


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_token_that_was_the_only_one_is_certain_and_teaches_nothing(impl):
    case = sets_of(1, 1, 1)
    out, gradient = run(case, draw_logits(case, impl), impl)
    limit = {"torch": 0.0, "triton": 5e-7}[impl]  # a GPU's exponential and logarithm are no inverses
    assert out.logprobs.abs().max() <= limit
    assert out.entropy.abs().max() <= limit
    fields = case.policy_loss.fields
    slopes = fields.weights * fields.advantages / TEMPERATURE
    assert gradient.abs().max() <= limit * float(slopes.abs().max())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_logits_outside_the_sampling_mask_are_not_read(impl):
    case = ReaderCase.draw("mask_kept", 40)
    logits = draw_logits(case, impl)
    _, before = run(case, logits, impl)
    for t, kept in enumerate(case.sets):
        outside = [j for j in range(case.size) if kept and j not in kept]
        assert not before[t, outside].any()
        logits[t, outside] = torch.randn(len(outside), dtype=logits.dtype) * 100
    _, after = run(case, logits, impl)
    assert torch.equal(before, after)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_target_outside_its_sampling_mask_is_seen(impl):
    case = sets_of(3, 3, 3)
    case.policy_loss.fields.targets[1] = next(j for j in range(30) if j not in case.sets[1])
    out, _ = run(case, draw_logits(case, impl), impl)
    assert not torch.isfinite(out.loss)
    assert torch.isfinite(out.logprobs).tolist() == [True, False, True]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_sampling_mask_without_a_token_of_the_vocabulary_is_seen(impl):
    case = sets_of(3, 3, 3)
    case.policy_loss.fields.sampling_mask.ids[3:6] = torch.tensor([30, 31, 32])  # padding
    out, _ = run(case, draw_logits(case, impl), impl)
    assert not torch.isfinite(out.logprobs[1])


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_on_the_policy_that_sampled_the_ratio_is_1(impl, monkeypatch):
    """The sampler keeps 0.95 of the probability of float32 logits and reports the log-probabilities of the rest, in
    float64."""
    torch.manual_seed(8)
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 5)
    rows, columns = 12, 200
    hidden, weight = torch.randn(rows, 16), torch.randn(columns, 16)
    logits = (hidden.double() @ weight.double().t()).tolist()
    sets = [sampling_mask_oracle.kept_by_top_p(row, 0.95, TEMPERATURE) for row in logits]
    targets = torch.tensor([s[len(s) // 2] for s in sets])
    probabilities = [
        sampling_mask_oracle.log_probabilities(z, s, TEMPERATURE) for z, s in zip(logits, sets, strict=True)
    ]
    reported = [of_row[int(y)] for of_row, y in zip(probabilities, targets, strict=True)]
    old, offsets = torch.tensor(reported), torch.tensor([0, *map(len, sets)]).cumsum(0)
    sampling_mask = SamplingMask.of(torch.tensor([j for s in sets for j in s], dtype=torch.int32), offsets)
    restriction = Restriction(sampling_mask=sampling_mask, whole_entropy=False)
    vocabulary = Vocabulary.of(columns, temperature=TEMPERATURE)
    stored, _ = label_logprobs(hidden @ weight.t(), targets, vocabulary, impl=impl, restriction=restriction)
    assert (stored.double() - old).exp().sub(1).abs().max() <= 2e-5
    whole, _ = label_logprobs(hidden @ weight.t(), targets, vocabulary, impl=impl)
    assert 0.94 <= float((whole.double() - old).exp().mean()) <= 0.97
    wanted, options = torch.tensor([1, 2, 3, 5, 8, 11]), {"temperature": TEMPERATURE, "impl": impl}
    found, _ = logprobs_and_entropy(hidden, weight, targets, rows=wanted, restriction=restriction, **options)
    assert (found.double() - old[wanted]).exp().sub(1).abs().max() <= 2e-5
    ones = torch.ones(rows)
    known = {"targets": targets, "old_logprobs": old, "sampling_mask": sampling_mask}
    fields = TokenFields(**known, mask=ones > 0, weights=ones / rows, advantages=ones)
    policy_loss = PolicyLoss(LossTerms(objective=objective_of("reinforce_is")), fields)
    for mode in ("forward", "recompute"):
        leaf, head = weight.clone().requires_grad_(), Head(mode=mode, impl=impl)
        out = policy_gradient_head_loss(hidden, leaf, policy_loss, vocabulary, head)
        assert out.log_ratios.double().exp().sub(1).abs().max() <= 2e-5
        assert abs(float(out.loss.detach()) + 1) <= 2e-5  # the mean ratio, and nothing of it lost


def test_rows_are_taken_with_their_sets():
    sampling_mask = SamplingMask.of(torch.tensor([4, 9, 2], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    assert sampling_mask.table().tolist() == [[4, 9], [-1, -1], [2, -1]]
    assert sampling_mask.at(torch.tensor([2, 0])).table().tolist() == [[2, -1], [4, 9]]
    assert sampling_mask.at(slice(1, 3)).table().tolist() == [[-1, -1], [2, -1]]


def test_sets_of_another_number_of_rows_are_refused():
    sampling_mask = SamplingMask.of(torch.tensor([4, 9, 2], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    restriction, targets = Restriction(sampling_mask=sampling_mask), torch.tensor([4, 2])
    with pytest.raises(ValueError, match="the restriction has 3 rows for 2 targets"):
        label_logprobs(torch.randn(2, 12), targets, Vocabulary.of(12), impl="torch", restriction=restriction)
    for offsets in ([0, 2], [1, 3], [0, 3, 2, 3], []):
        with pytest.raises(ValueError, match="offsets do not rise from 0 to 3"):
            SamplingMask.of(sampling_mask.ids, torch.tensor(offsets, dtype=torch.int64))


def test_a_teachers_likeliest_tokens_and_a_misshapen_sampling_mask_are_refused():
    policy_loss = sets_of(3, 3, 3).policy_loss
    ids, tails = torch.ones(3, 2, dtype=torch.int32), torch.zeros(3, dtype=torch.float64)
    teacher = TopK(ids=ids, logprobs=torch.zeros(3, 2), tails=tails)
    terms = (LossTerm(name="t", kind="topk_forward_kl", tail_floor=1e-6),)
    fields, logits = policy_loss.fields, torch.randn(3, 33)
    both = PolicyLoss(
        dataclasses.replace(policy_loss.terms, further=terms), dataclasses.replace(fields, teacher_topk=teacher)
    )
    with pytest.raises(ValueError, match="is over the whole vocabulary, and the log-probabilities of this micro-batch"):
        policy_gradient_loss(logits, both, Vocabulary.of(33), impl="torch")
    two_rows = dataclasses.replace(fields, sampling_mask=fields.sampling_mask.at(slice(0, 2)))
    short = PolicyLoss(policy_loss.terms, two_rows)
    with pytest.raises(ValueError, match=r"sampling_mask.starts has shape \(2,\) for \(3,\) targets"):
        policy_gradient_loss(logits, short, Vocabulary.of(33), impl="torch")
