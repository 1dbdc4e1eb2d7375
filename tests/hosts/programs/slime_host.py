"""Our adapter in slime's own loop, from samples to gradients (`recipe_ranks`), where SLIME names a checkout.

Theirs: samples to training data, the schedule that cuts them, each rank's data, the advantages, `train_actor` with its
steps, batches, loss function and schedule. Not theirs: the model, an optimizer that keeps the gradients, and the passes
for old and reference log-probabilities, which give those of the samples.
"""

import importlib
import importlib.util
import itertools
import os
from argparse import Namespace
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import host_cases as hosts
import rollout_hosts
import their_trainers
import torch
from host_cases import Case
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

THEIRS: dict = {}  # functions that a run with ours replaces
BUILT: list = []  # what slime's function that builds the model returns: the model is there


def train(case: Case, found: Sequence[Sample], args: Namespace) -> tuple[list[list[Tensor]], list[dict]]:
    """Gradients of every optimizer step of a rollout, and what slime's logger was given."""
    model = hosts.model(per_token=case.per_token, critic=case.objective == "value")
    optimizer = hosts.Optimizer(model)
    logged = run(found, args, model, optimizer, torch.device("cpu"))
    return optimizer.found, logged


def run(found: Sequence[Sample], args: Namespace, model: Any, optimizer: Any, device: torch.device) -> list[dict]:
    """A rollout through slime, and what its logger was given."""
    logged = begin(args, device)
    roll(found, args, model, optimizer)
    return logged


def begin(args: Namespace, device: torch.device) -> list[dict]:
    """What slime does before it builds the model; and the list of what its logger will be given."""
    from slime.backends.megatron_utils import actor, loss
    from slime.backends.megatron_utils import model as steps
    from slime.utils.misc import load_function

    logged: list[dict] = []
    for owner, name in ((loss, "policy_loss_function"), (loss, "value_loss_function"), (steps, "train_one_step")):
        setattr(owner, name, THEIRS.setdefault(name, getattr(owner, name)))
    actor.compute_advantages_and_returns = loss.compute_advantages_and_returns
    actor.initialize_model_and_optimizer = lambda args, role: BUILT
    _moved("logging_utils").log = lambda args, metrics, step_key: logged.append(dict(metrics))
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)  # the last lines of its initialize.init
    importlib.import_module("megatron.training.global_vars").set_args(args)
    if importlib.util.find_spec("slime.utils.accelerator"):  # in v0.3.1 it is torch.cuda
        accelerator: Any = importlib.import_module("slime.utils.accelerator")
        accelerator.device = accelerator.current_device = lambda index=None: device
    return logged


def roll(found: Sequence[Sample], args: Namespace, model: Any, optimizer: Any) -> None:
    """A rollout through slime, begun."""
    from slime.backends.megatron_utils import actor
    from slime.ray.rollout import RolloutManager
    from slime.utils.misc import load_function
    from slime.utils.types import Sample as Theirs

    manager = RolloutManager.__new__(RolloutManager)
    manager.args, manager.train_parallel_config = args, their_trainers.parallel_config()
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    theirs = their_trainers.as_theirs(Theirs, found)
    for mine, sample in zip(theirs, found, strict=True):
        mine.rollout_log_probs = sample.rollout_logprobs.tolist()
        mine.index = sample.rollout_id  # what a rollout's samples share
        if args.rollout_top_p != 1.0:
            kept = hosts.kept_of(sample)
            mine.rollout_top_p_token_ids = [i for row in kept for i in row]
            mine.rollout_top_p_token_offsets = [0, *itertools.accumulate(map(len, kept))]
        if "pg_term" in vars(args):
            mine.teacher_log_probs = sample.teacher_logprobs.float()
            mine.metadata = {"source_name": hosts.source_of(sample)}
    boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(theirs))
    tags = {"ref"} if args.use_kl_loss else set()
    model.role = "critic" if model.module.is_critic else "actor"
    BUILT[:] = [[model]]
    actor.initialize_model_and_optimizer(args, model.role)
    me = SimpleNamespace(
        args=args,
        role=model.role,
        model=[model],
        optimizer=optimizer,
        opt_param_scheduler=hosts.Scheduler(),
        weights_backuper=SimpleNamespace(backup_tags=tags, backup=lambda tag: None),
        _active_model_tag="actor",
        _switch_model=lambda tag: None,
        prof=MagicMock(),
        weight_updater=MagicMock(),
        rollout_data_postprocess=_path(load_function, args.rollout_data_postprocess_path),
    )
    mine = actor.MegatronTrainRayActor._get_rollout_data(SimpleNamespace(args=args), boxes)
    me.compute_log_prob = lambda iterators, counts, store_prefix: _of_samples(mine, found, f"{store_prefix}log_probs")
    if args.use_critic and parallel_state.get_context_parallel_world_size() > 1:
        # theirs fails where rank 0 has no part of a response, and puts the reward of others at its last token there
        own = [_of_samples(mine, found, key) for key in ("advantages", "returns")]
        actor.compute_advantages_and_returns = lambda args, data: [data.update(each) for each in own]
    actor.forward_only = lambda *given: _of_samples(mine, found, "values")
    timer = _moved("timer").Timer()
    timer.start_time.pop("train_wait", None)
    timer.start("train_wait")
    for owner in (actor, vars(actor).get("train_metric_utils"), vars(actor).get("train_dump_utils")):
        for name in {"log_perf_data", "log_rollout_data"} & vars(owner or SimpleNamespace()).keys():
            setattr(owner, name, lambda *given, **named: None)
    if model.role == "critic":
        actor.MegatronTrainRayActor.train_critic(me, 0, mine)
    else:
        values = _of_samples(mine, found, "values") if args.use_critic else None
        actor.MegatronTrainRayActor.train_actor(me, 0, mine, external_data=values)


def _moved(name: str) -> Any:
    """A module that v0.3.1 has in `slime.utils` and later releases in `slime.observability`."""
    try:
        return importlib.import_module(f"slime.observability.{name}")
    except ModuleNotFoundError:
        return importlib.import_module(f"slime.utils.{name}")


def _path(load_function, path: str | None):
    return None if path is None else load_function(path)


def _of_samples(data: dict, found: Sequence[Sample], key: str) -> dict[str, list[Tensor]]:
    """In place of a forward: the samples' own, each this context-parallel rank's part."""
    from slime.backends.megatron_utils.cp_utils import slice_log_prob_with_cp

    name = {"log_probs": "old_logprobs", "ref_log_probs": "ref_logprobs"}.get(key, key)
    values = []
    for tokens, total, response in zip(data["tokens"], data["total_lengths"], data["response_lengths"], strict=True):
        (sample,) = [each for each in found if each.tokens.tolist() == tokens.tolist()]
        whole = getattr(sample, name).float()
        values.append(slice_log_prob_with_cp(whole, int(total), int(response)))
    return {key: values}


def figures() -> dict[str, object]:
    their_trainers.load({"SLIME": os.environ["SLIME"]})
    return rollout_hosts.figures(train, "slime")
