"""The table of kernels to compile for a GPU that the machine need not have, and figures of their machine code.

As a script, `builds.py CHIP [NAME…]` compiles for a compute capability the builds or groups of these names, and prints
one JSON line for each. Without a name it compiles the default tier, and prints the name and kernel of every build. It
runs in its own process, because the interpreter, which other tests use, is chosen on import.
"""

import itertools
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REGISTERS, SHARED_BYTES, RESERVED = 65536, 233472, 1024  # of a Hopper multiprocessor; shared memory kept per program
PATTERNS = {  # of machine code
    "spills": r"\b(?:STL|LDL)\b",
    "wide_loads": r"LDG\S*\.128",
    "wide_stores": r"STG\S*\.128",
    "wide_copies": r"LDGSTS\S*\.128",
    "narrow_copies": r"LDGSTS(?!\S*\.128)",
    "tensor_cores": r"\bHGMMA\b",
    "waits": r"\bHGMMA\b.*\bgsb0\b",
    "tile_loads": r"\bUTMALDG\b",
    "tile_stores": r"\bUTMASTG\b",
}
CAP = 30.0  # softcap of the builds that have one
STRIDES = ("stride", "strides", "logits_stride", "gradients_stride")
TYPES = (  # of arguments by name; any other is a pointer to float32
    dict.fromkeys(("targets", "starts", "counts", "order", "lengths"), "*i64")
    | dict.fromkeys(("heads", "tails", "tail_totals", "teacher_tails", "doubles", "by_heads", "by_tails"), "*fp64")
    | dict.fromkeys(("c", "grad_scale", "slope_scale", "opsm_threshold", "coefficient"), "fp32")
    | dict.fromkeys(
        ("rows", "columns", "valid", "first", "vocab_size", "blocks", "ranks", "K", "zero", *STRIDES), "i32"
    )
    | dict.fromkeys(("sequences", "num_sequences", "row_stride", "id_stride"), "i32")
    | {"mask": "*i1", "ids": "*i32", "numbers": ("fp32",) * 4, "coefficients": ("fp32",) * 2}
)


@dataclass(frozen=True)
class Build:
    """A kernel with what it is launched with, and what its machine code must be."""

    name: str  # GROUP WORDS…
    kernel: Any
    launched: dict[str, Any]  # constants and options
    types: dict[str, Any] = field(default_factory=dict)  # in addition to `TYPES`
    even: tuple[str, ...] = ("valid", "columns", "count", *STRIDES)  # numbers that are multiples of 16
    threads: int = 0  # that must fit on a multiprocessor with their registers; 0: any
    programs: int = 0  # that must fit with their shared memory; 0: any
    least: dict[str, int] = field(default_factory=dict)  # of `PATTERNS`
    is_gluon: bool = False
    is_default: bool = False  # part of the default tier

    @property
    def constants(self) -> dict[str, Any]:
        return {name: self.launched[name] for name in self.kernel.arg_names if name in self.launched}

    @property
    def options(self) -> dict[str, int]:
        return {name: value for name, value in self.launched.items() if name not in self.kernel.arg_names}

    @property
    def source(self) -> Any:
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        names, types = self.kernel.arg_names, TYPES | self.types
        signature = {name: "constexpr" if name in self.constants else types.get(name, "*fp32") for name in names}
        aligned = [place for place, kind in self._leaves(signature) if kind[0] == "*" or self._is_even(place)]
        absent = {place: None for place, kind in self._leaves(signature) if kind == "constexpr" and len(place) > 1}
        return (GluonASTSource if self.is_gluon else ASTSource)(
            fn=self.kernel,
            signature=signature,
            constexprs=absent | {(names.index(name),): value for name, value in self.constants.items()},
            attrs={place: [["tt.divisibility", 16]] for place in aligned},
        )

    def _is_even(self, place: tuple[int, ...]) -> bool:
        name = self.kernel.arg_names[place[0]]
        fields = getattr(self.types.get(name), "_fields", ())
        return name in self.even or (len(place) > 1 and fields != () and fields[place[1]] in self.even)

    @staticmethod
    def _leaves(signature: dict[str, Any]) -> Iterator[tuple[tuple[int, ...], str]]:
        """Places and types of the arguments, those within tuples one by one."""
        for i, kind in enumerate(signature.values()):
            yield from (((i, j), each) for j, each in enumerate(kind)) if isinstance(kind, tuple) else [((i,), kind)]

    def compiled(self, chip: int) -> dict[str, Any]:
        """Figures of the machine code, with the flaws."""
        from triton.backends.compiler import GPUTarget
        from triton.compiler import compile as compile_kernel

        built = compile_kernel(self.source, target=GPUTarget("cuda", chip, 32), options=self.options)
        usage, code = disassembled(built.asm["cubin"])
        found = {name: len(re.findall(pattern, code)) for name, pattern in PATTERNS.items()}
        found |= {"registers": int(re.search(r"REG:(\d+)", usage)[1]), "shared": built.metadata.shared}
        flaws = [f"{found[name]} {name}" for name, number in self.least.items() if found[name] < number]
        flaws += ["products that wait for each other"] if found["waits"] > 1 else []
        flaws += ["narrow copies"] if found["narrow_copies"] else []
        flaws += ["registers"] if found["registers"] * self.threads > REGISTERS else []
        flaws += ["shared memory"] if (found["shared"] + RESERVED) * self.programs > SHARED_BYTES else []
        return {"name": self.name, "flaws": flaws} | found


def disassembled(cubin: bytes) -> tuple[str, str]:
    """Resource usage and machine code, from the cuobjdump of Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return tuple(
            subprocess.run([tool, flag, file.name], capture_output=True, text=True, check=True).stdout
            for flag in ("--dump-resource-usage", "-sass")
        )


def capped(cap: float | None) -> str:
    """The end of a build's name."""
    return "" if cap is None else " softcap"


def logits_of(dtype: str) -> Any:
    """None of them."""
    import torch

    return torch.empty(0, dtype={"bf16": torch.bfloat16, "fp32": torch.float32}[dtype])


def single_pass() -> Iterator[Build]:
    """Plain, and with the longest token kernel, a KL term and the bonus, at every shape of a row."""
    from megatron_pg.kernels.triton import single_pass as by
    from megatron_pg.kernels.triton import token_kernels
    from megatron_pg.kernels.triton.single_pass_kernel import single_pass_kernel
    from megatron_pg.kernels.triton.tiles import Kind

    sizes = [(2048, "bf16"), (151936, "bf16"), (19008, "bf16"), (151936, "fp32")]
    sizes += [(columns, "bf16") for columns in (9008, 37984, 40960, 76800, 81920, 128256, 180224)]
    sizes += [(columns, "bf16") for columns in (201088, 262144, 327680)]
    sizes += [(columns, "fp32") for columns in (38912, 60000, 90112, 201088)]
    shapes = [*itertools.product(sizes, ("grpo", "dppo_kl+k3_weighted"), (None,))]
    shapes += [(size, "grpo", CAP) for size in (*sizes[:4], (256000, "bf16"))]
    for (columns, dtype), loss, cap in shapes:
        shape = by.Shape.of_row(columns, logits_of(dtype).itemsize, is_capped=cap is not None)
        objective, _, estimator = loss.partition("+")
        launched = {"TOKEN_KERNEL": getattr(token_kernels, objective), "KL": getattr(token_kernels, estimator, None)}
        launched["ROW"] = shape.tiling._replace(kind=Kind(dtype == "bf16", cap), bonus=bool(estimator))
        yield Build(
            f"single_pass {columns} {dtype} {loss}{capped(cap)}",
            single_pass_kernel,
            launched | shape.options,
            {"logits": f"*{dtype}", "gradients": f"*{dtype}", "fields": _fields(bool(estimator))},
            threads=shape.tiling.threads // shape.tiling.blocks * shape.programs,
            programs=shape.programs,
            least={"wide_stores": 1, "wide_copies": 1},
            is_gluon=True,
            is_default=columns == 2048 and bool(estimator),
        )


def _fields(has_terms: bool) -> Any:
    from megatron_pg.kernels.triton.terms import FieldPointers

    return FieldPointers(*["*fp32"] * 3, "*i1", *["*fp32" if has_terms else "constexpr"] * 3)


def surrogate() -> Iterator[Build]:
    """The loss from log-probabilities, of tokens and of sequences with all that may be read of them."""
    from megatron_pg.kernels.triton import segments, token_kernels
    from megatron_pg.kernels.triton import surrogate as by

    for name, reads_sequences in (("dppo_kl", False), ("vespo", True)):
        estimator = token_kernels.k3_weighted if reads_sequences else None
        constants = {"TOKEN_KERNEL": getattr(token_kernels, name), "KL": estimator, "BONUS": reads_sequences}
        constants |= {"SEQUENCES": reads_sequences, "BLOCK": by.BLOCK} | (
            {} if reads_sequences else {"sequences": None}
        )
        kinds = {"sequences": segments.SequencePointers("*i64", *["*fp64"] * 6), "fields": _fields(reads_sequences)}
        yield Build(f"surrogate {name}", by.surrogate_kernel, constants, types=kinds, is_default=True)
    launched = {"AVERAGED": token_kernels.gmpo_averaged, "BLOCK": segments.BLOCK, "num_warps": 8}
    types = {"results": "*fp64", "of_tokens": (*["*fp32"] * 4, "*i1")}
    yield Build("surrogate segments", segments.segment_kernel, launched, types, is_default=True)


def rows() -> Iterator[Build]:
    """What reads and writes rows of logits, with rows that begin at multiples of 16 bytes and others."""
    from megatron_pg.kernels.triton import token_kernels
    from megatron_pg.kernels.triton import vocab_parallel as by
    from megatron_pg.kernels.triton.surrogate import token_loss_kernel

    given, columns = by.OfRows(*["*fp32"] * 6), by.Columns(*["i32"] * 4)
    in_one = given._replace(**dict.fromkeys(("totals", "entropies", "by_logprobs")))  # with the peaks
    upstream = [given, *(given._replace(**{name: None}) for name in ("by_entropies", "grad_loss"))]
    upstream += [by.OfRows(*["*fp32"] * 4), by.OfRows("*fp32", factors="*fp32")]
    upstream += [in_one, in_one._replace(by_entropies=None)]
    upstream = [by.OfRows(*(each or "constexpr" for each in known)) for known in upstream]
    losses = [{"TOKEN_KERNEL": token_kernels.dppo_kl, "KL": token_kernels.k3_weighted, "BONUS": True}]
    losses.append({"TOKEN_KERNEL": token_kernels.grpo, "KL": None, "BONUS": False})
    for dtype, shifted, cap in itertools.product(("bf16", "fp32"), (False, True), (None, CAP)):
        read, write = (walk.options(logits_of(dtype), cap, shifted=shifted) for walk in (by.READ, by.WRITE))
        variants = [(by.statistics_kernel, read | {"WHOLE": whole}) for whole in (False, True)]
        variants += [(by.gradient_kernel, write | {"of_rows": known}) for known in upstream]
        variants += [(token_loss_kernel, read | loss) for loss in losses]
        for number, (kernel, launched) in enumerate(variants):
            types = {"of_rows": launched.pop("of_rows", None), "strides": ("i32",) * 2, "columns": columns}
            yield Build(
                f"rows {kernel.__name__} {number} {dtype} {'shifted' if shifted else 'even'}{capped(cap)}",
                kernel,
                launched,
                {"logits": f"*{dtype}", "gradients": f"*{dtype}", "fields": _fields(launched.get("BONUS", False))}
                | types,
                even=() if shifted else ("valid", "count", *STRIDES),
                threads=1024 if cap is None else 640,  # what keeps enough loads in flight
                least={"wide_loads": launched["WALK"].unroll * (1 if shifted else 2)},
                is_default=dtype == "bf16" and not shifted and cap is None and number in (1, 2, 9),
            )


def teacher() -> Iterator[Build]:
    """What reads the rows of student and teacher."""
    from megatron_pg.kernels.teacher import Form, TeacherRowStatistics
    from megatron_pg.kernels.triton import teacher as by
    from megatron_pg.kernels.triton.vocab_parallel import Columns

    forms, blocks = (Form("forward_kl"), Form("reverse_kl"), Form("jsd", 0.3)), {"BLOCK": by.COMBINE_ROWS}
    variants = [(form, by.combine_kernel, blocks, "fp32", 1024, None) for form in forms]
    for cap in (None, CAP):
        mix, read, write = (walk.options(logits_of("fp32"), cap) for walk in (by.MIX, by.READ, by.WRITE))
        variants.append((forms[2], by.mixture_kernel, mix, "fp32", 1024, cap))
        variants += [(form, by.statistics_kernel, read, "fp32", 1024, cap) for form in forms]
        for form, dtype in itertools.product(forms, ("bf16", "fp32")):
            variants.append((form, by.gradient_kernel, write, dtype, 640 if dtype == "fp32" else 896, cap))
    of_rows = TeacherRowStatistics(*["*fp32"] * len(TeacherRowStatistics._fields))
    columns = Columns(*["i32"] * 4)
    for form, kernel, launched, dtype, threads, cap in variants:
        is_mixture, strides = kernel is by.mixture_kernel, ("i64",) * (3 if kernel is by.gradient_kernel else 2)
        matrices = "*fp32", "*fp32", f"*{dtype}"
        yield Build(
            f"teacher {kernel.__name__} {'' if is_mixture else form.name} {dtype}{capped(cap)}",
            kernel,
            launched | {"FORM": form},
            {"matrices": matrices[: len(strides)], "of_rows": of_rows, "slopes": ("*fp32",) * 3, "strides": strides}
            | {"columns": columns},
            threads=threads if cap is None else 512,
            least={"wide_loads": int(kernel is not by.combine_kernel)},
            is_default=form.name == "jsd" and dtype == "fp32" and cap is None,
        )


def topk() -> Iterator[Build]:
    """What computes on the teacher's top-k tokens, by the number of ids of a row."""
    import torch

    from megatron_pg.declarations.loss_terms import KINDS
    from megatron_pg.kernels.topk import TopKRowStatistics
    from megatron_pg.kernels.triton import divergences, topk_loss
    from megatron_pg.kernels.triton import topk as by

    double, single, of_teacher = ("*fp64",) * 2, ("*fp32",) * 2, ("*fp32", "*fp64")
    types = {"stride": "i64", "student": double, "teacher": of_teacher, "own": ("*i1", "*fp32")}
    types |= {"of_rows": TopKRowStatistics(*single, "*fp32", *double, "*fp32", "*fp64"), "slopes": (*single, *double)}
    variants = [(kernel, {}, "fp32") for kernel in (by.combine_kernel, by.coefficients_kernel)]
    for dtype in ("bf16", "fp32"):
        variants.append((by.take_and_hide_kernel, {}, dtype))
        variants.append((by.put_kernel, {"starts": None, "counts": None}, dtype))
    for kind in (each for each in KINDS.values() if each.reads_topk):
        form = {"FORM": getattr(divergences, kind.function), "TAIL_FLOOR": 1e-6 if kind.has_tail else None}
        form |= {"NUMBERS": divergences.numbers_of(kind.mixture and kind.mixture.default)}
        variants += [(topk_loss.divergence_kernel, form | {"FIRST": first}, "fp32") for first in (True, False)]
    for (kernel, flags, dtype), block in itertools.product(variants, (64, 512)):
        form = getattr(flags.get("FORM"), "__name__", "")
        yield Build(
            f"topk {kernel.__name__} {form} {flags.get('FIRST', '')} {dtype} {block}",
            kernel,
            flags | by.block_of(torch.empty(1, block)),
            {"logits": f"*{dtype}", "table": f"*{dtype}", **types}
            | ({"slopes": double, "results": ("*fp32",) * 3} if form else {}),
            even=(),
            is_default=block == 64 and dtype == "fp32" and (not form or (form == "jsd" and not flags["FIRST"])),
        )


def sampling_masks() -> Iterator[Build]:
    """What reads and writes the tokens of a sampling mask."""
    from megatron_pg.kernels.sampling_masks import SamplingMaskRowStatistics
    from megatron_pg.kernels.triton import sampling_masks as by
    from megatron_pg.kernels.triton.tiles import Kind
    from megatron_pg.kernels.triton.topk import put_kernel
    from megatron_pg.kernels.triton.vocab_parallel import Columns

    of_rows = SamplingMaskRowStatistics(*["*fp32"] * len(SamplingMaskRowStatistics._fields))
    variants = [(by.sampling_mask_statistics_kernel, {}), (put_kernel, {"K": 0, "row_stride": 0, "id_stride": 1})]
    variants += [(by.sampling_mask_gradient_kernel, {"WHOLE_ENTROPY": whole}) for whole in (False, True)]
    for (kernel, flags), dtype, cap in itertools.product(variants, ("bf16", "fp32"), (None, CAP)):
        if kernel is put_kernel and cap is not None:
            continue
        yield Build(
            f"sampling_masks {kernel.__name__} {flags.get('WHOLE_ENTROPY', '')} {dtype}{capped(cap)}",
            kernel,
            flags
            | {"BLOCK": by.BLOCK, "num_warps": by.WARPS}
            | ({} if kernel is put_kernel else {"KIND": Kind(cap=cap)}),
            {"logits": f"*{dtype}", "table": f"*{dtype}", "stride": "i64"}
            | {"sets": ("*i64", "*i64", "*i32"), "of_rows": of_rows, "slopes": ("*fp32", "*fp32")}
            | {"columns": Columns(*["i32"] * 4)},
            even=(),
            is_default=dtype == "fp32" and flags.get("WHOLE_ENTROPY", True) and cap is None,
        )


def tiled_product() -> Iterator[Build]:
    """The fused head's products with an epilogue: tensor cores, whole tiles."""
    from megatron_pg.lm_head import tiled_reader
    from megatron_pg.lm_head.scaled_exp.kernels import scaled_exp_tile
    from megatron_pg.lm_head.tiled_product import Tiles, product_kernel

    slopes = "*i64", *["*fp32"] * 5
    variants = {"scaled_exp": (scaled_exp_tile, ("*fp32", "*i64", "*fp32"))}
    variants["statistics"] = tiled_reader.statistics_tile, ("*i64", "*fp32")
    variants["gradient"] = tiled_reader.gradient_tile, (*slopes, "constexpr", "i32")
    variants["gradient with entropy"] = tiled_reader.gradient_tile, (*slopes, "*fp32", "i32")
    launched = {"ROWS": tiled_reader.MERGED, "TILES": 2048, "num_warps": 8}
    types = {"parts": "*fp32", "shares": "*fp32", "tiles": "i32"}
    wide = {"wide_loads": 1}
    yield Build("tiled_product merge", tiled_reader.merge_kernel, launched, types, least=wide, is_default=True)
    for name, width, cap in itertools.product(variants, (1024, 2048, 4096, 8192), (None, CAP)):
        tiles, (epilogue, of_rows) = Tiles.of_width(width, is_capped=cap is not None), variants[name]
        launched = {"CAP": cap, "EPILOGUE": epilogue, "num_warps": tiles.warps, "num_stages": tiles.stages}
        writes = name != "statistics"
        yield Build(
            f"tiled_product {name} {width}{capped(cap)}",
            product_kernel,
            tiles.constants | launched | ({} if writes else {"out": None}),
            dict.fromkeys(product_kernel.arg_names, "i32")
            | {
                "hidden": f"tensordesc<bf16[{tiles.rows},{tiles.depth}]>",
                "weight": f"tensordesc<bf16[{tiles.columns},{tiles.depth}]>",
                "out": f"tensordesc<bf16[{tiles.rows},{tiles.columns // tiles.parts}]>",
                **{"of_rows": of_rows, "c": "fp32"},
            },
            even=("width", "columns", "valid"),
            threads=32 * tiles.warps * tiles.programs,
            programs=tiles.programs,
            least={"tensor_cores": 1, "tile_loads": 1, "tile_stores": int(writes)},
            is_default=width == 1024 and cap is None,
        )


GROUPS = {make.__name__: make for make in (single_pass, surrogate, rows, teacher, topk, sampling_masks, tiled_product)}

if __name__ == "__main__":
    chip, *names = sys.argv[1:]
    for build in itertools.chain.from_iterable(GROUPS[group]() for group in {n.split()[0]: n for n in names} or GROUPS):
        if {build.name, build.name.split()[0]} & {*names} or (not names and build.is_default):
            print(json.dumps(build.compiled(int(chip)) | {"kernel": build.kernel.__name__}))
        elif not names:
            print(json.dumps({"name": build.name, "kernel": build.kernel.__name__}))
