"""The kernels of what could be sampled, compiled for sm_90 without a GPU; as a script it compiles and prints one JSON line per kernel.

Triton's interpreter, which the other tests use, takes what the compiler refuses, and is chosen when kernels are imported.
"""

import itertools
import json

import processes
import pytest


def compile_all() -> None:
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from megatron_pg.kernels.triton import sampling_masks as kernels
    from megatron_pg.kernels.triton import topk

    types = {"logits": "*{0}", "table": "*{0}", "gradients": "*{0}", "targets": "*i64", "mask": "*i1", "starts": "*i64"}
    types |= {"counts": "*i64", "ids": "*i32", "c": "fp32", "valid": "i32", "first": "i32", "vocab_size": "i32"}
    types |= {"stride": "i64"}
    variants = [
        (kernels.sampling_mask_statistics_kernel, {}),
        (kernels.sampling_mask_gradient_kernel, {"WHOLE_ENTROPY": False}),
        (kernels.sampling_mask_gradient_kernel, {"WHOLE_ENTROPY": True}),
        (topk.put_kernel, {"K": 0, "row_stride": 0, "id_stride": 1}),
    ]
    for (kernel, flags), dtype in itertools.product(variants, ("bf16", "fp32")):
        constants = flags | {"BLOCK": kernels.BLOCK}
        signature = {
            name: "constexpr" if name in constants else types.get(name, "*fp32").format(dtype)
            for name in kernel.arg_names
        }
        places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
        source = ASTSource(fn=kernel, signature=signature, constexprs=places)
        built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": kernels.WARPS})
        _, code = disassembled(built.asm["cubin"])
        spills = code.count("STL") + code.count("LDL")
        print(json.dumps({"name": kernel.__name__, "flags": flags, "dtype": dtype, "spills": spills}))


@pytest.mark.proof("Kernels of sampling masks compiled for sm_90: no spills")
def test_the_kernels_compile_without_spills(evidence):
    found = processes.compiled_by(__file__)
    assert len(found) == 8
    assert not [kernel for kernel in found if kernel["spills"]]
    evidence(cases=len(found))


if __name__ == "__main__":
    compile_all()
