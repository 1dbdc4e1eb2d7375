"""Pictures, for the subcommands that can draw them. They need matplotlib, an extra."""

import argparse
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from megatron_pg.cli.terminal import InputError, check_output, written_whole


def add_picture_options(parser: argparse.ArgumentParser) -> None:
    """The options of a subcommand that can draw."""
    parser.add_argument("--output", metavar="FILE", help="a picture, .png, .svg or .pdf; needs matplotlib")
    parser.add_argument("--overwrite", action="store_true", help="replace FILE if it exists")


def check_picture(options: argparse.Namespace) -> None:
    """Refuse a picture that cannot be made, before any work is done."""
    if not options.output:
        return
    check_output(options.output, overwrite=options.overwrite, suffixes=(".png", ".svg", ".pdf"))
    try:
        import matplotlib
    except Exception as error:  # missing or broken
        raise InputError(
            f"matplotlib cannot be imported ({type(error).__name__}: {error}). pip install matplotlib, or leave out "
            "--output."
        ) from error
    matplotlib.use("Agg")


@contextmanager
def picture(
    options: argparse.Namespace, rows: int, columns: int, size: tuple[float, float]
) -> Iterator[tuple[Any, Any]]:
    """A figure and its axes; the file is written when the block ends, and is complete or absent."""
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about a logarithm of 0, letters that a font lacks, or a slow machine
        yield figure, axes
        figure.tight_layout()
        with written_whole(options.output, overwrite=options.overwrite) as scratch:
            figure.savefig(scratch, format=Path(options.output).suffix[1:].lower(), dpi=110)
    plt.close(figure)
