"""The rules of the LM head. Needs no torch."""

import argparse
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from megatron_pg.declarations.choices import AT_ONCE, AUTO, SOFTCAPS
from megatron_pg.declarations.declaration import flag_of
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.table import switch_rules, word_rules
from megatron_pg.flags.values import number

KERNEL = "bfloat16 and compute capability 9.0 with Triton 3.6 or 3.8"  # what the kernel of scaled_exp was run with


class HeadChoice(NamedTuple):
    """The mode of the fused head."""

    mode: str | None  # None: the model computes logits
    why: str | None = None  # the reason of `auto`; None: the user chose it

    def __str__(self) -> str:
        return f"{self.mode}" if self.why is None else f"{AUTO}: {self.mode}, {self.why}"


def chosen_head(facts: Facts, late: Iterable[tuple[str, str]] = ()) -> HeadChoice:
    """The mode that --pg-fused-head chooses without one: recompute where a row says so, else forward, else scaled_exp.

    This is the table. A micro-batch with sampling masks, which only samples tell, takes forward instead of scaled_exp.

    Args:
        facts: the arguments, the same on every rank.
        late: further rows (mode, reason): of the custom objective and of the GPU, which this module does not load.
    """
    rows = (
        ("recompute", "{} reads whole sequences", _sequence_readers(facts)),
        ("recompute", "{} uses a loss scale that the forward does not know", _loss_scales(facts)),
        ("forward", "{} reads more than log-probabilities", _entropy_readers(facts)),
        ("forward", "{} trains tokens that were not sampled", _demonstrations(facts)),
        ("forward", "scaled_exp is not chosen with {}", _not_of_scaled_exp(facts)),
    )
    reasons = [(mode, text.format(reader)) for mode, text, readers in rows for reader in readers]
    scaled_exp = "scaled_exp", "the fastest; forward for micro-batches with sampling masks"
    return HeadChoice(*min([*reasons, *late], key=lambda row: row[0] != "recompute", default=scaled_exp))


def head_text(facts: Facts) -> str:
    """The mode, as far as arguments tell it where no GPU is known."""
    if facts.args.pg_fused_head != AUTO:
        return str(facts.args.pg_fused_head)
    found = chosen_head(facts)
    text = f"{AUTO}: scaled_exp with {KERNEL}, else forward" if found.mode == "scaled_exp" else str(found)
    if facts.custom_objective is None or found.mode == "recompute":
        return text
    return f"{text}; recompute if the custom objective reads whole sequences"


def _demonstrations(facts: Facts) -> Iterator[str]:
    """The loss terms whose tokens may have a log-probability below -103, where scaled_exp gives NaN."""
    yield from (term.flag for term in facts.given_terms if term.kind == "ce" and term.weight)


def _not_of_scaled_exp(facts: Facts) -> Iterator[str]:
    """The flags whose heads have no scaled exponentials, or whose weights may not be aligned for its kernel."""
    args, width = facts.args, facts.megatron("hidden_size")
    if args.fp32_lm_head_backward == "split":
        yield "--fp32-lm-head-backward split"
    if args.pg_kernel == "torch":
        yield "--pg-kernel torch"
    if facts.megatron("use_megatron_fsdp"):
        yield "--use-megatron-fsdp"
    if width and width % 8:
        yield f"--hidden-size {width}"


def head_violations(facts: Facts) -> Violations:
    """Rules E24 of the softcap, E50 to E52, E55 for sequence-level losses, and E56."""
    args = facts.args
    if args.pg_logit_softcap is not None:
        low, high = SOFTCAPS
        yield from number("--pg-logit-softcap", args.pg_logit_softcap, low, high, f"between {low:g} and {high:g}")
    yield from switch_rules(args, "--fp32-lm-head", rule="E50")
    words = "--pg-fused-head", "--fp32-lm-head-backward"
    yield from word_rules(args, *words, rule="E50", elsewhere={"odds": "scaled_exp"})
    yield from _vocabulary_rules(args, facts.megatron("padded_vocab_size"))
    backward = args.fp32_lm_head_backward
    if backward is not None and not facts.has_own_head:
        yield (
            f"E51 --fp32-lm-head-backward {backward} has no effect without --fp32-lm-head or --pg-fused-head; add one "
            "or remove it"
        )
    if args.pg_fused_head in AT_ONCE:
        for reader in _sequence_readers(facts):
            yield from recompute_violation(reader, args.pg_fused_head)
        for flag in _loss_scales(facts):
            yield (
                f"E55 {flag} uses a loss scale that is not known when --pg-fused-head computes the gradient; use "
                "--pg-fused-head recompute"
            )
    if args.pg_fused_head == "scaled_exp":
        for reader in _entropy_readers(facts):
            yield (
                f"E56 --pg-fused-head scaled_exp computes only log-probabilities, and {reader} needs more; use "
                "--pg-fused-head forward"
            )
        if backward == "split":
            yield (
                "E56 --pg-fused-head scaled_exp has no float32 gradient for --fp32-lm-head-backward split; use "
                "--pg-fused-head forward"
            )


def _vocabulary_rules(args: argparse.Namespace, padded: int | None) -> Violations:
    size = args.pg_vocab_size
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        yield f"E52 --pg-vocab-size must be a whole number >= 1, got {size!r}"
    elif padded is not None and size > padded:
        yield (
            f"E52 --pg-vocab-size {size} is more than the {padded} columns of the logits; give the vocabulary size of "
            "the rollout engine"
        )


def recompute_violation(reader: str, mode: str) -> Violations:
    """Rule E55 for a flag with a sequence-level loss. A custom objective is tried at startup to find that out."""
    yield (
        f"E55 --pg-fused-head {mode} computes the gradient of a chunk before the next chunk is read, and {reader} "
        "reads whole sequences; use --pg-fused-head recompute"
    )


def _entropy_readers(facts: Facts) -> Iterator[str]:
    """The flags that read more of a token's distribution than its log-probability."""
    if facts.args.pg_entropy_coef != 0:
        yield f"--pg-entropy-coef {facts.args.pg_entropy_coef}"
    elif facts.selected_target is not None:
        yield str(facts.selected_target)
    if facts.args.pg_metrics == "with_entropy":
        yield "--pg-metrics with_entropy"
    weighted = (term for term in facts.given_terms if term.weight)
    yield from (term.flag for term in weighted if term.kind == "entropy" or term.payload)


def _sequence_readers(facts: Facts) -> Iterator[str]:
    """The flags that make the loss of a token depend on its whole sequence."""
    if facts.correction and facts.correction.anchor:
        yield str(facts.selected_correction)
    if facts.objective and facts.objective.reads_sequences:
        yield str(facts.selected_objective)


def _loss_scales(facts: Facts) -> Iterator[str]:
    """The flags that multiply the loss by a number which is known in the backward only."""
    yield from (flag_of(name) for name in ("fp16", "loss_scale") if facts.megatron(name))


def head_warnings(facts: Facts) -> list[str]:
    """W10, for arguments without violations: flags without effect in a float32 run, for instance on a CPU."""
    if not is_float32(facts.megatron("params_dtype")):
        return []
    given = {
        "--fp32-lm-head": facts.args.fp32_lm_head,
        "--fp32-lm-head-backward": facts.args.fp32_lm_head_backward is not None,
    }
    return [
        f"W10 {flag} has no effect here: without --bf16 and --fp16, hidden states, weights, logits and their gradients "
        "are float32"
        for flag, is_given in given.items()
        if is_given
    ]


def is_float32(params_dtype: object) -> bool:
    """Whether Megatron's `params_dtype` is float32; None, where it is not known, is not."""
    return str(params_dtype) == "torch.float32"
