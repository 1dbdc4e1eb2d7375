"""slime: `python3 -m megatron_pg.slime train.py …` or `--custom-megatron-init-path megatron_pg.slime.init`.

See docs/hosts/slime.md.
"""

import argparse
from importlib import import_module

from megatron_pg.hosts.patching import run
from megatron_pg.hosts.rollout.host import RolloutHost

__all__ = ["init", "loss"]

_LOSSES = "slime.backends.megatron_utils.loss"


class Slime(RolloutHost):
    """The loss in slime."""

    name, version = "slime", "slime 624b824a"
    signatures = (
        f"{_LOSSES}:loss_function(args, batch, num_microbatches, step_global_batch_size, logits)",
        f"{_LOSSES}:policy_loss_function(args, batch, logits, sum_of_sample_mean)",
        "slime.backends.megatron_utils.data:DataIterator(rollout_data)",
    )
    losses = _LOSSES
    logger = "slime.utils.logging_utils:log|slime.observability.logging_utils:log"
    rollouts_per_step = "global_batch_sizes"
    carried = (*RolloutHost.carried, "sampling_mask")
    names_terms = returns_pair = True

    def begin(self, args: argparse.Namespace, role: str) -> None:
        super().begin(args, role)
        if role == "policy" and self.trainer.settings.correction.name == "none":
            # under a custom loss slime computes old log-probabilities in a pass, although the only step has them
            args.loss_type = "policy_loss"
            vars(import_module(self.losses))["policy_loss_function"] = self.loss


HOST = Slime()
init, loss = HOST.init, HOST.loss

if __name__ == "__main__":
    run(HOST.main)
