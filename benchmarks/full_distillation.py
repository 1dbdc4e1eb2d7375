"""Full-vocabulary distillation from a teacher's hidden states, relative to three bf16 GEMMs of the student, in one run.

    python benchmarks/full_distillation.py --repetitions 6

8192 rows, V = 151936, both widths 4096, bfloat16, every row trained by the objective (`grpo`) and by the distillation
term. Medians of interleaved forwards and backwards, relative to the student's three GEMMs (logits, both gradients; the
teacher's logits are a fourth). Memory is the peak beyond the inputs, the teacher's head among them, and `main_grad`.
Divergences and gradients of a small problem are compared with float64.
"""

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
import triton
from lm_head import GIB, HIDDEN, Problem, bare, medians_ms, peak_bytes

from megatron_pg.batch.fields import TeacherStates, TokenFields
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyGradientLoss, Vocabulary
from megatron_pg.kernels.policy_loss import PolicyLoss
from megatron_pg.lm_head import Head, policy_gradient_head_loss, products
from megatron_pg.objectives import objective_of

PLAIN = LossTerms(objective=objective_of("grpo", clip_eps_low=0.2, clip_eps_high=0.28))
KINDS = ("full_forward_kl", "full_reverse_kl", "full_jsd")


def terms_of(kind: str) -> LossTerms:
    """`grpo` and the loss term over the same tokens."""
    term = LossTerm(name="distil", kind=kind, weight=0.5, on="rl").resolved("token_mean", None)
    return replace(PLAIN, further=(term,))


class Taught:
    """A problem of the head with a teacher, whose logits have the student's variance."""

    def __init__(self, problem: Problem):
        rows, width = problem.hidden.shape
        self.problem = problem
        self.weight = torch.randn_like(problem.weight) * width**-0.5
        self.fields = TokenFields(
            targets=problem.targets,
            old_logprobs=problem.old_logprobs,
            advantages=problem.advantages,
            weights=problem.weights,
            mask=problem.mask,
            teacher_hidden=TeacherStates(
                slots=torch.arange(rows, device="cuda"), states=torch.randn_like(problem.hidden).detach()
            ),
        )

    def run(self, terms: LossTerms, mode: str) -> Callable:
        """Forward and backward of the fused head."""
        problem, vocabulary = self.problem, Vocabulary.of(len(self.weight))
        head = Head(mode=mode, main_grad=problem.main_grad)

        def run():
            out = policy_gradient_head_loss(
                problem.hidden,
                problem.weight,
                PolicyLoss(terms, self.fields),
                vocabulary,
                head,
                rows=problem.rows,
                teacher_weight=self.weight,
            )
            out.loss.backward()
            problem.hidden.grad = None

        return run

    def gradients(
        self, terms: LossTerms, dtype: torch.dtype, **head: str
    ) -> tuple[PolicyGradientLoss, list[torch.Tensor]]:
        """The result, and the gradients by hidden states and weight."""
        leaves = [
            tensor.detach().to(dtype, copy=True).requires_grad_()
            for tensor in (self.problem.hidden, self.problem.weight)
        ]
        options = {"rows": self.problem.rows, "teacher_weight": self.weight.to(dtype)}
        policy_loss = PolicyLoss(terms, self.fields)
        out = policy_gradient_head_loss(*leaves, policy_loss, Vocabulary.of(len(self.weight)), Head(**head), **options)
        out.loss.backward()
        return out, [leaf.grad for leaf in leaves]


def errors(taught: Taught, kind: str) -> str:
    """Of the divergences the largest, of both gradients the norm over theirs, rounded and split."""
    only = replace(terms_of(kind), objective=objective_of("reinforce"))
    wanted, exact = taught.gradients(only, torch.float64, impl="torch")
    shown = []
    for backward in ("bf16", "split"):
        out, gradients = taught.gradients(only, torch.bfloat16, backward=backward)
        off = [float((a.double() - b).norm() / b.norm()) for a, b in zip(gradients, exact, strict=True)]
        shown.append(f"{backward}: dx {off[0]:.1e}, dw {off[1]:.1e}")
    apart = (out.term_losses.double() - wanted.term_losses).abs().max()
    return (
        f"{kind}: divergence {float(apart):.1e} of {float(wanted.term_losses.mean()):.2f}; gradients, "
        f"{'; '.join(shown)}"
    )


def main() -> None:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=10)
    parser.add_argument("--rows", type=int, default=8192)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=KINDS)
    parser.add_argument(
        "--megabytes", type=int, nargs="+", help="of logits held at a time, in addition to the package's default"
    )
    given = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    small = Taught(Problem(512, 8192, width=512))
    for kind in given.kinds:
        print(errors(small, kind), flush=True)
    taught = Taught(Problem(given.rows))
    modes = [(mode, terms) for mode in ("forward", "recompute") for terms in (PLAIN, *map(terms_of, given.kinds))]
    for held in (None, *(given.megabytes or ())):
        if held is not None:
            products.LOGITS_BYTES = held * 10**6
        runs = [taught.run(terms, mode) for mode, terms in modes]
        unit, *times = medians_ms([bare(taught.problem), *runs], given.repetitions)
        print(f"{given.rows} rows, H = {HIDDEN}, logits of {products.LOGITS_BYTES / 1e6:.0f} MB; bare: {unit:.2f} ms")
        for (mode, terms), time, run in zip(modes, times, runs, strict=True):
            kind = terms.further[0].kind if terms.further else "grpo alone"
            print(f"  {mode}, {kind}: {time / unit:.3f} of bare, +{peak_bytes(run) / GIB:.2f} GiB", flush=True)


if __name__ == "__main__":
    main()
