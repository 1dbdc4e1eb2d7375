"""The loss flags of slime and miles compared with ours."""

import pytest
import rollout_hosts
from host_cases import Case, refused_flags

from megatron_pg import miles, slime
from megatron_pg.args import ArgumentError

ANY_EPS = pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")  # W8, about gspo's clip


def arguments(**more):
    return rollout_hosts.arguments("slime", Case(), **{"pg_clip_eps_low": None, "pg_clip_eps_high": None} | more)


def rows(**more) -> dict[str, str]:
    return dict(slime.HOST.checked(arguments(**more)).rows)


def refusal(host, given: dict) -> str:
    with pytest.raises(ArgumentError) as refused:
        host.checked(arguments(**given))
    return str(refused.value)


@ANY_EPS
@pytest.mark.parametrize("host", [slime.HOST, miles.HOST])
@pytest.mark.parametrize(("given", "message"), refused_flags("slime and miles"))
def test_unsupported_flags_are_refused(host, given, message):
    assert message in refusal(host, given)


@pytest.mark.parametrize(("given", "message"), refused_flags("slime"))
def test_contradictions_are_refused(given, message):
    assert message in refusal(slime.HOST, given)


def test_a_top_p_needs_a_host_that_says_what_was_kept():
    assert slime.HOST.checked(arguments(rollout_top_p=0.9)).args.pg_temperature == 1.0
    with pytest.raises(ArgumentError, match=r"--rollout-top-p 0\.9: the batches do not contain the kept tokens"):
        miles.HOST.checked(arguments(rollout_top_p=0.9))


def test_flags_of_a_sampling_mask_need_a_host_that_carries_it():
    given = arguments(rollout_top_p=0.9, pg_sampling_mask_missing="mask")
    assert slime.HOST.checked(given).args.pg_sampling_mask_missing == "mask"
    with pytest.raises(
        ArgumentError,
        match="--pg-sampling-mask-missing and --pg-sampling-mask-entropy are of samples with a sampling mask",
    ):
        miles.HOST.checked(arguments(pg_sampling_mask_missing="mask"))


@pytest.mark.parametrize("name", miles.REFUSED)
def test_what_miles_alone_has_is_refused_by_name(name):
    with pytest.raises(ArgumentError, match=f"--{name.replace('_', '-')}"):
        miles.HOST.checked(arguments(**{name: 2}))


@pytest.mark.filterwarnings("ignore::megatron_pg.args.ArgumentWarning")
def test_their_numbers_are_ours_and_are_said():
    more = {"use_kl_loss": True, "kl_loss_coef": 0.1, "kl_loss_type": "low_var_kl", "entropy_coef": 0.01}
    checked = slime.HOST.checked(arguments(rollout_temperature=0.7, eps_clip=0.1, eps_clip_high=0.3, **more))
    found = checked.args
    assert (found.pg_temperature, found.pg_clip_eps_low, found.pg_clip_eps_high) == (0.7, 0.1, 0.3)
    assert (found.pg_kl_coef, found.pg_kl_estimator, found.pg_entropy_coef) == (0.1, "k3", 0.01)
    said = dict(checked.rows)["inherited"].split("; ")
    assert "--kl-loss-coef is --pg-kl-coef 0.1" in said
    assert "--kl-loss-type low_var_kl is --pg-kl-estimator k3" in said
    assert len(said) == 6


def test_an_unbiased_kl_is_the_weighted_estimator():
    more = {"use_kl_loss": True, "kl_loss_coef": 0.1, "use_unbiased_kl": True}
    assert slime.HOST.checked(arguments(kl_loss_type="k3", **more)).args.pg_kl_estimator == "k3_weighted"
    with pytest.raises(ArgumentError, match="--use-unbiased-kl with --kl-loss-type k2"):
        slime.HOST.checked(arguments(kl_loss_type="k2", **more))


def test_custom_terms_need_a_host_that_names_them():
    sft, teacher = "sft:ce,weight=0.1", "teacher:opd,on=rl"
    assert slime.HOST.checked(arguments(pg_term=[sft, teacher])).args.pg_term == [sft, teacher]
    assert miles.HOST.checked(arguments(pg_term=[teacher])).args.pg_term == [teacher]
    with pytest.raises(ArgumentError, match="--pg-term sft:ce: the batches of miles name no loss terms"):
        miles.HOST.checked(arguments(pg_term=[sft]))


def test_a_teacher_in_the_advantages_alone_stays_the_hosts():
    assert slime.HOST.checked(arguments(use_opd=True, opd_kl_coef=1.0)).args.pg_term is None


@pytest.mark.parametrize("host", [slime.HOST, miles.HOST])
def test_their_truncated_importance_sampling_is_ours(host):
    found = host.checked(arguments(use_tis=True, tis_clip=1.5, tis_clip_low=0.5))
    assert found.args.pg_correction == "tis,low=0.5,high=1.5"
    assert "--tis-clip is --pg-correction …,high=1.5" in dict(found.rows)["inherited"]
    assert host.checked(arguments(use_tis=True)).args.pg_correction == "tis,low=0.0,high=2.0"
    own = host.checked(arguments(use_tis=True, pg_correction="tis,high=3.0")).args
    assert own.pg_correction == "tis,high=3.0,low=0.0"
    assert host.checked(arguments()).args.pg_correction == "none"


@ANY_EPS
@pytest.mark.parametrize("host", [slime.HOST, miles.HOST])
def test_their_flags_select_the_objective(host):
    found = host.checked(arguments(advantage_estimator="gspo", eps_clip=4e-4, eps_clip_high=4e-4)).args
    assert (found.pg_objective, found.pg_clip_eps_low, found.pg_clip_eps_high) == ("gspo", 4e-4, 4e-4)
    found = host.checked(arguments(eps_clip_c=3.0)).args
    assert (found.pg_objective, found.pg_clip_eps_high) == ("dual_clip,cap=3.0", 0.28)
    own = {"advantage_estimator": "cispo", "pg_objective": "cispo,cap=1.2", "eps_clip_high": 0.2}
    assert host.checked(arguments(**own)).args.pg_objective == "cispo,cap=1.2"
    assert host.checked(arguments(allgather_cp=True)).args.pg_objective == "grpo"


def test_a_message_about_a_number_of_the_host_names_its_flag():
    with pytest.raises(ArgumentError, match=r"--eps-clip must be between 0 and 1 .*got 1\.5") as refused:
        slime.HOST.checked(arguments(eps_clip=1.5))
    assert "--pg-clip-eps-low" not in str(refused.value)
    with pytest.raises(ArgumentError, match=r"--pg-clip-eps-low must be between 0 and 1 .*got 1\.5"):
        slime.HOST.checked(arguments(eps_clip=0.2, pg_clip_eps_low=1.5))


def test_our_default_replaces_the_hosts():
    assert slime.HOST.checked(arguments(eps_clip_high=0.2, pg_clip_eps_high=0.28)).args.pg_clip_eps_high == 0.28
