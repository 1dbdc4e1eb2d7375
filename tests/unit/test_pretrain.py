"""`--docs-per-step` in pretrain(): what the dataset provider may return, and Megatron's own numbers."""

from argparse import Namespace
from functools import partial
from types import SimpleNamespace

import pytest

from megatron_pg import Documents, pretrain


@pytest.fixture
def session(monkeypatch):
    """A session whose step is a stub; `args` are what Megatron would have."""
    session = pretrain._Session(None, lambda text: None, None)
    session.step = SimpleNamespace(documents=None)
    session.args = Namespace(docs_per_step=8, seq_length=24, log_interval=2)
    monkeypatch.setattr(pretrain, "get_args", lambda: session.args)
    return session


def train(session, positions: int, documents_seen: int) -> None:
    """One step with so many positions, as the session hears of it."""
    position = SimpleNamespace(documents_seen=documents_seen, to_text=lambda: f"at {documents_seen}")
    session.step.documents = SimpleNamespace(position=position)
    plan = SimpleNamespace(num_positions=positions)
    session._keep(SimpleNamespace(plan=plan, documents=session.step.documents, forward_only=False))


def test_operations_are_counted_for_the_positions_of_the_steps(session):
    counted = partial(session.flops, lambda args, batch_size: batch_size * args.seq_length)
    logged = []

    def training_log(iteration, is_first_iteration=False):
        logged.append(counted(session.args, 64))

    assert counted(session.args, 64) == 64 * 24  # before any step of documents: Megatron's own
    session._log = lambda values: None
    log = partial(session.log, training_log)
    for iteration, positions in enumerate([100, 300, 50, 70], start=1):
        train(session, positions, documents_seen=10 * iteration)
        assert counted(session.args, 64) == positions  # the loop adds up every step
        log(iteration=iteration, is_first_iteration=iteration == 1)
    assert logged == [100, 200, 50, 60]  # the line, every second iteration, is about a mean step


def test_consumed_samples_and_the_position_go_into_the_arguments_of_the_checkpoint(session):
    session._log = lambda values: None
    log = partial(session.log, lambda iteration: None)
    train(session, 100, documents_seen=9)
    assert not hasattr(session.args, "megatron_pg_documents")  # not before the optimizer has moved
    log(iteration=1)
    assert session.args.consumed_train_samples == 9
    assert session.args.megatron_pg_documents == "at 9"


def test_the_provider_must_return_what_the_flag_asks_for(session):
    def provider(num_samples, vp_stage=None):
        return session.returned, None, None

    provider.is_distributed = True
    wrapped = session.datasets_provider(provider)
    assert wrapped.is_distributed  # Megatron asks the function
    session.returned = iter(())
    with pytest.raises(ValueError, match="--docs-per-step 8, and the dataset provider returned a tuple_iterator"):
        wrapped(None)
    session.args.docs_per_step = 0
    assert wrapped(None) == (session.returned, None, None)
    session.returned = Documents(begin=lambda position: iter(()))
    with pytest.raises(ValueError, match="returned Documents and --docs-per-step is 0"):
        wrapped(None)


def test_the_end_of_the_documents_saves_what_is_not_saved_and_other_exits_stay_exits(session, monkeypatch):
    machine = SimpleNamespace()
    monkeypatch.setattr(pretrain, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(pretrain.torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(SystemExit), session.until_documents_end():
        raise SystemExit(0)
    for iteration, loaded, interval, expected in [
        (7, 0, 2, True),
        (8, 0, 2, False),
        (7, 7, 2, False),
        (7, 0, None, True),
    ]:
        session.args = Namespace(save="folder", save_interval=interval, curr_iteration=iteration, iteration=loaded)
        session._end("farewell", session.args)
        assert machine.should_checkpoint_and_exit() == (expected, True, 0)
    session._end("farewell", Namespace(**vars(session.args) | {"save": None}))
    assert machine.should_checkpoint_and_exit() == (False, True, 0)
    with session.until_documents_end():
        raise SystemExit(0)
