"""miles: `python3 -m megatron_pg.miles train.py …` or `--custom-megatron-init-path megatron_pg.miles.init`.

See docs/hosts/miles.md.
"""

import argparse
from collections.abc import Iterator

from megatron_pg.hosts.patching import run
from megatron_pg.hosts.rollout.host import RolloutHost
from megatron_pg.hosts.startup import flag_of

__all__ = ["init", "loss"]

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
        "miles.backends.training_utils.data:DataIterator(rollout_data)",
    )
    losses = "miles.backends.training_utils.loss_hub.losses"
    logger = "miles.utils.tracking_utils.tracking:log"
    rollouts_per_step = "num_rollouts"

    def refused(self, args: argparse.Namespace) -> Iterator[str]:
        if args.rollout_top_p != 1.0:
            yield f"--rollout-top-p {args.rollout_top_p}: the batches do not contain the kept tokens. Use 1.0."
        for name, reason in REFUSED.items():
            if vars(args).get(name):
                yield f"{flag_of(name)} {reason}, so this loss does not support it; remove it"


HOST = Miles()
init, loss = HOST.init, HOST.loss

if __name__ == "__main__":
    run(HOST.main)
