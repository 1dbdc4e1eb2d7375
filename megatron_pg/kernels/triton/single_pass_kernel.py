"""The single-pass kernel: loss, log-probability, entropy and gradient from one read and one write of the logits.

A program keeps a row on its multiprocessor between the two passes over it: most of it in shared memory (groups of
tiles, filled by asynchronous copies), the rest in registers (`kept` tiles). While the gradient of a row is written,
group after group, the freed groups are filled with the program's next row, and the statistics of that row are
accumulated `lag` groups later. So loads, stores and arithmetic overlap, and only the last groups of a row are waited
for.

A row that is too long for a multiprocessor is shared by those of a cluster: a program is then 2, 4 or 8 blocks, each
with its part of every tile. Blocks exchange 16 bytes per row through distributed shared memory, and no other data.

The source has no barrier for shared memory, because threads share none of it. A tile has one vector per thread, and
thread i of a copy, a load and a store is the same thread: each thread reads only words that it has copied itself, and
overwrites only words that it has read itself. `wait_group` makes a thread's own copies visible to it. Triton's compiler
does not use this and inserts barriers around the copies and waits. The one barrier of the source is for global memory:
it comes before the store to the target's column.

Written in Gluon, because plain Triton cannot keep a tile in shared memory from one pass to the next.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

from megatron_pg.kernels.triton.terms import load_values, loss_terms
from megatron_pg.kernels.triton.tiles import (
    FLOOR,
    LN2,
    LOWEST,
    Kind,
    accumulate,
    logprob_and_entropy,
    merge,
    minus_infinity,
    softcapped,
    through_cap,
    values,
)

# The exchange between blocks. An inbox has two slots: a barrier, then 16 bytes for each of at most 8 blocks. A slot is
# full when its barrier has counted the bytes of all messages; how many to expect is announced by the first thread.
SLOT = gl.constexpr(16 + 16 * 8)
OPEN = gl.constexpr(
    "{ .shared .align 16 .b8 inbox[288]; .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "mov.u32 $0, %cluster_ctarank; mov.u32 $1, inbox; @p mbarrier.init.shared::cta.b64 [$1], 1; "
    "@p mbarrier.init.shared::cta.b64 [$1 + 144], 1; @p fence.mbarrier_init.release.cluster; "
    "barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; }"
)
SEND = gl.constexpr(  # by thread i to block i
    "{ .reg .pred p; .reg .u32 t, to, full; mov.u32 t, %tid.x; setp.lt.u32 p, t, $2; "
    "@p mapa.shared::cluster.u32 full, $1, t; mov.u32 to, %cluster_ctarank; mad.lo.u32 to, to, 16, full; "
    "@p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [to + 16], {$3, $4, $5, $6}, [full]; "
    "mov.u32 $0, 0; }"
)
WAIT = gl.constexpr(
    "{ .reg .pred p; .reg .u32 t; mov.u32 t, %tid.x; setp.eq.u32 p, t, 0; "
    "@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; "
    "again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [$1], $3; @!p bra again; mov.u32 $0, 0; }"
)
READ = gl.constexpr("ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];")
PAIR_UP = gl.constexpr("cvt.rn.bf16x2.f32 $0, $1, $2;")
WORDS = gl.constexpr(4)  # of 32 bits, per thread and tile: 16 bytes, the widest load of a thread
# Triton 3.6 has other names for these.
thread_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
REINTERPRETS = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


class Tiling(NamedTuple):
    """How a program holds a row, in tiles of `threads` vectors of 16 bytes, and what it computes of it.

    One constant of the kernel, because Triton binds each at every launch.
    """

    threads: int
    groups: int  # in shared memory
    per_group: int  # tiles of a group
    lag: int  # groups between the copy of a group and its first use
    kept: int  # tiles in registers
    blocks: int = 1  # of a cluster, which share a row: each has its part of every tile

    kind: Kind = Kind()
    entropy: bool = True  # whether it is wanted
    bonus: bool = False  # whether it is in the loss


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
def _tile_gradient(words, column_terms, dtype: gl.constexpr, ROW: gl.constexpr):
    """The gradient of a tile's words rounded to `dtype`, or of paired logits to pairs of bfloat16."""
    KIND: gl.constexpr = ROW.kind
    logits = values(words, KIND)
    low = through_cap(_column_gradient(logits[0], column_terms, ROW.bonus), logits[0], ROW.kind.cap)
    if len(logits) == 2:
        high = through_cap(_column_gradient(logits[1], column_terms, ROW.bonus), logits[1], ROW.kind.cap)
        return gl.inline_asm_elementwise(PAIR_UP, "=r,f,f", [high, low], gl.int32, is_pure=True, pack=1)
    else:
        return low.to(dtype)


@gluon.jit
def _fill(group, z_words, offsets, limit):
    """Start the asynchronous copy of a group of tiles; words at or beyond `limit` become 0.

    One commit per call, also where nothing is copied: `wait_group(n)` counts commits, and waits for all but the last n.
    """
    async_load(group, z_words + offsets, mask=offsets < limit)
    async_copy.commit_group()


@gluon.jit
def _load_kept(row, places, ROW: gl.constexpr):
    """The tuple of a row's tiles that registers keep; -inf at or beyond its limit."""
    KEPT: gl.constexpr = ROW.kept
    KIND: gl.constexpr = ROW.kind
    z_row = row.words + places.words
    tiles = ()
    for k in gl.static_range(KEPT):
        at = (ROW.groups * ROW.per_group + k) * (ROW.threads * WORDS)
        tiles = tiles + (gl.load(z_row + at, mask=places.words < row.limit - at, other=minus_infinity(KIND)),)
    return tiles


class Places(NamedTuple):
    """In a kernel, the shared memory of a program, in two views, where each thread's vector is, and a row's width."""

    groups: Any  # for the copies
    slots: Any  # one tile each
    words: Any  # offsets in a tile
    group_words: Any  # in a group of tiles
    width: Any  # words of a row
    c: Any  # of `tiles`


class NextRow(NamedTuple):
    """In a kernel, the row that a program takes next."""

    words: Any  # pointer to the first one
    live: Any  # False: masked, or there is none
    limit: Any  # words that are read


class Cluster(NamedTuple):
    """In a kernel, the blocks that share a row, as one of them has them."""

    rank: Any  # of the block
    inbox: Any  # address of its shared memory for what the others send
    turn: Any  # number of exchanges modulo 4


class RowGradient(NamedTuple):
    """In a kernel, what the gradient of a row is made of."""

    target_logit: Any
    slope: Any  # of the loss by the log-probability
    moves: Any  # False: the gradient is 0, for instance where the objective clips
    column_terms: Any  # c, and peak, factor and bend of `_column_gradient`
    key: Any  # 0, which the compiler cannot know


@gluon.constexpr_function
def _split(blocks, rank):
    """The part of a layout that splits its first dimension over the blocks of a cluster."""
    return [[1 << i, 0][:rank] for i in range(blocks.bit_length() - 1)]


@gluon.constexpr_function
def _vectors(row):
    """The layout of a tile."""
    warps = row.threads // row.blocks // 32
    return gl.BlockedLayout([1, WORDS.value], [32, 1], [warps, 1], [1, 0], _split(row.blocks, 2))


@gluon.constexpr_function
def _one_each(row):
    """The layout of one number of each block."""
    return gl.BlockedLayout([1], [32], [row.threads // row.blocks // 32], [0], _split(row.blocks, 1))


@gluon.constexpr_function
def _shared(row):
    """The layout of a tile in shared memory."""
    return gl.SwizzledSharedLayout(WORDS.value, 1, 1, [1, 0], _split(row.blocks, 2))


@gluon.jit
def _cluster(ROW: gl.constexpr):
    """The `Cluster` before its first exchange, when the inboxes of all blocks are open."""
    if ROW.blocks == 1:
        return Cluster(0, 0, 0)
    else:
        rank, inbox = gl.inline_asm_elementwise(
            OPEN, "=r,=&r,r", [gl.program_id(0)], (gl.int32, gl.int32), is_pure=False, pack=1
        )
        return Cluster(rank, inbox, 0)


@gluon.jit
def _memory(word: gl.constexpr, ROW: gl.constexpr):
    """The shared memory of tiles of `word`s and the threads' vectors, as `Places` has them."""
    THREADS: gl.constexpr = ROW.threads
    OF_BLOCK: gl.constexpr = ROW.threads // ROW.blocks
    shared: gl.constexpr = _shared(ROW)
    groups = gl.allocate_shared_memory(word, [ROW.groups, ROW.per_group * THREADS, WORDS], shared)
    if REINTERPRETS:
        slots = groups.reinterpret(word, [ROW.groups * ROW.per_group, THREADS, WORDS], shared)
    else:
        slots = groups._reinterpret(word, [ROW.groups * ROW.per_group, THREADS, WORDS], shared)
    layout: gl.constexpr = _vectors(ROW)
    thread: gl.constexpr = gl.SliceLayout(1, layout)
    in_thread = gl.arange(0, WORDS, layout=gl.SliceLayout(0, layout))[None, :]
    words = gl.arange(0, THREADS, layout=thread)[:, None] * WORDS + in_thread
    vector = gl.arange(0, ROW.per_group * THREADS, layout=thread)
    if ROW.blocks > 1:  # the vectors of a block are its part of the first tile, of the second, ...
        IN_GROUP: gl.constexpr = ROW.per_group * OF_BLOCK
        tile = vector % IN_GROUP // OF_BLOCK
        vector = tile * THREADS + vector // IN_GROUP * OF_BLOCK + vector % OF_BLOCK
    group_words = vector[:, None] * WORDS + in_thread
    return groups, slots, words, group_words


@gluon.jit
def _no_statistics(places, ROW: gl.constexpr):
    """Statistics of no column, one of each thread."""
    thread: gl.constexpr = gl.SliceLayout(1, places.words.type.layout)
    none = gl.full((ROW.threads,), 0.0, gl.float32, thread)
    return gl.full((ROW.threads,), FLOOR, gl.float32, thread), none, none


@gluon.jit
def _accumulate_slot(statistics, slot, places, ROW: gl.constexpr, MASKED: gl.constexpr):
    """Add a tile of shared memory to the statistics. Copies write 0 beyond a row's end; `MASKED` makes it -inf."""
    TILE: gl.constexpr = ROW.threads * WORDS
    KIND: gl.constexpr = ROW.kind
    m, s, t = statistics
    words = places.slots.index(slot).load(places.words.type.layout)
    if MASKED:
        words = gl.where(places.words < places.width - slot * TILE, words, minus_infinity(KIND))
    return accumulate(m, s, t, (words,), places.c, KIND, ROW.entropy)


@gluon.jit
def _read_first_row(first, places, ROW: gl.constexpr):
    """The kept tiles and the statistics of a program's first row, which nothing is written before."""
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    TILE: gl.constexpr = ROW.threads * WORDS
    KEPT: gl.constexpr = ROW.kept
    KIND: gl.constexpr = ROW.kind
    for g in gl.static_range(GROUPS):
        at = g * PER * TILE
        _fill(places.groups.index(g), first.words + at, places.group_words, first.limit - at)
    kept = _load_kept(first, places, ROW)
    statistics = _no_statistics(places, ROW)
    async_copy.wait_group(0)
    if first.live:
        for slot in range(GROUPS * PER):
            statistics = _accumulate_slot(statistics, slot, places, ROW, MASKED=True)
        for k in gl.static_range(KEPT):
            statistics = accumulate(*statistics, (kept[k],), places.c, KIND, ROW.entropy)
    return kept, statistics


@gluon.jit
def _write_kept(g_row, gradient, kept, places, ROW: gl.constexpr):
    """Write the gradient of the kept tiles.

    A gradient that is 0 is written over the whole row, so that the groups have nothing to write.
    """
    dtype: gl.constexpr = g_row.dtype.element_ty
    TILE: gl.constexpr = ROW.threads * WORDS
    KEPT: gl.constexpr = ROW.kept
    if gradient.moves:
        for k in gl.static_range(KEPT):
            at = (ROW.groups * ROW.per_group + k) * TILE
            # The key is 0. It hides the words from the compiler, which would keep the float32 values of the first
            # pass in twice the registers.
            words = kept[k] ^ gradient.key if ROW.kind.is_pair else kept[k]
            out = _tile_gradient(words, gradient.column_terms, dtype, ROW)
            gl.store(g_row + at, out, mask=places.words < places.width - at)
    else:
        zeros = gl.full((ROW.threads, WORDS), 0, dtype, places.words.type.layout)
        for start in range(0, places.width, TILE):
            gl.store(g_row + start, zeros, mask=places.words < places.width - start)


@gluon.jit
def _write_slot(slot, places, g_row, gradient, ROW: gl.constexpr, MASKED: gl.constexpr):
    """Write the gradient of a tile of shared memory; `MASKED`: the row may end within it."""
    TILE: gl.constexpr = ROW.threads * WORDS
    at = slot * TILE
    words = places.slots.index(slot).load(places.words.type.layout)
    out = _tile_gradient(words, gradient.column_terms, g_row.dtype.element_ty, ROW)
    if MASKED:
        gl.store(g_row + at, out, mask=places.words < places.width - at)
    else:
        gl.store(g_row + at, out)


@gluon.jit
def _exchange_groups(following, g_row, gradient, kept, places, ROW: gl.constexpr):
    """Write the gradient of each group, start the copy of the next row in its place; the next row's statistics so far.

    Group g - lag of the next row was committed `lag` iterations ago, and lag - 1 groups after it, so
    `wait_group(lag - 1)` waits for it and leaves the later copies in flight.
    """
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    LAG: gl.constexpr = ROW.lag
    KEPT: gl.constexpr = ROW.kept
    KIND: gl.constexpr = ROW.kind
    ALL_SHARED: gl.constexpr = ROW.kept == 0  # then a row may end within shared memory
    TILE: gl.constexpr = ROW.threads * WORDS
    statistics = _no_statistics(places, ROW)
    for g in gl.static_range(GROUPS):
        if g >= LAG:
            async_copy.wait_group(LAG - 1)
        for tile in range(PER):
            if gradient.moves:
                _write_slot(g * PER + tile, places, g_row, gradient, ROW, MASKED=ALL_SHARED)
            if g >= LAG:
                if following.live:
                    statistics = _accumulate_slot(statistics, (g - LAG) * PER + tile, places, ROW, ALL_SHARED)
        if g > 0:  # the kept tiles of the next row, spread over the groups
            if following.live:
                for k in gl.static_range((g - 1) * KEPT // (GROUPS - 1), g * KEPT // (GROUPS - 1)):
                    statistics = accumulate(*statistics, (kept[k],), places.c, KIND, ROW.entropy)
        # Each thread has read its own words of this group (above), so its copies may overwrite them.
        at = g * PER * TILE
        _fill(places.groups.index(g), following.words + at, places.group_words, following.limit - at)
    return statistics


@gluon.jit
def _finish_next_row(statistics, following, places, ROW: gl.constexpr):
    """The rest of the next row's statistics: its last `lag` groups, each as soon as its copy is complete.

    A masked row is copied as zeros, which must land before the copies of the row after it start.
    """
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    LAG: gl.constexpr = ROW.lag
    ALL_SHARED: gl.constexpr = ROW.kept == 0
    if following.live:
        for g in gl.static_range(GROUPS - LAG, GROUPS):
            async_copy.wait_group(GROUPS - 1 - g)
            for tile in gl.static_range(PER):
                statistics = _accumulate_slot(statistics, g * PER + tile, places, ROW, ALL_SHARED)
    else:
        async_copy.wait_group(0)
    return statistics


@gluon.jit
def _owner(column, ROW: gl.constexpr):
    """The block of the cluster that has a column."""
    COLUMNS: gl.constexpr = ROW.threads // ROW.blocks * WORDS * (2 if ROW.kind.is_pair else 1)
    return column // COLUMNS % ROW.blocks


@gluon.jit
def _load_token(row, target, live, source, rank, KL: gl.constexpr, ROW: gl.constexpr):
    """Column and logit of the target, and the values of the loss terms; 0 where the row is not live.

    The logit is 0 in a block that does not have it, because the one that does may overwrite it at any time.
    A target outside the vocabulary has the logit NaN, so loss and gradient of its row are NaN, and no address outside
    the row is read.
    """
    logits, fields, columns, logits_stride = source
    exists = (target >= 0) & (target < columns)
    column = gl.where(exists, target, 0)
    at = logits + row * logits_stride + column
    here = live & (_owner(column, ROW) == rank)
    logit = softcapped(gl.load(at, mask=here, other=0.0).to(gl.float32), ROW.kind.cap)
    logit = gl.where(exists, logit, float("nan"))
    return column, logit, load_values(fields, row, live, KL, ROW.bonus)


@gluon.jit
def _of_row(statistics, target_logit, cluster, ROW: gl.constexpr):
    """The statistics of the row and the logit of its target. The row's threads meet here, once, and its blocks.

    Every block sends its part to all. Two slots take turns: a block writes for turn n + 2 after it has received all of
    turn n + 1, which the others sent after they had read turn n. None waits in vain: the hardware starts the blocks of
    a cluster together, and all of them have the same rows and masks, so they take the same turns.
    """
    if ROW.blocks == 1:
        m, s, t = gl.reduce(statistics, 0, merge)
    else:
        m, s, t = statistics
        BLOCKS: gl.constexpr = ROW.blocks
        parts: gl.constexpr = (ROW.blocks, ROW.threads // ROW.blocks)
        m, s, t = gl.reduce((m.reshape(parts), s.reshape(parts), t.reshape(parts)), 1, merge)
        slot = cluster.inbox + cluster.turn % 2 * SLOT
        sent = [slot, BLOCKS, m, s, t, target_logit]
        gl.inline_asm_elementwise(SEND, "=r,r,r,f,f,f,f", sent, gl.int32, is_pure=False, pack=1)
        awaited = [slot, 16 * BLOCKS, cluster.turn // 2]  # a barrier's phases are even and odd
        gl.inline_asm_elementwise(WAIT, "=r,r,r,r", awaited, gl.int32, is_pure=False, pack=1)
        m, s, t, target_logit = _message(slot, 0)
        for block in gl.static_range(1, BLOCKS):
            m2, s2, t2, logit = _message(slot, block)
            m, s, t = merge(m, s, t, m2, s2, t2)
            target_logit += logit  # 0 in the blocks that do not have it
    return m, s, t, target_logit


@gluon.jit
def _message(slot, block):
    """What a block has sent."""
    return gl.inline_asm_elementwise(
        READ, "=f,=f,=f,=f,r", [slot + 16 + 16 * block], (gl.float32,) * 4, is_pure=False, pack=1
    )


@gluon.jit
def _row_loss(statistics, cluster, token, of_loss, TOKEN_KERNEL: gl.constexpr, KL: gl.constexpr, ROW: gl.constexpr):
    """The results of a row, and of its gradient target logit, slope, peak, factor, bend and key.

    With `total` the sum of 2^(z c - peak), the probability of a column is 2^x / total.
    """
    c, numbers, coefficients, grad_scale, zero = of_loss
    _, target_logit, values_of_row = token
    peak, total, shifted, target_logit = _of_row(statistics, target_logit, cluster, ROW)
    logprob, entropy = logprob_and_entropy(peak, total, shifted, target_logit, c)
    policy, slope = TOKEN_KERNEL(logprob, values_of_row.old_logprob, values_of_row.advantage, numbers)
    of_token = (policy, slope, logprob, entropy, values_of_row)
    loss, slope, bend, kl = loss_terms(*of_token, coefficients, KL, ROW.bonus)
    slope *= -grad_scale
    bend *= -grad_scale
    if ROW.bonus:  # -bend p (log p + H), log p = ln2 (x - log2 total)
        factor = (slope + bend * (entropy - LN2 * gl.log2(total))) / total
        bend = bend * LN2 / total
    else:
        factor = slope / total
    key = zero & total.to(gl.int32, bitcast=True)
    found = (policy, loss, logprob, logprob - values_of_row.old_logprob, entropy, kl)
    return found, (target_logit, slope, peak, factor, bend, key)


@gluon.jit
def _finish_row(
    results, rows, row, live, of_row, of_loss, TOKEN_KERNEL: gl.constexpr, KL: gl.constexpr, ROW: gl.constexpr
):
    """Store the results of a row, 0 if it is masked, and return its `RowGradient`.

    Results [5 or 6, rows] are loss of the objective, whole loss, log-probability, log-ratio, entropy, KL estimate.
    """
    found = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    of_gradient = (0.0, 0.0, 0.0, 0.0, 0.0, 0)
    if live:
        found, of_gradient = _row_loss(*of_row, of_loss, TOKEN_KERNEL, KL, ROW)
    for k in gl.static_range(4):
        gl.store(results + k * rows + row, found[k])
    gl.store(results + 4 * rows + row, found[4] if ROW.entropy else 0.0)
    if KL is not None:
        gl.store(results + 5 * rows + row, found[5])
    target_logit, slope, peak, factor, bend, key = of_gradient
    moves = slope != 0
    if ROW.bonus:
        moves = moves | (bend != 0)
    return RowGradient(target_logit, slope, moves, (of_loss[0], peak, factor, bend), key)


@gluon.jit
def _write_row(g_row, target, gradient, following, kept, places, ROW: gl.constexpr):
    """Write the gradient of a row and start to read the next one in its place: statistics so far, and kept tiles."""
    g_words = g_row.to(gl.pointer_type(gl.int32), bitcast=True) if ROW.kind.is_pair else g_row
    g_words += places.words
    # 1. The gradient of the kept tiles, whose registers are free then.
    _write_kept(g_words, gradient, kept, places, ROW)
    kept = _load_kept(following, places, ROW)
    # 2. The gradient of each group, and in its place the next row.
    statistics = _exchange_groups(following, g_words, gradient, kept, places, ROW)
    # 3. The target's column, without whose own part another thread of its block has written it above: the barrier
    #    orders the two stores. Its logit was loaded before anything was written.
    if gradient.moves:
        thread_barrier()
        p = _column_gradient(gradient.target_logit, gradient.column_terms, ROW.bonus)
        out = through_cap(p - gradient.slope, gradient.target_logit, ROW.kind.cap).to(g_row.dtype.element_ty)
        block = gl.arange(0, ROW.blocks, layout=_one_each(ROW))
        gl.store(g_row + target + 0 * block, out, mask=block == _owner(target, ROW))
    return statistics, kept


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
    ROW: gl.constexpr,
):
    """Each program takes every `num_programs`-th row. Widths and offsets are in 32-bit words, of gradients in columns.

    `fields` are `FieldPointers`, `coefficients` lambda and eta of `terms`.
    """
    PAIR: gl.constexpr = 2 if ROW.kind.is_pair else 1  # columns of a word
    word: gl.constexpr = gl.int32 if ROW.kind.is_pair else logits.dtype.element_ty
    groups, slots, words, group_words = _memory(word, ROW)
    z_words = logits.to(gl.pointer_type(word))
    z_stride = logits_stride // PAIR
    width = columns // PAIR
    places = Places(groups, slots, words, group_words, width, c)
    of_token = (logits, fields, columns, logits_stride)
    of_loss = (c, numbers, coefficients, grad_scale, zero)

    cluster = _cluster(ROW)
    row = gl.program_id(0).to(gl.int64)
    live = gl.load(fields.mask + row) != 0
    token = _load_token(row, gl.load(targets + row), live, of_token, cluster.rank, KL, ROW)
    first = NextRow(z_words + row * z_stride, live, gl.where(live, width, 0))
    kept, statistics = _read_first_row(first, places, ROW)
    while row < rows:
        # What is known of the next row is loaded long before it is needed, so that nothing waits for it.
        after = row + gl.num_programs(0)
        live_after = gl.load(fields.mask + after, mask=after < rows, other=0) != 0
        target = gl.load(targets + after, mask=after < rows, other=0)
        of_row = (statistics, cluster, token)
        gradient = _finish_row(results, rows, row, live, of_row, of_loss, TOKEN_KERNEL, KL, ROW)
        cluster = Cluster(cluster.rank, cluster.inbox, gl.where(live, (cluster.turn + 1) % 4, cluster.turn))
        following = NextRow(z_words + after * z_stride, live_after, gl.where(live_after, width, 0))
        g_row = gradients + row * gradients_stride
        statistics, kept = _write_row(g_row, token[0], gradient, following, kept, places, ROW)
        token = _load_token(after, target, live_after, of_token, cluster.rank, KL, ROW)
        statistics = _finish_next_row(statistics, following, places, ROW)
        row = after
        live = live_after
