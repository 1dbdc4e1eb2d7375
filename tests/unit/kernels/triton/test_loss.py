"""Triton kernels and torch against a float64 oracle: by the interpreter on a CPU, the same cases and more on a GPU.

`pytest tests/unit/kernels/triton/test_loss.py --tier full` runs the full number of cases; on a GPU that is 5,000 and
large vocabularies.
"""

import math
import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import launch_count
import numpy as np
import pytest
import simulation
import single_pass
import torch
from loss_terms import kl_and_entropy
from objective_parts import build
from samples import make_sample

from megatron_pg.batch import TokenFields, pack, slice_batch
from megatron_pg.batch.fields import TermFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, api, grpo_loss, policy_gradient_loss
from megatron_pg.kernels.losses import reader_of
from megatron_pg.kernels.readers import read
from megatron_pg.step.loss import microbatch_loss

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
SMALL = [1, 2, 16, 31, 32, 33, 1000, 1024, 2047, 2048, 2049, 4096, 4103, 9008]
LARGE = [19008, 24000, 37984, 50257, 60000, 100000, 151936, 200000]  # every shape of the single-pass kernel
EPS_LOW, EPS_HIGH = 0.2, 0.28
CLIP = {"clip_eps_low": EPS_LOW, "clip_eps_high": EPS_HIGH}
OF_TOKENS = ("targets", "old_logprobs", "advantages", "weights")
SENTINEL = -123.0
WIDTHS = [1000, 1024] if CUDA else [100]  # by the multi-pass and by the single-pass kernel
ROWS = [name for name, declared in OBJECTIVES.items() if not declared.no_token_kernel and not declared.reads_sequences]
KL = {"kl_coef": 0.3, "kl_estimator": "k1_weighted"}


@dataclass(frozen=True)
class Case:
    rows: int = 4
    columns: int = WIDTHS[0]
    dtype: torch.dtype = torch.float32
    layout: str = "contiguous"
    inplace: bool = False
    entropy: bool = True
    temperature: float = 1.0
    padding: int = 0
    minus_infinity: str = "none"
    offset: float = 0.0
    upstream: float = 1.0
    grad_divisor: float = 1.0
    seed: int = 1


def random_case(rng: random.Random, vocabularies: list[int], rows: list[int]) -> Case:
    columns = rng.choice(vocabularies)
    return Case(
        rows=rng.choice(rows),
        columns=columns,
        dtype=rng.choice([torch.float32, torch.bfloat16, torch.float16]),
        layout=rng.choice(["contiguous", "contiguous", "wide", "shifted", "every other"]),
        inplace=rng.random() < 0.4,
        entropy=rng.random() < 0.7,
        temperature=rng.choice([1.0, 1.0, 0.7, 2.5]),
        padding=rng.choice([0, 0, 0, 1, columns // 2 if columns < 5000 else 32]) if columns > 2 else 0,
        minus_infinity=rng.choice(["none", "none", "prefix", "suffix", "most"]),
        offset=rng.choice([0.0, 0.0, 0.0, 100.0, -120.0]),
        upstream=rng.choice([1.0, 1.0, 3.0, 0.125]),
        grad_divisor=rng.choice([1.0, 1.0, 8.0]),
        seed=rng.randrange(2**30),
    )


def laid_out(values: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """`values` inside a larger buffer of sentinels: the buffer and the view of it that holds the values."""
    rows, columns = values.shape
    left, width, step = {
        "contiguous": (0, columns, 1),
        "wide": (0, columns + 3, 1),
        "shifted": (1, columns + 1, 1),
        "every other": (0, columns, 2),
    }[layout]
    buffer = torch.full((2 + rows * step, width), SENTINEL, dtype=values.dtype, device=values.device)
    view = buffer[1 : 1 + rows * step : step, left : left + columns]
    view.copy_(values)
    return buffer, view


def make(case: Case) -> dict:
    """The fields of a case; masked rows and padding hold what must not matter."""
    torch.manual_seed(case.seed)
    valid, here = case.columns - case.padding, {"device": DEVICE}
    logits = torch.randn(case.rows, case.columns, dtype=torch.float64, **here) * 2
    targets = torch.randint(0, valid, (case.rows,), **here)
    mask = torch.rand(case.rows, **here) < 0.7
    if case.minus_infinity == "prefix":
        logits[:, : valid * 3 // 4] = -math.inf
    elif case.minus_infinity == "suffix":
        logits[:, valid // 4 + 1 : valid] = -math.inf
    elif case.minus_infinity == "most":
        logits[torch.rand(case.rows, case.columns, **here) < 0.95] = -math.inf
    target = torch.randn(case.rows, dtype=torch.float64, **here)
    logits.scatter_(1, targets[:, None], target[:, None])
    logits = (logits + case.offset).to(case.dtype)
    old = log_softmax(logits[:, :valid].double() / case.temperature).gather(1, targets[:, None])[:, 0]
    old = (old + torch.randn(case.rows, dtype=torch.float64, **here) * 0.3).float()
    advantages, weights = torch.randn(case.rows, **here), torch.rand(case.rows, **here)
    logits[~mask] = random.Random(case.seed).choice([math.nan, math.inf, -math.inf])
    logits[:, valid:] = random.Random(case.seed).choice([math.nan, 50.0])
    targets[~mask] = -100
    for values in (old, advantages, weights):
        values[~mask] = math.nan
    return {"logits": logits, "mask": mask} | dict(zip(OF_TOKENS, (targets, old, advantages, weights), strict=True))


def trained_everywhere(case: Case) -> dict:
    """The fields of a case without a masked row, all finite."""
    fields = make(case)
    fields["mask"][:] = True
    fields["targets"].clamp_(min=0)
    for name in ("logits", "old_logprobs", "advantages", "weights"):
        fields[name].nan_to_num_(-6.0, -6.0, -6.0)
    return fields


def log_softmax(z: torch.Tensor) -> torch.Tensor:
    z = z - z.amax(1, keepdim=True)
    return z - z.exp().sum(1, keepdim=True).log()


def expected(case: Case, fields: dict) -> dict:
    """The formulas in float64, gradient included, for the trained rows; zeros elsewhere."""
    mask, valid = fields["mask"], case.columns - case.padding
    y = fields["targets"][mask]
    old, advantage, weight = (fields[name][mask].double() for name in ("old_logprobs", "advantages", "weights"))
    log_p = log_softmax(fields["logits"][mask][:, :valid].double() / case.temperature)
    p = log_p.exp()
    logprob = log_p.gather(1, y[:, None])[:, 0]
    ratio = (logprob - old).clamp(-20, 20).exp()
    loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - EPS_LOW, 1 + EPS_HIGH) * advantage)
    alive = torch.where(advantage >= 0, ratio <= 1 + EPS_HIGH, ratio >= 1 - EPS_LOW) & ((logprob - old).abs() <= 20)
    slope = torch.where(alive, ratio * advantage * weight, 0)[:, None]
    gradient = slope * p
    gradient.scatter_add_(1, y[:, None], -slope)
    gradient *= case.upstream / (case.grad_divisor * case.temperature)
    full = torch.zeros(case.rows, case.columns, dtype=torch.float64, device=mask.device)
    full[mask] = torch.nn.functional.pad(gradient, (0, case.padding))
    entropy = -(p * log_p.nan_to_num(neginf=0.0)).sum(1)
    near = (ratio.log() - math.log(1 - EPS_LOW)).abs().minimum((ratio.log() - math.log(1 + EPS_HIGH)).abs()) < 3e-5
    size = torch.zeros(case.rows, 1, dtype=torch.float64, device=mask.device)
    size[mask] = slope.abs() * case.upstream / (case.grad_divisor * case.temperature)
    of_trained = {"loss": loss, "logprob": logprob, "entropy": entropy, "weight": weight}
    near = torch.zeros_like(mask).masked_scatter(mask, near)
    targets = fields["targets"].clamp(0, case.columns - 1)
    return of_trained | {"gradient": full, "slope": size, "near": near, "targets": targets}


def loss_of(case: Case, logits: torch.Tensor, fields: dict, **options):
    given = {"mask": fields["mask"], "temperature": case.temperature, "vocab_size": case.columns - case.padding}
    return grpo_loss(logits, *(fields[name] for name in OF_TOKENS), **CLIP, **given, **options)


def run(case: Case, fields: dict, *, impl: str = "triton", grad_scale: float = 1.0):
    """The loss and gradient of a case, and the buffer that holds the logits."""
    buffer, view = laid_out(fields["logits"], case.layout)
    view.add_(torch.zeros((), device=DEVICE, requires_grad=True))  # so no leaf, which may not be overwritten
    seen = {}
    view.register_hook(lambda g: seen.update(gradient=g.detach().clone(), address=g.data_ptr()))
    options = {name: getattr(case, name) for name in ("grad_divisor", "entropy", "inplace")}
    out = loss_of(case, view, fields, grad_scale=grad_scale, impl=impl, **options)
    (out.loss * case.upstream).backward()
    assert not (impl == "triton" and fields["logits"].numel()) or case.inplace == (seen["address"] == view.data_ptr())
    return out, seen["gradient"], buffer.detach()


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference; infinite if either has a value that is not finite."""
    if found.shape != wanted.shape or not (found.isfinite().all() and wanted.isfinite().all()):
        return math.inf
    return float((found.double() - wanted).abs().amax()) if found.numel() else 0.0


def gradient_excess(found: torch.Tensor, expected: dict, offset: float = 0.0) -> float:
    """Error of the gradient, per unit of what rounding the exact gradient to the dtype costs, away from clip bounds.

    Float32 arithmetic adds 5e-6 of each value, and of the slope at the target, where p - 1 cancels; more under an
    offset.
    """
    if found.shape != expected["gradient"].shape:
        return math.inf
    away = ~expected["near"]
    found, kind = found[away], torch.finfo(found.dtype)
    wanted, slope = expected["gradient"][away], expected["slope"][away]
    if not found.numel():
        return 0.0
    # half a unit in the last place; the interpreter truncates to bfloat16 where the GPU rounds
    rounding = kind.eps * (1.02 if found.dtype == torch.bfloat16 and not CUDA else 0.51)
    smallest = max(kind.tiny * kind.eps, 1e-37)
    digits = 5e-6 + abs(offset) * (2e-7 if CUDA else 8e-7)
    at_target = torch.zeros_like(wanted).scatter_(1, expected["targets"][away][:, None], slope)
    scale = wanted.abs() * (rounding + digits) + at_target * digits + smallest
    return worst(found.double() / scale, wanted / scale)


def check(case: Case, **options) -> float:
    fields = make(case)
    wanted, (out, gradient, buffer) = expected(case, fields), run(case, fields, **options)
    mask, layout_step = fields["mask"], 2 if case.layout == "every other" else 1
    # without a fused multiply-add (the interpreter) large logits cost digits
    tolerance = 5e-6 + abs(case.offset) / case.temperature * (1e-7 if CUDA else 4e-7)
    found = {"logprob": out.logprobs, "loss": out.token_losses} | ({"entropy": out.entropy} if case.entropy else {})
    for name, values in found.items():
        assert not values[~mask].any(), (case, name)
        scale = 1 + wanted[name].abs() if name == "loss" else 1.0
        error = worst(values[mask].double() / scale, wanted[name] / scale)
        assert error <= tolerance * (2 if name == "loss" else 1), (case, name, error)
    total = float((wanted["loss"] * wanted["weight"]).sum())
    size = float((wanted["loss"] * wanted["weight"]).abs().sum())
    assert abs(float(out.loss.detach()) - total) <= 4 * tolerance * (size + 1e-3), case
    assert gradient.dtype == case.dtype
    assert not gradient[~mask].to(torch.float32).any(), case
    assert not gradient[:, case.columns - case.padding :].to(torch.float32).any(), case
    excess = gradient_excess(gradient, wanted, case.offset / case.temperature)
    rescaled = CUDA and case.upstream != options.get("grad_scale", 1.0)  # rounded twice
    assert excess <= (2.0 if rescaled else 1.0), (case, excess)
    band = torch.ones_like(buffer, dtype=torch.bool)
    left = 1 if case.layout == "shifted" else 0
    band[1 : 1 + case.rows * layout_step : layout_step, left : left + case.columns] = False
    assert (buffer[band] == SENTINEL).all(), case
    if not case.inplace:
        assert torch.equal(buffer[~band].nan_to_num(7.0), fields["logits"].flatten().nan_to_num(7.0)), case
    return excess


@pytest.fixture
def fused(monkeypatch):
    """`tl.fma` rounds once, as on a GPU: some interpreters round the product too."""
    if not CUDA:
        from triton.runtime import interpreter

        def fma(self, x, y, z):
            exact = x.data.astype("float64") * y.data.astype("float64") + z.data.astype("float64")
            with np.errstate(over="ignore"):
                return interpreter.TensorHandle(exact.astype(x.data.dtype), x.dtype.scalar)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", fma)


@pytest.fixture
def few_programs(monkeypatch):
    """On a GPU: so few programs that each takes many rows, where the single-pass kernel is in its steady state."""
    if CUDA:
        kernels = "megatron_pg.kernels.triton"
        monkeypatch.setattr(f"{kernels}.loss.multiprocessors", lambda _: 1)
        monkeypatch.setattr(f"{kernels}.single_pass.multiprocessors", lambda _: 1)
        one_each = {(torch.empty(0, device=DEVICE).device, blocks): 1 for blocks in (4, 8)}
        monkeypatch.setattr(f"{kernels}.single_pass._clusters", one_each)


@pytest.mark.proof("T6 Triton kernels against float64 (error: of the gradient, in units of its rounding bound)")
@pytest.mark.parametrize("block", range(8))
def test_random_cases_equal_the_oracle(block, full, evidence, poisoned_memory, few_programs):
    rng = random.Random(f"kernel{block}")
    cases = (625 if full else 100) if CUDA else (51 if full else 3)
    found = []
    for _ in range(cases):
        vocabularies = SMALL + LARGE * 2 if CUDA else SMALL
        case = random_case(rng, vocabularies, [1, 3, 17, 150] if CUDA else [1, 2, 3, 5])
        found.append(check(case))
        check(replace(case, inplace=False), impl="torch")
    evidence(cases=cases, worst=max(found), tolerance=2.0 if CUDA else 1.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("columns", LARGE if CUDA else [20000])
def test_a_large_vocabulary(columns, dtype):
    check(Case(columns=columns, dtype=dtype, rows=700 if CUDA else 2))


@pytest.mark.skipif(not CUDA, reason="takes gigabytes and a million tiles: on a GPU only")
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(17_000, 128_256), (17_001, 126_337), (70_000, 1_024), (70_001, 1_003)],  # by single-pass and multi-pass kernels
)
def test_more_than_2_to_the_31_logits_and_more_than_65535_rows(rows, columns):
    """The first and the last rows against float64; every row's log-probability against float32 torch."""
    torch.manual_seed(rows)
    logits = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    targets = torch.randint(0, columns, (rows,), device=DEVICE)
    fields = (torch.full((rows,), -11.0, device=DEVICE), *torch.randn(2, rows, device=DEVICE))
    out = grpo_loss(logits, targets, *fields, **CLIP)
    (gradient,) = torch.autograd.grad(out.loss, logits)
    logits = logits.detach()
    for part in torch.arange(rows, device=DEVICE).split(1000):
        logprobs = logits[part].float().log_softmax(1).gather(1, targets[part, None])[:, 0]
        assert worst(out.logprobs[part], logprobs.double()) < 1e-4, part
    for part in (slice(0, 40), slice(rows - 40, rows)):
        leaf = logits[part].double().requires_grad_()
        truth = grpo_loss(leaf, targets[part], *(values[part] for values in fields), **CLIP, impl="torch")
        (wanted,) = torch.autograd.grad(truth.loss, leaf)
        assert worst(gradient[part], wanted) <= 0.005 * float(wanted.abs().amax()), part


@pytest.mark.parametrize("grad_scale", [1.0, 3.0, 24.0])
def test_the_expected_upstream_gradient_changes_no_result(grad_scale):
    check(Case(upstream=24.0), grad_scale=grad_scale)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("log_ratio", [25.0, -25.0, 90.0, -90.0, 1e4, -1e4, math.inf, -math.inf])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_huge_log_ratios_give_finite_losses_and_no_gradient(log_ratio, advantage):
    case = Case(columns=64)
    fields = trained_everywhere(case)
    for name, value in {"targets": 3, "weights": 1.0, "advantages": advantage}.items():
        fields[name][:] = value
    fields["old_logprobs"] = (log_softmax(fields["logits"].double())[:, 3] - log_ratio).float()
    out, gradient, _ = run(case, fields)
    assert out.token_losses.isfinite().all()
    assert not gradient.any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("where", ["logits", "old_logprobs", "advantages", "weights"])
def test_nan_at_a_trained_token_is_seen_in_the_loss_and_stays_in_its_row(where, impl):
    case = Case(rows=3, columns=WIDTHS[-1])
    fields = trained_everywhere(case)
    fields[where][1] = math.nan
    out, gradient, _ = run(case, fields, impl=impl)
    assert out.loss.isnan()
    assert where == "weights" or out.token_losses[1].isnan()
    assert gradient[0].isfinite().all()
    assert gradient[2].isfinite().all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_target_outside_the_vocabulary_is_nan_in_loss_and_gradient_and_no_wild_read(impl, columns, monkeypatch):
    monkeypatch.setattr(api, "check_labels", lambda *_: None)  # as on a GPU
    case = Case(columns=columns, rows=6, padding=columns % 100 + 40)
    fields, valid = trained_everywhere(case), columns - case.padding
    fields["targets"][1:5] = torch.tensor([-1, valid, columns, 2**40])
    out, gradient, _ = run(case, fields, impl=impl)
    is_bad = torch.tensor([0, 1, 1, 1, 1, 0], device=DEVICE).bool()
    assert out.loss.isnan()
    assert torch.equal(out.logprobs.isnan(), is_bad)
    assert torch.equal(gradient.isnan(), is_bad[:, None] & (torch.arange(columns, device=DEVICE) < valid))


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("name", ROWS if CUDA else ["grpo", "reinforce"])  # only the single-pass kernel reads the slope
def test_no_objective_leaves_a_finite_gradient_in_a_row_whose_target_does_not_exist(name):
    """reinforce and topr_token have a slope that reads no log-probability; with A = 0 it is 0."""
    values = {"old_logprobs": -7.0, "advantages": 1.0, "weights": 0.5}
    fields = {each: torch.full((5,), value, device=DEVICE) for each, value in values.items()}
    fields["advantages"][2] = 0.0
    targets = torch.tensor([3, 64, -100, 2**40, 7], device=DEVICE)
    given = TokenFields(targets=targets, mask=torch.ones(5, dtype=torch.bool, device=DEVICE), **fields)
    loss = PolicyLoss(LossTerms(objective=build(name)), given)
    for impl, inplace in (("torch", False), ("triton", False), ("triton", True)):
        logits = torch.linspace(-2, 2, 320, device=DEVICE).view(5, 64).requires_grad_()
        found = policy_gradient_loss(logits * 1.0, loss, Vocabulary.of(64), impl=impl, inplace=inplace)
        found.loss.backward()
        assert found.loss.isnan()
        assert logits.grad.isnan().all(dim=1).tolist() == [False, True, True, True, False], (impl, inplace)
        assert logits.grad[[0, 4]].isfinite().all()


@pytest.mark.skipif(CUDA, reason="a GPU is not asked for the values")
def test_a_target_outside_the_vocabulary_is_refused_by_name_and_position_on_a_cpu():
    fields = {each: torch.ones(4) for each in ("advantages", "weights")} | {"old_logprobs": torch.full((4,), -3.0)}
    options = CLIP | {"impl": "torch", "vocab_size": 30}
    targets = torch.tensor([3, -100, 30, 2])
    message = r"^targets\[1\] is -100 at a trained token, and the vocabulary has the ids 0 to 29 \(2 such tokens\)"
    with pytest.raises(ValueError, match=message):
        grpo_loss(torch.zeros(4, 32), targets, **fields, **options)
    fields["weights"][1:3] = 0.0
    assert grpo_loss(torch.zeros(4, 32), targets, **fields, **options).loss.isfinite()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_a_logprob_that_does_not_exist_has_a_nan_gradient_whatever_is_upstream(impl):
    """An objective that compares and clips has slope 0 at NaN."""
    logits = torch.zeros(5, 32, device=DEVICE)
    logits[4, 7] = math.nan
    leaf = logits.requires_grad_()
    targets, mask = torch.tensor([3, 32, 32, 3, 3], device=DEVICE), torch.tensor([1, 1, 0, 0, 1], device=DEVICE).bool()
    targets = targets if impl == "triton" else torch.where(mask, targets, 0)
    logprobs, *_ = read(leaf, reader_of(impl, Vocabulary.of(32), targets, mask=mask))
    logprobs.backward(torch.zeros(5, device=DEVICE))
    assert leaf.grad.isnan().all(dim=1).tolist() == [False, True, False, False, True]
    assert not leaf.grad[[0, 2, 3]].any()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("impl", ["triton", "torch"])
@pytest.mark.parametrize("rows", [0, 3])
def test_nothing_trained_gives_a_zero_loss_with_a_gradient(rows, impl, columns):
    case = Case(rows=rows, columns=columns)
    fields = make(case)
    fields["mask"][:] = False
    out, gradient, _ = run(case, fields, impl=impl)
    assert float(out.loss.detach()) == 0.0
    assert gradient.shape == (rows, columns)
    assert not gradient.any()


@pytest.mark.usefixtures("small_tiles")
def test_what_kernels_are_compiled_for_is_found_once_for_all_micro_batches():
    asked, objective = [], build("grpo")
    kernel = replace(objective.token_kernel, load=lambda: asked.append(1) or objective.token_kernel.load())
    terms, vocabulary = LossTerms(objective=replace(objective, token_kernel=kernel)), Vocabulary.of(WIDTHS[0])
    for seed in (1, 2):
        fields = make(Case(seed=seed))
        logits, loss = fields.pop("logits"), PolicyLoss(terms, TokenFields(**fields))
        found, expected = (policy_gradient_loss(logits, loss, vocabulary, impl=impl) for impl in ("triton", "torch"))
        torch.testing.assert_close(found.loss, expected.loss)
    assert asked == [1]


@pytest.mark.skipif(not CUDA, reason="only a GPU has CUDA graphs")
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_a_cuda_graph_replays_loss_and_gradient_with_new_values(name, columns):
    """Bit for bit as without a graph; a host sync would be an error of the capture."""
    case, (slots, lengths) = Case(rows=6, columns=columns), torch.tensor([[0, 0, 0, 1, 1, 1], [3, 3, 0, 0, 0, 0]])
    known = {"slots": slots, "order": torch.arange(6), "lengths": lengths[:3], "counts": lengths[:2].double()}
    sequences = Sequences(**{key: values.to(DEVICE) for key, values in known.items()})
    terms, given = LossTerms(objective=build(name)), make(case)

    def loss_and_gradient() -> list[torch.Tensor]:
        logits, fields = given["logits"].detach().requires_grad_(), {k: v for k, v in given.items() if k != "logits"}
        loss = PolicyLoss(terms, TokenFields(**fields, sequences=sequences))
        out = policy_gradient_loss(logits, loss, Vocabulary.of(columns), entropy=True)
        return [out.loss.detach(), out.token_losses, out.entropy, *torch.autograd.grad(out.loss, logits)]

    with torch.cuda.stream(torch.cuda.Stream()):
        loss_and_gradient()  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = loss_and_gradient()
    for seed in (2, 3):
        for key, values in make(replace(case, seed=seed)).items():
            given[key].copy_(values)
        graph.replay()
        assert all(map(torch.equal, replayed, loss_and_gradient()))


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
@pytest.mark.parametrize("inplace", [False, True])
@pytest.mark.parametrize(("dtype", "upstream"), [(torch.float32, 1.0), (torch.float32, 3.0), (torch.bfloat16, 1.0)])
def test_what_launches_the_single_pass_kernel(dtype, upstream, inplace, monkeypatch):
    """Values and gradient, with the kernel's own work done in torch, from fields with any strides."""
    launches = single_pass.in_torch(monkeypatch)
    case = Case(dtype=dtype, upstream=upstream, inplace=inplace, padding=16, temperature=0.7, grad_divisor=8.0)
    check(case)
    check(replace(case, entropy=False, layout="every other"), grad_scale=upstream)
    fields = {n: torch.stack([v, v], 1)[:, 0] if v.dim() == 1 else v for n, v in make(case).items()}
    out, gradient, _ = run(case, fields)
    straight, same, _ = run(case, make(case))
    assert torch.equal(gradient, same)
    assert torch.equal(out.loss, straight.loss)
    assert [k["ROW"].entropy for k in launches] == [True, False, True, True]


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.proof("Token-level losses with KL and bonus from logits, single-pass and multi-pass: float64, within 2e-5")
@pytest.mark.parametrize("columns", [64, 63])
@pytest.mark.parametrize("name", ROWS)
def test_every_token_loss_is_one_launch_and_equals_float64(name, columns, full, evidence, monkeypatch):
    """On a CPU the single-pass kernel's own work is done in torch: everything around it. In the default tier the
    objectives take the terms in turns where the interpreter runs."""
    errors, every = [], ({}, KL, {"entropy_coef": 0.2}, {**KL, "entropy_coef": 0.2})
    for terms in every if full or CUDA or columns % 16 == 0 else every[ROWS.index(name) % 4 :][:1]:
        loss_terms = kl_and_entropy(**terms)[:: (-1) ** len(terms)]  # in either order
        case = Case(rows=20, columns=columns, padding=columns - 48, temperature=0.7)
        fields = make(case)
        logits, mask = fields.pop("logits"), fields["mask"]
        weights = {s.name: torch.rand(case.rows, device=DEVICE).masked_fill(~mask, math.nan) for s in loss_terms}
        own = {each: TermFields(weights=values) for each, values in weights.items()}
        refs = fields["old_logprobs"] - 0.5 * fields["advantages"]
        known = TokenFields(**fields, ref_logprobs=refs, terms=own, corrections=2 * fields["weights"])
        loss = PolicyLoss(LossTerms(objective=build(name), grad_divisor=8.0, further=loss_terms), known)
        vocabulary, found = Vocabulary.of(case.columns, temperature=0.7, vocab_size=48), []
        with monkeypatch.context() as context:
            stubbed = single_pass.in_torch(context) if columns % 16 == 0 and not CUDA else []
            counted = launch_count.count_kernels(context)
            for impl, dtype in (("triton", logits.dtype), ("torch", torch.float64)):
                leaf = logits.detach().to(dtype, copy=True).requires_grad_()
                out = policy_gradient_loss(leaf, loss, vocabulary, grad_scale=3.0, entropy=True, impl=impl)
                (3 * out.loss).backward()
                found.append([out.loss, out.token_losses, out.logprobs, out.entropy, out.term_losses, leaf.grad])
        kernels = (
            ("single_pass_kernel", "rescale_kernel") if columns % 16 == 0 else ("token_loss_kernel", "gradient_kernel")
        )
        assert counted == dict.fromkeys(kernels, 1)
        for launch in stubbed:
            assert (launch["ROW"].bonus, launch["KL"] is not None) == ("entropy_coef" in terms, "kl_coef" in terms)
        for ours, theirs in zip(*found, strict=True):
            assert (ours is None) == (theirs is None)
            if ours is not None:
                scale = 1 + theirs.detach().abs()
                errors.append(worst(ours.detach().double() / scale, theirs.detach() / scale))
    assert max(errors) <= 2e-5
    evidence(cases=len(errors), worst=max(errors), tolerance=2e-5)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("columns", WIDTHS)
@pytest.mark.parametrize("impl", ["triton", "torch"])
def test_fields_may_have_any_strides_and_are_left_as_they_are(impl, columns):
    case = Case(columns=columns, rows=5)
    fields = make(case)
    straight, gradient, _ = run(case, fields, impl=impl)
    pairs = {name: torch.stack([values, values], 1) for name, values in fields.items() if name != "logits"}
    strided = fields | {name: values[:, 0] for name, values in pairs.items()}
    assert not strided["targets"].is_contiguous()
    again, other, _ = run(case, strided, impl=impl)
    assert torch.equal(straight.loss, again.loss)
    assert torch.equal(gradient, other)
    for name, values in pairs.items():
        assert torch.equal(values.nan_to_num(7.0), torch.stack([fields[name]] * 2, 1).nan_to_num(7.0)), name


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("impl", "columns"), [("torch", 40), *(("triton", width) for width in WIDTHS)])
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_exactly_on_a_clip_bound_keeps_its_gradient(sign, impl, columns):
    logits = torch.randn(3, columns, device=DEVICE)
    ones, targets = torch.ones(3, device=DEVICE), torch.arange(3, device=DEVICE)

    def gradient(old):
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(leaf, targets, old, sign * ones, ones, clip_eps_low=0.0, clip_eps_high=0.0, impl=impl)
        out.loss.backward()
        return out.logprobs, leaf.grad

    old, _ = gradient(-ones)
    assert gradient(old)[1].any(dim=1).all()
    assert not gradient(old - sign * 1e-3)[1].any()


@pytest.mark.usefixtures("small_tiles")
def test_a_trained_row_without_any_finite_logit_is_seen():
    case = Case()
    fields = trained_everywhere(case)
    fields["logits"][1] = -math.inf
    out, gradient, _ = run(case, fields)
    assert out.loss.isnan()
    assert gradient[[0, 2, 3]].isfinite().all()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_out_of_range_is_nan_in_loss_and_gradient_and_spoils_no_other(dtype):
    """docs/kernels.md: a largest logit beyond 1.4e9 tau, of which torch has the right values."""
    logits = torch.tensor([0, -2e9, -8e29, 3e38], device=DEVICE, dtype=dtype)[:, None].repeat(1, 32)
    fields = (torch.arange(4, device=DEVICE), *(torch.ones(4, device=DEVICE) * x for x in (-3.5, 1.0, 1.0)))
    found = {}
    for impl in ("torch", "triton"):
        leaf = logits.clone().requires_grad_()
        out = grpo_loss(leaf, *fields, **CLIP, entropy=True, impl=impl)
        out.loss.backward()
        found[impl] = torch.cat([out.log_ratios[:, None], out.entropy[:, None], leaf.grad.float()], dim=1)
    assert worst(found["torch"][:, :2], torch.tensor([[3.5 - math.log(32), math.log(32)]] * 4, device=DEVICE)) < 1e-6
    assert worst(found["triton"][0], found["torch"][0].double()) < 1e-6
    assert found["triton"][1:].isnan().all()


@pytest.mark.usefixtures("small_tiles")
def test_logits_that_something_hid_with_a_huge_number_have_no_probability(fused):
    """Whole tiles too, whose maximum is rounded by more than an exponent holds: only the row's largest has a range."""
    case = Case(rows=5)
    fields = trained_everywhere(case)
    fields["targets"] %= 40
    fields["logits"][:, 40:] = torch.tensor([[-2e9], [-1e10], [-1e20], [-1e30], [-3.3e38]])
    wanted, (out, gradient, _) = expected(case, fields), run(case, fields)
    assert worst(out.logprobs, wanted["logprob"]) <= 5e-6
    assert worst(out.entropy, wanted["entropy"]) <= 5e-6
    assert gradient_excess(gradient, wanted) <= 1.0
    assert not gradient[:, 40:].any()


def test_a_step_without_gradient_writes_nothing():
    case = Case(inplace=True)
    fields = make(case)
    logits = fields["logits"]
    before = logits.clone()
    with torch.no_grad():
        out = loss_of(case, logits, fields, inplace=True)
    assert torch.equal(logits.nan_to_num(), before.nan_to_num())
    assert not out.loss.requires_grad


def test_two_runs_give_the_same_bits():
    case = Case(columns=1031 if not CUDA else 151936, dtype=torch.bfloat16)
    fields = make(case)
    (first, gradient, _), (second, again, _) = run(case, fields), run(case, fields)
    assert torch.equal(gradient, again)
    assert torch.equal(first.loss, second.loss)


@pytest.mark.usefixtures("small_tiles")
def test_whoever_saved_overwritten_logits_gets_an_error():
    logits = torch.randn(3, 64, device=DEVICE).requires_grad_() * 1.0
    squares = (logits * logits).sum()  # its backward reads the logits
    fields = (torch.arange(3, device=DEVICE), *(torch.ones(3, device=DEVICE) * x for x in (-4.0, 1.0, 1.0)))
    out = grpo_loss(logits, *fields, **CLIP, inplace=True)
    out.loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        squares.backward()


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("is_leaf", [True, False])
def test_the_training_loss_writes_over_a_models_logits_but_not_over_a_leaf(is_leaf):
    batch = pack([make_sample(prompt_length=2, mask=[1, 0, 1], rng=random.Random(0))], qkv_format="thd")
    local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1, device=DEVICE)
    settings = replace(simulation.settings("sample_mean", per_token=False), impl="triton")
    leaf = torch.randn(local.num_positions, 1, 16, device=DEVICE, requires_grad=True)
    logits = leaf if is_leaf else leaf * 1.0
    before = logits.detach().clone()
    microbatch_loss(logits.view(-1, 16), local.fields, settings, None)[0].backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad.any()
    assert torch.equal(logits.detach(), before) == is_leaf


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.proof("T6 Triton kernels, vocabulary over 2 to 4 shards")
@pytest.mark.parametrize("shards", [2, 3, 4])
def test_sharded_vocabularies_equal_the_whole_one_and_every_rank_has_the_same_bits(shards, full, evidence, monkeypatch):
    from megatron_pg.kernels.triton import vocab_parallel

    rng, cases = random.Random(f"shards{shards}"), 15 if full else 1
    for number in range(cases):
        columns = rng.choice([1, 5, 16, 250, *[1024] * full])  # an interpreter takes a second for the last one
        whole = columns * shards
        case = Case(
            columns=whole,
            dtype=rng.choice([torch.float32, torch.bfloat16]),
            rows=3,
            padding=whole * ((number + 2) % 3) // 3,  # from two thirds, where the last ranks have nothing else
            minus_infinity=rng.choice(["none", "prefix", "suffix"]),
            seed=rng.randrange(2**30),
            temperature=rng.choice([1.0, 0.7]),
        )
        fields = make(case)
        pieces = [p.contiguous() for p in fields["logits"].split(columns, dim=1)]
        # one after the other
        groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: shards) for r in range(shards)]
        options = {"temperature": case.temperature, "vocab_size": case.columns - case.padding}
        shards_of = [Vocabulary.of(columns, tp_group=group, **options) for group in groups]
        where = fields["targets"], fields["mask"]
        pairs = zip(pieces, shards_of, strict=True)
        shares = torch.stack([vocab_parallel.statistics(piece, where, shard) for piece, shard in pairs])
        monkeypatch.setattr(Vocabulary, "gather", lambda *_: shares)  # noqa: B023
        outs, gradients = [], []
        for rank, piece in enumerate(pieces):
            leaf = piece.requires_grad_()
            out = loss_of(case, leaf, fields, entropy=True, tp_group=groups[rank])
            out.loss.backward()
            outs.append(out)
            gradients.append(leaf.grad)
        wanted, mask = expected(case, fields), fields["mask"]
        assert all(torch.equal(o.logprobs, outs[0].logprobs) and torch.equal(o.loss, outs[0].loss) for o in outs)
        assert worst(outs[0].logprobs[mask], wanted["logprob"]) <= 5e-6, case
        assert worst(outs[0].entropy[mask], wanted["entropy"]) <= 5e-6, case
        assert gradient_excess(torch.cat(gradients, 1), wanted) <= 1.0, case
    evidence(cases=cases)


@pytest.mark.usefixtures("small_tiles")
def test_an_entropy_gradient_goes_through_the_same_kernel():
    logits = torch.randn(4, 300, dtype=torch.float64)
    logits[0, :100] = -math.inf
    targets, mask = torch.tensor([150, 2, 3, 299]), torch.tensor([True, True, False, True])
    up_logprobs, up_entropy = torch.randn(4), torch.randn(4)
    up_logprobs[1] = up_entropy[3] = 0  # as of a clipped token: what else it has goes on
    x = logits.float().to(DEVICE).requires_grad_()
    vocabulary = Vocabulary.of(300, temperature=0.8)
    logprobs, entropy, _ = read(x, reader_of("triton", vocabulary, targets.to(DEVICE), mask=mask.to(DEVICE)))
    (logprobs @ up_logprobs.to(DEVICE) + entropy @ up_entropy.to(DEVICE)).backward()
    log_p = log_softmax(logits / 0.8)
    p, h = log_p.exp(), -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(1, keepdim=True)
    delta = torch.nn.functional.one_hot(targets, 300)
    wanted = up_logprobs[:, None] * (delta - p) - up_entropy[:, None] * p * (log_p.nan_to_num(neginf=0.0) + h)
    wanted = torch.where(mask[:, None], wanted, 0) / 0.8
    assert worst(x.grad.cpu(), wanted) <= 2e-6


class _Stopped(torch.autograd.Function):
    """A sum that has no gradient by its first two arguments."""

    @staticmethod
    def forward(ctx, logprobs, entropy, logits):
        ctx.shape = logits.shape
        return logprobs.sum() + entropy.sum() + logits.sum()

    @staticmethod
    def backward(ctx, gradient):
        return None, None, gradient.expand(ctx.shape)


@pytest.mark.usefixtures("small_tiles")
def test_a_loss_that_stops_both_gradients_gives_none():
    logits = torch.randn(3, 9, device=DEVICE, requires_grad=True)
    targets, mask = torch.arange(3, device=DEVICE), torch.ones(3, dtype=torch.bool, device=DEVICE)
    logprobs, entropy, _ = read(logits, reader_of("triton", Vocabulary.of(9), targets, mask=mask))
    _Stopped.apply(logprobs, entropy, logits).backward()
    assert torch.equal(logits.grad, torch.ones_like(logits))


def test_the_oracle_notices_a_wrong_gradient():
    """The comparison above can fail: off by one rounding too many, NaN, and a missing row are all seen."""
    case = Case(columns=1000)
    wanted = expected(case, make(case))
    exact = wanted["gradient"].float()
    assert gradient_excess(exact, wanted) <= 1.0
    assert gradient_excess(exact * 1.001, wanted) > 1.0
    assert gradient_excess(torch.full_like(exact, math.nan), wanted) == math.inf
    assert gradient_excess(torch.where(exact.abs() < 1e-6, 0, exact), wanted) > 1.0
    assert gradient_excess(exact[:-1], wanted) == math.inf
