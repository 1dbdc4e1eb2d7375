"""The kernels of a teacher's likeliest tokens, compiled for sm_90 without a GPU; as a script it compiles and prints one JSON line per kernel.

Triton's interpreter, which the other tests use, takes what the compiler refuses, and is chosen when kernels are imported.
"""

import json

import processes
import pytest

BLOCKS = (64, 512)  # ids of a row
DOUBLES = ("doubles", "heads", "tails", "tail_totals", "teacher_tails", "by_heads", "by_tails")
NUMBERS = ("rows", "K", "ranks", "valid", "first", "vocab_size", "row_stride", "id_stride")


def variants():
    """Kernel, constants beside its block, and the dtype of the logits."""
    from megatron_pg.declarations.loss_terms import KINDS
    from megatron_pg.kernels.triton import divergences, topk_loss, topk_rows
    from megatron_pg.kernels.triton import topk as topk_triton

    yield topk_rows.combine_kernel, {}, "fp32"
    yield topk_rows.coefficients_kernel, {}, "fp32"
    for dtype in ("bf16", "fp32"):
        yield topk_triton.take_and_hide_kernel, {}, dtype
        yield topk_triton.put_kernel, {"starts": None, "counts": None}, dtype
    for kind in (each for each in KINDS.values() if each.reads_topk):
        constants = {
            "FORM": getattr(divergences, kind.function),
            "NUMBERS": divergences.numbers_of(kind.mixture and kind.mixture.default),
            "TAIL_FLOOR": 1e-6 if kind.has_tail else None,
        }
        for first in (True, False):
            yield topk_loss.divergence_kernel, constants | {"FIRST": first}, "fp32"


def compile_all() -> None:
    import torch
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from megatron_pg.kernels.triton import topk_rows

    types = {"logits": "*{0}", "table": "*{0}", "targets": "*i64", "mask": "*i1", "ids": "*i32", "c": "fp32"}
    types |= {"stride": "i64", "coefficient": "fp32", "slope_scale": "fp32"}
    types |= dict.fromkeys(DOUBLES, "*fp64") | dict.fromkeys(NUMBERS, "i32")
    for kernel, flags, dtype in variants():
        for block in BLOCKS:
            constants = flags | {"BLOCK": block}
            signature = {
                name: "constexpr" if name in constants else types.get(name, "*fp32").format(dtype)
                for name in kernel.arg_names
            }
            places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            source = ASTSource(fn=kernel, signature=signature, constexprs=places)
            options = {"num_warps": topk_rows.block_of(torch.empty(1, block))["num_warps"]}
            built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
            _, code = disassembled(built.asm["cubin"])
            spills = code.count("STL") + code.count("LDL")
            name = getattr(flags.get("FORM"), "__name__", kernel.__name__)
            print(json.dumps({"name": name, "dtype": dtype, "block": block, "spills": spills}))


@pytest.mark.proof("Kernels of a teacher's likeliest tokens compiled for sm_90: no spills")
def test_the_kernels_compile_without_spills(evidence):
    found = processes.compiled_by(__file__)
    assert len(found) == 2 * (6 + 2 * 6)
    assert not [kernel for kernel in found if kernel["spills"]]
    evidence(cases=len(found))


if __name__ == "__main__":
    compile_all()
