"""Distributions over what could be sampled, from stored logits, by every implementation, against loops in float64."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import sampling_mask_oracle
import torch
from compare import scalar_error, tensor_error
from sampling_mask_parts import Parts

from megatron_pg.batch.fields import SamplingMask, TopK
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import Vocabulary, policy_gradient_loss
from megatron_pg.kernels.label_logprobs import label_logprobs
from megatron_pg.kernels.sampling_masks import Restriction

LIMITS = {"torch": 1e-13, "triton": 2e-6}  # of float64 and float32
DTYPES = {"torch": torch.float64, "triton": torch.float32}
PADDING, TEMPERATURE = 3, 0.8

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    # of Triton's interpreter, which computes in NumPy
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]
BY_EVERY_IMPL = pytest.mark.parametrize(("impl", "inplace"), [("torch", False), ("triton", False), ("triton", True)])


def draw_logits(parts: Parts, impl: str) -> torch.Tensor:
    """Poison in masked rows, and likely tokens in the columns of padding."""
    logits = 2 * torch.randn(len(parts.sets), parts.size + PADDING, dtype=DTYPES[impl])
    logits[~parts.fields.mask] = math.nan
    logits[:, parts.size :] = 50.0
    return logits


def vocabulary_of(parts: Parts, columns: int, group=None) -> Vocabulary:
    return Vocabulary.of(columns, temperature=TEMPERATURE, vocab_size=parts.size, tp_group=group)


def run(parts: Parts, logits: torch.Tensor, policy_loss, impl: str, *, inplace: bool = False, entropy: bool = False):
    leaf = logits.clone().requires_grad_()
    rows = leaf * 1
    out = policy_gradient_loss(
        rows, policy_loss, vocabulary_of(parts, rows.shape[1]), impl=impl, inplace=inplace, entropy=entropy
    )
    if not inplace:
        assert torch.equal(rows.detach().nan_to_num(7.0), logits.nan_to_num(7.0))
    out.loss.backward()
    return out, leaf.grad


@BY_EVERY_IMPL
@pytest.mark.parametrize("size", [9, 700])
@pytest.mark.parametrize("sampling_mask_entropy", ["full", "kept"])
@pytest.mark.parametrize("bonus", [False, True])
def test_loss_and_gradient_are_those_of_the_kept_tokens(impl, inplace, size, sampling_mask_entropy, bonus):
    torch.manual_seed(size)
    parts = Parts.draw(size, (0, 1, 2, 5, 3, 0, 7, -1, 300))
    logits = draw_logits(parts, impl)
    policy_loss = parts.policy_loss(sampling_mask_entropy, bonus=bonus)
    out, gradient = run(parts, logits, policy_loss, impl, inplace=inplace, entropy=bonus)
    loss, logprobs, entropies, wanted = parts.expected(
        logits.double(), sampling_mask_entropy, temperature=TEMPERATURE, bonus=bonus
    )
    limit = LIMITS[impl]
    assert scalar_error(float(out.loss.detach()), loss, 10.0) <= limit
    assert tensor_error(out.logprobs, logprobs) <= limit
    assert out.entropy is None if not bonus else tensor_error(out.entropy, entropies) <= limit
    assert tensor_error(gradient, wanted) <= limit
    if not bonus:
        assert not gradient[outside(parts, gradient)].any(), "a gradient outside the sampling mask"


def outside(parts: Parts, table: torch.Tensor) -> torch.Tensor:
    """Where a row with a set has nothing to do with its loss, and all of a masked row."""
    found = torch.zeros_like(table, dtype=torch.bool)
    for t, (own, is_trained) in enumerate(zip(parts.sets, parts.fields.mask.tolist(), strict=True)):
        found[t] = bool(own) or not is_trained
        found[t, own if is_trained else []] = False
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sampling_mask_entropy", ["full", "kept"])
@pytest.mark.parametrize("inplace", [False, True])
def test_a_gradient_of_half_precision_is_rounded_once(dtype, sampling_mask_entropy, inplace):
    torch.manual_seed(6)
    parts = Parts.draw(37)
    logits = draw_logits(parts, "triton").to(dtype)
    out, gradient = run(parts, logits, parts.policy_loss(sampling_mask_entropy), "triton", inplace=inplace)
    _, logprobs, _, wanted = parts.expected(logits.double(), sampling_mask_entropy, temperature=TEMPERATURE)
    assert tensor_error(out.logprobs, logprobs) <= 2e-6
    half = torch.finfo(dtype).eps / 2 + 2.0**-16 * (dtype == torch.bfloat16)  # the interpreter cuts bfloat16 off
    bound = wanted.abs() * 2 * half + 1e-6 + torch.finfo(dtype).tiny
    assert ((gradient.double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize("sampling_mask_entropy", ["full", "kept"])
@pytest.mark.parametrize(("impl", "tp"), [("torch", 2), ("torch", 4), ("triton", 2)])
def test_ids_may_lie_on_any_rank(impl, sampling_mask_entropy, tp, monkeypatch):
    torch.manual_seed(5)
    parts = Parts.draw(41)
    logits = draw_logits(parts, impl)  # 44 columns: of four ranks the last has padding alone but for 8
    wanted = parts.expected(logits.double(), sampling_mask_entropy, temperature=TEMPERATURE)

    def of_rank(piece: torch.Tensor, group):
        leaf = piece.clone().requires_grad_()
        vocabulary = vocabulary_of(parts, piece.shape[1], group)
        out = policy_gradient_loss(leaf * 1, parts.policy_loss(sampling_mask_entropy), vocabulary, impl=impl)
        out.loss.backward()
        return out.loss.detach(), out.logprobs, leaf.grad

    found = on_ranks(of_rank, logits.chunk(tp, dim=1), monkeypatch)
    assert all(torch.equal(loss, found[0][0]) and torch.equal(logprobs, found[0][1]) for loss, logprobs, _ in found)
    assert scalar_error(float(found[0][0]), wanted[0], 10.0) <= LIMITS[impl]
    assert tensor_error(torch.cat([gradient for *_, gradient in found], dim=1), wanted[3]) <= LIMITS[impl]


def on_ranks(function, pieces, monkeypatch) -> list:
    """`function(piece, group)` of every rank one after the other, for an interpreter is useless for threads: each runs
    once for its shares."""
    shares = []
    monkeypatch.setattr(
        Vocabulary, "gather", lambda _, mine: shares.append(mine) or mine.expand(len(pieces), *mine.shape)
    )
    groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: len(pieces)) for r in range(len(pieces))]
    for piece, group in zip(pieces, groups, strict=True):
        function(piece, group)
    assert len(shares) == len(pieces), "one exchange"
    whole = torch.stack(shares)
    monkeypatch.setattr(Vocabulary, "gather", lambda *_: whole)
    return [function(piece, group) for piece, group in zip(pieces, groups, strict=True)]


@pytest.mark.parametrize("whole_entropy", [False, True])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_one_exchange_of_four_numbers_a_row_or_eight(impl, whole_entropy, monkeypatch):
    shapes = []
    gather = Vocabulary.gather
    monkeypatch.setattr(Vocabulary, "gather", lambda self, shares: shapes.append(shares.shape) or gather(self, shares))
    parts = Parts.draw(20)
    policy_loss = parts.policy_loss("full" if whole_entropy else "kept")
    run(parts, draw_logits(parts, impl), policy_loss, impl, entropy=True)
    assert [shape.numel() for shape in shapes] == [len(parts.sets) * (8 if whole_entropy else 4)]


# ---- Laws ----


@BY_EVERY_IMPL
def test_a_sampling_mask_of_all_tokens_is_none(impl, inplace):
    parts = Parts.draw(30, (-1, -1, -1))
    logits = draw_logits(parts, impl)
    with_sets = run(parts, logits, parts.policy_loss("kept"), impl, inplace=inplace, entropy=True)
    plain = dataclasses.replace(parts.policy_loss("kept"), fields=dataclasses.replace(parts.fields, sampling_mask=None))
    without = run(parts, logits, plain, impl, inplace=inplace, entropy=True)
    limit = 4 * torch.finfo(DTYPES[impl]).eps  # sums in another order
    assert tensor_error(with_sets[1], without[1]) <= limit
    assert tensor_error(with_sets[0].logprobs, without[0].logprobs) <= limit
    assert tensor_error(with_sets[0].entropy, without[0].entropy) <= limit


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_token_that_was_the_only_one_is_certain_and_teaches_nothing(impl):
    parts = Parts.draw(30, (1, 1, 1))
    out, gradient = run(parts, draw_logits(parts, impl), parts.policy_loss("kept"), impl, entropy=True)
    limit = {"torch": 0.0, "triton": 5e-7}[impl]  # a GPU's exponential and logarithm are no inverses
    assert out.logprobs.abs().max() <= limit
    assert out.entropy.abs().max() <= limit
    slopes = parts.fields.weights * parts.fields.advantages / TEMPERATURE
    assert gradient.abs().max() <= limit * float(slopes.abs().max())


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_logits_outside_the_sampling_mask_are_not_looked_at(impl):
    parts = Parts.draw(40)
    logits = draw_logits(parts, impl)
    _, before = run(parts, logits, parts.policy_loss("kept"), impl)
    for t, own in enumerate(parts.sets):
        outside = [j for j in range(parts.size) if own and j not in own]
        logits[t, outside] = torch.randn(len(outside), dtype=logits.dtype) * 100
    _, after = run(parts, logits, parts.policy_loss("kept"), impl)
    assert torch.equal(before, after)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_target_outside_its_sampling_mask_is_seen(impl):
    parts = Parts.draw(30, (3, 3, 3))
    parts.fields.targets[1] = next(j for j in range(30) if j not in parts.sets[1])
    out, _ = run(parts, draw_logits(parts, impl), parts.policy_loss("kept"), impl)
    assert not torch.isfinite(out.loss)
    assert torch.isfinite(out.logprobs).tolist() == [True, False, True]


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_sampling_mask_without_a_token_of_the_vocabulary_is_seen(impl):
    parts = Parts.draw(30, (3, 3, 3))
    parts.fields.sampling_mask.ids[3:6] = torch.tensor([30, 31, 32])  # padding
    out, _ = run(parts, draw_logits(parts, impl), parts.policy_loss("kept"), impl)
    assert not torch.isfinite(out.logprobs[1])


@pytest.mark.parametrize("impl", ["torch", "triton"])
@pytest.mark.parametrize("whole_entropy", [False, True])
def test_log_probabilities_alone_are_the_same(impl, whole_entropy):
    torch.manual_seed(2)
    parts = Parts.draw(50, (0, 1, 2, 5, 3, 0, -1))
    rows = parts.fields.mask.nonzero()[:, 0]
    logits = draw_logits(parts, impl)[rows]
    restriction = Restriction(sampling_mask=parts.fields.sampling_mask.at(rows), whole_entropy=whole_entropy)
    vocabulary = vocabulary_of(parts, logits.shape[1])
    leaf = logits.clone().requires_grad_()
    found = label_logprobs(leaf * 1, parts.fields.targets[rows], vocabulary, impl=impl, restriction=restriction)
    wanted = parts.expected(draw_at(logits, rows, parts), "full" if whole_entropy else "kept", temperature=TEMPERATURE)
    assert tensor_error(found[0], wanted[1][rows]) <= LIMITS[impl]
    assert tensor_error(found[1], wanted[2][rows]) <= LIMITS[impl]
    found[0].sum().backward()
    assert torch.isfinite(leaf.grad).all()


def draw_at(logits: torch.Tensor, rows: torch.Tensor, parts: Parts) -> torch.Tensor:
    return torch.full((len(parts.sets), logits.shape[1]), math.nan, dtype=torch.float64).index_copy_(
        0, rows, logits.double()
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_on_the_policy_that_sampled_the_ratio_is_1(impl, tp, monkeypatch):
    """The sampler keeps 0.95 of the probability and reports the rest, in float64; without its sets the mean ratio is
    what it kept."""
    torch.manual_seed(7)
    rows, size = 8, 300
    logits = 2.5 * torch.randn(rows, size)
    sets = [sampling_mask_oracle.kept_by_top_p(row, 0.95, TEMPERATURE) for row in logits.double().tolist()]
    reported = [
        sampling_mask_oracle.log_probabilities(z, s, TEMPERATURE) for z, s in zip(logits.tolist(), sets, strict=True)
    ]
    targets = torch.tensor([s[len(s) // 3] for s in sets])
    old = torch.tensor([r[int(y)] for r, y in zip(reported, targets, strict=True)])
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    restriction = Restriction(
        sampling_mask=SamplingMask.of(torch.tensor([j for s in sets for j in s], dtype=torch.int32), offsets),
        whole_entropy=False,
    )

    def of_rank(piece: torch.Tensor, group):
        vocabulary = Vocabulary.of(piece.shape[1], temperature=TEMPERATURE, tp_group=group)
        return label_logprobs(piece.clone(), targets, vocabulary, impl=impl, restriction=restriction)[0]

    for found in on_ranks(of_rank, logits.chunk(tp, dim=1), monkeypatch):
        assert (found.double() - old).exp().sub(1).abs().max() <= 2e-5
    whole = (logits / TEMPERATURE).log_softmax(dim=1).gather(1, targets[:, None])[:, 0]
    assert 0.94 <= float((whole.double() - old).exp().mean()) <= 0.97


def test_rows_are_taken_with_their_sets():
    sampling_mask = SamplingMask.of(torch.tensor([4, 9, 2], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    assert sampling_mask.table().tolist() == [[4, 9], [-1, -1], [2, -1]]
    assert sampling_mask.at(torch.tensor([2, 0])).table().tolist() == [[2, -1], [4, 9]]
    assert sampling_mask.at(slice(1, 3)).table().tolist() == [[-1, -1], [2, -1]]


def test_sets_of_another_number_of_rows_are_refused():
    sampling_mask = SamplingMask.of(torch.tensor([4, 9, 2], dtype=torch.int32), torch.tensor([0, 2, 2, 3]))
    with pytest.raises(ValueError, match="the restriction has 3 rows for 2 targets"):
        label_logprobs(
            torch.randn(2, 12),
            torch.tensor([4, 2]),
            Vocabulary.of(12),
            impl="torch",
            restriction=Restriction(sampling_mask=sampling_mask),
        )
    for offsets in ([0, 2], [1, 3], [0, 3, 2, 3], []):
        with pytest.raises(ValueError, match="offsets do not rise from 0 to 3"):
            SamplingMask.of(sampling_mask.ids, torch.tensor(offsets, dtype=torch.int64))


def test_a_teachers_likeliest_tokens_and_a_misshapen_sampling_mask_are_refused():
    parts = Parts.draw(30, (3, 3, 3))
    policy_loss = parts.policy_loss("kept")
    teacher = TopK(
        ids=torch.ones(3, 2, dtype=torch.int32), logprobs=torch.zeros(3, 2), tails=torch.zeros(3, dtype=torch.float64)
    )
    terms = (LossTerm(name="t", kind="topk_forward_kl", tail_floor=1e-6),)
    both = dataclasses.replace(
        policy_loss,
        terms=dataclasses.replace(policy_loss.terms, further=terms),
        fields=dataclasses.replace(parts.fields, teacher_topk=teacher),
    )
    logits = torch.randn(3, 33)
    with pytest.raises(ValueError, match="is over the whole vocabulary, and the log-probabilities of this micro-batch"):
        policy_gradient_loss(logits, both, Vocabulary.of(33), impl="torch")
    short = dataclasses.replace(
        policy_loss, fields=dataclasses.replace(parts.fields, sampling_mask=parts.fields.sampling_mask.at(slice(0, 2)))
    )
    with pytest.raises(ValueError, match=r"sampling_mask.starts has shape \(2,\) for \(3,\) targets"):
        policy_gradient_loss(logits, short, Vocabulary.of(33), impl="torch")
