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
    """How a program holds a row, in tiles of `threads` vectors of 16 bytes. Part of what the kernel is compiled for."""

    threads: int
    groups: int  # in shared memory
    per_group: int  # tiles of a group
    lag: int  # groups between the copy of a group and its first use
    kept: int  # tiles in registers
    blocks: int = 1  # of a cluster, which share a row: each has its part of every tile


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
def _tile_gradient(words, column_terms, dtype: gl.constexpr, KIND: gl.constexpr, BONUS: gl.constexpr):
    """The gradient of a tile's words rounded to `dtype`, or of paired logits to pairs of bfloat16."""
    logits = values(words, KIND)
    low = through_cap(_column_gradient(logits[0], column_terms, BONUS), logits[0], KIND.cap)
    if len(logits) == 2:
        high = through_cap(_column_gradient(logits[1], column_terms, BONUS), logits[1], KIND.cap)
        return gl.inline_asm_elementwise(PAIR_UP, "=r,f,f", [high, low], gl.int32, is_pure=True, pack=1)
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


class Places(NamedTuple):
    """In a kernel, the shared memory of a program, in two views, and where each thread's vector is in a tile."""

    groups: Any  # for the copies
    slots: Any  # one tile each
    words: Any  # offsets in a tile
    group_words: Any  # in a group of tiles


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
    key: Any  # of `_opaque`


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
def _places(word: gl.constexpr, ROW: gl.constexpr):
    """The `Places` of tiles of `word`s."""
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
    return Places(groups, slots, words, group_words)


@gluon.jit
def _no_statistics(places, ROW: gl.constexpr):
    """Statistics of no column, one of each thread."""
    thread: gl.constexpr = gl.SliceLayout(1, places.words.type.layout)
    none = gl.full((ROW.threads,), 0.0, gl.float32, thread)
    return gl.full((ROW.threads,), FLOOR, gl.float32, thread), none, none


@gluon.jit
def _accumulate_slot(
    statistics, slot, places, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, MASKED: gl.constexpr
):
    """Add a tile of shared memory to the statistics. Copies write 0 beyond a row's end; `MASKED` makes it -inf."""
    TILE: gl.constexpr = places.words.shape[0] * WORDS
    m, s, t = statistics
    words = places.slots.index(slot).load(places.words.type.layout)
    if MASKED:
        words = gl.where(places.words < width - slot * TILE, words, minus_infinity(KIND))
    return accumulate(m, s, t, (words,), c, KIND, ENTROPY)


@gluon.jit
def _read_first_row(first, places, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, ROW: gl.constexpr):
    """The kept tiles and the statistics of a program's first row, which nothing is written before."""
    GROUPS: gl.constexpr = ROW.groups
    PER: gl.constexpr = ROW.per_group
    TILE: gl.constexpr = ROW.threads * WORDS
    KEPT: gl.constexpr = ROW.kept
    for g in gl.static_range(GROUPS):
        at = g * PER * TILE
        _fill(places.groups.index(g), first.words + at, places.group_words, first.limit - at)
    kept = _load_tiles(first.words + places.words, places.words, first.limit, KIND, TILE, GROUPS * PER, KEPT)
    statistics = _no_statistics(places, ROW)
    async_copy.wait_group(0)
    if first.live:
        for slot in range(GROUPS * PER):
            statistics = _accumulate_slot(statistics, slot, places, width, c, KIND, ENTROPY, MASKED=True)
        for k in gl.static_range(KEPT):
            statistics = accumulate(*statistics, (kept[k],), c, KIND, ENTROPY)
    return kept, statistics


@gluon.jit
def _write_kept(g_row, width, gradient, kept, places, KIND: gl.constexpr, BONUS: gl.constexpr, ROW: gl.constexpr):
    """Write the gradient of the kept tiles.

    A gradient that is 0 is written over the whole row, so that the groups have nothing to write.
    """
    dtype: gl.constexpr = g_row.dtype.element_ty
    TILE: gl.constexpr = ROW.threads * WORDS
    KEPT: gl.constexpr = ROW.kept
    if gradient.moves:
        for k in gl.static_range(KEPT):
            at = (ROW.groups * ROW.per_group + k) * TILE
            words = _opaque(kept[k], gradient.key, KIND)
            out = _tile_gradient(words, gradient.column_terms, dtype, KIND, BONUS)
            gl.store(g_row + at, out, mask=places.words < width - at)
    else:
        zeros = gl.full((ROW.threads, WORDS), 0, dtype, places.words.type.layout)
        for start in range(0, width, TILE):
            gl.store(g_row + start, zeros, mask=places.words < width - start)


@gluon.jit
def _write_slot(slot, places, g_row, width, gradient, KIND: gl.constexpr, BONUS: gl.constexpr, MASKED: gl.constexpr):
    """Write the gradient of a tile of shared memory; `MASKED`: the row may end within it."""
    TILE: gl.constexpr = places.words.shape[0] * WORDS
    dtype: gl.constexpr = g_row.dtype.element_ty
    at = slot * TILE
    words = places.slots.index(slot).load(places.words.type.layout)
    out = _tile_gradient(words, gradient.column_terms, dtype, KIND, BONUS)
    if MASKED:
        gl.store(g_row + at, out, mask=places.words < width - at)
    else:
        gl.store(g_row + at, out)


@gluon.jit
def _exchange_groups(
    following,
    g_row,
    width,
    gradient,
    kept,
    places,
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
    ALL_SHARED: gl.constexpr = ROW.kept == 0  # then a row may end within shared memory
    TILE: gl.constexpr = ROW.threads * WORDS
    c = gradient.column_terms[0]
    statistics = _no_statistics(places, ROW)
    for g in gl.static_range(GROUPS):
        if g >= LAG:
            async_copy.wait_group(LAG - 1)
        for tile in range(PER):
            if gradient.moves:
                slot = g * PER + tile
                _write_slot(slot, places, g_row, width, gradient, KIND, BONUS, MASKED=ALL_SHARED)
            if g >= LAG:
                if following.live:
                    slot = (g - LAG) * PER + tile
                    statistics = _accumulate_slot(statistics, slot, places, width, c, KIND, ENTROPY, ALL_SHARED)
        if g > 0:  # the kept tiles of the next row, spread over the groups
            if following.live:
                for k in gl.static_range((g - 1) * KEPT // (GROUPS - 1), g * KEPT // (GROUPS - 1)):
                    statistics = accumulate(*statistics, (kept[k],), c, KIND, ENTROPY)
        # Each thread has read its own words of this group (above), so its copies may overwrite them.
        at = g * PER * TILE
        _fill(places.groups.index(g), following.words + at, places.group_words, following.limit - at)
    return statistics


@gluon.jit
def _finish_next_row(
    statistics, following, places, width, c, KIND: gl.constexpr, ENTROPY: gl.constexpr, ROW: gl.constexpr
):
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
                statistics = _accumulate_slot(statistics, g * PER + tile, places, width, c, KIND, ENTROPY, ALL_SHARED)
    else:
        async_copy.wait_group(0)
    return statistics


@gluon.jit
def _owner(column, KIND: gl.constexpr, ROW: gl.constexpr):
    """The block of the cluster that has a column."""
    COLUMNS: gl.constexpr = ROW.threads // ROW.blocks * WORDS * (2 if KIND.is_pair else 1)
    return column // COLUMNS % ROW.blocks


@gluon.jit
def _load_token(
    row, target, live, source, rank, KIND: gl.constexpr, KL: gl.constexpr, BONUS: gl.constexpr, ROW: gl.constexpr
):
    """Column and logit of the target, and the values of the loss terms; 0 where the row is not live.

    The logit is 0 in a block that does not have it, because the one that does may overwrite it at any time.
    A target outside the vocabulary has the logit NaN, so loss and gradient of its row are NaN, and no address outside
    the row is read.
    """
    logits, fields, columns, logits_stride = source
    exists = (target >= 0) & (target < columns)
    column = gl.where(exists, target, 0)
    at = logits + row * logits_stride + column
    here = live & (_owner(column, KIND, ROW) == rank)
    logit = softcapped(gl.load(at, mask=here, other=0.0).to(gl.float32), KIND.cap)
    logit = gl.where(exists, logit, float("nan"))
    return column, logit, load_values(fields, row, live, KL, BONUS)


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
def _row_loss(
    statistics,
    cluster,
    token,
    of_loss,
    TOKEN_KERNEL: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
    ROW: gl.constexpr,
):
    """The results of a row, and of its gradient slope, peak, factor, bend and key.

    With `total` the sum of 2^(z c - peak), the probability of a column is 2^x / total.
    """
    c, numbers, coefficients, grad_scale, zero = of_loss
    _, target_logit, values_of_row = token
    peak, total, shifted, target_logit = _of_row(statistics, target_logit, cluster, ROW)
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
    found = (policy, loss, logprob, logprob - values_of_row.old_logprob, entropy, kl)
    return found, target_logit, slope, peak, factor, bend, key


@gluon.jit
def _finish_row(
    results,
    rows,
    row,
    statistics,
    cluster,
    token,
    live,
    of_loss,
    TOKEN_KERNEL: gl.constexpr,
    KL: gl.constexpr,
    BONUS: gl.constexpr,
    ENTROPY: gl.constexpr,
    ROW: gl.constexpr,
):
    """Store the results of a row, 0 if it is masked, and return its `RowGradient`.

    Results [5 or 6, rows] are loss of the objective, whole loss, log-probability, log-ratio, entropy, KL estimate.
    """
    target_logit = 0.0
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
        found, target_logit, slope, peak, factor, bend, key = _row_loss(
            statistics, cluster, token, of_loss, TOKEN_KERNEL, KL, BONUS, ROW
        )
        policy, loss, logprob, log_ratio, entropy, kl = found
    gl.store(results + row, policy)
    gl.store(results + rows + row, loss)
    gl.store(results + 2 * rows + row, logprob)
    gl.store(results + 3 * rows + row, log_ratio)
    gl.store(results + 4 * rows + row, entropy if ENTROPY else 0.0)
    if KL is not None:
        gl.store(results + 5 * rows + row, kl)
    moves = slope != 0
    if BONUS:
        moves = moves | (bend != 0)
    return RowGradient(target_logit, slope, moves, (of_loss[0], peak, factor, bend), key)


@gluon.jit
def _write_row(
    g_row,
    width,
    target,
    gradient,
    following,
    kept,
    places,
    KIND: gl.constexpr,
    BONUS: gl.constexpr,
    ENTROPY: gl.constexpr,
    ROW: gl.constexpr,
):
    """Write the gradient of a row and start to read the next one in its place: statistics so far, and kept tiles."""
    TILE: gl.constexpr = ROW.threads * WORDS
    g_words = g_row.to(gl.pointer_type(gl.int32), bitcast=True) if KIND.is_pair else g_row
    g_words += places.words
    # 1. The gradient of the kept tiles, whose registers are free then.
    _write_kept(g_words, width, gradient, kept, places, KIND, BONUS, ROW)
    SLOTS: gl.constexpr = ROW.groups * ROW.per_group
    kept = _load_tiles(following.words + places.words, places.words, following.limit, KIND, TILE, SLOTS, ROW.kept)
    # 2. The gradient of each group, and in its place the next row.
    statistics = _exchange_groups(following, g_words, width, gradient, kept, places, KIND, BONUS, ENTROPY, ROW)
    # 3. The target's column, without whose own part another thread of its block has written it above: the barrier
    #    orders the two stores. Its logit was loaded before anything was written.
    if gradient.moves:
        thread_barrier()
        p = _column_gradient(gradient.target_logit, gradient.column_terms, BONUS)
        out = through_cap(p - gradient.slope, gradient.target_logit, KIND.cap).to(g_row.dtype.element_ty)
        block = gl.arange(0, ROW.blocks, layout=_one_each(ROW))
        gl.store(g_row + target + 0 * block, out, mask=block == _owner(target, KIND, ROW))
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
    BONUS: gl.constexpr,
    KIND: gl.constexpr,
    ENTROPY: gl.constexpr,
    ROW: gl.constexpr,
):
    """Each program takes every `num_programs`-th row. Widths and offsets are in 32-bit words, of gradients in columns.

    `fields` are `FieldPointers`, `coefficients` lambda and eta of `terms`, `ROW` is a `Tiling`.
    """
    PAIR: gl.constexpr = 2 if KIND.is_pair else 1  # columns of a word
    word: gl.constexpr = gl.int32 if KIND.is_pair else logits.dtype.element_ty
    places = _places(word, ROW)
    z_words = logits.to(gl.pointer_type(word))
    z_stride = logits_stride // PAIR
    width = columns // PAIR
    of_token = (logits, fields, columns, logits_stride)
    of_loss = (c, numbers, coefficients, grad_scale, zero)

    cluster = _cluster(ROW)
    row = gl.program_id(0).to(gl.int64)
    live = gl.load(fields.mask + row) != 0
    token = _load_token(row, gl.load(targets + row), live, of_token, cluster.rank, KIND, KL, BONUS, ROW)
    first = NextRow(z_words + row * z_stride, live, gl.where(live, width, 0))
    kept, statistics = _read_first_row(first, places, width, c, KIND, ENTROPY, ROW)
    while row < rows:
        # What is known of the next row is loaded long before it is needed, so that nothing waits for it.
        after = row + gl.num_programs(0)
        live_after = gl.load(fields.mask + after, mask=after < rows, other=0) != 0
        target = gl.load(targets + after, mask=after < rows, other=0)
        of_row = (results, rows, row, statistics, cluster, token, live, of_loss)
        gradient = _finish_row(*of_row, TOKEN_KERNEL, KL, BONUS, ENTROPY, ROW)
        cluster = Cluster(cluster.rank, cluster.inbox, gl.where(live, (cluster.turn + 1) % 4, cluster.turn))
        following = NextRow(z_words + after * z_stride, live_after, gl.where(live_after, width, 0))
        g_row = gradients + row * gradients_stride
        statistics, kept = _write_row(
            g_row, width, token[0], gradient, following, kept, places, KIND, BONUS, ENTROPY, ROW
        )
        token = _load_token(after, target, live_after, of_token, cluster.rank, KIND, KL, BONUS, ROW)
        statistics = _finish_next_row(statistics, following, places, width, c, KIND, ENTROPY, ROW)
        row = after
        live = live_after
