"""Rollout batches and files as steps, and steps as micro-batches: every sample once, the same on all peers."""

import random

import pytest
from samples import make_sample, plain_sample, random_step

from megatron_pg import RolloutFileError, RolloutWriter, cut_microbatches, cut_steps, plan_step, read_steps
from megatron_pg.batch import check_boundaries


def test_steps_are_cut_at_group_boundaries_only():
    samples = [make_sample(prompt_length=1, mask=[1], rng=random.Random(i), prompt_id=i // 2) for i in range(8)]
    assert [len(step) for step in cut_steps(samples, samples_per_step=4)] == [4, 4]
    with pytest.raises(ValueError, match="8 samples do not fill steps of 3; none may be dropped"):
        cut_steps(samples, samples_per_step=3)
    with pytest.raises(ValueError, match="prompt group 0 has samples in steps 0 and 1"):
        cut_steps(samples, samples_per_step=1)
    with pytest.raises(ValueError, match="rollout 'r' has samples in steps 0 and 1"):
        check_boundaries([[plain_sample(rollout_id="r")] for _ in range(2)])


def numbered(count, **ids):
    """Samples of one trained token, in steps 7, 3, 7, 3, …"""
    samples = [make_sample(prompt_length=1, mask=[1], rng=random.Random(i), rollout_id=i) for i in range(count)]
    for i, sample in enumerate(samples):
        values = {"step": (7, 3)[i % 2], "prompt_id": i % 2} | {name: own(i) for name, own in ids.items()}
        for name, value in values.items():
            object.__setattr__(sample, name, value)
    return samples


def test_a_rollout_file_is_read_as_its_steps_in_the_order_of_their_numbers(tmp_path):
    with RolloutWriter(tmp_path / "r.jsonl") as writer:
        writer.write(numbered(6))
    assert [[s.rollout_id for s in step] for step in read_steps(tmp_path / "r.jsonl")] == [[1, 3, 5], [0, 2, 4]]


def test_a_group_in_two_steps_of_a_file_is_named_with_the_files_own_numbers(tmp_path):
    with RolloutWriter(tmp_path / "r.jsonl") as writer:
        writer.write(numbered(6, prompt_id=lambda i: "one"))
    with pytest.raises(RolloutFileError, match=r"r.jsonl: prompt group 'one' has samples in steps 3 and 7"):
        read_steps(tmp_path / "r.jsonl")


LAYOUTS = {
    "bshd": {"qkv_format": "bshd", "rows": 3, "max_seq_len": 32, "cp_size": 2},
    "thd": {"qkv_format": "thd", "cp_size": 2, "multiple_of": 4},
    "thd of one width": {"qkv_format": "thd", "max_seq_len": 64},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(("size", "count"), [(1, 5), (2, 3), (4, 2)])
@pytest.mark.parametrize("seed", range(3))
def test_every_sample_of_a_step_is_in_one_microbatch_of_one_rank(layout, size, count, seed):
    samples = random_step(random.Random(seed), poison=False)[:14]
    found = []
    for rank in range(size):
        sizes = {"num_microbatches": count, "data_parallel_rank": rank, "data_parallel_size": size}
        batches, peers = (cut_microbatches(list(samples), **sizes, **layout) for _ in range(2))
        assert len(batches) == count
        assert [batch.samples for batch in batches] == [batch.samples for batch in peers]
        assert len({batch.tokens.shape for batch in batches}) == 1 or layout == LAYOUTS["thd"]
        found += [sample for batch in batches for sample in batch.samples]
    assert sorted(map(id, found)) == sorted(map(id, samples))

    def objective(order):  # of a loss that tells the samples apart
        ids = {"rollout_ids": [s.rollout_id for s in order], "prompt_ids": [s.prompt_id for s in order]}
        plan = plan_step([s.num_trained for s in order], aggregation="prompt_mean", **ids)
        return sum(float(s.old_logprobs[s.loss_mask].sum() / d) for s, d in zip(order, plan.denominators, strict=True))

    assert objective(found) == pytest.approx(objective(samples), rel=1e-14)


def test_packed_rows_hold_nearly_equal_numbers_of_tokens():
    samples = [make_sample(prompt_length=1, mask=[1] * n, rng=random.Random(n)) for n in range(1, 33)]
    rows = [
        cut_microbatches(samples, num_microbatches=2, qkv_format="thd", data_parallel_rank=r, data_parallel_size=2)
        for r in (0, 1)
    ]
    lengths = [batch.num_positions for batches in rows for batch in batches]
    assert max(lengths) - min(lengths) <= 1 + 32 // 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_microbatches": 1}, "9 samples for 1 micro-batches of 2 rows on 2 data-parallel ranks: 5 have no row"),
        ({"num_microbatches": 0}, "num_microbatches=0"),
        ({"data_parallel_rank": 2}, "data_parallel_rank=2"),
        ({"rows": None}, "bshd needs rows"),
        ({"qkv_format": "thd"}, "rows=2 has no effect on thd"),
        ({"qkv_format": "thd", "rows": None, "max_seq_len": 3}, "max_seq_len=3 for a packed row of"),
        ({"qkv_format": "sbhd"}, "'sbhd' is neither thd nor bshd"),
    ],
)
def test_microbatches_that_would_drop_a_sample_are_refused(change, message):
    layout = {"num_microbatches": 3, "data_parallel_rank": 0, "data_parallel_size": 2, "qkv_format": "bshd", "rows": 2}
    with pytest.raises(ValueError, match=message):
        cut_microbatches(numbered(9), **{**layout, "max_seq_len": 8} | change)
