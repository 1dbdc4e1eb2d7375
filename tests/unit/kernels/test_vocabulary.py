"""Which columns a tensor-parallel rank holds: the shards are the whole, cut."""

from types import SimpleNamespace

import pytest
import torch

from megatron_pg.kernels import Vocabulary

COLUMNS, RANKS = 4, 3


@pytest.mark.parametrize("size", range(1, COLUMNS * RANKS + 1))
def test_the_shards_are_the_whole_vocabulary_cut(size):
    """Padding, targets and their owners; the last ranks may hold nothing but padding."""
    groups = [SimpleNamespace(rank=lambda r=r: r, size=lambda: RANKS) for r in range(RANKS)]
    shards = [Vocabulary.of(COLUMNS, vocab_size=size, tp_group=group) for group in groups]
    assert sum(shard.valid for shard in shards) == size
    logits = torch.arange(COLUMNS * RANKS).float().expand(2, -1)
    hidden = [v.hide_padding(z.clone()) for v, z in zip(shards, logits.split(COLUMNS, dim=1), strict=True)]
    assert torch.equal(torch.cat(hidden, 1), torch.where(logits < size, logits, -torch.inf))
    targets = torch.tensor([-(2**40), -1, *range(COLUMNS * RANKS + 1), 2**40])
    exists = (targets >= 0) & (targets < size)
    local, owned = (torch.stack(found) for found in zip(*(shard.owned(targets) for shard in shards), strict=True))
    assert torch.equal(owned.sum(0), exists.long())
    first = torch.arange(RANKS)[:, None] * COLUMNS
    assert torch.equal((owned * (local + first)).sum(0)[exists], targets[exists])
    assert not local[~owned].any()  # a column that can be read
    assert torch.equal(shards[0].defined(torch.ones(len(targets)), targets).isnan(), ~exists)
