"""Mode "scaled_exp" of the fused head where it is unlike the others: far targets, near ones, its tiles, its rounding
and what it refuses."""

import argparse
import math
from dataclasses import replace

import pytest
import threads
import torch
from launch_count import count_kernels
from loss_terms import kl_and_entropy

from megatron_pg.args import add_arguments
from megatron_pg.batch import TokenFields
from megatron_pg.declarations.choices import AT_ONCE
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary, device
from megatron_pg.lm_head import Head, policy_gradient_head_loss, products
from megatron_pg.lm_head.scaled_exp.head import ScaledExp, logprobs_of
from megatron_pg.objectives import objective_of
from megatron_pg.plan.settings import LossSettings

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
IMPLS = [("torch", torch.float64), ("torch", torch.float32), ("triton", torch.bfloat16 if CUDA else torch.float32)]


def fields_of(rows: int, columns: int, **changes: torch.Tensor) -> TokenFields:
    known = {
        "targets": torch.randint(0, columns, (rows,)),
        "mask": torch.ones(rows, dtype=torch.bool),
        "old_logprobs": torch.full((rows,), -3.0),
        "advantages": torch.randn(rows),
        "weights": torch.rand(rows),
    }
    return TokenFields(**{name: values.to(DEVICE) for name, values in (known | changes).items()})


def loss_of(fields: TokenFields, objective: str = "grpo", **terms: object) -> PolicyLoss:
    numbers = {"grpo": {"clip_eps_low": 0.2, "clip_eps_high": 0.28}, "dro": {"beta": 0.5}}.get(objective, {})
    return PolicyLoss(LossTerms(objective=objective_of(objective, **numbers), **terms), fields)


def run(hidden: torch.Tensor, weight: torch.Tensor, policy_loss: PolicyLoss, head: Head, **vocabulary: object) -> tuple:
    leaves = [each.detach().to(DEVICE, copy=True).requires_grad_() for each in (hidden, weight)]
    out = policy_gradient_head_loss(*leaves, policy_loss, Vocabulary.of(len(weight), **vocabulary), head)
    out.loss.backward()
    return out, *(leaf.grad for leaf in leaves)


def expected(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    policy_loss: PolicyLoss,
    temperature: float = 1.0,
    valid: int | None = None,
    softcap: float = math.inf,
) -> tuple:
    """In float64, by autograd: log-probabilities and both gradients."""
    leaves = [each.detach().to(DEVICE, torch.float64, copy=True).requires_grad_() for each in (hidden, weight)]
    logits = (leaves[0] @ leaves[1].t())[:, :valid]
    logits = softcap * torch.tanh(logits / softcap) if softcap < math.inf else logits
    log_p = (logits / temperature).log_softmax(1)
    logprobs = log_p.gather(1, policy_loss.fields.targets[:, None])[:, 0]
    policy_loss(logprobs).loss.backward()
    return logprobs.detach(), *(leaf.grad for leaf in leaves)


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found.double() - wanted).norm() / wanted.norm())


def head_of(impl: str) -> Head:
    return Head(mode="scaled_exp", impl=impl)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def ahead(nats: list[float], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and weight with log π(0) = -log(1 + e^nats): column 1 has the logit `nats`, column 0 has 0, the
    rest none."""
    hidden = torch.zeros(len(nats), 16, dtype=torch.float64)
    hidden[:, 0], hidden[:, 1] = torch.tensor(nats, dtype=torch.float64), -2000.0
    weight = torch.zeros(24, 16, dtype=torch.float64)
    weight[1, 0], weight[2:, 1] = 1, 1
    return hidden.to(dtype), weight.to(dtype)


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_log_probabilities_are_exact_from_certain_to_hopeless_tokens(impl, dtype):
    """To relative precision, near 0 too; e^-41 is where two formulas meet."""
    nats = [-44.0, -40, -20, -8, -4, -2.8, -2.7, -1, 0, 8, 40, 41.5, 42, 60, 90, 102]
    hidden, weight = ahead(nats, dtype)
    fields = fields_of(len(nats), 1, advantages=torch.ones(len(nats)))
    policy_loss = loss_of(fields, "reinforce")
    out, of_hidden, of_weight = run(hidden, weight, policy_loss, head_of(impl))
    _, *gradients = expected(hidden, weight, policy_loss)
    values = hidden[:, 0].to(DEVICE, torch.float64)  # in the dtype's own digits
    wanted = -torch.logaddexp(torch.zeros_like(values), values)
    assert ((out.logprobs.double() - wanted).abs() <= 1e-5 * wanted.abs()).all()
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
    assert error(of_hidden, gradients[0]) <= tolerance
    assert error(of_weight, gradients[1]) <= tolerance


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_a_token_too_far_off_has_no_gradient_where_its_loss_has_none(impl, dtype):
    """The ratio is clamped long before; what is reported is the bound that is known."""
    hidden, weight = ahead([110.0, 2000.0, 1.0], dtype)
    fields = fields_of(3, 1, advantages=torch.tensor([1.0, -1.0, 1.0]), old_logprobs=torch.full((3,), -1.0))
    out, of_hidden, of_weight = run(hidden, weight, loss_of(fields), head_of(impl))
    assert out.loss.isfinite()
    assert out.log_ratios.isfinite().all()
    assert (out.logprobs[:2] < -103).all()
    assert not of_hidden[:2].any()
    assert of_hidden[2].any()
    alone = expected(hidden[2:], weight, loss_of(fields.at(slice(2, 3))))
    assert error(of_weight, alone[2]) <= (1e-2 if dtype == torch.bfloat16 else 1e-5)


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
@pytest.mark.parametrize(("name", "old"), [("reinforce", -3.0), ("dro", -3.0), ("grpo", -110.0), ("grpo", -150.0)])
def test_a_token_too_far_off_makes_loss_and_gradient_nan_where_the_loss_depends_on_it(name, old, impl, dtype):
    """Then the step stops, by the check of log-ratios and losses that are not finite; a ratio that is clipped may in
    truth be 1."""
    hidden, weight = ahead([110.0, 1.0], dtype)
    fields = fields_of(2, 1, advantages=torch.ones(2), old_logprobs=torch.tensor([old, -3.0]))
    out, of_hidden, of_weight = run(hidden, weight, loss_of(fields, name), head_of(impl))
    assert out.loss.isnan()
    assert out.log_ratios.isnan().tolist() == [True, False]
    assert of_hidden.isnan().any(dim=1).tolist() == [True, False]
    assert of_weight.isnan().any()


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
@pytest.mark.parametrize("where", ["hidden", "target", "other"])
def test_nan_is_not_mistaken_for_a_far_token(where, impl, dtype):
    """By a clamp that drops NaN it would be one, whose clipped loss has no gradient."""
    hidden, weight = torch.randn(4, 16).to(dtype), torch.randn(24, 16).to(dtype)
    fields = fields_of(4, 1, advantages=torch.ones(4))
    if where == "hidden":
        hidden[2, 3] = math.nan
    else:
        weight[0 if where == "target" else 7, 3] = math.nan
    out, of_hidden, of_weight = run(hidden, weight, loss_of(fields), head_of(impl))
    is_bad = (torch.arange(4, device=DEVICE) == 2) | (where != "hidden")
    assert torch.equal(out.logprobs.isnan(), is_bad)
    assert torch.equal(of_hidden.isnan().any(dim=1), is_bad)
    assert out.loss.isnan()
    assert of_weight.isnan().any()


@pytest.mark.skipif(CUDA, reason="the interpreter takes tiles of any size")
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("rows", "columns", "valid", "width"), [(50, 96, 96, 40), (33, 96, 70, 16), (7, 40, 39, 64)])
def test_tiles_that_rows_columns_and_width_do_not_fill(rows, columns, valid, width, parts, monkeypatch):
    """Several programs with several tiles each; every tile of columns holds targets, and the last one padding."""
    from megatron_pg.lm_head.tiled_product import Tiles

    tiles = Tiles(rows=16, columns=32, depth=16, group=2, parts=parts, warps=4, stages=2)
    monkeypatch.setattr(Tiles, "of_width", lambda *_, **__: tiles)
    monkeypatch.setattr(products, "block_rows", lambda *_: 48)
    hidden, weight = torch.randn(rows, width), torch.randn(columns, width) * width**-0.5
    fields = fields_of(rows, valid, ref_logprobs=torch.full((rows,), -5.0))
    policy_loss = loss_of(fields, "reinforce", further=kl_and_entropy(kl_coef=0.3, kl_estimator="k3"))
    out, of_hidden, of_weight = run(hidden, weight, policy_loss, head_of("triton"), temperature=0.7, vocab_size=valid)
    wanted, *gradients = expected(hidden, weight, policy_loss, temperature=0.7, valid=valid)
    assert (out.logprobs.double() - wanted).abs().max() <= 4e-6
    assert error(of_hidden, gradients[0]) <= 1e-6
    assert error(of_weight, gradients[1]) <= 1e-6
    assert not of_weight[valid:].any()


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_logits_with_a_softcap(impl, dtype, ranks, monkeypatch):
    """Several tiles and blocks, padding, logits beyond the cap; ranks share the columns."""
    if CUDA and ranks > 1:
        pytest.skip("ranks are threads, on a CPU only")
    monkeypatch.setattr(products, "block_rows", lambda *_: 24)
    count_kernels(monkeypatch)  # the interpreter launches for one thread at a time
    rows, columns, valid, cap = 40, 48, 45, 2.5
    hidden, weight = torch.randn(rows, 32), torch.randn(columns, 32)
    hidden, weight = (each.to(dtype) for each in (hidden, weight / 2))
    policy_loss = loss_of(fields_of(rows, valid), "reinforce")
    options = {"temperature": 0.7, "vocab_size": valid, "softcap": cap}

    def work(rank: int) -> tuple:
        group = threads.subgroup(lambda r: 0, ranks, rank) if ranks > 1 else None
        return run(hidden, weight.chunk(ranks)[rank], policy_loss, head_of(impl), **options, tp_group=group)

    found = threads.run(ranks, work) if ranks > 1 else [work(0)]
    wanted, *gradients = expected(hidden, weight, policy_loss, temperature=0.7, valid=valid, softcap=cap)
    tolerance = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2}[dtype]
    for out, of_hidden, _ in found:
        assert (out.logprobs.double() - wanted).abs().max() <= max(3 * tolerance, 1e-12)
        assert error(of_hidden, gradients[0]) <= tolerance
    of_weight = torch.cat([each[2] for each in found])
    assert error(of_weight, gradients[1]) <= tolerance
    assert not of_weight[valid:].any()


@pytest.mark.skipif(CUDA, reason="ranks are threads, on a CPU only")
@pytest.mark.parametrize("ranks", [1, 3])
def test_launches_and_collectives_of_a_micro_batch(ranks, monkeypatch):
    """One product and one exchange of sums per block; the targets' logits once."""
    monkeypatch.setattr(products, "block_rows", lambda *_: 8)
    launches, collectives = count_kernels(monkeypatch), []
    for name in ("all_reduce", "all_gather_into_tensor"):
        call = getattr(torch.distributed, name)
        counting = lambda *a, n=name, c=call, **k: (collectives.append(n), c(*a, **k))[1]  # noqa: E731
        monkeypatch.setattr(torch.distributed, name, counting)
    hidden, weight, fields = torch.randn(20, 16), torch.randn(24, 16), fields_of(20, 24)

    def work(rank: int) -> tuple:
        group = threads.subgroup(lambda r: 0, ranks, rank) if ranks > 1 else None
        part = weight.chunk(ranks)[rank]
        return run(hidden, part, loss_of(fields), head_of("triton"), tp_group=group)

    found = threads.run(ranks, work)
    blocks = 3  # of 8, 8 and 4 rows
    assert launches["target_kernel"] == ranks
    for name in ("product_kernel", "weigh_kernel", "surrogate_kernel", "scatter_kernel"):
        assert launches[name] == blocks * ranks
    assert launches["lost_kernel"] == ranks
    assert collectives.count("all_gather_into_tensor") == (blocks * ranks if ranks > 1 else 0)
    assert collectives.count("all_reduce") == (2 * ranks if ranks > 1 else 0)  # and the hidden states' gradient
    wanted = expected(hidden, weight, loss_of(fields))
    assert all(torch.equal(each[0].logprobs, found[0][0].logprobs) for each in found)
    assert (found[0][0].logprobs.double() - wanted[0]).abs().max() <= 4e-6
    assert error(found[0][1], wanted[1]) <= 1e-5
    assert error(torch.cat([each[2] for each in found]), wanted[2]) <= 1e-5


@pytest.mark.proof("LM head, scaled_exp: weight gradient as accurate as in forward, flat and peaked softmaxes")
@pytest.mark.parametrize("spread", [1.0, 3.0, 6.0, 12.0])
def test_the_rounding_is_what_the_pages_say(spread, evidence):
    """Of bfloat16: gradients at most as inaccurate as by mode "forward", log-probabilities not rounded at all."""
    hidden, weight = torch.randn(256, 64).bfloat16(), (torch.randn(2048, 64) * 64**-0.5 * spread).bfloat16()
    probabilities = (hidden.double() @ weight.double().t()).softmax(1)
    targets = probabilities.multinomial(1)[:, 0]
    policy_loss = loss_of(fields_of(256, 2048, targets=targets), "reinforce")
    wanted, *gradients = expected(hidden, weight, policy_loss)
    errors = {}
    for mode in ("forward", "scaled_exp"):
        total = torch.zeros(2048, 64, device=DEVICE)
        impl = "triton" if CUDA else "torch"
        out, of_hidden, _ = run(hidden, weight, policy_loss, Head(mode=mode, impl=impl, main_grad=total))
        errors[mode] = error(of_hidden, gradients[0]), error(total, gradients[1])
        assert (out.logprobs.double() - wanted).abs().max() <= 1e-5 * spread
    assert errors["scaled_exp"][0] <= 1.05 * errors["forward"][0]
    evidence(cases=1, worst=errors["scaled_exp"][1] / errors["forward"][1], tolerance=1.05)


@pytest.mark.parametrize("width", [40, 1100])
def test_what_rounding_took_at_the_targets_is_added_by_target(width):
    """Runs of rows of one target, longer and wider than a program reads at a time, targets elsewhere, and strides."""
    from megatron_pg.lm_head.scaled_exp.kernels import TritonScaledExp

    tokens, columns, dtype = 90, 24, torch.bfloat16 if CUDA else torch.float16  # which the interpreter rounds
    hidden, rows = torch.randn(120, width, device=DEVICE, dtype=dtype), torch.arange(tokens, device=DEVICE) + 7
    targets = torch.tensor([3] * 50 + [21, 23, -2, 24, 0] * 8, device=DEVICE)[torch.randperm(tokens)]
    v, e = torch.randn(2, tokens, device=DEVICE)
    weight, vocabulary = torch.empty(columns, width, device=DEVICE, dtype=dtype), Vocabulary.of(columns, vocab_size=23)
    exact, products_of = (torch.zeros(columns, width, device=DEVICE, dtype=torch.float64) for _ in range(2))
    for i, y in enumerate(targets.tolist()):
        if 0 <= y < 23:
            x = hidden[i + 7]
            exact[y] += v[i].double() * e[i].double() * x.double()
            products_of[y] += e[i].to(dtype).double() * (v[i, None] * x).to(dtype).double()
    for steps in (ScaledExp(weight, vocabulary), TritonScaledExp(weight, vocabulary)):
        totals = [products_of.float(), products_of.float().t().contiguous().t()]
        for total in totals:
            steps.add_lost(hidden, rows, targets, v, e, total)
        assert error(totals[0], exact) <= 1e-6
        assert not totals[0][[1, 23]].any()
        assert torch.equal(*totals)


def test_formulas_of_the_log_probability_meet():
    sums = torch.tensor([0.5, 1 - 2.0**-24, 1.0, 1.5], dtype=torch.float32)
    wanted = -(sums.double().log() + 60 * math.log(2))
    assert ((logprobs_of(sums).double() - wanted).abs() <= 1e-5 * wanted.abs()).all()


@pytest.mark.parametrize(
    ("mode", "changes", "what"),
    [
        ("scaled_exp", {"further": kl_and_entropy(entropy_coef=0.1)}, "an entropy"),
        *((mode, {"opsm_anchor": "old_logprobs", "opsm_threshold": 0.1}, "reads whole sequences") for mode in AT_ONCE),
    ],
)
def test_losses_that_read_more_are_refused(mode, changes, what):
    policy_loss = loss_of(fields_of(4, 24))
    policy_loss = replace(policy_loss, terms=replace(policy_loss.terms, **changes))
    with pytest.raises(ValueError, match=f"mode='{mode}' .*{what}"):
        run(torch.randn(4, 16), torch.randn(24, 16), policy_loss, Head(mode=mode, impl="torch"))


@pytest.mark.skipif(CUDA, reason="of float32, which the interpreter takes")
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.randn(24, 32)[:, :16], r"strides \(32, 1\) and byte offset 0"),
        (torch.randn(16, 24).t(), r"strides \(1, 24\)"),
        (torch.randn(24, 12), r"\(24, 12\)"),
        (torch.randn(24 * 16 + 1)[1:].view(24, 16), "byte offset 4"),
        (torch.randn(24, 16).half(), "float16 has 2"),
    ],
)
def test_weights_that_kernels_or_scaled_exp_cannot_have_are_refused(weight, message):
    hidden = torch.randn(4, weight.shape[1]).to(weight.dtype)
    with pytest.raises(ValueError, match=f"mode='scaled_exp' .*{message}"):
        policy_gradient_head_loss(
            hidden, weight, loss_of(fields_of(4, 24)), Vocabulary.of(24), Head(mode="scaled_exp", impl="triton")
        )


@pytest.mark.parametrize(("impl", "dtype"), IMPLS)
def test_rows_and_hidden_states_may_have_any_strides(impl, dtype):
    hidden, weight = torch.randn(12, 32)[::2, :16].to(DEVICE, dtype), torch.randn(24, 16).to(DEVICE, dtype)
    rows = torch.arange(6, device=DEVICE)[::2]
    policy_loss = loss_of(fields_of(6, 24, mask=torch.arange(6) % 2 == 0), "reinforce")
    found = []
    for given in (None, rows):
        leaf = hidden.detach().requires_grad_()
        out = policy_gradient_head_loss(leaf, weight, policy_loss, Vocabulary.of(24), head_of(impl), rows=given)
        out.loss.backward()
        found.append((out.logprobs, leaf.grad))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])
    assert found[0][1][::2].any(dim=1).all()
    assert not found[0][1][1::2].any()


@pytest.mark.parametrize(
    ("dtype", "capability"), [(torch.float16, (9, 0)), (torch.bfloat16, (8, 0)), (torch.bfloat16, (10, 0))]
)
def test_other_chips_and_dtypes_are_refused_by_name(dtype, capability, monkeypatch):
    """At startup, from the flags, and by the function itself."""
    monkeypatch.setattr(device, "_device", lambda: (torch.device("cuda", 0), "a GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    parsed = add_arguments(argparse.ArgumentParser()).parse_args(
        ["--pg-fused-head", "scaled_exp", "--pg-kernel", "triton"]
    )
    parsed.params_dtype = dtype
    with pytest.raises(ValueError, match=r"--pg-fused-head scaled_exp .* Use forward"):
        LossSettings.from_args(parsed)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    parsed.params_dtype = torch.bfloat16
    assert LossSettings.from_args(parsed).head_mode == "scaled_exp"
