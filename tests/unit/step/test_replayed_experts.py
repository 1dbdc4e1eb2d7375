"""The engine's experts where the tokens are: against loops over positions."""

import random
from types import SimpleNamespace

import pytest
import torch
from samples import make_sample

from megatron_pg import Sample
from megatron_pg.batch import pack, slice_batch
from megatron_pg.step.experts import local_experts

EXPERTS, LAYERS, TOPK = 5, 3, 2
CONFIG = SimpleNamespace(num_moe_experts=EXPERTS, num_layers=LAYERS, moe_router_topk=TOPK)


def routed(rng: random.Random, prompt: int, response: int) -> Sample:
    """A sample with experts at random, other ones for every token and layer."""
    plain = make_sample(prompt_length=prompt, mask=[1] * response, rng=rng)
    chosen = [[rng.sample(range(EXPERTS), TOPK) for _ in range(LAYERS)] for _ in range(prompt + response - 1)]
    names = ("tokens", "response_length", "loss_mask", "old_logprobs")
    return Sample.build(
        **{name: getattr(plain, name) for name in names}, advantage=plain.advantages, routed_experts=chosen
    )


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("cp_size", [1, 2])
@pytest.mark.parametrize("qkv_format", ["thd", "bshd"])
def test_every_token_takes_its_own_experts_to_the_rank_that_has_it(qkv_format, cp_size, tp_size):
    rng = random.Random(cp_size)
    samples = [routed(rng, *lengths) for lengths in ((3, 5), (1, 1), (6, 4))]
    layout = {"multiple_of": tp_size * cp_size} if qkv_format == "thd" else {"max_seq_len": 16, "rows": 4}
    batch = pack(samples, qkv_format=qkv_format, cp_size=cp_size, **layout)
    weights = {"weights": batch.loss_mask.double()}
    seen = set()
    for cp_rank in range(cp_size):
        local = slice_batch(batch, weights, cp_rank=cp_rank, cp_size=cp_size)
        # the model holds [W/C, B] positions, of which sequence parallelism cuts the first dimension
        places = [(row, int(column)) for column in local.row_index for row in range(len(batch.tokens))]
        length = len(places) // tp_size
        for tp_rank in range(tp_size):
            found = local_experts(local, CONFIG, tp_rank=tp_rank, tp_size=tp_size)
            assert found.shape == (LAYERS, length, TOPK)
            assert found.dtype == torch.int32
            for i, (row, column) in enumerate(places[tp_rank * length : (tp_rank + 1) * length]):
                here, at = int(batch.sample_index[row, column]), int(batch.position_ids[row, column])
                if here >= 0 and at < len(samples[here].tokens) - 1:
                    assert found[:, i].tolist() == samples[here].routed_experts[at].tolist()
                    seen.add((here, at))
                else:
                    assert all(len(set(chosen)) == TOPK and max(chosen) < EXPERTS for chosen in found[:, i].tolist())
    assert len(seen) == sum(len(sample.tokens) - 1 for sample in samples)


def test_an_empty_micro_batch_crowds_no_expert():
    batch = pack([], qkv_format="bshd", max_seq_len=EXPERTS, rows=2)
    local = slice_batch(batch, {"weights": batch.loss_mask.double()}, cp_rank=0, cp_size=1)
    found = local_experts(local, CONFIG, tp_rank=0, tp_size=1)
    assert found.flatten(1).sort(dim=1).values.tolist() == [[e for e in range(EXPERTS) for _ in range(4)]] * LAYERS
