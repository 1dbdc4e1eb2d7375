"""The loss in slime and miles, whose functions have the same names, and a launcher that adds our flags to theirs.

`init` replaces functions of the trainer, which call the host's own; the hooks stay the user's. No module of a host is
imported before `init` or `main`.
"""

import argparse
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_pg.declarations.declaration import attribute_of, flag_of
from megatron_pg.flags.facts import Facts
from megatron_pg.flags.spelling import meant_flags
from megatron_pg.hosts import startup
from megatron_pg.hosts.log import HostLog
from megatron_pg.hosts.patching import attribute, check_signatures, launch, wrap
from megatron_pg.hosts.rollout import flags as rollout_flags
from megatron_pg.hosts.rollout.logprobs import response_logprobs
from megatron_pg.hosts.rollout.samples import OF_CRITICS, OF_POLICIES, Rollout
from megatron_pg.plan.settings import LossSettings

_INIT = "custom_megatron_init_path"
_USERS = "users_init_of_megatron_pg"  # the argument that stores the user's path


class RolloutHost:
    """The loss in one host; one instance in a process. A subclass declares what differs between the hosts."""

    name: str  # of its package, and of our module
    version: str  # that the adapter was run with
    signatures: Sequence[str]  # of the functions that the adapter uses, as in `check_signatures`
    losses: str  # its module with `value_loss_function`
    logger: str  # its function that logs metrics, as in `check_signatures` without parameters
    rollouts_per_step: str  # key of its data
    carried: Collection[str] = ("old_logprobs", "ref_logprobs", "teacher_logprobs")  # fields its batches can contain
    unsupported = rollout_flags.UNSUPPORTED
    names_terms = False  # whether samples name their loss term
    returns_pair = False  # whether its function for log-probabilities returns an empty tensor before them

    def __init__(self) -> None:
        self._loss = f"megatron_pg.{self.name}.loss"
        self._actor, self._model = (f"{self.name}.backends.megatron_utils.{module}" for module in ("actor", "model"))
        self.trainer: Any = None  # a RolloutTrainer, from `begin` on
        self._terms: dict[str, Any] = {}  # the loss terms of a `Rollout`
        self._log = ""  # path of the host's logger

    def all_signatures(self) -> list[str]:
        """Those of every function that the adapter uses; the last one is the logger's."""
        of_passes = "logits, args, unconcat_tokens, total_lengths, response_lengths, with_entropy"
        of_step = "args, rollout_id, step_id, data_iterator, model, optimizer, opt_param_scheduler, num_microbatches"
        return [
            *self.signatures,
            f"{self.losses}:value_loss_function(args, batch, logits, sum_of_sample_mean)",
            f"{self._actor}:initialize_model_and_optimizer(args, role)",
            f"{self._actor}:get_log_probs_and_entropy({of_passes})",
            f"{self._model}:train_one_step({of_step})",
            f"{self.logger}(args, metrics, step_key)",
        ]

    def checked(self, args: argparse.Namespace, role: str = "policy") -> startup.CheckedArguments:
        """Our arguments for the model of this role, with what they inherit from the host's."""
        return startup.check(
            self.name,
            rollout_flags.given(args, role),
            megatron=vars(args),
            answers=rollout_flags.answers(args, role, self.unsupported),
            carried=self.carried,
            names_terms=self.names_terms or rollout_flags.trains_sft(args),
            role=role,
        )

    def init(self, args: argparse.Namespace) -> None:
        """The host's `--custom-megatron-init-path`: on every rank of the trainer, before the model is built.

        A second call has no effect. Flags are checked where the model is built.

        Raises:
            ArgumentError: the adapter does not support the host's release.
        """
        self._log = check_signatures(self.version, self.all_signatures())
        actor, model = import_module(self._actor), import_module(self._model)
        wrap(actor, "initialize_model_and_optimizer", self._build)
        wrap(actor, "get_log_probs_and_entropy", self._log_probs)
        wrap(model, "train_one_step", self._train_one_step)
        if path := vars(args).get(_USERS):
            attribute(":".join(path.rsplit(".", 1)))(args)

    def _build(self, build: Callable, args: Any, role: str = "actor", *rest: Any, **named: Any) -> Any:
        """The host's function that builds the model, the first to receive its role; everything is checked before."""
        if self.trainer is None or vars(args).get("custom_loss_function_path") != self._loss:
            self.begin(args, "critic" if role == "critic" else "policy")
        built = build(args, role, *rest, **named)
        self.trainer.install(built[0])
        return built

    def begin(self, args: argparse.Namespace, role: str) -> None:
        """Check our arguments for the model of this process, and put the loss in the place of the host's."""
        checked = self.checked(args, role)
        from megatron_pg.hosts.rollout.trainer import SCALING, SCALING_OF_CRITICS, RolloutTrainer, is_writer

        file, scaling = checked.args.pg_metrics_file, SCALING
        if role == "critic":
            scaling = SCALING_OF_CRITICS
            vars(import_module(self.losses))["value_loss_function"] = self.loss
            if file is not None:  # the actor's, which is another process
                file = str(Path(file).with_stem(f"{Path(file).stem}_critic"))
                checked.rows["metrics file"] = file
        settings, log = LossSettings.from_args(checked.args), None
        if is_writer():
            startup.print_banner(rows := startup.rows_of(self.name, checked, scaling, settings))
            log = HostLog(settings, rows, file, partial(self._log_metrics, args))
        named = Facts(checked.args).terms_of_samples
        self._terms = {"term": rollout_flags.SFT} if rollout_flags.trains_sft(args) else {"named_terms": named}
        self.trainer = RolloutTrainer(settings, log, per_token=args.calculate_per_token_loss)
        vars(args).update(loss_type="custom_loss", custom_loss_function_path=self._loss)

    def loss(
        self, args: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The host's `--custom-loss-function-path`. It returns no metrics, because each would cost a host sync."""
        return self.trainer.loss(batch["unconcat_tokens"], logits), {}

    def _log_probs(self, compute: Callable, logits: Tensor, *, args: argparse.Namespace, **given: Any) -> Any:
        """The host's `get_log_probs_and_entropy`; under the fused head ours, for old, reference and teacher."""
        if self.trainer.settings.head_mode is None:
            return compute(logits, args=args, **given)
        widths, ids = given.get("max_seq_lens"), given.get("top_p_token_ids")
        found = response_logprobs(
            self.trainer.head_call(logits),
            self.trainer.settings,
            tokens=given["unconcat_tokens"],
            lengths=given["response_lengths"],
            row_width=widths[0] if widths is not None and args.qkv_format == "bshd" else None,
            kept=None if ids is None else (ids, given["top_p_token_offsets"]),
            with_entropy=given.get("with_entropy", False),
        )
        return (torch.empty(0, device=logits.device), found) if self.returns_pair else found

    def _train_one_step(self, train: Callable, *given: Any, **named: Any) -> Any:
        """The host's optimizer step, planned before and logged after it."""
        bound = inspect.signature(train).bind(*given, **named).args
        args, data = bound[0], getattr(bound[3][0], "rollout_data", {})  # of its iterators
        old = {"old_logprobs": "rollout_log_probs"} if args.use_rollout_logprobs else {}
        rollout = Rollout(
            data=data,
            rollouts_per_step=self.rollouts_per_step,
            parts=OF_CRITICS if self.trainer.settings.is_critic else OF_POLICIES | old,
            samples_per_prompt=args.n_samples_per_prompt,
            row_width=data["max_seq_lens"][0] if vars(args).get("qkv_format") == "bshd" else None,
            **self._terms,
        )
        return self.trainer.run(rollout, partial(train, *given, **named), *bound)

    def main(self, words: Sequence[str]) -> None:
        """Run the host's script `words[0]` with our flags among its own."""
        usage = f"python3 -m megatron_pg.{self.name} train.py [flags of {self.name} and of megatron_pg]"
        launch(words, usage, lambda: self._add_flags(words[1:]))

    def _add_flags(self, words: Sequence[str]) -> None:
        check_signatures(self.version, [f"{self.name}.utils.arguments:parse_args(add_custom_arguments)"])
        wrap(import_module(f"{self.name}.utils.arguments"), "parse_args", partial(self._parse_args, words))

    def _parse_args(
        self, words: Sequence[str], parse_args: Callable, add_custom_arguments: Callable | None = None
    ) -> argparse.Namespace:
        """The host's `parse_args`, which also reads and checks our flags."""

        def add_ours(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
            for each in (parser, *parser._action_groups):
                each.conflict_handler = "resolve"  # the reducer's path is a flag of both, with one meaning
            return startup.add_host_arguments(parser if add_custom_arguments is None else add_custom_arguments(parser))

        args = parse_args(add_custom_arguments=add_ours)
        startup.refuse(*_misspelt(words, vars(args)))
        for role in ("policy", "critic") if vars(args).get("use_critic") else ("policy",):
            self.checked(args, role)
        vars(args).update({_USERS: vars(args).get(_INIT), _INIT: f"megatron_pg.{self.name}.init"})
        return args

    def _log_metrics(self, args: argparse.Namespace, metrics: Mapping[str, float], number: int | None) -> None:
        prefix = "train/critic-pg" if self.trainer.settings.is_critic else "train/pg"  # as the host's own
        named = {f"{prefix}/{name}": value for name, value in metrics.items()}
        attribute(self._log)(args, named | {"train/step": number}, step_key="train/step")


def _misspelt(words: Sequence[str], known: Collection[str]) -> Iterable[str]:
    """Messages about flags that look like ours and are not: a host may silently ignore an unknown flag."""
    ours = [flag_of(name) for name in startup.defaults()]
    for flag in [word.partition("=")[0] for word in words if word.startswith("--")]:
        if attribute_of(flag) not in known and (meant := meant_flags(flag, ours)) is not None:
            hint = f"Did you mean {' or '.join(meant)}?" if meant else "Remove it."
            yield f"{flag} is not a flag of the host or of megatron_pg, and the host may silently ignore it. {hint}"
