"""One optimizer step of slime or miles from a checkout: their data, loss, and division by ranks and rollouts.

Theirs: the conversion of samples to training data, the schedule that cuts it over ranks and micro-batches, each rank's
data, the advantages, the batches, the loss and `train_one_step`. Not theirs: the model, and an optimizer that keeps the
gradients. Packages that are not installed are stand-ins: empty, but for the object store of ray, which hands back what
it is given.
"""

import importlib
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import host_cases as hosts
import stand_ins
import torch
from megatron.core import parallel_state
from megatron.core.fusions import fused_cross_entropy
from megatron.core.tensor_parallel import vocab_parallel_cross_entropy
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

EPS_LOW, EPS_HIGH = 0.2, 0.28
PACKAGES = (
    *("huggingface_hub", "megatron.bridge", "mooncake", "polars", "psutil", "ray", "sglang", "sglang_router"),
    *("tokenizers", "torch_memory_saver", "tqdm", "transformers", "wandb"),
)
STORE = {"remote": lambda decorated: decorated, "get": lambda value: value, "put": lambda value, **options: value}
OFF = (
    *("rewards_normalization", "normalize_advantages", "balance_data", "balance_by_flops", "allgather_cp"),
    *("use_opsm", "use_tis", "use_kl_loss", "use_opd", "get_mismatch_metrics", "recompute_loss_function"),
    *("enable_mtp_training", "ci_test", "true_on_policy_mode", "use_dynamic_global_batch_size", "dumper_enable"),
    *("skip_actor_forward_only", "observe_training_entropy", "debug_disable_optimizer", "enable_witness"),
    *("delay_split_train_data_by_dp", "save_local_weight_checksum"),
)
ABSENT = (
    *("eps_clip_c", "reward_key", "save_debug_train_data", "custom_advantage_function_path", "dumper_fwd_bwd"),
    *("decoder_seq_length", "dump_details", "custom_megatron_before_train_step_hook_path"),
)


def train(step: Callable, samples: Sequence[Sample], path: str | None, *, per_token: bool) -> list[Tensor]:
    """Gradients of a step of `slime` or `miles`.

    Args:
        step: one of the functions below.
        samples: the step; their reward is their advantage.
        path: their --custom-pg-loss-reducer-function-path.
        per_token: their --calculate-per-token-loss.
    """
    args = arguments(path, per_token, len({sample.rollout_id for sample in samples}))
    importlib.import_module("megatron.training.global_vars").set_args(args)
    model = hosts.model(per_token=per_token)
    optimizer = hosts.Optimizer(model)
    step(args, samples, model, optimizer)
    (gradients,) = optimizer.found
    return gradients


def arguments(path: str | None, per_token: bool, num_rollouts: int) -> Namespace:
    """What their code reads of their flags: GRPO's surrogate on packed samples, all else off."""
    return Namespace(
        **dict.fromkeys(OFF, False),
        **dict.fromkeys(ABSENT),
        custom_pg_loss_reducer_function_path=path,
        calculate_per_token_loss=per_token,
        global_batch_size=num_rollouts,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=18,
        data_pad_size_multiplier=4,
        qkv_format="thd",
        seq_length=64,
        micro_batch_size=1,
        loss_type="policy_loss",
        advantage_estimator="grpo",
        use_rollout_logprobs=True,  # the old policy's are the samples'
        eps_clip=EPS_LOW,
        eps_clip_high=EPS_HIGH,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        entropy_coef=0.0,
        kl_coef=0.0,
        log_probs_chunk_size=-1,
    )


def parallel_config() -> dict[str, int]:
    return {
        "dp_size": parallel_state.get_data_parallel_world_size(),
        "cp_size": parallel_state.get_context_parallel_world_size(),
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }


def as_theirs(kind: type, samples: Sequence[Sample]) -> list:
    return [
        kind(
            index=i,
            rollout_id=sample.rollout_id,
            tokens=sample.tokens.tolist(),
            response_length=sample.response_length,
            loss_mask=sample.loss_mask.int().tolist(),
            rollout_log_probs=sample.old_logprobs.tolist(),
            reward=sample.reward,
        )
        for i, sample in enumerate(samples)
    ]


def slime(args: Namespace, samples: Sequence[Sample], model, optimizer: hosts.Optimizer) -> None:
    from slime.backends.megatron_utils import actor, data, loss
    from slime.backends.megatron_utils import model as steps
    from slime.ray.rollout import RolloutManager
    from slime.utils import accelerator
    from slime.utils.types import Sample as Theirs

    accelerator.device = accelerator.current_device = lambda index=None: torch.device("cpu")
    manager = RolloutManager.__new__(RolloutManager)
    manager.args, manager.train_parallel_config = args, parallel_config()
    manager.custom_reward_post_process_func = manager.custom_convert_samples_to_train_data_func = None
    boxes = manager._split_train_data_by_dp(manager._convert_samples_to_train_data(as_theirs(Theirs, samples)))
    mine = actor.MegatronTrainRayActor._get_rollout_data(SimpleNamespace(args=args), boxes)
    loss.compute_advantages_and_returns(args, mine)
    iterators = data.get_data_iterator(mine)
    (count,), (rollouts,) = mine["num_microbatches"], mine["global_batch_sizes"]
    steps.train_one_step(args, 0, 0, iterators, [model], optimizer, MagicMock(), count, rollouts)


def miles(args: Namespace, samples: Sequence[Sample], model, optimizer: hosts.Optimizer) -> None:
    from miles.backends.megatron_utils import model as steps
    from miles.backends.training_utils import data, loss
    from miles.utils.types import Sample as Theirs

    mine = data_of_miles(args, as_theirs(Theirs, samples))
    loss.compute_advantages_and_returns(args, mine)
    iterators, (count,) = data.get_data_iterator(args, [model], mine)
    (rollouts,) = data.get_num_rollouts(args, mine, 1)
    steps.train_one_step(args, 0, 0, iterators, [model], optimizer, MagicMock(), count, rollouts, None, 0)


def data_of_miles(args: Namespace, theirs: Sequence, **fields: list) -> dict:
    """This rank's part of miles' samples and of further fields of them."""
    from miles.backends.megatron_utils import parallel
    from miles.backends.training_utils import data
    from miles.backends.training_utils.parallel import set_parallel_state
    from miles.ray.rollout import train_data_conversion as conversion
    from miles.utils import object_store
    from miles.utils.ft_utils.process_group_utils import GroupInfo

    set_parallel_state(parallel.create_megatron_parallel_state(indep_dp=GroupInfo(rank=0, size=1, group=None)))
    object_store._INSTANCE = object_store.RayObjectStore()
    whole = conversion.convert_samples_to_train_data(args, theirs, {}, None, None) | fields
    mine, _ = data.get_rollout_data(args, conversion.split_train_data_by_dp(args, whole, parallel_config()))
    return mine


def unfused() -> Any:
    """A context with the unfused cross-entropy of Megatron: the backward of its fused one rounds to bfloat16."""

    def loss(logits: Tensor, tokens: Tensor, group: object) -> Tensor:
        return vocab_parallel_cross_entropy(logits, tokens)

    return patch.object(fused_cross_entropy, "fused_vocab_parallel_cross_entropy", loss)


def miles_unfused(args: Namespace, samples: Sequence[Sample], model, optimizer: hosts.Optimizer) -> None:
    with unfused():
        miles(args, samples, model, optimizer)


STEPS = {"SLIME": {"slime": slime}, "MILES": {"miles": miles, "miles, unfused cross-entropy": miles_unfused}}


def load(environment: Mapping[str, str]) -> dict[str, Callable]:
    """The steps of the checkout that SLIME or MILES names; none without one."""
    for variable, steps in STEPS.items():
        if variable in environment:
            sys.path.insert(0, environment[variable])
            stand_ins.install(*PACKAGES, ray=STORE)
            return steps
    return {}
