"""The LM head in the sampler's precision: float32 logits at tensor-core speed, and a head that never stores them.

Hidden states and weight stay in bfloat16; their products accumulate in float32 and are not rounded below it, so that
log-probabilities are those of float32 logits to 1e-5, where bfloat16 logits are off by 1e-1.

    fp32_logits            all logits by one product; the backward rounds their gradient to bfloat16, or splits it in two
    logprobs_and_entropy   from chunks of tokens; the backward makes each chunk's logits again (8 N V H operations)
    grpo_head_loss         the loss, its gradient made chunk by chunk in the forward (6 N V H), or by the function above

Tokens that are not trained are left out before the products. Weight gradients are added in float32, to Megatron's
`main_grad` where there is one. On a CPU the same steps run with float32 products, for tests.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg import logprobs as eager
from megatron_pg.args import HEAD_BACKWARDS, HEAD_MODES, KERNELS
from megatron_pg.kernels import GRPOLoss, checked_vocab_size
from megatron_pg.kernels.policy_loss import plain_grpo
from megatron_pg.logprobs import Rows

LOGITS_BYTES = 640 * 10**6  # of logits held at a time
GRADIENT_BYTES = (
    1280 * 10**6
)  # of their gradient; with less, the traffic of the weight's float32 total shows (docs/kernels.md)
ROWS = 128  # chunks are multiples of it, which is what tensor cores are fed
UPSTREAM_TOLERANCE = 1e-5  # the schedule multiplies in float32


# --- the whole logits ---


def fp32_logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
) -> Tensor:
    """Logits in float32 from hidden states and weight in bfloat16.

        z = h W^T,   products of bfloat16 numbers, sums in float32

    Args:
        hidden: [..., H] on tensor-parallel ranks equal, or with `sequence_parallel` this rank's part of the first dimension.
        weight: [V / tp, H] this tensor-parallel rank's rows, same dtype.
        backward: of the float32 gradient of the logits: "bf16" rounds it, as Megatron does (relative error of the weight
            gradient 2e-3); "split" is the sum of two bfloat16 parts (3e-6), at twice the products.
        tp_group: tensor-parallel group; the gradient of the hidden states is summed over it.
        sequence_parallel: gather the hidden states first, and reduce-scatter their gradient.
        main_grad: [V / tp, H] float32 that the weight gradient is added to. Default: the weight's own with Megatron's
            protocol if it has one, else the weight gets its gradient from autograd.

    Returns:
        [..., V / tp] float32 (float64 for float64 inputs).

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    _check_head(hidden, weight)
    _check_choice("backward", backward, HEAD_BACKWARDS)
    hidden = _enter(hidden, tp_group, sequence_parallel)
    logits = _Logits.apply(hidden.flatten(0, -2), weight, main_grad, backward == "split")
    return logits.view(*hidden.shape[:-1], len(weight))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, main_grad, split):
        ctx.save_for_backward(hidden, weight)
        ctx.main_grad, ctx.split = main_grad, split
        return _product(hidden, weight.t(), _logits_dtype(hidden))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        hidden, weight = ctx.saved_tensors
        chunk = _chunk_rows(weight, 1)
        gradients = _Gradients(hidden, weight, None, len(hidden), chunk, ctx.main_grad, ctx.split, ctx.needs_input_grad)
        for part in _slices(len(hidden), chunk):
            z = grad[part]
            if (out := gradients.buffer(part, z)) is not z:
                out.copy_(z)
            gradients.take(part, z)
        return *gradients.finish(), None, None


# --- no logits ---


def logprobs_and_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    backward: str = "bf16",
    tp_group: ProcessGroup | None = None,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    impl: str = "triton",
) -> tuple[Tensor, Tensor]:
    """Log-probability of each target and entropy of each distribution from hidden states; differentiable.

        p = softmax(h W^T / tau),   logp_t = log p[target_t],   H_t = -sum_v p_v log p_v

    Without gradient it costs one product over the trained tokens; the backward makes the logits again.

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] int64 global ids; one outside the vocabulary gives NaN.
        rows: [n] int64, increasing: the rows that are wanted. Default: all.
        temperature: tau > 0.
        vocab_size: columns at or beyond it, counted over all ranks, are padding. Default: there is no padding.
        backward: as in `fp32_logits`.
        tp_group: tensor-parallel group; every rank of it must call with the same rows.
        sequence_parallel: as in `fp32_logits`.
        main_grad: as in `fp32_logits`.
        impl: "triton" or "torch": what reads the logits of a chunk.

    Returns:
        [n] log-probabilities and [n] entropies in nats, float32, equal on every tensor-parallel rank.
    """
    _check_head(hidden, weight)
    _check_choice("backward", backward, HEAD_BACKWARDS)
    hidden = _enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    vocabulary = _vocabulary(weight, temperature, vocab_size, tp_group, impl)
    targets = _selected(targets, rows)
    return _LogprobsAndEntropy.apply(hidden, weight, targets, rows, vocabulary, main_grad, backward == "split")


class _LogprobsAndEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, targets, rows, vocabulary, main_grad, split):
        found = torch.empty(len(Rows._fields), len(targets), dtype=_logits_dtype(hidden), device=hidden.device)
        chunks = _Chunks(hidden, weight, targets, rows, vocabulary)
        for chunk, _, part in chunks.with_rows():
            for values, new in zip(found, part, strict=True):
                values[chunk] = new
        ctx.save_for_backward(hidden, weight, targets, rows, found)
        ctx.options = vocabulary, main_grad, split
        return found[0].clone(), found[1].clone()  # what is saved must not be an output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_logprobs, grad_entropy):
        hidden, weight, targets, rows, found = ctx.saved_tensors
        vocabulary, main_grad, split = ctx.options
        chunks = _Chunks(hidden, weight, targets, rows, vocabulary)
        needed = ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, rows, len(targets), chunks.rows, main_grad, split, needed)
        for chunk in chunks.slices():
            z = chunks.logits(chunk)
            slopes = grad_logprobs[chunk], grad_entropy[chunk]
            out = gradients.buffer(chunk, z)
            vocabulary.write_gradient(z, out, targets[chunk], Rows(*found[:, chunk]), *slopes)
            gradients.take(chunk, z)
        return *gradients.finish(), None, None, None, None, None


def grpo_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    weights: Tensor,
    *,
    mask: Tensor | None = None,
    rows: Tensor | None = None,
    clip_eps_low: float,
    clip_eps_high: float,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    grad_divisor: float = 1.0,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    mode: str = "forward",
    backward: str = "bf16",
    impl: str = "triton",
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from hidden states, without ever holding its logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   logits h W^T

    The arguments that `megatron_pg.kernels.grpo_loss` has too mean the same here.

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] int64 global token ids, equal on all tensor-parallel ranks, like every [T] field.
        old_logprobs: [T] nats.
        advantages: [T].
        weights: [T].
        mask: [T] bool, trained tokens. Default: weights != 0.
        rows: [n] int64, increasing: where `mask` is True. Default: found from `mask`, for which the host waits for the device.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        temperature: tau.
        vocab_size: columns at or beyond it are padding.
        grad_divisor: the gradient, not the loss, is divided by it.
        grad_scale: the upstream gradient that the backward will bring. Mode "forward" adds the weight gradient, made for it,
            to `main_grad` in the forward; another upstream gradient is then an error in the backward.
        tp_group: tensor-parallel group.
        entropy: also return the entropies.
        sequence_parallel: as in `fp32_logits`.
        main_grad: as in `fp32_logits`.
        mode: "forward": the gradient is made in the forward, 6 N V H operations; "recompute": in the backward, from
            logits that are made again, 8 N V H, for any upstream gradient.
        backward: as in `fp32_logits`.
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    _check_choice("mode", mode, HEAD_MODES)
    mask = weights != 0 if mask is None else mask
    rows = mask.nonzero()[:, 0] if rows is None else rows
    old_logprobs, advantages, weights = (_selected(values, rows) for values in (old_logprobs, advantages, weights))
    clip = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high}

    def tail(logprobs: Tensor, part: slice = slice(None)) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, token losses and log-ratios of a part of the trained rows."""
        trained = torch.ones_like(logprobs, dtype=torch.bool)
        fields = old_logprobs[part], advantages[part], weights[part]
        found = plain_grpo(*fields, mask=trained, grad_divisor=grad_divisor, **clip)(logprobs)
        return found.loss, found.token_losses, found.log_ratios

    where = {"tp_group": tp_group, "sequence_parallel": sequence_parallel}
    what = {"temperature": temperature, "vocab_size": vocab_size, "impl": impl}
    how = {"main_grad": main_grad, "backward": backward}
    if mode == "recompute" or not (torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)):
        logprobs, entropies = logprobs_and_entropy(hidden, weight, targets, rows=rows, **where, **what, **how)
        loss, token_losses, log_ratios = tail(logprobs)
    else:
        _check_head(hidden, weight)
        _check_choice("backward", backward, HEAD_BACKWARDS)
        hidden = _enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
        vocabulary = _vocabulary(weight, temperature, vocab_size, tp_group, impl)
        targets = _selected(targets, rows)
        launch = {**clip, "grad_scale": grad_scale / grad_divisor, "entropy": entropy}
        one_launch = vocabulary.one_launch(hidden.dtype, (targets, old_logprobs, advantages, weights), launch)
        job = _Job(targets, rows, vocabulary, tail, one_launch, main_grad, backward == "split", grad_scale)
        loss, token_losses, logprobs, log_ratios, entropies = _GradientInForward.apply(hidden, weight, job)
    shown = (_spread(v.detach(), rows, mask) for v in (token_losses, logprobs, log_ratios, entropies))
    token_losses, logprobs, log_ratios, entropies = shown
    return GRPOLoss(loss, token_losses, logprobs, log_ratios, entropies if entropy else None)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What the gradient in the forward needs beside hidden states and weight."""

    targets: Tensor  # [n]
    rows: Tensor | None
    vocabulary: "_Vocabulary"
    tail: Callable[[Tensor, slice], tuple[Tensor, Tensor, Tensor]]
    one_launch: Callable[[Tensor, Tensor, slice], Tensor] | None
    main_grad: Tensor | None
    split: bool
    grad_scale: float


class _GradientInForward(torch.autograd.Function):
    """The gradient is made with the loss, for the upstream gradient `grad_scale`."""

    @staticmethod
    def forward(ctx, hidden, weight, job):
        count = len(job.targets)
        values = torch.zeros(5, count, dtype=_logits_dtype(hidden), device=hidden.device)
        chunks, needed = _Chunks(hidden, weight, job.targets, job.rows, job.vocabulary), ctx.needs_input_grad
        gradients = _Gradients(hidden, weight, job.rows, count, chunks.rows, job.main_grad, job.split, needed)
        if job.one_launch:
            for chunk in chunks.slices():
                z = chunks.logits(chunk)
                values[:, chunk] = job.one_launch(z, gradients.buffer(chunk, z), chunk)
                gradients.take(chunk, z)
        else:
            for chunk, z, rows in chunks.with_rows():
                values[:, chunk], slope = _loss_and_slope(job, rows, chunk)
                out = gradients.buffer(chunk, z)
                job.vocabulary.write_gradient(z, out, job.targets[chunk], rows, slope, torch.zeros_like(slope))
                gradients.take(chunk, z)
        ctx.gradients, ctx.grad_scale = gradients, job.grad_scale
        token_losses, weighted, logprobs, log_ratios, entropies = values.unbind()
        ctx.mark_non_differentiable(token_losses, logprobs, log_ratios, entropies)
        return weighted.sum(), token_losses, logprobs, log_ratios, entropies

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one grpo_head_loss, whose gradient was made once and handed over. "
                'Call it again, or use mode="recompute".'
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(factor=grad_loss / ctx.grad_scale), None


def _loss_and_slope(job: _Job, rows: Rows, chunk: slice) -> tuple[Tensor, Tensor]:
    """[5, c] values of a chunk, and [c] the derivative of the loss by each log-probability, times `grad_scale`."""
    with torch.enable_grad():
        logprobs = rows.logprobs.detach().requires_grad_()
        loss, token_losses, log_ratios = job.tail(logprobs, chunk)
        (slope,) = torch.autograd.grad(loss, logprobs)
    weighted = torch.zeros_like(token_losses)
    weighted[0] = loss.detach()
    return torch.stack([token_losses, weighted, rows.logprobs, log_ratios, rows.entropy]), slope * job.grad_scale


# --- chunks of logits ---


class _Chunks:
    """The logits of the wanted rows, `rows` at a time, in buffers that are used again."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, vocabulary: "_Vocabulary"):
        self._hidden, self._weight, self._targets, self._rows = hidden, weight, targets, rows
        self._vocabulary = vocabulary
        buffers = 1 if vocabulary.tp_group is None or vocabulary.tp_group.size() == 1 else 2
        self.rows = _chunk_rows(weight, buffers)
        size = min(self.rows, len(targets)), len(weight)
        self._buffers = [hidden.new_empty(size, dtype=_logits_dtype(hidden)) for _ in range(buffers)]

    def slices(self) -> Iterator[slice]:
        """The chunks of the wanted rows."""
        return _slices(len(self._targets), self.rows)

    def logits(self, chunk: slice, buffer: int = 0) -> Tensor:
        """[c, V / tp] of a chunk of the wanted rows."""
        out = self._buffers[buffer][: chunk.stop - chunk.start]
        _product_into(_states(self._hidden, self._rows, chunk), self._weight.t(), out)
        return out

    def with_rows(self) -> Iterator[tuple[slice, Tensor, Rows]]:
        """Each chunk, its logits, and its log-probabilities; ranks exchange those of a chunk under the product of the next."""
        waiting: deque[tuple] = deque()
        for number, chunk in enumerate(self.slices()):
            z = self.logits(chunk, number % len(self._buffers))
            shares = self._vocabulary.statistics(z, self._targets[chunk])
            waiting.append((chunk, z, *_start_gather(shares, self._vocabulary.tp_group)))
            if len(waiting) == len(self._buffers):
                yield self._combined(*waiting.popleft())
        while waiting:
            yield self._combined(*waiting.popleft())

    def _combined(self, chunk: slice, z: Tensor, shares: Tensor, work: object) -> tuple[slice, Tensor, Rows]:
        if work is not None:
            work.wait()
        return chunk, z, self._vocabulary.combine(shares, self._targets[chunk])


def _start_gather(shares: Tensor, tp_group: ProcessGroup | None) -> tuple[Tensor, object | None]:
    if tp_group is None or tp_group.size() == 1:
        return shares[None], None
    gathered = shares.new_empty(tp_group.size(), *shares.shape)
    return gathered, torch.distributed.all_gather_into_tensor(
        gathered.flatten(0, 1), shares, group=tp_group, async_op=True
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Vocabulary:
    """This rank's columns, and what reads the logits of them."""

    columns: int
    temperature: float
    vocab_size: int
    tp_group: ProcessGroup | None

    def one_launch(self, dtype: torch.dtype, fields: tuple, options: dict) -> Callable | None:
        """What makes loss and gradient of a chunk in one pass over its logits, where there is such a kernel."""
        return None


class _Eager(_Vocabulary):
    def _shard(self) -> eager.Shard:
        return eager.Shard.of_rank(self.columns, self.tp_group)

    def statistics(self, z: Tensor, targets: Tensor) -> Tensor:
        shard = self._shard()
        z[:, max(self.vocab_size - shard.first, 0) :] = -torch.inf
        return eager.statistics(z, targets, shard, self.temperature)

    def combine(self, shares: Tensor, targets: Tensor) -> Rows:
        rows = eager.combine(shares)
        exists = (targets >= 0) & (targets < self.vocab_size)
        return rows._replace(logprobs=torch.where(exists, rows.logprobs, torch.nan))

    def write_gradient(self, z: Tensor, out: Tensor, targets: Tensor, rows: Rows, *slopes: Tensor) -> None:
        shard = self._shard()
        z[:, max(self.vocab_size - shard.first, 0) :] = -torch.inf
        out.copy_(eager.gradient(z, targets, rows, *slopes, shard, self.temperature))


class _Triton(_Vocabulary):
    def _shard(self):
        from megatron_pg.kernels import vocab_parallel

        return vocab_parallel, vocab_parallel.Shard.of_rank(self.columns, self.vocab_size, self.tp_group)

    def statistics(self, z: Tensor, targets: Tensor) -> Tensor:
        kernels, shard = self._shard()
        return kernels.statistics(z, targets, _trained(targets), shard, self.temperature)

    def combine(self, shares: Tensor, targets: Tensor) -> Rows:
        kernels, shard = self._shard()
        return kernels.combine(shares, targets, _trained(targets), shard, self.temperature)

    def write_gradient(self, z: Tensor, out: Tensor, targets: Tensor, rows: Rows, *slopes: Tensor) -> None:
        kernels, shard = self._shard()
        kernels.write_gradient(z, out, targets, _trained(targets), rows, *slopes, shard, self.temperature)

    def one_launch(self, dtype: torch.dtype, fields: tuple, options: dict) -> Callable | None:
        whole = self.tp_group is None or self.tp_group.size() == 1
        if not whole or not fields[0].is_cuda:
            return None
        from megatron_pg.kernels import ring

        if not ring.supports(
            torch.empty(0, self.columns, dtype=torch.float32, device=fields[0].device), self.vocab_size
        ):
            return None

        def launch(z: Tensor, out: Tensor, part: slice) -> Tensor:
            here = (values[part].contiguous() for values in fields)
            mask = torch.ones(len(z), dtype=torch.bool, device=z.device)
            options_here = {**options, "valid": self.vocab_size, "temperature": self.temperature}
            return ring.grpo_loss_and_gradient(z, out, *here, mask, **options_here)

        return launch


def _trained(targets: Tensor) -> Tensor:
    return torch.ones_like(targets, dtype=torch.bool)


def _vocabulary(
    weight: Tensor, temperature: float, vocab_size: int | None, tp_group: ProcessGroup | None, impl: str
) -> _Vocabulary:
    _check_choice("impl", impl, KERNELS)
    ranks = 1 if tp_group is None else tp_group.size()
    kind = _Triton if impl == "triton" else _Eager
    return kind(len(weight), temperature, checked_vocab_size(vocab_size, len(weight) * ranks), tp_group)


# --- gradients ---


class _Gradients:
    """Takes the gradient of the logits chunk by chunk and makes those of hidden states and weight, block by block."""

    def __init__(
        self,
        hidden: Tensor,
        weight: Tensor,
        rows: Tensor | None,
        count: int,
        chunk: int,
        main_grad: Tensor | None,
        split: bool,
        needed: tuple[bool, ...],
    ):
        self._hidden, self._weight, self._rows, self._count = hidden, weight, rows, count
        self._split = split and hidden.dtype.itemsize < 4
        size = min(_block_rows(weight, chunk), count), len(weight)
        self._parts = [hidden.new_empty(size) for _ in range(2 if self._split else 1)]
        self._of_hidden = torch.zeros_like(hidden) if needed[0] else None
        self._of_weight = _WeightGradient(weight, main_grad) if needed[1] else None
        self._start = 0  # of the block that is being filled

    def buffer(self, chunk: slice, z: Tensor) -> Tensor:
        """Where the gradient of a chunk's logits is to be written: over the logits `z` themselves, if it is then split."""
        return z if self._split else self._parts[0][chunk.start - self._start : chunk.stop - self._start]

    def take(self, chunk: slice, z: Tensor) -> None:
        """The chunk's gradient is written; a block that is full is multiplied."""
        if self._split:
            high, low = (part[chunk.start - self._start : chunk.stop - self._start] for part in self._parts)
            high.copy_(z)
            low.copy_(z - high)
        if chunk.stop - self._start == len(self._parts[0]) or chunk.stop == self._count:
            self._multiply(slice(self._start, chunk.stop))
            self._start = chunk.stop

    def _multiply(self, block: slice) -> None:
        parts = [part[: block.stop - block.start] for part in self._parts]
        if self._of_hidden is not None:
            self._put(block, _sum_of_products(parts, self._weight))
        if self._of_weight is not None:
            states = _states(self._hidden, self._rows, block)
            for part in parts:
                self._of_weight.add(part.t(), states)

    def _put(self, block: slice, gradient: Tensor) -> None:
        if self._rows is None:
            self._of_hidden[block] = gradient
        else:
            self._of_hidden.index_copy_(0, self._rows[block], gradient)

    def finish(self, factor: Tensor | None = None) -> tuple[Tensor | None, Tensor | None]:
        """Gradients for autograd, times `factor` (a 0-d tensor) if it is given."""
        if factor is not None and self._of_weight is not None and self._of_weight.is_elsewhere:
            torch._assert_async(
                (factor - 1).abs() < UPSTREAM_TOLERANCE,
                "the loss of the fused head was given another upstream gradient than its grad_scale, for which the weight "
                "gradient is already in main_grad, so the step would be wrong. Pass that scale, or use recompute",
            )
            factor = None
        if factor is not None and self._of_hidden is not None:
            self._of_hidden.mul_(factor)
        return self._of_hidden, None if self._of_weight is None else self._of_weight.for_autograd(factor)


class _WeightGradient:
    """Adds up the weight gradient: in `main_grad` where there is one, with Megatron's protocol if it is Megatron's."""

    def __init__(self, weight: Tensor, main_grad: Tensor | None):
        self._weight = weight
        self._is_megatrons = main_grad is None and hasattr(weight, "grad_added_to_main_grad")
        self._total = weight.main_grad if self._is_megatrons else main_grad
        self.is_elsewhere = self._total is not None  # not for autograd to add
        if not self.is_elsewhere:
            self._total = torch.zeros_like(weight, dtype=_logits_dtype(weight))

    def add(self, left: Tensor, right: Tensor) -> None:
        """total += left @ right."""
        _add_product(left, right, self._total)

    def for_autograd(self, factor: Tensor | None) -> Tensor | None:
        """What the backward returns as the weight's gradient."""
        if not self.is_elsewhere:
            return (self._total if factor is None else self._total * factor).to(self._weight.dtype)
        return self._announce() if self._is_megatrons else None

    def _announce(self) -> Tensor | None:
        """Tell Megatron's backward hook, which wants to see a gradient, that it has been added."""
        self._weight.grad_added_to_main_grad = True
        if getattr(self._weight, "zero_out_wgrad", False):  # shared with the embedding, whose gradient comes on top
            return torch.zeros_like(self._weight)
        self._weight.grad = self._weight.new_zeros(()).expand(self._weight.shape)  # no memory; the hook drops it
        return None


# --- products ---


def _states(hidden: Tensor, rows: Tensor | None, part: slice) -> Tensor:
    return hidden[part] if rows is None else hidden.index_select(0, rows[part])


def _slices(count: int, size: int) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


def _chunk_rows(weight: Tensor, buffers: int) -> int:
    """Rows of logits that are made at a time."""
    row = len(weight) * _logits_dtype(weight).itemsize * buffers
    return max(LOGITS_BYTES // row // ROWS, 1) * ROWS


def _block_rows(weight: Tensor, chunk: int) -> int:
    """Rows of a weight-gradient product: a multiple of a chunk's."""
    return max(GRADIENT_BYTES // (len(weight) * weight.itemsize) // chunk, 1) * chunk


def _logits_dtype(values: Tensor) -> torch.dtype:
    return torch.promote_types(values.dtype, torch.float32)


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    out = left.new_empty(len(left), right.shape[1], dtype=dtype)
    _product_into(left, right, out)
    return out


def _product_into(left: Tensor, right: Tensor, out: Tensor) -> None:
    """out = left @ right, summed in float32 and rounded once, to the dtype of `out`."""
    if not left.is_cuda:
        out.copy_(left.to(_logits_dtype(left)) @ right.to(_logits_dtype(right)))
    elif out.dtype == left.dtype:
        torch.mm(left, right, out=out)
    else:
        torch.mm(left, right, out_dtype=out.dtype, out=out)


def _add_product(left: Tensor, right: Tensor, total: Tensor) -> None:
    """total += left @ right, summed in float32."""
    if not left.is_cuda:
        total.add_(left.to(_logits_dtype(left)) @ right.to(_logits_dtype(right)))
    elif total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        torch.addmm(total, left, right, out_dtype=total.dtype, out=total)


def _sum_of_products(parts: list[Tensor], right: Tensor) -> Tensor:
    """The sum of part @ right, rounded once, to their dtype."""
    if len(parts) == 1:
        return _product(parts[0], right, right.dtype)
    total = _product(parts[0], right, _logits_dtype(right))
    for part in parts[1:]:
        _add_product(part, right, total)
    return total.to(right.dtype)


# --- tensor parallelism ---


def _enter(hidden: Tensor, tp_group: ProcessGroup | None, sequence_parallel: bool) -> Tensor:
    """The hidden states of all rows on every tensor-parallel rank; their gradient is summed over the ranks."""
    if tp_group is None or tp_group.size() == 1:
        return hidden
    return (_GatherSequence if sequence_parallel else _SumGradient).apply(hidden, tp_group)


class _SumGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        return hidden.view_as(hidden)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        grad = grad.contiguous()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, group):
        ctx.group = group
        whole = hidden.new_empty(hidden.shape[0] * group.size(), *hidden.shape[1:])
        torch.distributed.all_gather_into_tensor(whole, hidden.contiguous(), group=group)
        return whole

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        mine = grad.new_empty(grad.shape[0] // ctx.group.size(), *grad.shape[1:])
        torch.distributed.reduce_scatter_tensor(mine, grad.contiguous(), group=ctx.group)
        return mine, None


# --- checks ---


def _selected(values: Tensor, rows: Tensor | None) -> Tensor:
    return values if rows is None else values.index_select(0, rows)


def _spread(values: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
    """[T] from [n]: 0 where masked."""
    return values.new_zeros(mask.shape).index_copy_(0, rows, values)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is not one of {', '.join(choices)}, so nothing would be computed.")


def _check_head(hidden: Tensor, weight: Tensor) -> None:
    if weight.dim() != 2 or hidden.shape[-1] != weight.shape[1] or hidden.dtype != weight.dtype:
        raise ValueError(
            f"hidden states have shape {tuple(hidden.shape)} and dtype {hidden.dtype}, the weight {tuple(weight.shape)} and "
            f"{weight.dtype}: not [..., H] and [V / tp, H] of one dtype, so there is no product. Cast one to the other's dtype."
        )
    if hidden.is_cuda and hidden.dtype.itemsize < 4 and tuple(map(int, torch.__version__.split(".")[:2])) < (2, 8):
        raise ValueError(
            f"torch {torch.__version__} has no product of {hidden.dtype} with float32 output (2.8 has), and rounded logits would "
            "be what this function avoids. Upgrade torch."
        )
