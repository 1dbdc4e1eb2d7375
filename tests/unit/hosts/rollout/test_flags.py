"""The loss flags of slime and miles compared with ours."""

import pytest
import rollout_hosts
from host_cases import Case, inherited_flags, refused_flags

from megatron_pg import miles, slime
from megatron_pg.args import ArgumentError

pytestmark = pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")  # about gspo's clip, and k3
BOTH = [slime.HOST, miles.HOST]
OF_HOSTS = [(host, *case) for host in BOTH for case in refused_flags("slime and miles")]
SWITCHES_OF_MILES = (
    *("true_on_policy_mode", "use_dynamic_global_batch_size", "delay_split_train_data_by_dp"),
    *("skip_actor_forward_only", "observe_training_entropy", "debug_disable_optimizer"),
)
OF_MILES = {  # what slime accepts, or does not have
    "pg_sampling_mask_missing": ("mask", "--pg-sampling-mask-missing mask reads sampling_mask, which the batches of m"),
    "pg_sampling_mask_entropy": ("kept", "--pg-sampling-mask-entropy kept reads sampling_mask"),
    "pg_term": (
        ["sft:ce,weight=0.1"],
        "--pg-term sft:ce has no tokens, because the batches of miles name no loss terms",
    ),
    "rollout_top_p": (0.9, "--rollout-top-p 0.9 leaves the batches without the kept tokens. Use 1.0."),
    "multi_lora_n_adapters": (2, "--multi-lora-n-adapters 2 gives every adapter its own batch"),
    **{name: (True, f"--{name.replace('_', '-')} {miles.Miles.unsupported[name]}") for name in SWITCHES_OF_MILES},
}


def checked(host, given: dict, role: str = "policy"):
    off = dict.fromkeys(("pg_clip_eps_low", "pg_clip_eps_high"))
    return host.checked(rollout_hosts.arguments("slime", Case(), **off | given), role)


@pytest.mark.parametrize("host", BOTH)
@pytest.mark.parametrize(("given", "ours", "text"), inherited_flags("slime and miles"))
def test_flags_of_the_host_are_inherited(host, given, ours, text):
    args, rows = checked(host, given)
    assert {name: getattr(args, name) for name in ours} == ours
    assert text in rows.get("inherited", "")


@pytest.mark.parametrize(("given", "ours", "text"), inherited_flags("slime"))
def test_samples_of_slime_can_have_loss_terms_and_sampling_masks(given, ours, text):
    assert {name: getattr(checked(slime.HOST, given).args, name) for name in ours} == ours


@pytest.mark.parametrize(
    ("host", "given", "message"),
    [
        *OF_HOSTS,
        *((slime.HOST, *case) for case in refused_flags("slime")),
        *((miles.HOST, {name: value}, message) for name, (value, message) in OF_MILES.items()),
    ],
)
def test_unsupported_flags_and_contradictions_are_refused(host, given, message):
    with pytest.raises(ArgumentError) as refused:
        checked(host, given)
    assert message in str(refused.value)


OF_POLICY = {"pg_objective": "gspo", "pg_correction": "icepop,high=2", "pg_denominator": "varied"}


@pytest.mark.parametrize("host", BOTH)
@pytest.mark.parametrize(
    ("given", "clip"),
    [({}, 0.2), ({"value_clip": 0.3}, 0.3), ({"pg_value_clip": 0.4}, 0.4), ({"value_clip": 0.3, **OF_POLICY}, 0.3)],
)
def test_a_critic_takes_its_clip_and_the_denominators_and_leaves_the_policys_flags_to_it(host, given, clip):
    more = {"loss_aggregation": "constant", "loss_aggregation_divisor": 7.0, "pg_metrics": "with_entropy"}
    given = {"use_critic": True, "advantage_estimator": "ppo", **more, **given}
    critic, policy = (checked(host, given, role).args for role in ("critic", "policy"))
    assert (critic.pg_role, critic.pg_value_clip, critic.loss_aggregation_divisor) == ("critic", clip, 7.0)
    assert (critic.pg_objective, critic.pg_correction, critic.pg_metrics) == ("grpo", "none", "basic")
    assert (policy.pg_role, policy.pg_value_clip, policy.pg_metrics) == ("policy", None, "with_entropy")
    assert policy.pg_objective == given.get("pg_objective", "grpo")


@pytest.mark.parametrize("host", BOTH)
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"value_clip": 0.3, "pg_value_clip": 0.4}, "0.3, and --pg-value-clip 0.4 contradict each other"),
        ({"value_clip": -1.0}, "--value-clip is -1.0. It must be"),
        ({"recompute_loss_function": True}, "--recompute-loss-function is not supported"),
        ({"loss_type": "sft_loss"}, "--loss-type sft_loss is another loss"),
        ({"loss_aggregation": "constant"}, "needs a divisor, which has no default. Give --loss-aggregation-divisor"),
        (
            {"loss_aggregation": "prompt_mean", "global_batch_size": 6},
            "cuts the samples of a prompt into several steps",
        ),
    ],
)
def test_a_critics_contradictions_are_refused(host, given, message):
    with pytest.raises(ArgumentError) as refused:
        checked(host, {"use_critic": True, "advantage_estimator": "ppo", **given}, "critic")
    assert message in str(refused.value)


def test_a_message_about_a_number_of_the_host_names_its_flag():
    with pytest.raises(ArgumentError, match=r"--eps-clip is 1\.5\. It must be between 0 and 1 ") as refused:
        checked(slime.HOST, {"eps_clip": 1.5})
    assert "--pg-clip-eps-low" not in str(refused.value)
    with pytest.raises(ArgumentError, match=r"--pg-clip-eps-low is 1\.5\. It must be between 0 and 1 "):
        checked(slime.HOST, {"eps_clip": 0.2, "pg_clip_eps_low": 1.5})
