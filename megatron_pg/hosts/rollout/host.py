"""The hooks of slime and miles, which have the same names, and a launcher that adds our flags to theirs.

`init` sets the paths of the other hooks in the arguments of the trainer; a user's hook is called before ours. No module
of a host is imported before `init` or `main`.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_pg.args import ArgumentError
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.spelling import meant_flags
from megatron_pg.hosts.rollout import flags as rollout_flags
from megatron_pg.hosts.startup import (
    CheckedArguments,
    add_host_arguments,
    attribute,
    check,
    check_signature,
    defaults,
    start,
)

_INIT = "custom_megatron_init_path"
_BEFORE_STEP = "custom_megatron_before_train_step_hook_path"
_BEFORE_LOG_PROB = "custom_megatron_before_log_prob_hook_path"
_HOOKS = {_INIT: "init", _BEFORE_STEP: "before_train_step", _BEFORE_LOG_PROB: "before_log_prob"}
_PASSES = "get_log_probs_and_entropy"  # of the host's actor, which calls it in the passes before training
PASSED = ("logits", "args", "unconcat_tokens", "total_lengths", "response_lengths", "with_entropy")
_USERS = "users_hooks_of_megatron_pg"  # the argument that stores the user's paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """What differs between the hosts."""

    name: str  # of its package, and of our module
    version: str  # that the adapter was run with
    signatures: Mapping[str, Sequence[str]]  # parameters of the functions that the adapter uses, by `module:name`
    log: str  # of the logger, as in `check_signature`
    rollouts_per_step: str  # key of its data
    carried: Collection[str] = ("old_logprobs", "ref_logprobs", "teacher_logprobs")  # fields its batches can contain
    names_terms: bool = False  # whether samples name their loss term
    hooks: Mapping[str, str] = field(default_factory=dict)  # further hooks: functions of our module
    refused: Callable[[argparse.Namespace], Iterable[str]] = lambda args: ()  # messages about flags of this host alone
    returned: Callable[[dict[str, Any]], Any] = lambda found: found  # what its function for log-probabilities returns


class RolloutHost:
    """The loss in one host; one instance in a process."""

    def __init__(self, declaration: Declaration):
        self.declaration = declaration
        self._hooks = {
            name: f"megatron_pg.{declaration.name}.{function}"
            for name, function in (_HOOKS | dict(declaration.hooks)).items()
        }
        self.trainer: Any = None  # a RolloutTrainer, from `init` on
        self.terms: Any = None  # `Terms` of the samples, from `init` on
        self._log = ""  # `module:function` of the host's logger, from `init` on

    def checked(self, args: argparse.Namespace) -> CheckedArguments:
        """Our arguments, with what they inherit from the host's.

        Raises:
            ArgumentError: with every violation at once.
        """
        return check(
            self.declaration.name,
            rollout_flags.given(args),
            megatron=vars(args),
            inherited=rollout_flags.inherited(args),
            refused=[*rollout_flags.refused(args), *self.declaration.refused(args)],
            carried=self.declaration.carried,
            names_terms=self.declaration.names_terms or rollout_flags.trains_sft(args),
        )

    def init(self, args: argparse.Namespace) -> None:
        """The host's `--custom-megatron-init-path`: on every rank of the trainer, before the model is built.

        A second call with the same arguments has no effect.

        Raises:
            ArgumentError: flags contradict each other, or the adapter does not support the host's release.
        """
        declared, loss = self.declaration, f"megatron_pg.{self.declaration.name}.loss"
        if self.trainer is not None and vars(args).get("custom_loss_function_path") == loss:
            return
        arguments = self.checked(args)
        passes = f"{declared.name}.backends.megatron_utils.actor"
        for path, parameters in {**declared.signatures, f"{passes}:{_PASSES}": PASSED}.items():
            check_signature(declared.version, path, parameters)
        self._log = check_signature(declared.version, declared.log, ("args", "metrics", "step_key"))
        from megatron_pg.hosts.log import HostLog
        from megatron_pg.hosts.rollout.samples import Terms
        from megatron_pg.hosts.rollout.trainer import SCALING, RolloutTrainer, is_writer

        settings, rows = start(declared.name, arguments, scaling=SCALING, says=is_writer())
        log = HostLog(settings, rows, arguments.args.pg_metrics_file, self._to_host(args)) if is_writer() else None
        if settings.head_mode:
            setattr(import_module(passes), _PASSES, self.log_probs)
        is_sft, named = rollout_flags.trains_sft(args), Facts(arguments.args).terms_of_samples
        self.terms = Terms(usual=rollout_flags.SFT) if is_sft else Terms(named=named)
        self.trainer = RolloutTrainer(settings, log, per_token=args.calculate_per_token_loss)
        users = {name: vars(args).get(name) for name in self._hooks} | vars(args).get(_USERS, {})
        setattr(args, _USERS, {name: path for name, path in users.items() if path not in (None, self._hooks[name])})
        for name, path in self._hooks.items():
            setattr(args, name, path)
        args.loss_type, args.custom_loss_function_path = "custom_loss", loss
        self.users_hook(args, _INIT, args)

    def loss(
        self, args: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The host's `--custom-loss-function-path`. It returns no metrics, because each would cost a host sync."""
        return self.trainer.loss(batch["unconcat_tokens"], logits), {}

    def log_probs(
        self,
        logits: Tensor,
        *,
        args: argparse.Namespace,
        unconcat_tokens: Sequence[Tensor],
        total_lengths: Sequence[int],
        response_lengths: Sequence[int],
        with_entropy: bool = False,
        max_seq_lens: Sequence[int] | None = None,
        top_p_token_ids: Sequence | None = None,
        top_p_token_offsets: Sequence = (),
        **rest: object,
    ) -> Any:
        """The host's `get_log_probs_and_entropy` under the fused head, for old, reference and teacher."""
        from megatron_pg.hosts.rollout.logprobs import Responses

        width = max_seq_lens[0] if max_seq_lens is not None and args.qkv_format == "bshd" else None
        responses = Responses(
            tokens=unconcat_tokens,
            lengths=response_lengths,
            row_width=width,
            kept_ids=top_p_token_ids,
            kept_offsets=top_p_token_offsets,
        )
        return self.declaration.returned(self.trainer.logprobs(responses, logits, with_entropy=with_entropy))

    def rollout(self, args: argparse.Namespace, data: Mapping[str, Any]) -> Any:
        """A `Rollout` from the host's data."""
        from megatron_pg.hosts.rollout.samples import Rollout

        return Rollout(
            data=data,
            rollouts_per_step=self.declaration.rollouts_per_step,
            old_logprobs="rollout_log_probs" if args.use_rollout_logprobs else "log_probs",
            samples_per_prompt=args.n_samples_per_prompt,
            terms=self.terms,
            row_width=data["max_seq_lens"][0] if vars(args).get("qkv_format") == "bshd" else None,
        )

    def before_train_step(self, args: argparse.Namespace, *step: Any) -> None:
        """The host's `--custom-megatron-before-train-step-hook-path`."""
        rollout_id, step_id, model, optimizer, _ = step
        self.users_hook(args, _BEFORE_STEP, args, *step)
        self.trainer.begin_step(rollout_id, step_id, model, optimizer)

    def before_log_prob(self, args: argparse.Namespace, model: Sequence[Any], store_prefix: str) -> None:
        """The host's `--custom-megatron-before-log-prob-hook-path`: log-probabilities get the precision of the loss."""
        self.users_hook(args, _BEFORE_LOG_PROB, args, model, store_prefix)
        self.trainer.head.install(model)

    def users_hook(self, args: argparse.Namespace, name: str, *values: object) -> None:
        """Call the function that the user has set for a hook, if any."""
        if path := vars(args)[_USERS].get(name):
            attribute(":".join(path.rsplit(".", 1)))(*values)

    def main(self, words: Sequence[str]) -> None:
        """Run the host's script `words[0]` with our flags among its own."""
        name = self.declaration.name
        if not words:
            sys.exit(f"usage: python3 -m megatron_pg.{name} train.py [flags of {name} and of megatron_pg]")
        check_signature(self.declaration.version, f"{name}.utils.arguments:parse_args", ["add_custom_arguments"])
        arguments: Any = import_module(f"{name}.utils.arguments")
        parse_args_of_host = arguments.parse_args

        def parse_args(add_custom_arguments: Callable | None = None) -> argparse.Namespace:
            parsers: list[argparse.ArgumentParser] = []
            args = parse_args_of_host(
                add_custom_arguments=lambda parser: _with_ours(parser, add_custom_arguments, parsers)
            )
            _refuse_misspelt(words[1:], parsers)
            self.checked(args)
            setattr(args, _USERS, {_INIT: vars(args).get(_INIT)})
            setattr(args, _INIT, self._hooks[_INIT])
            return args

        arguments.parse_args = parse_args
        sys.argv, sys.path[0] = [*words], str(Path(words[0]).resolve().parent)
        runpy.run_path(words[0], run_name="__main__")

    def _to_host(self, args: argparse.Namespace) -> Callable[[Mapping[str, float], int | None], None]:
        def log(metrics: Mapping[str, float], number: int | None) -> None:
            named = {f"train/pg/{name}": value for name, value in metrics.items()}
            attribute(self._log)(args, named | {"train/step": number}, step_key="train/step")

        return log


def _with_ours(
    parser: argparse.ArgumentParser, users: Callable | None, parsers: list[argparse.ArgumentParser]
) -> argparse.ArgumentParser:
    """Add our flags to the host's parser; the path of the reducer is a flag of both, with one meaning."""
    for each in (parser, *parser._action_groups):
        each.conflict_handler = "resolve"
    parsers.append(parser)
    return add_host_arguments(parser if users is None else users(parser))


def _refuse_misspelt(words: Sequence[str], parsers: Sequence[argparse.ArgumentParser]) -> None:
    """Refuse flags that look like ours and are not: a host may silently ignore an unknown flag."""
    known = {flag for parser in parsers for flag in parser._option_string_actions}
    ours = [f"--{name.replace('_', '-')}" for name in defaults()]
    violations = []
    for word in words:
        flag = word.partition("=")[0]
        if flag.startswith("--") and flag not in known and (meant := meant_flags(flag, ours)) is not None:
            hint = f"; did you mean {' or '.join(meant)}?" if meant else ""
            violations.append(
                ("E70", f"{flag} is not a flag of the host or of megatron_pg and would be silently ignored{hint}")
            )
    if violations:
        raise ArgumentError(violations)
