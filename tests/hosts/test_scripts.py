"""Launch scripts and configurations of the hosts' repositories: the answer of the adapters' startup checks to each."""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import nemo_stand_in
import pytest
import rollout_hosts
import verl_configs
from host_cases import Case

from megatron_pg import ArgumentError, miles, slime
from megatron_pg.hosts.nemo_rl.flags import refused_of_policy
from megatron_pg.hosts.nemo_rl.loss import checked
from megatron_pg.hosts.verl import install, options

ACCEPTED = {"slime": 42, "miles": 31, "verl": 25, "nemo_rl": 148}  # at least
pytestmark = pytest.mark.filterwarnings("ignore::megatron_pg.ArgumentWarning")  # about gspo's clip


def scripts() -> Iterator[tuple[str, str, dict[str, Any], str]]:
    """Host, path in its repository, options and answer of every line of scripts.txt."""
    host = ""
    for line in (Path(__file__).parent / "scripts.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith("== "):
            host = line.split()[1]
        elif " | " in line:
            path, given, answer = (part.strip() for part in line.split("|"))
            found = re.findall(r"--([\w-]+)(?: (?!--)(\S+))?", given) or re.findall(r"(\S+)=(\S+)", given)
            yield host, path, {name: _value(text or "true") for name, text in found}, answer


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def of_rollouts(host: Any) -> Callable[[Mapping[str, Any]], object]:
    """The check of slime or miles, whose parsers derive some values."""

    def check(given: Mapping[str, Any]) -> object:
        flags = {name.replace("-", "_"): value for name, value in given.items()}
        name, off = host.name, dict.fromkeys(("pg_clip_eps_low", "pg_clip_eps_high", "loss_aggregation"))
        derived = {"eps_clip_high": flags.get("eps_clip", 0.2), "opd_kl_coef": 1.0}
        return host.checked(rollout_hosts.arguments(name, Case(), **off | derived | flags))

    return check


def of_verl(given: Mapping[str, Any]) -> object:
    """verl's checks: of the distillation's configuration, and of the actor with its engine."""
    actor, engine = {}, {}
    for name, value in given.items():
        section, _, field = name.rpartition(".")
        if section in ("actor.megatron", "model"):
            engine[field] = value
        elif section == "actor":
            actor[field] = value
    mode = given.get("actor.policy_loss.loss_mode", "vanilla")
    made = verl_configs.actor(**actor, policy_loss=verl_configs.policy_loss(mode))
    vars(made)[options.RESPONSE_LENGTH] = given.get("rollout.response_length")
    if "distillation.enabled" in given:
        install._convert_and_check(
            dict, {"_target_": "verl.DistillationConfig", "enabled": given["distillation.enabled"]}
        )
    model = verl_configs.model_config(mtp=given.get("model.mtp.enable", False))
    return options.checked(verl_configs.engine_config(**engine), model, made)


def of_nemo_rl(given: Mapping[str, Any]) -> object:
    """The launcher's check of the whole configuration; a name without a dot is of `loss_fn`."""
    config = nemo_stand_in.master_config(nemo_stand_in.Options(**{k: v for k, v in given.items() if "." not in k}))
    for name, value in given.items():
        place = name.split(".")
        if place[0] == "policy":
            config.policy.setdefault(place[1], {})[place[2]] = value
        elif len(place) > 1:
            setattr(config, place[0], {place[1]: value})
    return checked(config.loss_fn, [*refused_of_policy(config)])


CHECKS = {"slime": of_rollouts(slime.HOST), "miles": of_rollouts(miles.HOST), "verl": of_verl, "nemo_rl": of_nemo_rl}


@pytest.mark.parametrize("host", CHECKS)
def test_real_scripts_get_the_right_answer(host):
    wrong, num_accepted = [], 0
    for name, path, given, answer in scripts():
        if name != host:
            continue
        try:
            CHECKS[host](given)
            found = ["accepted"]
        except ArgumentError as error:
            found = [message for _, message in error.violations]
        num_accepted += answer == "accepted"
        if not any(message.startswith(answer) for message in found):
            wrong.append((path, answer, found))
    assert not wrong
    assert num_accepted >= ACCEPTED[host]
