"""`pretrain`, and the adapters between Megatron's callbacks and the parts of this package.

Megatron is called by keyword, because the positional order changed between releases. A few of its names are replaced
for the length of the call: the function that returns the forward-backward function, the logging function, the parser
if it is called without our flags, the check of a checkpoint's arguments, the count of operations, and the build of the
data-set helpers, which fails if a wheel contains them already.
"""

import functools
import inspect
import json
import os
import signal
import sys
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType

import torch
from megatron.core.datasets import utils as dataset_utils
from megatron.training import arguments, checkpointing, training
from megatron.training.global_vars import get_args

from megatron_pg.args import ArgumentError, ArgumentWarning, add_arguments, checkpoint_changes, validate_args
from megatron_pg.flags.banner import describe
from megatron_pg.plan.documents import Documents, EndOfDocuments
from megatron_pg.pretrain.data import checked_data
from megatron_pg.pretrain.documents import RunDocuments
from megatron_pg.pretrain.errors import ON_EVERY_RANK, raised_on_every_rank, report_when_shown, shown_once
from megatron_pg.pretrain.log import RunLog
from megatron_pg.pretrain.startup import start
from megatron_pg.step.experts import RoutingReplay
from megatron_pg.step.findings import StepReport
from megatron_pg.step.forward_step import PolicyGradientStep
from megatron_pg.step.log import StepLog
from megatron_pg.step.lost_peers import lost_peer_named

_LOSS_STATE = "megatron_pg_loss_state"  # the argument that carries the step's state through a checkpoint
_INTERRUPTED = 130  # exit code of a process that Ctrl-C has ended: 128 and the signal's number


def chain_args_providers(*providers: Callable | None) -> Callable[[ArgumentParser], ArgumentParser]:
    """One `extra_args_provider` that calls several; None is skipped."""

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
        train_valid_test_dataset_provider: Megatron's, with `is_distributed = True`; its iterators yield a `PackedBatch`
            on every rank (`--dataloader-type external`). With `--docs-per-step` its first result is `Documents`.
        model_provider: Megatron's; returns a GPTModel or HybridModel.
        model_type: Megatron's ModelType.
        forward_step_func: must be None; it is at Megatron's position, so that a function given there is refused.
        extra_args_provider: the script's own flags; megatron_pg's are added.
        args_defaults: Megatron's.
        on_step: called after every optimizer step, on every rank. Numbers by name that it returns on rank 0 are logged
            with the step's metrics: metrics file, console line, TensorBoard and W&B. An error of one rank's call stops
            every rank.
        say: called on rank 0 with the effective objective and every console line; default: standard output.
        metrics_file: metrics.jsonl of the run, written by rank 0. A resumed run continues it; steps that are trained
            again move to `metrics.jsonl.1`. None: no such file.
        routing_replay: replays the samples' `routed_experts` in a mixture of experts. None: the router chooses.
        dynamic_cp: every micro-batch has its own context-parallel ranks (`cut_over_ranks`); the same on every rank.
        rest: further keywords of Megatron's `pretrain`.

    Raises:
        ArgumentError, CallbackError, StepPlanError, NonFiniteLossError: on rank 0, which shows it without a traceback;
            the other ranks have the same error and exit with code 1.
        LostPeerError: on the surviving ranks if another one was killed, failed or hangs, at any time of the job.
        ValueError: the provider is not distributed or returns no training data, a forward step is given, or the metrics
            file cannot be written.
    """
    _check_call(train_valid_test_dataset_provider, forward_step_func, rest)
    run = _Run(on_step, say or _print_line, metrics_file, routing_replay, dynamic_cp=dynamic_cp)
    provider = chain_args_providers(extra_args_provider, add_arguments)
    keywords = {
        "train_valid_test_dataset_provider": run.datasets_provider(train_valid_test_dataset_provider),
        "model_provider": functools.partial(run.build_model, model_provider),
        "model_type": model_type,
        "forward_step_func": lambda *given, **named: run.step.forward_step(*given, **named),
        **rest,
    }
    try:
        keywords |= _arguments_of_release(provider, args_defaults or {})
        with run.replacing_megatrons_names(provider), run.to_its_end(), lost_peer_named(run.progress):
            training.pretrain(**keywords)
    except ON_EVERY_RANK as error:
        raise shown_once(error) from None
    except Exception as error:
        report_when_shown(error)
        raise


def _check_call(dataset_provider: Callable, forward_step_func: object, rest: Mapping[str, object]) -> None:
    if not getattr(dataset_provider, "is_distributed", False):
        raise ValueError(
            "the dataset provider is not marked as distributed, and under tensor parallelism Megatron would give most "
            "ranks no data. Set train_valid_test_dataset_provider.is_distributed = True."
        )
    if forward_step_func is not None:
        raise ValueError(
            "forward_step_func has no effect here, because the policy-gradient loss is computed inside the model. "
            "Leave it out."
        )
    if rest.get("process_non_loss_data_func") is not None and rest.get("non_loss_data_func") is None:
        raise ValueError(
            "process_non_loss_data_func without non_loss_data_func makes Megatron run a forward on the last rank "
            "alone, which then waits forever for the other ranks. Give non_loss_data_func, which every rank calls, or "
            "use on_step."
        )


def _print_line(text: str) -> None:
    """Write the line and its end at once, so that another rank's output does not split it."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _arguments_of_release(provider: Callable, args_defaults: dict) -> dict[str, object]:
    """How Megatron takes its arguments: parsed by it (up to 0.17), or in a container (0.18) made after our validation.

    There is no process group yet. So an invalid argument is not raised here but by the second validation, in `start`:
    there the ranks compare their errors and show one of them once.
    """
    if "extra_args_provider" in inspect.signature(training.pretrain).parameters:
        return {"extra_args_provider": provider, "args_defaults": args_defaults}
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    args = arguments.parse_and_validate_args(extra_args_provider=provider, args_defaults=args_defaults)
    with suppress(ArgumentError):
        validate_args(args)
    return {"cfg_container": pretrain_cfg_container_from_args(args)}


class _Run:
    """One call of `pretrain`: what Megatron calls, and in which order the parts of this package act on it.

    The first argument of a replacement is the function that it replaces.
    """

    def __init__(
        self,
        on_step: Callable | None,
        say: Callable[[str], None],
        metrics_file: str | Path | None,
        routing_replay: RoutingReplay | None = None,
        *,
        dynamic_cp: bool = False,
    ):
        self.documents = RunDocuments(say, dynamic_cp=dynamic_cp)
        self.log = RunLog(on_step, say, metrics_file)
        self._say = say
        self._routing_replay, self._dynamic_cp = routing_replay, dynamic_cp
        self._save: str | None = None  # folder of the checkpoints

    @functools.cached_property
    def step(self) -> PolicyGradientStep:
        """Our step, made on first use: after Megatron has parsed its arguments, before it builds the model."""
        args = get_args()
        settings = start(args, self._say, self.log.open)
        self._save = args.save
        self.log.objective = dict(describe(settings.in_force(args)))
        return PolicyGradientStep(settings, self.keep, routing_replay=self._routing_replay, dynamic_cp=self._dynamic_cp)

    @contextmanager
    def replacing_megatrons_names(self, provider: Callable) -> Iterator[None]:
        """Megatron with our functions in place of a few others, inside the block."""
        with (
            _replaced(arguments, "parse_args", functools.partial(_parse_with, provider)),
            _replaced(training, "get_forward_backward_func", self.forward_backward),
            _replaced(training, "training_log", self.training_log),
            _replaced(training, "num_floating_point_operations", self.count_operations),
            _replaced(checkpointing, "check_checkpoint_args", self.check_checkpoint),
            _replaced(dataset_utils, "compile_helpers", _compile_helpers),
        ):
            yield

    def build_model(self, provider: Callable, *positional: object, **keywords: object):
        """The user's model with our loss in it, built after our validation.

        The ranks compare their errors after the last virtual stage. If embeddings are tied, the first stage of the
        first rank and the last stage of the last rank wait for each other while Megatron builds them. If the ranks also
        compared after earlier stages, the last rank would wait here, and the first one there.
        """
        step, num_virtual = self.step, get_args().virtual_pipeline_model_parallel_size or 1
        with raised_on_every_rank("E64", is_last=keywords.get("vp_stage") in (None, num_virtual - 1)):
            model = provider(*positional, **keywords)
            if getattr(model, "post_process", True):
                step.attach(model)
        return model

    def datasets_provider(self, provider: Callable) -> Callable:
        """The user's provider; its documents begin at the position of the checkpoint that was loaded."""

        @functools.wraps(provider)  # Megatron looks for a parameter and an attribute
        def build(*positional: object, **keywords: object) -> tuple:
            with raised_on_every_rank("E64"):
                args = get_args()
                train, *others = checked_data(provider(*positional, **keywords), args)
                if isinstance(train, Documents):
                    train = self._begin(train, args)
            return train, *others

        return build

    def _begin(self, documents: Documents, args: Namespace) -> Iterator:
        if self.step.documents is not None:  # a further virtual pipeline stage: the first one's documents serve all
            return iter(())
        self.step.documents, iterable = self.documents.begin(documents, args)
        return iter(iterable)

    def check_checkpoint(self, check_args: Callable, checkpoint_args: Namespace, *rest: object, **keywords: object):
        """Megatron's check of a checkpoint's arguments, after ours, which warns if the loss has changed."""
        args = get_args()
        self.documents.load(checkpoint_args, args)
        if args.pg_entropy_target is not None and _LOSS_STATE in checkpoint_args:
            self.step.load_state_dict(json.loads(vars(checkpoint_args)[_LOSS_STATE]))
        if (changed := checkpoint_changes(checkpoint_args, args)) and torch.distributed.get_rank() == 0:
            what = f"the checkpoint was trained with another loss: {'; '.join(changed)}"
            warnings.warn(f"[W13] {what}. Make sure that this is intended.", ArgumentWarning, stacklevel=2)
        return check_args(checkpoint_args, *rest, **keywords)

    def forward_backward(self, getter: Callable, *positional: object, **keywords: object) -> Callable:
        """Megatron's forward-backward function with our step around it."""
        function = getter(*positional, **keywords)

        def forward_backward(**call: object) -> list:
            try:
                version = None if call.get("forward_only") else get_args().curr_iteration
                return self.step.forward_backward(function, weight_version=version, **call)
            except EndOfDocuments as end:
                self.documents.end(str(end), get_args())
                return []

        return forward_backward

    def count_operations(self, count: Callable, args: Namespace, batch_size: float, *rest: object, **keywords: object):
        """Megatron's count of operations, for the positions that were processed instead of a nominal number of rows."""
        return count(args, self.documents.batch_size(batch_size, args), *rest, **keywords)

    def training_log(self, training_log: Callable, *positional: object, **keywords: object):
        """Megatron's log line of a step, and then ours."""
        args, values = get_args(), inspect.signature(training_log).bind(*positional, **keywords).arguments
        if self.step.documents is not None:
            self.documents.save(self.step.documents.position, self.log.report, args)
        if state := self.step.state_dict():
            setattr(args, _LOSS_STATE, json.dumps(state))
        result = training_log(*positional, **keywords)
        if values["iteration"] % args.log_interval == 0 and not values.get("is_first_iteration", False):
            self.documents.log_line_written()
        self.log.write(values, self.step.settings, args)
        return result

    def keep(self, report: StepReport) -> None:
        """Keep the report of a training step until Megatron logs it; an evaluation in between is not logged."""
        if not report.forward_only:
            self.log.report = report
            self.documents.count(report)

    def progress(self) -> str:
        """How far this rank is, for the error that another one was lost."""
        return self.step.progress if "step" in vars(self) else "before its first step"

    @contextmanager
    def to_its_end(self) -> Iterator[None]:
        """Close the files, return if Megatron exits because the documents have ended, and end on Ctrl-C."""
        try:
            yield
        except SystemExit:
            if not self.documents.have_ended:
                raise
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the launcher sends a second one
            if int(os.environ.get("RANK", "0")) == 0:
                hint = (
                    f"resume from the last checkpoint with --load {self._save}" if self._save else "nothing was saved"
                )
                self._say(f"interrupted after step {self.log.last_iteration}; {hint}")
            sys.exit(_INTERRUPTED)
        finally:
            self.log.close()


def _parse_with(
    provider: Callable,
    parse_args: Callable,
    extra_args_provider: Callable | None = None,
    *rest: object,
    **keywords: object,
) -> Namespace:
    """Megatron's `parse_args` with our flags if Megatron passes none, as its fault tolerance does, which parses first.

    Otherwise `--help` would end there, without our flags and the script's.
    """
    return parse_args(extra_args_provider or provider, *rest, **keywords)


def _compile_helpers(compile_helpers: Callable[[], None]) -> None:
    """Megatron's build of its data-set helpers; nothing if a wheel contains them built and no Makefile.

    Then `make` would fail, and Megatron exits with code 1 and no message.
    """
    if (Path(dataset_utils.__file__).parent / "Makefile").exists():
        compile_helpers()


@contextmanager
def _replaced(module: ModuleType, name: str, replacement: Callable) -> Iterator[None]:
    original = getattr(module, name)
    setattr(module, name, functools.partial(replacement, original))
    try:
        yield
    finally:
        setattr(module, name, original)
