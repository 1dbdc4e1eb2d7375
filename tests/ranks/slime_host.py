"""Our adapter in slime's own loop, from samples to gradients (`recipe_ranks`), where SLIME names a checkout.

Theirs: samples to training data, the schedule that cuts them, each rank's data, the advantages, `train_actor` with its steps,
batches, loss function and schedule. Not theirs: the model, an optimizer that keeps the gradients, and the passes for old and
reference log-probabilities, which give those of the samples.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from unittest.mock import MagicMock

import host_cases as hosts
import their_trainers
import torch
from host_cases import Case
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

OFF = (
    *(
        "use_rollout_routing_replay",
        "keep_old_actor",
        "use_critic",
        "use_routing_replay",
        "log_multi_turn",
        "log_passrate",
    ),
    *("log_correct_samples", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather", "align_grad_reduce"),
    *(
        "reset_optimizer_states",
        "manual_gc",
        "use_distributed_optimizer",
        "use_wandb",
        "use_tensorboard",
        "offload_train",
    ),
    *("wandb_always_use_train_step", "use_rollout_entropy", "use_unbiased_kl", "use_rollout_logprobs", "use_kl_loss"),
)
ABSENT = (
    *(
        "save_debug_train_data",
        "custom_megatron_init_path",
        "rollout_data_postprocess_path",
        "custom_loss_function_path",
    ),
    *("custom_megatron_before_train_step_hook_path", "custom_megatron_before_log_prob_hook_path"),
    *("custom_tis_function_path", "save_debug_rollout_data", "ref_update_interval", "ci_save_grad_norm"),
    *("ci_load_grad_norm", "dump_details", "num_experts", "pg_metrics_file"),
)


def arguments(case: Case, **more: object) -> Namespace:
    """slime's, with ours among them as its parser would have put them there."""
    args = their_trainers.arguments(None, case.per_token, case.rollouts_per_step)
    known = dict.fromkeys(OFF, False) | dict.fromkeys(ABSENT) | case.flags
    known |= {
        "compute_advantages_and_returns": True,
        "ci_disable_kl_checker": True,
        "train_memory_margin_bytes": 0,
        "n_samples_per_prompt": hosts.PROMPT // (2 if case.fan_out else 1),
        "rollout_batch_size": len(hosts.LENGTHS) // hosts.PROMPT,
        "eps_clip_high": case.flags.get("pg_clip_eps_high", 0.2),
        "use_kl_loss": "pg_kl_coef" in case.flags,
        "kl_loss_coef": case.flags.get("pg_kl_coef", 0.0),
        "kl_loss_type": "k3",
        "custom_megatron_init_path": "megatron_pg.slime.init",
    }
    for name, value in (known | more).items():
        setattr(args, name, value)
    return args


def train(case: Case, found: Sequence[Sample], args: Namespace) -> tuple[list[list[Tensor]], list[dict]]:
    """Gradients of every optimizer step of a rollout, and what slime's logger was given."""
    from slime.backends.megatron_utils import actor
    from slime.observability import logging_utils
    from slime.observability.timer import Timer
    from slime.ray.rollout import RolloutManager
    from slime.utils import accelerator
    from slime.utils.misc import load_function
    from slime.utils.types import Sample as Theirs

    logged: list[dict] = []
    logging_utils.log = lambda args, metrics, step_key: logged.append(dict(metrics))
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)  # the last lines of its initialize.init
    importlib.import_module("megatron.training.global_vars").set_args(args)
    accelerator.device = accelerator.current_device = lambda index=None: torch.device("cpu")
    manager = RolloutManager.__new__(RolloutManager)
    manager.args, manager.train_parallel_config = args, their_trainers.parallel_config()
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    theirs = their_trainers.as_theirs(Theirs, found)
    for mine, sample in zip(theirs, found, strict=True):
        mine.rollout_log_probs = sample.rollout_logprobs.tolist()
        mine.index = sample.rollout_id  # what a rollout's samples share
    boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(theirs))
    model = hosts.model(per_token=case.per_token)
    optimizer = hosts.Optimizer(model)
    tags = {"ref"} if args.use_kl_loss else set()
    me = SimpleNamespace(
        args=args,
        role="actor",
        model=[model],
        optimizer=optimizer,
        opt_param_scheduler=hosts.scheduler(),
        weights_backuper=SimpleNamespace(backup_tags=tags, backup=lambda tag: None),
        _active_model_tag="actor",
        _switch_model=lambda tag: None,
        prof=MagicMock(),
        weight_updater=MagicMock(),
        rollout_data_postprocess=_path(load_function, args.rollout_data_postprocess_path),
    )
    mine = actor.MegatronTrainRayActor._get_rollout_data(SimpleNamespace(args=args), boxes)
    me.compute_log_prob = lambda iterators, counts, store_prefix: _log_probs(mine, found, store_prefix)
    Timer().start_time.pop("train_wait", None)
    Timer().start("train_wait")
    actor.train_metric_utils.log_perf_data = lambda *given, **named: None
    actor.train_metric_utils.log_rollout_data = lambda *given, **named: None
    actor.MegatronTrainRayActor.train_actor(me, 0, mine)
    return optimizer.found, logged


def _path(load_function, path: str | None):
    return None if path is None else load_function(path)


def _log_probs(data: dict, found: Sequence[Sample], prefix: str) -> dict[str, list[Tensor]]:
    """In place of a forward: the samples' own, each this context-parallel rank's part."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    name = "ref_logprobs" if prefix == "ref_" else "old_logprobs"
    values = []
    for index, total, response in zip(data["partition"], data["total_lengths"], data["response_lengths"], strict=True):
        whole = getattr(found[int(index)], name).float()
        values.append(slice_log_prob_with_cp(whole, int(total), int(response)))
    return {f"{prefix}log_probs": values}


def error_of(case: Case) -> float:
    """Largest over the rollout's steps, of every gradient."""
    found = hosts.samples(fan_out=case.fan_out)
    gradients, logged = train(case, found, arguments(case))
    steps = hosts.steps_of(found, case)
    assert len(gradients) == len(steps)
    assert logged or parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0 or _tp_rank()
    return max(hosts.error(mine, hosts.expected(step, case)[0]) for mine, step in zip(gradients, steps, strict=True))


def _tp_rank() -> int:
    return parallel_state.get_tensor_model_parallel_rank()


def figures() -> dict[str, object]:
    """Errors by layout and case."""
    if "SLIME" in os.environ:
        their_trainers.load({"SLIME": os.environ["SLIME"]})
    result: dict[str, object] = {}
    for layout, (context, tensor) in hosts.LAYOUTS.items():
        parallel_state.initialize_model_parallel(context_parallel_size=context, tensor_model_parallel_size=tensor)
        full = "FULL" in os.environ
        result[layout] = {case.name: error_of(case) for case in hosts.cases(full)}
        parallel_state.destroy_model_parallel()
    return result
