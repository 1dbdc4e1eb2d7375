"""miles: `python3 -m megatron_pg.miles train.py …` or `--custom-megatron-init-path megatron_pg.miles.init`.

The hooks are those of slime, except that the data are read where the trainer makes its iterators. See
docs/hosts/miles.md.
"""

import argparse
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

from megatron_pg.hosts.patching import run, wrap
from megatron_pg.hosts.rollout.host import RolloutHost
from megatron_pg.hosts.startup import flag_of

__all__ = ["before_log_prob", "before_train_step", "init", "loss"]

_ACTOR = "miles.backends.megatron_utils.actor"
REFUSED = {
    "true_on_policy_mode": "rounds log-probabilities to bfloat16",
    "use_dynamic_global_batch_size": "changes the number of rollouts per step after the step is planned",
    "delay_split_train_data_by_dp": "cuts the data in the trainer, without a schedule of micro-batches",
    "skip_actor_forward_only": "leaves no log-probabilities of the sampling policy, and no hooks",
    "multi_lora_n_adapters": "gives every adapter its own batch",
    "observe_training_entropy": "is a metric of the loss that ours replaces; --pg-metrics with_entropy has it",
    "debug_disable_optimizer": "never calls optimizer.step(), where metrics are reduced",
}


class Miles(RolloutHost):
    """The loss in miles."""

    name, version = "miles", "miles 31f1ca96"
    signatures = (
        "miles.backends.training_utils.loss:loss_function(args, batch, num_microbatches, logits, "
        "apply_megatron_loss_scaling, num_rollouts)",
        "miles.backends.megatron_utils.model:train_one_step(args, rollout_id, step_id, data_iterator, model, "
        "optimizer, opt_param_scheduler, num_microbatches, num_rollouts, witness_info, attempt)",
        f"{_ACTOR}:get_data_iterator(args, model, rollout_data)",
    )
    logger = "miles.utils.tracking_utils.tracking:log"
    rollouts_per_step = "num_rollouts"

    def __init__(self) -> None:
        super().__init__()
        self.next_data: Any = None  # of the next rollout; miles adds fields until its first step

    def refused(self, args: argparse.Namespace) -> Iterator[str]:
        if args.rollout_top_p != 1.0:
            yield f"--rollout-top-p {args.rollout_top_p}: the batches do not contain the kept tokens. Use 1.0."
        for name, reason in REFUSED.items():
            if vars(args).get(name):
                yield f"{flag_of(name)} {reason}, so this loss does not support it; remove it"

    def init(self, args: argparse.Namespace) -> None:
        super().init(args)
        wrap(import_module(_ACTOR), "get_data_iterator", self._get_data_iterator)

    def _get_data_iterator(self, get: Callable, args: argparse.Namespace, model: Any, rollout_data: dict) -> Any:
        self.next_data = rollout_data
        return get(args, model, rollout_data)

    def before_train_step(self, args: argparse.Namespace, *step: Any) -> None:
        """As in every host; the first step of a rollout plans all of them."""
        if step[1] == 0:
            data, self.next_data = self.next_data, None
            if "micro_batch_indices" not in data:
                raise ValueError(
                    "the rollout data have no micro_batch_indices: miles has split this batch in the trainer "
                    "(multimodal data, fewer rollouts than --global-batch-size, several replicas), where the samples "
                    "of a micro-batch are not known in advance. Use none of these."
                )
            self.trainer.plan(self.rollout(args, data))
        super().before_train_step(args, *step)


HOST = Miles()
init, loss = HOST.init, HOST.loss
before_train_step, before_log_prob = HOST.before_train_step, HOST.before_log_prob

if __name__ == "__main__":
    run(HOST.main)
