"""The shipped kernels, compiled without a GPU: registers, spills, shared memory and the width of accesses.

Run as a script it compiles and prints one JSON line per kernel; kernels must be compiled in a process of their own,
because the interpreter, which the other tests use, is chosen when they are imported. `make prove` compiles with every Triton
in .venv/triton-RELEASE too.
"""

import json
import re
import sys
from pathlib import Path

import processes
import pytest

REGISTERS, SHARED_BYTES, RESERVED = 65536, 233472, 1024  # of a Hopper multiprocessor; shared memory kept per program
FAST = [(151936, "bf16")]
LOSSES = ("grpo", "dppo_kl+k3_weighted")  # the plain one; the longest row, a KL term and the bonus
ALL = [
    *FAST,
    (19008, "bf16"),
    (151936, "fp32"),
    *((columns, "bf16") for columns in (2048, 9008, 37984, 40960, 76800, 81920, 128256, 188416, 262144)),
    *((columns, "fp32") for columns in (38912, 60000, 94208)),
]


INSTALLED, TUNED = "installed Triton", "Triton 3.6.0"  # the sizes were chosen with the second: no spills
FEW = 20  # spills with another Triton, where three launches do the work
TIGHT = 37984  # columns at which the installed Triton spills for sm_100 and sm_120, the only ones (docs/kernels.md)
CHIPS = (80, 90, 100, 120)  # compute capabilities, of the kernel alone; whether a program fits is asked on the chip
TRITONS = ("3.6.0", "3.8.0", "3.9.0")  # in addition to the installed one


def compile_all(chip: int, names: list[str]) -> None:
    """Prints what the assembler says of the single-pass kernel for each "columns:dtype:objective+estimator"."""
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import compile as compile_kernel
    from triton.experimental.gluon._runtime import GluonASTSource

    from megatron_pg.kernels.triton import rows, single_pass
    from megatron_pg.kernels.triton.single_pass_kernel import single_pass_kernel
    from megatron_pg.kernels.triton.terms import FieldPointers

    for name in names:
        columns, dtype, loss = name.split(":")
        shape = single_pass.Shape.of_row(int(columns), {"bf16": 2, "fp32": 4}[dtype])
        objective, _, estimator = loss.partition("+")
        constants = {"TOKEN_KERNEL": getattr(rows, objective), "KL": getattr(rows, estimator, None)}
        constants |= {"BONUS": bool(estimator), "ENTROPY": True, "ROW": shape.tiling}
        kernel = single_pass_kernel
        types = {"logits": f"*{dtype}", "gradients": f"*{dtype}", "targets": "*i64", "results": "*fp32"}
        types |= {"fields": FieldPointers(*["*fp32"] * 7)._replace(mask="*i1")}
        types |= {"numbers": ("fp32",) * 4, "coefficients": ("fp32",) * 2}
        types |= dict.fromkeys(["rows", "columns", "logits_stride", "gradients_stride", "zero"], "i32")
        signature = {n: "constexpr" if n in constants else types.get(n, "fp32") for n in kernel.arg_names}
        aligned = ["logits", "gradients", "targets", "results", "columns", "logits_stride", "gradients_stride"]
        places = [(kernel.arg_names.index(n),) for n in aligned]
        places += [(kernel.arg_names.index("fields"), i) for i in range(7)]
        source = GluonASTSource(
            fn=kernel,
            signature=signature,
            constexprs={(kernel.arg_names.index(n),): value for n, value in constants.items()},
            attrs={place: [["tt.divisibility", 16]] for place in places},
        )
        options = shape.options
        built = compile_kernel(source, target=GPUTarget("cuda", chip, 32), options=options)
        usage, code = disassembled(built.asm["cubin"])
        copies, wide_copies = (len(re.findall(pattern, code)) for pattern in (r"LDGSTS", r"LDGSTS\S*\.128"))
        figures = {
            "name": name,
            "threads": shape.tiling.threads,
            "programs": shape.programs,
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),
            "shared": built.metadata.shared,
            "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
            "wide_stores": len(re.findall(r"STG\S*\.128", code)),
            "wide_copies": wide_copies,
            "narrow_copies": copies - wide_copies,
        }
        print(json.dumps(figures))


@pytest.mark.proof("Kernels compiled for sm_90: no spills, 16-byte accesses, programs fit")
def test_the_single_pass_kernel_fits_the_chip(full, evidence):
    found = compiled(90, [f"{columns}:{dtype}:{loss}" for columns, dtype in (ALL if full else FAST) for loss in LOSSES])
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] * kernel["threads"] * kernel["programs"] <= REGISTERS, kernel
        assert (kernel["shared"] + RESERVED) * kernel["programs"] <= SHARED_BYTES, kernel
        assert kernel["wide_stores"] > 0, kernel
        assert kernel["wide_copies"] > 0, kernel
        assert kernel["narrow_copies"] == 0, kernel
    evidence(cases=len(found))


def of_triton(release: str) -> object:
    row = f"Kernels compiled for sm_80, sm_90, sm_100 and sm_120, {release}: 16-byte accesses, few spills"
    return pytest.param(release, marks=pytest.mark.proof(row))


@pytest.mark.parametrize("release", [of_triton(INSTALLED), *(of_triton(f"Triton {each}") for each in TRITONS)])
def test_it_compiles_for_other_chips_and_with_other_releases(release, full, evidence):
    path = None if release == INSTALLED else Path(sys.prefix) / release.lower().replace(" ", "-")
    if path is not None and not (full and path.is_dir()):
        pytest.skip(f'needs {release}: make prove TRITONS="{release.split()[1]}"')
    names = [f"{columns}:bf16:{loss}" for columns in (19008, 37984, 151936) for loss in LOSSES][: None if full else 1]
    chips = CHIPS if full else (100,)
    for chip in chips:
        for kernel in compiled(chip, names, path):
            assert kernel["spills"] <= most_spills(release, kernel["name"]), (chip, kernel)
            assert kernel["wide_stores"] > 0, (chip, kernel)
            assert kernel["wide_copies"] > 0, (chip, kernel)
            assert kernel["narrow_copies"] == 0, (chip, kernel)
    evidence(cases=len(chips) * len(names))


def most_spills(release: str, name: str) -> int:
    """That a kernel may have, by its name in `compile_all`."""
    is_tight = release == INSTALLED and int(name.partition(":")[0]) == TIGHT
    return FEW if is_tight or release not in (INSTALLED, TUNED) else 0


def compiled(chip: int, names: list[str], triton: Path | None = None) -> list[dict]:
    """What `compile_all` prints, with the installed Triton or another."""
    first = () if triton is None else (triton,)
    found = processes.compiled_by(__file__, str(chip), *names, first=first, TRITON_DEFAULT_FP_FUSION="1")
    assert [f["name"] for f in found] == names
    return found


if __name__ == "__main__":
    compile_all(int(sys.argv[1]), sys.argv[2:])
