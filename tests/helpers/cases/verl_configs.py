"""Configurations of verl with its defaults, as namespaces."""

from types import SimpleNamespace

from megatron_pg.hosts.verl.options import KEY


def policy_loss(loss_mode: str, **changes) -> SimpleNamespace:
    return SimpleNamespace(**{"loss_mode": loss_mode, "dro_beta": None} | changes)


def actor(**changes) -> SimpleNamespace:
    """What the adapter reads of verl's McoreActorConfig, with verl's defaults."""
    off = ("calculate_entropy", "use_kl_loss", "calculate_sum_pi_squared", "use_prefix_grouper")
    clip = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 3.0}
    known = (
        dict.fromkeys(off, False)
        | clip
        | {
            "policy_loss": policy_loss("vanilla"),
            "tau_pos": 1.0,
            "tau_neg": 1.05,
            "loss_agg_mode": "token-mean",
            "loss_scale_factor": None,
            "entropy_coeff": 0,
            "kl_loss_coef": 0.001,
            "kl_loss_type": "low_var_kl",
            "ppo_epochs": 1,
        }
    )
    return SimpleNamespace(**known | changes)


def critic(**changes) -> SimpleNamespace:
    """What the adapter reads of verl's McoreCriticConfig, with verl's defaults."""
    known = {"cliprange_value": 0.5, "loss_agg_mode": "token-mean", "loss_scale_factor": None, "ppo_epochs": 1}
    return SimpleNamespace(**known | changes)


def engine_config(options=None, **changes) -> SimpleNamespace:
    off = ("use_fused_kernels", "dynamic_context_parallel", "vanilla_mbridge", "use_megatron_fsdp")
    known = {"override_mcore_model_config": {KEY: options or {}}, "override_transformer_config": {}}
    return SimpleNamespace(**dict.fromkeys(off, False) | {"use_remove_padding": True} | known | changes)


def model_config(*, mtp: bool = False) -> SimpleNamespace:
    return SimpleNamespace(mtp=SimpleNamespace(enable=mtp))
