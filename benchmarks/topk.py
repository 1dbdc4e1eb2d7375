"""Top-k distillation compared with the plain loss, from logits and from hidden states, in one run on a GPU.

    python benchmarks/topk.py

8192 rows, V = 151936, H = 4096, bfloat16, every row trained by the objective (`grpo`) and by the distillation term.
Medians of forward and backward, relative to `grpo` alone; memory is the peak beyond inputs and `main_grad`. Gradients
of 32 rows are compared with torch in float64.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from grpo_kernel import copy_ms, median_ms
from lm_head import GIB, HIDDEN, VOCABULARY, Problem, peak_bytes
from lm_head import median_ms as median_ms_of
from objectives import fields_for, ours

from megatron_pg.batch.fields import TokenFields, TopK
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, Vocabulary
from megatron_pg.kernels.policy_loss import PolicyLoss
from megatron_pg.lm_head import Head, policy_gradient_head_loss
from megatron_pg.objectives import objective_of

PLAIN = LossTerms(objective=objective_of("grpo", clip_eps_low=0.2, clip_eps_high=0.28))
KINDS = ("topk_forward_kl", "topk_reverse_kl", "topk_jsd", "topk_generalised_reverse")


def terms_of(kind: str) -> LossTerms:
    """`grpo` and the loss term over the same tokens."""
    term = LossTerm(name="distil", kind=kind, weight=0.5, on="rl").resolved("token_mean", None)
    return replace(PLAIN, further=(term,))


def with_teacher(fields: TokenFields, columns: int, width: int) -> TokenFields:
    """K different ids per token, with nine tenths of the teacher's probability."""
    rows, device = len(fields.targets), fields.targets.device
    first = torch.randint(0, columns, (rows, 1), device=device)
    ids = (first + torch.arange(width, device=device) * (columns // width)) % columns
    logprobs = torch.randn(rows, width, device=device).log_softmax(-1) + torch.log(torch.tensor(0.9))
    tails = 1.0 - logprobs.double().exp().sum(-1)
    return replace(fields, teacher_topk=TopK(ids=ids.int(), logprobs=logprobs, tails=tails))


def from_hidden(problem: Problem, fields: TokenFields, terms: LossTerms, mode: str) -> Callable:
    """Forward and backward of the fused head."""
    rows = torch.arange(len(fields.targets), device="cuda")
    head = Head(mode=mode, main_grad=problem.main_grad)
    vocabulary = Vocabulary.of(len(problem.weight))

    def run():
        found = policy_gradient_head_loss(
            problem.hidden, problem.weight, PolicyLoss(terms, fields), vocabulary, head, rows=rows
        )
        found.loss.backward()
        problem.hidden.grad = None

    return run


def gradient_error(kind: str, width: int) -> float:
    """Norm of the gradient's error of 32 rows of float32 logits against float64, over the gradient's."""
    logits = torch.randn(32, 20000, device="cuda")
    fields = with_teacher(fields_for(logits), logits.shape[1], width)
    found = ours(terms_of(kind), fields)(logits.clone())[1]
    exact = ours(terms_of(kind), fields, impl="torch")(logits.double())[1]
    return float((found.double() - exact).norm() / exact.norm())


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    times = parser.parse_args().repetitions
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    for kind in KINDS:
        print(kind, "gradient error", " ".join(f"K={k}: {gradient_error(kind, k):.1e}" for k in (8, 64)), flush=True)
    master = torch.randn(8192, VOCABULARY, device="cuda", dtype=torch.bfloat16)
    fields, copy = fields_for(master), copy_ms(master, times)
    plain = median_ms(master, ours(PLAIN, fields), times)
    print(f"from logits, grpo: {plain / copy:.2f} copies")
    for kind, width in (*((kind, 64) for kind in KINDS), ("topk_forward_kl", 256)):
        time = median_ms(master, ours(terms_of(kind), with_teacher(fields, VOCABULARY, width)), times)
        print(f"from logits, {kind}, K = {width}: {time / copy:.2f} copies, {time / plain:.2f} of grpo", flush=True)
    del master
    problem = Problem(8192)
    for mode in ("forward", "recompute"):
        run = from_hidden(problem, fields, PLAIN, mode)
        plain, memory = median_ms_of(run, times), peak_bytes(run)
        print(f"H = {HIDDEN}, {mode}, grpo: {plain:.1f} ms, {memory / GIB:.2f} GiB")
        for kind in KINDS[:2]:
            run = from_hidden(problem, with_teacher(fields, VOCABULARY, 64), terms_of(kind), mode)
            time, more = median_ms_of(run, times), peak_bytes(run) - memory
            print(
                f"H = {HIDDEN}, {mode}, {kind}, K = 64: {time / plain:.3f} of grpo, {more / GIB:+.2f} GiB", flush=True
            )


if __name__ == "__main__":
    main()
