"""A rollout file as a few numbers per sample: what weights and gradient mass are made of."""

from pathlib import Path
from typing import NamedTuple

from megatron_pg.cli.terminal import progress, show_path
from megatron_pg.rollouts.fields import Id


class Row(NamedTuple):
    """One sample: its ids, its lengths, and the sums of the advantages A over its trained tokens."""

    step: int
    prompt_id: Id
    rollout_id: Id
    length: int  # response tokens
    trained: int  # trained tokens
    advantage: float  # Σ A
    magnitude: float  # Σ |A|


def digest_rollouts(path: str | Path) -> list[Row]:
    """The digest of a whole rollout file, of which one sample at a time is held.

    Raises:
        RolloutFileError: the file that `read_rollouts` refuses, with its message.
    """
    from megatron_pg.rollouts.file import iterate_rollouts  # imports torch

    rows, size = [], Path(path).stat().st_size if Path(path).is_file() else 0
    with progress(f"reading {show_path(path)}", size) as update:
        for sample in iterate_rollouts(path, update=update):
            advantages = sample.advantages[sample.loss_mask]
            sums = float(advantages.sum()), float(advantages.abs().sum())
            ids = sample.step, sample.prompt_id, sample.rollout_id
            rows.append(Row(*ids, sample.response_length, len(advantages), *sums))
    return rows
