import random
from types import SimpleNamespace

import pytest
import threads
import torch
from samples import make_sample

from megatron_pg import cp_utils
from megatron_pg.batch import pack, slice_batch
from megatron_pg.cp_utils import (
    all_gather_with_cp,
    get_logits_and_tokens_offset_with_cp,
    get_sum_of_sample_mean,
    padded_length,
    response_index,
    slice_loss_masks_for_local_cp,
    slice_with_cp,
    whole_sequences,
    zigzag_index,
)

SIZES = [1, 2, 3, 4, 8]


def formats(length: int):
    """thd, and bshd at the smallest and at a generous width."""
    return [("thd", None), ("bshd", length), ("bshd", length + 13)]


@pytest.mark.parametrize("cp_size", SIZES)
def test_response_values_are_the_slice_of_the_whole_sequence(cp_size):
    """Position-coded: what a rank holds by response index is what it holds by slicing the logits' positions."""
    rng = random.Random(cp_size)
    for _ in range(40):
        total = rng.randint(2, 50)
        response = rng.randint(1, total - 1)
        for qkv_format, width in formats(total):
            coded = torch.full((total,), -1)
            coded[total - response - 1 : total - 1] = torch.arange(response)
            for rank in range(cp_size):
                where = {"cp_rank": rank, "cp_size": cp_size}
                local = slice_with_cp(coded, -1, qkv_format, width, **where)
                index = response_index(total, response, qkv_format, width, **where)
                assert local[local >= 0].tolist() == index.tolist()
                (mask,) = slice_loss_masks_for_local_cp(
                    [torch.arange(response)], [total], [response], qkv_format, width and [width], **where
                )
                assert torch.equal(mask, index)


def zigzag_table(lengths: list[int], cp_size: int) -> list[list[int]]:
    """Positions of every rank, by walking the chunks of each document one by one."""
    held, start = [[] for _ in range(cp_size)], 0
    for length in lengths:
        chunk = length if cp_size == 1 else length // (2 * cp_size)
        owners = [0] if cp_size == 1 else [*range(cp_size), *reversed(range(cp_size))]
        for k, owner in enumerate(owners):
            held[owner] += range(start + k * chunk, start + (k + 1) * chunk)
        start += length
    return held


@pytest.mark.proof("context-parallel slices, exact")
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_slices_of_packed_rows_follow_the_table_tile_the_row_and_keep_labels_beside_tokens(cp_size, full, evidence):
    rng, count = random.Random(cp_size), 2000 if full else 100
    for _ in range(count):
        lengths = [padded_length(rng.choice([0, 1, rng.randint(0, 200)]), cp_size) for _ in range(rng.randint(1, 12))]
        positions = torch.arange(sum(lengths))
        gathered = torch.full_like(positions, -1)
        for rank, held in enumerate(zigzag_table(lengths, cp_size)):
            index = zigzag_index(lengths, cp_rank=rank, cp_size=cp_size)
            assert index.tolist() == held
            gathered[index] = positions[index]
        assert torch.equal(gathered, positions)
    evidence(cases=count)


@pytest.mark.proof("context-parallel slices, exact")
@pytest.mark.parametrize("cp_size", [1, 2, 3, 4, 8])
def test_labels_are_the_next_token_of_the_same_document_on_whichever_rank_that_is(cp_size, full, evidence):
    rng, count = random.Random(cp_size), 100 if full else 10
    for _ in range(count):
        lengths = [rng.choice([2, 3, rng.randint(2, 200)]) for _ in range(rng.randint(1, 12))]
        starts = [1 + sum(lengths[:i]) for i in range(len(lengths))]
        samples = [make_sample(prompt_length=1, mask=[1] * (n - 1), rng=rng) for n in lengths]
        for sample, start in zip(samples, starts, strict=True):
            sample.tokens.copy_(torch.arange(start, start + len(sample.tokens)))  # every token its own number
        batch = pack(samples, qkv_format="thd", cp_size=cp_size)
        ends = torch.tensor([start + n - 1 for start, n in zip(starts, lengths, strict=True)])
        for rank in range(cp_size):
            local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=rank, cp_size=cp_size)
            has_next = (local.inputs.tokens > 0) & ~torch.isin(local.inputs.tokens, ends)
            assert torch.equal(local.inputs.labels, torch.where(has_next, local.inputs.tokens + 1, 0))
            assert torch.equal(local.inputs.loss_mask.bool(), has_next)
    evidence(cases=count)


def test_offsets_of_a_hand_worked_sample():
    # 10 tokens, 7 of them response: chunks of 3 (padded to 12); logits 2..8 predict tokens 3..9
    chunk, chunks, logits, tokens = get_logits_and_tokens_offset_with_cp(10, 7, cp_rank=0, cp_size=2)
    assert (chunk, chunks) == (3, ((0, 3), (9, 12)))
    assert logits == ((2, 3), (0, 0))
    assert tokens == ((3, 4), (0, 0))
    *_, tokens = get_logits_and_tokens_offset_with_cp(10, 7, cp_rank=1, cp_size=2)
    assert tokens == ((4, 7), (7, 10))


def test_slice_pads_with_a_value_or_a_function():
    tokens = torch.tensor([1, 2, 3])
    assert slice_with_cp(tokens, 9, cp_rank=0, cp_size=2).tolist() == [1, 9]
    seven = lambda x, n: torch.cat([x, torch.full((n,), 7)])  # noqa: E731
    assert slice_with_cp(tokens, seven, cp_rank=0, cp_size=2).tolist() == [1, 7]
    assert slice_with_cp(tokens, 9, "bshd", 5, cp_rank=0, cp_size=1).tolist() == [1, 2, 3, 9, 9]
    assert slice_with_cp(tokens, 9, cp_rank=0, cp_size=1).tolist() == [1, 2, 3]


@pytest.mark.parametrize("cp_size", [1, 2, 4])
@pytest.mark.parametrize(
    ("normalizer", "divisors"),  # by hand: trained tokens, a fully masked sample by 1
    [
        ({}, [3, 1, 11]),
        ({"calculate_per_token_loss": True}, [1, 1, 1]),
        ({"sample_denoms": [4.0, 8.0, 2.0]}, [4, 8, 2]),
        ({"denominators": [4.0, 8.0, 2.0]}, [4, 8, 2]),
        ({"constant_divisor": 16.0}, [16, 16, 16]),
    ],
)
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_the_scalars_of_the_ranks_add_up_to_that_of_one_rank(normalizer, divisors, cp_size, qkv_format):
    totals, responses = [9, 3, 30], [4, 2, 17]
    masks = [torch.tensor([1, 0, 1, 1]), torch.tensor([0, 0]), (torch.arange(17) % 3 != 0).int()]
    values = [torch.randint(-8, 8, (n,)).double() for n in responses]
    expected = sum(
        float(a) / d for x, m, d in zip(values, masks, divisors, strict=True) for a, b in zip(x, m, strict=True) if b
    )
    layout = {"qkv_format": qkv_format, "max_seq_lens": [32] * 3 if qkv_format == "bshd" else None}
    total = 0.0
    for rank in range(cp_size):
        where = {"cp_rank": rank, "cp_size": cp_size}
        reduce = get_sum_of_sample_mean(totals, responses, masks, **normalizer, **layout, **where)
        width = 32 if qkv_format == "bshd" else None
        rows = zip(values, totals, responses, strict=True)
        total += float(reduce(torch.cat([x[response_index(t, r, qkv_format, width, **where)] for x, t, r in rows])))
    assert total == pytest.approx(expected, rel=1e-14)


def test_nan_in_a_masked_slot_reaches_neither_value_nor_gradient():
    x = torch.tensor([1.0, float("nan"), 2.0], requires_grad=True)
    value = get_sum_of_sample_mean([4], [3], [torch.tensor([1, 0, 1])], cp_rank=0, cp_size=1)(x)
    value.backward()
    assert value.item() == 1.5
    assert x.grad.tolist() == [0.5, 0.0, 0.5]


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_the_backward_of_the_gather_is_its_adjoint(size, qkv_format):
    """<y, A x> = <A* y, x> summed over the ranks, where every rank reads the whole sample with its own y."""
    total, response, width = 23, 15, 32 if qkv_format == "bshd" else None
    x, y = torch.randint(-9, 9, (response, 3)).double(), torch.randint(-9, 9, (size, response, 3)).double()

    def work(rank: int):
        group = threads.subgroup(lambda r: 0, size, rank)
        where = {"qkv_format": qkv_format, "max_seq_len": width, "cp_rank": rank, "cp_size": size}
        local = x[response_index(total, response, **where)].requires_grad_()
        whole = all_gather_with_cp(local, total, response, group=group, **where)
        whole.backward(y[rank])
        return float((y[rank] * whole.detach()).sum()), float((local.grad * local.detach()).sum())

    forward, backward = zip(*threads.run(size, work), strict=True)
    assert sum(forward) == sum(backward) == float((y.sum(0) * x).sum())


def test_defaults_come_from_megatron_when_it_is_initialised_and_from_one_rank_otherwise(monkeypatch):
    assert response_index(10, 7).tolist() == list(range(7))
    state = SimpleNamespace(
        model_parallel_is_initialized=lambda: True,
        get_context_parallel_rank=lambda: 0,
        get_context_parallel_world_size=lambda: 2,
    )
    monkeypatch.setitem(cp_utils.sys.modules, "megatron.core.parallel_state", state)
    assert response_index(10, 7).tolist() == [0]
    with whole_sequences():
        assert response_index(10, 7).tolist() == list(range(7))
    assert response_index(10, 7).tolist() == [0]


def reducer(*flag, totals=(4,), masked: int = 2, **normalizer):
    """Of one sample of four tokens, two of them response."""
    return get_sum_of_sample_mean(list(totals), [2], [torch.ones(masked)], *flag, **normalizer)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get_logits_and_tokens_offset_with_cp(5, 5, cp_rank=0, cp_size=1), "leaves no prompt token"),
        (lambda: get_logits_and_tokens_offset_with_cp(5, 0, cp_rank=0, cp_size=1), "no response token"),
        (lambda: response_index(5, 2, "bsh", cp_rank=0, cp_size=1), "'bsh' is neither thd nor bshd"),
        (lambda: response_index(5, 2, "bshd", cp_rank=0, cp_size=1), "max_seq_len=None"),
        (lambda: response_index(5, 2, "bshd", 4, cp_rank=0, cp_size=1), "max_seq_len=4 with a bshd sample of 5"),
        (lambda: response_index(5, 2, cp_rank=2, cp_size=2), "cp_rank=2 is not a rank"),
        (lambda: response_index(5, 2, cp_rank=0), "Give both or neither"),
        (lambda: zigzag_index([6], cp_rank=0, cp_size=2), "padded_lengths[0]=6 is not a multiple of 4"),
        (lambda: reducer(masked=3), "loss_masks[0] has shape (3,)"),
        (lambda: reducer(totals=[4, 5]), "total_lengths has 2 entries for 1"),
        (lambda: reducer(True, constant_divisor=2.0), "one normalizer, got calculate_per_token_loss, constant_divisor"),
        (lambda: reducer([7]), "calculate_per_token_loss=[7] is neither True nor"),
        (
            lambda: reducer(sample_denoms=[1.0], denominators=[1.0]),
            "choose one normalizer, got sample_denoms, denominators",
        ),
        (lambda: reducer(sample_denoms=[1.0, 2.0]), "2 denominators for 1"),
        (lambda: reducer(sample_denoms=[0.0]), "denominator 0 is 0.0"),
        (lambda: reducer()(torch.ones(3)), "x has shape (3,)"),
        (lambda: all_gather_with_cp(torch.ones(3), 10, 7, cp_rank=0, cp_size=1), "tensor has 3 response values"),
    ],
)
def test_what_cannot_be_is_a_named_error(call, message):
    with pytest.raises(ValueError) as error:
        call()
    assert message in str(error.value)
