"""The single-pass kernel: loss, log-probability, entropy and gradient from one read and one write of the logits.

A program keeps a row on its multiprocessor between the two passes over it: most of it in shared memory (groups of
tiles, filled by asynchronous copies), the rest in registers (`kept` tiles). What fits in neither is read twice
(`streamed`): the second time backwards, so mostly from the L2 cache. While the gradient of a row is written, group
after group, the freed groups are filled with the program's next row, and the statistics of that row are accumulated
`lag` groups later. So loads, stores and arithmetic overlap, and only the last groups of a row are waited for.

The source has no barrier for shared memory, because threads share none of it. A tile has one vector per thread, and
thread i of a copy, a load and a store is the same thread: each thread reads only words that it has copied itself, and
overwrites only words that it has read itself. `wait_group` makes a thread's own copies visible to it. Triton's compiler
does not use this and inserts barriers around the copies and waits. The one barrier of the source is for global memory:
it comes before the store to the target's column.

Written in Gluon, because plain Triton cannot keep a tile in shared memory from one pass to the next.
"""

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megatron_pg.kernels.triton.terms import load_values, loss_terms
from megatron_pg.kernels.triton.tiles import (
    FLOOR,
    LN2,
    LOWEST,
    accumulate,
    logprob_and_entropy,
    merge,
    minus_infinity,
    softcapped,
    through_cap,
    values,
)

WORDS = gl.constexpr(4)  # of 32 bits, per thread and tile: 16 bytes, the widest load of a thread
# Triton 3.6 has other names for these.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Tiling(NamedTuple):
    """How a program holds a row, in tiles of `threads` vectors of 16 bytes. Part of what the kernel is compiled for."""

    threads: int
    groups: int  # in shared memory
    per_group: int  # tiles of a group
    lag: int  # groups between the copy of a group and its first use
    kept: int  # tiles in registers
    streamed: int  # tiles in flight at a time, of those that fit nowhere; 0 if all fit
    ahead: bool = False  # the fields of a row are loaded while the row before it is written


@gluon.jit
def _column_gradient(z, column_terms, BONUS: gl.constexpr):
    """The gradient by logits z, x = z c - peak: 2^x factor, or with an entropy bonus 2^x (factor + bend x)."""
    c, peak, factor, bend = column_terms
    x = gl.fma(z, c, -peak)
    if BONUS:
        return gl.exp2(x) * gl.fma(gl.maximum(x, LOWEST), bend, factor)
    else:
        return gl.exp2(x) * factor


@gluon.jit
def _tile_gradient(
    words, column_terms, dtype: gl.constexpr, KIND: gl.constexpr, layout: gl.constexpr, BONUS: gl.constexpr
):
    """The gradient of a tile's columns rounded to `dtype`, in the order of the logits."""
    logits = values(words, KIND)
    low = through_cap(_column_gradient(logits[0], column_terms, BONUS), logits[0], KIND.cap)
    if len(logits) == 2:
        high = through_cap(_column_gradient(logits[1], column_terms, BONUS), logits[1], KIND.cap)
        both = gl.join(low, high).to(dtype)
        return gl.convert_layout(gl.reshape(both, (low.shape[0], 2 * low.shape[1])), layout, assert_trivial=True)
    else:
        return low.to(dtype)


@gluon.jit
def _opaque(words, key, KIND: gl.constexpr):
    """`words`, opaque to the compiler, which would keep the float32 values of the first pass in twice the registers."""
    if KIND.is_pair:
        return words ^ key
    else:
        return words


@gluon.jit
def _fill(group, z_words, offsets, limit):
    """Start the asynchronous copy of a group of tiles; words at or beyond `limit` become 0.

    One commit per call, also where nothing is copied: `wait_group(n)` counts commits, and waits for all but the last n.
    """
    async_load(group, z_words + offsets, mask=offsets < limit)
    async_copy.commit_group()


@gluon.jit
def _load_tiles(
    z_row, offsets, limit, KIND: gl.constexpr, TILE: gl.constexpr, FIRST: gl.constexpr, COUNT: gl.constexpr
):
    """A tuple of `COUNT` tiles from tile `FIRST` on, in registers; -inf at or beyond `limit`."""
    tiles = ()
    for k in gl.static_range(COUNT):
        at = (FIRST + k) * TILE
        tiles = tiles + (gl.load(z_row + at, mask=offsets < limit - at, other=minus_infinity(KIND)),)
    return tiles


@gluon.jit
def _accumulate_slot(
    statistics, slots, slot, offsets, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, MASKED: gl.constexpr
):
    """Add a tile of shared memory to the statistics. Copies write 0 beyond a row's end; `MASKED` makes it -inf."""
    layout: gl.constexpr = offsets.type.layout
    TILE: gl.constexpr = offsets.shape[0] * offsets.shape[1]
    m, s, t = statistics
    words = slots.index(slot).load(layout)
    if MASKED:
        words = gl.where(offsets < width - slot * TILE, words, minus_infinity(KIND))
    return accumulate(m, s, t, (words,), c, KIND, ENTROPY)


@gluon.jit
def _stream_statistics(
    statistics, z_row, offsets, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, ROW: gl.constexpr
):
    """Add the words that fit nowhere, with the next `streamed` tiles always in flight."""
    TILE: gl.constexpr = ROW.threads * WORDS
    COUNT: gl.constexpr = ROW.streamed
    after = (ROW.groups * ROW.per_group + ROW.kept) * TILE
    m, s, t = statistics
    tiles = _load_tiles(z_row + after, offsets, width - after, KIND, TILE, 0, COUNT)
    for start in range(after, width, COUNT * TILE):
        ahead = start + COUNT * TILE
        coming = _load_tiles(z_row + ahead, offsets, width - ahead, KIND, TILE, 0, COUNT)
        m, s, t = accumulate(m, s, t, tiles, c, KIND, ENTROPY)
        tiles = coming
    return m, s, t


@gluon.jit
def _stream_gradients(
    z_row, g_row, offsets, g_offsets, width, column_terms, KIND: gl.constexpr, BONUS: gl.constexpr, ROW: gl.constexpr
):
    """Write the gradient of the words that fit nowhere, backwards: the words read last are read again first."""
    dtype: gl.constexpr = g_row.dtype.element_ty
    layout: gl.constexpr = g_offsets.type.layout
    PAIR: gl.constexpr = 2 if KIND.is_pair else 1
    TILE: gl.constexpr = ROW.threads * WORDS
    COUNT: gl.constexpr = ROW.streamed
    after = (ROW.groups * ROW.per_group + ROW.kept) * TILE
    groups = gl.cdiv(width - after, COUNT * TILE)
    start = after + (groups - 1) * (COUNT * TILE)
    tiles = _load_tiles(z_row + start, offsets, width - start, KIND, TILE, 0, COUNT)
    for _ in range(groups):
        ahead = start - COUNT * TILE
        limit = gl.where(ahead >= after, width - ahead, 0)
        coming = _load_tiles(z_row + ahead, offsets, limit, KIND, TILE, 0, COUNT)
        for k in gl.static_range(COUNT):
            at = (start + k * TILE) * PAIR
            out = _tile_gradient(tiles[k], column_terms, dtype, KIND, layout, BONUS)
            gl.store(g_row + at, out, mask=g_offsets < width * PAIR - at)
        tiles = coming
        start = ahead


@gluon.jit
def _first_statistics(
    statistics, slots, kept, z_row, offsets, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, ROW: gl.constexpr
):
    """The statistics of a program's first row, all of which has been copied and loaded."""
    KEPT: gl.constexpr = ROW.kept
    for slot in range(ROW.groups * ROW.per_group):
        statistics = _accumulate_slot(statistics, slots, slot, offsets, width, c, KIND, ENTROPY, MASKED=True)
    for k in gl.static_range(KEPT):
        statistics = accumulate(*statistics, (kept[k],), c, KIND, ENTROPY)
    if ROW.streamed > 0:
        statistics = _stream_statistics(statistics, z_row, offsets, width, c, KIND, ENTROPY, ROW)
    return statistics


@gluon.jit
def _write_outside_shared(
    source,
    g_row,
    kept,
    key,
    offsets,
    g_offsets,
    columns,
    moves,
    column_terms,
    KIND: gl.constexpr,
    BONUS: gl.constexpr,
    ROW: gl.constexpr,
):
    """Write the gradient of what is not in shared memory: kept tiles, then streamed ones.

    A gradient of 0 (not `moves`) is written over the whole row, so that the groups have nothing to write.
    """
    dtype: gl.constexpr = g_row.dtype.element_ty
    layout: gl.constexpr = g_offsets.type.layout
    PAIR: gl.constexpr = 2 if KIND.is_pair else 1
    TILE: gl.constexpr = ROW.threads * WORDS
    SLOTS: gl.constexpr = ROW.groups * ROW.per_group
    KEPT: gl.constexpr = ROW.kept
    if moves:
        for k in gl.static_range(KEPT):
            at = (SLOTS + k) * TILE * PAIR
            out = _tile_gradient(_opaque(kept[k], key, KIND), column_terms, dtype, KIND, layout, BONUS)
            gl.store(g_row + at, out, mask=g_offsets < columns - at)
        if ROW.streamed > 0:
            z_words, row, z_stride = source
            z_this = z_words + row * z_stride + offsets
            _stream_gradients(z_this, g_row, offsets, g_offsets, columns // PAIR, column_terms, KIND, BONUS, ROW)
    else:
        zeros = gl.full((ROW.threads, WORDS * PAIR), 0.0, dtype, layout)
        for start in range(0, columns, TILE * PAIR):
            gl.store(g_row + start, zeros, mask=g_offsets < columns - start)


@gluon.jit
def _exchange_groups(
    statistics,
    groups,
    slots,
    kept,
    z_next,
    g_row,
    offsets,
    group_offsets,
    g_offsets,
    columns,
    live_next,
    moves,
    column_terms,
    KIND: gl.constexpr,
    BONUS: gl.constexpr,
    ENTROPY: gl.constexpr,
    ROW: gl.constexpr,
):
    """Write the gradient of each group, start the copy of the next row in its place; the next row's statistics so far.

    Group g - lag of the next row was committed `lag` iterations ago, and lag - 1 groups after it, so
    `wait_group(lag - 1)` waits for it and leaves the later copies in flight.
    """
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    LAG: gl.constexpr = ROW.lag
    KEPT: gl.constexpr = ROW.kept
    ALL_SHARED: gl.constexpr = ROW.kept == 0 and ROW.streamed == 0  # then a row may end within shared memory
    PAIR: gl.constexpr = 2 if KIND.is_pair else 1
    TILE: gl.constexpr = ROW.threads * WORDS
    dtype: gl.constexpr = g_row.dtype.element_ty
    layout: gl.constexpr = offsets.type.layout
    g_layout: gl.constexpr = g_offsets.type.layout
    c = column_terms[0]
    width = columns // PAIR
    limit = gl.where(live_next, width, 0)
    for g in gl.static_range(GROUPS):
        if g >= LAG:
            async_copy.wait_group(LAG - 1)
        for tile in range(PER):
            if moves:
                at = (g * PER + tile) * TILE * PAIR
                words = slots.index(g * PER + tile).load(layout)
                out = _tile_gradient(words, column_terms, dtype, KIND, g_layout, BONUS)
                if ALL_SHARED:
                    gl.store(g_row + at, out, mask=g_offsets < columns - at)
                else:
                    gl.store(g_row + at, out)
            if g >= LAG:
                if live_next:
                    slot = (g - LAG) * PER + tile
                    statistics = _accumulate_slot(statistics, slots, slot, offsets, width, c, KIND, ENTROPY, ALL_SHARED)
        if g > 0 and ROW.streamed == 0:  # the kept tiles of the next row, spread over the groups
            if live_next:
                for k in gl.static_range((g - 1) * KEPT // (GROUPS - 1), g * KEPT // (GROUPS - 1)):
                    statistics = accumulate(*statistics, (kept[k],), c, KIND, ENTROPY)
        # Each thread has read its own words of this group (above), so its copies may overwrite them.
        _fill(groups.index(g), z_next + g * PER * TILE, group_offsets, limit - g * PER * TILE)
    return statistics


@gluon.jit
def _finish_statistics(
    statistics, slots, kept, offsets, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, ROW: gl.constexpr
):
    """Add the last `lag` groups of the next row, each as soon as its copy is complete, and late kept tiles."""
    GROUPS: gl.constexpr = ROW.groups
    LAG: gl.constexpr = ROW.lag
    KEPT: gl.constexpr = ROW.kept
    ALL_SHARED: gl.constexpr = ROW.kept == 0 and ROW.streamed == 0
    for g in gl.static_range(GROUPS - LAG, GROUPS):
        async_copy.wait_group(GROUPS - 1 - g)
        for tile in range(ROW.per_group):
            slot = g * ROW.per_group + tile
            statistics = _accumulate_slot(statistics, slots, slot, offsets, width, c, KIND, ENTROPY, ALL_SHARED)
    if ROW.streamed > 0:
        for k in gl.static_range(KEPT):
            statistics = accumulate(*statistics, (kept[k],), c, KIND, ENTROPY)
    return statistics


@gluon.jit
def _load_token(
    row,
    live,
    logits,
    targets,
    fields,
    columns,
    logits_stride,
    KIND: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
):
    """Column and logit of the target, and the values of the loss terms; 0 where the row is not live.

    A target outside the vocabulary has the logit NaN, so loss and gradient of its row are NaN, and no address outside
    the row is read.
    """
    target = gl.load(targets + row, mask=live, other=0)
    exists = (target >= 0) & (target < columns)
    column = gl.where(exists, target, 0)
    at = logits + row * logits_stride + column
    logit = softcapped(gl.load(at, mask=live, other=0.0).to(gl.float32), KIND.cap)
    logit = gl.where(exists, logit, float("nan"))
    return column, logit, load_values(fields, row, live, KL, BONUS)


@gluon.jit
def _row_loss(
    statistics,
    target_logit,
    values_of_row,
    c,
    numbers,
    coefficients,
    grad_scale,
    zero,
    TOKEN_KERNEL: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
):
    """The row's results; and of its gradient: slope, then peak, factor and bend of `_column_gradient`, `_opaque`'s key.

    With `total` the sum of 2^(z c - peak), the probability of a column is 2^x / total.
    """
    m, s, t = statistics
    peak, total, shifted = gl.reduce((m, s, t), 0, merge)  # the threads of the row meet here, once
    logprob, entropy = logprob_and_entropy(peak, total, shifted, target_logit, c)
    policy, slope = TOKEN_KERNEL(logprob, values_of_row.old_logprob, values_of_row.advantage, numbers)
    loss, slope, bend, kl = loss_terms(policy, slope, logprob, entropy, values_of_row, coefficients, KL, BONUS)
    slope *= -grad_scale
    bend *= -grad_scale
    if BONUS:  # -bend p (log p + H), log p = ln2 (x - log2 total)
        factor = (slope + bend * (entropy - LN2 * gl.log2(total))) / total
        bend = bend * LN2 / total
    else:
        factor = slope / total
    key = zero & total.to(gl.int32, bitcast=True)  # 0, which the compiler cannot know
    return (policy, loss, logprob, logprob - values_of_row.old_logprob, entropy, kl), slope, peak, factor, bend, key


@gluon.jit
def _store_results(results, rows, row, found, KL: gl.constexpr, ENTROPY: gl.constexpr):
    """Results [5 or 6, rows]: loss of the objective, whole loss, log-probability, log-ratio, entropy, KL estimate."""
    policy, loss, logprob, log_ratio, entropy, kl = found
    gl.store(results + row, policy)
    gl.store(results + rows + row, loss)
    gl.store(results + 2 * rows + row, logprob)
    gl.store(results + 3 * rows + row, log_ratio)
    gl.store(results + 4 * rows + row, entropy if ENTROPY else 0.0)
    if KL is not None:
        gl.store(results + 5 * rows + row, kl)


@gluon.jit(do_not_specialize=["rows"])
def single_pass_kernel(
    logits,
    gradients,
    targets,
    fields,
    results,
    rows,
    columns,
    logits_stride,
    gradients_stride,
    c,
    numbers,
    coefficients,
    grad_scale,
    zero,
    TOKEN_KERNEL: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
    KIND: gl.constexpr,
    ENTROPY: gl.constexpr,
    ROW: gl.constexpr,
):
    """Each program takes every `num_programs`-th row. Widths and offsets are in 32-bit words, of gradients in columns.

    `fields` are `FieldPointers`, `coefficients` lambda and eta of `terms`, `ROW` is a `Tiling`.
    """
    THREADS: gl.constexpr = ROW.threads
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    PAIR: gl.constexpr = 2 if KIND.is_pair else 1  # columns of a word
    TILE: gl.constexpr = THREADS * WORDS
    SLOTS: gl.constexpr = GROUPS * PER
    dtype: gl.constexpr = gradients.dtype.element_ty
    word: gl.constexpr = gl.int32 if PAIR == 2 else logits.dtype.element_ty
    layout: gl.constexpr = gl.BlockedLayout([1, WORDS], [32, 1], [THREADS // 32, 1], [1, 0])
    g_layout: gl.constexpr = gl.BlockedLayout([1, WORDS * PAIR], [32, 1], [THREADS // 32, 1], [1, 0])
    thread: gl.constexpr = gl.SliceLayout(1, layout)
    shared: gl.constexpr = gl.SwizzledSharedLayout(WORDS, 1, 1, [1, 0])
    # Two views of the same memory: `groups` for the copies, `slots` for single tiles.
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
    none = gl.full((THREADS,), 0.0, gl.float32, thread)
    floor = gl.full((THREADS,), FLOOR, gl.float32, thread)

    z_words = logits.to(gl.pointer_type(word))
    z_stride = logits_stride // PAIR
    width = columns // PAIR

    # The first row. Nothing overlaps yet: copy all of it, wait for all copies, accumulate. A masked row (not live) has
    # the limit 0, so none of it is read here or anywhere below.
    row = gl.program_id(0).to(gl.int64)
    live = gl.load(fields.mask + row) != 0
    if ROW.ahead:
        token = _load_token(row, live, logits, targets, fields, columns, logits_stride, KIND, KL, BONUS)
    limit = gl.where(live, width, 0)
    z_row = z_words + row * z_stride
    for g in gl.static_range(GROUPS):
        _fill(groups.index(g), z_row + g * PER * TILE, group_offsets, limit - g * PER * TILE)
    kept = _load_tiles(z_row + offsets, offsets, limit, KIND, TILE, SLOTS, ROW.kept)
    statistics = (floor, none, none)
    async_copy.wait_group(0)
    if live:
        statistics = _first_statistics(statistics, slots, kept, z_row + offsets, offsets, width, c, KIND, ENTROPY, ROW)

    while row < rows:
        # 1. The loss of the row, from the statistics of all its words. A masked row has loss and gradient 0.
        if not ROW.ahead:
            token = _load_token(row, live, logits, targets, fields, columns, logits_stride, KIND, KL, BONUS)
        target, target_logit, values_of_row = token
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
            of_row = (target_logit, values_of_row, c, numbers, coefficients, grad_scale, zero)
            found, slope, peak, factor, bend, key = _row_loss(statistics, *of_row, TOKEN_KERNEL, KL, BONUS)
            policy, loss, logprob, log_ratio, entropy, kl = found
        _store_results(results, rows, row, (policy, loss, logprob, log_ratio, entropy, kl), KL, ENTROPY)
        moves = slope != 0  # else the gradient is 0, for instance where the objective clips
        if BONUS:
            moves = moves | (bend != 0)
        column_terms = (c, peak, factor, bend)

        # 2. The gradient of what is not in shared memory.
        following = row + gl.num_programs(0)
        live_next = gl.load(fields.mask + following, mask=following < rows, other=0) != 0
        limit = gl.where(live_next, width, 0)
        z_next = z_words + following * z_stride
        g_row = gradients + row * gradients_stride + g_offsets
        source = (z_words, row, z_stride)
        _write_outside_shared(
            source, g_row, kept, key, offsets, g_offsets, columns, moves, column_terms, KIND, BONUS, ROW
        )

        # 3. The gradient of each group, and in its place the next row. The registers of the kept tiles are free now.
        if ROW.streamed == 0:
            kept = _load_tiles(z_next + offsets, offsets, limit, KIND, TILE, SLOTS, ROW.kept)
        places = (offsets, group_offsets, g_offsets)
        statistics = _exchange_groups(
            (floor, none, none), groups, slots, kept, z_next, g_row, *places, columns, live_next, moves, column_terms,
            KIND, BONUS, ENTROPY, ROW,
        )  # fmt: skip

        # 4. The target's column, which another thread has written above without the target's own part: the barrier
        #    orders the two stores. Its logit was loaded before anything was written.
        if moves:
            thread_barrier()
            p = _column_gradient(target_logit, column_terms, BONUS)
            out = through_cap(p - slope, target_logit, KIND.cap)
            gl.store(gradients + row * gradients_stride + target, out.to(dtype))
        if ROW.ahead:
            token = _load_token(following, live_next, logits, targets, fields, columns, logits_stride, KIND, KL, BONUS)

        # 5. The rest of the next row's statistics. The streamed tiles come first, because the kept tiles get their
        #    registers. A masked row is copied as zeros, which must land before the copies of the row after it start.
        if ROW.streamed > 0:
            if live_next:
                statistics = _stream_statistics(statistics, z_next + offsets, offsets, width, c, KIND, ENTROPY, ROW)
            kept = _load_tiles(z_next + offsets, offsets, limit, KIND, TILE, SLOTS, ROW.kept)
        if live_next:
            statistics = _finish_statistics(statistics, slots, kept, offsets, width, c, KIND, ENTROPY, ROW)
        else:
            async_copy.wait_group(0)
        row = following
        live = live_next
