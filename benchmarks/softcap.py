"""What a logit softcap costs: `grpo` from logits and by the fused head, with and without one, in one run.

    python benchmarks/softcap.py                    # one GPU: times, and the gradients of 64 rows against float64
    python benchmarks/softcap.py --accuracy-only    # the gradients alone

Logits have a standard deviation of 12, so that some are far beyond the cap of 30. Times of logits are relative to one
copy of them, and those of a head to its time without a softcap.
"""

import argparse
from collections.abc import Callable

import torch
from grpo_kernel import copy_ms, fields_of, median_ms

from megatron_pg.kernels import grpo_loss
from megatron_pg.lm_head import grpo_head_loss

CAP, SPREAD, ROWS = 30.0, 12.0, 64
SHAPES = [
    (8192, 256000, torch.bfloat16),  # Gemma 2
    (8192, 262144, torch.bfloat16),  # Gemma 4
    (8192, 151936, torch.bfloat16),
    (32768, 19008, torch.bfloat16),
    (4096, 151936, torch.float32),
    (12289, 100277, torch.bfloat16),  # multi-pass kernels: rows that are not aligned to 16 bytes
]
HEADS = [(8192, 2304, 256000), (8192, 3584, 256000), (8192, 4608, 256000)]  # tokens, H, V of Gemma 2
CLIP = {"clip_eps_low": 0.2, "clip_eps_high": 0.28}


def from_logits(fields: dict[str, torch.Tensor], softcap: float | None) -> Callable:
    """Forward and backward; the loss and the gradient of the logits."""

    def run(logits: torch.Tensor):
        leaf = logits.requires_grad_()
        out = grpo_loss(leaf.view_as(leaf), **fields, **CLIP, softcap=softcap, impl="triton")
        return out.loss.detach(), torch.autograd.grad(out.loss, leaf)[0]

    return run


def from_hidden(fields: dict[str, torch.Tensor], weight: torch.Tensor, mode: str, softcap: float | None) -> Callable:
    """Forward and backward; the gradients of hidden states and weight, the latter in float32."""
    main_grad = torch.zeros_like(weight, dtype=torch.float32)

    def run(hidden: torch.Tensor):
        leaves = hidden.requires_grad_(), weight.detach().requires_grad_()
        head = {"mode": mode, "main_grad": main_grad, "impl": "triton"}
        grpo_head_loss(*leaves, **fields, **CLIP, softcap=softcap, **head).loss.backward()
        return leaves[0].grad, main_grad

    return run


def exact(logits: torch.Tensor, fields: dict[str, torch.Tensor], softcap: float | None) -> torch.Tensor:
    """The loss, from the formulas in float64."""
    z = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    new = z.log_softmax(1).gather(1, fields["targets"][:, None])[:, 0]
    ratio, advantages = (new - fields["old_logprobs"]).exp(), fields["advantages"].double()
    clipped = ratio.clamp(1 - CLIP["clip_eps_low"], 1 + CLIP["clip_eps_high"])
    return -(fields["weights"].double() * torch.minimum(ratio * advantages, clipped * advantages)).sum()


def known(logits_of: Callable, rows: int, columns: int, softcap: float | None) -> dict[str, torch.Tensor]:
    """Random fields, whose old log-probabilities are near those of the logits [n, V] of a slice of the rows."""
    fields, new = fields_of(torch.empty(1, device="cuda").expand(rows, columns)), []
    for part in (slice(start, start + ROWS) for start in range(0, rows, ROWS)):
        x = logits_of(part).float()
        z = x if softcap is None else softcap * torch.tanh(x / softcap)
        new.append(z.log_softmax(1).gather(1, fields["targets"][part, None])[:, 0])
    new = torch.cat(new)
    return fields | {"old_logprobs": new + 0.05 * torch.randn_like(new)}


def fields_of_head(hidden: torch.Tensor, weight: torch.Tensor, softcap: float | None) -> dict[str, torch.Tensor]:
    """`known` of the logits that a head makes."""
    return known(lambda part: hidden[part].float() @ weight.float().t(), len(hidden), len(weight), softcap)


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the error over the norm of what is wanted."""
    return float((found.double() - wanted).norm() / wanted.norm())


def check_logits(columns: int, dtype: torch.dtype) -> None:
    """Print the gradient's error, and what rounding the exact gradient costs."""
    for softcap in (None, CAP):
        torch.manual_seed(0)
        logits = (SPREAD * torch.randn(ROWS, columns, device="cuda")).to(dtype)
        fields = known(logits.__getitem__, *logits.shape, softcap)
        leaf = logits.double().requires_grad_()
        loss = exact(leaf, fields, softcap)
        (wanted,) = torch.autograd.grad(loss, leaf)
        value, found = from_logits(fields, softcap)(logits.clone())
        rounding = relative(wanted.to(dtype), wanted)
        off = abs(float(value) / float(loss.detach()) - 1)
        errors = f"loss {off:.1e}, gradient {relative(found, wanted):.2e} (rounding it {rounding:.2e})"
        print(f"logits {columns} {dtype} softcap {softcap}: {errors}", flush=True)


def check_head(mode: str, width: int, columns: int) -> None:
    """Print the errors of both gradients."""
    for softcap in (None, CAP):
        torch.manual_seed(0)
        hidden = torch.randn(ROWS, width, device="cuda").bfloat16()
        weight = (SPREAD * width**-0.5 * torch.randn(columns, width, device="cuda")).bfloat16()
        fields = fields_of_head(hidden, weight, softcap)
        leaves = [each.double().requires_grad_() for each in (hidden, weight)]
        wanted = torch.autograd.grad(exact(leaves[0] @ leaves[1].t(), fields, softcap), leaves)
        found = from_hidden(fields, weight, mode, softcap)(hidden.clone())
        errors = ", ".join(f"{relative(ours, theirs):.2e}" for ours, theirs in zip(found, wanted, strict=True))
        print(f"head {mode} {width}x{columns} softcap {softcap}: hidden, weight {errors}", flush=True)


def time_logits(repetitions: int) -> None:
    """Print copies of the logits with and without a softcap, and their ratio."""
    for rows, columns, dtype in SHAPES:
        master = (SPREAD * torch.randn(rows, columns, device="cuda")).to(dtype)
        copy, times = copy_ms(master, repetitions), []
        for cap in (None, CAP):
            fields = known(master.__getitem__, rows, columns, cap)
            times.append(median_ms(master, from_logits(fields, cap), repetitions) / copy)
        plain, capped = times
        shape = f"{rows}x{columns} {dtype}"
        print(f"{shape}: copies {plain:.2f}, softcap {capped:.2f}, ratio {capped / plain:.2f}", flush=True)
        del master
        torch.cuda.empty_cache()


def time_heads(modes: list[str], repetitions: int) -> None:
    """Print the time of each mode with and without a softcap, and their ratio."""
    for rows, width, columns in HEADS:
        hidden = torch.randn(rows, width, device="cuda").bfloat16()
        weight = (SPREAD * width**-0.5 * torch.randn(columns, width, device="cuda")).bfloat16()
        fields = {cap: fields_of_head(hidden, weight, cap) for cap in (None, CAP)}
        for mode in modes:
            runs = (from_hidden(fields[cap], weight, mode, cap) for cap in (None, CAP))
            plain, capped = (median_ms(hidden, run, repetitions) for run in runs)
            text = f"{plain:.2f} ms, softcap {capped:.2f} ms, ratio {capped / plain:.3f}"
            print(f"head {mode} {rows}x{width}x{columns}: {text}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--accuracy-only", action="store_true")
    parser.add_argument("--repetitions", type=int, default=30)
    parser.add_argument("--modes", nargs="+", default=["forward", "recompute", "scaled_exp"])
    args = parser.parse_args()
    print(torch.cuda.get_device_name(), torch.__version__, flush=True)
    for columns, dtype in (
        (256000, torch.bfloat16),
        (19008, torch.bfloat16),
        (151936, torch.float32),
        (5003, torch.bfloat16),
    ):
        check_logits(columns, dtype)
    for mode in args.modes:
        check_head(mode, 2304, 32000)
    if not args.accuracy_only:
        time_logits(args.repetitions)
        time_heads(args.modes, args.repetitions)
