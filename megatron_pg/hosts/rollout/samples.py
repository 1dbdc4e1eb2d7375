"""A data-parallel rank's part of a rollout in slime and miles, and its whole samples."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_pg.cp_utils import response_index
from megatron_pg.hosts.step import HostLossError
from megatron_pg.rollouts.fields import POLICY
from megatron_pg.rollouts.sample import Sample

# Fields of a sample: their names in the rollout data, which hold this context-parallel rank's parts of the responses.
OF_POLICIES = {"old_logprobs": "log_probs", "advantage": "advantages"} | {
    f"{kind}_logprobs": f"{kind}_log_probs" for kind in ("ref", "rollout", "teacher")
}
OF_CRITICS = {"values": "values", "returns": "returns"}
_READ = ("tokens", "response_lengths", "total_lengths", "loss_masks", "rollout_ids", "sample_indices")
_FURTHER = ("local_raw_reward", "truncated", "source_names")  # that some releases or rollouts lack
_SCHEDULE = ("micro_batch_indices", "num_microbatches")
_SAMPLING_MASK = {"ids": "rollout_top_p_token_ids", "offsets": "rollout_top_p_token_offsets"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rollout:
    """A data-parallel rank's part of a rollout, as the host sends it."""

    data: Mapping[str, Any]
    rollouts_per_step: str  # key of N of each optimizer step
    parts: Mapping[str, str] = field(default_factory=OF_POLICIES.copy)  # those of the model's role
    samples_per_prompt: int  # consecutive in the sampling order
    term: str = POLICY  # the loss term of its samples
    named_terms: Container[str] = ()  # origins of samples that are loss terms with their own tokens
    row_width: int | None = None  # of padded rows (bshd); None: packed (thd)

    @property
    def counts(self) -> Sequence[int]:
        """N of each optimizer step."""
        return self.data[self.rollouts_per_step]

    @property
    def is_on_policy(self) -> bool:
        """Whether the trainer has skipped the pass for old log-probabilities: the only step computes them."""
        return "old_logprobs" in self.parts and self.data.get(self.parts["old_logprobs"]) is None

    def steps(self) -> list[list[list[int]]]:
        """The micro-batches of each optimizer step, as indices of samples in the data.

        Raises:
            HostLossError: a key is missing, or the schedule is inconsistent.
        """
        if missing := [key for key in (*_READ, *_SCHEDULE, self.rollouts_per_step) if key not in self.data]:
            raise HostLossError(
                f"the rollout data have no {', '.join(missing)}, which the plan of the steps needs.",
                "Use a release of the trainer that docs/hosts lists. In miles, use neither multimodal data, fewer "
                "rollouts than --global-batch-size nor several replicas, for which it splits batches in the trainer.",
            )
        indices, numbers = (self.data[key] for key in _SCHEDULE)
        if len(numbers) != len(self.counts) or sum(numbers) != len(indices):
            raise HostLossError(
                f"the rollout data have {len(indices)} micro-batches for num_microbatches {[*numbers]} and "
                f"{self.rollouts_per_step} {[*self.counts]}, which are inconsistent."
            )
        microbatches = iter([[int(i) for i in members] for members in indices])
        return [list(islice(microbatches, count)) for count in numbers]

    def samples(self, members: Sequence[int], context: ProcessGroup, *, needs_prompts: bool) -> list[Sample]:
        """Its whole samples with these indices; every rank of the context-parallel group must call."""
        keys = (*_READ, *_FURTHER, *_SAMPLING_MASK.values(), *self.parts.values())
        given = {key: self.data[key] for key in keys if self.data.get(key) is not None}
        data = {key: [values[i] for i in members] for key, values in given.items()}
        known = {name: data[key] for name, key in self.parts.items() if key in data}
        if "advantage" in self.parts.keys() - known and self.term == POLICY:
            raise ValueError(
                "the rollout data have no advantages. Let the trainer compute them (--compute-advantages-and-returns)."
            )
        lengths = [int(n) for n in data["response_lengths"]]
        whole: dict[str, Sequence] = dict(self._whole(known, data["total_lengths"], lengths, context))
        if self.is_on_policy and self.term == POLICY:
            whole["old_logprobs"] = [torch.zeros(n) for n in lengths]
        if "local_raw_reward" in data:  # before normalization
            whole["reward"] = [float(reward) for reward in data["local_raw_reward"]]
        if "truncated" in data:
            whole["truncated"] = [bool(flag) for flag in data["truncated"]]
        if _SAMPLING_MASK["ids"] in data:  # the tokens that the engine kept under top-p
            rows = zip(*(data[name] for name in _SAMPLING_MASK.values()), strict=True)
            whole["sampling_mask"] = [dict(zip(_SAMPLING_MASK, row, strict=True)) for row in rows]
        masks = torch.cat(data["loss_masks"]).cpu().split([len(mask) for mask in data["loss_masks"]])
        tokens = torch.cat(data["tokens"]).cpu().split([len(each) for each in data["tokens"]])
        sources = data.get("source_names") or [None] * len(tokens)
        samples = [
            Sample.build(
                tokens=tokens[i],
                response_length=lengths[i],
                loss_mask=masks[i],
                sample_id=str(index),
                rollout_id=int(data["rollout_ids"][i]),
                prompt_id=None if index is None else int(index) // self.samples_per_prompt,
                term=sources[i] if sources[i] in self.named_terms else self.term,
                **{name: values[i] for name, values in whole.items()},
            )
            for i, index in enumerate(data["sample_indices"])
        ]
        if needs_prompts:
            _check_indices(samples)
        return samples

    def _whole(
        self, parts: Mapping[str, Sequence[Tensor]], totals: Sequence[int], responses: list[int], group: ProcessGroup
    ) -> dict[str, Sequence[Tensor]]:
        """Whole responses from the parts of all context-parallel ranks: one collective, one host read."""
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
        return {name: row.split(responses) for name, row in zip(parts, rows.cpu(), strict=True)}


def _check_indices(samples: Sequence[Sample]) -> None:
    """Refuse sample indices that two rollouts share, because they do not identify prompts."""
    first: dict[str, object] = {}
    for sample in [sample for sample in samples if sample.prompt_id is not None]:
        if first.setdefault(sample.sample_id, sample.rollout_id) != sample.rollout_id:
            raise ValueError(
                f"sample index {sample.sample_id} is in rollouts {first[sample.sample_id]} and {sample.rollout_id}, so "
                "prompt groups (n consecutive indices) are not known, which prompt_mean needs. Leave the index of a "
                "sample as the data source set it, or use another aggregation."
            )
