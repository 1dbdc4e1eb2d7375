"""What a host's options come to before training."""

import runpy
import sys
from importlib.util import find_spec
from types import ModuleType

import pytest

from megatron_pg.args import ArgumentError
from megatron_pg.hosts import startup
from megatron_pg.hosts.patching import check_signatures
from megatron_pg.hosts.startup import Inherited, check
from megatron_pg.plan.settings import LossSettings


def rows_of(given=(), **rest) -> dict[str, str]:
    checked = check("host", dict(given), megatron={}, **rest)
    return startup.rows_of("host", checked, "as it does", LossSettings.from_args(checked.args))


def test_what_is_not_given_has_its_default_and_the_loss_scaling_is_the_hosts():
    rows = rows_of()
    assert rows["pg_loss"].endswith("(--loss-aggregation sample_mean)")
    assert rows["host"] == "as it does"
    assert not {"Megatron", "layout", "inherited"} & rows.keys()


def test_megatrons_own_loop_is_ignored():
    """A host's parser fills these in, and its own loop reads none of them."""
    loop = {"dataloader_type": "single", "eval_iters": 3, "train_samples": 7, "sft": True, "rampup_batch_size": [1] * 3}
    check("host", {}, megatron=loop)
    with pytest.raises(ArgumentError, match=r"E53.*--defer-embedding-wgrad-compute"):
        check("host", {"fp32_lm_head": True}, megatron=loop | {"defer_embedding_wgrad_compute": True})


def test_multi_token_prediction_stays_the_hosts():
    """Its model makes those losses; ours would wait for them, and its metrics too."""
    args = check("host", {}, megatron={"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.2}).args
    settings = LossSettings.from_args(args)
    assert settings.mtp_depths == 0
    assert not [metric.name for metric in settings.metrics.metrics if metric.name.startswith("mtp")]
    with pytest.raises(ArgumentError, match="--pg-mtp-aggregation policy has no effect"):
        check("host", {"pg_mtp_aggregation": "policy"}, megatron={"mtp_num_layers": 1})


@pytest.mark.parametrize(
    ("ours", "theirs", "is_default", "value"),
    [(None, 0.3, False, 0.3), (0.3, 0.3, False, 0.3), (0.1, 0.2, True, 0.1), (None, 0.2, True, 0.2)],
)
def test_a_flag_of_the_host_replaces_ours(ours, theirs, is_default, value):
    flag = Inherited("--clip", "pg_clip_eps_low", theirs, is_default)
    args, rows = check("host", {"pg_clip_eps_low": ours}, megatron={}, answers=[flag])
    assert args.pg_clip_eps_low == value
    assert rows == ({"inherited": f"--clip is --pg-clip-eps-low {value}"} if value == theirs else {})


def test_two_flags_of_one_loss_that_differ_are_refused():
    flag = Inherited("--clip", "pg_clip_eps_low", 0.2)
    with pytest.raises(ArgumentError, match=r"--clip of host, 0.2, and --pg-clip-eps-low 0.1 contradict each other"):
        check("host", {"pg_clip_eps_low": 0.1}, megatron={}, answers=[flag])


def test_every_violation_is_in_one_error():
    given = {"pg_objektive": "grpo", "pg_dry_run": True, "docs_per_step": 3, "pg_temperature": -1.0}
    given |= {"pg_correction": "top_entropy", "loss_aggregation": "turn_mean", "pg_weight_denominator": "weights"}
    given |= {"pg_sequence_level": "turn", "pg_objective": "gspo"}
    with pytest.raises(ArgumentError) as refused:
        check("host", given, megatron={}, answers=["their flag cannot be combined with this loss. Remove it."])
    text = str(refused.value)
    for part in (
        "pg_objektive is not an argument of megatron_pg. Did you mean pg_objective?",
        "their flag cannot",
        "--pg-dry-run ends",
        "--docs-per-step 3 sets the size of steps",
        "--pg-correction top_entropy reads old_entropies, which the batches of host",
        "--loss-aggregation turn_mean reads turns, which the batches of host do not contain. Remove it.",
        "--pg-sequence-level turn reads turns, which the batches of host do not contain. Remove it.",
        "--pg-weight-denominator weights reads token_weights, which the batches of host",
        "--pg-temperature",
    ):
        assert part in text


@pytest.mark.parametrize("given", [{}, {"loss_aggregation": "constant", "loss_aggregation_divisor": 8.0}])
def test_the_hosts_per_token_flag_decides_the_default_alone(given):
    """It says how host and Megatron divide; under Megatron's own loop it would contradict another aggregation."""
    checked = check("host", given, megatron={"calculate_per_token_loss": True})
    assert checked.args.loss_aggregation == given.get("loss_aggregation", "token_mean")
    assert [*checked.rows] == (["per-token flag"] if given else [])


@pytest.mark.parametrize("name", ["slime", "nemo_rl"])
def test_a_launcher_without_its_host_says_so_in_a_message(name, tmp_path, monkeypatch):
    """An exit with a text prints it, without a traceback."""
    (tmp_path / "train.py").write_text("", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, "train.py"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(find_spec(f"megatron_pg.{name}").origin, run_name="__main__")
    assert f"does not exist (No module named '{name}" in end.value.code


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("some_host:hook", r"some_host:hook takes \(args, batch, more\), not \(batch, args\) as in host 1"),
        ("some_host:other", r"some_host:other does not exist .* as in host 1"),
        ("no_such_host:hook", r"no_such_host:hook does not exist .* as in host 1"),
    ],
)
def test_a_host_that_has_changed_is_named(path, message, monkeypatch):
    module = ModuleType("some_host")
    module.hook = lambda args, batch, more=None: None
    monkeypatch.setitem(sys.modules, "some_host", module)
    assert check_signatures("host 1", ["some_host:older|some_host:hook(args, batch)"]) == "some_host:hook"
    with pytest.raises(ArgumentError, match=message):
        check_signatures("host 1", [f"{path}(batch, args)"])
