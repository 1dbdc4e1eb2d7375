"""What one rank of a large group receives in a step's metadata exchange, and its compute time: a simulation in one
process.

    python benchmarks/exchange.py --ranks 64,1024,4096,16384 --samples 64

Every rank's samples are drawn: two per rollout, sixteen per prompt, dealt out over all ranks at random, so that units
lie on several ranks. Rank 0 runs the plan's own code; what the others send it is made by the same code beforehand, and
stands in for the collectives. Its denominators are compared with those of a plan that sees all samples. No time of a
network is in it.
"""

import argparse
import statistics
import sys
import time
from unittest import mock

import torch
from torch import Tensor

from megatron_pg.declarations.aggregations import AGGREGATIONS, is_by_turn
from megatron_pg.plan import collectives, exchange, plan
from megatron_pg.plan.facts import COLUMNS
from megatron_pg.plan.table import LocalTable, PlanRule

MIB = 2**20
_NAME = [exchange._KIND, exchange._KEY]  # columns of a unit's row


def whole_step(ranks: int, samples: int) -> Tensor:
    """[ranks * samples, width] keys, tokens and facts of all ranks' tables, one rank after the other."""
    generator = torch.Generator().manual_seed(ranks)
    size = ranks * samples
    numbers = torch.randperm(size, generator=generator)
    tokens = torch.randint(0, 4096, (size,), generator=generator)
    facts = torch.zeros(size, COLUMNS, dtype=torch.int64)
    keys = [-(2**62) - numbers // of * 2654435761 for of in (2, 16)]  # as of strings
    return torch.cat([torch.stack([*keys, tokens, tokens], dim=1), facts], dim=1)


def table_of(rows: Tensor) -> LocalTable:
    """A rank's part of the exchange."""
    (keys, tokens, facts), total = rows.split([2, 2, COLUMNS], dim=1), int(rows[:, 2].sum())
    return LocalTable(keys, tokens, facts, True, True, total, total, total, keys)


class Others:
    """The other ranks, as rank 0 hears of them."""

    def __init__(self, rows: Tensor, ranks: int, samples: int):
        self.ranks, self.samples, self.received, self._calls = ranks, samples, 0, 0
        kinds = exchange.KINDS.values()
        own = [exchange._own_units(table_of(rows), kind, 0) for kind in kinds]  # as if one rank had them all
        units = torch.cat([each.rows for each in own])
        owned = [exchange._owned_units(units, kind) for kind in kinds]
        self._rows, first = self._sent_to_0(rows)
        places = {tuple(unit): place for place, unit in enumerate(units[:, _NAME].tolist())}
        self._answers = exchange._answers(units, owned)[[places[tuple(unit)] for unit in first.tolist()]]
        self._sums = torch.cat(exchange._sums(table_of(rows), 0, own, owned, [owned[0].facts]))

    def _sent_to_0(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Unit rows of all ranks that rank 0 owns, and the names of rank 0's own units in the order of the answers."""
        kinds = exchange.KINDS.values()
        is_0s = torch.stack([exchange._owners(rows[:, kind], self.ranks) == 0 for kind in kinds]).any(dim=0)
        messages = []
        for rank in (is_0s.nonzero().flatten() // self.samples).unique().tolist():
            mine = table_of(rows[rank * self.samples : (rank + 1) * self.samples])
            units = torch.cat([exchange._own_units(mine, kind, rank).rows for kind in kinds])
            units = units[exchange._owners(units[:, exchange._KEY], self.ranks) == 0]
            messages.append(torch.cat([torch.full((len(units), 1), rank), units], dim=1))
        first = torch.cat([exchange._own_units(table_of(rows[: self.samples]), kind, 0).rows for kind in kinds])
        first = first[exchange._owners(first[:, exchange._KEY], self.ranks).argsort(stable=True)]
        return torch.cat(messages), first[:, _NAME]

    def gather(self, values: Tensor, group: object, error: Exception | None = None) -> Tensor:
        """Every rank has as many samples."""
        self.received += self.ranks * values.nbytes
        return values.expand(self.ranks, -1)

    def all_to_all(self, values: Tensor, sent: Tensor, received: Tensor, group: object) -> Tensor:
        """Sizes, rows, answers, in this order."""
        sizes = torch.bincount(self._rows[:, 0], minlength=self.ranks).int()
        answer = (sizes, self._rows[:, 1:], self._answers)[self._calls % 3]
        self._calls += 1
        self.received += answer.nbytes
        return answer

    def all_reduce(self, values: Tensor, operation: object, group: object) -> Tensor:
        """A ring brings what is summed twice."""
        self.received += 2 * values.nbytes
        return self._sums if values.dtype == torch.int64 else values


def measured(rows: Tensor, aggregation: str, ranks: int, samples: int, repeats: int) -> tuple[int, float]:
    """Bytes that rank 0 receives, and median seconds of its part."""
    divisor = 4096.0 if AGGREGATIONS[aggregation].takes_divisor else None
    rule = PlanRule(aggregation=aggregation, divisor=divisor)
    others, local, times = Others(rows, ranks, samples), table_of(rows[:samples]), []
    with (
        mock.patch.object(collectives, "all_gather_rows", others.gather),
        mock.patch.object(exchange, "all_to_all_rows", others.all_to_all),
        mock.patch.object(exchange, "all_reduced", others.all_reduce),
        mock.patch.object(torch.distributed, "get_rank", return_value=0),
        mock.patch.object(torch.distributed, "get_world_size", return_value=ranks),
    ):
        for _ in range(repeats):
            others.received, begun = 0, time.perf_counter()
            result = plan.plan_from_table(local, rule, error=None, group=object())
            times.append(time.perf_counter() - begun)
    expected = plan.plan_from_table(table_of(rows), rule, error=None, group=None)
    if result.denominators.tolist() != expected.denominators[:samples].tolist():
        raise SystemExit(f"{aggregation} at {ranks} ranks: denominators differ from a plan that sees all samples")
    return others.received, statistics.median(times)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", default="64,1024,4096,16384", help="data-parallel sizes")
    parser.add_argument("--samples", type=int, default=64, help="samples of each rank")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sys.stdout.write("| ranks | samples | aggregation | received | seconds |\n| --- | --- | --- | --- | --- |\n")
    for ranks in map(int, options.ranks.split(",")):
        rows = whole_step(ranks, options.samples)
        for aggregation in (name for name in AGGREGATIONS if not is_by_turn(name)):
            received, seconds = measured(rows, aggregation, ranks, options.samples, options.repeats)
            sys.stdout.write(
                f"| {ranks} | {ranks * options.samples} | {aggregation} | {received / MIB:.3f} MiB | {seconds:.4f} |\n"
            )


if __name__ == "__main__":
    main()
