"""The fused head where distributions are over what could be sampled, against loops in float64, and on the policy that
sampled."""

import math
from functools import partial

import pytest
import sampling_mask_oracle
import threads
import torch
from compare import scalar_error, tensor_error
from sampling_mask_parts import Parts

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import SamplingMask
from megatron_pg.kernels import LossTerms, PolicyLoss, Vocabulary
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.lm_head import Head, logprobs_and_entropy, policy_gradient_head_loss, products
from megatron_pg.objectives import objective_of

ON_CPU = pytest.mark.skipif(torch.cuda.is_available(), reason="ranks are threads, on a CPU only")
HIDDEN, PADDING, TEMPERATURE = 16, 4, 0.7
LIMITS = {torch.float64: 1e-12, torch.float32: 1e-5}  # as tests/unit/lm_head/test_lm_head.py

pytestmark = [
    pytest.mark.usefixtures("on_the_device"),
    # of Triton's interpreter, which computes in NumPy
    pytest.mark.filterwarnings("ignore:.*encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim:DeprecationWarning"),
]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Some of one row's kind alone."""
    monkeypatch.setattr(products, "chunk_rows", lambda *_: 3)
    monkeypatch.setattr(products, "block_rows", lambda *_: 6)


def draw(parts: Parts, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = torch.randn(len(parts.sets), HIDDEN, dtype=dtype)
    hidden[~parts.fields.mask] = math.nan
    return hidden, torch.randn(parts.size + PADDING, HIDDEN, dtype=dtype)


@pytest.mark.parametrize("mode", ["forward", "recompute"])
@pytest.mark.parametrize("sampling_mask_entropy", ["full", "kept"])
@pytest.mark.parametrize(
    ("dtype", "impl"), [(torch.float64, "torch"), (torch.float32, "torch"), (torch.float32, "triton")]
)
def test_loss_and_gradients_are_those_of_the_kept_tokens(dtype, impl, sampling_mask_entropy, mode):
    torch.manual_seed(3)
    parts = Parts.draw(60)
    drawn = draw(parts, dtype)
    hidden, weight = (each.clone().requires_grad_() for each in drawn)
    vocabulary = Vocabulary.of(len(weight), temperature=TEMPERATURE, vocab_size=parts.size)
    policy_loss, head = parts.policy_loss(sampling_mask_entropy), Head(mode=mode, impl=impl)
    out = policy_gradient_head_loss(hidden, weight, policy_loss, vocabulary, head, grad_scale=3.0)
    (out.loss * 3).backward()
    states, rows = torch.where(parts.fields.mask[:, None], drawn[0].double(), 0), drawn[1].double()
    loss, logprobs, entropies, gradient = parts.expected(
        states @ rows.t(), sampling_mask_entropy, temperature=TEMPERATURE
    )
    assert scalar_error(float(out.loss.detach()), loss, 10.0) <= LIMITS[dtype]
    assert tensor_error(out.logprobs, logprobs) <= LIMITS[dtype]
    assert tensor_error(out.entropy, entropies) <= LIMITS[dtype]
    assert tensor_error(hidden.grad, 3 * gradient @ rows) <= LIMITS[dtype]
    assert tensor_error(weight.grad, 3 * gradient.t() @ states) <= LIMITS[dtype]


@ON_CPU
@pytest.mark.parametrize("mode", ["forward", "recompute"])
@pytest.mark.parametrize("sampling_mask_entropy", ["full", "kept"])
def test_tensor_parallel_ranks_equal_one(sampling_mask_entropy, mode):
    torch.manual_seed(4)
    parts = Parts.draw(60)
    drawn = draw(parts, torch.float64)
    head, policy_loss = Head(mode=mode, impl="torch"), parts.policy_loss(sampling_mask_entropy)

    def work(rank: int):
        group = threads.subgroup(lambda _: 0, 2, rank)
        hidden, weight = drawn[0].clone().requires_grad_(), drawn[1].chunk(2)[rank].clone().requires_grad_()
        vocabulary = Vocabulary.of(len(weight), temperature=TEMPERATURE, vocab_size=parts.size, tp_group=group)
        out = policy_gradient_head_loss(hidden, weight, policy_loss, vocabulary, head)
        out.loss.backward()
        return float(out.loss.detach()), hidden.grad, weight.grad

    found = threads.run(2, work)
    states = torch.where(parts.fields.mask[:, None], drawn[0], 0)
    loss, _, _, gradient = parts.expected(states @ drawn[1].t(), sampling_mask_entropy, temperature=TEMPERATURE)
    assert found[0][0] == found[1][0]
    assert scalar_error(found[0][0], loss, 10.0) <= 1e-12
    assert tensor_error(found[0][1], gradient @ drawn[1]) <= 1e-12
    assert tensor_error(torch.cat([weight for *_, weight in found]), gradient.t() @ states) <= 1e-12


@pytest.mark.parametrize(("impl", "tp"), [("torch", 1), pytest.param("torch", 2, marks=ON_CPU), ("triton", 1)])
def test_on_the_policy_that_sampled_the_ratio_is_1(impl, tp):
    """The sampler keeps 0.95 of the probability of float32 logits and reports the rest, in float64."""
    torch.manual_seed(8)
    rows, columns = 12, 200
    hidden, weight = torch.randn(rows, HIDDEN), torch.randn(columns, HIDDEN)
    logits = (hidden.double() @ weight.double().t()).tolist()
    sets = [sampling_mask_oracle.kept_by_top_p(row, 0.95, TEMPERATURE) for row in logits]
    targets = torch.tensor([s[len(s) // 2] for s in sets])
    old = torch.tensor(
        [
            sampling_mask_oracle.log_probabilities(z, s, TEMPERATURE)[int(y)]
            for z, s, y in zip(logits, sets, targets, strict=True)
        ]
    )
    offsets = torch.tensor([0, *map(len, sets)]).cumsum(0)
    sampling_mask = SamplingMask.of(torch.tensor([j for s in sets for j in s], dtype=torch.int32), offsets)
    restriction = Restriction(sampling_mask=sampling_mask, whole_entropy=False)
    wanted = torch.tensor([1, 2, 3, 5, 8, 11])

    def work(rank: int):
        group = threads.subgroup(lambda _: 0, tp, rank) if tp > 1 else None
        return logprobs_and_entropy(
            hidden,
            weight.chunk(tp)[rank],
            targets,
            rows=wanted,
            temperature=TEMPERATURE,
            tp_group=group,
            impl=impl,
            restriction=restriction,
        )[0]

    for found in threads.run(tp, work) if tp > 1 else [work(0)]:
        assert (found.double() - old[wanted]).exp().sub(1).abs().max() <= 2e-5
    fields = TokenFields(
        targets=targets,
        old_logprobs=old,
        mask=torch.ones(rows, dtype=torch.bool),
        weights=torch.full((rows,), 1 / rows),
        advantages=torch.ones(rows),
        sampling_mask=sampling_mask,
    )
    policy_loss = PolicyLoss(LossTerms(objective=objective_of("reinforce_is")), fields)

    def loss(rank: int, mode: str):
        group = threads.subgroup(lambda _: 0, tp, rank) if tp > 1 else None
        shard = weight.chunk(tp)[rank].clone().requires_grad_()
        vocabulary = Vocabulary.of(len(shard), temperature=TEMPERATURE, tp_group=group)
        return policy_gradient_head_loss(hidden, shard, policy_loss, vocabulary, Head(mode=mode, impl=impl))

    for mode in ("forward", "recompute"):
        for out in threads.run(tp, partial(loss, mode=mode)) if tp > 1 else [loss(0, mode)]:
            assert out.log_ratios.double().exp().sub(1).abs().max() <= 2e-5
            assert abs(float(out.loss.detach()) + 1) <= 2e-5  # the mean ratio, and nothing of it lost
