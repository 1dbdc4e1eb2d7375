"""An optimizer step of slime or miles, around the host's own: what is logged, and what must have happened."""

from types import SimpleNamespace

import host_cases as hosts
import pytest

from megatron_pg.hosts.rollout import trainer
from megatron_pg.hosts.rollout.trainer import RolloutTrainer
from megatron_pg.hosts.startup import check
from megatron_pg.hosts.step import HostLossError
from megatron_pg.plan.settings import LossSettings

SETTINGS = LossSettings.from_args(check("host", {}, megatron={}).args)


@pytest.fixture
def run(monkeypatch):
    """Runs step 1 of the two of rollout 3; returns what the host returned, and what was logged."""
    config = SimpleNamespace(finalize_model_grads_func=lambda: None)
    monkeypatch.setattr(trainer, "get_model_config", lambda chunk: config)
    monkeypatch.setattr(trainer.parallel_state, "get_tensor_model_parallel_rank", lambda: 0)
    step = SimpleNamespace(finish=lambda reports: "the report")
    monkeypatch.setattr(RolloutTrainer, "_plan", lambda self, rollout, number: step)

    def run(*, moves: bool = True, finalizes: bool = True, returned: object = ({}, 0.5)) -> tuple:
        optimizer, scheduler, lines = SimpleNamespace(param_groups=[{"lr": 0.1}]), hosts.Scheduler(), []

        def train() -> object:
            if finalizes:
                config.finalize_model_grads_func()
            if moves:
                scheduler.step(increment=4)
                optimizer.param_groups[0]["lr"] = 0.2  # of the next step
            return returned

        log = SimpleNamespace(write=lambda *given, **named: lines.append((given, named)))
        given = SimpleNamespace(), 3, 1, [], [None], optimizer, scheduler, 2
        made = RolloutTrainer(SETTINGS, log, per_token=False)
        return made.run(SimpleNamespace(counts=[4, 4]), train, *given), lines

    return run


@pytest.mark.parametrize("moves", [True, False])
def test_a_step_is_logged_with_its_own_learning_rate_and_whether_the_optimizer_has_moved(run, moves):
    returned, lines = run(moves=moves)
    assert returned == ({}, 0.5)
    assert lines == [((3, 7, "the report"), {"grad_norm": 0.5, "learning_rate": 0.1, "skipped": not moves})]


@pytest.mark.parametrize("fault", [{"finalizes": False}, {"returned": None}, {"returned": (0.5,)}])
def test_a_trainer_that_ends_a_step_in_another_way_is_refused(run, fault):
    with pytest.raises(
        HostLossError, match=r"^train_one_step has not finalized gradients, or it returned (tuple|None)"
    ):
        run(**fault)
