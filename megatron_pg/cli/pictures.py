"""Pictures, for the subcommands that can draw them. matplotlib is an extra: without it there is a message, no picture."""

from pathlib import Path
from typing import Any

from megatron_pg.cli.terminal import InputError, check_output, show_path, written_whole

SUFFIXES = (".png", ".svg", ".pdf")


def check_picture(path: str, *, overwrite: bool) -> None:
    """Refuse a picture that could not be made before any work is done.

    Raises:
        InputError: another kind of file, a path that cannot be written, or matplotlib is missing.
    """
    if Path(path).suffix not in SUFFIXES:
        raise InputError(
            f"{show_path(path)}: is no {', '.join(SUFFIXES)} file, so its format is unknown. Give it such a name."
        )
    check_output(path, overwrite=overwrite)
    _matplotlib()


def _matplotlib() -> Any:
    try:
        import matplotlib
    except Exception as error:  # missing, or broken in any way
        raise InputError(
            f"matplotlib cannot be imported ({type(error).__name__}: {error}), so no picture can be drawn. pip install matplotlib, or "
            "leave --output out."
        ) from error
    matplotlib.use("Agg")
    return matplotlib


def new_figure(rows: int, columns: int, *, width: float, height: float) -> tuple[Any, Any]:
    """A figure and its axes."""
    _matplotlib()
    import matplotlib.pyplot as plt

    return plt.subplots(rows, columns, figsize=(width, height), squeeze=False)


def save_figure(figure: Any, path: str, *, overwrite: bool) -> None:
    """Write the figure, whole or not at all."""
    import matplotlib.pyplot as plt

    figure.tight_layout()
    with written_whole(path, overwrite=overwrite) as scratch:
        figure.savefig(scratch, format=Path(path).suffix[1:], dpi=110)
    plt.close(figure)
