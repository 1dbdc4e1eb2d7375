"""The single-pass kernel's launch: how a program holds a row, which logits are accepted, arguments and results."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_pg.kernels.device import multiprocessors
from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.triton.single_pass_kernel import Tiling, single_pass_kernel
from megatron_pg.kernels.triton.terms import KernelTerms, field_pointers, term_losses
from megatron_pg.kernels.triton.tiles import FUSED, Kind
from megatron_pg.kernels.triton.vocab_parallel import log2_scale
from megatron_pg.kernels.vocabulary import Vocabulary

DTYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Shape:
    """How a program of 32 * `warps` threads holds a row."""

    tiling: Tiling
    programs: int  # per multiprocessor
    registers: int  # per thread

    @classmethod
    @lru_cache
    def of_row(cls, columns: int, itemsize: int, *, is_capped: bool = False) -> "Shape":
        """The fastest of those measured on an H200 (docs/benchmarks.md); a softcap takes registers of tiles."""
        row_bytes = columns * itemsize
        if row_bytes <= 20 * 2048:
            tiles = -(-row_bytes // 2048)
            groups, per_group, lag = (5, 1, 2) if tiles <= 5 else (5, 2, 2) if tiles <= 10 else (10, 2, 3)
            return cls(Tiling(128, groups, per_group, lag, kept=0), programs=5, registers=96)
        if row_bytes <= 20 * 4096:
            tiles = -(-row_bytes // 4096)
            groups = min(7, (tiles - 1) // 2)
            tiling = Tiling(256, groups, per_group=2, lag=3, kept=tiles - 2 * groups)
            return cls(tiling, programs=3, registers=80)
        if row_bytes <= 38 * 4096:
            tiles = -(-row_bytes // 4096)
            groups = min(6, (tiles - 1) // 4)
            tiling = Tiling(256, groups, per_group=4, lag=groups - 3, kept=tiles - 4 * groups)
            return cls(tiling, programs=2, registers=128)
        alone, shared = (40, 36) if is_capped else (44, 40)  # tiles that a block holds, of one and of several
        blocks = 1 if row_bytes <= alone * 8192 else triton.next_power_of_2(-(-row_bytes // (shared * 8192)))
        tiles = -(-row_bytes // (8192 * blocks))
        groups = min(7, (tiles - 1) // 4)
        lag, kept = min(4, groups - 2), tiles - 4 * groups
        tiling = Tiling(512 * blocks, groups, per_group=4, lag=lag, kept=kept, blocks=blocks)
        return cls(tiling, programs=1, registers=128)

    @property
    def options(self) -> dict[str, int]:
        """What the kernel is launched with, besides its arguments."""
        row = self.tiling
        return {"num_warps": row.threads // row.blocks // 32, "num_ctas": row.blocks, "maxnreg": self.registers}

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, without that of its reductions."""
        return self.tiling.groups * self.tiling.per_group * self.tiling.threads // self.tiling.blocks * 16


_OTHER_BYTES = 1024  # shared memory of reductions and of what the blocks of a cluster exchange


def supports(logits: Tensor, vocabulary: Vocabulary) -> bool:
    """Whether programs fit on this device, and rows and a new gradient allow 16-byte copies.

    float16 is left to the kernels whose gradient is made in the backward, where the loss scale is known.
    """
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0 and logits.shape[1] % 16 == 0
    if not aligned or vocabulary.valid % 16 != 0 or logits.dtype not in DTYPES:
        return False
    shape = _shape_of(logits, vocabulary)
    fits = shape.shared_bytes + _OTHER_BYTES <= _shared_memory(logits.device)
    return fits and shape.tiling.blocks <= _most_blocks(logits.device)


def _shape_of(logits: Tensor, vocabulary: Vocabulary) -> Shape:
    return Shape.of_row(vocabulary.valid, logits.element_size(), is_capped=vocabulary.softcap is not None)


@lru_cache
def _most_blocks(device: torch.device) -> int:
    """Most blocks of a cluster."""
    return 8 if torch.cuda.get_device_capability(device) >= (9, 0) else 1


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Most bytes of shared memory of a block."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


_clusters: dict[tuple[torch.device, int], int] = {}  # that run at a time on a device, by their number of blocks


def _programs(device: torch.device, shape: Shape, launch_of_no_rows: Callable[[], Any]) -> int:
    """Programs that run at a time; the driver counts clusters of 4 or 8 blocks, which do not fill every part of a GPU.

    The count is known before the first launch with rows, because results may differ in last bits between grids. It is
    at least 1: Triton skips a launch of no program, but the driver reports a cluster that does not fit.
    """
    blocks = shape.tiling.blocks
    if blocks <= 2:
        return max(1, shape.programs * multiprocessors(device) // blocks)
    if (device, blocks) not in _clusters:
        compiled, count = launch_of_no_rows(), triton.runtime.driver.active.utils.cuOccupancyMaxActiveClusters
        _clusters[device, blocks] = max(1, count(compiled.function, compiled.metadata.shared, blocks))
    return _clusters[device, blocks]


def loss_and_gradient(
    logits: Tensor,
    gradient: Tensor,
    policy_loss: PolicyLoss,
    vocabulary: Vocabulary,
    *,
    grad_scale: float,
    entropy: bool,
    most_programs: int | None = None,
) -> tuple[PolicyGradientLoss, int]:
    """Loss and per-token values of a loss with a token kernel, float32, 0 where masked; and the compiler's spills.

    Args:
        logits: [T, V] that `supports` accepts.
        gradient: [T, V] of the logits' or a narrower dtype and the same alignment; may be the logits. Receives
            grad_scale / grad_divisor * d loss / d logits.
        policy_loss: with its [T] fields, any float; masked rows are not read.
        vocabulary: not sharded; padding has no probability and the gradient 0.
        grad_scale: factor of the gradient.
        entropy: False leaves the entropies out, unless they are in the loss.
        most_programs: None: all that fit on the GPU.
    """
    terms, rows = KernelTerms.of(policy_loss.terms), logits.shape[0]
    out = torch.empty(5 + (terms.kl is not None), rows, dtype=torch.float32, device=logits.device)
    valid = vocabulary.valid
    shape = _shape_of(logits, vocabulary)
    tensors = logits, gradient, policy_loss.fields.targets.contiguous(), field_pointers(policy_loss), out
    sizes = valid, logits.stride(0), gradient.stride(0), log2_scale(vocabulary)
    scale = grad_scale / policy_loss.terms.grad_divisor / vocabulary.temperature
    options = terms.constants | shape.options | FUSED
    kind, bonus = Kind(logits.dtype == torch.bfloat16, vocabulary.softcap), options.pop("BONUS")
    options["ROW"] = shape.tiling._replace(kind=kind, entropy=entropy or bonus, bonus=bonus)
    after_rows = *sizes, terms.numbers, terms.coefficients, scale, 0

    def launch(programs: int, rows: int) -> Any:
        return single_pass_kernel[(programs,)](*tensors, rows, *after_rows, **options)

    if most_programs is None:
        most_programs = _programs(logits.device, shape, lambda: launch(1, 0))
    compiled = launch(min(rows, most_programs), rows)
    if valid < gradient.shape[1]:
        gradient[:, valid:] = 0
    token_losses, weighted, logprobs, log_ratios, entropies, *kl = out.unbind()
    losses = term_losses(policy_loss, kl[0] if kl else None, entropies)
    known_entropies = entropies if options["ROW"].entropy else None
    found = PolicyGradientLoss(weighted.sum(), token_losses, logprobs, log_ratios, known_entropies, losses)
    return found, compiled.n_spills
