"""The mode of the fused head that the settings have where --pg-fused-head gives none."""

import dataclasses

import pytest
import torch
import triton
from namespaces import accepts, arguments

from megatron_pg.declarations.choices import HEAD_MODES
from megatron_pg.flags import compatibility
from megatron_pg.flags.banner import banner
from megatron_pg.kernels import device
from megatron_pg.kernels.checks import check_triton
from megatron_pg.kernels.triton.loss import path_on
from megatron_pg.plan.settings import LossSettings, agreed

KERNEL = "the GPU or dtype: scaled_exp needs bfloat16 on compute capability 9.0 with Triton 3.6 to 3.9"
SEQUENCES = "gspo", "gspo_token", "topr", "vespo", "gmpo"
FASTEST = "its speed; forward for micro-batches with sampling masks"
TEACHER = "teacher:topk_forward_kl"

pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.fixture
def hopper(monkeypatch):
    """The device of an H200, for the choice alone; a function that changes what it is."""

    def become(capability: tuple[int, int] = (9, 0), release: str = "3.6.0") -> None:
        monkeypatch.setattr(device, "_device", lambda: (torch.device("cuda", 0), "a GPU"))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
        monkeypatch.setattr(triton, "__version__", release)
        path_on.cache_clear()

    become()
    yield become
    path_on.cache_clear()


def settings_of(**given: object) -> LossSettings:
    args = arguments(**{"pg_fused_head": "auto", "params_dtype": torch.bfloat16} | given)
    accepts(args)
    return LossSettings.from_args(args)


def text_of(mode: str, why: str) -> str:
    return f"auto: {mode} because of {why}"


@pytest.mark.parametrize(
    ("given", "mode", "why"),
    [
        ({}, "scaled_exp", FASTEST),
        ({"pg_kernel": "triton", "fp32_lm_head_backward": "bf16"}, "scaled_exp", FASTEST),
        ({"pg_objective": "dual_clip,cap=3", "pg_correction": "tis,high=2"}, "scaled_exp", FASTEST),
        ({"pg_kl_coef": 0.1, "pg_kl_estimator": "k3", "pg_logit_softcap": 30.0}, "scaled_exp", FASTEST),
        ({"mtp_num_layers": 1, "tensor_model_parallel_size": 2, "hidden_size": 2888}, "scaled_exp", FASTEST),
        ({"pg_term": ["calm:entropy,on=rl,weight=0", "shown:ce,weight=0"]}, "scaled_exp", FASTEST),
        ({"pg_term": ["teacher:opd,on=rl"], "loss_scale": None, "hidden_size": None}, "scaled_exp", FASTEST),
        ({"pg_custom_objective_path": "user_package.turns:two"}, "scaled_exp", FASTEST),
        *(({"pg_objective": name}, "recompute", f"--pg-objective {name}") for name in SEQUENCES),
        ({"pg_correction": "opsm,high=0.1"}, "recompute", "--pg-correction opsm"),
        ({"pg_correction": "opsm_old,high=1"}, "recompute", "--pg-correction opsm_old"),
        ({"fp16": True}, "recompute", "--fp16"),
        ({"loss_scale": 128.0}, "recompute", "--loss-scale"),
        ({"pg_entropy_coef": 0.1}, "forward", "--pg-entropy-coef 0.1"),
        ({"pg_entropy_target": "0.2,step=0.1"}, "forward", "--pg-entropy-target 0.2"),
        ({"pg_metrics": "with_entropy"}, "forward", "--pg-metrics with_entropy"),
        ({"pg_term": ["calm:entropy,on=rl"]}, "forward", "--pg-term calm:entropy"),
        ({"pg_term": [f"{TEACHER},on=rl"]}, "forward", f"--pg-term {TEACHER}"),
        ({"pg_term": ["shown:ce"]}, "forward", "--pg-term shown:ce"),
        ({"fp32_lm_head_backward": "split"}, "forward", "--fp32-lm-head-backward split"),
        ({"pg_kernel": "torch"}, "forward", "--pg-kernel torch"),
        ({"use_megatron_fsdp": True}, "forward", "--use-megatron-fsdp"),
        ({"hidden_size": 2884}, "forward", "--hidden-size 2884"),
        ({"params_dtype": torch.float32}, "forward", KERNEL),
        ({"params_dtype": None}, "forward", KERNEL),
        # the first row that applies: a loss of sequences does not become one of tokens
        (
            {"pg_objective": "gspo", "pg_metrics": "with_entropy", "fp32_lm_head_backward": "split"},
            "recompute",
            "--pg-objective gspo",
        ),
        ({"fp16": True, "params_dtype": torch.float16}, "recompute", "--fp16"),
        ({"pg_kernel": "torch", "pg_entropy_coef": 0.1}, "forward", "--pg-entropy-coef 0.1"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_a_flag_without_a_mode_chooses_it_by_the_table(given, mode, why, monkeypatch):
    """The mode is one that the user could have given, and from there on it is the same settings."""
    monkeypatch.setattr(compatibility, "core_version", lambda: (0, 19, 2))  # the first with a fused head under FSDP
    found = settings_of(**given)
    assert (found.head_mode, found.head_choice) == (mode, text_of(mode, why))
    explicit = settings_of(**given, pg_fused_head=mode)
    assert explicit.head_choice is None
    same = {name: getattr(explicit, name) for name in ("head_choice", "arguments", "metrics", "terms")}  # new objects
    assert dataclasses.replace(found, **same) == explicit


def test_every_mode_is_one_of_the_flag():
    """So an explicit mode is used or refused, and nothing else chooses."""
    for mode in HEAD_MODES:
        assert settings_of(pg_fused_head=mode, pg_kernel="torch").head_mode == mode
    assert settings_of(pg_fused_head=None, pg_metrics="with_entropy").head_choice is None


@pytest.mark.parametrize(
    ("capability", "release"), [((8, 0), "3.6.0"), ((8, 9), "3.8.1"), ((10, 0), "3.6.0"), ((9, 0), "3.5.1")]
)
def test_other_gpus_and_releases_of_triton_take_forward(hopper, capability, release):
    hopper(capability, release)
    found = settings_of()
    assert (found.head_mode, found.head_choice) == ("forward", text_of("forward", KERNEL))
    assert settings_of(fp16=True).head_mode == "recompute"


def test_a_release_of_triton_that_was_tried_takes_scaled_exp(hopper):
    hopper((9, 0), "3.8.0")
    assert settings_of().head_mode == "scaled_exp"


def test_a_machine_without_a_gpu_takes_forward(monkeypatch):
    monkeypatch.setattr(device, "_device", lambda: (torch.device("cpu"), "no GPU"))
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    found = settings_of()
    assert (found.impl, found.head_mode, found.head_choice) == ("torch", "forward", text_of("forward", KERNEL))
    assert settings_of(pg_kernel="triton").head_mode == "forward"  # in Triton's interpreter
    assert settings_of(pg_objective="gspo").head_mode == "recompute"


def test_a_custom_objective_that_reads_whole_sequences_is_found_when_it_is_loaded(tmp_path, monkeypatch, hopper):
    body = "def mine(tokens, parameters):\n    return -tokens.sequence_ratios * tokens.advantages\n"
    (tmp_path / "head_objective.py").write_text(body)
    monkeypatch.syspath_prepend(tmp_path)
    given = {"pg_custom_objective_path": "head_objective:mine", "pg_metrics": "with_entropy"}
    found = settings_of(**given)
    assert (found.head_mode, found.head_choice) == ("recompute", text_of("recompute", "the custom objective"))


@pytest.mark.parametrize(
    ("given", "shown"),
    [
        ({}, "auto: scaled_exp because of its speed"),
        ({"fp16": True}, "auto: recompute because of --fp16)"),
        ({"pg_fused_head": "forward"}, "forward)"),
    ],
)
@pytest.mark.usefixtures("hopper")
def test_the_banner_of_a_process_that_trains_names_the_mode_and_why(given, shown):
    found, args = settings_of(**given), arguments(**{"pg_fused_head": "auto"} | given)
    accepts(args)
    assert f"(--pg-fused-head {shown}" in banner(found.in_force(args))


def test_ranks_whose_gpus_differ_agree_on_forward(hopper):
    chosen = settings_of()
    other = dataclasses.replace(chosen, head_mode="forward", head_choice=text_of("forward", KERNEL))

    def modes(*ranks: LossSettings) -> list[str | None]:
        return [agreed(rank, [each.head_mode for each in ranks]).head_mode for rank in ranks]

    assert modes(chosen, chosen, other) == ["forward"] * 3
    assert modes(chosen, chosen) == ["scaled_exp"] * 2
    assert modes(other, other) == ["forward"] * 2
    recompute = dataclasses.replace(chosen, head_mode="recompute")
    assert modes(recompute, recompute) == ["recompute"] * 2


def test_a_mode_that_was_not_chosen_by_auto_stays():
    for head in (None, *HEAD_MODES):
        given = settings_of(pg_fused_head=head, pg_kernel="torch")
        assert agreed(given, ["scaled_exp", "forward"]) is given


@pytest.mark.parametrize("given", [{}, {"pg_kernel": "triton"}, {"pg_fused_head": "scaled_exp"}])
def test_a_triton_that_does_not_compile_the_kernels_is_refused_unless_torch_is_chosen(hopper, given):
    hopper(release="3.3.1")  # the one of torch 2.7
    with pytest.raises(ValueError, match=r"--pg-kernel triton needs Triton 3\.4 .*, and this is 3\.3\.1\. .* torch\.$"):
        settings_of(**given)
    assert settings_of(pg_kernel="torch").impl == "torch"
    with pytest.raises(ValueError, match="impl='triton' needs Triton 3"):
        check_triton("impl='triton'")
    hopper(release="3.4.0")
    assert settings_of(**given).impl == "triton"
