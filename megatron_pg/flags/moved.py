"""Flags of earlier releases: an error that names the line to write instead. Needs no torch."""

import argparse
from collections.abc import Sequence
from typing import Any

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
    flag = "--" + name.lstrip("-").replace("_", "-")
    return _REPLACEMENTS[flag].format(value) if flag in _REPLACEMENTS else None


def add_moved_arguments(parser: argparse.ArgumentParser) -> None:
    """Accept the flags of earlier releases only to refuse them with the line to write; --help does not list them."""
    for flag in _REPLACEMENTS:
        parser.add_argument(flag, action=_Moved, nargs="?", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


class _Moved(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        value = "…" if values is None else values
        parser.error(f"{self.option_strings[0]} is not a flag since 0.3.0. Write {replacement(self.dest, value)}")
