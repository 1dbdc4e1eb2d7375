"""The gain of dynamic context parallelism for documents of very different lengths: the slowest rank's step time, by
formula.

Every line is the figure of a fixed layout as a multiple of the dynamic one.

    python benchmarks/dynamic_cp.py --ranks 32 --microbatches 8 --documents 256

No clock and no GPU: a document of n tokens costs n + n² / A, divided among its ranks, and the ranks of a row start it
together. Communication is counted separately, as the positions whose keys and values a rank receives in each layer,
summed over ranks: n (s - 1) for a document on s ranks. Lengths are log-normal, truncated at the longest.
"""

import argparse
import random
import statistics

from megatron_pg.batch.context_ranks import Row, assign_rows, document_cost, slowest_rank


def lengths_of(seed: int, args: argparse.Namespace) -> list[int]:
    """Tokens of a step's documents."""
    rng = random.Random(seed)
    return [min(max(int(rng.lognormvariate(args.mu, args.sigma)), 16), args.longest) for _ in range(args.documents)]


def static_times(lengths: list[int], cp_size: int, args: argparse.Namespace) -> tuple[float, float]:
    """Of one size for all: rows of equal tokens, as `cut_microbatches` makes them, and of equal cost."""
    replicas = args.ranks // cp_size
    costs = [document_cost(n, args.attention_length) for n in lengths]
    longest = []
    for weights, count in ((lengths, replicas * args.microbatches), (costs, replicas)):
        loads, times = [0.0] * count, [0.0] * replicas
        for i in sorted(range(len(lengths)), key=lambda i: -weights[i]):
            row = min(range(count), key=loads.__getitem__)
            loads[row] += weights[i]
            times[row % replicas] += costs[i] / cp_size
        longest.append(max(times))
    return longest[0], longest[1]


def main() -> None:
    """Compare and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=32, help="D · C")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--mu", type=float, default=8.3, help="of the logarithm of a length")
    parser.add_argument("--sigma", type=float, default=1.3)
    parser.add_argument("--longest", type=int, default=131072)
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of a row on each rank")
    parser.add_argument("--attention-length", type=float, default=12 * 4096, help="A, 12 times the hidden size")
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()
    cp_size = -(-args.longest // args.max_tokens)  # what the longest document needs, and so every one
    ratios = []
    for seed in range(args.steps):
        lengths = lengths_of(seed, args)
        rows: list[Row] = assign_rows(
            lengths,
            num_ranks=args.ranks,
            num_microbatches=args.microbatches,
            max_tokens=args.max_tokens,
            attention_length=args.attention_length,
        )
        time = slowest_rank(rows, lengths, num_ranks=args.ranks, attention_length=args.attention_length)
        ideal = sum(document_cost(n, args.attention_length) for n in lengths) / args.ranks
        sent = sum(lengths[i] * (row.ranks.size - 1) for row in rows for i in row.documents)
        exchange = sum(lengths) * (cp_size - 1) / sent if sent else float("inf")
        ratios.append([*(other / time for other in static_times(lengths, cp_size, args)), exchange, ideal / time])
        shared = sum(len(row.documents) for row in rows if row.ranks.size > 1)
        print(f"step {seed}: longest {max(lengths)}, {shared} of {len(lengths)} documents on several ranks", flush=True)
    fixed = f"C = {cp_size} for all"
    names = (
        f"{fixed}, rows of equal tokens",
        f"{fixed}, equal cost",
        f"{fixed}, positions exchanged",
        "a perfect split",
    )
    for name, values in zip(names, zip(*ratios, strict=True), strict=True):
        print(f"{name}: {statistics.mean(values):.2f}× (from {min(values):.2f}× to {max(values):.2f}×)")


if __name__ == "__main__":
    main()
