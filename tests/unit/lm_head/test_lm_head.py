"""The LM head from hidden states against float64 autograd: on a CPU its mathematics, on a GPU its products and kernels
too."""

import gc
import math
import random
import threading
import warnings
import weakref
from dataclasses import dataclass, replace

import pytest
import single_pass
import threads
import torch
from loss_terms import kl_and_entropy
from objective_parts import build

from megatron_pg.batch import TokenFields
from megatron_pg.declarations.choices import HEAD_MODES
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, api, grpo_loss
from megatron_pg.lm_head import Head, chunks, fp32_logits, grpo_head_loss, logprobs_and_entropy, products
from megatron_pg.lm_head.loss import policy_gradient_head_loss
from megatron_pg.lm_head.output_layer import DeferredHead

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}
OF_TOKENS = ("targets", "old_logprobs", "advantages", "weights", "mask")
REAL_SIZES = products.chunk_rows, products.block_rows


@dataclass(frozen=True)
class Case:
    rows: int = 21
    hidden: int = 16
    columns: int = 48
    dtype: torch.dtype = torch.float64
    padding: int = 0
    temperature: float = 1.0
    masked: float = 0.4
    mode: str = "forward"
    backward: str = "bf16"
    main_grad: bool = False
    upstream: float = 1.0
    grad_divisor: float = 1.0
    impl: str = "torch"
    seed: int = 0


def random_case(rng: random.Random) -> Case:
    columns = rng.choice([16, 48, 240])
    mode = rng.choice(HEAD_MODES)
    return Case(
        rows=rng.choice([1, 4, 21, 50]),
        hidden=rng.choice([8, 32]),
        columns=columns,
        dtype=rng.choice([torch.float64, torch.float32, torch.bfloat16]),
        padding=rng.choice([0, 0, 3, columns // 2]),
        temperature=rng.choice([1.0, 0.7, 2.0]),
        masked=rng.choice([0.0, 0.5, 0.9, 1.0]),
        mode=mode,
        backward="bf16" if mode == "scaled_exp" else rng.choice(["bf16", "split"]),
        main_grad=rng.random() < 0.5,
        upstream=rng.choice([1.0, 6.0]),
        grad_divisor=rng.choice([1.0, 4.0]),
        impl=rng.choice(["torch", "triton"]),
        seed=rng.randrange(2**30),
    )


def dtype_for_triton(case: Case) -> torch.dtype:
    """It has no float64, the product of scaled_exp is of bfloat16 on a GPU, and the interpreter gets that wrong."""
    if case.mode == "scaled_exp":
        return torch.bfloat16 if CUDA else torch.float32
    return torch.float32 if case.dtype == torch.float64 else case.dtype


def make(case: Case) -> dict:
    """Hidden states, weight and fields; what masked rows hold must not matter."""
    torch.manual_seed(case.seed)
    hidden = torch.randn(case.rows, case.hidden, dtype=torch.float64)
    weight = torch.randn(case.columns, case.hidden, dtype=torch.float64) * case.hidden**-0.5
    mask = torch.rand(case.rows) >= case.masked
    hidden[~mask] = math.nan
    targets = torch.where(mask, torch.randint(0, case.columns - case.padding, (case.rows,)), -100)
    drawn = [-torch.rand(case.rows).double() - 3, torch.randn(case.rows).double(), torch.rand(case.rows).double()]
    known = targets, *(torch.where(mask, values, math.nan) for values in drawn), mask
    fields = {name: values.to(DEVICE) for name, values in zip(OF_TOKENS, known, strict=True)}
    return fields | {"hidden": hidden.to(DEVICE, case.dtype), "weight": weight.to(DEVICE, case.dtype)}


def expected(case: Case, fields: dict) -> dict:
    """The formulas in float64, by autograd over the trained rows."""
    mask, valid = fields["mask"], case.columns - case.padding
    hidden = fields["hidden"].detach().double()[mask].requires_grad_()
    weight = fields["weight"].detach().double().clone().requires_grad_()
    log_p = torch.log_softmax((hidden @ weight.t())[:, :valid] / case.temperature, dim=1)
    logprobs = log_p.gather(1, fields["targets"][mask][:, None])[:, 0]
    ratio = (logprobs - fields["old_logprobs"][mask]).clamp(-20, 20).exp()
    advantages = fields["advantages"][mask]
    losses = -torch.minimum(ratio * advantages, ratio.clamp(1 - 0.2, 1 + 0.28) * advantages)
    loss = (fields["weights"][mask] * losses).sum()
    (loss * case.upstream / case.grad_divisor).backward()
    of_hidden = torch.zeros(fields["hidden"].shape, dtype=torch.float64, device=mask.device)
    of_hidden[mask] = hidden.grad
    edge = (ratio / 0.8).log().abs().minimum((ratio / 1.28).log().abs()).min().item() if mask.any() else 1.0
    return {
        "loss": loss.detach(),
        "logprobs": logprobs.detach(),
        "entropy": -(log_p.exp() * log_p).sum(1).detach(),
        "of_hidden": of_hidden,
        "of_weight": weight.grad,
        "near a clip bound": edge < 1e-4,
    }


def run(case: Case, fields: dict, **options) -> dict:
    hidden, weight = fields["hidden"].clone().requires_grad_(), fields["weight"].clone().requires_grad_()
    before = 2.0**-10  # of earlier micro-batches
    total = torch.full_like(weight, before, dtype=torch.promote_types(case.dtype, torch.float32))
    as_in_case = ("temperature", "grad_divisor", "mode", "backward", "impl")
    given = {name: fields[name] for name in OF_TOKENS} | {name: getattr(case, name) for name in as_in_case} | CLIP
    given |= {"vocab_size": case.columns - case.padding, "main_grad": total if case.main_grad else None}
    given |= {"entropy": case.mode != "scaled_exp", "grad_scale": case.upstream}
    out = grpo_head_loss(hidden, weight, **given | options)
    (out.loss * case.upstream).backward()
    assert case.main_grad == (weight.grad is None)
    of_weight = total.detach() - before if case.main_grad else weight.grad
    return {"out": out, "of_hidden": hidden.grad, "of_weight": of_weight}


def loss_of(head: str, fields: dict, weight: torch.Tensor, **options) -> torch.Tensor:
    """In torch, by a mode of the fused head or by whole logits ("logits"), of hidden states that are left alone."""
    given = {name: fields[name] for name in OF_TOKENS} | CLIP | {"impl": "torch"}
    if head == "logits":
        return grpo_loss(fp32_logits(fields["hidden"], weight), **given).loss
    return grpo_head_loss(fields["hidden"], weight, **given | options, mode=head).loss


def parameter_of(fields: dict, seen: list | None = None, is_shared: bool = False) -> tuple[torch.nn.Parameter, object]:
    """The weight with Megatron's `main_grad`, and the node that has the hook of its DDP, which must be kept.

    `seen`: what the hook finds in `grad_added_to_main_grad`; None: no hook.
    """
    weight = torch.nn.Parameter(fields["weight"].clone())
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight).requires_grad_(False), False

    def hook(*_):
        assert weight.grad is not None
        seen.append(weight.grad_added_to_main_grad)
        if not weight.grad_added_to_main_grad or is_shared:
            weight.main_grad.add_(weight.grad.data)
        weight.grad, weight.grad_added_to_main_grad = None, False

    node = weight.expand_as(weight).grad_fn.next_functions[0][0]
    if seen is not None:
        node.register_hook(hook)
    return weight, node


def worst(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest difference relative to the largest entry; infinite where a value is not finite."""
    if found.shape != wanted.shape or not found.isfinite().all():
        return math.inf
    return float((found.double() - wanted).abs().amax() / wanted.abs().amax().clamp(min=1e-3)) if found.numel() else 0.0


def tolerance(case: Case, of: str) -> float:
    """Rounding of the dtype; the weight gradient in float32 of a split gradient of the logits has 16 bits."""
    if case.dtype == torch.float64 and case.impl == "torch":
        return 1e-12
    if case.dtype != torch.bfloat16 or of == "values":
        return 1e-5
    if case.mode == "scaled_exp":  # exponentials and weighed hidden states are both rounded
        return 1.2e-2
    return 2e-5 if of == "of_weight" and case.backward == "split" and case.main_grad else 8e-3


def check(case: Case, **options) -> None:
    fields = make(case)
    wanted, found = expected(case, fields), run(case, fields, **options)
    mask, values = fields["mask"], tolerance(case, "values")
    assert (found["out"].entropy is None) == (case.mode == "scaled_exp"), case
    for name in ("logprobs",) if case.mode == "scaled_exp" else ("logprobs", "entropy"):
        shown = getattr(found["out"], name)
        assert not shown[~mask].any(), (case, name)
        assert worst(shown[mask], wanted[name]) <= values, (case, name)
    assert abs(float(found["out"].loss.detach() - wanted["loss"])) <= values * 10, case
    assert not found["of_hidden"][~mask].any(), case
    if wanted["near a clip bound"] and case.dtype != torch.float64:
        return
    for name in ("of_hidden", "of_weight"):
        assert worst(found[name], wanted[name]) <= tolerance(case, name), (case, name, worst(found[name], wanted[name]))


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch, small_tiles):
    """Several chunks and blocks in every case."""
    monkeypatch.setattr(products, "chunk_rows", lambda weight, buffers: 4)
    monkeypatch.setattr(products, "block_rows", lambda weight, chunk: 8)


@pytest.mark.proof("T6 fused LM head against float64")
@pytest.mark.parametrize("block", range(4))
def test_random_cases_equal_the_oracle(block, full, evidence):
    rng, cases = random.Random(f"head{block}"), 250 if full else 2
    for _ in range(cases):
        case = random_case(rng)
        check(replace(case, dtype=dtype_for_triton(case)) if case.impl == "triton" else case)
    evidence(cases=cases)


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
@pytest.mark.parametrize("backward", ["bf16", "split"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_that_go_through_the_single_pass_kernel(dtype, backward, monkeypatch):
    """The kernel's own work is done in torch."""
    launches = single_pass.in_torch(monkeypatch)
    changes = {"padding": 16, "temperature": 0.7, "upstream": 6.0, "grad_divisor": 4.0, "main_grad": True}
    case = Case(dtype=dtype, backward=backward, impl="triton", **changes)
    check(case)
    assert sum(k["rows"] for k in launches) == int(make(case)["mask"].sum())
    assert len(launches) > 2


@pytest.mark.skipif(CUDA, reason="the kernel itself runs")
@pytest.mark.parametrize("is_single_pass", [False, True])
def test_a_loss_with_kl_and_bonus_in_the_head_equals_torch(is_single_pass, monkeypatch):
    """By statistics, one launch for the loss and a gradient, or by the single-pass kernel, its work done in torch."""
    launches = single_pass.in_torch(monkeypatch) if is_single_pass else []
    fields = make(Case(rows=9, dtype=torch.float32))
    further = kl_and_entropy(kl_coef=0.1, kl_estimator="k3_weighted", entropy_coef=0.02)
    token_fields = TokenFields(
        **{name: fields[name] for name in OF_TOKENS},
        corrections=torch.linspace(0, 2, 9, dtype=torch.float64),
        ref_logprobs=fields["old_logprobs"] + 0.1,
    )
    policy_loss = PolicyLoss(LossTerms(objective=build("grpo"), further=further, grad_divisor=2.0), token_fields)
    found, vocabulary = [], Vocabulary.of(len(fields["weight"]))
    for impl in ("triton", "torch"):
        hidden, weight = (fields[name].clone().requires_grad_() for name in ("hidden", "weight"))
        out = policy_gradient_head_loss(hidden, weight, policy_loss, vocabulary, Head(impl=impl), grad_scale=3.0)
        (out.loss * 3).backward()
        found.append([out.loss.detach(), out.token_losses, out.term_losses, hidden.grad, weight.grad])
    for ours, wanted in zip(*found, strict=True):
        assert worst(ours, wanted.double()) <= 2e-5
    assert bool(launches) == is_single_pass


@pytest.mark.parametrize("backward", ["bf16", "split"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float32_logits_and_their_gradients(dtype, backward):
    case = Case(dtype=dtype, backward=backward, masked=0.0, main_grad=True)
    fields = make(case)
    hidden = fields["hidden"].view(3, 7, -1).clone().requires_grad_()
    weight = fields["weight"].requires_grad_()
    total = torch.zeros(48, 16, device=DEVICE, dtype=torch.promote_types(dtype, torch.float32))
    logits = fp32_logits(hidden, weight, backward=backward, main_grad=total)
    upstream = torch.randn(logits.shape, dtype=torch.float64, device=DEVICE)
    logits.backward(upstream.to(logits.dtype))
    exact = fields["hidden"].double()
    assert (logits.dtype, logits.shape) == (torch.promote_types(dtype, torch.float32), (3, 7, 48))
    values = 1e-12 if dtype == torch.float64 else 1e-6
    assert worst(logits.detach().flatten(0, 1), exact @ weight.detach().double().t()) <= values
    upstream = upstream.flatten(0, 1)
    assert worst(hidden.grad.flatten(0, 1), upstream @ weight.detach().double()) <= tolerance(case, "of_hidden")
    assert worst(total, upstream.t() @ exact) <= tolerance(case, "of_weight")


def test_splitting_the_gradient_is_what_makes_it_precise():
    """The two backwards differ where they should: a hundred times in the weight gradient."""
    case = Case(dtype=torch.bfloat16, main_grad=True, masked=0.0, rows=50)
    fields = make(case)
    wanted = expected(case, fields)["of_weight"]
    errors = [worst(run(replace(case, backward=b), fields)["of_weight"], wanted) for b in ("bf16", "split")]
    assert errors[0] > 100 * errors[1] > 0


def test_bfloat16_logits_would_be_a_hundred_times_less_exact():
    case = Case(dtype=torch.bfloat16, masked=0.0, rows=50)
    fields = make(case)
    wanted = expected(case, fields)["logprobs"]
    with torch.no_grad():
        ours, _ = logprobs_and_entropy(fields["hidden"], fields["weight"], fields["targets"], impl="torch")
        rounded = (fields["hidden"] @ fields["weight"].t()).double().log_softmax(1)
    rounded = rounded.gather(1, fields["targets"][:, None])[:, 0]
    assert worst(rounded, wanted) > 100 * worst(ours, wanted)


@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_targets_may_have_any_strides(impl):
    fields = make(Case(rows=5, dtype=torch.float32, masked=0.0))
    strided = torch.stack([fields["targets"], torch.zeros_like(fields["targets"])], 1)[:, 0]
    assert not strided.is_contiguous()
    wanted, found = (
        logprobs_and_entropy(fields["hidden"], fields["weight"], targets, impl=impl)
        for targets in (fields["targets"], strided)
    )
    assert torch.equal(found[0], wanted[0])


def sharded(case: Case, fields: dict, ranks: int, sequence_parallel: bool) -> list[dict]:
    """What every tensor-parallel rank finds, from its rows of the weight and, with sequence parallelism, of the hidden
    states."""
    columns = case.columns // ranks

    def work(rank: int) -> dict:
        group = threads.subgroup(lambda r: 0, ranks, rank)
        weight = fields["weight"][rank * columns : (rank + 1) * columns].clone()
        hidden = fields["hidden"].chunk(ranks)[rank] if sequence_parallel else fields["hidden"]
        options = {"tp_group": group, "sequence_parallel": sequence_parallel}
        return run(case, fields | {"hidden": hidden, "weight": weight}, **options)

    return threads.run(ranks, work)


@pytest.mark.skipif(CUDA, reason="ranks are threads, on a CPU only")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("mode", HEAD_MODES)
def test_tensor_parallel_ranks_equal_one_and_each_other(mode, ranks, sequence_parallel, full):
    for seed in range(10 if full else 2):
        padding = (0, 30, 5, 13, 40)[seed % 5]  # the last ranks may hold nothing else
        case = Case(rows=24, mode=mode, padding=padding, seed=seed, temperature=0.8, main_grad=seed % 2 == 0)
        fields = make(case)
        wanted, found = expected(case, fields), sharded(case, fields, ranks, sequence_parallel)
        mask = fields["mask"]
        for one in found:
            assert torch.equal(one["out"].logprobs, found[0]["out"].logprobs)
            assert worst(one["out"].logprobs[mask], wanted["logprobs"]) <= 1e-12
            assert mode == "scaled_exp" or worst(one["out"].entropy[mask], wanted["entropy"]) <= 1e-12
            assert abs(float(one["out"].loss.detach() - wanted["loss"])) <= 1e-12
        of_hidden = [one["of_hidden"] for one in found]
        of_hidden = [torch.cat(of_hidden)] if sequence_parallel else of_hidden
        assert all(worst(gradient, wanted["of_hidden"]) <= 1e-12 for gradient in of_hidden)
        assert worst(torch.cat([one["of_weight"] for one in found]), wanted["of_weight"]) <= 1e-12


@pytest.mark.skipif(CUDA, reason="ranks are threads, on a CPU only")
@pytest.mark.parametrize("mode", ["forward", "recompute"])
def test_ranks_exchange_between_products(mode, monkeypatch):
    """A product of an earlier chunk has ended, and none has begun: it would take the collective's multiprocessors."""
    events = {}

    def noted(name, function):
        def note(*given, **named):
            events.setdefault(threading.get_ident(), []).append((name, named.get("async_op", False)))
            return function(*given, **named)

        return note

    gather = torch.distributed.all_gather_into_tensor
    monkeypatch.setattr(torch.distributed, "all_gather_into_tensor", noted("exchange", gather))
    monkeypatch.setattr(chunks, "product_into", noted("product", products.product_into))
    case = Case(rows=24, mode=mode)
    sharded(case, fields := make(case), 2, sequence_parallel=False)
    count = -(-int(fields["mask"].sum()) // 4)
    for of_rank in events.values():
        assert of_rank[: 2 * count] == [("product", False), ("exchange", False)] * count
    assert len(events) == 2


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_what_is_frozen_gets_no_gradient(mode, frozen):
    fields, trained = make(Case(mode=mode)), "weight" if frozen == "hidden" else "hidden"
    wanted = expected(Case(), fields)
    fields[trained].requires_grad_()
    loss_of(mode, fields, fields["weight"]).backward()
    assert fields[frozen].grad is None
    assert worst(fields[trained].grad, wanted[f"of_{trained}"]) <= 1e-12


@pytest.mark.parametrize("mode", HEAD_MODES)
def test_without_gradient_nothing_is_written(mode):
    fields, total = make(Case()), torch.ones(48, 16, dtype=torch.float64, device=DEVICE)
    weight = fields["weight"].requires_grad_()
    with torch.no_grad():
        loss = loss_of(mode, fields, weight, main_grad=total)
    assert not loss.requires_grad
    assert (total == 1).all()
    assert weight.grad is None
    assert abs(float(loss - expected(Case(), fields)["loss"])) <= 1e-12


def test_rows_may_be_given_and_nothing_may_be_trained():
    case = Case()
    fields = make(case)
    rows = fields["mask"].nonzero()[:, 0]
    given, found = run(case, fields, rows=rows), run(case, fields)
    assert torch.equal(given["of_weight"], found["of_weight"])
    assert torch.equal(given["out"].loss, found["out"].loss)
    none = run(replace(case, masked=1.0), make(replace(case, masked=1.0)))
    assert float(none["out"].loss.detach()) == 0
    assert not none["of_weight"].any()
    assert not none["of_hidden"].any()


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("grad_scale", [1.0, 12.0])
def test_the_gradient_of_a_multiple_of_the_loss_is_that_multiple_of_the_gradient(grad_scale, mode):
    """Of hidden states and weight, for any multiple was expected, where nothing is in `main_grad` yet."""
    check(Case(mode=mode, upstream=3.0), grad_scale=grad_scale)


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_a_target_outside_the_vocabulary_makes_loss_and_gradient_of_its_row_nan(impl, mode, monkeypatch):
    monkeypatch.setattr(api, "check_labels", lambda *_: None)  # as on a GPU
    case = Case(rows=6, masked=0.0, dtype=torch.float32, impl=impl, mode=mode, padding=3)
    case = replace(case, dtype=dtype_for_triton(case)) if impl == "triton" else case
    fields = make(case)
    fields["targets"][1:4] = torch.tensor([-1, 45, 2**40])
    found = run(case, fields)
    is_bad = torch.tensor([0, 1, 1, 1, 0, 0], device=DEVICE).bool()
    assert found["out"].loss.isnan()
    assert torch.equal(found["out"].logprobs.isnan(), is_bad)
    assert torch.equal(found["of_hidden"].isnan(), is_bad[:, None].expand(6, 16))
    assert found["of_weight"][:45].isnan().all()


def test_a_deferred_call_is_handed_over_once_and_nothing_of_it_is_kept():
    """The hidden states of a micro-batch must not outlive its loss."""
    layer = torch.nn.Identity()
    layer._forward_impl = lambda **arguments: "logits"
    is_wanted = [True]
    deferred = DeferredHead()
    deferred.put_into(layer, lambda: is_wanted[0])
    arguments = {"weight": None, "bias": None, "grad_output_buffer": None, "sequence_parallel": False, "tp_group": None}
    hidden = torch.zeros(3, 2, 5)
    stand_in = layer._forward_impl(input=hidden, **arguments)
    assert stand_in.shape == (3, 2, 2)  # for code that counts on logits
    assert deferred.take(stand_in).hidden is hidden
    assert deferred.take(stand_in) is None
    is_gone = weakref.ref(hidden)
    del hidden
    assert is_gone() is None
    is_wanted[0] = False
    assert layer._forward_impl(input=torch.zeros(3, 2, 5), **arguments) == "logits"
    assert deferred.take(stand_in) is None


@pytest.mark.skipif(CUDA, reason="a device-side assertion ends the process")
@pytest.mark.parametrize("factor", [2.0, 1.001, 0.999])
def test_another_upstream_gradient_than_main_grad_was_made_for_is_an_error(factor):
    fields = make(Case())
    for name in ("hidden", "weight"):
        fields[name].requires_grad_()
    main_grad = torch.zeros(48, 16, dtype=torch.float64)
    with pytest.raises(RuntimeError, match="another upstream gradient than its grad_scale"):
        (loss_of("forward", fields, fields["weight"], main_grad=main_grad) * factor).backward()
    loss = loss_of("forward", fields, fields["weight"], main_grad=main_grad)
    (loss * (1 + 2.0**-21)).backward()  # a few roundings of a schedule that multiplies in float32
    loss = loss_of("forward", fields, fields["weight"])
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="ran a second time"):
        loss.backward()


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("is_shared", [False, True])
def test_megatrons_protocol_of_main_grad(mode, is_shared):
    """The hook that Megatron's DDP puts on a parameter finds what it asserts, and adds nothing twice."""
    fields, seen = make(Case()), []
    weight, _node = parameter_of(fields, seen, is_shared)
    if is_shared:
        weight.zero_out_wgrad = True
    loss = loss_of(mode, fields, weight) + ((3.0 * weight).sum() if is_shared else 0)  # the embedding's share
    loss.backward()
    assert seen == [True]
    assert worst(weight.main_grad, expected(Case(), fields)["of_weight"] + 3.0 * is_shared) <= 1e-12


@pytest.mark.parametrize("head", [*HEAD_MODES, "logits"])
@pytest.mark.parametrize("is_head_first", [True, False])
def test_another_gradient_of_an_untied_weight_is_added_to_main_grad(head, is_head_first):
    """A penalty on the weight, for instance: it would be lost, or meet a gradient without memory."""
    fields = make(Case(masked=0.0))  # whole logits read the rows that are masked
    weight, _node = parameter_of(fields, [])
    parts = [lambda: loss_of(head, fields, weight), lambda: 0.5 * (weight**2).sum()]
    first, second = parts if is_head_first else parts[::-1]
    (first() + second()).backward()
    by_head = expected(Case(), fields)["of_weight"]
    assert worst(weight.main_grad, by_head + fields["weight"]) <= 1e-12
    loss_of(head, fields, weight).backward()  # the next micro-batch has none
    assert worst(weight.main_grad, 2 * by_head + fields["weight"]) <= 1e-12


@pytest.mark.parametrize("head", [*HEAD_MODES, "logits"])
def test_main_grad_has_the_gradient_where_saved_tensors_are_kept_elsewhere(head):
    fields = make(Case(masked=0.0))  # whole logits read the rows that are masked
    wanted, (weight, _) = expected(Case(), fields), parameter_of(fields)
    fields["hidden"].requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(head, fields, weight)
    loss.backward()
    assert worst(weight.main_grad, wanted["of_weight"]) <= 1e-12
    assert weight.grad_added_to_main_grad
    assert worst(fields["hidden"].grad, wanted["of_hidden"]) <= 1e-12


@pytest.mark.parametrize("mode", HEAD_MODES)
@pytest.mark.parametrize("has_backward", [True, False])
def test_a_forward_that_added_to_main_grad_warns_if_its_backward_never_runs(mode, has_backward):
    fields = make(Case())
    weight, _ = parameter_of(fields)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loss = loss_of(mode, fields, weight)
        if has_backward:
            loss.backward()
        del loss
        gc.collect()
    texts = [str(each.message) for each in seen if "fused head whose backward never ran" in str(each.message)]
    assert len(texts) == int(not has_backward and mode != "recompute")
    with torch.no_grad():
        before = weight.main_grad.clone()
        loss_of(mode, fields, weight)
    assert torch.equal(weight.main_grad, before)


@pytest.mark.parametrize("mode", HEAD_MODES)
def test_a_weight_whose_main_grad_has_to_be_fetched_gets_its_gradient_from_autograd(mode):
    """Megatron-FSDP's hook takes the parameter's gradient; its buffer holds one micro-batch."""
    fields = make(Case())
    weight = torch.nn.Parameter(fields["weight"].clone())
    weight.grad_added_to_main_grad, weight.get_main_grad = False, None
    loss_of(mode, fields, weight).backward()
    assert not weight.grad_added_to_main_grad
    assert worst(weight.grad, expected(Case(), fields)["of_weight"]) <= 1e-12


@pytest.mark.skipif(CUDA, reason="products on a CPU")
def test_logits_are_float32_under_autocast():
    hidden, weight = torch.randn(6, 32), torch.randn(40, 32)
    found, leaves = {}, {}
    for is_on in (True, False):
        leaves[is_on] = [each.bfloat16().requires_grad_() for each in (hidden, weight)]
        with torch.autocast("cpu", torch.bfloat16, enabled=is_on):
            found[is_on] = fp32_logits(*leaves[is_on])
            found[is_on].square().sum().backward()
    assert found[True].dtype == torch.float32
    assert torch.equal(found[True], found[False])
    assert all(torch.equal(on.grad, off.grad) for on, off in zip(leaves[True], leaves[False], strict=True))


@pytest.mark.parametrize("mode", HEAD_MODES)
def test_a_masked_ignore_index_is_accepted_and_a_trained_one_refused_on_a_cpu(mode):
    fields = make(Case(rows=6, masked=0.0))
    fields["targets"][2] = -100
    fields["mask"] = torch.arange(6, device=DEVICE) != 2
    assert loss_of(mode, fields, fields["weight"]).isfinite()
    fields["mask"][2] = True
    if CUDA:
        assert loss_of(mode, fields, fields["weight"]).isnan()
        return
    with pytest.raises(ValueError, match=r"^targets\[2\] is -100 at a trained token, .* ids 0 to 47 \(1 such"):
        loss_of(mode, fields, fields["weight"])


def test_products_of_whole_logits_never_come_to_be(monkeypatch):
    """No tensor of T rows of logits exists at any time in any mode."""
    largest = []
    make_rows = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        out = make_rows(self, *size, **options)
        largest.append(out.shape[0] if out.dim() == 2 and out.shape[1] == 48 else 0)
        return out

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)
    for mode in HEAD_MODES:
        case = Case(rows=50, masked=0.0, mode=mode)
        run(case, make(case))
    assert max(largest) == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mode": "sideways"}, "mode='sideways' is not one of forward, recompute, scaled_exp"),
        ({"mode": "scaled_exp", "backward": "split"}, "mode='scaled_exp' has no float32 gradient of the logits"),
        ({"mode": "scaled_exp", "entropy": True}, "too coarse for an entropy. Use mode='forward'"),
        ({"backward": "exact"}, "backward='exact' is not one of bf16, split"),
        ({"impl": "cuda"}, "impl='cuda' is not one of triton, torch"),
        ({"impl": "triton"}, "would lose float64's digits"),
        ({"weight": torch.zeros(48, 15, dtype=torch.float64, device=DEVICE)}, "not [..., H] and [V / tp, H]"),
        ({"weight": torch.zeros(0, 16, dtype=torch.float64, device=DEVICE)}, "has 0 columns on this rank"),
        ({"weight": torch.zeros(48, 16, device=DEVICE)}, "of one dtype, so there is no product"),
        ({"vocab_size": 49}, "vocab_size=49 is not in 1 .. 48"),
        ({"temperature": 0.0}, "temperature=0.0 is not > 0"),
        ({"hidden": torch.zeros(5, 16, dtype=torch.float64, device=DEVICE)}, "5 rows of hidden states, not [5] int64"),
        ({"targets": torch.zeros(21, device=DEVICE)}, "dtype torch.float32 for 21 rows of hidden states"),
    ],
)
def test_bad_input_is_refused(changes, message):
    fields = make(Case())
    fields["hidden"].requires_grad_()
    with pytest.raises(ValueError) as error:
        grpo_head_loss(**fields | {"impl": "torch"} | CLIP | changes)
    assert message in str(error.value)


def test_chunks_fill_the_memory_that_they_may_take():
    """The sizes behind the figures of docs/kernels.md: 1024 and 4096 rows of 151,936 columns, more of a shard."""
    sizes = {}
    for columns in (151936, 75968, 37984, 50_000_000):
        weight = torch.empty(columns, 1, dtype=torch.bfloat16, device="meta")
        chunk = REAL_SIZES[0](weight, 1)
        sizes[columns] = chunk, REAL_SIZES[1](weight, chunk)
    assert sizes == {151936: (1024, 4096), 75968: (2048, 8192), 37984: (4096, 16384), 50_000_000: (128, 128)}


def test_in_float32_the_head_and_its_split_change_nothing():
    """What warning W10 says."""
    hidden, weight = torch.randn(7, 16, device=DEVICE), torch.randn(48, 16, device=DEVICE)
    upstream, found = torch.randn(7, 48, device=DEVICE), []
    for backward in (None, "bf16", "split"):
        h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logits = fp32_logits(h, w, backward=backward) if backward else h @ w.t()
        logits.backward(upstream)
        found.append((logits.detach(), h.grad, w.grad))
    for plain, bf16, split in zip(*found, strict=True):
        assert torch.equal(bf16, split)
        assert (plain - bf16).abs().max() < 1e-5
