"""miles: the hooks of slime, except that the data are read where the trainer makes its iterators."""

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_pg.hosts.rollout.host import Declaration, RolloutHost
from megatron_pg.hosts.startup import attribute, flag_of

_ITERATORS = "miles.backends.megatron_utils.actor:get_data_iterator"
_REFUSED = {
    "true_on_policy_mode": "rounds log-probabilities to bfloat16",
    "use_dynamic_global_batch_size": "changes the number of rollouts per step after the step is planned",
    "delay_split_train_data_by_dp": "cuts the data in the trainer, without a schedule of micro-batches",
    "skip_actor_forward_only": "leaves no log-probabilities of the sampling policy, and no hooks",
    "multi_lora_n_adapters": "gives every adapter its own batch",
    "observe_training_entropy": "is a metric of the loss that ours replaces; --pg-metrics with_entropy has it",
    "debug_disable_optimizer": "never calls optimizer.step(), where metrics are reduced",
}


def _refused(args: argparse.Namespace) -> Iterator[str]:
    if args.rollout_top_p != 1.0:
        yield f"--rollout-top-p {args.rollout_top_p}: the batches do not contain the kept tokens. Use 1.0."
    for name, reason in _REFUSED.items():
        if vars(args).get(name):
            yield f"{flag_of(name)} {reason}, so this loss does not support it; remove it"


HOST = RolloutHost(
    Declaration(
        name="miles",
        version="miles 31f1ca96",
        log="miles.utils.tracking_utils.tracking:log",
        rollouts_per_step="num_rollouts",
        refused=_refused,
        signatures={
            "miles.backends.training_utils.loss:loss_function": [
                *("args", "batch", "num_microbatches", "logits", "apply_megatron_loss_scaling", "num_rollouts")
            ],
            "miles.backends.megatron_utils.model:train_one_step": [
                *("args", "rollout_id", "step_id", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
                *("num_microbatches", "num_rollouts", "witness_info", "attempt"),
            ],
            _ITERATORS: ["args", "model", "rollout_data"],
        },
    )
)
_taken: dict[str, Any] = {}  # the next rollout; miles adds fields until its first step


def init(args: argparse.Namespace) -> None:
    """miles' `--custom-megatron-init-path`: on every rank of the trainer, before the model is built.

    Raises:
        ArgumentError: flags contradict each other, or the adapter does not support miles' release.
    """
    HOST.init(args)
    import miles.backends.megatron_utils.actor as actor

    get_iterator = attribute(_ITERATORS)
    if get_iterator.__module__ == __name__:
        return

    def get_data_iterator(args: argparse.Namespace, model: Sequence[Any], rollout_data: dict[str, Any]) -> Any:
        _taken["data"] = rollout_data
        return get_iterator(args, model, rollout_data)

    actor.get_data_iterator = get_data_iterator


def before_train_step(args: argparse.Namespace, rollout_id: int, step_id: int, *rest: Any) -> None:
    """miles' `--custom-megatron-before-train-step-hook-path`: the first of a rollout plans all of them."""
    if step_id == 0:
        if "micro_batch_indices" not in (data := _taken.pop("data")):
            raise ValueError(
                "the rollout data have no micro_batch_indices: miles has split this batch in the trainer (multimodal "
                "data, fewer rollouts than --global-batch-size, several replicas), where the samples of a micro-batch "
                "are not known in advance. Use none of these."
            )
        HOST.trainer.plan(HOST.rollout(args, data))
    HOST.before_train_step(args, rollout_id, step_id, *rest)
