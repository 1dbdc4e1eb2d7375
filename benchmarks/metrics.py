"""The cost of `--pg-metrics basic` and `with_entropy` compared with `none`: loss, metrics and backward of one
micro-batch.

    python benchmarks/metrics.py --tokens 8192 --vocabulary 151936 --dtype bfloat16

Random logits, interleaved repetitions of the three levels in one run, medians, and their ratio to `none`.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable

import torch

from megatron_pg import Sample, pack
from megatron_pg.args import add_arguments, validate_args
from megatron_pg.batch import slice_batch
from megatron_pg.declarations.choices import METRIC_LEVELS as LEVELS
from megatron_pg.plan.settings import LossSettings
from megatron_pg.step.loss import microbatch_loss


def make_batch(tokens: int, vocabulary: int, device: str):
    """One packed micro-batch of documents of 512 tokens, half of them response, with reference and engine fields."""
    rng = random.Random(0)
    samples = []
    for i in range(tokens // 512):
        values = [rng.uniform(-3, -1) for _ in range(256)]
        samples.append(
            Sample.build(
                tokens=[rng.randrange(vocabulary) for _ in range(512)],
                response_length=256,
                loss_mask=[1] * 256,
                old_logprobs=values,
                advantage=rng.uniform(-1, 1),
                ref_logprobs=values,
                rollout_logprobs=values,
                prompt_id=i // 4,
            )
        )
    batch = pack(samples, qkv_format="thd")
    weights = batch.loss_mask.double() / (256 * len(samples))
    return slice_batch(batch, {"weights": weights}, cp_rank=0, cp_size=1, device=device)


def settings(level: str) -> LossSettings:
    """The default loss with one level of metrics."""
    flags = ["--pg-kernel", "torch", "--pg-metrics", level]
    args = add_arguments(argparse.ArgumentParser(allow_abbrev=False)).parse_args(flags)
    return LossSettings.from_args(validate_args(args))


def seconds(function: Callable[[], None], device: str) -> float:
    """Duration of one call."""
    if device == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    function()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=2048, help="positions of the micro-batch, a multiple of 512")
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="float32")
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    local = make_batch(options.tokens, options.vocabulary, device)
    logits = torch.randn(options.tokens, options.vocabulary, device=device, dtype=getattr(torch, options.dtype))
    logits.requires_grad_()
    times: dict[str, list[float]] = {level: [] for level in LEVELS}
    chosen = {level: settings(level) for level in LEVELS}

    def step(level: str) -> None:
        logits.grad = None
        microbatch_loss(logits, local.fields, chosen[level], None)[0].backward()

    for level in LEVELS:
        step(level)  # warm-up
    for _ in range(options.repeats):
        for level in LEVELS:
            times[level].append(seconds(lambda level=level: step(level), device))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    medians = {level: statistics.median(values) for level, values in times.items()}
    lines = [
        f"{name}, torch {torch.__version__}, {options.tokens} x {options.vocabulary} {options.dtype}, "
        f"{options.repeats} repeats"
    ]
    for level, median in medians.items():
        spread = statistics.quantiles(times[level], n=4)
        lines.append(
            f"{level:<13} {median * 1e3:9.2f} ms  ({spread[0] * 1e3:.2f} to {spread[2] * 1e3:.2f})  "
            f"{median / medians['none']:.3f} x none"
        )
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
