"""The whole vocabulary on one GPU, one launch: loss, log-probability, entropy and gradient with one read and one write.

A program keeps a row on its multiprocessor between the two passes over it: most of it in shared memory (`GROUPS` groups
of `PER` tiles, filled by asynchronous copies), the rest in registers (`KEPT` tiles), and what fits in neither is read
twice (`STREAMED`), the second time backwards and mostly from the L2 cache. While the gradient of a row is written,
group after group, the freed groups are filled with the program's next row, and the statistics of that row are
accumulated `LAG` groups behind. So loads, stores and arithmetic overlap and only a row's last groups wait.

Gluon, because plain Triton cannot keep a tile in shared memory from one pass to the next.
"""

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megatron_pg.kernels.policy_loss import PolicyGradientLoss, PolicyLoss
from megatron_pg.kernels.triton.terms import loss_terms, stream_losses, term_constants, term_fields, term_numbers
from megatron_pg.kernels.triton.tiles import (
    FLOOR,
    FUSED,
    LN2,
    LOWEST,
    accumulate,
    logprob_and_entropy,
    merge,
    minus_infinity,
    values,
)
from megatron_pg.kernels.vocabulary import Vocabulary

VECTOR_BYTES = 16  # of one load of one thread
# What Triton 3.6 calls otherwise.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))
KINDS = {torch.bfloat16: "bfloat16x2", torch.float32: "plain"}


@dataclass(frozen=True, slots=True)
class Shape:
    """How a program of `warps` warps holds a row; sizes in tiles of warps * 512 bytes."""

    warps: int
    groups: int
    per: int
    lag: int
    kept: int
    streamed: int  # tiles on their way at a time, of those that fit nowhere; 0 if all fit
    programs: int  # per multiprocessor
    registers: int  # per thread
    ahead: bool = False  # the fields of a row are read while the row before it is written

    @classmethod
    @lru_cache
    def of_row(cls, columns: int, itemsize: int) -> "Shape":
        """The fastest of those measured on an H200 (docs/kernels.md)."""
        row_bytes = columns * itemsize
        if row_bytes <= 20 * 2048:
            tiles = -(-row_bytes // 2048)
            groups, per, lag = (5, 1, 2) if tiles <= 5 else (5, 2, 2) if tiles <= 10 else (10, 2, 3)
            return cls(4, groups, per, lag, kept=0, streamed=0, programs=5, registers=96, ahead=True)
        if row_bytes <= 20 * 4096:
            kept = -(-row_bytes // 4096) - 10
            return cls(warps=8, groups=10, per=1, lag=6, kept=kept, streamed=0, programs=3, registers=80)
        if row_bytes <= 38 * 4096:
            kept = -(-row_bytes // 4096) - 20
            return cls(warps=8, groups=5, per=4, lag=2, kept=kept, streamed=0, programs=2, registers=128)
        if row_bytes <= 46 * 8192:
            tiles = -(-row_bytes // 8192)
            groups = min(7, (tiles - 1) // 4)
            lag = min(4, groups - 2)
            kept = tiles - 4 * groups
            return cls(warps=16, groups=groups, per=4, lag=lag, kept=kept, streamed=0, programs=1, registers=128)
        lag, kept, streamed = (3, 18, 5) if itemsize == 4 else (2, 16, 4)
        return cls(16, groups=7, per=4, lag=lag, kept=kept, streamed=streamed, programs=1, registers=128)

    def constants(self, dtype: torch.dtype, *, entropy: bool) -> dict[str, object]:
        """What the kernel is compiled for, beside the types of its arguments."""
        return {
            "KIND": KINDS[dtype],
            "THREADS": 32 * self.warps,
            "WORDS": VECTOR_BYTES // 4,
            "GROUPS": self.groups,
            "PER": self.per,
            "LAG": self.lag,
            "KEPT": self.kept,
            "STREAMED": self.streamed,
            "AHEAD": self.ahead,
            "ENTROPY": entropy,
        }

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a program, without what reductions take beside it."""
        return self.groups * self.per * self.warps * 512


_REDUCTION_BYTES = 512


def supports(logits: Tensor, vocabulary: Vocabulary) -> bool:
    """True if a program fits on this device, and the rows, and a new gradient's, are laid out for 16-byte copies.

    float16 is left to the kernels whose gradient is made in the backward, where the loss scale is known.
    """
    shape = Shape.of_row(vocabulary.valid, logits.element_size())
    aligned = logits.data_ptr() % 16 == 0 and logits.stride(0) % 16 == 0 and logits.shape[1] % 16 == 0
    return (
        logits.dtype in KINDS
        and aligned
        and vocabulary.valid % 16 == 0
        and shape.shared_bytes + _REDUCTION_BYTES <= _shared_memory(logits.device)
    )


@lru_cache
def _shared_memory(device: torch.device) -> int:
    """Bytes that a program can have."""
    return triton.runtime.driver.active.utils.get_device_properties(device.index)["max_shared_mem"]


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """Of a GPU; a call of its own takes the host longer than a small launch's arguments."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def loss_and_gradient(
    logits: Tensor,
    gradient: Tensor,
    policy_loss: PolicyLoss,
    vocabulary: Vocabulary,
    *,
    grad_scale: float,
    entropy: bool,
) -> PolicyGradientLoss:
    """Loss and per-token values of a loss that has a row, float32, 0 where masked. Fills `gradient`.

    Args:
        logits: [T, V] that `supports` accepts.
        gradient: [T, V] of the logits' or a narrower dtype, aligned alike, may be the logits; gets grad_scale / grad_divisor * d loss / d logits.
        policy_loss: with its [T] fields, any float; masked rows are not read.
        vocabulary: whole; padding takes no part.
        grad_scale: factor of the gradient.
        entropy: False leaves the entropies 0, unless they are in the loss.
    """
    return launch(logits, gradient, policy_loss, vocabulary, grad_scale=grad_scale, entropy=entropy)[0]


def launch(
    logits: Tensor,
    gradient: Tensor,
    policy_loss: PolicyLoss,
    vocabulary: Vocabulary,
    *,
    grad_scale: float,
    entropy: bool,
    most_programs: int | None = None,
) -> tuple[PolicyGradientLoss, int]:
    """`loss_and_gradient`, and how many spills the compiler needed; `most_programs`: all that fit on the GPU if None."""
    constants = term_constants(policy_loss)
    has_kl = constants["KL"] is not None
    out = torch.empty(5 + has_kl, len(logits), dtype=torch.float32, device=logits.device)
    valid, temperature = vocabulary.valid, vocabulary.temperature
    shape = Shape.of_row(valid, logits.element_size())
    if most_programs is None:
        most_programs = shape.programs * multiprocessors(logits.device)
    compiled = one_launch_kernel[(min(len(logits), most_programs),)](
        logits,
        gradient,
        policy_loss.fields.targets.contiguous(),
        *term_fields(policy_loss),
        out,
        len(logits),
        valid,
        logits.stride(0),
        gradient.stride(0),
        math.log2(math.e) / temperature,
        *term_numbers(policy_loss),
        grad_scale / policy_loss.terms.grad_divisor / temperature,
        0,
        **constants,
        **shape.constants(logits.dtype, entropy=entropy or constants["BONUS"]),
        num_warps=shape.warps,
        maxnreg=shape.registers,
        **FUSED,
    )
    if valid < gradient.shape[1]:
        gradient[:, valid:] = 0
    token_losses, weighted, logprobs, log_ratios, entropies, *kl = out.unbind()
    streams = stream_losses(policy_loss, kl[0] if has_kl else None, entropies)
    found = PolicyGradientLoss(weighted.sum(), token_losses, logprobs, log_ratios, entropies, streams)
    return found, compiled.n_spills


@gluon.jit
def _column(z, c, peak, factor, bend, BONUS: gl.constexpr):
    """The gradient by logits z, s = z c - peak: 2^s factor, or with an entropy bonus 2^s (factor + bend s)."""
    shifted = gl.fma(z, c, -peak)
    if BONUS:
        return gl.exp2(shifted) * gl.fma(gl.maximum(shifted, LOWEST), bend, factor)
    else:
        return gl.exp2(shifted) * factor


@gluon.jit
def _tile_gradient(
    words, c, peak, factor, bend, dtype: gl.constexpr, KIND: gl.constexpr, layout: gl.constexpr, BONUS: gl.constexpr
):
    """The columns' gradient rounded to `dtype`, in the order of the logits."""
    logits = values(words, KIND)
    low = _column(logits[0], c, peak, factor, bend, BONUS)
    if len(logits) == 2:
        high = _column(logits[1], c, peak, factor, bend, BONUS)
        both = gl.join(low, high).to(dtype)
        return gl.convert_layout(gl.reshape(both, (low.shape[0], 2 * low.shape[1])), layout, assert_trivial=True)
    else:
        return low.to(dtype)


@gluon.jit
def _unshared(words, key, KIND: gl.constexpr):
    """`words` again, but opaque: else the compiler keeps the unpacked float32 from the first pass, in twice the registers."""
    if KIND == "bfloat16x2":
        return words ^ key
    else:
        return words


@gluon.jit
def _fill(group, z_words, offsets, limit):
    """Starts the asynchronous copy of a group of tiles; words at or beyond `limit` become 0."""
    async_load(group, z_words + offsets, mask=offsets < limit)
    async_copy.commit_group()


@gluon.jit
def _load_tiles(
    z_row, offsets, limit, KIND: gl.constexpr, TILE: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr
):
    tiles = ()
    for k in gl.static_range(COUNT):
        at = (FIRST + k) * TILE
        tiles = tiles + (gl.load(z_row + at, mask=offsets < limit - at, other=minus_infinity(KIND)),)
    return tiles


@gluon.jit
def _stream_statistics(
    m,
    s,
    t,
    z_row,
    offsets,
    after,
    width,
    c,
    KIND: gl.constexpr,
    ENTROPY: gl.constexpr,
    TILE: gl.constexpr,
    COUNT: gl.constexpr,
):
    """Adds the words from `after` on, with the next `COUNT` tiles always on their way."""
    tiles = _load_tiles(z_row + after, offsets, width - after, KIND, TILE, 0, COUNT)
    for start in range(after, width, COUNT * TILE):
        ahead = start + COUNT * TILE
        coming = _load_tiles(z_row + ahead, offsets, width - ahead, KIND, TILE, 0, COUNT)
        m, s, t = accumulate(m, s, t, tiles, c, KIND, ENTROPY)
        tiles = coming
    return m, s, t


@gluon.jit
def _stream_gradients(
    z_row,
    g_row,
    offsets,
    g_offsets,
    after,
    width,
    c,
    peak,
    factor,
    bend,
    KIND: gl.constexpr,
    PAIR: gl.constexpr,
    TILE: gl.constexpr,
    COUNT: gl.constexpr,
    layout: gl.constexpr,
    BONUS: gl.constexpr,
):
    """The gradient of the words from `after` on, backwards: the last words read are the first read again."""
    dtype: gl.constexpr = g_row.dtype.element_ty
    groups = gl.cdiv(width - after, COUNT * TILE)
    start = after + (groups - 1) * (COUNT * TILE)
    tiles = _load_tiles(z_row + start, offsets, width - start, KIND, TILE, 0, COUNT)
    for _ in range(groups):
        ahead = start - COUNT * TILE
        limit = gl.where(ahead >= after, width - ahead, 0)
        coming = _load_tiles(z_row + ahead, offsets, limit, KIND, TILE, 0, COUNT)
        for k in gl.static_range(COUNT):
            at = (start + k * TILE) * PAIR
            out = _tile_gradient(tiles[k], c, peak, factor, bend, dtype, KIND, layout, BONUS)
            gl.store(g_row + at, out, mask=g_offsets < width * PAIR - at)
        tiles = coming
        start = ahead


@gluon.jit
def _fields_of(row, live, sources, columns, logits_stride, KL: gl.constexpr, BONUS: gl.constexpr):
    """The target's column and logit, and what else the loss reads of a row; 0 where it is not live or no term reads it."""
    logits, targets, old_logprobs, advantages, weights, other_logprobs, kl_weights, bonus_weights = sources
    target = gl.load(targets + row, mask=live, other=0)
    exists = (target >= 0) & (target < columns)
    column = gl.where(exists, target, 0)
    at = logits + row * logits_stride + column
    logit = gl.where(exists, gl.load(at, mask=live, other=0.0).to(gl.float32), float("nan"))
    old_logprob = gl.load(old_logprobs + row, mask=live, other=0.0).to(gl.float32)
    weight = gl.load(weights + row, mask=live, other=0.0).to(gl.float32)
    advantage = gl.load(advantages + row, mask=live, other=0.0).to(gl.float32)
    other_logprob = 0.0
    kl_weight = 0.0
    bonus_weight = 0.0
    if KL is not None:
        other_logprob = gl.load(other_logprobs + row, mask=live, other=0.0).to(gl.float32)
        kl_weight = gl.load(kl_weights + row, mask=live, other=0.0).to(gl.float32)
    if BONUS:
        bonus_weight = gl.load(bonus_weights + row, mask=live, other=0.0).to(gl.float32)
    return column, logit, old_logprob, advantage, weight, other_logprob, kl_weight, bonus_weight


@gluon.jit(do_not_specialize=["rows"])
def one_launch_kernel(
    logits,
    gradients,
    targets,
    old_logprobs,
    advantages,
    weights,
    mask,
    other_logprobs,
    kl_weights,
    bonus_weights,
    results,
    rows,
    columns,
    logits_stride,
    gradients_stride,
    c,
    p0,
    p1,
    p2,
    p3,
    kl_coef,
    entropy_coef,
    grad_scale,
    zero,
    ROW: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
    KIND: gl.constexpr,
    THREADS: gl.constexpr,
    WORDS: gl.constexpr,
    GROUPS: gl.constexpr,
    PER: gl.constexpr,
    LAG: gl.constexpr,
    KEPT: gl.constexpr,
    STREAMED: gl.constexpr,
    AHEAD: gl.constexpr,
    ENTROPY: gl.constexpr,
):
    """See the module; every program takes every `num_programs`-th row. Widths and offsets are in words."""
    PAIR: gl.constexpr = 2 if KIND == "bfloat16x2" else 1
    TILE: gl.constexpr = THREADS * WORDS
    SLOTS: gl.constexpr = GROUPS * PER
    ALL_SHARED: gl.constexpr = KEPT == 0 and STREAMED == 0
    dtype: gl.constexpr = gradients.dtype.element_ty
    word: gl.constexpr = gl.int32 if PAIR == 2 else logits.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [THREADS // 32, 1], [1, 0])
    g_layout: gl.constexpr = gl.BlockedLayout([1, WORDS * PAIR], [32, 1], [THREADS // 32, 1], [1, 0])
    thread: gl.constexpr = gl.SliceLayout(1, layout)
    shared: gl.constexpr = gl.SwizzledSharedLayout(WORDS, 1, 1, [1, 0])
    groups = gl.allocate_shared_memory(word, [GROUPS, PER * THREADS, WORDS], shared)
    if REINTERPRETS:
        slots = groups.reinterpret(word, [SLOTS, THREADS, WORDS], shared)
    else:
        slots = groups._reinterpret(word, [SLOTS, THREADS, WORDS], shared)

    in_thread = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))[None, :]
    offsets = gl.arange(0, THREADS, layout=thread)[:, None] * WORDS + in_thread
    group_offsets = gl.arange(0, PER * THREADS, layout=thread)[:, None] * WORDS + in_thread
    g_thread = gl.arange(0, THREADS, layout=gl.SliceLayout(1, g_layout))[:, None] * (WORDS * PAIR)
    g_offsets = g_thread + gl.arange(0, WORDS * PAIR, layout=gl.SliceLayout(0, g_layout))[None, :]
    zeros = gl.full((THREADS, WORDS * PAIR), 0.0, dtype, g_layout)
    none = gl.full((THREADS,), 0.0, gl.float32, thread)
    floor = gl.full((THREADS,), FLOOR, gl.float32, thread)

    z_words = logits.to(gl.pointer_type(word))
    z_stride = logits_stride // PAIR
    width = columns // PAIR
    after = (SLOTS + KEPT) * TILE  # first streamed word
    sources = (logits, targets, old_logprobs, advantages, weights, other_logprobs, kl_weights, bonus_weights)
    row = gl.program_id(0).to(gl.int64)
    live = gl.load(mask + row) != 0
    if AHEAD:
        fields = _fields_of(row, live, sources, columns, logits_stride, KL, BONUS)
    limit = gl.where(live, width, 0)
    z_row = z_words + row * z_stride
    for g in gl.static_range(GROUPS):
        _fill(groups.index(g), z_row + g * PER * TILE, group_offsets, limit - g * PER * TILE)
    kept = _load_tiles(z_row + offsets, offsets, limit, KIND, TILE, SLOTS, KEPT)
    m = floor
    s = none
    t = none
    async_copy.wait_group(0)
    if live:
        for tile in range(SLOTS):
            words = slots.index(tile).load(layout)
            words = gl.where(offsets < width - tile * TILE, words, minus_infinity(KIND))
            m, s, t = accumulate(m, s, t, (words,), c, KIND, ENTROPY)
        for k in gl.static_range(KEPT):
            m, s, t = accumulate(m, s, t, (kept[k],), c, KIND, ENTROPY)
        if STREAMED > 0:
            m, s, t = _stream_statistics(
                m, s, t, z_row + offsets, offsets, after, width, c, KIND, ENTROPY, TILE, STREAMED
            )

    while row < rows:
        # the row's loss, from the statistics of all its words
        if not AHEAD:
            fields = _fields_of(row, live, sources, columns, logits_stride, KL, BONUS)
        target, target_logit, old_logprob, advantage, weight, other_logprob, kl_weight, bonus_weight = fields
        slope = 0.0
        bend = 0.0
        peak = 0.0
        factor = 0.0
        policy = 0.0
        loss = 0.0
        kl = 0.0
        logprob = 0.0
        log_ratio = 0.0
        entropy = 0.0
        key = 0
        if live:
            peak, total, shifted = gl.reduce((m, s, t), 0, merge)
            logprob, entropy = logprob_and_entropy(peak, total, shifted, target_logit, c)
            log_ratio = logprob - old_logprob
            policy, slope = ROW(logprob, old_logprob, advantage, (p0, p1, p2, p3))
            loss, slope, bend, kl = loss_terms(
                policy,
                slope,
                logprob,
                entropy,
                old_logprob,
                weight,
                other_logprob,
                kl_weight,
                bonus_weight,
                kl_coef,
                entropy_coef,
                KL,
                BONUS,
            )
            slope *= -grad_scale
            bend *= -grad_scale
            if BONUS:  # -bend p (log p + H), log p = ln2 (s - log2 total)
                factor = (slope + bend * (entropy - LN2 * gl.log2(total))) / total
                bend = bend * LN2 / total
            else:
                factor = slope / total
            key = zero & total.to(gl.int32, bitcast=True)  # 0, which the compiler cannot know
        gl.store(results + row, policy)
        gl.store(results + rows + row, loss)
        gl.store(results + 2 * rows + row, logprob)
        gl.store(results + 3 * rows + row, log_ratio)
        if ENTROPY:
            gl.store(results + 4 * rows + row, entropy)
        else:
            gl.store(results + 4 * rows + row, 0.0)
        if KL is not None:
            gl.store(results + 5 * rows + row, kl)
        moves = slope != 0
        if BONUS:
            moves = moves | (bend != 0)

        # its gradient, while the next row comes in
        following = row + gl.num_programs(0)
        live_next = gl.load(mask + following, mask=following < rows, other=0) != 0
        limit = gl.where(live_next, width, 0)
        z_next = z_words + following * z_stride
        g_row = gradients + row * gradients_stride + g_offsets
        if moves:
            for k in gl.static_range(KEPT):
                at = (SLOTS + k) * TILE * PAIR
                words = _unshared(kept[k], key, KIND)
                out = _tile_gradient(words, c, peak, factor, bend, dtype, KIND, g_layout, BONUS)
                gl.store(g_row + at, out, mask=g_offsets < columns - at)
            if STREAMED > 0:
                z_this = z_words + row * z_stride + offsets
                _stream_gradients(
                    z_this,
                    g_row,
                    offsets,
                    g_offsets,
                    after,
                    width,
                    c,
                    peak,
                    factor,
                    bend,
                    KIND,
                    PAIR,
                    TILE,
                    STREAMED,
                    g_layout,
                    BONUS,
                )
        else:
            for start in range(0, columns, TILE * PAIR):
                gl.store(g_row + start, zeros, mask=g_offsets < columns - start)
        if STREAMED == 0:
            kept = _load_tiles(z_next + offsets, offsets, limit, KIND, TILE, SLOTS, KEPT)
        m = floor
        s = none
        t = none
        for g in gl.static_range(GROUPS):
            if g >= LAG:
                async_copy.wait_group(LAG - 1)
            for tile in range(PER):
                if moves:
                    at = (g * PER + tile) * TILE * PAIR
                    words = slots.index(g * PER + tile).load(layout)
                    out = _tile_gradient(words, c, peak, factor, bend, dtype, KIND, g_layout, BONUS)
                    if ALL_SHARED:
                        gl.store(g_row + at, out, mask=g_offsets < columns - at)
                    else:
                        gl.store(g_row + at, out)
                if g >= LAG:
                    if live_next:
                        words = slots.index((g - LAG) * PER + tile).load(layout)
                        if ALL_SHARED:
                            at = ((g - LAG) * PER + tile) * TILE
                            words = gl.where(offsets < width - at, words, minus_infinity(KIND))
                        m, s, t = accumulate(m, s, t, (words,), c, KIND, ENTROPY)
            if g > 0 and STREAMED == 0:
                if live_next:
                    for k in gl.static_range((g - 1) * KEPT // (GROUPS - 1), g * KEPT // (GROUPS - 1)):
                        m, s, t = accumulate(m, s, t, (kept[k],), c, KIND, ENTROPY)
            _fill(groups.index(g), z_next + g * PER * TILE, group_offsets, limit - g * PER * TILE)
        if moves:
            thread_barrier()  # the target's column belongs to another thread
            p = _column(target_logit, c, peak, factor, bend, BONUS)
            gl.store(gradients + row * gradients_stride + target, (p - slope).to(dtype))
        if AHEAD:
            fields = _fields_of(following, live_next, sources, columns, logits_stride, KL, BONUS)
        if STREAMED > 0:  # the registers of the kept tiles serve the streamed ones first
            if live_next:
                m, s, t = _stream_statistics(
                    m, s, t, z_next + offsets, offsets, after, width, c, KIND, ENTROPY, TILE, STREAMED
                )
            kept = _load_tiles(z_next + offsets, offsets, limit, KIND, TILE, SLOTS, KEPT)
        if live_next:
            for g in gl.static_range(GROUPS - LAG, GROUPS):
                async_copy.wait_group(GROUPS - 1 - g)
                for tile in range(PER):
                    words = slots.index(g * PER + tile).load(layout)
                    if ALL_SHARED:
                        words = gl.where(offsets < width - (g * PER + tile) * TILE, words, minus_infinity(KIND))
                    m, s, t = accumulate(m, s, t, (words,), c, KIND, ENTROPY)
            if STREAMED > 0:
                for k in gl.static_range(KEPT):
                    m, s, t = accumulate(m, s, t, (kept[k],), c, KIND, ENTROPY)
        else:
            async_copy.wait_group(0)  # its zeros must not land on the row after it
        row = following
        live = live_next
