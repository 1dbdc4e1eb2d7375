"""Our adapter in miles' own loop, from samples to gradients (`recipe_ranks`), where MILES names a checkout.

Theirs: samples to training data, the schedule that cuts them, each rank's data, the iterators, the advantages, `train`
with its steps, batches, loss function and schedule. Not theirs: the model, an optimizer that keeps the gradients, and
the passes for old and reference log-probabilities, which give those of the samples.
"""

import importlib
import os
from argparse import Namespace
from collections.abc import Sequence

import host_cases as hosts
import rollout_hosts
import their_trainers
from host_cases import Case
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

THEIRS: dict = {}  # functions that a run with ours replaces


def train(case: Case, found: Sequence[Sample], args: Namespace) -> tuple[list[list[Tensor]], list[dict]]:
    """Gradients of every optimizer step of a rollout, and what miles' logger was given."""
    from miles.backends.megatron_utils import actor
    from miles.backends.megatron_utils import model as steps
    from miles.backends.training_utils import data, loss
    from miles.backends.training_utils.loss_hub import losses
    from miles.utils.misc import load_function
    from miles.utils.tracking_utils import tracking
    from miles.utils.types import Sample as Theirs

    logged: list[dict] = []
    tracking.log = lambda args, metrics, step_key: logged.append(dict(metrics))
    role = "critic" if case.objective == "value" else "actor"
    model = hosts.model(per_token=case.per_token, critic=role == "critic")
    actor.initialize_model_and_optimizer = lambda args, role: ([model], None, None, 0)
    for owner, name in ((losses, "value_loss_function"), (steps, "train_one_step")):
        setattr(owner, name, THEIRS.setdefault(name, getattr(owner, name)))
    if args.custom_megatron_init_path:
        load_function(args.custom_megatron_init_path)(args)  # the last lines of its initialize.init
    actor.initialize_model_and_optimizer(args, role)
    importlib.import_module("megatron.training.global_vars").set_args(args)
    theirs = their_trainers.as_theirs(Theirs, found)
    for mine, sample in zip(theirs, found, strict=True):
        mine.rollout_log_probs = sample.rollout_logprobs.tolist()
        mine.index = sample.rollout_id
        if "pg_term" in vars(args):
            mine.teacher_log_probs = sample.teacher_logprobs.float()
    # the prompt is the only field that travels with a sample unread: which one it is
    mine = their_trainers.data_of_miles(args, theirs, prompt=list(range(len(theirs))))
    optimizer = hosts.Optimizer(model)
    iterators, counts = actor.get_data_iterator(args, [model], mine)
    if args.compute_advantages_and_returns:
        keys = [] if role == "critic" else ["log_probs"]
        keys += (["values"] if args.use_critic else []) + (["ref_log_probs"] if args.use_kl_loss else [])
        for key in keys:
            mine |= _of_samples(mine, found, key, args.qkv_format)
        loss.compute_advantages_and_returns(args, mine)
    if role == "critic":
        args.loss_type = "value_loss"  # as its `train_critic`
    rollouts = data.get_num_rollouts(args, mine, len(counts))
    for number, (count, many) in enumerate(zip(counts, rollouts, strict=True)):
        steps.train_one_step(args, 0, number, iterators, [model], optimizer, hosts.Scheduler(), count, many, None, 0)
    return optimizer.found, logged


def _of_samples(data: dict, found: Sequence[Sample], key: str, layout: str) -> dict[str, list[Tensor]]:
    from miles.backends.training_utils.cp_utils import slice_log_prob_with_cp

    name = {"log_probs": "old_logprobs", "ref_log_probs": "ref_logprobs"}.get(key, key)
    width = data["max_seq_lens"][0] if layout == "bshd" else None
    rows = zip(data["prompt"], data["total_lengths"], data["response_lengths"], strict=True)
    whole = [(getattr(found[int(i)], name).float(), int(total), int(response)) for i, total, response in rows]
    return {key: [slice_log_prob_with_cp(*each, layout, width) for each in whole]}


def figures() -> dict[str, object]:
    their_trainers.load({"MILES": os.environ["MILES"]})
    with their_trainers.unfused():
        return rollout_hosts.figures(train, "miles")
