"""miles: `python3 -m megatron_pg.miles train.py …` or `--custom-megatron-init-path megatron_pg.miles.init`.

See docs/hosts/miles.md.
"""

from megatron_pg.hosts.patching import run
from megatron_pg.hosts.rollout.host import RolloutHost

__all__ = ["init", "loss"]


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
    unsupported = RolloutHost.unsupported | {
        "rollout_top_p": "leaves the batches without the kept tokens. Use 1.0.",
        "true_on_policy_mode": "rounds log-probabilities to bfloat16. Remove it.",
        "use_dynamic_global_batch_size": "changes the number of rollouts per step after the step is planned. Remove "
        "it.",
        "delay_split_train_data_by_dp": "cuts the data in the trainer, without a schedule of micro-batches. Remove it.",
        "skip_actor_forward_only": "leaves no log-probabilities of the sampling policy, and no hooks. Remove it.",
        "multi_lora_n_adapters": "gives every adapter its own batch. Remove it.",
        "observe_training_entropy": "is a metric of the loss that ours replaces. Use --pg-metrics with_entropy.",
        "debug_disable_optimizer": "never calls optimizer.step(), where metrics are reduced. Remove it.",
    }


HOST = Miles()
init, loss = HOST.init, HOST.loss

if __name__ == "__main__":
    run(HOST.main)
