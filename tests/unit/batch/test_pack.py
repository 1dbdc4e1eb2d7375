import random

import pytest
import torch
from samples import make_sample, random_step

from megatron_pg.batch import ContextRanks, pack, slice_batch


def coded(rng, **rest):
    """A sample whose old log-probabilities count its response tokens: -1, -2, …"""
    sample = make_sample(rng=rng, **rest)
    sample.old_logprobs.copy_(-1.0 - torch.arange(sample.response_length))
    return sample


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
@pytest.mark.parametrize("cp_size", [1, 2, 4])
def test_every_field_belongs_to_the_logits_that_predict_its_token(qkv_format, cp_size):
    rng = random.Random(cp_size)
    samples = [coded(rng, prompt_length=p, mask=m) for p, m in ((3, [1, 0, 1]), (1, [1]), (2, [0, 0]), (5, [1] * 9))]
    layout = {"max_seq_len": 16} if qkv_format == "bshd" else {}
    batch = pack(samples, qkv_format=qkv_format, cp_size=cp_size, **layout)
    weights = batch.loss_mask.double() * 0.25
    seen = {i: {} for i in range(len(samples))}
    for rank in range(cp_size):
        local = slice_batch(batch, {"weights": weights}, cp_rank=rank, cp_size=cp_size)
        for flat in range(len(local.fields.mask)):
            column, row = divmod(flat, len(local.inputs.tokens))
            position = int(local.row_index[column])
            index = int(batch.sample_index[row, position])
            predicted = int(batch.position_ids[row, position]) + 1 - (3, 1, 2, 5)[index]
            is_trained = (
                index >= 0 and 0 <= predicted < samples[index].response_length and samples[index].loss_mask[predicted]
            )
            assert local.inputs.loss_mask[row, column] == is_trained, "the model's mask is laid out like its tokens"
            if not local.fields.mask[flat]:
                assert local.fields.weights[flat] == 0
                continue
            sample, at = samples[index], int(batch.position_ids[row, position])
            k = at + 1 - (len(sample.tokens) - sample.response_length)
            assert local.fields.targets[flat] == sample.tokens[at + 1]
            assert local.fields.old_logprobs[flat] == -1.0 - k
            assert local.fields.advantages[flat] == sample.advantages[k]
            assert local.fields.weights[flat] == 0.25
            assert local.fields.sample_weights[flat] == 1 / sample.num_trained
            assert f"response token {k}" in local.locate(flat)
            assert k not in seen[index]
            seen[index][k] = rank
    for i, sample in enumerate(samples):
        assert sorted(seen[i]) == sample.loss_mask.nonzero()[:, 0].tolist()


@pytest.mark.parametrize(("cp_size", "multiple_of"), [(1, 1), (1, 8), (2, 4), (2, 6), (4, 8), (2, 2)])
def test_a_packed_row_has_chunks_of_equal_length_and_the_asked_multiple(cp_size, multiple_of):
    samples = random_step(random.Random(9))
    batch = pack(samples, qkv_format="thd", cp_size=cp_size, multiple_of=multiple_of)
    assert batch.num_positions % multiple_of == 0
    assert cp_size == 1 or all(length % (2 * cp_size) == 0 for length in batch.padded_lengths)
    assert len(batch.padded_lengths) == len(samples)  # padding is not a document


def test_a_packed_row_can_have_the_exact_width_that_pipeline_stages_exchange():
    samples = [make_sample(prompt_length=2, mask=[1, 1, 1], rng=random.Random(i)) for i in range(3)]
    batch = pack(samples, qkv_format="thd", cp_size=2, max_seq_len=64)
    assert batch.tokens.shape == (1, 64)
    assert batch.padded_lengths == (8, 8, 48)


@pytest.mark.parametrize("layout", [{"qkv_format": "thd"}, {"qkv_format": "bshd", "max_seq_len": 8, "rows": 2}])
def test_an_empty_microbatch_still_has_positions(layout):
    local = slice_batch(pack([], cp_size=2, **layout), {"weights": torch.zeros(0)}, cp_rank=1, cp_size=2)
    assert local.num_positions > 0
    assert not local.fields.mask.any()
    assert len(local.trained) == 0


def test_bshd_fills_up_with_empty_rows():
    batch = pack(
        [make_sample(prompt_length=1, mask=[1], rng=random.Random(0))], qkv_format="bshd", max_seq_len=4, rows=3
    )
    assert batch.tokens.shape == (3, 4)
    assert batch.sample_index[1:].tolist() == [[-1] * 4] * 2


OWN_RANKS = {"cp_ranks": ContextRanks(0, 2)}


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ({"qkv_format": "sbhd"}, "'sbhd' is neither thd nor bshd"),
        ({"qkv_format": "bshd"}, "bshd needs max_seq_len"),
        ({"qkv_format": "bshd", "max_seq_len": 3}, "max_seq_len=3 is less than the 4 tokens of sample "),
        ({"qkv_format": "bshd", "max_seq_len": 6, "cp_size": 2}, "Use 8"),
        ({"qkv_format": "bshd", "max_seq_len": 8, "rows": 0}, "rows=0 for 1 samples"),
        ({"qkv_format": "bshd", "max_seq_len": 8, "multiple_of": 4}, "multiple_of=4 has no effect on bshd"),
        ({"qkv_format": "thd", "rows": 2}, "rows=2 has no effect on thd"),
        ({"qkv_format": "bshd", "max_seq_len": 8, **OWN_RANKS}, "only a packed row (thd) has its own ranks"),
        ({"qkv_format": "thd", "cp_size": 2, **OWN_RANKS}, "only a packed row (thd) has its own ranks"),
        ({"qkv_format": "thd", "max_seq_len": 3}, "max_seq_len=3 for a packed row of 4 tokens"),
        ({"qkv_format": "thd", "max_seq_len": 10, "cp_size": 2}, "max_seq_len=10 for a packed row of 4"),
    ],
)
def test_a_layout_that_cannot_be_is_a_named_error(layout, message):
    sample = make_sample(prompt_length=2, mask=[1, 1], rng=random.Random(0))
    with pytest.raises(ValueError) as error:
        pack([sample], **layout)
    assert message in str(error.value)


@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_a_depth_predicts_the_same_tokens_from_positions_further_left_of_the_same_sample(qkv_format):
    """Against the definition, sample by sample: token k at position prompt + k - 1 - depth, if there is one."""
    rng = random.Random(4)
    samples = [make_sample(prompt_length=p, mask=m, rng=rng) for p, m in ((1, [1, 1, 0]), (2, [1]), (5, [0, 1, 1, 1]))]
    batch = pack(samples, qkv_format=qkv_format, **({"max_seq_len": 10} if qkv_format == "bshd" else {}))
    labels = batch.labels.flatten()[batch.response_positions]
    for depth in range(4):
        table, counts = batch.spread(labels, depth), []
        mask = batch.spread(batch.loss_mask, depth)
        for i, sample in enumerate(samples):
            prompt, own = len(sample.tokens) - sample.response_length, batch.sample_index == i
            expected = {
                prompt + k - 1 - depth: int(sample.tokens[prompt + k]) for k, m in enumerate(sample.loss_mask) if m
            }
            expected = {position: token for position, token in expected.items() if position >= 0}
            assert (
                dict(zip(batch.position_ids[own & mask].tolist(), table[own & mask].tolist(), strict=True)) == expected
            )
            counts.append(len(expected))
        assert batch.counted(batch.loss_mask & batch.reached(depth), "rl") == counts
        assert not mask[batch.sample_index < 0].any()


def test_more_depths_than_a_micro_batch_has_tokens_predict_what_there_is():
    batch = pack([make_sample(prompt_length=1, mask=[1], rng=random.Random(5))], qkv_format="thd")
    weights = [batch.loss_mask.double()] * 3
    local = slice_batch(batch, {"weights": weights[0]}, cp_rank=0, cp_size=1, depth_weights=weights)
    assert [len(depth.trained) for depth in local.depths] == [0, 0, 0]  # the prompt's one token is the policy's own
