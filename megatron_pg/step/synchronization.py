"""What Megatron's schedule and wrapper synchronize over data-parallel ranks, held back while a step is open."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from megatron.core.distributed.finalize_model_grads import reset_model_temporary_tensors

# finalize is a function that does nothing: with None the schedule would skip deferred weight gradients too
_HELD_BACK: dict[str, Any] = {
    "finalize_model_grads_func": lambda *_, **__: None,
    "no_sync_func": None,  # the schedule leaves it before its last micro-batch
    "grad_sync_func": None,
    "param_sync_func": None,
    "timers": None,  # their start may be a barrier of all ranks
}


def begin_gradients(chunks: Sequence[Any]) -> None:
    """Zero the buffers and gather the weights, in which every data-parallel rank takes part."""
    for chunk in chunks:
        chunk.zero_grad_buffer()
        if chunk.ddp_config.overlap_param_gather:  # or the first forward of a rank would wait for the other ranks'
            chunk.start_param_sync(force_sync=True)


@contextmanager
def held_back(chunks: Sequence[Any]) -> Iterator[None]:
    """Within this context the schedule adds to the buffers of this rank, without any data-parallel collective."""
    config = chunks[0].config
    before = {name: getattr(config, name) for name in _HELD_BACK}
    vars(config).update(_HELD_BACK)
    try:
        with ExitStack() as stack:
            for chunk in chunks:
                stack.enter_context(chunk.no_sync())
            yield
    finally:
        vars(config).update(before)


def reduce_gradients(chunks: Sequence[Any]) -> None:
    """The reduction that was held back, and the user's finalize without a count, so that it does not divide."""
    for chunk in chunks:
        if chunk.ddp_config.overlap_grad_reduce:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                if not group.is_first_batch:  # in its first batch finalize starts it, and twice would reduce twice
                    group.start_grad_sync()
    chunks[0].config.finalize_model_grads_func(list(chunks), None)


def discard_gradients(chunks: Sequence[Any]) -> None:
    """Leave no trace of forwards and backwards, also after an exception in the middle of one."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.grad = None
        chunk.zero_grad_buffer()
    reset_model_temporary_tensors(chunks[0].config, list(chunks))  # tokens per expert, of a router's bias
