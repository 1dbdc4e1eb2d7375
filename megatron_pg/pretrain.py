"""Megatron's own `pretrain()` with the policy-gradient step in it: the one module that imports megatron.training.

It calls Megatron by keyword, because the positional order changed between releases, and replaces a few names for the
length of the call: the forward-backward function that the loop fetches, the logging function, after which the step's
metrics are written, the parser of a call that knows no flags but Megatron's, and the build of the data-set helpers where
a wheel has them built. Under --docs-per-step it also
reads the position of the documents from a checkpoint's arguments, where it writes it after every step, and corrects
what Megatron's loop counts by its own number of micro-batches.
"""

import functools
import inspect
import json
import os
import signal
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import torch
from torch.distributed import Store, distributed_c10d

from megatron_pg.declarations.installation import missing_piece

try:
    from megatron.core import parallel_state
    from megatron.core.datasets import utils as dataset_utils
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import arguments, checkpointing, training
    from megatron.training.global_vars import get_args, get_tensorboard_writer, get_wandb_writer
except ImportError as error:
    raise ImportError(missing_piece(error), name=error.name) from error

from megatron_pg.args import (
    ArgumentError,
    ArgumentWarning,
    add_arguments,
    checkpoint_changes,
    disagreement,
    rank_snapshot,
    validate_args,
)
from megatron_pg.batch import PackedBatch, cut_over_ranks
from megatron_pg.flags.banner import banner, command_line, describe, in_force
from megatron_pg.flags.import_path import source_of
from megatron_pg.metrics.advice import Advice
from megatron_pg.metrics.file import MetricsFile
from megatron_pg.metrics.reporting import ADDED_BYTES, GROUP, CallbackError, added_values
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.collectives import all_gather_rows, broadcast_text, decode, encode
from megatron_pg.step.documents import DocumentAccumulator, Documents, EndOfDocuments, Packing, Position, StepRule
from megatron_pg.step.errors import NonFiniteLossError, StepPlanError, lost_peer_named, message_of
from megatron_pg.step.experts import RoutingReplay
from megatron_pg.step.findings import StepReport
from megatron_pg.step.forward_step import PolicyGradientStep
from megatron_pg.step.log import Console, StepLog, step_record
from megatron_pg.step.settings import LossSettings
from megatron_pg.step.shared_documents import SharedDocumentAccumulator

_POSITION = "megatron_pg_documents"  # the argument that carries the position of the documents through a checkpoint
_DRY_RUN = "MEGATRON_PG_DRY_RUN"  # in the environment, the same as --pg-dry-run
_SHOWN = "megatron_pg: an error has been shown"  # a key of the process group's store
_INTERRUPTED = 130  # exit code of a process that Ctrl-C has ended: 128 and the signal's number
_ON_EVERY_RANK = (ArgumentError, CallbackError, StepPlanError, NonFiniteLossError)
_ARGUMENT_BYTES = 8192  # of the arguments as JSON, or of an error


def chain_args_providers(*providers: Callable | None) -> Callable[[ArgumentParser], ArgumentParser]:
    """One `extra_args_provider` out of several; None is left out."""

    def add_all(parser: ArgumentParser) -> ArgumentParser:
        for provider in providers:
            parser = parser if provider is None else provider(parser)
        return parser

    return add_all


def pretrain(
    train_valid_test_dataset_provider: Callable,
    model_provider: Callable,
    model_type: object,
    forward_step_func: None = None,
    *,
    extra_args_provider: Callable | None = None,
    args_defaults: dict | None = None,
    on_step: Callable[[StepLog], Mapping[str, float] | None] | None = None,
    say: Callable[[str], None] | None = None,
    metrics_file: str | Path | None = None,
    routing_replay: RoutingReplay | None = None,
    dynamic_cp: bool = False,
    **rest: object,
) -> None:
    """`megatron.training.pretrain` on the policy-gradient loss.

    Args:
        train_valid_test_dataset_provider: Megatron's, with `is_distributed = True`; its iterators yield
            `PackedBatch`es on every rank (`--dataloader-type external`). Under `--docs-per-step` its first result is
            `Documents`.
        model_provider: Megatron's; returns a GPTModel or HybridModel.
        model_type: Megatron's ModelType.
        forward_step_func: None; it stands where Megatron has it, so that one that would never be called is refused.
        extra_args_provider: the script's own flags; megatron_pg's are added.
        args_defaults: Megatron's.
        on_step: called after every optimizer step, on every rank. Numbers that rank 0's returns, by name, go where the
            step's metrics go: the metrics file, the console line, TensorBoard and W&B.
        say: where rank 0 puts the effective objective and the console line; default the standard output.
        metrics_file: metrics.jsonl of the run, written by rank 0; a resumed run continues it, and what a run trains again
            moves to `metrics.jsonl.1`. None: no such file.
        routing_replay: gives a mixture of experts the `routed_experts` of the samples in the place of its router's choice,
            as `PolicyGradientStep` takes it. None: the router chooses.
        dynamic_cp: every micro-batch is cut over ranks of its own, as `cut_over_ranks` packs them; the same on every rank.
        rest: further keywords of Megatron's `pretrain`.

    Raises:
        ArgumentError, CallbackError, StepPlanError, NonFiniteLossError: on rank 0, which shows it without its traceback; the other ranks,
            which have the same one, leave with exit code 1.
        LostPeerError: on the ranks that survive one that was killed, failed or hangs, at any time of the job.
        ValueError: the provider is not distributed or returns no training data, a forward step is given, or the metrics
            file cannot be written.
    """
    if not getattr(train_valid_test_dataset_provider, "is_distributed", False):
        raise ValueError(
            "the dataset provider is not marked as distributed, so under tensor parallelism Megatron would give most ranks no data; "
            "set train_valid_test_dataset_provider.is_distributed = True"
        )
    if forward_step_func is not None:
        raise ValueError(
            "forward_step_func has no effect here: the policy-gradient loss is computed inside the model, so yours would never be "
            "called. Leave it out."
        )
    if rest.get("process_non_loss_data_func") is not None and rest.get("non_loss_data_func") is None:
        raise ValueError(
            "process_non_loss_data_func without non_loss_data_func makes Megatron run a forward on the last rank alone, where the step's "
            "exchange would wait for the others. Give non_loss_data_func, which every rank calls, or use on_step."
        )
    session = _Session(on_step, say or _print_whole, metrics_file, routing_replay, dynamic_cp=dynamic_cp)
    provider = chain_args_providers(extra_args_provider, add_arguments)
    keywords = {
        "train_valid_test_dataset_provider": session.datasets_provider(train_valid_test_dataset_provider),
        "model_provider": functools.partial(session.build_model, model_provider),
        "model_type": model_type,
        "forward_step_func": lambda *given, **rest: session.step.forward_step(*given, **rest),
        **rest,
    }
    try:
        keywords |= _arguments_of_release(provider, args_defaults or {})
        with (
            _replaced(arguments, "parse_args", functools.partial(_parse_with, provider)),
            _replaced(training, "get_forward_backward_func", session.forward_backward_of),
            _replaced(training, "training_log", session.log),
            _replaced(training, "num_floating_point_operations", session.flops),
            _replaced(checkpointing, "check_checkpoint_args", session.check_checkpoint),
            _replaced(dataset_utils, "compile_helpers", _compile_helpers),
            session.to_its_end(),
            lost_peer_named(session.where),
        ):
            training.pretrain(**keywords)
    except _ON_EVERY_RANK as error:
        raise _said_once(error) from None
    except Exception as error:
        _tell_when_shown(error)
        raise


def _print_whole(text: str) -> None:
    """A line at once, so that Megatron's, which another rank prints, does not get into it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _said_once(error: ValueError) -> BaseException:
    """What to raise for an error that every rank has: rank 0 shows it without its traceback, and only then the others leave.

    A launcher ends all ranks when it sees that one has ended, so the others wait until rank 0 has shown it. Without a process
    group they cannot wait, and each shows it.
    """
    store = _store()
    if int(os.environ.get("RANK", "0")) != 0 and store is not None:
        with suppress(RuntimeError):  # rank 0 has caught it, or has gone
            store.wait([_SHOWN], timedelta(minutes=2))
        return SystemExit(1)
    _tell_when_shown(error)
    return error.with_traceback(None)


def _tell_when_shown(error: Exception) -> None:
    """Have rank 0 tell the others, who wait for it, when it has shown its error; they may have heard of one of its own."""
    if int(os.environ.get("RANK", "0")) != 0:
        return
    hook, store = sys.excepthook, _store()

    def show(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error and isinstance(error, _ON_EVERY_RANK):
            print(f"{kind.__name__}: {raised}", file=sys.stderr, flush=True)  # noqa: T201
        else:
            hook(kind, raised, trace)
        if raised is error and store is not None:
            with suppress(RuntimeError):  # the launcher has gone
                store.set(_SHOWN, "")

    sys.excepthook = show


def _store() -> Store | None:
    return distributed_c10d._get_default_store() if torch.distributed.is_initialized() else None


def _arguments_of_release(provider: Callable, args_defaults: dict) -> dict[str, object]:
    """How Megatron takes its arguments: made by it (up to 0.17), or as a container (0.18), made after our validation.

    There is no process group yet, so an invalid argument is not raised here but by the second validation, in `_start`: there
    the ranks compare their errors and show one of them once.
    """
    if "extra_args_provider" in inspect.signature(training.pretrain).parameters:
        return {"extra_args_provider": provider, "args_defaults": args_defaults}
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(extra_args_provider=provider, args_defaults=args_defaults)
    with suppress(ArgumentError):
        validate_args(args)
    return {"cfg_container": pretrain_cfg_container_from_args(args)}


class _Session:
    """What one call of `pretrain` keeps between Megatron's callbacks; the first argument of those is what they stand in for."""

    def __init__(
        self,
        on_step: Callable | None,
        say: Callable[[str], None],
        metrics_file: str | Path | None,
        routing_replay: RoutingReplay | None = None,
        *,
        dynamic_cp: bool = False,
    ):
        self._in_step = {"routing_replay": routing_replay, "dynamic_cp": dynamic_cp}
        self.step: PolicyGradientStep | None = None
        self._on_step = on_step
        self._has_additions = False  # rank 0 has an on_step
        self._objective: dict[str, str] = {}
        self._say, self._console = say, Console(say)
        self._metrics_file = metrics_file
        self._writer: MetricsFile | None = None
        self._report: StepReport | None = None
        self._save: str | None = None  # folder of the checkpoints
        self._last_iteration = 0  # that was logged in this run
        self._saved_position: str | None = None  # in the checkpoint that was loaded
        self._documents_have_ended = False
        self._num_positions: list[int] = []  # that the model processed, in each step since Megatron's last line
        self._counted_positions: float | None = None  # what Megatron counts operations for

    def build_model(self, provider: Callable, *positional: object, **keywords: object):
        """A model with our loss in it, after our validation."""
        if self.step is None:
            self.step = _start(get_args(), self._keep, self._say, self._open_files, self._in_step)
            self._save = get_args().save
            self._objective = dict(describe(in_force(get_args(), self.step.settings.kernel)))
        model, error = None, None
        try:
            model = provider(*positional, **keywords)
            if getattr(model, "post_process", True):
                self.step.attach(model)
        except Exception as failure:  # travels to the other ranks, so that all of them stop
            error = failure
        _raise_on_every_rank(error, "E64")
        return model

    def where(self) -> str:
        """How far this rank is, for the error that another one was lost."""
        return "before its first step" if self.step is None else self.step.progress

    def _open_files(self) -> None:
        """Before the model is built, so that a full disk or another job is known early."""
        if self._metrics_file is not None and torch.distributed.get_rank() == 0:
            try:
                self._writer = MetricsFile(self._metrics_file)
            except ValueError as error:
                raise ArgumentError([("E63", str(error))]) from error

    def _close(self) -> None:
        if self._writer is None:
            return
        self._writer.close()
        if self._writer.num_missing:
            self._say(
                f"{self._writer.path} lacks the last {self._writer.num_missing} steps, because it could not be written; make room, or choose "
                "another metrics_file"
            )

    def datasets_provider(self, provider: Callable) -> Callable:
        """`provider`; its documents begin where the checkpoint that was loaded ends."""

        @functools.wraps(provider)  # Megatron looks for a parameter and an attribute
        def build(*positional: object, **keywords: object) -> tuple:
            found, error = (None, None, None), None
            try:
                found = self._checked_data(provider(*positional, **keywords), get_args())
            except Exception as failure:  # travels to the other ranks, so that all of them stop
                error = failure
            _raise_on_every_rank(error, "E64")
            return found

        return build

    def _checked_data(self, found: object, args: Namespace) -> tuple:
        """Training, validation and test data, before anything is taken from them."""
        if not isinstance(found, (tuple, list)) or len(found) != 3:
            raise _data_error(
                f"the dataset provider returned a {type(found).__name__}, so there is no telling which data are for training; return "
                "three: (training data, None, None)"
            )
        train, *others = found
        if train is None and args.train_iters and not args.skip_train:
            raise _data_error(
                f"the dataset provider returned None as training data, so none of --train-iters {args.train_iters} would be trained "
                "and the run would end as if it had; return an iterator of PackedBatch, or give --skip-train"
            )
        if not isinstance(train, Documents) and not all(
            hasattr(each, "__next__") for each in (train if isinstance(train, list) else [train]) if each is not None
        ):
            raise _data_error(
                f"the dataset provider returned a {type(train).__name__} as training data, which gives no next micro-batch; return an "
                "iterator of PackedBatch: a generator, or iter(...)"
            )
        if args.docs_per_step:
            train = self._begin(train, args)
        elif isinstance(train, Documents):
            raise _data_error(
                "the dataset provider returned Documents and --docs-per-step is 0, so nothing says how many make a step; set it, "
                "or return an iterator of PackedBatch"
            )
        return train, *others

    def _begin(self, documents: object, args: Namespace) -> Iterator:
        if not isinstance(documents, Documents):
            raise _data_error(
                f"--docs-per-step {args.docs_per_step}, and the dataset provider returned a {type(documents).__name__} for training, so "
                "steps cannot be cut; return megatron_pg.Documents"
            )
        if self.step.documents is not None:  # a further virtual pipeline stage: the first one's documents serve all
            return iter(())
        if args.iteration > 0 and self._saved_position is None and torch.distributed.get_rank() == 0:
            self._say(
                "the checkpoint holds no position of documents: they begin with the first, and documents_seen with 0"
            )
        if self._in_step["dynamic_cp"]:
            self.step.documents = self._shared(args)
            return iter(documents.begin(self.step.documents.position.documents_seen))
        tp_size, cp_size = args.tensor_model_parallel_size, args.context_parallel_size
        position = Position.from_text(self._saved_position, parallel_state.get_data_parallel_world_size())
        self.step.documents = DocumentAccumulator(
            rule=_step_rule(args),
            packing=Packing(
                qkv_format=documents.qkv_format,
                seq_length=args.seq_length,
                micro_batch_size=args.micro_batch_size,
                cp_size=cp_size,
                multiple_of=tp_size * cp_size if args.sequence_parallel else 1,
                is_static=args.pipeline_model_parallel_size > 1 and not args.variable_seq_lengths,
            ),
            position=position,
        )
        return iter(documents.begin(position.per_rank[parallel_state.get_data_parallel_rank()]))

    def _shared(self, args: Namespace) -> SharedDocumentAccumulator:
        """Of documents that every rank has, for micro-batches on ranks of their own."""
        plane = parallel_state.get_data_parallel_group(with_context_parallel=True)
        max_tokens = args.micro_batch_size * args.seq_length

        def cut(samples: Sequence[Sample], num_microbatches: int) -> list[PackedBatch]:
            return cut_over_ranks(
                samples,
                num_microbatches=num_microbatches,
                rank=plane.rank(),
                num_ranks=plane.size(),
                max_tokens=max_tokens,
                attention_length=12.0 * args.hidden_size,
                multiple_of=args.tensor_model_parallel_size if args.sequence_parallel else 1,
            )

        position = Position.from_text(self._saved_position, num_ranks=1)
        room = plane.size() * max_tokens
        return SharedDocumentAccumulator(rule=_step_rule(args), cut=cut, room=room, position=position)

    def check_checkpoint(self, check_args: Callable, checkpoint_args: Namespace, *rest: object, **keywords: object):
        """Check a checkpoint's arguments, of which the position of the documents is one, and say what is another objective."""
        args = get_args()
        self._saved_position = vars(checkpoint_args).get(_POSITION)
        if self._saved_position is not None and not args.docs_per_step and not args.docs_per_step_drop_position:
            raise ArgumentError(
                [
                    (
                        "E62",
                        f"the checkpoint was trained with --docs-per-step {checkpoint_args.docs_per_step} and holds the position in its documents, which a run without the flag loses: data would be trained twice or never. Set it, or accept that with --docs-per-step-drop-position",
                    )
                ]
            )
        if (changed := checkpoint_changes(checkpoint_args, args)) and torch.distributed.get_rank() == 0:
            warnings.warn(
                f"the checkpoint was trained with another loss: {'; '.join(changed)}", ArgumentWarning, stacklevel=2
            )
        return check_args(checkpoint_args, *rest, **keywords)

    def forward_backward_of(self, getter: Callable, *positional: object, **keywords: object) -> Callable:
        """Megatron's function for the schedule, with the step around it."""
        function = getter(*positional, **keywords)

        def forward_backward(**arguments: object) -> list:
            try:
                return self.step.forward_backward(function, **arguments)
            except EndOfDocuments as end:
                self._end(str(end), get_args())
                return []

        return forward_backward

    def _end(self, farewell: str, args: Namespace) -> None:
        """Have Megatron leave its loop before the optimizer, with a checkpoint, as its rerun machinery does."""
        if torch.distributed.get_rank() == 0:
            self._say(farewell)
        is_saved = args.save_interval and args.curr_iteration % args.save_interval == 0
        needs_checkpoint = bool(args.save) and args.curr_iteration > args.iteration and not is_saved
        get_rerun_state_machine().should_checkpoint_and_exit = lambda: (needs_checkpoint, True, 0)
        self._documents_have_ended = True

    @contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Close the files, return where Megatron leaves the process because the documents have ended, and end on Ctrl-C."""
        try:
            yield
        except SystemExit:
            if not self._documents_have_ended:
                raise
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends a second one
            if int(os.environ.get("RANK", "0")) == 0:
                way_on = (
                    f"--load {self._save} goes on from the last checkpoint there" if self._save else "nothing was saved"
                )
                self._say(f"interrupted after step {self._last_iteration}; {way_on}")
            sys.exit(_INTERRUPTED)
        finally:
            self._close()

    def flops(self, count: Callable, args: Namespace, batch_size: float, *rest: object, **keywords: object):
        """Megatron's count of operations, for the positions that were processed instead of a nominal number of rows."""
        if self._counted_positions is not None:
            batch_size = self._counted_positions / args.seq_length
        return count(args, batch_size, *rest, **keywords)

    def log(self, training_log: Callable, *positional: object, **keywords: object):
        """Megatron's line about a step, and behind it ours."""
        values = inspect.signature(training_log).bind(*positional, **keywords).arguments
        if self.step.documents is not None:
            self._account(get_args())
        result = training_log(*positional, **keywords)
        if values["iteration"] % get_args().log_interval == 0 and not values.get("is_first_iteration", False):
            self._num_positions.clear()  # as Megatron its times
        self._log(values)
        return result

    def _keep(self, report: StepReport) -> None:
        if not report.forward_only:
            self._report = report
            if report.documents is not None:
                self._counted_positions = report.plan.num_positions

    def _account(self, args: Namespace) -> None:
        """The step has been trained: what the next checkpoint says, and Megatron's own count of samples."""
        position = self.step.documents.position
        setattr(args, _POSITION, position.to_text())
        args.consumed_train_samples = position.documents_seen
        self._num_positions.append(self._report.plan.num_positions)
        # Megatron's line is about a mean step
        self._counted_positions = sum(self._num_positions) / len(self._num_positions)

    def _log(self, values: dict[str, Any]) -> None:
        grad_norm = values["grad_norm"]
        log = StepLog(
            iteration=values["iteration"],
            report=self._report,
            learning_rate=values["learning_rate"],
            grad_norm=None if grad_norm is None else float(grad_norm),
            skipped=bool(values["skipped_iter"]),
            objective=self._objective,
        )
        if not self._last_iteration and torch.distributed.get_rank() == 0:
            history = self._writer.before(log.iteration) if self._writer else ()
            advice = Advice(history) if self.step.settings.advises else None
            self._console.begin(log.report, self.step.settings.metrics, advice)
        if not self._last_iteration:
            self._has_additions = bool(broadcast_text("yes" if self._on_step else "", 0))
        self._last_iteration = log.iteration
        record = step_record(log)
        added = self._additions(log, record)
        _write(log.iteration, log.report.metrics | added)
        if self._writer:
            self._writer.write(record | added)
        if torch.distributed.get_rank() == 0:
            is_shown = log.iteration % get_args().log_interval == 0
            own = [*self.step.settings.terms.objective.reported, *added]
            self._console.step(record | added, own, is_shown=is_shown)

    def _additions(self, log: StepLog, record: Mapping[str, Any]) -> dict[str, float]:
        """What rank 0's callback adds to the step, or its mistake, on every rank: the writers are on two of them."""
        returned = self._on_step(log) if self._on_step else None
        if not self._has_additions:
            return {}
        answer: dict[str, Any] = {}
        if torch.distributed.get_rank() == 0:
            try:
                answer = {"values": added_values(returned, record.keys())}
            except CallbackError as error:
                answer = {"error": str(error)}
        answer = json.loads(broadcast_text(json.dumps(answer), 0, size=2 * ADDED_BYTES))
        if "error" in answer:
            raise CallbackError(answer["error"])
        return answer["values"]


def _step_rule(args: Namespace) -> StepRule:
    return StepRule(
        num_documents=args.docs_per_step,
        policy=args.docs_per_step_policy or "exact",
        end=args.docs_per_step_end or "partial",
    )


def _start(
    args: Namespace,
    keep: Callable[[StepReport], None],
    say: Callable[[str], None],
    open_files: Callable[[], None],
    in_step: Mapping[str, Any] | None = None,
) -> PolicyGradientStep:
    """Validate on every rank, compare the ranks, say what is in force, and end a dry run."""
    asked = os.environ.get(_DRY_RUN)
    given = rank_snapshot(args) | {_DRY_RUN: repr(asked)}  # before validation, which reconciles arguments
    error, settings = None, None
    try:
        if asked not in (None, "", "0", "1"):
            message = f"{_DRY_RUN}={asked} is neither 0 nor 1, so it is unclear whether to train. Use one of them."
            raise ArgumentError([("E25", message)])
        settings = LossSettings.from_args(validate_args(args))
        _check_warm_up(args)
        open_files()
    except Exception as failure:  # travels to the other ranks, so that all of them stop
        error = failure
    _compare_ranks(given, settings, error)
    if torch.distributed.get_rank() == 0:
        say(banner(in_force(args, settings.kernel)))
    if args.pg_dry_run or asked == "1":
        if torch.distributed.get_rank() == 0:
            say(command_line(sys.argv))
            say(f"dry run: {torch.distributed.get_world_size()} ranks agree on valid arguments; no model was built")
        torch.distributed.barrier()  # no rank ends while another one still reads the store
        torch.distributed.destroy_process_group()
        sys.exit(0)
    return PolicyGradientStep(settings, keep, **(in_step or {}))


def _check_warm_up(args: Namespace) -> None:
    """Rule E66: Megatron asserts without a message that the warm-up of the learning rate is shorter than its schedule."""
    found = vars(args)
    unit = "iters" if found.get("train_iters") else "samples"
    length = found.get(f"lr_decay_{unit}") or found.get(f"train_{unit}")
    for flag, limit in {f"lr-warmup-{unit}": length, "lr-warmup-fraction": 1}.items():
        value = found.get(flag.replace("-", "_"))
        if value and limit and value >= limit:
            message = f"--{flag} {value} is not less than the length of the learning-rate schedule, {limit}. Shorten the warm-up or train longer."
            raise ArgumentError([("E66", message)])


def _compare_ranks(given: dict[str, str], settings: LossSettings | None, error: Exception | None) -> None:
    """Raise on every rank when two have different arguments or reducers (rule E23), or when one has an error."""
    sources_here = {
        "source of the custom reducer": source_of(settings.reducer)[1] if settings and settings.reducer else None,
        "source of the objective": source_of(settings.terms.objective.loss)[1] if settings else None,
    }
    given_per_rank = _gather_texts(given)
    if message := disagreement(given_per_rank):
        raise ArgumentError([("E23", message)]) from error
    _raise_on_every_rank(error, "E23")
    if message := disagreement(_gather_texts(sources_here)):
        raise ArgumentError([("E23", message)])


def _raise_on_every_rank(error: Exception | None, rule: str) -> None:
    """Raise this rank's error, or that another one has; every rank must call."""
    failed = all_gather_rows(encode("" if error is None else message_of(error), _ARGUMENT_BYTES), error=error)
    if error is not None:
        raise error
    for rank, text in enumerate(failed):
        if message := decode(text):
            raise ArgumentError([(rule, f"rank {rank}: {message}")])


def _data_error(message: str) -> ArgumentError:
    return ArgumentError([("E64", message)])


def _gather_texts(mine: dict[str, str | None]) -> list[dict[str, str | None]]:
    return [json.loads(decode(row)) for row in all_gather_rows(encode(json.dumps(mine), _ARGUMENT_BYTES))]


def _write(iteration: int, metrics: Mapping[str, float]) -> None:
    """Metrics to Megatron's own TensorBoard and W&B writers, under the names of the JSONL file behind `pg/`."""
    if iteration % get_args().tensorboard_log_interval:
        return
    if writer := get_tensorboard_writer():
        for name, value in metrics.items():
            writer.add_scalar(GROUP + name, value, iteration)
    if wandb := get_wandb_writer():
        wandb.log({GROUP + name: value for name, value in metrics.items()}, iteration)


def _parse_with(
    provider: Callable,
    parse_args: Callable,
    extra_args_provider: Callable | None = None,
    *rest: object,
    **keywords: object,
) -> Namespace:
    """Megatron's `parse_args`; where Megatron passes no flags of ours (its fault tolerance, which parses first), with them.

    Or `--help` would end there, without our flags and the script's.
    """
    return parse_args(extra_args_provider or provider, *rest, **keywords)


def _compile_helpers(compile_helpers: Callable[[], None]) -> None:
    """Megatron's build of its data-set helpers; nothing where a wheel has them built and ships no Makefile.

    There `make` fails, and Megatron leaves the process with exit code 1 and no message.
    """
    if (Path(dataset_utils.__file__).parent / "Makefile").exists():
        compile_helpers()


@contextmanager
def _replaced(module: ModuleType, name: str, stand_in: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, functools.partial(stand_in, original))
    try:
        yield
    finally:
        setattr(module, name, original)
