"""What the proofs of slime and of miles share: their flags, and the figures of a train function that runs a rollout."""

import argparse
import os
from argparse import Namespace
from collections.abc import Callable, Sequence

import host_cases as hosts
import their_trainers
import torch
from host_cases import Case
from megatron.core import parallel_state
from torch import Tensor

from megatron_pg.rollouts.sample import Sample

Train = Callable[[Case, Sequence[Sample], Namespace], tuple[list[list[Tensor]], list[dict]]]
OFF = (
    *("use_rollout_routing_replay", "keep_old_actor", "use_critic", "use_routing_replay", "log_multi_turn"),
    *("log_passrate", "log_correct_samples", "overlap_grad_reduce", "overlap_param_gather", "align_param_gather"),
    *("align_grad_reduce", "reset_optimizer_states", "manual_gc", "use_distributed_optimizer", "use_wandb"),
    *("use_tensorboard", "offload_train", "wandb_always_use_train_step", "use_rollout_entropy", "use_unbiased_kl"),
    *("use_rollout_logprobs", "use_kl_loss", "use_rollout_indexer_replay", "debug_disable_optimizer"),
    *("empty_unused_memory", "use_fault_tolerance"),
)
ABSENT = (
    *("save_debug_train_data", "custom_megatron_init_path", "rollout_data_postprocess_path"),
    *("custom_loss_function_path", "custom_megatron_before_train_step_hook_path"),
    *("custom_megatron_before_log_prob_hook_path", "custom_tis_function_path", "save_debug_rollout_data"),
    *("ref_update_interval", "ci_save_grad_norm", "ci_load_grad_norm", "dump_details", "num_experts"),
    *("pg_metrics_file", "compress_ratios"),
)
# Separate rows for each sample, miles' --qkv-format bshd, two in a micro-batch.
PADDED = {"qkv_format": "bshd", "use_dynamic_batch_size": False, "micro_batch_size": 2}
PADDED_CASES = [
    Case(head="logits", rollouts_per_step=4),
    Case(head="forward", objective="kl", per_token=True),
    Case(head="recompute", objective="gspo", rollouts_per_step=4),
]
PASSES = {
    "slime": [(Case(head="scaled_exp"), {}), (Case(head="forward", objective="top_p"), {})],
    "miles": [(Case(head="recompute"), {}), (Case(head="forward"), PADDED)],
}
TERM_CASES = [
    Case(objective="opd", rollouts_per_step=4),
    Case(objective="opd", head="recompute", aggregation="constant", per_token=True),
    Case(objective="sft", aggregation="token_mean"),  # in slime, whose samples have origins
    Case(objective="sft", head="forward", rollouts_per_step=6, fan_out=True),
    Case(objective="top_p", rollouts_per_step=6, aggregation="constant"),
    Case(objective="top_p", aggregation="token_mean", head="recompute"),
    Case(objective="their tis", rollouts_per_step=4),
    Case(objective="their tis", aggregation="token_mean", head="forward"),
    Case(objective="their gspo", rollouts_per_step=4),
    Case(objective="their dual clip", rollouts_per_step=4),
    Case(objective="their ppo", rollouts_per_step=4),
    Case(objective="their ppo", head="forward", aggregation="token_mean"),
    Case(objective="their sft", rollouts_per_step=4),
    Case(objective="their sft", aggregation="token_mean", per_token=True, head="scaled_exp"),
]
CRITIC_CASES = [
    Case(objective="value", rollouts_per_step=4),
    Case(objective="value", aggregation="prompt_mean", rollouts_per_step=4, per_token=True),
    Case(objective="value", aggregation="token_mean", per_token=True),
    Case(objective="value", aggregation="constant", rollouts_per_step=6, fan_out=True),
]
THEIRS = {  # a case's objective: the host's flags that select it
    "their tis": {"use_tis": True, "tis_clip_low": hosts.TIS[0], "tis_clip": hosts.TIS[1]},
    "their gspo": {"advantage_estimator": "gspo"},
    "their dual clip": {"eps_clip_c": hosts.CAP},
    "their ppo": {"use_critic": True, "advantage_estimator": "ppo"},
    "their sft": {"loss_type": "sft_loss", "compute_advantages_and_returns": False},
}
OF_CRITICS = THEIRS["their ppo"] | {"value_clip": hosts.VALUE_CLIP}
OF_MILES = {"opd", *THEIRS}  # whose batches name no loss terms and no sampling masks
MEASURED = Case(aggregation="constant", objective="kl", rollouts_per_step=4)  # whose metrics are compared


def arguments(host: str, case: Case, **more: object) -> Namespace:
    """The host's, with ours among them as its parser would have put them there."""
    args = their_trainers.arguments(None, case.per_token, case.rollouts_per_step)
    known = dict.fromkeys(OFF, False) | dict.fromkeys(ABSENT) | case.flags
    known |= {
        "compute_advantages_and_returns": True,
        "ci_disable_kl_checker": True,
        "train_memory_margin_bytes": 0,
        "n_samples_per_prompt": hosts.PROMPT // (2 if case.fan_out else 1),
        "rollout_batch_size": len(hosts.LENGTHS) // hosts.PROMPT,
        "eps_clip_high": 0.28,
        "use_kl_loss": "pg_kl_coef" in case.flags,
        "use_opd": False,
        "tis_clip_low": 0.0,
        "tis_clip": 2.0,
        "rollout_top_p": 0.9 if case.objective == "top_p" else 1.0,
        "kl_loss_coef": case.flags.get("pg_kl_coef", 0.0),
        "kl_loss_type": "k3",
        "custom_megatron_init_path": f"megatron_pg.{host}.init",
        "value_clip": 0.2,
        "gamma": hosts.GAMMA,
        "lambd": hosts.LAMBDA,
    }
    known |= OF_CRITICS if case.objective == "value" else {}
    if "pg_clip_eps_low" not in case.flags:  # an objective that reads none
        known["eps_clip_high"] = args.eps_clip
    return argparse.Namespace(**vars(args) | known | THEIRS.get(case.objective, {}) | more)


def errors(train: Train, host: str, case: Case, **more: object) -> float:
    """Largest over the rollout's steps, of every gradient."""
    found = _samples(host, case)
    gradients, _ = train(case, found, arguments(host, case, **more))
    steps = hosts.steps_of(found, case)
    assert len(gradients) == len(steps)
    # slime leaves out the pass for old log-probabilities where one step's are the loss's own
    keeps = "pg_correction" in case.flags or case.objective in ("their tis", "their ppo")
    on_policy = host == "slime" and case.num_steps == 1 and not keeps
    pairs = zip(gradients, steps, strict=True)
    return max(hosts.error(mine, hosts.expected(step, case, on_policy=on_policy)[0]) for mine, step in pairs)


def _samples(host: str, case: Case) -> list[Sample]:
    found = hosts.samples(fan_out=case.fan_out)
    return hosts.with_returns(found, skips=host == "miles") if case.objective in ("value", "their ppo") else found


def of_critic(train: Train, host: str, case: Case, **more: object) -> float:
    """Largest error over a critic's steps, of every gradient and metric."""
    found = _samples(host, case)
    gradients, logged = train(case, found, arguments(host, case, **more))
    steps = hosts.steps_of(found, case)
    assert len(gradients) == len(steps)
    worst = [hosts.error(mine, hosts.expected(step, case)[0]) for mine, step in zip(gradients, steps, strict=True)]
    lines = [line for line in logged if "train/critic-pg/value_loss" in line]
    for line, step in zip(lines, steps if lines else (), strict=True):
        wanted = hosts.of_critic(step, case).metrics
        assert 0 < wanted["value_clipped_fraction"] < 1
        worst += [abs(line[f"train/critic-pg/{name}"] - value) / max(abs(value), 1) for name, value in wanted.items()]
    found_by_all = torch.tensor([max(worst), len(lines)])
    torch.distributed.all_reduce(found_by_all, torch.distributed.ReduceOp.MAX)
    assert found_by_all[1] == len(steps)
    return float(found_by_all[0])


def jump(train: Train, host: str, objective: str = "grpo", **more: object) -> float:
    """Between the host's own loss under its own flags and ours, of every gradient of three steps."""
    case = Case(rollouts_per_step=4, objective=objective)
    found = _samples(host, case)
    (ours, _), (theirs, _) = (
        train(case, found, arguments(host, case, custom_megatron_init_path=path, **more))
        for path in (f"megatron_pg.{host}.init", None)
    )
    return max(hosts.error(mine, [each.double() for each in own]) for mine, own in zip(ours, theirs, strict=True))


def figures(train: Train, host: str, *, passed: Callable[..., float] | None = None) -> dict[str, object]:
    """By layout: errors of every case, the jump from the host's own loss, and what its logger was given.

    `passed`: errors of the passes before training of a loop that is not the host's own.
    """
    result: dict[str, object] = {}
    for number, (layout, sizes) in enumerate(hosts.LAYOUTS.items()):
        parallel_state.initialize_model_parallel(**sizes)
        cases = hosts.cases_of(layout, full="FULL" in os.environ)
        of_layout: dict[str, object] = {"errors": {case.name: errors(train, host, case) for case in cases}}
        terms = [case for case in TERM_CASES if host == "slime" or case.objective in OF_MILES]
        terms = terms if "FULL" in os.environ else terms[number % 2 :: 2]  # one of every objective
        of_layout["terms"] = {case.name: errors(train, host, case) for case in terms}
        critics = CRITIC_CASES if "FULL" in os.environ else CRITIC_CASES[number % 2 :: 2]
        of_layout["critics"] = {case.name: of_critic(train, host, case) for case in critics}
        if host == "miles":
            of_layout["critics"]["padded"] = of_critic(train, host, CRITIC_CASES[number], **PADDED)
            of_layout["padded"] = {case.name: errors(train, host, case, **PADDED) for case in PADDED_CASES}
        if passed is not None:
            of_layout["passes"] = {f"{case.name} {more}": passed(case, **more) for case, more in PASSES[host]}
        else:
            joined = {"allgather_cp": sizes.get("context_parallel_size", 1) == 1}  # which cuts nothing there
            of_layout["jump"] = max(
                jump(train, host, **joined), *(jump(train, host, name) for name in (*THEIRS, "value"))
            )
        more = arguments(host, MEASURED, pg_metrics="with_entropy")
        logged = [train(MEASURED, hosts.samples(), more)[1]]
        writer = parallel_state.get_pipeline_model_parallel_world_size() - 1  # the first rank of the last stage
        torch.distributed.broadcast_object_list(logged, src=writer)
        of_layout["metrics"] = [each for each in logged[0] if "train/pg/pg_loss" in each]
        result[layout] = of_layout
        parallel_state.destroy_model_parallel()
    return result
