"""The kernels that read and write rows of logits, compiled for sm_90 without a GPU; as a script it compiles and prints one JSON line per kernel.

Triton's interpreter, which the other tests use, takes what the compiler refuses, and is chosen when kernels are imported.
"""

import itertools
import json
import re

import processes
import pytest
import torch

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
REGISTERS, THREADS = 65536, 1024  # of a multiprocessor; what keeps enough loads in flight
STRIDES = ("stride", "logits_stride", "gradients_stride")
NUMBERS = ("rows", "valid", "first", "columns", "vocab_size", "blocks", *STRIDES)


def variants(dtype: str, is_shifted: bool):
    """Kernel, and what it is launched with beside its arguments."""
    from megatron_pg.kernels.triton import vocab_parallel as by

    logits = torch.empty(0, dtype=DTYPES[dtype])
    for flag in (False, True):
        yield by.statistics_kernel, by.READ.options(logits) | {"SHIFTED": is_shifted, "WHOLE": flag}
    made = {"totals": None, "entropies": None, "by_logprobs": None, "by_entropies": None, "grad_loss": None}
    for absent in (
        *itertools.chain(*(itertools.combinations(("by_entropies", "grad_loss"), n) for n in range(3))),
        made,
    ):
        absent = {"factors": None} | dict.fromkeys(absent) if absent is not made else made
        yield by.gradient_kernel, by.WRITE.options(logits) | {"SHIFTED": is_shifted} | absent


def compile_all() -> None:
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    for dtype, is_shifted in itertools.product(DTYPES, (False, True)):
        types = {"logits": f"*{dtype}", "gradients": f"*{dtype}", "targets": "*i64", "mask": "*i1", "c": "fp32"}
        types |= dict.fromkeys(NUMBERS, "i32")
        for kernel, options in variants(dtype, is_shifted):
            names = kernel.arg_names
            constants = {name: options.pop(name) for name in names if name in options}
            signature = {name: "constexpr" if name in constants else types.get(name, "*fp32") for name in names}
            even = () if is_shifted else ("valid", "columns", *STRIDES)
            aligned = [name for name, kind in signature.items() if kind.startswith("*") or name in even]
            source = ASTSource(
                fn=kernel,
                signature=signature,
                constexprs={(names.index(name),): value for name, value in constants.items()},
                attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
            )
            built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
            usage, code = disassembled(built.asm["cubin"])
            figures = {
                "name": f"{kernel.__name__} {dtype} {'shifted' if is_shifted else 'even'}",
                "registers": int(re.search(r"REG:(\d+)", usage)[1]),
                "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
                "vectors": len(re.findall(r"LDG\S*\.128", code)),
                "whole": 2 * constants["UNROLL"],  # the group's tiles, and those of the end where they are even
            }
            print(json.dumps(figures | {"is_shifted": is_shifted}))


@pytest.mark.proof("Kernels over rows of logits compiled for sm_90: no spills, whole vectors, they fit")
def test_the_kernels_compile_without_spills(evidence):
    found = processes.compiled_by(__file__)
    assert len(found) == len(DTYPES) * 2 * 7
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["registers"] * THREADS <= REGISTERS, kernel
        assert kernel["vectors"] >= (kernel["whole"] // 2 if kernel["is_shifted"] else kernel["whole"]), kernel
    evidence(cases=len(found))


if __name__ == "__main__":
    compile_all()
