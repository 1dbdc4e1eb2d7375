"""The kernels of the head's mode "scaled_exp", compiled for sm_90 without a GPU: tensor cores, copies of whole tiles, spills, what fits.

Run as a script it compiles and prints one JSON line per width; kernels must be compiled in a process of their own, because the
interpreter, which the other tests use, is chosen when they are imported.
"""

import json
import re
import sys

import processes
import pytest

REGISTERS, SHARED_BYTES, RESERVED = 65536, 233472, 1024  # of a Hopper multiprocessor; shared memory kept per program
WIDTHS = (1024, 2048, 4096, 8192)


def compile_all(widths: list[int]) -> None:
    """Prints what the assembler says of the product for each width."""
    from machine_code import disassembled
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler import compile as compile_kernel

    from megatron_pg.lm_head.scaled_exp.kernels import Tiles, scaled_exp_kernel

    for width in widths:
        tiles = Tiles.of_width(width)
        constants, names = tiles.constants, scaled_exp_kernel.arg_names
        types = {
            "hidden": f"tensordesc<bf16[{tiles.rows},{tiles.depth}]>",
            "weight": f"tensordesc<bf16[{tiles.columns},{tiles.depth}]>",
            "scaled": f"tensordesc<bf16[{tiles.rows},{tiles.columns // tiles.parts}]>",
            **{"target_logits": "*fp32", "targets": "*i64", "sums": "*fp32", "c": "fp32"},
        }
        signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
        aligned = [n for n, t in signature.items() if t.startswith("*") or n in ("width", "columns", "valid")]
        source = ASTSource(
            fn=scaled_exp_kernel,
            signature=signature,
            constexprs={(names.index(n),): value for n, value in constants.items()},
            attrs={(names.index(n),): [["tt.divisibility", 16]] for n in aligned},
        )
        options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
        built = compile_kernel(source, target=GPUTarget("cuda", 90, 32), options=options)
        usage, code = disassembled(built.asm["cubin"])
        figures = {
            "width": width,
            "programs": tiles.programs,
            "threads": 32 * built.metadata.num_warps,
            "registers": int(re.search(r"REG:(\d+)", usage)[1]),
            "shared": built.metadata.shared,
            "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
            "tensor_cores": len(re.findall(r"\bHGMMA\b", code)),
            "tile_loads": len(re.findall(r"\bUTMALDG\b", code)),
            "tile_stores": len(re.findall(r"\bUTMASTG\b", code)),
        }
        print(json.dumps(figures))


@pytest.mark.proof(
    'The product of the head\'s mode "scaled_exp" compiled for sm_90: tensor cores, tiles copied whole, no spills, it fits'
)
def test_the_product_is_made_of_whole_tiles_and_fits(evidence):
    found = processes.compiled_by(__file__, *map(str, WIDTHS), TRITON_DEFAULT_FP_FUSION="1")
    assert [kernel["width"] for kernel in found] == [*WIDTHS]
    for kernel in found:
        assert kernel["spills"] == 0, kernel
        assert kernel["programs"] * kernel["registers"] * kernel["threads"] <= REGISTERS, kernel
        assert kernel["programs"] * (kernel["shared"] + RESERVED) <= SHARED_BYTES, kernel
        assert kernel["tensor_cores"] > 0, kernel
        assert kernel["tile_loads"] > 0, kernel
        assert kernel["tile_stores"] > 0, kernel
    evidence(cases=len(found))


if __name__ == "__main__":
    compile_all([int(width) for width in sys.argv[1:]])
