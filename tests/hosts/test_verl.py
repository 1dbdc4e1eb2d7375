"""verl: its worker with our engine on two real ranks, from its wheel; and inherited and refused options without it."""

import math
import os
import re
import sys
from pathlib import Path
from types import ModuleType

import host_runs
import launches
import pytest
import torch
import verl_configs
from host_cases import inherited_flags, refused_flags
from host_runs import LIMIT
from processes import ROOT, environment

from megatron_pg.args import ArgumentError
from megatron_pg.hosts.verl import options as verl_options
from megatron_pg.hosts.verl.install import install
from megatron_pg.hosts.verl.options import checked
from megatron_pg.hosts.verl.samples import samples_of

FOLDER = Path(os.environ.get("VERL", ROOT / ".venv" / "verl-0.9.1"))  # the Makefile installs it
LAYOUTS = ("dp2", "cp2", "pp2", "tp2", "tp2, whole sequences")
of_gspo = pytest.mark.filterwarnings("ignore::megatron_pg.ArgumentWarning")  # about gspo's clip
needs_verl = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs verl 0.9.1: make .venv/verl-0.9.1, or VERL=")


@launches.launch
def on_ranks(folder, full):
    """What two processes found."""
    if not FOLDER.is_dir():
        return None
    path = environment()["PYTHONPATH"] + os.pathsep + str(FOLDER)  # last: its wheels have a folder `tests` too
    return host_runs.figures(folder, "verl_ranks", full=full, PYTHONPATH=path, TRITON_INTERPRET="1")


def figures(on_ranks, kind: str, name: str) -> list[float]:
    found = [each[name] for layout in LAYOUTS for each in on_ranks[layout][kind].values()]
    assert found
    return found


@needs_verl
@pytest.mark.proof("Hosts: verl's worker with our engine, gradients of every step on 2 real ranks equal plain loops")
def test_every_steps_gradients_equal_the_oracles(on_ranks, full, evidence):
    errors = figures(on_ranks, "cases", "gradient") + [on_ranks[layout]["filled"] for layout in LAYOUTS]
    assert len(errors) == len(LAYOUTS) * ((112 if full else 3) + 1) + (4 if full else 0)
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
@pytest.mark.proof(
    "Hosts: verl's worker with our engine, metrics in metrics.jsonl and in verl's log equal the oracle's"
)
def test_metrics_equal_the_oracles(on_ranks, evidence):
    errors = figures(on_ranks, "cases", "metrics")
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
@pytest.mark.proof("Hosts: verl's own configuration in its engine and in ours, without our options: the same gradients")
def test_verls_own_loss_beside_ours_makes_no_jump(on_ranks, evidence):
    errors = figures(on_ranks, "compared", "gradient") + figures(on_ranks, "compared", "loss")
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
@pytest.mark.proof("Hosts: verl's critic with our engine, gradients and metrics of every step equal plain loops")
def test_a_critics_gradients_and_metrics_equal_the_oracles(on_ranks, full, evidence):
    errors = figures(on_ranks, "critics", "gradient") + figures(on_ranks, "critics", "metrics")
    assert len(errors) >= 2 * len(LAYOUTS) * (14 if full else 1)
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
@pytest.mark.proof("Hosts: verl's own critic and ours, without our options: the same gradients")
def test_verls_own_critic_beside_ours_makes_no_jump(on_ranks, evidence):
    errors = [error for layout in LAYOUTS for error in on_ranks[layout]["critics compared"]]
    assert len(errors) >= len(LAYOUTS) - 1
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
def test_verls_count_of_tokens_loses_some_under_context_parallelism_and_ours_none(on_ranks):
    floors = {layout: on_ranks[layout]["floor"] for layout in LAYOUTS if "floor" in on_ranks[layout]}
    assert floors.pop("cp2") > 1e-3  # ours under the same flag: the cases above
    assert max(floors.values()) < LIMIT


@needs_verl
@pytest.mark.proof("Hosts: verl's passes before training by our kernel and head, log-probabilities and entropies")
def test_log_probability_passes_equal_the_oracles(on_ranks, full, evidence):
    errors = [each for layout in LAYOUTS for each in on_ranks[layout]["passes"]]
    assert len(errors) == len(LAYOUTS) * (6 if full else 3)
    evidence(cases=len(errors), worst=max(errors), tolerance=LIMIT)


@needs_verl
def test_a_batch_that_cannot_be_trained_is_refused_on_every_rank(on_ranks):
    refused = on_ranks["refused"]
    assert "prompt_mean does not allow several mini-batches" in refused["several mini-batches"]
    assert "rollout_correction.rollout_is and pg_correction tis both weigh" in refused["rollout correction"]
    assert "verl trains with sft_loss" in refused["another loss"]
    assert "non-finite loss at rank 0, sample p0/0" in refused["not finite"]
    assert "ray" in on_ranks["absent"]


@needs_verl
def test_verls_own_configuration_is_read_as_its_trainer_composes_it(on_ranks):
    assert on_ranks["configured"] == {
        "aggregation": ["constant", 4096],
        "objective": ["dual_clip", 0.28],
        "correction": "tis",
        "kl_coef": 0.001,
    }


@needs_verl
def test_steps_after_the_checkpoint_are_superseded(on_ranks):
    assert on_ranks["resumed"] == [[1, 2, 3, 4, 5, 6], [4, 5, 6]]


@needs_verl
@pytest.mark.parametrize("mode", verl_options.MODES)
def test_an_inherited_policy_loss_has_the_value_and_gradient_of_verls_own_function(on_ranks, mode):
    """In float64; verl adds 1e-8 to the lengths that it divides by."""
    assert max(on_ranks["modes"][mode]) < 1e-8


@needs_verl
def test_the_workers_configurations_are_checked_before_a_model_is_built(on_ranks):
    found = on_ranks["worker"]
    assert found["divisor"] == ["constant", 77.0]
    assert "critic.strategy=fsdp does not use megatron_pg's loss" in found["critic"]
    assert found["verl's own critic"] == []
    assert "actor.strategy=fsdp does not use megatron_pg's loss" in found["fsdp"]
    assert "distillation.enabled=True trains with another loss" in found["distillation"]


# --- what the configuration says ---


def arguments(ours=None, *, engine=None, mtp=False, has_actor=True, policy_loss=None, critic=None, **flags):
    theirs = verl_configs.policy_loss(**policy_loss or {"loss_mode": "vanilla"})
    given = verl_configs.engine_config(ours, **engine or {})
    config = verl_configs.actor(policy_loss=theirs, **flags) if has_actor else None
    config = config if critic is None else verl_configs.critic(**critic)
    return checked(given, verl_configs.model_config(mtp=mtp), config)


@of_gspo
@pytest.mark.parametrize(("given", "ours", "text"), inherited_flags("verl"))
def test_without_options_the_loss_is_what_verls_actor_says(given, ours, text):
    """An option takes the place of what verl has by default."""
    args, rows = arguments(**given)
    assert {name: getattr(args, name) for name in ours} == ours
    assert text in rows.get("inherited", "")


@of_gspo
@pytest.mark.parametrize(("given", "message"), refused_flags("verl"))
def test_what_contradicts_or_was_not_run_is_refused_by_name(given, message):
    with pytest.raises(ArgumentError) as refused:
        arguments(**given)
    assert message in str(refused.value)


# --- the batch ---


class Batch(dict):
    """What the adapter reads of a TensorDict."""

    def __len__(self) -> int:
        return len(self["input_ids"].unbind())


class Column(list):
    tolist = list.copy


def nested(*rows) -> torch.Tensor:
    return torch.nested.as_nested_tensor([torch.tensor(row) for row in rows], layout=torch.jagged)


def batch(**changes) -> Batch:
    known = {
        "input_ids": nested([1, 2, 3], [4, 5]),
        "response_mask": nested([1, 0], [0]),
        "old_log_probs": nested([-1.0, math.nan], [-1.0]),
        "advantages": nested([0.5, 0.0], [0.0]),
        "rm_scores": nested([0.0, 2.0], [0.0]),
        "uid": Column(["a", "pad1"]),
        "session_id": Column([3, 0]),
    }
    return Batch(known | changes)


def test_rows_become_samples_and_filling_rows_nothing():
    found = samples_of(batch())
    assert [*found] == [0]
    sample = found[0]
    assert (sample.prompt_id, sample.rollout_id, sample.reward) == ("a", "a/3", 2.0)
    assert sample.loss_mask.tolist() == [True, False]
    assert sample.tokens.tolist() == [1, 2, 3]


def test_a_row_that_trains_a_token_is_a_sample_with_any_uid_and_a_reward_is_the_sum_of_its_scores():
    found = samples_of(batch(uid=Column(["padlock", "pad1"]), rm_scores=nested([0.5, 2.0], [0.0])))
    assert {row: (sample.prompt_id, sample.reward) for row, sample in found.items()} == {0: ("padlock", 2.5)}


def test_without_sessions_every_row_is_a_rollout_and_a_masked_sample_counts():
    rows = batch(uid=Column(["a", "b"]))
    del rows["session_id"], rows["rm_scores"]
    found = samples_of(rows).values()
    assert [(each.prompt_id, each.rollout_id, each.reward) for each in found] == [("a", None, None), ("b", None, None)]


def test_padded_batches_are_refused():
    with pytest.raises(ValueError, match=re.escape("Use trainer.use_v1=True")):
        samples_of(batch(response_mask=torch.ones(2, 2)))


# --- another verl ---


def test_a_changed_function_is_named_with_verls_version(monkeypatch):
    class Changed:
        def __init__(self, model_config, engine_config, another):
            raise AssertionError("built")

    path = "verl.workers.engine.megatron.transformer_impl"
    parts = path.split(".")
    for n in range(1, len(parts) + 1):
        name = ".".join(parts[:n])
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules[path].MegatronEngineWithLMHead = Changed
    sys.modules["verl"].__version__ = "0.12.0"
    theirs = "(self, model_config, engine_config, another)"
    expected = f"__init__ takes {theirs}, not (self, model_config, engine_config, optimizer_config"
    with pytest.raises(ArgumentError, match=re.escape(expected)) as refused:
        install()
    assert "as in verl 0.9.1 (here is 0.12.0)" in str(refused.value)
