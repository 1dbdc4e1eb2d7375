"""A data-parallel rank's part of a rollout in slime and miles, and its whole samples."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.cp_utils import response_index
from megatron_pg.hosts.step import HostLossError
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.sample import Sample

# Fields of a sample: their names in the rollout data, which hold this context-parallel rank's parts of the responses.
_PARTS = {"advantage": "advantages"} | {
    f"{kind}_logprobs": f"{kind}_log_probs" for kind in ("ref", "rollout", "teacher")
}
_READ = ("tokens", "response_lengths", "total_lengths", "loss_masks", "rollout_ids", "sample_indices")
_SCHEDULE = ("micro_batch_indices", "num_microbatches")
_SAMPLING_MASK = {"ids": "rollout_top_p_token_ids", "offsets": "rollout_top_p_token_offsets"}


class Terms(NamedTuple):
    """The loss terms of a host's samples."""

    usual: str = POLICY
    named: Container[str] = ()  # origins that are terms with their own tokens; samples of others are of the usual one


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A data-parallel rank's part of a rollout, as the host sends it."""

    data: Mapping[str, Any]
    rollouts_per_step: str  # key of N of each optimizer step
    old_logprobs: str  # key of the sampling policy's log-probabilities; without them the step is on-policy
    samples_per_prompt: int  # consecutive in the sampling order
    terms: Terms
    row_width: int | None = None  # of padded rows (bshd); None: packed (thd)

    @property
    def counts(self) -> Sequence[int]:
        """N of each optimizer step."""
        return self.data[self.rollouts_per_step]

    def check_schedule(self) -> None:
        """Refuse data in a form that this adapter does not support.

        Raises:
            HostLossError: a key is missing, or the schedule is inconsistent.
        """
        if missing := [key for key in (*_READ, *_SCHEDULE, self.rollouts_per_step) if key not in self.data]:
            raise HostLossError(f"the rollout data have no {', '.join(missing)}, which the plan of the steps needs.")
        indices, numbers = (self.data[key] for key in _SCHEDULE)
        if len(numbers) != len(self.counts) or sum(numbers) != len(indices):
            raise HostLossError(
                f"the rollout data have {len(indices)} micro-batches for num_microbatches {[*numbers]} and "
                f"{self.rollouts_per_step} {[*self.counts]}, which are inconsistent."
            )

    def samples(self, context: ProcessGroup) -> list[Sample]:
        """Its whole samples; every rank of the context-parallel group must call."""
        data, parts = self.data, {"old_logprobs": self.old_logprobs, **_PARTS}
        known = {name: data[key] for name, key in parts.items() if data.get(key) is not None}
        if "advantage" not in known and self.terms.usual == POLICY:
            raise ValueError(
                "the rollout data have no advantages. Let the trainer compute them (--compute-advantages-and-returns)."
            )
        whole = self._whole(known, context)
        if self.is_on_policy and self.terms.usual == POLICY:
            whole["old_logprobs"] = [torch.zeros(int(n)) for n in data["response_lengths"]]
        truncated, rewards = data.get("truncated"), data.get("local_raw_reward")  # before normalization
        masks = torch.cat([*data["loss_masks"]]).cpu().split([len(mask) for mask in data["loss_masks"]])
        rows = torch.cat([*data["tokens"]]).cpu().split([len(tokens) for tokens in data["tokens"]])
        return [
            Sample.build(
                tokens=tokens,
                response_length=response,
                loss_mask=mask,
                sample_id=str(index),
                rollout_id=int(data["rollout_ids"][i]),
                prompt_id=None if index is None else int(index) // self.samples_per_prompt,
                reward=None if rewards is None else float(rewards[i]),
                truncated=None if truncated is None else bool(truncated[i]),
                term=self._term(i),
                sampling_mask=self._sampling_mask(i),
                **{name: values[i] for name, values in whole.items()},
            )
            for i, (tokens, response, mask, index) in enumerate(
                zip(rows, data["response_lengths"], masks, data["sample_indices"], strict=True)
            )
        ]

    def _term(self, number: int) -> str:
        sources = self.data.get("source_names")
        return sources[number] if sources and sources[number] in self.terms.named else self.terms.usual

    def _sampling_mask(self, number: int) -> dict[str, Any] | None:
        """The token ids that the engine kept under top-p, where it reports them."""
        if self.data.get(_SAMPLING_MASK["ids"]) is None:
            return None
        return {field: self.data[name][number] for field, name in _SAMPLING_MASK.items()}

    @property
    def is_on_policy(self) -> bool:
        """Whether the trainer has skipped the pass for old log-probabilities: the only step computes them."""
        return self.data.get(self.old_logprobs) is None

    def _whole(self, parts: Mapping[str, Sequence[Tensor]], group: ProcessGroup) -> dict[str, list[Tensor]]:
        """Whole responses from the parts of all context-parallel ranks: one collective, one host read."""
        totals, responses = self.data["total_lengths"], [int(n) for n in self.data["response_lengths"]]
        if not parts:
            return {}
        rows = torch.stack([torch.cat([*values]).double() for values in parts.values()])
        if group.size() > 1:
            layout = "thd" if self.row_width is None else "bshd"
            starts, rank, size = torch.tensor([0, *responses]).cumsum(0).tolist(), group.rank(), group.size()
            index = [
                start + response_index(int(total), n, layout, self.row_width, cp_rank=rank, cp_size=size)
                for start, total, n in zip(starts, totals, responses, strict=False)
            ]
            whole = rows.new_zeros(len(rows), sum(responses))
            whole[:, torch.cat(index).to(rows.device)] = rows
            torch.distributed.all_reduce(whole, group=group)  # every position has one owner, other ranks add 0
            rows = whole
        return {name: list(row.split(responses)) for name, row in zip(parts, rows.cpu(), strict=True)}

    def steps(self) -> Iterator[list[list[int]]]:
        """The micro-batches of each optimizer step, as indices of samples in the data."""
        indices = self.data["micro_batch_indices"]
        start = 0
        for count in self.data["num_microbatches"]:
            yield [[int(i) for i in members] for members in indices[start : start + count]]
            start += count
