"""Installed versions, what `megatron_pg.pretrain` needs, and the command that installs it."""

import platform
import sys
from importlib import metadata

TRAINING = ("pyyaml", "einops", "psutil")  # extra `training`: megatron.training imports them
_RELEASE = "0.17.1"  # of megatron-core, the one that runs on Python 3.11 too


def missing_piece(error: ImportError) -> str:
    """The message for an error of `import megatron.training`: what is missing, and how to install it."""
    name, python = error.name or "", platform.python_version()
    if name in ("megatron", "megatron.core"):
        return f"megatron_pg.pretrain needs megatron-core, which is not installed. {_how_to_install()}"
    if name.startswith("megatron.training"):
        return (
            f"megatron_pg.pretrain needs megatron.training, which megatron-core {_version()} does not contain. "
            f"{_how_to_install()}"
        )
    if name == "typing":
        return (
            f"megatron_pg.pretrain needs megatron.training, which in megatron-core {_version()} does not run on "
            f"Python {python} ({error}). Use Python 3.12 or later, or another release: {_how_to_install()}"
        )
    if name and not name.startswith("megatron") and isinstance(error, ModuleNotFoundError):
        return (
            f"megatron_pg.pretrain needs megatron.training, which needs the module {name}. Install what it needs with: "
            f"pip install {' '.join(TRAINING)}"
        )
    return (
        f"megatron_pg.pretrain needs megatron.training, which cannot be imported: {error}. Run `megatron-pg doctor` to "
        "check the installation."
    )


def installed_version(package: str) -> str | None:
    """The version of an installed package; None if it is absent or a checkout without metadata."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _version() -> str:
    return installed_version("megatron-core") or "(of unknown version)"


def _how_to_install() -> str:
    release = sys.version_info[:2]
    if release == (3, 10):
        return (
            f"Use Python 3.11 or later: no release that contains it has a wheel for Python {platform.python_version()}."
        )
    if release == (3, 11):  # on which it runs, although its metadata asks for 3.12
        return f"Install it with: pip install --no-deps --ignore-requires-python megatron-core=={_RELEASE}"
    return f'Install it with: pip install "megatron-core>={_RELEASE}"'
