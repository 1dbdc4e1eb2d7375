"""What kernels do on [T, K], against the torch functions that say it, in float64, on rows of every kind."""

import math
from types import SimpleNamespace

import pytest
import torch
from reader_cases import TOPK as NAMES
from reader_cases import ReaderCase

from megatron_pg.kernels import Vocabulary, topk
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.readers import ALL, read
from megatron_pg.kernels.topk import TopKReader, TopKRowStatistics, topk_logprobs
from megatron_pg.kernels.triton import topk as triton_topk
from megatron_pg.kernels.triton.topk_loss import topk_loss
from megatron_pg.kernels.triton.vocab_parallel import log2_scale

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LN2 = math.log(2.0)
DOUBLE, SINGLE = 1e-13, 2.0**-22  # what is float64 to the end, and what is rounded at it, relative to 1 + its magnitude


def vocabularies(columns: int, ranks: int, size: int) -> list[Vocabulary]:
    """Of each rank, at a temperature that float32 has."""
    groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: ranks) for r in range(ranks)]
    return [Vocabulary(columns, size, 0.75, group) for group in groups]


def rows_with_edges(size: int, width: int) -> tuple[torch.Tensor, ...]:
    """Logits [8, size] float64, targets, mask and ids: a tail of 1e-9, no id, few ids, a target named and one not, ids
    together, NaN."""
    logits = 2 * torch.randn(8, size, dtype=torch.float64)
    ids = torch.stack([torch.randperm(size)[:width] for _ in range(8)]).int()
    ids[0] = torch.arange(width)  # on one shard, if that has so many
    logits[1, ids[1].long()] += 25.0
    ids[2] = -1
    ids[3, 1:] = -1
    targets = torch.randint(0, size, (8,))
    targets[4] = ids[4, 0]
    targets[5] = next(j for j in range(size + 1) if j not in ids[5])  # if all are named, none of the vocabulary
    mask = torch.ones(8, dtype=torch.bool)
    mask[6] = False
    logits[7, 0] = math.nan
    return logits, targets, mask, ids


def in_log2(shares: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    """Shares in nats, as kernels have them, float32."""
    units = torch.ones(shares.shape[-1], dtype=torch.float64)
    units[0] = units[2] = 1 / LN2
    units[3:] = 1 / (log2_scale(vocabulary) * LN2)
    return (shares * units).float()


def in_nats(shares: torch.Tensor, vocabulary: Vocabulary) -> torch.Tensor:
    c = float(torch.tensor(log2_scale(vocabulary)))
    units = torch.ones(shares.shape[-1], dtype=torch.float64)
    units[0] = units[2] = LN2
    units[3:] = c * LN2
    return shares.double() * units


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to 1 + magnitude; both are not finite at the same places."""
    found, expected = found.detach().cpu().double(), expected.detach().cpu().double()
    assert torch.equal(found.isnan(), expected.isnan())
    infinite = expected.isinf()
    assert torch.equal(found[infinite], expected[infinite])
    known = expected.isfinite()
    return float(((found - expected).abs() / (1 + expected.abs()))[known].max()) if known.any() else 0.0


@pytest.mark.proof(
    "Kernels on a teacher's top-k tokens against torch, float64, 1 to 3 shards: within 1e-13 or a rounding"
)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize(("size", "width"), [(12, 12), (11, 4), (40, 1), (90, 33)])
def test_distributions_and_coefficients_are_those_of_torch(ranks, size, width, evidence):
    torch.manual_seed(ranks + width)
    logits, targets, mask, ids = rows_with_edges(size, width)
    columns = -(-size // ranks)
    own = vocabularies(columns, ranks, size)
    padded = torch.nn.functional.pad(logits, (0, columns * ranks - size), value=-math.inf)
    slices = padded.chunk(ranks, dim=1)
    in_nats_ = [TopKReader(v, targets, ids).statistics(z, ALL) for z, v in zip(slices, own, strict=True)]
    shares = torch.stack([in_log2(each, own[0]) for each in in_nats_])
    expected = topk.combine(in_nats(shares, own[0]), targets, ids, own[0])
    there = (targets.to(DEVICE), mask.to(DEVICE)), ids.to(DEVICE)
    found = triton_topk.combine(shares.to(DEVICE), *there, own[0])
    limits = {"head": DOUBLE, "tail": DOUBLE, "tail_totals": DOUBLE}
    for name in ("logprobs", "entropy", "totals", "head", "tail", "tail_totals"):
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert error(ours[mask], theirs[mask]) <= limits.get(name, SINGLE), name
        assert not ours[~mask].any()
    assert torch.equal(found.tail_peaks.cpu()[:7], shares[:, :7, 0].amax(dim=0))
    of_rows = [torch.randn(8, dtype=torch.float64) for _ in range(3)]
    slopes = of_rows[0], of_rows[1], torch.where(ids >= 0, torch.randn(ids.shape).double(), 0), of_rows[2]
    slopes = [each.float().double() for each in slopes]  # what the kernel reads, exactly
    known = TopKRowStatistics(*(each.cpu().double() for each in found))
    wanted = topk.coefficients(targets, ids, known, slopes, own[0])
    given = [*(s.float().to(DEVICE) for s in slopes[:2]), *(s.to(DEVICE) for s in slopes[2:])]
    factors, named = triton_topk.coefficients(*there, found, given, own[0])
    theirs = torch.stack([wanted.outside, wanted.by_x * LN2, wanted.at_target], dim=1)
    assert error(factors[mask], theirs[mask]) <= SINGLE
    assert error(named.cpu()[mask][ids[mask] >= 0], wanted.named[mask][ids[mask] >= 0]) <= SINGLE
    evidence(cases=8)


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize(("kind", "size", "width"), [(NAMES[0], 12, 12), *((kind, 11, 4) for kind in NAMES)])
def test_the_loss_and_its_slopes_are_those_of_torch(kind, size, width):
    """With tails of 0, which the floor raises, and a student's of 1e-9; NaN where a row is nobody's."""
    torch.manual_seed(width)
    case = ReaderCase.draw(kind, size, NAMES[width % len(NAMES)], rows=8, width=width)
    loss, vocabulary = case.policy_loss, Vocabulary.of(size)
    loss.fields.teacher_topk.tails[0] = 0.0
    logits = 2 * torch.randn(8, size, dtype=torch.float64)
    mask, ids = loss.fields.mask, loss.topk_ids
    logits[1, ids[1].clamp(min=0).long()] += 25.0
    targets = torch.where(mask, loss.fields.targets, 0)
    rows = read(logits, reader_of("torch", vocabulary, targets, ids))[:-1]
    outputs = [torch.where(mask if each.dim() == 1 else mask[:, None], each, 0) for each in rows]
    theirs = [each.clone().requires_grad_() for each in outputs]
    expected = loss(*theirs[:2], topk_logprobs(*theirs[2:], ids, vocabulary))
    ours = [each.clone().requires_grad_() for each in (*(each.float() for each in outputs[:2]), *outputs[2:])]
    found = topk_loss(loss, ours, ids, vocabulary)
    assert error(found.loss, expected.loss) <= 8 * SINGLE
    assert error(found.term_losses, expected.term_losses) <= SINGLE
    assert error(found.student_mass, expected.student_mass) <= SINGLE
    gradients = [torch.autograd.grad(each.loss, by) for each, by in ((found, ours), (expected, theirs))]
    for mine, wanted in zip(*gradients, strict=True):
        assert error(mine, wanted) <= SINGLE
