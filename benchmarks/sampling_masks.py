"""The loss under sampling masks compared with the plain loss, from logits and from hidden states, in one run on a GPU.

    python benchmarks/sampling_masks.py

8192 rows, V = 151936, H = 4096, bfloat16, every row trained by `grpo`. Sets as a top-p leaves them: most of a few
tokens, one in 50 of 2000. Medians of forward and backward over those of the plain loss, with the entropies of the whole
vocabulary in the metrics and without; gradients of 32 rows are compared with torch in float64.
"""

import argparse
from dataclasses import replace

import torch
import triton
from grpo_kernel import copy_ms, median_ms
from lm_head import HIDDEN, VOCABULARY, Problem
from lm_head import median_ms as median_ms_of
from objectives import fields_for, ours
from topk import PLAIN, from_hidden

from megatron_pg.batch.fields import SamplingMask, TokenFields
from megatron_pg.declarations.loss_terms import LossTerm

SIZES = {"1 token": (1, 1), "top-p": (8, 2000), "64 tokens": (64, 64), "2000 tokens": (2000, 2000)}  # mostly, one in 50
BONUS = replace(PLAIN, further=(LossTerm(name="h", kind="entropy", weight=0.01, on="rl", aggregation="policy"),))


def with_sampling_mask(fields: TokenFields, columns: int, usual: int, wide: int) -> TokenFields:
    """Each row's target and the ids after it at equal distances."""
    device, rows = fields.targets.device, len(fields.targets)
    counts = torch.full((rows,), min(usual, columns), device=device)
    counts[::50] = min(wide, columns)
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    row = torch.repeat_interleave(torch.arange(rows, device=device), counts)
    place = torch.arange(len(row), device=device) - offsets[row]
    ids = (fields.targets[row] + place * (columns // counts[row])) % columns
    return replace(fields, sampling_mask=SamplingMask.of(ids.int(), offsets))


def gradient_error(terms, usual: int, wide: int) -> float:
    """Norm of the gradient's error of 32 rows of float32 logits against float64, over that of the gradient without
    sampling masks."""
    logits = torch.randn(32, 20000, device="cuda")
    fields = with_sampling_mask(fields_for(logits), logits.shape[1], usual, wide)
    found = ours(terms, fields)(logits.clone())[1]
    exact = ours(terms, fields, impl="torch")(logits.double())[1]
    whole = ours(terms, replace(fields, sampling_mask=None), impl="torch")(logits.double())[1]
    return float((found.double() - exact).norm() / whole.norm())


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    times = parser.parse_args().repetitions
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    variants = {
        "": PLAIN,
        ", entropy bonus": BONUS,
        ", its bonus over the sampling mask": replace(BONUS, sampling_mask_entropy="kept"),
    }
    for name, terms in variants.items():
        errors = " ".join(f"{size}: {gradient_error(terms, *counts):.1e}" for size, counts in SIZES.items())
        print(f"gradient error{name}: {errors}", flush=True)
    master = torch.randn(8192, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    fields, copy = fields_for(master), copy_ms(master, times)
    plain = median_ms(master, ours(PLAIN, fields), times)
    print(f"from logits, plain: {plain / copy:.2f} copies")
    for name, terms in variants.items():
        for size, counts in SIZES.items():
            time = median_ms(master, ours(terms, with_sampling_mask(fields, VOCABULARY, *counts)), times)
            print(f"from logits, {size}{name}: {time / copy:.2f} copies, {time / plain:.2f} of plain", flush=True)
    del master
    problem = Problem(8192)
    for mode in ("forward", "recompute"):
        plain = median_ms_of(from_hidden(problem, fields, PLAIN, mode), times)
        print(f"H = {HIDDEN}, {mode}, plain: {plain:.1f} ms")
        for size, counts in SIZES.items():
            run = from_hidden(problem, with_sampling_mask(fields, VOCABULARY, *counts), PLAIN, mode)
            print(f"H = {HIDDEN}, {mode}, {size}: {median_ms_of(run, times) / plain:.3f} of plain", flush=True)


if __name__ == "__main__":
    main()
