"""What the assembler made of a kernel that was compiled for a GPU, which need not be there."""

import subprocess
import tempfile
from pathlib import Path

import triton


def disassembled(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, from the cuobjdump that Triton brings."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return tuple(
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )
