"""How the single-pass kernel holds a row, and on which chips: by arithmetic, without running it."""

from types import SimpleNamespace

import pytest
import torch

from megatron_pg.kernels.vocabulary import Vocabulary

pytest.importorskip("triton")

from megatron_pg.kernels.triton import single_pass

SHARED, REGISTERS = 232448, 65536  # of a Hopper multiprocessor, for programs


@pytest.mark.proof(
    "Single-pass kernel: rows of every length fit in registers and shared memory of their multiprocessors"
)
@pytest.mark.parametrize("is_capped", [False, True])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_row_fits_on_its_multiprocessors(itemsize, is_capped, full, evidence):
    widths = range(16, 8 * 36 * 8192 // itemsize + 1, 16 if full else 16 * 97)
    for columns in widths:
        shape = single_pass.Shape.of_row(columns, itemsize, is_capped=is_capped)
        row, tile = shape.tiling, 16 * shape.tiling.threads
        in_groups = tile * row.groups * row.per_group
        assert in_groups + tile * row.kept >= columns * itemsize
        assert in_groups < columns * itemsize or row.kept == 0  # groups of a row with kept tiles have no mask
        assert row.lag < row.groups
        assert shape.programs * (shape.shared_bytes + single_pass._OTHER_BYTES) <= SHARED
        assert shape.programs * shape.registers * row.threads // row.blocks <= REGISTERS
        assert row.blocks in (1, 2, 4, 8)
    evidence(cases=len(widths))


@pytest.mark.parametrize(
    ("columns", "dtype", "softcap", "capability", "takes"),
    [
        (180224, torch.bfloat16, None, (8, 0), True),
        (180240, torch.bfloat16, None, (8, 0), False),  # a cluster of two, which this chip does not have
        (180240, torch.bfloat16, None, (9, 0), True),
        (151936, torch.float32, None, (9, 0), True),
        (655360, torch.float32, None, (10, 0), True),
        (655376, torch.float32, None, (10, 0), False),  # more than a cluster of eight holds
        (151930, torch.float32, None, (9, 0), False),
        (163840, torch.bfloat16, 30.0, (8, 0), True),
        (163856, torch.bfloat16, 30.0, (8, 0), False),  # a softcap takes registers
        (589824, torch.float32, 30.0, (10, 0), True),
        (589840, torch.float32, 30.0, (10, 0), False),
    ],
)
def test_rows_longer_than_a_multiprocessor_holds_need_clusters(columns, dtype, softcap, capability, takes, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    monkeypatch.setattr(single_pass, "_most_blocks", single_pass._most_blocks.__wrapped__)
    monkeypatch.setattr(single_pass, "_shared_memory", lambda _: SHARED)
    logits = torch.empty(2, columns, dtype=dtype, device="meta")
    assert single_pass.supports(logits, Vocabulary.of(columns, softcap=softcap)) == takes


def test_large_clusters_are_counted_once_by_the_driver(monkeypatch):
    """Grids larger than what runs at a time would take twice as long; other grids in later calls could change bits."""
    asked = []
    utils = SimpleNamespace(cuOccupancyMaxActiveClusters=lambda *args: asked.append(args) or 30)
    active = SimpleNamespace(active=SimpleNamespace(utils=utils))
    monkeypatch.setattr(single_pass.triton.runtime, "driver", active)
    monkeypatch.setattr(single_pass, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(single_pass, "_clusters", {})
    compiled = SimpleNamespace(function=7, metadata=SimpleNamespace(shared=100))
    shapes = {n: single_pass.Shape.of_row(n, 4) for n in (76000, 151936, 201088)}
    found = [
        single_pass._programs(torch.device("cuda"), s, lambda: compiled) for s in (*shapes.values(), shapes[201088])
    ]
    assert found == [132, 66, 30, 30]
    assert asked == [(7, 100, 4)]


@pytest.mark.parametrize("columns", [76000, 151936, 201088])  # clusters of 1, 2 and 4
def test_a_launch_is_never_empty(columns, monkeypatch):
    """Triton skips an empty grid, and nobody would write the results; a cluster that does not fit is an error."""
    monkeypatch.setattr(single_pass, "multiprocessors", lambda _: 1)
    active = SimpleNamespace(utils=SimpleNamespace(cuOccupancyMaxActiveClusters=lambda *_: 0))
    monkeypatch.setattr(single_pass.triton.runtime, "driver", SimpleNamespace(active=active))
    monkeypatch.setattr(single_pass, "_clusters", {})
    compiled = SimpleNamespace(function=7, metadata=SimpleNamespace(shared=100))
    shape = single_pass.Shape.of_row(columns, 4)
    assert single_pass._programs(torch.device("cuda"), shape, lambda: compiled) == 1
