"""Every kernel on a few rows, for a sanitizer: each shape, type and loss that compiles to different code.

    compute-sanitizer --tool memcheck python benchmarks/every_kernel.py    # or racecheck, synccheck, initcheck
    python benchmarks/every_kernel.py --list                               # the names of the cases
    python benchmarks/every_kernel.py --only "cluster|recompute"           # those that the expression finds

One GPU. Run it without a sanitizer first: that compiles the kernels. Set PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that each
tensor is an allocation whose bounds the sanitizer sees. Every case is a forward and a backward and must give finite
gradients; the other benchmarks and the tests compare them with float64.
"""

import argparse
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
import triton
from full_distillation import KINDS as FULL_KINDS
from full_distillation import Taught
from full_distillation import terms_of as full_terms
from lm_head import Problem, logprobs_only
from objectives import build, fields_for, ours, variants
from sampling_masks import with_sampling_mask
from topk import KINDS as TOPK_KINDS
from topk import PLAIN, from_hidden, terms_of, with_teacher

from megatron_pg.batch.fields import TokenFields
from megatron_pg.declarations.choices import HEAD_MODES
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.kernels import LossTerms

ROWS = 9  # with three tokens that are not trained, between others
COLUMNS = {  # of a row: what decides on its tiles
    "one warp group": (19008, torch.bfloat16),
    "odd": (4099, torch.bfloat16),
    "41 to 82 KB": (37984, torch.bfloat16),
    "cluster of 2": (151936, torch.bfloat16),
    "cluster of 4": (262144, torch.bfloat16),
    "float32": (19008, torch.float32),
    "cluster, float32": (151936, torch.float32),
    "cluster of 8, float32": (262144, torch.float32),
    "float16": (19008, torch.float16),
}
Case = tuple[str, Callable[[], tuple[torch.Tensor, ...]]]  # its name, and what gives gradients


def with_untrained(fields: TokenFields) -> TokenFields:
    """The fields, with three tokens that are not trained."""
    mask = torch.arange(ROWS, device="cuda") % 3 != 1
    return replace(fields, mask=mask, weights=torch.where(mask, fields.weights, 0.0))


def from_logits(columns: int, dtype: torch.dtype, terms: LossTerms, add: Callable | None = None) -> tuple[torch.Tensor]:
    """The gradient of random logits; `add(fields, columns)` gives a row more fields."""
    torch.manual_seed(0)
    logits = torch.randn(ROWS, columns, device="cuda", dtype=dtype)
    fields = with_untrained(fields_for(logits))
    return (ours(terms, fields if add is None else add(fields, columns))(logits)[1],)


def of_logits() -> Iterator[Case]:
    """Kernels that read logits."""
    every = dict(variants())
    for name, terms in every.items():
        yield f"logits, {name}", partial(from_logits, 4096, torch.bfloat16, terms)
    for row, (columns, dtype) in COLUMNS.items():
        for name in ("grpo", "gspo", "grpo + k3 + entropy bonus"):
            yield f"logits, {row}, {name}", partial(from_logits, columns, dtype, every[name])
    for kind in TOPK_KINDS:
        add = partial(with_teacher, width=8)
        yield f"logits, {kind}", partial(from_logits, 4099, torch.bfloat16, terms_of(kind), add)
    for usual, wide in ((1, 3), (64, 2000)):
        add = partial(with_sampling_mask, usual=usual, wide=wide)
        yield f"logits, sampling mask of {wide}", partial(from_logits, 4099, torch.bfloat16, PLAIN, add)


def from_head(mode: str, columns: int, terms: LossTerms, add: Callable | None = None) -> tuple[torch.Tensor, ...]:
    """The gradient of the weight of a head 256 wide."""
    problem = Problem(ROWS, columns, width=256)
    fields = fields_for(torch.empty(ROWS, columns, device="cuda"))
    from_hidden(problem, fields if add is None else add(fields, columns), terms, mode)()
    return (problem.main_grad,)


def taught(kind: str, mode: str) -> tuple[torch.Tensor]:
    """The gradient of the weight, with a teacher's hidden states."""
    found = Taught(Problem(ROWS, 4096, width=256))
    found.run(full_terms(kind), mode)()
    return (found.problem.main_grad,)


def of_heads() -> Iterator[Case]:
    """Kernels of the fused head, and of its log-probabilities."""
    gspo = LossTerms(objective=build("gspo", OBJECTIVES["gspo"].numbers))
    for mode in HEAD_MODES:
        for columns in (4096, 4104):
            yield f"head, {mode}, {columns} columns", partial(from_head, mode, columns, PLAIN)
    yield "head, odd vocabulary", partial(from_head, "forward", 4099, PLAIN)
    yield "head, recompute, gspo", partial(from_head, "recompute", 4104, gspo)
    for mode in ("forward", "recompute"):
        for kind in FULL_KINDS:
            yield f"head, {mode}, {kind}", partial(taught, kind, mode)
        add = partial(with_sampling_mask, usual=8, wide=200)
        yield f"head, {mode}, sampling mask", partial(from_head, mode, 4096, PLAIN, add)
    yield "head, log-probabilities", lambda: logprobs_only(Problem(ROWS, 4104, width=256))()


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression of the cases that are run")
    parser.add_argument("--list", action="store_true", help="print the names, and run nothing")
    given = parser.parse_args()
    cases = [case for source in (of_logits, of_heads) for case in source() if re.search(given.only, case[0])]
    if given.list:
        print(*(name for name, _ in cases), sep="\n")
        return
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    wrong = [name for name, run in cases if not all(bool(found.isfinite().all()) for found in run())]
    print(f"{len(cases)} cases, {len(wrong)} with gradients that are not finite", *wrong, sep="\n")
    raise SystemExit(bool(wrong) or not cases)


if __name__ == "__main__":
    main()
