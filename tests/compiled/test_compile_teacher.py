"""The kernels over a teacher's whole vocabulary, compiled for GPUs that are not here; as a script it compiles and prints one JSON line per kernel.

Triton's interpreter, which the other tests use, takes what the compiler refuses, and is chosen when kernels are imported.
"""

import json
import re
import sys

import processes
import pytest
import torch

CAPABILITIES = (80, 90, 100, 120)
FORMS = ("forward_kl", "reverse_kl", "jsd")
REGISTERS, THREADS = 65536, 1024  # of a multiprocessor; what keeps enough loads in flight
WRITING_THREADS = 640  # that have twice as many each
NUMBERS = ("valid", "first", "columns", "vocab_size", "blocks", "ranks", "rows")
STRIDES = ("student_stride", "teacher_stride", "gradient_stride")


def variants():
    """Kernel, what it is launched with beside its arguments, and the dtype of the gradient."""
    from megatron_pg.kernels.triton import teacher as by

    logits, shares = torch.empty(0), {"NUMBERS": (0.3, 0.7)}
    yield by.mixture_kernel, by.MIX.options(logits) | shares, "fp32"
    for form in FORMS:
        yield by.statistics_kernel, by.READ.options(logits) | {"FORM": form}, "fp32"
        yield by.combine_kernel, {"FORM": form, "BLOCK": by.COMBINE_ROWS}, "fp32"
        for dtype in ("bf16", "fp32"):
            yield by.gradient_kernel, by.WRITE.options(logits) | shares | {"FORM": form}, dtype


def compile_all(capabilities: list[int]) -> None:
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    types = {"targets": "*i64", "c": "fp32"} | dict.fromkeys(NUMBERS, "i32") | dict.fromkeys(STRIDES, "i64")
    for capability in capabilities:
        for kernel, options, dtype in variants():
            names = kernel.arg_names
            constants = {name: options.pop(name) for name in names if name in options}
            known = types | {"gradients": f"*{dtype}"}
            signature = {name: "constexpr" if name in constants else known.get(name, "*fp32") for name in names}
            aligned = [n for n, t in signature.items() if t.startswith("*") or n in (*STRIDES, "valid", "columns")]
            source = ASTSource(
                fn=kernel,
                signature=signature,
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
            )
            built = compile_kernel(source, target=GPUTarget("cuda", capability, 32), options=options)
            usage, code = disassembled(built.asm["cubin"])
            figures = {
                "name": kernel.__name__,
                "form": constants.get("FORM"),
                "capability": capability,
                "registers": int(re.search(r"REG:(\d+)", usage)[1]),
                "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
                "vectors": len(re.findall(r"LDG\S*\.128", code)),
            }
            print(json.dumps(figures))


@pytest.mark.proof(
    "Kernels over a teacher's whole vocabulary compiled for sm_80 to sm_120: no spills, whole vectors, they fit"
)
def test_the_kernels_compile_without_spills(full, evidence):
    capabilities = CAPABILITIES if full else (90,)
    found = processes.compiled_by(__file__, *map(str, capabilities))
    assert len(found) == len(capabilities) * (1 + 4 * len(FORMS))
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        threads = WRITING_THREADS if kernel["name"] == "gradient_kernel" else THREADS
        assert kernel["registers"] * threads <= REGISTERS, kernel
        assert (kernel["vectors"] > 0) == (kernel["name"] != "combine_kernel"), kernel
    evidence(cases=len(found))


if __name__ == "__main__":
    compile_all([int(capability) for capability in sys.argv[1:]])
