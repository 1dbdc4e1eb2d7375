"""Token kernels of objectives and KL estimators: their source, run in torch, against autograd of the specification."""

import math

import pytest
import torch
from objective_parts import ESTIMATORS, build

from megatron_pg.args import ArgumentError
from megatron_pg.declarations.corrections import KL_ESTIMATORS
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels.triton import token_kernels
from megatron_pg.objectives import MAX_LOG_RATIO, Tokens, objective_of
from megatron_pg.objectives.custom.loading import load_custom_objective
from megatron_pg.objectives.interface.token_kernel import MOST_NUMBERS, in_torch

ROWS = [name for name, declared in OBJECTIVES.items() if not declared.no_token_kernel]
COUNT = 200_000
EXACT = {"sapo": 1e-13, "k3": 1e-11, "k1_weighted": 1e-11, "k3_weighted": 1e-11}  # others: equal, bit for bit
# r exactly on 0.8, 1.28, 1.5, 3, as exp rounds; the clamp's own bounds and what is beyond; equal policies
EDGES = [*(math.log(r) for r in (0.8, 1.28, 1.5, 3.0)), MAX_LOG_RATIO, -MAX_LOG_RATIO, 0.0]
EDGES += [sign * math.nextafter(MAX_LOG_RATIO, math.inf) for sign in (1, -1)]


@pytest.fixture(autouse=True)
def clamp_of_torch_2_14(monkeypatch):
    """`clamp` without a gradient exactly at a bound, where it is 1 up to torch 2.13: objectives depend on neither."""
    original = torch.Tensor.clamp

    def clamp(values, min=None, max=None):
        bounded = original(values.detach(), min, max)
        is_inside = (values > (-math.inf if min is None else min)) & (values < (math.inf if max is None else max))
        return torch.where(is_inside, values, bounded)

    monkeypatch.setattr(torch.Tensor, "clamp", clamp)


def drawn() -> tuple[torch.Tensor, ...]:
    """log π, log π_old, log π_ref and A of many tokens: near, far, on every edge, certain ones, and A = 0."""
    generator = torch.Generator().manual_seed(0)
    uniform = lambda: torch.rand(COUNT, dtype=torch.float64, generator=generator)  # noqa: E731
    normal = lambda: torch.randn(COUNT, dtype=torch.float64, generator=generator)  # noqa: E731
    old, ref, advantages = -8 * uniform(), -8 * uniform(), normal()
    old[:1000], advantages[::10] = 0.0, 0.0
    log_ratios = normal() * torch.tensor([0.001, 0.3, 3.0, 12.0], dtype=torch.float64).repeat(COUNT // 4)
    log_ratios[1000:10_000] = torch.tensor(EDGES, dtype=torch.float64).repeat(1000)
    old[1000:10_000] = 0.0  # so that the difference is the edge itself
    return old + log_ratios, old, ref, advantages


def of_sequences(name: str, log_ratios: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """Averages over the sequence of each token, which other tokens share in: drawn, with the edges among them."""
    if not OBJECTIVES[name].reads_sequences:
        return {}
    generator = torch.Generator().manual_seed(1)
    mixed = torch.randperm(COUNT, generator=generator)
    return {
        "sequence_log_ratios": log_ratios[mixed],
        "sequence_advantages": advantages[mixed.flip(0)],
        "sequence_lengths": torch.randint(1, 300, (COUNT,), generator=generator).double(),
        "sequence_average": log_ratios[mixed.roll(1)],
    }


def with_gradient_of_the_token(averages: dict[str, torch.Tensor], tokens: Tokens, objective) -> dict[str, torch.Tensor]:
    """The averages as `PolicyLoss` gives them."""
    own = {"sequence_log_ratios": tokens.log_ratios}
    if objective.averaged is not None:
        own["sequence_average"] = objective.averaged(tokens, objective.parameters)
    return {name: v + (own[name] - own[name].detach()) if name in own else v for name, v in averages.items()}


def differing(found: torch.Tensor, expected: torch.Tensor, limit: float) -> torch.Tensor:
    return ~((found - expected).abs() <= limit * (1 + expected.abs()))


def numbers(objective, averages: dict[str, torch.Tensor]) -> tuple:
    """Of its flags, filled up, and of the sequences."""
    own = objective.token_kernel.numbers
    return (*own, *[0.0] * (MOST_NUMBERS - len(own)), *averages.values()) if averages else own


def test_what_is_averaged_has_a_row_too():
    (logprobs, old, _, advantages), found = drawn(), []
    known = {"logprobs": logprobs, "old_logprobs": old, "advantages": advantages, "log_ratios": logprobs - old}
    for name in ROWS:
        objective = build(name)
        assert (objective.averaged is None) == (objective.token_kernel.load_averaged is None)
        if objective.averaged is not None:
            wanted = objective.averaged(Tokens(**known), objective.parameters)
            row = in_torch(objective.token_kernel.load_averaged())
            found.append(torch.equal(row(logprobs - old, advantages, numbers(objective, {})), wanted))
    assert found == [True]


@pytest.mark.proof("Rows of kernels against autograd of the objective, 200,000 tokens in float64: equal (sapo: 1e-13)")
@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_the_objective_and_its_derivative(name, evidence):
    objective, (logprobs, old, _, advantages) = build(name), drawn()
    leaf = logprobs.requires_grad_()
    known = {"logprobs": leaf, "old_logprobs": old, "advantages": advantages, "log_ratios": leaf - old}
    averages = of_sequences(name, (leaf - old).detach(), advantages)
    tokens = Tokens(**known, **with_gradient_of_the_token(averages, Tokens(**known), objective))
    expected = objective.loss(tokens, objective.parameters)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    loss, slope = in_torch(objective.token_kernel.load())(leaf.detach(), old, advantages, numbers(objective, averages))
    assert not differing(loss, expected.detach(), EXACT.get(name, 0.0)).any()
    worst = float(((slope - gradient).abs() / (1 + gradient.abs())).max())
    evidence(cases=COUNT, worst=worst, tolerance=EXACT.get(name, 0.0))


@pytest.mark.proof(
    "Rows of KL estimators against autograd, 200,000 tokens in float64: 1e-11 relative, k1, k2 and abs equal"
)
@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_a_row_is_the_estimator_and_its_derivative(name, evidence):
    logprobs, old, ref, _ = drawn()
    leaf = logprobs.requires_grad_()
    expected = ESTIMATORS[name](leaf - ref, leaf - old)
    (gradient,) = torch.autograd.grad(expected.sum(), leaf)
    value, slope = in_torch(getattr(token_kernels, KL_ESTIMATORS[name].function))(leaf.detach(), old, ref)
    assert not differing(value, expected.detach(), EXACT.get(name, 0.0)).any()
    assert not differing(slope, gradient, EXACT.get(name, 0.0)).any()
    evidence(cases=COUNT)


def alone(name: str, logprobs: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor) -> dict[str, torch.Tensor]:
    """What a token averages that is a sequence by itself."""
    if not OBJECTIVES[name].reads_sequences:
        return {}
    ones = torch.ones_like(logprobs)
    return dict(enumerate((logprobs - old, advantages, ones, logprobs - old)))


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("bad", ["logprobs", "old", "advantages"])
def test_what_is_not_finite_is_seen_in_loss_and_slope(name, bad):
    """But for what an objective does not read: a ratio, or that of a sample with A >= 0."""
    objective = build(name)
    values = {field: torch.tensor([-1.0, -1.0], dtype=torch.float64) for field in ("logprobs", "old")}
    values["advantages"] = torch.tensor([1.0, -1.0], dtype=torch.float64)
    values[bad] = values[bad] * torch.nan
    loss, slope = in_torch(objective.token_kernel.load())(*values.values(), numbers(objective, alone(name, **values)))
    unread = {("reinforce", "old"), ("topr_token", "old"), ("topr", "old")}
    assert loss.isnan().all() == ((name, bad) not in unread)
    if bad == "old" and name.startswith("topr"):
        assert loss.isnan().tolist() == [False, True]
    reads_logprob = name not in ("reinforce", "topr_token", "topr")
    assert slope.isnan().all() == ((name, bad) not in unread and (bad != "logprobs" or reads_logprob))


@pytest.mark.parametrize("name", ROWS)
def test_a_row_is_finite_where_nothing_is_trained(name):
    objective, nothing = build(name), torch.zeros(3, dtype=torch.float64)
    averages = alone(name, nothing, nothing, nothing)
    found = in_torch(objective.token_kernel.load())(nothing, nothing, nothing, numbers(objective, averages))
    assert torch.cat(found).isfinite().all()
    assert len(objective.token_kernel.numbers) <= MOST_NUMBERS


@pytest.mark.parametrize("x", [1e-30, 1e-9, 1e-5, 0.01, 0.49, 0.51, 3.0, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_small_arguments_keep_their_digits(x, dtype):
    """e^x - 1 of both signs and log(1 + x), which Triton does not have."""
    eps, both = torch.finfo(dtype).eps, torch.tensor([x, -x], dtype=dtype)
    exact = torch.tensor([x, -x], dtype=dtype).double()
    pairs = [(token_kernels.expm1, both, exact.expm1()), (token_kernels.log1p, both[:1], exact[:1].log1p())]
    for function, argument, expected in pairs:
        found = in_torch(function, dtype)(argument).double()
        assert ((found - expected).abs() <= 8 * eps * expected.abs()).all()


def test_bounds_of_the_ratio_are_made_before_they_are_rounded():
    """1 - 0.2 in float64: the kernels had it so before they knew other objectives."""
    assert objective_of("grpo", clip_eps_low=0.2, clip_eps_high=0.28).token_kernel.numbers == (1.0 - 0.2, 1.0 + 0.28)
    assert build("dual_clip").token_kernel.numbers == (1.0 - 0.2, 1.0 + 0.28, 3.0)
    assert build("cispo").token_kernel.numbers == (1.0 - 0.2, 1.5)
    assert build("dppo_tv").token_kernel.numbers == (0.05, 0.1, 3.0)
    assert objective_of("dual_clip").token_kernel is None  # its cap has no default


# --- a user's own ---

OWN = """\
import triton
import triton.language as tl


@triton.jit
def helper(r, bound):
    return tl.where(r > bound, bound, r)


@triton.jit
def row(logprob, old_logprob, advantage, numbers):
    d = logprob - old_logprob
    r = tl.exp(tl.where(d > 20.0, 20.0, tl.where(d < -20.0, -20.0, d)))
    slope = {slope}
    return slope * logprob{more}, tl.where((d > 20.0) | (d < -20.0), 0.0, slope)


def mine(tokens, parameters):
    weights = tokens.ratios.detach().clamp(max=1.0 + parameters.clip_eps_high)
    return -weights * tokens.advantages * tokens.weighable_logprobs{reads}


mine.{attribute} = {row}
mine.token_kernel_numbers = {names}
"""
RIGHT = {
    "slope": "-helper(r, 1.0 + numbers[0]) * advantage",
    "more": "",
    "reads": "",
    "row": "row",
    "attribute": "token_kernel",
    "names": "('clip_eps_high',)",
}


def write_module(folder, monkeypatch, **changes) -> str:
    (folder / "user_row.py").write_text(OWN.format(**RIGHT | changes), encoding="utf-8")
    monkeypatch.syspath_prepend(folder)
    monkeypatch.delitem(__import__("sys").modules, "user_row", raising=False)
    return "user_row:mine"


def test_a_users_token_kernel_is_tried_and_taken(tmp_path, monkeypatch):
    found = load_custom_objective(write_module(tmp_path, monkeypatch), clip_eps_high=0.3)
    assert found.token_kernel.numbers == (0.3,)
    assert found.token_kernel.load() is __import__("user_row").row


def test_a_user_needs_no_token_kernel(tmp_path, monkeypatch):
    path = write_module(tmp_path, monkeypatch, row="None")
    assert load_custom_objective(path, clip_eps_high=0.3).token_kernel is None


OF_KERNEL = "has a token kernel "


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"slope": "-helper(r, 1.0 + numbers[0]) * advantage * 1.000001"}, f"{OF_KERNEL}whose loss is"),
        ({"slope": "-r * advantage"}, f"{OF_KERNEL}whose loss is"),
        ({"more": " + 0.0 * old_logprob / old_logprob"}, f"{OF_KERNEL}that is not finite where all fields are 0"),
        ({"slope": "tl.cumsum(r)"}, rf"{OF_KERNEL}that fails on 4096 tokens \(AttributeError"),
        ({"attribute": "row"}, "has an attribute row, which is called token_kernel since 0.3.0"),
        (
            {"row": "mine"},
            rf"{OF_KERNEL}that is a function, which kernels cannot call\. Give a function of triton\.jit\.",
        ),
        ({"names": "('clip_eps_high', 'knee')"}, rf"{OF_KERNEL}that reads knee, which is not given\. Add the option k"),
        (
            {"names": "()"},
            rf"{OF_KERNEL}that fails on 4096 tokens \(IndexError: .*\)\. Name every number that it reads in "
            r"token_kernel_numbers, which has 0\.",
        ),
        ({"names": "('clip_eps_high',) * 5"}, f"{OF_KERNEL}of 5 numbers, and kernels pass 4"),
        (
            {"reads": " + 0.0 * tokens.sequence_log_ratios"},
            "reads averages over whole sequences and has a token kernel",
        ),
    ],
)
def test_a_users_token_kernel_that_is_not_the_objective_is_refused(changes, reason, tmp_path, monkeypatch):
    with pytest.raises(ArgumentError, match=f"custom objective 'user_row:mine' {reason}"):
        load_custom_objective(write_module(tmp_path, monkeypatch, **changes), clip_eps_high=0.3)
