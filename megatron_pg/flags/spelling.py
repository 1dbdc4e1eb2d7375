"""Which flag of ours a word was meant to be: misspelt, cut short, under another name, or of an earlier release.

Needs no torch.
"""

import argparse
import difflib
import re
from collections.abc import Collection
from typing import Any, NoReturn

from megatron_pg.declarations.aggregations import AGGREGATIONS, elsewhere
from megatron_pg.declarations.declaration import did_you_mean, flag_of

# What a flag is called elsewhere or by its meaning, after --pg-.
NAMES: dict[str, tuple[str, ...]] = {
    "--loss-aggregation": ("aggregation", "agg", "agg-mode", "loss-agg-mode", "reduction", "loss-reduction"),
    "--loss-aggregation-divisor": ("divisor", "loss-divisor", "aggregation-divisor", "loss-scale-factor"),
    "--custom-pg-loss-reducer-function-path": ("reducer", "loss-reducer", "custom-reducer", "reducer-path"),
    "--pg-objective": (
        *("loss", "loss-type", "loss-mode", "policy-loss", "algo", "algorithm", "surrogate"),
        *("eps-clip-c", "clip-ratio-c", "ratio-clip-c", "dual-clip-c", "loss-clip-c"),
    ),
    "--pg-custom-objective-path": ("custom-objective", "custom-loss", "custom-loss-path", "objective-path"),
    "--pg-clip-eps-low": ("clip", "clip-eps", "eps", "eps-clip", "epsilon", "clip-low", "clip-ratio", "epsilon-low"),
    "--pg-clip-eps-high": ("clip", "clip-eps", "eps-clip-high", "clip-high", "clip-ratio-high", "epsilon-high"),
    "--pg-temperature": ("temp", "tau", "rollout-temperature", "sampling-temperature"),
    "--pg-correction": (
        *("tis", "use-tis", "icepop", "mis", "opsm", "rollout-is", "importance-sampling", "clip-cov", "kl-cov"),
        *("m2po", "tis-clip", "tis-clip-low", "tis-cap", "tis-high"),
        *("icepop-low", "icepop-high", "mis-low", "mis-high"),
        *("rollout-is-threshold", "m2-threshold", "clip-cov-ratio", "kl-cov-ratio", "top-entropy-quantile"),
        *("ppo-kl-coef", "kl-cov-coef"),
    ),
    "--pg-kl-coef": ("kl", "beta", "kl-beta", "kl-weight", "kl-penalty", "kl-loss", "kl-loss-coef", "use-kl-loss"),
    "--pg-kl-estimator": ("kl-type", "kl-loss-type", "kl-penalty-type", "kl-method"),
    "--pg-entropy-coef": ("entropy", "entropy-bonus", "entropy-weight", "entropy-loss-coef", "entropy-beta"),
    "--pg-entropy-target": ("adaptive-entropy", "use-adaptive-entropy", "target-entropy", "entropy-coef-delta"),
    "--pg-aux-aggregation": ("kl-aggregation", "entropy-aggregation", "aux-weights"),
    "--pg-grad-divisor": ("gradient-divisor", "grad-scale", "grad-divide"),
    "--pg-kernel": ("impl", "implementation", "backend", "triton"),
    "--pg-metrics": ("metric", "metrics-level", "log-metrics", "logging"),
    "--pg-term": ("loss-term", "further-loss", "extra-loss"),
    "--fp32-lm-head": ("fp32-head", "fp32-logits", "float32-logits"),
    "--pg-fused-head": ("fused-lm-head", "fuse-head", "chunked-head", "fused-logprobs"),
    "--pg-logit-softcap": ("softcap", "logit-softcapping", "final-logit-softcapping", "logits-soft-cap"),
    "--pg-vocab-size": ("vocab", "true-vocab-size", "unpadded-vocab-size"),
    "--docs-per-step": ("docs", "documents-per-step"),
}
_OURS = re.compile(r"pg-|loss-aggregation|custom-pg-")
_FEWEST_LETTERS = 2  # of a beginning: a flag of one letter is somebody's short option
_MOST_SHOWN = 3  # of the flags that begin so


def meant_flags(word: str, flags: Collection[str]) -> list[str] | None:
    """The flags that an unknown `word` may stand for, the best match first.

    None if it is not a flag, or one of another parser: it neither begins like ours, nor is the beginning of one or
    close to one.
    """
    flag = word.partition("=")[0]
    name = flag.lstrip("-").lower().replace("_", "-")
    if not flag.startswith("-") or not name[:1].isalpha() or len(name) < _FEWEST_LETTERS:
        return None
    if f"--{name}" in flags:
        return [f"--{name}"]
    # --vocab-size is not a misspelt --pg-vocab-size
    close = difflib.get_close_matches(f"--{name}", {*flags} - {f"--pg-{name}"}, n=1, cutoff=0.9)
    begun = sorted(each for each in flags if each.startswith(f"--{name}"))
    if not (close or begun or _OURS.match(name)):
        return None
    named = [each for each, names in NAMES.items() if name.startswith("pg-") and name[3:] in names]
    if len(begun) > _MOST_SHOWN and not named:
        return []
    return named or begun or close or difflib.get_close_matches(f"--{name}", flags, n=1, cutoff=0.82)


def add_hints(parser: argparse.ArgumentParser, flags: Collection[str]) -> None:
    """End the parser's errors with the flag of ours, or the aggregation, that an unknown word may stand for."""
    report = parser.error

    def error(message: str) -> NoReturn:
        report(message + _hint(message, flags))

    parser.error = error  # type: ignore[method-assign]


def _hint(message: str, flags: Collection[str]) -> str:
    if wrong := re.match(r"argument --loss-aggregation: invalid choice: '([^']*)'", message):
        hint = did_you_mean(wrong[1], AGGREGATIONS, elsewhere())
        return f".{hint}" if hint else ""
    unknown = message.removeprefix("unrecognized arguments: ")
    words = unknown.split() if unknown != message else []
    meant = {word.partition("=")[0]: meant_flags(word, flags) for word in words}
    return "".join(f". For {word}, did you mean {' or '.join(names)}?" for word, names in meant.items() if names)


# --- flags of earlier releases ---

_REPLACEMENTS = {  # the flag of an earlier release: what to write, with its value
    "--pg-dual-clip": "--pg-objective dual_clip,cap={}",
    "--pg-delta": "--pg-objective dual_clip,cap={}",
    "--pg-cispo-cap": "--pg-objective cispo,cap={}",
    "--pg-sapo-tau-pos": "--pg-objective sapo,tau_pos={}",
    "--pg-sapo-tau-neg": "--pg-objective sapo,tau_neg={}",
    "--pg-dppo-delta-low": "--pg-objective NAME,delta_low={}",
    "--pg-dppo-delta-high": "--pg-objective NAME,delta_high={}",
    "--pg-dro-beta": "--pg-objective dro,beta={}",
    "--pg-ipo-delta-low": "--pg-objective ipo,delta_low={}",
    "--pg-ipo-delta-high": "--pg-objective ipo,delta_high={}",
    "--pg-ipo-tau": "--pg-objective ipo,tau={}",
    "--pg-vespo-k-pos": "--pg-objective vespo,k_pos={}",
    "--pg-vespo-lambda-pos": "--pg-objective vespo,lambda_pos={}",
    "--pg-vespo-k-neg": "--pg-objective vespo,k_neg={}",
    "--pg-vespo-lambda-neg": "--pg-objective vespo,lambda_neg={}",
    "--pg-gmpo-eps-low": "--pg-objective gmpo,eps_low={}",
    "--pg-gmpo-eps-high": "--pg-objective gmpo,eps_high={}",
    "--pg-correction-low": "--pg-correction NAME,low={}",
    "--pg-correction-high": "--pg-correction NAME,high={}",
    "--pg-correction-fraction": "--pg-correction NAME,fraction={}",
    "--pg-correction-coef": "--pg-correction kl_cov,coef={}",
    "--pg-teacher-tail-floor": "--pg-term NAME:topk_…,tail_floor={}",
    "--pg-teacher-head": "--pg-term NAME:full_…,head={}",
    "--pg-stream": "--pg-term {}",
    "--pg-support-missing": "--pg-sampling-mask-missing {}",
    "--pg-entropy-support": "--pg-sampling-mask-entropy {}",
}


def replacement(name: str, value: object = "…") -> str | None:
    """What to write instead of a flag, or an argument, of an earlier release; None for any other name."""
    flag = flag_of(name)
    return _REPLACEMENTS[flag].format(value) if flag in _REPLACEMENTS else None


def add_moved_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept the flags of earlier releases only to refuse them with the line to write; --help does not list them."""
    for flag in _REPLACEMENTS:
        parser.add_argument(flag, action=_Moved, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Moved(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, namespace: Any, values: Any, option_string: Any = None) -> None:
        value = "…" if values is None else values
        parser.error(f"{self.option_strings[0]} is not a flag since 0.3.0. Write {replacement(self.dest, value)}.")
