"""Before the model is built: validation on every rank, comparison of the ranks, the banner, the dry run."""

import json
import os
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import cast

import torch

from megatron_pg.args import ArgumentError, disagreement, rank_snapshot, validate_args
from megatron_pg.declarations.declaration import flag_of
from megatron_pg.flags.banner import banner, command_line
from megatron_pg.flags.import_path import source_of
from megatron_pg.plan.collectives import gathered_texts
from megatron_pg.plan.settings import LossSettings, agreed
from megatron_pg.pretrain.errors import raise_on_every_rank

_DRY_RUN = "MEGATRON_PG_DRY_RUN"  # environment variable, equivalent to --pg-dry-run


def start(args: Namespace, say: Callable[[str], None], open_files: Callable[[], None]) -> LossSettings:
    """Validate on every rank, compare the ranks and show the banner; a dry run ends here.

    Args:
        args: Megatron's arguments, which validation may reconcile.
        say: prints a text; called on rank 0.
        open_files: opens the run's files on rank 0, so that a full disk or another job is noticed early.
    """
    requested = os.environ.get(_DRY_RUN)
    given = rank_snapshot(args) | {_DRY_RUN: repr(requested)}  # before validation, which reconciles arguments
    error, settings = None, None
    try:
        if requested not in (None, "", "0", "1"):
            message = f"{_DRY_RUN}={requested} is neither 0 nor 1, so it is unclear whether to train. Use one of them."
            raise ArgumentError([("E25", message)])
        settings = LossSettings.from_args(validate_args(args))
        _check_warm_up(args)
        open_files()
    except Exception as failure:  # raised on every rank, after the comparison
        error = failure
    settings = _compare_ranks(given, settings, error)
    if torch.distributed.get_rank() == 0:
        say(banner(settings.in_force(args)))
    if args.pg_dry_run or requested == "1":
        _end_dry_run(say)
    return settings


def _end_dry_run(say: Callable[[str], None]) -> None:
    if torch.distributed.get_rank() == 0:
        say(command_line(sys.argv))
        say(f"dry run: {torch.distributed.get_world_size()} ranks agree on valid arguments; no model was built")
    torch.distributed.barrier()  # no rank exits while another one still reads the store
    torch.distributed.destroy_process_group()
    sys.exit(0)


def _check_warm_up(args: Namespace) -> None:
    """Rule E66: Megatron asserts without a message that the learning rate's warm-up is shorter than its schedule."""
    values = vars(args)
    unit = "iters" if values.get("train_iters") else "samples"
    length = values.get(f"lr_decay_{unit}") or values.get(f"train_{unit}")
    for name, limit in {f"lr_warmup_{unit}": length, "lr_warmup_fraction": 1}.items():
        value = values.get(name)
        if value and limit and value >= limit:
            message = (
                f"{flag_of(name)} {value} is not less than the length of the learning-rate schedule, {limit}. Shorten "
                "the warm-up or train longer."
            )
            raise ArgumentError([("E66", message)])


def _compare_ranks(
    given: Mapping[str, str | None], settings: LossSettings | None, error: Exception | None
) -> LossSettings:
    """The settings, with a mode of the fused head that every rank can take.

    Raises on every rank if arguments or functions differ (rule E23), or if one rank has an error.
    """
    sources: dict[str, str | None] = {
        "source of the custom reducer": source_of(settings.reducer)[1] if settings and settings.reducer else None,
        "source of the objective": source_of(settings.terms.objective.loss)[1] if settings else None,
    }
    given_per_rank = _gather_texts(given)
    if message := disagreement(given_per_rank):
        raise ArgumentError([("E23", message)]) from error
    raise_on_every_rank(error, "E23")
    settings = cast(LossSettings, settings)  # without settings this rank has an error
    per_rank = _gather_texts(sources | {"mode": settings.head_mode})
    modes = [texts.pop("mode") for texts in per_rank]
    if message := disagreement(per_rank):
        raise ArgumentError([("E23", message)])
    return agreed(settings, modes)


def _gather_texts(texts: Mapping[str, str | None]) -> list[dict[str, str | None]]:
    return [json.loads(text) for text in gathered_texts(json.dumps(texts), torch.distributed.group.WORLD)]
