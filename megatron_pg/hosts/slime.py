"""slime, by its documented hooks; nothing of it is changed.

`init` sets the paths of the other hooks on the arguments that the trainer reads afterwards. `plan` gets a rollout's data before
they are trained, and `loss` takes the place of the policy loss.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_pg.declarations.declaration import load
from megatron_pg.hosts import rollout_flags
from megatron_pg.hosts.startup import Checked, add_host_arguments, check, check_signature, start

VERSION = "slime 624b824a"  # with which this was run
CONTRACT = "takes N·Σwℓ, with --calculate-per-token-loss T̃·Σwℓ; slime and Megatron bring it back to Σwℓ"
_INIT = "megatron_pg.slime.init"
_HOOKS = {  # slime's argument: our function, which calls the user's before it
    "rollout_data_postprocess_path": "megatron_pg.slime.plan",
    "custom_megatron_before_train_step_hook_path": "megatron_pg.slime.before_train_step",
    "custom_megatron_before_log_prob_hook_path": "megatron_pg.slime.before_log_prob",
}
_USERS = "megatron_pg_users_hooks"  # the argument that keeps the user's paths
_SIGNATURES = {
    "slime.backends.megatron_utils.loss:loss_function": (
        *("args", "batch", "num_microbatches", "step_global_batch_size", "logits"),
    ),
    "slime.backends.megatron_utils.data:get_batch": ("data_iterator", "keys", "pad_multiplier", "allgather_cp"),
    "slime.backends.megatron_utils.model:train_one_step": (
        *("args", "rollout_id", "step_id", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
        *("num_microbatches", "step_global_batch_size"),
    ),
    "slime.observability.logging_utils:log": ("args", "metrics", "step_key"),
}
_trainer: Any = None  # the process's RolloutTrainer, from `init` on


def checked(args: argparse.Namespace) -> Checked:
    """Our arguments, and slime's that are ours now.

    Raises:
        ArgumentError: with every violation at once.
    """
    return check(
        "slime",
        rollout_flags.given(args),
        megatron=vars(args),
        taken_over=rollout_flags.taken_over(args),
        refused=rollout_flags.refused(args),
    )


def init(args: argparse.Namespace) -> None:
    """slime's `--custom-megatron-init-path`: on every rank of the trainer, before the model is built.

    Raises:
        ArgumentError: flags contradict each other, or slime's hooks are others than the adapter was written for.
    """
    global _trainer
    found = checked(args)
    for path, parameters in _SIGNATURES.items():
        check_signature(VERSION, path, load(path), parameters)
    from megatron_pg.hosts.log import HostLog
    from megatron_pg.hosts.rollout_trainer import RolloutTrainer, is_writer

    settings, rows = start("slime", found, contract=CONTRACT, says=is_writer())
    log = HostLog(settings, rows, found.args.pg_metrics_file, _to_host(args)) if is_writer() else None
    _trainer = RolloutTrainer(settings, log, per_token=args.calculate_per_token_loss)
    users = {name: getattr(args, name, None) for name in (*_HOOKS, "custom_megatron_init_path")}
    users |= vars(args).get(_USERS, {})
    setattr(args, _USERS, {name: path for name, path in users.items() if path not in (None, _INIT, *_HOOKS.values())})
    for name, path in _HOOKS.items():
        setattr(args, name, path)
    args.loss_type, args.custom_loss_function_path = "custom_loss", "megatron_pg.slime.loss"
    _users_hook(args, "custom_megatron_init_path", args)


def plan(args: argparse.Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """slime's `--rollout-data-postprocess-path`: on every rank, after the advantages."""
    from megatron_pg.hosts.rollout_trainer import Rollout

    _users_hook(args, "rollout_data_postprocess_path", args, rollout_id, rollout_data)
    rollout = Rollout(
        data=rollout_data,
        rollouts_per_step=rollout_data["global_batch_sizes"],
        old_logprobs="rollout_log_probs" if args.use_rollout_logprobs else "log_probs",
        rewards=rollout_data.get("local_raw_reward"),
        samples_per_prompt=args.n_samples_per_prompt,
    )
    _trainer.plan(rollout)


def loss(
    args: argparse.Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's `--custom-loss-function-path`; metrics go another way, where each would cost a host sync."""
    return _trainer.loss(batch["unconcat_tokens"], logits), {}


def before_train_step(
    args: argparse.Namespace, rollout_id: int, step_id: int, model: Sequence[Any], optimizer: Any, scheduler: Any
) -> None:
    """slime's `--custom-megatron-before-train-step-hook-path`."""
    name = "custom_megatron_before_train_step_hook_path"
    _users_hook(args, name, args, rollout_id, step_id, model, optimizer, scheduler)
    _trainer.begin_step(step_id, rollout_id * _trainer.num_steps + step_id, model, optimizer)


def before_log_prob(args: argparse.Namespace, model: Sequence[Any], store_prefix: str) -> None:
    """slime's `--custom-megatron-before-log-prob-hook-path`: log-probabilities have the loss's precision."""
    _users_hook(args, "custom_megatron_before_log_prob_hook_path", args, model, store_prefix)
    _trainer.head.install(model)


def main(words: Sequence[str]) -> None:
    """Run slime's script `words[0]` with our flags among its own."""
    if not words:
        sys.exit("usage: python3 -m megatron_pg.slime train.py [slime's flags and megatron_pg's]")
    from slime.utils import arguments

    theirs = arguments.parse_args
    check_signature(VERSION, "slime.utils.arguments:parse_args", theirs, ("add_custom_arguments",))

    def parse_args(add_custom_arguments: Callable | None = None) -> argparse.Namespace:
        args = theirs(add_custom_arguments=lambda parser: _with_ours(parser, add_custom_arguments))
        checked(args)
        setattr(args, _USERS, {"custom_megatron_init_path": args.custom_megatron_init_path})
        args.custom_megatron_init_path = _INIT
        return args

    arguments.parse_args = parse_args
    sys.argv, sys.path[0] = [*words], str(Path(words[0]).resolve().parent)
    runpy.run_path(words[0], run_name="__main__")


def _with_ours(parser: argparse.ArgumentParser, users: Callable | None) -> argparse.ArgumentParser:
    """Their parser with our flags in it; the reducer's path is a flag of both, with one meaning."""
    for each in (parser, *parser._action_groups):
        each.conflict_handler = "resolve"
    return add_host_arguments(parser if users is None else users(parser))


def _users_hook(args: argparse.Namespace, name: str, *values: object) -> None:
    if path := vars(args)[_USERS].get(name):
        load(":".join(path.rsplit(".", 1)))(*values)


def _to_host(args: argparse.Namespace) -> Callable[[Mapping[str, float], int], None]:
    from slime.observability import logging_utils

    def log(metrics: Mapping[str, float], iteration: int) -> None:
        named = {f"train/pg/{name}": value for name, value in metrics.items()}
        logging_utils.log(args, named | {"train/step": iteration}, step_key="train/step")

    return log
