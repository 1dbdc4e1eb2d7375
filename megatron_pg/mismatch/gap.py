"""The trained tokens of rollouts as columns, and selections of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
_BASE = 0x9E3779B97F4A7C15  # odd
_BLOCK = 512  # tokens of a document that count as one observation; a longer document is several observations


@dataclass(frozen=True, slots=True)
class Gap:
    """Trained tokens that have both log-probabilities, in the order of the files: T tokens of D documents."""

    engine: Floats  # [T] log q of the sampled token, nats, as the rollout engine reported it
    trainer: Floats  # [T] log π of the same token, nats
    ids: Integers  # [T] the sampled token
    position: Integers  # [T] in the response, from 0
    document: Integers  # [T] in [0, D), not decreasing
    step: Integers  # [D] optimizer step
    weight_version: Floats  # [D] step whose weights the engine had, rounded mean over tokens; NaN if not known
    topk: NDArray[np.float32] | None = None  # [T, K] log q of the engine's top-k tokens, descending, padded with -inf
    rank: Integers | None = None  # [T] rank of the sampled token in the top-k, K: not in it, -1: not known
    pair: Integers | None = None  # [T] one number for the token and the one before it
    place: NDArray[np.uint64] | None = None  # [T] hash of the step, the prompt and the response including this token
    has_sampling_mask: bool = False  # the trainer's values are normalized over the sampling masks
    groups: dict[str, list[Any]] = field(default_factory=dict)  # by factor: [D] labels, None if not known

    @property
    def difference(self) -> Floats:
        """[T] d = log π - log q."""
        return self.trainer - self.engine

    @property
    def surprise(self) -> Floats:
        """[T] -(log π + log q)/2, nats: how unlikely the token was, on the average of both sides."""
        return -(self.trainer + self.engine) / 2

    @property
    def observation(self) -> Integers:
        """[T] number of the independent observation: a document, or a block of 512 tokens of a long one."""
        return self.document * 2**24 + self.position // _BLOCK

    def divided(self, factors: Floats) -> "Gap":
        """Divide d by factors [D] of the documents."""
        return replace(self, trainer=self.engine + self.difference / factors[self.document])

    def where(self, mask: Booleans | Integers) -> "Gap":
        """Select tokens by a mask or by indices; documents keep their numbers."""
        names = ("engine", "trainer", "ids", "position", "document", "topk", "rank", "pair", "place")
        known = [name for name in names if getattr(self, name) is not None]
        return replace(self, **{name: getattr(self, name)[mask] for name in known})


def gap_of(samples: Iterable[Any], files: Iterable[str] | None = None, by: Sequence[str] = ()) -> Gap:
    """The columns of samples that hold `rollout_logprobs`.

    Args:
        samples: `megatron_pg.Sample`s.
        files: the file name of each sample.
        by: names of the user's own `x_` fields that divide documents into groups, in addition to worker,
            data_parallel_rank and file.

    Raises:
        ValueError: a sample has no `rollout_logprobs`, none has a field of `by`, or no token is trained.
    """
    names = iter(files) if files is not None else None
    fields = ("engine", "trainer", "ids", "position", "document", "pair", "place")
    columns: dict[str, list] = {name: [] for name in fields}
    topk: list[tuple | None] = []
    groups: dict[str, list] = {name: [] for name in ("worker", "data_parallel_rank", "file", *by)}
    step, version, has_sampling_mask = [], [], False
    for number, sample in enumerate(samples):
        if sample.rollout_logprobs is None:
            raise ValueError(
                f"sample {sample.sample_id} has no rollout_logprobs to compare old_logprobs with. Have the engine "
                "return the log-probability of every token that it samples, and record it."
            )
        if sample.old_logprobs is None:  # of a critic
            raise ValueError(f"sample {sample.sample_id} has no old_logprobs to compare. Give samples of a policy.")
        kept = sample.loss_mask.numpy().nonzero()[0]
        columns["engine"].append(sample.rollout_logprobs.numpy()[kept])
        columns["trainer"].append(sample.old_logprobs.numpy()[kept])
        tokens = sample.tokens.numpy().astype(np.int64)
        at = len(tokens) - sample.response_length + kept
        drawn = tokens[at]
        columns["ids"].append(drawn)
        columns["position"].append(kept)
        columns["document"].append(np.full(len(kept), number))
        columns["pair"].append(tokens[at - 1] * 2**31 + drawn)
        columns["place"].append(_places(tokens, sample.step or 0)[at])
        topk.append(_topk(sample, kept, drawn))
        has_sampling_mask |= sample.sampling_mask is not None
        step.append(sample.step or 0)
        versions = np.broadcast_to(np.nan if (v := sample.weight_version) is None else v, len(sample.loss_mask))
        version.append(np.rint(np.mean(versions[kept] if len(kept) else versions)))
        groups["worker"].append(sample.worker)
        groups["data_parallel_rank"].append(sample.data_parallel_rank)
        groups["file"].append(next(names) if names is not None else None)
        for name in by:
            groups[name].append(None if name not in sample.extra else str(sample.extra[name]))
    if not sum(map(len, columns["engine"])):
        raise ValueError(
            "no token is trained: no sample is of the objective, or loss_mask is 0 everywhere. Give rollouts with "
            "trained tokens."
        )
    if absent := [name for name in by if not any(label is not None for label in groups[name])]:
        raise ValueError(f"no sample has the field {absent[0]} to compare by. Check its spelling.")
    joined = {name: np.concatenate(parts) for name, parts in columns.items()}
    if (least := min(joined["engine"].min(), joined["trainer"].min())) < np.finfo(np.float32).min:
        raise ValueError(f"a log-probability is {least:g}, which is below every float32. Correct it.")
    joined |= _joined_topk(topk, [len(column) for column in columns["engine"]])
    return Gap(
        **joined,
        has_sampling_mask=has_sampling_mask,
        step=np.array(step),
        weight_version=np.array(version, dtype=float),
        groups=groups,
    )


def _places(tokens: Integers, step: int) -> NDArray[np.uint64]:
    """[n] hashes of the step and the tokens up to each one: a polynomial modulo 2^64."""
    powers = np.multiply.accumulate(np.full(len(tokens), _BASE, np.uint64))
    return np.cumsum((tokens + 1).astype(np.uint64) * powers, dtype=np.uint64) + np.uint64(step)


def _topk(sample: Any, kept: Integers, drawn: Integers) -> tuple[NDArray[np.float32], Integers] | None:
    """[n, K] the engine's top-k values at the kept tokens, descending, and the rank of each sampled token."""
    if sample.rollout_topk is None or not sample.rollout_topk.ids.shape[1]:
        return None
    ids, values = (part.numpy()[kept] for part in (sample.rollout_topk.ids, sample.rollout_topk.logprobs))
    values = np.where(ids >= 0, values, -np.inf).astype(np.float32)
    order = np.argsort(-values, axis=1, kind="stable")
    is_sampled = np.take_along_axis(ids, order, axis=1) == drawn[:, None]
    rank = np.where(is_sampled.any(axis=1), is_sampled.argmax(axis=1), 2**31)
    rank[~(ids >= 0).any(axis=1)] = -1  # an empty row reports nothing
    return np.take_along_axis(values, order, axis=1), rank


def _joined_topk(parts: list[tuple | None], lengths: list[int]) -> dict[str, Any]:
    """`topk` and `rank` of all tokens; empty if no sample has a top-k."""
    width = max((part[0].shape[1] for part in parts if part is not None), default=0)
    if width < 2:
        return {}
    values = np.full((sum(lengths), width), -np.inf, np.float32)
    rank = np.full(sum(lengths), -1)
    for end, length, part in zip(np.cumsum(lengths), lengths, parts, strict=True):
        if part is not None:
            values[end - length : end, : part[0].shape[1]] = part[0]
            rank[end - length : end] = np.minimum(part[1], width)
    return _without_added(values, rank)


def _without_added(values: NDArray[np.float32], rank: Integers) -> dict[str, Any]:
    """Remove the sampled token that engines append to the top-k if it is not in it."""
    count = np.isfinite(values).sum(axis=1)
    longest = count == count.max()
    if (count == count.max() - 1).any() and (rank[longest] == count.max() - 1).all():
        values[longest, count.max() - 1] = -np.inf
        rank = np.where(longest, values.shape[1], rank)
    return {"topk": values, "rank": rank}
