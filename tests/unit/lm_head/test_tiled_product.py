"""Statistics and gradients that the head's product ends in, against float64 formulas; and which heads keep chunks of
logits."""

import math
import random
from dataclasses import dataclass

import pytest
import threads
import torch
from launch_count import count_kernels
from loss_terms import kl_and_entropy
from objective_parts import NUMBERS, build, sequences_of

from megatron_pg.batch import TokenFields
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary
from megatron_pg.lm_head import Head, logprobs_and_entropy, policy_gradient_head_loss, products
from megatron_pg.lm_head.tiled_product import Tiles

CUDA = torch.cuda.is_available()
DTYPES = [torch.bfloat16, torch.float16] if CUDA else [torch.float32]  # the interpreter gets products of others wrong
ENTROPY_COEF = 0.05
pytestmark = pytest.mark.usefixtures("on_the_device")


@dataclass(frozen=True)
class Case:
    sizes: tuple[int, ...] = (9, 1, 17, 13)  # of the documents
    width: int = 40
    columns: int = 96
    valid: int = 85
    temperature: float = 0.7
    objective: str = "gspo"
    bonus: bool = True
    masked: float = 0.3
    ranks: int = 1
    scale: float = 1.0  # of the hidden states
    softcap: float | None = None
    seed: int = 0


def random_case(rng: random.Random) -> Case:
    columns, ranks = rng.choice([24, 96, 120]), 1 if CUDA else rng.choice([1, 1, 3])
    return Case(
        sizes=tuple(rng.choice([1, 3, 16, 29]) for _ in range(rng.randint(1, 3))),
        width=rng.choice([8, 40]),
        columns=columns,
        valid=rng.choice([columns, columns - 1, columns // 2 + 1, 7]),
        temperature=rng.choice([0.7, 1.0, 2.0]),
        objective=rng.choice(["gspo", "gmpo", "reinforce"]),
        bonus=rng.random() < 0.5,
        masked=rng.choice([0.0, 0.4, 0.9]),
        ranks=ranks,
        scale=rng.choice([1.0, 3.0]),
        softcap=rng.choice([None, None, 2.5]),
        seed=rng.randrange(2**30),
    )


def make(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, TokenFields]:
    """Hidden states, weight and fields; what masked rows hold must not matter. A document has one advantage."""
    torch.manual_seed(case.seed)
    count = sum(case.sizes)
    mask = torch.rand(count) >= case.masked
    hidden = torch.where(mask[:, None], case.scale * torch.randn(count, case.width), math.nan)
    weight = torch.randn(case.columns, case.width) * case.width**-0.5
    slots = torch.repeat_interleave(torch.arange(len(case.sizes)), torch.tensor(case.sizes))
    trained = [int(mask[slots == s].sum()) for s in range(len(case.sizes))]
    fields = TokenFields(
        targets=torch.where(mask, torch.randint(0, case.valid, (count,)), -100),
        old_logprobs=-math.log(case.valid) - torch.rand(count),
        advantages=torch.randn(len(case.sizes))[slots],
        weights=torch.rand(len(case.sizes))[slots],
        mask=mask,
        sequences=sequences_of(case.sizes, trained),
    )
    return hidden.to(dtype), weight.to(dtype), fields


def expected(case: Case, hidden: torch.Tensor, weight: torch.Tensor, fields: TokenFields) -> tuple:
    """In float64, from the papers' formulas, by autograd over the trained rows: loss, log-probabilities, entropies and
    both gradients."""
    mask, slots = fields.mask, fields.sequences.slots[fields.mask]
    leaves = [hidden[mask].double().requires_grad_(), weight.double().requires_grad_()]
    logits = (leaves[0] @ leaves[1].t())[:, : case.valid]
    logits = logits if case.softcap is None else case.softcap * (logits / case.softcap).tanh()
    log_p = (logits / case.temperature).log_softmax(1)
    logprobs = log_p.gather(1, fields.targets[mask][:, None])[:, 0]
    entropy = -(log_p.exp() * log_p).sum(1)
    old, advantages, weights = (v[mask].double() for v in (fields.old_logprobs, fields.advantages, fields.weights))
    losses, log_ratios = -advantages * logprobs, logprobs - old  # of reinforce
    for slot in slots.unique():
        at = slots == slot
        a, log_ratio = advantages[at][0], log_ratios[at]
        if case.objective == "gspo":  # 2507.18071
            ratio = log_ratio.mean().exp()
            clipped = ratio.clamp(1 - NUMBERS["clip_eps_low"], 1 + NUMBERS["clip_eps_high"])
            losses = torch.where(at, -torch.minimum(ratio * a, clipped * a), losses)
        elif case.objective == "gmpo":  # 2507.20673
            bounded = log_ratio.clamp(-NUMBERS["eps_low"], NUMBERS["eps_high"])
            least = torch.minimum(log_ratio, bounded) if a >= 0 else torch.maximum(log_ratio, bounded)
            losses = torch.where(at, -a * least.mean().exp(), losses)
    loss = (weights * losses).sum() - (ENTROPY_COEF * weights * entropy).sum() * case.bonus
    loss.backward()
    of_hidden = torch.zeros(hidden.shape, dtype=torch.float64)
    of_hidden[mask] = leaves[0].grad
    return loss.detach(), logprobs.detach(), entropy.detach(), of_hidden, leaves[1].grad


def run(case: Case, hidden: torch.Tensor, weight: torch.Tensor, fields: TokenFields, **head: object) -> tuple:
    """Loss and gradients of each rank, which has its part of the weight; `main_grad` has the weight's in float32."""
    further = kl_and_entropy(entropy_coef=ENTROPY_COEF) if case.bonus else ()
    policy_loss = PolicyLoss(LossTerms(objective=build(case.objective), further=further), fields)

    def work(rank: int) -> tuple:
        group = threads.subgroup(lambda r: 0, case.ranks, rank) if case.ranks > 1 else None
        leaves = [each.detach().clone().requires_grad_() for each in (hidden, weight.chunk(case.ranks)[rank])]
        vocabulary = Vocabulary.of(
            len(leaves[1]), temperature=case.temperature, vocab_size=case.valid, softcap=case.softcap, tp_group=group
        )
        total = torch.zeros(leaves[1].shape)
        how = Head(mode="recompute", main_grad=total, **head)
        out = policy_gradient_head_loss(*leaves, policy_loss, vocabulary, how, entropy=True)
        out.loss.backward()
        return out, leaves[0].grad, total

    found = threads.run(case.ranks, work) if case.ranks > 1 else [work(0)]
    return *found[0][:2], torch.cat([each[2] for each in found])


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Relative to a gradient's norm; where 1 - p or a ratio leaves almost none, it has fewer digits."""
    return float((found.double() - wanted).norm() / wanted.norm().clamp(min=1e-2))


def check(case: Case, dtype: torch.dtype) -> float:
    """The worst error in units of its tolerance: of values 1e-5, of gradients the rounding of their dtype."""
    known = make(case, dtype)
    loss, logprobs, entropy, *gradients = expected(case, *known)
    out, *found = run(case, *known)
    mask = known[2].mask
    values = (out.loss.detach(), loss), (out.logprobs[mask], logprobs), (out.entropy[mask], entropy)
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    errors = [
        float((ours.double() - wanted).abs().max()) / (1e-5 * case.scale) if wanted.numel() else 0
        for ours, wanted in values
    ]
    errors += [error(ours, wanted) / rounding for ours, wanted in zip(found, gradients, strict=True)]
    assert max(errors) <= 1, (case, dtype, errors)
    assert not found[0][~mask].any(), case
    assert not found[1][case.valid :].any(), case
    return max(errors)


@pytest.fixture(autouse=True)
def launches(monkeypatch):
    """What is launched, by one thread at a time, as the interpreter asks for. Every case has several programs, tiles
    and blocks; tiles on a GPU are real ones."""
    monkeypatch.setattr(products, "ROWS", 8)
    monkeypatch.setattr(products, "block_rows", lambda _, chunk: max(24 // chunk, 1) * chunk)
    if not CUDA:
        tiles = Tiles(rows=16, columns=32, depth=16, group=2, warps=4, stages=2)
        monkeypatch.setattr(Tiles, "of_width", lambda *_, **__: tiles)
    return count_kernels(monkeypatch)


@pytest.mark.proof("Fused head: statistics and gradients in the epilogue of a product, against float64")
@pytest.mark.parametrize("dtype", DTYPES)
def test_losses_and_gradients_are_those_of_the_formulas(dtype, full, evidence):
    rng, count = random.Random(f"tiles{dtype}"), 200 if full else 4
    fixed = [
        Case(),
        Case(objective="gmpo", columns=120, valid=115, ranks=1 if CUDA else 3),
        Case(objective="reinforce", bonus=False, scale=30.0),
    ]
    worst = max(check(case, dtype) for case in [*fixed, *(random_case(rng) for _ in range(count))])
    evidence(cases=count + len(fixed), worst=worst, tolerance=1.0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_far_and_equal_logits_lose_no_digits(dtype):
    """Offsets of ±2^20, columns 2^20 below the others (a whole tile of them), and rows of equal logits. The interpreter
    has no fused multiply-add, and rounds no product at this temperature."""
    hidden = torch.tensor([[1, 0, 0], [1, 1, 0], [1, -1, 0], [-1, 1, 1], [0, 0, 0]]).repeat(7, 1)
    hidden = torch.nn.functional.pad(hidden, (0, 5)).to(dtype)
    weight = torch.zeros(96, 8)
    weight[:, 0], weight[:, 1], weight[32:70, 2] = 1024, torch.arange(96) / 8, -1024
    weight, targets = weight.to(dtype), torch.arange(35) * 19 % 96
    hidden[:, [0, 2]] *= 1024
    leaves, exact = (
        [each.to(kind, copy=True).requires_grad_() for each in (hidden, weight)] for kind in (dtype, torch.float64)
    )
    temperature = math.log2(math.e)
    found = logprobs_and_entropy(*leaves, targets, temperature=temperature)
    log_p = (exact[0] @ exact[1].t() / temperature).log_softmax(1)
    wanted = log_p.gather(1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(1)
    for ours, theirs, tolerance in zip(found, wanted, (4e-7, 2e-6), strict=True):
        assert ((ours.double() - theirs).abs() <= tolerance * theirs.abs().clamp(min=4)).all()
    torch.stack(found).sum().backward()
    torch.stack(wanted).sum().backward()
    rounding = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    assert max(error(a.grad, b.grad) for a, b in zip(leaves, exact, strict=True)) <= rounding


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["hidden", "target", "other"])
def test_nan_reaches_the_rows_that_read_it(where, dtype):
    hidden, weight, targets = torch.randn(40, 16).to(dtype), torch.randn(96, 16).to(dtype), torch.arange(40) * 2
    if where == "hidden":
        hidden[21, 3] = math.nan
    else:
        weight[0 if where == "target" else 95, 3] = math.nan
    hidden.requires_grad_()
    logprobs, entropy = logprobs_and_entropy(hidden, weight, targets)
    (logprobs + entropy).sum().backward()
    is_bad = (torch.arange(40) == 21) | (where != "hidden")
    for values in (logprobs, entropy, hidden.grad.sum(1)):
        assert torch.equal(values.isnan(), is_bad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_has_the_same_bits_wherever_it_is(dtype):
    """So a ratio of equal policies is exactly 1, whichever rows each pass selects."""
    hidden, weight, targets = torch.randn(70, 16).to(dtype), torch.randn(96, 16).to(dtype), torch.arange(70)
    rows = torch.arange(3, 70, 2)
    whole, some = (logprobs_and_entropy(hidden, weight, targets, rows=each) for each in (None, rows))
    for all_rows, chosen in zip(whole, some, strict=True):
        assert torch.equal(all_rows[rows], chosen)


WEIGHT = torch.randn(96, 16)
KEPT = {
    "bfloat16 on a CPU": (WEIGHT.bfloat16(), {}),
    "split": (WEIGHT, {"backward": "split"}),
    "torch": (WEIGHT, {"impl": "torch"}),
    "columns": (WEIGHT[:90], {}),
    "width": (torch.randn(96, 12), {}),
    "alignment": (torch.randn(96 * 16 + 1)[1:].view(96, 16), {}),
    "strides": (torch.randn(96, 32)[:, :16], {}),
}


@pytest.mark.skipif(CUDA, reason="of float32, which the interpreter takes")
@pytest.mark.parametrize("why", [None, *KEPT])
def test_other_heads_have_stored_logits(why, launches):
    weight, head = (WEIGHT, {}) if why is None else KEPT[why]
    rows = 30 if why is None else 5  # the interpreter is slow
    hidden = torch.randn(rows, weight.shape[1]).to(weight.dtype).requires_grad_()
    found = logprobs_and_entropy(hidden, weight, torch.arange(rows), **head)
    found[0].sum().backward()
    assert launches["product_kernel"] == (4 if why is None else 0)  # two blocks of 24 rows, forward and backward
    assert launches["merge_kernel"] == (2 if why is None else 0)
    assert hidden.grad.isfinite().all()


@pytest.mark.skipif(CUDA, reason="ranks are threads, on a CPU only")
@pytest.mark.parametrize("ranks", [1, 3])
def test_launches_and_collectives_of_a_micro_batch(ranks, launches, monkeypatch):
    """One product, one exchange and one combination per block; another product in the backward."""
    gathers, gather = [], torch.distributed.all_gather_into_tensor
    counting = lambda *a, **k: (gathers.append(a), gather(*a, **k))[1]  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", counting)
    case = Case(sizes=(40,), masked=0.0, ranks=ranks)
    run(case, *make(case, torch.float32))
    assert launches["product_kernel"] == 4 * ranks
    assert launches["merge_kernel"] == launches["combine_kernel"] == 2 * ranks
    assert launches["statistics_kernel"] == launches["gradient_kernel"] == 0
    assert len(gathers) == (2 * ranks if ranks > 1 else 0)
