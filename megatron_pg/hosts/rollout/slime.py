"""slime: documented hooks, and one function of its loss module that has no hook with the same flow."""

import argparse
from collections.abc import Mapping
from typing import Any

import torch

from megatron_pg.hosts.rollout.host import Declaration, RolloutHost

_DATA = "rollout_data_postprocess_path"
HOST = RolloutHost(
    Declaration(
        name="slime",
        version="slime 624b824a",
        log="slime.utils.logging_utils:log|slime.observability.logging_utils:log",
        carried=("old_logprobs", "ref_logprobs", "teacher_logprobs", "sampling_mask"),
        names_terms=True,
        rollouts_per_step="global_batch_sizes",
        hooks={_DATA: "plan"},
        returned=lambda found: (torch.empty(0, device=found["log_probs"][0].device), found),
        signatures={
            "slime.backends.megatron_utils.loss:loss_function": [
                *("args", "batch", "num_microbatches", "step_global_batch_size", "logits")
            ],
            "slime.backends.megatron_utils.model:train_one_step": [
                *("args", "rollout_id", "step_id", "data_iterator", "model", "optimizer", "opt_param_scheduler"),
                *("num_microbatches", "step_global_batch_size"),
            ],
            "slime.backends.megatron_utils.loss:policy_loss_function": [
                *("args", "batch", "logits", "sum_of_sample_mean")
            ],
        },
    )
)


def init(args: argparse.Namespace) -> None:
    """slime's `--custom-megatron-init-path`: on every rank of the trainer, before the model is built.

    Raises:
        ArgumentError: flags contradict each other, or the adapter does not support slime's release.
    """
    HOST.init(args)
    if not HOST.trainer.corrects:
        # under a custom loss slime runs a separate pass for old log-probabilities, although the only step computes them
        import slime.backends.megatron_utils.loss as losses

        args.loss_type, losses.policy_loss_function = "policy_loss", HOST.loss


def plan(args: argparse.Namespace, rollout_id: int, rollout_data: Mapping[str, Any]) -> None:
    """slime's `--rollout-data-postprocess-path`: on every rank, after the advantages, before training."""
    HOST.users_hook(args, _DATA, args, rollout_id, rollout_data)
    HOST.trainer.plan(HOST.rollout(args, rollout_data))
