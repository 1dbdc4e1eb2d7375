"""pretrain(): what may be handed to it, what a checkpoint and Ctrl-C say, Megatron's own numbers under
`--docs-per-step`, and where a step's metrics go.
"""

import contextlib
import itertools
import json
import re
import signal
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import threads
import torch
from torch.distributed import HashStore

from megatron_pg import Documents, StepLog
from megatron_pg.args import ArgumentError, ArgumentWarning, add_arguments, validate_args
from megatron_pg.metrics.reporting import CallbackError
from megatron_pg.plan.errors import StepPlanError
from megatron_pg.plan.settings import LossSettings
from megatron_pg.pretrain import documents, errors, run, startup
from megatron_pg.pretrain import log as run_log


@pytest.fixture
def session(monkeypatch):
    """A session whose step is a stub; `args` are what Megatron would have."""
    session = run._Run(None, lambda text: None, None)
    session.step = SimpleNamespace(documents=None, settings=None, state_dict=dict)
    session.args = Namespace(docs_per_step=8, seq_length=24, log_interval=2, train_iters=1, eval_iters=0)
    monkeypatch.setattr(run, "get_args", lambda: session.args)
    monkeypatch.setattr(errors, "gathered_texts", lambda text, group, error: [text])
    return session


def train(session, positions: int, documents_seen: int) -> None:
    """One step with so many positions, as the session hears of it."""
    position = SimpleNamespace(documents_seen=documents_seen, to_text=lambda: f"at {documents_seen}")
    session.step.documents = SimpleNamespace(position=position)
    plan = SimpleNamespace(num_positions=positions)
    session.keep(SimpleNamespace(plan=plan, documents=session.step.documents, forward_only=False))


def test_operations_are_counted_for_the_positions_of_the_steps(session):
    counted = partial(session.count_operations, lambda args, batch_size: batch_size * args.seq_length)
    logged = []

    def training_log(iteration, is_first_iteration=False):
        logged.append(counted(session.args, 64))

    assert counted(session.args, 64) == 64 * 24  # before any step of documents: Megatron's own
    session.log.write = lambda values, settings, args: None
    log = partial(session.training_log, training_log)
    for iteration, positions in enumerate([100, 300, 50, 70], start=1):
        train(session, positions, documents_seen=10 * iteration)
        assert counted(session.args, 64) == positions  # the loop adds up every step
        log(iteration=iteration, is_first_iteration=iteration == 1)
    assert logged == [100, 200, 50, 60]  # the line, every second iteration, is about a mean step


@pytest.mark.parametrize("loaded", [0, 50])
def test_the_weights_of_a_step_have_seen_megatrons_iteration(session, loaded):
    """From the first step after a checkpoint on; an evaluation has no ages."""
    seen = []
    session.step.forward_backward = lambda function, **call: seen.append(call["weight_version"])
    run_step = session.forward_backward(lambda: print)
    for session.args.curr_iteration in (loaded, loaded + 1):
        run_step(forward_only=False)
    run_step(forward_only=True)
    assert seen == [loaded, loaded + 1, None]


def test_consumed_samples_and_the_position_go_into_the_arguments_of_the_checkpoint(session):
    session.log.write = lambda values, settings, args: None
    log = partial(session.training_log, lambda iteration: None)
    train(session, 100, documents_seen=9)
    assert not hasattr(session.args, "megatron_pg_documents")  # not before the optimizer has moved
    log(iteration=1)
    assert session.args.consumed_train_samples == 9
    assert session.args.megatron_pg_documents == "at 9"


def test_the_entropy_coefficient_goes_through_the_arguments_of_the_checkpoint(session, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    session.log.write = lambda values, settings, args: None
    state, loaded = {"entropy_coef": 0.1 + 0.2, "entropy": 1 / 3}, []
    session.step = SimpleNamespace(documents=None, settings=None, state_dict=lambda: state)
    session.step.load_state_dict = loaded.append
    session.args = saved = arguments("--pg-entropy-target", "2,step=0.1")
    saved.log_interval = 2
    with pytest.warns(ArgumentWarning, match="--pg-entropy-target: None, now 2,step=0"):
        session.check_checkpoint(lambda args: None, arguments())  # of a constant coefficient: nothing to load
    partial(session.training_log, lambda iteration: None)(iteration=1)
    session.args = arguments("--pg-entropy-target", "2,step=0.1")
    session.check_checkpoint(lambda args: None, saved)
    assert loaded == [state]
    session.args = arguments("--pg-entropy-coef", "0.1")
    with pytest.warns(ArgumentWarning, match=r"--pg-entropy-target: 2,step=0\.1, now None"):
        session.check_checkpoint(lambda args: None, saved)
    assert loaded == [state]


def test_an_evaluation_between_two_steps_is_not_logged_as_one(session):
    train(session, 100, documents_seen=9)
    trained = session.log.report
    count = partial(session.count_operations, lambda args, batch_size: batch_size * args.seq_length)
    plan = SimpleNamespace(num_positions=50)
    session.keep(SimpleNamespace(plan=plan, documents=None, forward_only=True))
    assert session.log.report is trained
    assert count(session.args, 64) == 100


@pytest.mark.parametrize("error", [None, StepPlanError("a mistake"), SystemExit(1), KeyboardInterrupt()])
def test_megatron_is_left_as_it_was_however_the_run_ends(monkeypatch, error):
    """Or a second `pretrain` of the process would log every step twice, to the writers of the first, too."""
    places = [
        (run.training, ("get_forward_backward_func", "training_log", "num_floating_point_operations")),
        (run.checkpointing, ("check_checkpoint_args",)),
        (run.dataset_utils, ("compile_helpers",)),
    ]
    named = [(module, name, getattr(module, name)) for module, names in places for name in names]

    def train(**keywords: object) -> None:
        assert all(getattr(module, name) is not original for module, name, original in named)
        if error is not None:
            raise error

    def provider(num_samples):
        return iter(()), None, None

    provider.is_distributed = True
    monkeypatch.setattr(run.training, "pretrain", train)
    monkeypatch.setattr(run, "_arguments_of_release", lambda provider, defaults: {})
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back: what is shown once replaces it
    before = signal.getsignal(signal.SIGINT)
    try:
        with contextlib.nullcontext() if error is None else pytest.raises((type(error), SystemExit)):
            run.pretrain(provider, provider, None, say=lambda text: None)
    finally:
        signal.signal(signal.SIGINT, before)
    assert [getattr(module, name) for module, name, _ in named] == [original for *_, original in named]


THREE, NOT_ONE = r"expected \(train, valid, test\)\. Return \(training", "as training data, which is not an iterator"
EVALUATED = {"eval_iters": 2, "full_validation": False}
REFUSED = [  # what the provider returns, --docs-per-step, and what is wrong
    (itertools.count(), 0, f"a count, {THREE}"),  # not drained
    (None, 0, f"a NoneType, {THREE}"),
    ((None, None), 0, f"a tuple, {THREE}"),
    (object(), 0, f"a object, {THREE}"),
    (([1, 2], None, None), 0, f"a list {NOT_ONE}"),
    ((range(3), None, None), 0, f"a range {NOT_ONE}"),
    (("data", None, None), 0, f"a str {NOT_ONE}"),
    ((None, None, None), 0, "None for training data, but --train-iters is 5"),
    ((iter(()), None, None), 8, "a tuple_iterator for training, but --docs-per-step is 8"),
    ((Documents(begin=lambda position: iter(())), None, None), 0, "Documents, but --docs-per-step is 0"),
    ((iter(()), None, None), 0, "a NoneType as validation data, but --eval-iters is 2"),
    ((iter(()), [1, 2], None), 0, "a list as validation data, but --eval-iters is 2"),
]


@pytest.mark.parametrize(("returned", "documents", "wrong"), REFUSED)
def test_a_provider_that_returns_something_else_is_refused(session, returned, documents, wrong):
    session.args = Namespace(docs_per_step=documents, train_iters=5, skip_train=False, **EVALUATED)
    with pytest.raises(ValueError, match=f"dataset provider returned {wrong}"):
        session.datasets_provider(lambda num_samples: returned)(None)


@pytest.mark.parametrize("train", [iter(()), [iter(())], None])  # a list: one per virtual stage
def test_training_data_are_iterators_or_none_where_nothing_is_trained(session, train):
    def provider(num_samples, vp_stage=None):
        return train, None, None

    provider.is_distributed = True
    session.args = Namespace(docs_per_step=0, train_iters=5, skip_train=True, eval_iters=0)
    wrapped = session.datasets_provider(provider)
    assert wrapped.is_distributed  # Megatron asks the function
    assert wrapped(None) == (train, None, None)


@pytest.mark.parametrize("valid", [iter(()), [iter(())]])
def test_validation_data_are_iterators(session, valid):
    session.args = Namespace(docs_per_step=0, train_iters=5, skip_train=False, **EVALUATED)
    assert session.datasets_provider(lambda num_samples: (iter(()), valid, None))(None)[1] is valid


def told(build: Callable[[int], object]) -> dict[int, Exception]:
    """The error of each of three ranks."""
    errors = {}

    def work(rank: int) -> None:
        try:
            build(rank)
        except Exception as error:
            errors[rank] = error

    threads.run(3, work)
    return errors


def fails_on_rank_1(rank: int, *positional: object, **keywords: object) -> tuple:
    if rank == 1:
        raise OSError("no such shard")
    return iter(()), None, None


def test_a_provider_that_fails_on_one_rank_stops_every_rank_with_its_error(monkeypatch):
    args = Namespace(docs_per_step=0, train_iters=1, skip_train=False, eval_iters=0)
    args.virtual_pipeline_model_parallel_size = None
    monkeypatch.setattr(run, "get_args", lambda: args)

    def data(rank: int) -> object:
        return run._Run(None, print, None).datasets_provider(partial(fails_on_rank_1, rank))(None)

    def model(rank: int) -> object:
        session = run._Run(None, print, None)
        session.step = SimpleNamespace(attach=lambda model: model)
        return session.build_model(partial(fails_on_rank_1, rank), pre_process=True)

    for build in (data, model):
        errors = told(build)
        assert isinstance(errors[1], OSError)
        for rank in (0, 2):
            assert errors[rank].violations == [("E64", "rank 1: OSError: no such shard")]


def test_ranks_compare_their_errors_only_after_the_last_virtual_stage(monkeypatch):
    """Rank 1 builds its first stage; rank 0's waits in Megatron until rank 1 builds its last."""
    monkeypatch.setattr(run, "get_args", lambda: Namespace(virtual_pipeline_model_parallel_size=2))
    compared = []

    def compare(error: Exception | None, rule: str) -> None:
        compared.append(error)
        if error is not None:
            raise error

    monkeypatch.setattr(errors, "raise_on_every_rank", compare)
    session = run._Run(None, print, None)
    session.step = SimpleNamespace(attach=lambda model: model)
    for stage, expected in ((0, 0), (1, 1)):
        session.build_model(lambda **given: SimpleNamespace(post_process=False), vp_stage=stage)
        assert len(compared) == expected

    def fails(**given: object) -> None:
        raise OSError("no such shard")

    with pytest.raises(OSError, match="no such shard"):
        session.build_model(fails, vp_stage=0)
    assert isinstance(compared[-1], OSError)


def arguments(*flags: str) -> Namespace:
    """As Megatron has them after our validation, in a fresh job."""
    args = add_arguments(ArgumentParser()).parse_args(flags)
    return validate_args(Namespace(**vars(args), calculate_per_token_loss=False))


@pytest.mark.parametrize(
    ("saved", "now", "changed"),
    [
        ([], ["--pg-metrics", "none", "--pg-kernel", "torch"], None),
        (["--loss-aggregation", "prompt_mean"], [], "--loss-aggregation: prompt_mean, now sample_mean"),
        ([], ["--pg-temperature", "2"], "--pg-temperature: 1.0, now 2.0"),
        (["--docs-per-step", "64"], ["--docs-per-step", "32"], "--docs-per-step: 64, now 32"),
        (None, ["--pg-objective", "reinforce"], None),
    ],
)
def test_a_resumed_run_says_what_the_checkpoint_was_trained_with(session, monkeypatch, saved, now, changed):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    session.args = arguments(*now)
    said = contextlib.nullcontext() if changed is None else pytest.warns(ArgumentWarning, match=re.escape(changed))
    with said:
        session.check_checkpoint(lambda args: None, Namespace() if saved is None else arguments(*saved))


def test_a_position_in_documents_is_not_lost_by_a_flag_that_is_missing(session, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 0)
    saved = Namespace(**vars(arguments("--docs-per-step", "64")), megatron_pg_documents="at 128")
    session.args = arguments()
    message = r"E62.*trained with --docs-per-step 64 and contains the position.*-drop-position"
    with pytest.raises(ArgumentError, match=message):
        session.check_checkpoint(lambda args: None, saved)
    session.args = arguments("--docs-per-step-drop-position")
    with pytest.warns(ArgumentWarning, match="--docs-per-step: 64, now 0"):
        session.check_checkpoint(lambda args: None, saved)


def test_megatrons_own_order_is_taken_and_a_forward_step_is_refused():
    def provider():
        pass

    provider.is_distributed = True
    named = dict.fromkeys(("train_valid_test_dataset_provider", "model_provider", "forward_step_func"), provider)
    for given, keywords in (((provider, provider, 1, provider), {}), ((), named | {"model_type": 1})):
        with pytest.raises(ValueError, match="forward_step_func has no effect here"):
            run.pretrain(*given, **keywords, args_defaults={})
    with pytest.raises(ValueError, match="process_non_loss_data_func without non_loss_data_func makes Megatron run"):
        run.pretrain(provider, provider, 1, process_non_loss_data_func=provider)
    del provider.is_distributed
    with pytest.raises(ValueError, match="the dataset provider is not marked as distributed"):
        run.pretrain(provider, provider, 1)


def test_a_running_jobs_banner_names_the_kernel_in_force():
    said = []

    def start(rank: int) -> None:
        startup.start(arguments(), said.append, lambda: None)

    threads.run(2, start)
    assert len(said) == 1
    assert re.search(r"kernel +(torch|triton)  \(--pg-kernel\)", said[0])


def test_ranks_compare_arguments_of_any_length():
    given = {f"argument_{i}": "Σ" * 80 for i in range(82)}

    def compare(rank: int) -> None:
        with pytest.raises(ArgumentError, match="ranks disagree on last: rank 0 has 0, rank 1 has 1"):
            startup._compare_ranks(given | {"last": f"{rank}"}, None, None)

    threads.run(2, compare)


def test_ranks_agree_on_the_head_in_an_exchange_that_they_make_anyway(monkeypatch):
    """It had its own collective."""
    calls, gather = [], torch.distributed.all_gather
    counted = lambda *given, **named: calls.append(1) or gather(*given, **named)  # noqa: E731
    monkeypatch.setattr(torch.distributed, "all_gather", counted)
    numbers = []
    for head in ([], ["--pg-fused-head", "forward"], ["--pg-fused-head"]):
        threads.run(2, lambda rank, head=head: startup.start(arguments(*head), lambda text: None, lambda: None))
        numbers.append(len(calls))
        calls.clear()
    assert numbers == [numbers[0]] * 3


def test_ranks_whose_gpus_differ_start_with_one_mode_of_the_fused_head(monkeypatch):
    said, from_args = [], startup.LossSettings.from_args

    def on_some_gpu(args: Namespace) -> LossSettings:
        mode = ("scaled_exp", "forward")[torch.distributed.get_rank()]
        return replace(from_args(args), head_mode=mode, head_choice=f"auto: {mode}")

    monkeypatch.setattr(startup.LossSettings, "from_args", on_some_gpu)
    found = threads.run(2, lambda rank: startup.start(arguments("--pg-fused-head"), said.append, lambda: None))
    assert [settings.head_mode for settings in found] == ["forward", "forward"]
    assert "(--pg-fused-head auto: forward because of GPUs that differ)" in said[0]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"train_iters": 8, "lr_warmup_iters": 10}, "--lr-warmup-iters 10 is not less than .* schedule, 8"),
        ({"train_iters": 8, "lr_warmup_iters": 8}, "--lr-warmup-iters 8 is not less than .* schedule, 8"),
        ({"train_iters": 99, "lr_decay_iters": 8, "lr_warmup_iters": 8}, "--lr-warmup-iters 8 .* schedule, 8"),
        ({"train_samples": 64, "lr_warmup_samples": 65}, "--lr-warmup-samples 65 is not less than .* schedule, 64"),
        ({"train_iters": 8, "lr_warmup_fraction": 1.0}, "--lr-warmup-fraction 1.0 is not less than .* schedule, 1"),
        ({"train_iters": 8, "lr_decay_iters": 11, "lr_warmup_iters": 10}, None),
        ({"train_iters": 8, "lr_warmup_iters": 7}, None),
        ({"train_iters": 8, "lr_warmup_fraction": 0.5, "lr_warmup_iters": 0}, None),
        ({"train_iters": 8, "lr_warmup_iters": 0, "lr_warmup_samples": 99}, None),
    ],
)
def test_a_warm_up_that_is_not_shorter_than_the_schedule_is_refused_by_name_on_every_rank(given, message):
    """Megatron ends such a run in a bare assert."""

    def start(rank: int) -> str | None:
        try:
            startup.start(Namespace(**vars(arguments()) | given), lambda text: None, lambda: None)
        except ArgumentError as error:
            return str(error)
        return None

    for said in threads.run(2, start):
        assert said is None if message is None else re.search(rf"\[E66\] {message}\. Shorten", said)


@pytest.mark.parametrize(
    ("folder", "hint"), [(None, "nothing was saved"), ("ck", "resume from the last checkpoint with --load ck")]
)
def test_ctrl_c_is_one_line_and_exit_code_130(session, folder, hint):
    said, session.log.last_iteration, session._save = [], 17, folder
    session._say = said.append
    before = signal.getsignal(signal.SIGINT)
    try:
        with pytest.raises(SystemExit) as end, session.to_its_end():
            raise KeyboardInterrupt
    finally:
        signal.signal(signal.SIGINT, before)
    assert end.value.code == 130
    assert said == [f"interrupted after step 17; {hint}"]


def test_an_error_that_every_rank_has_is_shown_by_rank_0_without_its_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", file=sys.stderr))
    error = ArgumentError([("E1", "a rule")])
    monkeypatch.setenv("RANK", "1")
    assert errors.shown_once(error) is error  # without a process group no other rank is known to show it
    store = HashStore()
    store.set(errors._SHOWN, "")
    with monkeypatch.context() as patch:
        patch.setattr(errors, "_store", lambda: store)
        assert errors.shown_once(error).code == 1
    monkeypatch.setenv("RANK", "0")
    assert errors.shown_once(error) is error
    sys.excepthook(ArgumentError, error, None)
    assert capsys.readouterr().err == f"ArgumentError: {error}\n"
    sys.excepthook(ValueError, ValueError("another"), None)
    assert capsys.readouterr().err == "a traceback\n"


def test_the_others_leave_when_rank_0_has_shown_an_error_of_its_own(monkeypatch, capsys):
    store = HashStore()
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("a traceback", store.num_keys(), file=sys.stderr))
    monkeypatch.setattr(errors, "_store", lambda: store)
    monkeypatch.setenv("RANK", "0")
    error = OSError("no such shard")
    errors.report_when_shown(error)
    sys.excepthook(OSError, error, None)
    assert capsys.readouterr().err == "a traceback 0\n"
    monkeypatch.setenv("RANK", "1")
    assert errors.shown_once(ArgumentError([("E64", "rank 0: OSError: no such shard")])).code == 1  # at once
    assert store.num_keys() == 1


def test_the_end_of_the_documents_saves_what_is_not_saved_and_other_exits_stay_exits(session, monkeypatch):
    machine = SimpleNamespace()
    monkeypatch.setattr(documents, "get_rerun_state_machine", lambda: machine)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    with pytest.raises(SystemExit), session.to_its_end():
        raise SystemExit(0)
    saves = [(7, 0, 2, True), (8, 0, 2, False), (7, 7, 2, False), (7, 0, None, True)]
    for iteration, loaded, interval, expected in saves:
        session.args = Namespace(save="folder", save_interval=interval, curr_iteration=iteration, iteration=loaded)
        session.documents.end("farewell", session.args)
        assert machine.should_checkpoint_and_exit() == (expected, True, 0)
    session.documents.end("farewell", Namespace(**vars(session.args) | {"save": None}))
    assert machine.should_checkpoint_and_exit() == (False, True, 0)
    with session.to_its_end():
        raise SystemExit(0)


# --- where the metrics of a step go ---


@pytest.fixture
def logged(session, monkeypatch, tmp_path):
    """A function that logs one step and returns what the four places got; `session.on_step` is the callback."""
    board, wandb, said = {}, {}, []

    def log(on_step=None, *, rank=0, heard=None, iteration=1, arguments=(), **metrics):
        path = tmp_path / str(len(said)) / "metrics.jsonl"
        session = run._Run(on_step, lambda text: text.startswith("first step") or said.append(text), path)
        terms = SimpleNamespace(objective=SimpleNamespace(reported=("custom_metric",)))
        counted = SimpleNamespace(lacking=lambda values: {})
        session.step = SimpleNamespace(settings=SimpleNamespace(warns_of_mismatch=True, metrics=counted, terms=terms))
        session.log.objective = {"clip": "0.2"}
        plan = SimpleNamespace(num_samples=2, num_rollouts=2, num_prompts=None, num_tokens=9, terms={})
        session.log.report = SimpleNamespace(
            metrics={"pg_loss": -0.5, "custom_metric": 2.0} | metrics, nonfinite={}, plan=plan
        )
        args = Namespace(log_interval=1, tensorboard_log_interval=1, **dict(arguments))
        monkeypatch.setattr(torch.distributed, "get_rank", lambda: rank)
        monkeypatch.setattr(run_log, "all_gather_rows", lambda has_callback: has_callback | (heard is not None))
        told = lambda text, error: heard or (rank if error else None, text)  # noqa: E731
        monkeypatch.setattr(run_log, "text_of_failed", told)
        scalar = lambda name, value, step: board.update({name: (step, value)})  # noqa: E731
        monkeypatch.setattr(run_log, "get_tensorboard_writer", lambda: SimpleNamespace(add_scalar=scalar))
        monkeypatch.setattr(
            run_log, "get_wandb_writer", lambda: SimpleNamespace(log=lambda values, step: wandb.update(values))
        )
        session.log.open()
        try:
            values = {"iteration": iteration, "grad_norm": 1.5, "learning_rate": 0.1, "skipped_iter": 0}
            session.log.write(values, session.step.settings, args)
        finally:
            session.log.close()
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return SimpleNamespace(board=board, wandb=wandb, said=said, records=[json.loads(line) for line in lines])

    return log


def test_what_a_callback_returns_goes_where_the_metrics_go(logged):
    seen = []
    run = logged(lambda log: seen.append(log) or {"exact_match": 0.25})
    assert isinstance(seen[0], StepLog)
    assert (seen[0].iteration, seen[0].grad_norm, seen[0].objective) == (1, 1.5, {"clip": "0.2"})
    assert run.board == {"pg/pg_loss": (1, -0.5), "pg/custom_metric": (1, 2.0), "pg/exact_match": (1, 0.25)}
    assert run.wandb == {"pg/pg_loss": -0.5, "pg/custom_metric": 2.0, "pg/exact_match": 0.25}
    assert run.said == ["pg      1 | pg_loss -0.5 | grad_norm +1.5 | custom_metric +2 | exact_match +0.25"]
    (record,) = run.records
    assert (record["pg_loss"], record["exact_match"], record["objective"]) == (-0.5, 0.25, {"clip": "0.2"})


def test_a_gradient_norm_that_megatron_fsdp_does_not_compute_is_none(logged):
    for clip_grad, is_sharded, norm in ((0.0, True, None), (1.0, True, 1.5), (0.0, False, 1.5)):
        run = logged(arguments={"clip_grad": clip_grad, "use_megatron_fsdp": is_sharded})
        assert run.records[-1]["grad_norm"] == norm
        assert ("grad_norm" in run.said[-1]) == (norm is not None)


def test_a_callback_that_returns_nothing_leaves_the_console_line(logged):
    for on_step in (None, lambda log: None):
        assert logged(on_step).said[-1] == "pg      1 | pg_loss -0.5 | grad_norm +1.5 | custom_metric +2"


def test_a_rank_without_a_callback_writes_what_that_of_rank_0_returned(logged):
    run = logged(rank=1, heard=(None, json.dumps({"exact_match": 0.25})))  # TensorBoard and W&B are on the last rank
    assert run.wandb["pg/exact_match"] == 0.25
    assert (run.said, run.records) == ([], [])


@pytest.mark.parametrize("returned", [{"nonfinite": 3.0}, {"a": 10**400}, {"a": torch.tensor(1j)}])
def test_values_that_no_log_can_hold_are_an_error_that_reaches_every_rank(logged, returned):
    """Rank 0 raises only after it has sent the error: what it sends is what the others raise."""
    with pytest.raises(CallbackError, match=r"^on_step returned "):
        logged(lambda log: returned)


def test_a_mistake_of_a_callback_stops_every_rank(logged):
    with pytest.raises(CallbackError, match="on_step returned 'grad_norm', which is a metric of megatron_pg"):
        logged(lambda log: {"grad_norm": 1.0})
    with pytest.raises(CallbackError, match="of rank 0"):
        logged(rank=1, heard=(0, "of rank 0"))


@pytest.mark.parametrize(("failing", "without"), [(0, None), (1, None), (0, 2), (1, 0)])
def test_an_error_in_the_callback_of_one_rank_stops_every_rank(failing, without, monkeypatch):
    """The other ranks waited for rank 0's values until a timeout, or trained on until the launcher ended them."""

    def on_step(log):
        if torch.distributed.get_rank() == failing:
            raise OSError("disk full")

    def log(rank):
        run = run_log.RunLog(None if rank == without else on_step, print, None)
        run._begin(first, None)
        return run._additions(first, {})

    monkeypatch.setattr(run_log.Console, "begin", lambda *_: None)
    first = SimpleNamespace(iteration=1, report=None)
    errors = told(log)
    assert isinstance(errors.pop(failing), OSError)
    for error in errors.values():
        assert isinstance(error, CallbackError)
        assert str(error) == f"on_step raised an error on rank {failing}: OSError: disk full"
    assert len(errors) == 2


def test_a_red_flag_is_explained_once_beside_the_line(logged):
    said = logged(ess=0.25).said
    assert said[0] == "pg      1 | pg_loss -0.5 | ess +0.25! | grad_norm +1.5 | custom_metric +2"
    assert said[1].startswith("red flag: ess 0.25 is < 0.5: few tokens")
