"""The flags of the LM head and their rules. Needs no torch."""

import argparse
from collections.abc import Iterator

from megatron_pg.declarations.choices import AT_ONCE, HEAD_BACKWARDS, HEAD_MODES, IMPLEMENTATIONS, SOFTCAPS
from megatron_pg.flags.errors import Violations
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.values import choice, number


def add_head_arguments(group: argparse._ArgumentGroup) -> None:
    """Add the flags of the LM head."""
    fp32_lm_head = (
        "Compute logits in float32 from bfloat16 hidden states and weights, so that log-probabilities are as exact as "
        "those of a float32 sampler. All logits are stored."
    )
    group.add_argument("--fp32-lm-head", action="store_true", help=fp32_lm_head)
    head_mode = (
        "Compute the loss from the last hidden states in chunks of tokens, with float32 logits that are never stored. "
        "forward (default if no value is given): the gradient is computed together with the loss. recompute: the "
        "logits are computed again in the backward, for loss scaling and for sequence-level losses. scaled_exp: as "
        "forward, faster and with less memory, with 1.4 times the rounding error of the weight gradient, for losses "
        "without entropies on compute capability 9.0."
    )
    group.add_argument("--pg-fused-head", nargs="?", const="forward", choices=HEAD_MODES, help=head_mode)
    fp32_lm_head_backward = (
        "Precision of the logits' gradient in the backward GEMMs. bf16 (default): rounded, as in Megatron. split: two "
        "bfloat16 parts, which give a weight gradient exact to 1e-5 at twice the cost of the GEMMs."
    )
    group.add_argument("--fp32-lm-head-backward", choices=HEAD_BACKWARDS, help=fp32_lm_head_backward)
    vocab_size = (
        "Vocabulary size of the rollout engine. Columns of the logits from V on are padding and get no probability. "
        "Default: all columns of Megatron's padded vocabulary."
    )
    group.add_argument("--pg-vocab-size", type=int, metavar="V", help=vocab_size)
    softcap = (
        "Softcap C of the logits x, which are C·tanh(x / C) before the temperature, for a model that does not cap them "
        "itself. Megatron-Bridge's output layers of Gemma 2 and 4 do, which is detected. Default: none."
    )
    group.add_argument("--pg-logit-softcap", type=float, metavar="C", help=softcap)
    kernel = (
        "Implementation of log-probabilities and loss. Default: triton on CUDA, torch elsewhere. There is no fallback."
    )
    group.add_argument("--pg-kernel", choices=IMPLEMENTATIONS, help=kernel)


def head_violations(facts: Facts) -> Violations:
    """Rules E24 of the softcap, E50 to E52, E55 for sequence-level losses, and E56."""
    args = facts.args
    if args.pg_logit_softcap is not None:
        low, high = SOFTCAPS
        yield from number("--pg-logit-softcap", args.pg_logit_softcap, low, high, f"between {low:g} and {high:g}")
    yield from _choice_rules(args)
    yield from _vocabulary_rules(args, facts.megatron("padded_vocab_size"))
    backward = args.fp32_lm_head_backward
    if backward is not None and not (args.fp32_lm_head or args.pg_fused_head):
        yield (
            f"E51 --fp32-lm-head-backward {backward} has no effect without --fp32-lm-head or --pg-fused-head; add one "
            "or remove it"
        )
    if args.pg_fused_head in AT_ONCE:
        for reader in _sequence_readers(facts):
            yield from recompute_violation(reader, args.pg_fused_head)
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


def _choice_rules(args: argparse.Namespace) -> Violations:
    if not isinstance(args.fp32_lm_head, bool):
        yield f"E50 --fp32-lm-head must be true or false, got {args.fp32_lm_head!r}"
    for flag, value, choices in (
        ("--pg-fused-head", args.pg_fused_head, HEAD_MODES),
        ("--fp32-lm-head-backward", args.fp32_lm_head_backward, HEAD_BACKWARDS),
    ):
        if value is not None:
            yield from choice(flag, value, choices, "E50", elsewhere={"odds": "scaled_exp"})


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
