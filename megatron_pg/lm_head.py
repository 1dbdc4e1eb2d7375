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
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg import logprobs as eager
from megatron_pg.args import KERNELS
from megatron_pg.head_flags import HEAD_BACKWARDS, HEAD_MODES
from megatron_pg.kernels import (
    GRPOLoss,
    PolicyGradientLoss,
    PolicyLoss,
    check_factors,
    check_fields,
    checked_vocab_size,
)
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
    vocabulary = _vocabulary(weight, temperature, vocab_size, tp_group, impl)
    hidden = _enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    _check_targets(hidden, targets)
    targets = targets if rows is None else targets.index_select(0, rows)
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
    clip_eps_low: float,
    clip_eps_high: float,
    grad_divisor: float = 1.0,
    **options: object,
) -> GRPOLoss:
    """Clipped policy-gradient loss of one micro-batch from hidden states, without ever holding its logits.

        loss = sum_t w_t * -min(r_t A_t, clip(r_t, 1 - eps_low, 1 + eps_high) A_t),   logits h W^T

    Args:
        hidden: [..., H] as in `fp32_logits`, T rows in all once gathered.
        weight: [V / tp, H].
        targets: [T] int64 global token ids, equal on all tensor-parallel ranks, like every [T] field.
        old_logprobs: [T] nats.
        advantages: [T].
        weights: [T].
        mask: [T] bool, trained tokens. Default: weights != 0.
        clip_eps_low: distance of the lower clip bound from 1.
        clip_eps_high: distance of the upper clip bound from 1.
        grad_divisor: the gradient, not the loss, is divided by it.
        options: further keywords of `policy_gradient_head_loss`.

    Raises:
        ValueError: shapes, dtypes or options cannot be.
    """
    mask = weights != 0 if mask is None else mask
    clip = {"clip_eps_low": clip_eps_low, "clip_eps_high": clip_eps_high}
    policy_loss = plain_grpo(old_logprobs, advantages, weights, mask=mask, grad_divisor=grad_divisor, **clip)
    return policy_gradient_head_loss(hidden, weight, targets, policy_loss, **options)


def policy_gradient_head_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    policy_loss: PolicyLoss,
    *,
    rows: Tensor | None = None,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    grad_scale: float = 1.0,
    tp_group: ProcessGroup | None = None,
    entropy: bool = False,
    sequence_parallel: bool = False,
    main_grad: Tensor | None = None,
    mode: str = "forward",
    backward: str = "bf16",
    impl: str = "triton",
) -> PolicyGradientLoss:
    """Any objective with any further terms, from hidden states; the general form of `grpo_head_loss`.

    Args:
        hidden: as in `grpo_head_loss`, like every argument that is not named here.
        weight: [V / tp, H].
        targets: [T] int64.
        policy_loss: the loss as a function of log-probabilities and entropies, with its [T] fields.
        rows: [n] int64, increasing: where its mask is True. Default: found there, for which the host waits for the device.
        temperature: tau.
        vocab_size: columns at or beyond it, counted over all ranks, are padding.
        grad_scale: the upstream gradient that the backward will bring. Mode "forward" adds the weight gradient, made for it,
            to `main_grad` in the forward; another upstream gradient is then an error in the backward.
        tp_group: tensor-parallel group.
        entropy: also return the entropies.
        sequence_parallel: as in `fp32_logits`.
        main_grad: as in `fp32_logits`.
        mode: "forward": the gradient is made in the forward, 6 N V H operations; "recompute": in the backward, from
            logits that are made again, 8 N V H, for any upstream gradient and for losses that read whole sequences.
        backward: as in `fp32_logits`.
        impl: "triton" or "torch".

    Raises:
        ValueError: shapes, dtypes or options cannot be, or a field that a term needs is missing.
    """
    _check_choice("mode", mode, HEAD_MODES)
    _check_choice("backward", backward, HEAD_BACKWARDS)
    _check_head(hidden, weight)
    _check_sequences(mode, policy_loss)
    check_fields(hidden, targets, policy_loss)
    check_factors(policy_loss.terms.grad_divisor, grad_scale)
    vocabulary = _vocabulary(weight, temperature, vocab_size, tp_group, impl)
    rows = policy_loss.mask.nonzero()[:, 0] if rows is None else rows
    trains = torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad)
    hidden = _enter(hidden, tp_group, sequence_parallel).flatten(0, -2)
    _check_targets(hidden, targets)
    targets, split = targets.index_select(0, rows), backward == "split"
    if mode == "forward" and trains and len(rows):
        job = _Job(targets, rows, vocabulary, policy_loss.at(rows), main_grad, split, grad_scale, entropy, [])
        loss = _GradientInForward.apply(hidden, weight, job)
        found = PolicyGradientLoss(loss, **_spread(job.found, rows, len(policy_loss.mask)))
    else:
        values = _LogprobsAndEntropy.apply(hidden, weight, targets, rows, vocabulary, main_grad, split)
        found = policy_loss(*(v.new_zeros(policy_loss.mask.shape).index_copy(0, rows, v) for v in values))
    return found if entropy or policy_loss.terms.entropy_coef else replace(found, entropy=None)


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """What the gradient in the forward needs beside hidden states and weight, and what it finds beside the loss."""

    targets: Tensor  # [n]
    rows: Tensor
    vocabulary: "_Vocabulary"
    policy_loss: PolicyLoss  # of the n rows
    main_grad: Tensor | None
    split: bool
    grad_scale: float
    entropy: bool
    found: list[PolicyGradientLoss]  # of every chunk


class _GradientInForward(torch.autograd.Function):
    """The gradient is made with the loss, for the upstream gradient `grad_scale`."""

    @staticmethod
    def forward(ctx, hidden, weight, job):
        chunks, needed = _Chunks(hidden, weight, job.targets, job.rows, job.vocabulary), ctx.needs_input_grad
        gradients = _Gradients(
            hidden, weight, job.rows, len(job.targets), chunks.rows, job.main_grad, job.split, needed
        )
        one_launch = job.vocabulary.one_launch(job.policy_loss, job.targets)
        if one_launch:
            for chunk in chunks.slices():
                z = chunks.logits(chunk)
                job.found.append(one_launch(z, gradients.buffer(chunk, z), chunk, job))
                gradients.take(chunk, z)
        else:
            for chunk, z, rows in chunks.with_rows():
                found, *slopes = job.vocabulary.loss_and_slopes(job.policy_loss.at(chunk), rows)
                job.found.append(found)
                slopes = (slope * job.grad_scale for slope in slopes)
                job.vocabulary.write_gradient(z, gradients.buffer(chunk, z), job.targets[chunk], rows, *slopes)
                gradients.take(chunk, z)
        ctx.gradients, ctx.grad_scale = gradients, job.grad_scale
        return sum((found.loss for found in job.found), start=hidden.new_zeros((), dtype=_logits_dtype(hidden)))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss):
        if ctx.gradients is None:
            raise RuntimeError(
                "backward ran a second time through one fused head, whose gradient was made once and handed over. "
                'Call it again, or use mode="recompute".'
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(factor=grad_loss / ctx.grad_scale), None


def _spread(parts: list[PolicyGradientLoss], rows: Tensor, size: int) -> dict[str, Tensor | None]:
    """The per-token values of all chunks, [T] each, 0 where nothing is trained."""
    found = {}
    for name in (field.name for field in fields(PolicyGradientLoss) if field.name != "loss"):
        values = [getattr(part, name) for part in parts]
        known = None if values[0] is None else torch.cat(values)
        found[name] = None if known is None else known.new_zeros(size).index_copy_(0, rows, known)
    return found


# --- chunks of logits ---


class _Chunks:
    """The logits of the wanted rows, `rows` at a time, in buffers that are used again."""

    def __init__(self, hidden: Tensor, weight: Tensor, targets: Tensor, rows: Tensor | None, vocabulary: "_Vocabulary"):
        self._hidden, self._weight, self._targets, self._rows = hidden, weight, targets, rows
        self._vocabulary = vocabulary
        buffers = min(vocabulary.ranks, 2)
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
            waiting.append((chunk, z, *self._vocabulary.start_gather(shares)))
            if len(waiting) == len(self._buffers):
                yield self._combined(*waiting.popleft())
        while waiting:
            yield self._combined(*waiting.popleft())

    def _combined(self, chunk: slice, z: Tensor, shares: Tensor, work: object) -> tuple[slice, Tensor, Rows]:
        if work is not None:
            work.wait()
        return chunk, z, self._vocabulary.combine(shares, self._targets[chunk])


@dataclass(frozen=True, slots=True, eq=False)
class _Vocabulary:
    """This rank's columns, and what reads the logits of them."""

    columns: int
    temperature: float
    vocab_size: int
    tp_group: ProcessGroup | None

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks that share the vocabulary."""
        return 1 if self.tp_group is None else self.tp_group.size()

    def start_gather(self, shares: Tensor) -> tuple[Tensor, object | None]:
        """[tp, c, 4] that will hold every rank's shares, and what to wait for first."""
        if self.ranks == 1:
            return shares[None], None
        gathered = shares.new_empty(self.ranks, *shares.shape)
        into = gathered.flatten(0, 1)
        return gathered, torch.distributed.all_gather_into_tensor(into, shares, group=self.tp_group, async_op=True)

    def one_launch(self, policy_loss: PolicyLoss, targets: Tensor) -> Callable | None:
        """What makes loss and gradient of a chunk in one pass over its logits, where there is such a kernel."""
        return None

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Tensor, Tensor]:
        """The loss of a chunk, and its derivatives by each log-probability and entropy."""
        with torch.enable_grad():
            logprobs, entropy = (values.detach().requires_grad_() for values in (rows.logprobs, rows.entropy))
            found = policy_loss(logprobs, entropy)
            slopes = torch.autograd.grad(found.loss, (logprobs, entropy), materialize_grads=True, allow_unused=True)
        return replace(found, loss=found.loss.detach()), *slopes


class _Eager(_Vocabulary):
    def _without_padding(self, z: Tensor) -> tuple[Tensor, eager.Shard]:
        shard = eager.Shard.of_rank(self.columns, self.tp_group)
        z[:, max(self.vocab_size - shard.first, 0) :] = -torch.inf
        return z, shard

    def statistics(self, z: Tensor, targets: Tensor) -> Tensor:
        z, shard = self._without_padding(z)
        return eager.statistics(z, targets, shard, self.temperature)

    def combine(self, shares: Tensor, targets: Tensor) -> Rows:
        rows = eager.combine(shares)
        exists = (targets >= 0) & (targets < self.vocab_size)
        return rows._replace(logprobs=torch.where(exists, rows.logprobs, torch.nan))

    def write_gradient(self, z: Tensor, out: Tensor, targets: Tensor, rows: Rows, *slopes: Tensor) -> None:
        z, shard = self._without_padding(z)
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

    def one_launch(self, policy_loss: PolicyLoss, targets: Tensor) -> Callable | None:
        if not (self.ranks == 1 and targets.is_cuda and policy_loss.terms.is_plain_grpo):
            return None
        from megatron_pg.kernels import triton_loss

        like = torch.empty(1, self.columns, dtype=torch.float32, device=targets.device)
        return self._launch if triton_loss.fits_one_launch(like, self.vocab_size) else None

    def loss_and_slopes(self, policy_loss: PolicyLoss, rows: Rows) -> tuple[PolicyGradientLoss, Tensor, Tensor]:
        if not policy_loss.terms.is_plain_grpo:
            return super().loss_and_slopes(policy_loss, rows)
        from megatron_pg.kernels.surrogate import surrogate_and_slope

        found, slope = surrogate_and_slope(policy_loss, rows.logprobs, rows.entropy)
        return found, slope, torch.zeros_like(slope)

    def _launch(self, z: Tensor, out: Tensor, chunk: slice, job: "_Job") -> PolicyGradientLoss:
        from megatron_pg.kernels import ring

        here = job.policy_loss.at(chunk)
        clip = here.terms.objective.parameters
        token_losses, weighted, logprobs, log_ratios, entropy = ring.grpo_loss_and_gradient(
            z,
            out,
            job.targets[chunk],
            *(values.contiguous() for values in (here.old_logprobs, here.advantages, here.weights, here.mask)),
            valid=self.vocab_size,
            clip_eps_low=clip.clip_eps_low,
            clip_eps_high=clip.clip_eps_high,
            temperature=self.temperature,
            grad_scale=job.grad_scale / here.terms.grad_divisor,
            entropy=job.entropy,
        )
        return PolicyGradientLoss(weighted.sum(), token_losses, logprobs, log_ratios, entropy)


def _trained(targets: Tensor) -> Tensor:
    return torch.ones_like(targets, dtype=torch.bool)


def _vocabulary(
    weight: Tensor, temperature: float, vocab_size: int | None, tp_group: ProcessGroup | None, impl: str
) -> _Vocabulary:
    _check_choice("impl", impl, KERNELS)
    if not temperature > 0:
        raise ValueError(f"temperature={temperature} is not > 0, so the distribution is undefined. Use the rollouts'.")
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


def _check_targets(hidden: Tensor, targets: Tensor) -> None:
    if targets.shape != hidden.shape[:1] or targets.dtype != torch.int64:
        raise ValueError(
            f"targets have shape {tuple(targets.shape)} and dtype {targets.dtype} for {len(hidden)} rows of hidden states, not "
            f"[{len(hidden)}] int64, so tokens and rows would not align. Give one token id per row, of all sequence-parallel ranks."
        )


def _check_sequences(mode: str, policy_loss: PolicyLoss) -> None:
    if mode == "forward" and policy_loss.terms.reads_sequences:
        raise ValueError(
            "mode='forward' makes each chunk's gradient before the next chunk is read, and this loss reads whole sequences, so its "
            "gradient would be wrong. Use mode='recompute'."
        )
