"""slime: `python3 -m megatron_pg.slime train.py …` or `--custom-megatron-init-path megatron_pg.slime.init`.

All hooks are documented ones of slime, except one function of its loss module that has no hook with the same flow. See
docs/hosts/slime.md.
"""

import argparse
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from megatron_pg.hosts.patching import run
from megatron_pg.hosts.rollout.host import RolloutHost

__all__ = ["before_log_prob", "before_train_step", "init", "loss", "plan"]

_DATA = "rollout_data_postprocess_path"
_LOSSES = "slime.backends.megatron_utils.loss"


class Slime(RolloutHost):
    """The loss in slime."""

    name, version = "slime", "slime 624b824a"
    signatures = (
        f"{_LOSSES}:loss_function(args, batch, num_microbatches, step_global_batch_size, logits)",
        "slime.backends.megatron_utils.model:train_one_step(args, rollout_id, step_id, data_iterator, model, "
        "optimizer, opt_param_scheduler, num_microbatches, step_global_batch_size)",
        f"{_LOSSES}:policy_loss_function(args, batch, logits, sum_of_sample_mean)",
    )
    logger = "slime.utils.logging_utils:log|slime.observability.logging_utils:log"
    rollouts_per_step = "global_batch_sizes"
    carried = (*RolloutHost.carried, "sampling_mask")
    names_terms = returns_pair = True
    hooks: Mapping[str, str] = {**RolloutHost.hooks, _DATA: "plan"}

    def init(self, args: argparse.Namespace) -> None:
        super().init(args)
        if self.trainer.settings.correction.name == "none":
            # under a custom loss slime runs a separate pass for old log-probabilities, although the only step computes
            # them
            args.loss_type = "policy_loss"
            vars(import_module(_LOSSES))["policy_loss_function"] = self.loss

    def plan(self, args: argparse.Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
        """slime's `--rollout-data-postprocess-path`: on every rank, after the advantages, before training."""
        self.users_hook(args, _DATA, args, rollout_id, rollout_data)
        self.trainer.plan(self.rollout(args, rollout_data))


HOST = Slime()
init, loss, plan = HOST.init, HOST.loss, HOST.plan
before_train_step, before_log_prob = HOST.before_train_step, HOST.before_log_prob

if __name__ == "__main__":
    run(HOST.main)
