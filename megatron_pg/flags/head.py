"""The rules of the LM head. Needs no torch."""

import argparse
from collections.abc import Iterator

from megatron_pg.declarations.choices import AT_ONCE, AUTO, SOFTCAPS
from megatron_pg.declarations.declaration import flag_of
from megatron_pg.declarations.single_pass import TRIED_TRITONS
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.table import switch_rules, word_rules
from megatron_pg.flags.values import number

KERNEL = f"bfloat16 on compute capability 9.0 with {TRIED_TRITONS}"  # that scaled_exp was run with


def chosen_head(facts: Facts, *, reads_sequences: bool = False, has_kernel: bool = True) -> tuple[str, str]:
    """The mode of --pg-fused-head without one, the first of this table with a reason, and the reason for the banner.

    Only a process that trains can determine whether a custom objective reads whole sequences, and whether `KERNEL`
    applies. Only samples have sampling masks: a micro-batch with some takes forward instead of scaled_exp.
    """
    custom = ["the custom objective"] if reads_sequences else []
    gpu = [] if has_kernel else [f"the GPU or dtype: scaled_exp needs {KERNEL}"]
    table = {
        "recompute": [*_sequence_readers(facts), *custom, *_loss_scales(facts)],
        "forward": [*_entropy_readers(facts), *_not_of_scaled_exp(facts), *gpu],
        "scaled_exp": ["its speed; forward for micro-batches with sampling masks"],
    }
    return next((mode, f"{AUTO}: {mode} because of {reasons[0]}") for mode, reasons in table.items() if reasons)


def head_text(facts: Facts) -> str:
    """The value of --pg-fused-head in the banner; of `auto`, what the arguments alone tell."""
    if facts.args.pg_fused_head != AUTO:
        return str(facts.args.pg_fused_head)
    mode, text = chosen_head(facts)
    text = f"{AUTO}: scaled_exp with {KERNEL}, else forward" if mode == "scaled_exp" else text
    is_open = facts.custom_objective is not None and mode != "recompute"
    return f"{text}; recompute if the custom objective reads whole sequences" if is_open else text


def _not_of_scaled_exp(facts: Facts) -> Iterator[str]:
    """The flags that scaled_exp does not support, or under which tokens or weights may be out of its range."""
    # a token that was not sampled may have a log-probability below -103, where scaled_exp gives NaN
    yield from (term.flag for term in facts.given_terms if term.kind == "ce" and term.weight)
    args, width = facts.args, facts.megatron("hidden_size")
    flags = {
        "--fp32-lm-head-backward split": args.fp32_lm_head_backward == "split",
        "--pg-kernel torch": args.pg_kernel == "torch",
        "--use-megatron-fsdp": facts.megatron("use_megatron_fsdp"),
        f"--hidden-size {width}": width and width % 8,
    }
    yield from (flag for flag, is_given in flags.items() if is_given)


def head_violations(facts: Facts) -> Violations:
    """Rules E24 of the softcap, E50 to E52, E55 and E56."""
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
            f"E51 --fp32-lm-head-backward {backward} has no effect without --fp32-lm-head or --pg-fused-head. Add one, "
            "or remove it."
        )
    if args.pg_fused_head in AT_ONCE:
        for reader in _sequence_readers(facts):
            yield from recompute_violation(reader, args.pg_fused_head)
        for flag in _loss_scales(facts):
            yield (
                f"E55 {flag} uses a loss scale that is not known when --pg-fused-head {args.pg_fused_head} computes "
                "the gradient. Use --pg-fused-head recompute."
            )
    if args.pg_fused_head == "scaled_exp":
        for reader in _entropy_readers(facts):
            yield (
                f"E56 --pg-fused-head scaled_exp computes only log-probabilities, and {reader} needs more. Use "
                "--pg-fused-head forward."
            )
        if backward == "split":
            yield (
                "E56 --pg-fused-head scaled_exp has no float32 gradient for --fp32-lm-head-backward split. Use "
                "--pg-fused-head forward."
            )


def _vocabulary_rules(args: argparse.Namespace, padded: int | None) -> Violations:
    size = args.pg_vocab_size
    if size is None:
        return
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        yield f"E52 --pg-vocab-size is {size!r}. It must be a whole number >= 1."
    elif padded is not None and size > padded:
        yield (
            f"E52 --pg-vocab-size {size} is more than the {padded} columns of the logits. Give the vocabulary size of "
            "the rollout engine."
        )


def recompute_violation(reader: str, mode: str) -> Violations:
    """Rule E55 for a flag with a sequence-level loss. A custom objective is tried at startup to find that out."""
    yield (
        f"E55 --pg-fused-head {mode} computes the gradient of a chunk before the next chunk is read, and {reader} "
        "reads whole sequences. Use --pg-fused-head recompute."
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
        "are float32."
        for flag, is_given in given.items()
        if is_given
    ]


def is_float32(params_dtype: object) -> bool:
    """Whether Megatron's `params_dtype` is float32; None, where it is not known, is not."""
    return str(params_dtype) == "torch.float32"
