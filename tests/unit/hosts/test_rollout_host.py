"""The wiring of slime and miles: launcher, hooks, and users' hooks before ours."""

import json
import sys
from pathlib import Path

import pytest
import rollout_hosts
import rollout_stand_in
from host_cases import Case

from megatron_pg.args import ArgumentError
from megatron_pg.hosts import miles, slime
from megatron_pg.hosts.rollout_host import _USERS

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
def test_a_misspelt_flag_is_refused_though_the_host_would_leave_it_unread(installed, host):
    with pytest.raises(ArgumentError, match=r"--loss-agregation is no flag .*did you mean --loss-aggregation"):
        launch(host, "--loss-agregation", "constant")


@pytest.mark.parametrize("host", HOSTS)
def test_the_launcher_refuses_before_anything_is_started(installed, host):
    with pytest.raises(ArgumentError, match=r"E5.*needs --loss-aggregation-divisor"):
        launch(host, "--loss-aggregation", "constant")


@pytest.mark.parametrize("host", HOSTS)
def test_without_a_script_the_launcher_says_how_it_is_used(installed, host):
    with pytest.raises(SystemExit, match=f"usage: python3 -m megatron_pg.{host} train.py"):
        HOSTS[host].HOST.main([])


@pytest.mark.parametrize("host", HOSTS)
def test_a_hook_of_the_users_is_called_before_ours(installed, host):
    calls = []
    sys.modules["users_own"] = type(sys)("users_own")
    sys.modules["users_own"].hook = lambda *given: calls.append(given)
    args = rollout_hosts.arguments(host, Case())
    setattr(args, _USERS, {"custom_megatron_before_log_prob_hook_path": "users_own.hook"})
    HOSTS[host].HOST.users_hook(args, "custom_megatron_before_log_prob_hook_path", 1, 2)
    HOSTS[host].HOST.users_hook(args, "custom_megatron_init_path", 3)
    assert calls == [(1, 2)]


def test_a_batch_that_miles_cuts_in_the_trainer_is_refused():
    with pytest.raises(ValueError, match="the rollout data have no micro_batch_indices"):
        miles._rollout(rollout_hosts.arguments("miles", Case()), {"tokens": []})
