"""Every reader from stored logits and from a head's chunks, by every implementation, against one loss written out in
float64."""

import math
from dataclasses import replace

import pytest
import threads
import torch
from compare import scalar_error, tensor_error
from launch_count import count_kernels
from reader_cases import COUNTS, FULL, READERS, TOPK, ReaderCase

from megatron_pg.kernels import Vocabulary, policy_gradient_loss
from megatron_pg.lm_head import Head, policy_gradient_head_loss, products

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TEMPERATURE, SCALE, WIDTH = 0.8, 3.0, 16
IMPLS = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.float32)]
SOURCES = ("stored", "inplace", "forward", "recompute")
PATHS = [  # a full teacher has heads only, and torch writes no gradient into the logits
    pytest.param(reader, source, impl, dtype, id=f"{reader}-{impl}-{str(dtype)[6:]}-{source}")
    for reader in READERS
    for impl, dtype in IMPLS
    for source in SOURCES
    if not (reader in FULL and source in ("stored", "inplace")) and (source, impl) != ("inplace", "torch")
]
LIMITS = {  # of stored logits and of heads, whose products are rounded too
    ("stored", torch.float64): 1e-12,
    ("stored", torch.float32): 2e-6,
    ("head", torch.float64): 1e-12,
    ("head", torch.float32): 1e-5,
}


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, small_tiles):
    """Chunks of one kind of row alone, and without the objective's."""
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 3)
    monkeypatch.setattr(products, "block_rows", lambda *_: 6)


def draw(case: ReaderCase, padding: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Hidden states with NaN where nothing is trained, the weight, and the teacher's; padding has likely logits."""
    rows, columns = len(case.policy_loss.fields.mask), case.size + padding
    hidden, weight = torch.randn(rows, WIDTH).to(dtype), torch.randn(columns, WIDTH).to(dtype) * WIDTH**-0.5
    hidden[:1] *= 10 if case.policy_loss.fields.teacher_hidden is not None else 1  # probabilities that are 0 in float32
    hidden[~case.policy_loss.fields.mask] = math.nan
    return hidden, 2 * weight, torch.randn(columns, 12).to(dtype) * 12**-0.5


def capped(logits: torch.Tensor, softcap: float | None) -> torch.Tensor:
    return logits if softcap is None else softcap * torch.tanh(logits / softcap)


def stored_logits(case: ReaderCase, tables: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Padding has likely logits."""
    logits = tables[0] @ tables[1].t()
    logits[:, case.size :] = 50.0
    return logits


def run(
    case: ReaderCase,
    source: str,
    impl: str,
    tables: tuple[torch.Tensor, ...],
    group=None,
    rank: int = 0,
    softcap: float | None = None,
) -> tuple:
    """The result at an upstream gradient of `SCALE`, and the gradients by hidden states and weight, or by logits and
    None."""
    ranks = 1 if group is None else group.size()
    hidden, weight, teacher_weight = tables[0], *(each.chunk(ranks)[rank] for each in tables[1:])
    options = {"temperature": TEMPERATURE, "vocab_size": case.size, "softcap": softcap}
    vocabulary = Vocabulary.of(len(weight), **options, tp_group=group)
    if source in ("stored", "inplace"):
        logits = stored_logits(case, tables).chunk(ranks, dim=1)[rank]
        leaf = logits.clone().requires_grad_()
        stored = leaf * 1
        out = policy_gradient_loss(
            stored, case.policy_loss, vocabulary, impl=impl, inplace=source == "inplace", grad_scale=SCALE, entropy=True
        )
        if source == "stored":
            assert torch.equal(stored.detach().nan_to_num(7.0), logits.nan_to_num(7.0))
        (SCALE * out.loss).backward()
        return out, leaf.grad, None
    leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
    given = {"grad_scale": SCALE, "entropy": True, "teacher_weight": teacher_weight}
    out = policy_gradient_head_loss(*leaves, case.policy_loss, vocabulary, Head(mode=source, impl=impl), **given)
    (SCALE * out.loss).backward()
    return out, *(leaf.grad for leaf in leaves)


def check(
    case: ReaderCase,
    source: str,
    results: list[tuple],
    tables: tuple[torch.Tensor, ...],
    softcap: float | None = None,
    teacher_softcap: float | None = None,
) -> float:
    """Loss, log-probabilities and gradients of all ranks against autograd in float64; the worst error by its limit."""
    mask, is_stored = case.policy_loss.fields.mask.cpu(), source in ("stored", "inplace")
    hidden, weight, teacher_weight = (each.cpu().double() for each in tables)
    hidden = torch.where(mask[:, None], hidden, 0)
    logits = stored_logits(case, tables).cpu().double() if is_stored else hidden @ weight.t()
    leaf = logits.requires_grad_()
    states = case.on("cpu").policy_loss.fields.teacher_hidden
    teacher_logits = None if states is None else capped(states.states.double() @ teacher_weight.t(), teacher_softcap)
    loss = case.on("cpu").expected(capped(leaf, softcap), TEMPERATURE, teacher_logits)
    loss.backward()
    gradient = torch.where(mask[:, None], leaf.grad, 0) * SCALE / case.policy_loss.terms.grad_divisor
    limit = LIMITS["stored" if is_stored else "head", tables[0].dtype]
    limit *= 2 if is_stored and case.policy_loss.terms.reads_topk else 1
    logprobs = case.on("cpu").logprobs(capped(leaf.detach(), softcap), TEMPERATURE)
    errors = [0.0]
    for out, of_first, _ in results:
        assert torch.equal(out.loss, results[0][0].loss), "ranks have different bits"
        assert torch.equal(out.logprobs, results[0][0].logprobs)
        assert not any(values.requires_grad for values in out.per_token if values is not None)
        errors += [scalar_error(float(out.loss.detach()), float(loss.detach()), 10.0)]
        errors += [tensor_error(out.logprobs.cpu(), logprobs)]
        if not is_stored:
            errors += [tensor_error(of_first.cpu(), gradient @ weight)]
    if is_stored:
        found = torch.cat([each[1] for each in results], dim=1).cpu()
        errors += [tensor_error(found, gradient)]
        assert not found[:, case.size :].any()
        assert not found[~mask].any()
    else:
        errors += [tensor_error(torch.cat([each[2] for each in results]).cpu(), gradient.t() @ hidden)]
    assert max(errors) <= limit, errors
    return max(errors) / limit


def skip_slow(reader: str, impl: str, source: str, full: bool) -> None:
    """In the default tier a reader's kernels have one source of logits and one head: the interpreter is slow."""
    of_default_tier = ("inplace", "forward") if READERS.index(reader) % 2 else ("stored", "recompute")
    if impl == "triton" and not full and source not in of_default_tier:
        pytest.skip("run by `make prove`")


@pytest.mark.parametrize(("reader", "source", "impl", "dtype"), PATHS)
def test_loss_and_gradients_are_those_of_the_definition(reader, impl, dtype, source, full):
    skip_slow(reader, impl, source, full)
    sizes = [(9, True), (150, False), *([(40, True), (40, False), (5003, False)] if full else [])]
    if impl == "triton" and not full:  # one of the two for each source: the interpreter is slow
        sizes = [sizes[source in ("stored", "forward")]]
    for size, is_shared in sizes:
        torch.manual_seed(size)
        others = (TOPK[size % len(TOPK)],) if reader in TOPK and not is_shared else ()
        width = size if is_shared else 5
        case = ReaderCase.draw(reader, size, *others, width=width, is_shared=is_shared)
        tables = tuple(each.to(DEVICE) for each in draw(case, 1 + size % 5, dtype))
        case = case.on(DEVICE, dtype)
        check(case, source, [run(case, source, impl, tables)], tables)


@pytest.mark.parametrize("count", [0, len(COUNTS)])
@pytest.mark.parametrize(("reader", "source", "impl", "dtype"), [each for each in PATHS if each.values[2:] != IMPLS[0]])
def test_without_a_trained_token_loss_and_gradients_are_zero(reader, impl, dtype, source, count, full):
    """Logits and hidden states are NaN, or there are none."""
    skip_slow(reader, impl, source, full)
    torch.manual_seed(2)
    case = ReaderCase.draw(reader, 13).on(DEVICE, dtype)
    loss = case.policy_loss.at(torch.arange(count, device=DEVICE))
    nothing = torch.zeros(count, dtype=torch.bool, device=DEVICE)
    own = {name: replace(each, mask=None if each.mask is None else nothing) for name, each in loss.fields.terms.items()}
    case = replace(case, policy_loss=replace(loss, fields=replace(loss.fields, mask=nothing, terms=own)))
    out, *gradients = run(case, source, impl, [each.to(DEVICE) for each in draw(case, 3, dtype)])
    assert float(out.loss.detach()) == 0
    assert not any(gradient.any() for gradient in gradients if gradient is not None)
    assert not any(values.any() or values.requires_grad for values in out.per_token if values is not None)


@pytest.mark.proof(
    "Logit softcap, stored logits and heads, torch and Triton: loss and gradients, relative to the reader's limit"
)
@pytest.mark.parametrize(
    ("reader", "source", "impl", "dtype"), [each for each in PATHS if each.values[0] not in {*TOPK} - {"topk_jsd"}]
)
def test_logits_with_a_softcap(reader, impl, dtype, source, full, evidence):
    """Some logits are beyond the cap; padding, which is likely, and columns outside a sampling mask have no part."""
    skip_slow(reader, impl, source, full)
    for cap, size in [(3.0, 9), (2.5, 150), (30.0, 33)][: 3 if full else 1 + (impl == "torch")]:
        torch.manual_seed(size)
        case = ReaderCase.draw(reader, size, is_shared=size == 9)
        terms = case.policy_loss.terms
        of_teacher = 2.0 if reader in FULL else None
        further = tuple(replace(t, softcap=of_teacher if t.reads_hidden else None) for t in terms.further)
        case = replace(case, policy_loss=replace(case.policy_loss, terms=replace(terms, further=further)))
        tables = tuple(each.to(DEVICE) for each in draw(case, 1 + size % 5, dtype))
        case = case.on(DEVICE, dtype)
        caps = {"softcap": cap, "teacher_softcap": of_teacher}
        worst = check(case, source, [run(case, source, impl, tables, softcap=cap)], tables, **caps)
        evidence(cases=1, worst=worst, tolerance=1.0)


@pytest.mark.parametrize(("dtype", "source"), [(torch.bfloat16, "inplace"), (torch.float16, "stored")])
@pytest.mark.parametrize("reader", [each for each in READERS if each not in FULL])
def test_a_gradient_of_half_precision_is_rounded_once(reader, dtype, source):
    torch.manual_seed(6)
    case = ReaderCase.draw(reader, 37, rows=4, counts=COUNTS[:4])
    tables = tuple(each.to(DEVICE) for each in draw(case, 3, dtype))
    logits = stored_logits(case, tables)
    _, gradient, _ = run(case.on(DEVICE), source, "triton", tables)
    leaf = logits.cpu().double().requires_grad_()
    case.expected(leaf, TEMPERATURE).backward()
    wanted = torch.where(case.policy_loss.fields.mask[:, None], leaf.grad, 0) * SCALE / 2
    half = torch.finfo(dtype).eps / 2 + 2.0**-16 * (dtype == torch.bfloat16)  # the interpreter cuts bfloat16 off
    bound = wanted.abs() * 2 * half + 1e-6 + torch.finfo(dtype).tiny
    assert ((gradient.cpu().double() - wanted).abs() <= bound).all()


SOURCES_OF_RANKS = ("stored", "forward", "recompute")


@pytest.mark.skipif(CUDA, reason="ranks are threads of one process")
@pytest.mark.parametrize("source", SOURCES_OF_RANKS)
@pytest.mark.parametrize(("impl", "dtype", "ranks"), [(*IMPLS[0], 3), (*IMPLS[2], 2)])
@pytest.mark.parametrize("reader", READERS)
def test_the_vocabulary_may_be_split_over_ranks(reader, impl, dtype, ranks, source, full, monkeypatch):
    """Of three ranks the last one has padding alone. In the default tier a reader's kernels have one source."""
    sources = SOURCES_OF_RANKS[reader in FULL :]
    if source not in sources:
        pytest.skip("no such path")
    if impl == "triton" and not full and source != sources[READERS.index(reader) % len(sources)]:
        pytest.skip("run by `make prove`")
    count_kernels(monkeypatch)  # one at a time
    case = ReaderCase.draw(reader, 30, rows=5, counts=COUNTS[:5])
    tables = draw(case, 18, dtype)
    case = case.on("cpu", dtype)

    def work(rank: int) -> tuple:
        return run(case, source, impl, tables, threads.subgroup(lambda _: 0, ranks, rank), rank)

    check(case, source, threads.run(ranks, work), tables)
