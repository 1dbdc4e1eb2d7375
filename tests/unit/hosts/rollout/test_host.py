"""The wiring of slime and miles: launcher, hooks, and users' hooks before ours."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import rollout_hosts
import rollout_stand_in
from host_cases import Case

from megatron_pg import miles, slime
from megatron_pg.args import ArgumentError
from megatron_pg.hosts.rollout import trainer
from megatron_pg.hosts.rollout.host import _USERS
from megatron_pg.hosts.step import HostLossError

HOSTS = {"slime": slime, "miles": miles}
SCRIPT = """
import json, sys
from {host}.utils.arguments import parse_args
args = parse_args()
found = [args.loss_aggregation, args.loss_aggregation_divisor, args.custom_megatron_init_path, sys.argv[1:]]
from pathlib import Path
Path("found.json").write_text(json.dumps(found))
"""


@pytest.fixture
def installed(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(tmp_path)
    for host in HOSTS:
        rollout_stand_in.install(host)
        (tmp_path / f"{host}_train.py").write_text(SCRIPT.format(host=host), encoding="utf-8")


def launch(host: str, *words: str):
    script = f"{host}_train.py"
    HOSTS[host].HOST.main([script, *words])
    return json.loads(Path("found.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("host", HOSTS)
def test_the_launcher_adds_our_flags_to_the_scripts_own(installed, host):
    words = ["--loss-aggregation", "constant", "--loss-aggregation-divisor", "4096", "--their-flag", "3"]
    assert launch(host, *words) == ["constant", 4096.0, f"megatron_pg.{host}.init", words]


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        (
            "--loss-agregation",
            r"--loss-agregation is not a flag .*\. Did you mean --loss-aggregation",
        ),  # else left unread
        ("--loss-aggregation", r"E5.*needs a divisor, which has no default\. Give --loss-aggregation-divisor"),
    ],
)
def test_the_launcher_refuses_before_anything_is_started(installed, host, flag, message):
    with pytest.raises(ArgumentError, match=message):
        launch(host, flag, "constant")


@pytest.mark.parametrize("host", HOSTS)
def test_the_launcher_checks_the_critics_flags_too(installed, monkeypatch, host):
    of_ppo = rollout_hosts.arguments
    monkeypatch.setattr(rollout_hosts, "arguments", lambda *given, **more: of_ppo(*given, **more, value_clip=-1.0))
    launch(host)
    monkeypatch.setattr(
        rollout_hosts, "arguments", lambda *given, **more: of_ppo(*given, **more, value_clip=-1.0, use_critic=True)
    )
    with pytest.raises(ArgumentError, match=r"--value-clip is -1\.0\. It must be"):
        launch(host)


@pytest.mark.parametrize("host", HOSTS)
def test_without_a_script_the_launcher_says_how_it_is_used(installed, host):
    with pytest.raises(SystemExit, match=f"usage: python3 -m megatron_pg.{host} train.py"):
        HOSTS[host].HOST.main([])


@pytest.fixture
def actor(installed, monkeypatch):
    """The module of each host's actor, which builds a model without an output layer."""
    monkeypatch.setattr(trainer, "is_writer", lambda: False)
    monkeypatch.setattr(trainer.RolloutTrainer, "install", lambda self, model: None)
    modules = {host: sys.modules[f"{host}.backends.megatron_utils.actor"] for host in HOSTS}
    for host, module in modules.items():
        monkeypatch.setattr(HOSTS[host].HOST, "trainer", None)
        module.initialize_model_and_optimizer = lambda args, role: ("the model of", role)
    return modules


@pytest.mark.parametrize("host", HOSTS)
def test_the_users_init_is_called_too_and_the_users_hooks_stay(actor, host):
    calls = []
    sys.modules["users_own"] = type(sys)("users_own")
    sys.modules["users_own"].init = lambda *given: calls.append(given)
    hooks = {f"custom_megatron_before_{kind}_hook_path": "users_own.hook" for kind in ("log_prob", "train_step")}
    args = rollout_hosts.arguments(host, Case(), **hooks, **{_USERS: "users_own.init"})
    HOSTS[host].init(args)
    actor[host].initialize_model_and_optimizer(args, "actor")
    assert calls == [(args,)]
    assert hooks.items() <= vars(args).items()


@pytest.mark.parametrize("host", HOSTS)
def test_a_second_init_changes_nothing(actor, host):
    args, steps = rollout_hosts.arguments(host, Case()), sys.modules[f"{host}.backends.megatron_utils.model"]

    def begun() -> tuple:
        HOSTS[host].init(args)
        functions = actor[host].initialize_model_and_optimizer, steps.train_one_step
        functions[0](args, "actor")
        return dict(vars(args)), HOSTS[host].HOST.trainer, functions

    assert begun() == begun()


@pytest.mark.parametrize("host", HOSTS)
@pytest.mark.parametrize("role", ["actor", "critic"])
def test_the_role_of_a_process_is_known_where_its_model_is_built(actor, monkeypatch, tmp_path, host, role):
    given = Case(objective="value")
    of_host = HOSTS[host].HOST
    monkeypatch.setattr(trainer, "is_writer", lambda: True)
    args = rollout_hosts.arguments(host, given, pg_metrics_file=str(tmp_path / "run" / "metrics.jsonl"))
    losses = sys.modules[of_host.losses]
    theirs = losses.value_loss_function
    HOSTS[host].init(args)
    assert of_host.trainer is None
    built = actor[host].initialize_model_and_optimizer(args, role)
    of_host.trainer._log._file.close()
    assert built == ("the model of", role)
    assert of_host.trainer.settings.is_critic == (role == "critic")
    assert (losses.value_loss_function == theirs) == (role == "actor")
    assert of_host.trainer._log._file.path.name == {"actor": "metrics.jsonl", "critic": "metrics_critic.jsonl"}[role]


def test_releases_of_slime_have_their_logger_in_two_places(installed, monkeypatch):
    monkeypatch.setattr(trainer, "is_writer", lambda: False)
    slime.init(rollout_hosts.arguments("slime", Case()))
    assert slime.HOST._log == "slime.observability.logging_utils:log"
    moved = rollout_stand_in._module("slime.utils.logging_utils")  # as in v0.3.1
    moved.log = sys.modules["slime.observability.logging_utils"].log
    del sys.modules["slime.observability.logging_utils"].log
    slime.init(rollout_hosts.arguments("slime", Case()))
    assert slime.HOST._log == "slime.utils.logging_utils:log"
    del moved.log
    with pytest.raises(ArgumentError, match=r"slime\.observability\.logging_utils:log does not exist"):
        slime.init(rollout_hosts.arguments("slime", Case()))


@pytest.mark.parametrize("host", HOSTS)
def test_the_first_step_of_a_rollout_plans_the_data_of_its_iterators(actor, host):
    args, steps = rollout_hosts.arguments(host, Case()), sys.modules[f"{host}.backends.megatron_utils.model"]
    HOSTS[host].init(args)
    actor[host].initialize_model_and_optimizer(args, "actor")
    iterators = [SimpleNamespace(rollout_data={"tokens": []})]
    with pytest.raises(HostLossError, match=r"the rollout data have no response_lengths, .*, micro_batch_indices"):
        steps.train_one_step(args, 0, 0, iterators, [], None, None, num_microbatches=1, rollouts=1)
