"""NeMo-RL, Megatron worker: `python -m megatron_pg.nemo_rl examples/run_grpo.py …` (docs/hosts/nemo_rl.md).

NeMo-RL has no path, registry or entry point for losses. So `main` runs its script in a process where three names are
replaced: the class of the loss, `setup`, which we check before it runs, and `Policy.train`, which sends rows to the
workers, whose steps we plan.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from megatron_pg.hosts.nemo_rl import flags as nemo_flags
from megatron_pg.hosts.nemo_rl import rows as nemo_rows
from megatron_pg.hosts.nemo_rl.loss import SCALING, VERSION, PolicyGradientLossFn, checked
from megatron_pg.hosts.patching import check_signatures, launch, run, wrap
from megatron_pg.hosts.startup import print_banner, refuse, rows_of
from megatron_pg.hosts.step import HostLossError

__all__ = ["PolicyGradientLossFn", "install", "main"]

_SIGNATURES = (
    "nemo_rl.algorithms.grpo:setup(master_config)",
    "nemo_rl.algorithms.grpo:ClippedPGLossFn(cfg)",
    "nemo_rl.algorithms.utils:calculate_kl(logprobs, logprobs_reference, kl_type, input_clamp_value, "
    "output_clamp_value)",
    "nemo_rl.models.policy.lm_policy:Policy.train(self, data, loss_fn, eval_mode, gbs, mbs)",
)


def install() -> None:
    """Replace NeMo-RL's names in the driver, once, if its release is supported."""
    check_signatures(VERSION, _SIGNATURES)
    import nemo_rl.algorithms.grpo as grpo
    from nemo_rl.models.policy.lm_policy import Policy

    if grpo.ClippedPGLossFn is not PolicyGradientLossFn:
        grpo.ClippedPGLossFn.__init__ = _not_theirs
        grpo.ClippedPGLossFn = PolicyGradientLossFn
    wrap(grpo, "setup", _check_and_setup)
    wrap(Policy, "train", _plan_and_train)


def _not_theirs(self: Any, *given: Any, **named: Any) -> None:
    """The constructor of NeMo-RL's own loss, which its other trainers import themselves."""
    refuse(
        "this script makes NeMo-RL's own ClippedPGLossFn instead of megatron_pg's loss. Run one that calls "
        "nemo_rl.algorithms.grpo.setup, such as examples/run_grpo.py."
    )


def _check_and_setup(setup: Callable, master_config: Any, *rest: Any, **named: Any) -> Any:
    """NeMo-RL's setup, after our checks and the banner."""
    arguments = checked(master_config.loss_fn, [*nemo_flags.refused_of_policy(master_config)])
    rows = rows_of("NeMo-RL", arguments, SCALING)
    del rows["temperature"]  # NeMo-RL's
    sources = nemo_flags.passes_logprobs(master_config.policy)
    rows |= {"log-probabilities": f"NeMo-RL's own, for {', '.join(sources)}"} if sources else {}
    print_banner(rows)
    made = setup(master_config, *rest, **named)
    parts = made if isinstance(made, tuple) else (made,)
    losses = [part for part in parts if isinstance(part, PolicyGradientLossFn)]
    for loss in losses if sources else ():
        loss.take_logprobs()
    if not losses:
        raise HostLossError("nemo_rl.algorithms.grpo.setup has made another loss than megatron_pg's.")
    return made


def _plan_and_train(train: Callable, policy: Any, *rest: Any, **named: Any) -> Any:
    """`Policy.train` on rows with the weights of their steps."""
    given = inspect.signature(train).bind(policy, *rest, **named).arguments
    data, loss = given["data"], given["loss_fn"]
    if not isinstance(loss, PolicyGradientLossFn):
        return train(policy, *rest, **named)
    rows_per_step = given.get("gbs") or policy.cfg["train_global_batch_size"]
    plans = nemo_rows.plan_steps(data, loss.planning, rows_per_step)
    try:
        results = train(policy, *rest, **named)
    finally:
        for name in [name for name in data if name.startswith(nemo_rows.COLUMN)]:
            del data[name]
    metrics = results["all_mb_metrics"]
    if f"{nemo_rows.SUM}nonfinite" not in metrics:
        raise HostLossError(
            "NeMo-RL's workers have trained with another loss than megatron_pg's, and the optimizer has moved.",
            "Resume from the last checkpoint with a release of NeMo-RL that docs/hosts lists.",
        )
    nemo_rows.exact(metrics, loss.planning, plans)
    return results


def main(words: Sequence[str]) -> None:
    """Run NeMo-RL's script `words[0]` with our loss."""
    usage = "python -m megatron_pg.nemo_rl examples/run_grpo.py [its options; ours below loss_fn.megatron_pg]"
    launch(words, usage, install)


if __name__ == "__main__":
    run(main)
