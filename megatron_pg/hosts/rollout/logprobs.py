"""Log-probabilities of responses by the fused head, for the passes of slime and miles before training.

The products are those of the training forward. They are at the response tokens only, and no logits are stored.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.cp_utils import slice_with_cp
from megatron_pg.kernels.sampling_masks import Restriction
from megatron_pg.lm_head.heads import rows_of
from megatron_pg.lm_head.inputs import enter
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.payloads.sampling_masks import SamplingMask
from megatron_pg.step.loss import head_of, vocabulary_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Responses:
    """A micro-batch's responses, as a host's function for log-probabilities receives them."""

    tokens: Sequence[Tensor]  # of whole samples
    lengths: Sequence[int]
    row_width: int | None = None  # of padded rows (bshd); None: packed (thd)
    kept_ids: Sequence[Sequence[int] | Tensor] | None = None  # what the engine could have sampled; None: anything
    kept_offsets: Sequence[Sequence[int] | Tensor] = ()  # in `kept_ids`, by response token

    def logprobs(self, call: HeadCall, settings: LossSettings, *, with_entropy: bool) -> dict[str, list[Tensor]]:
        """`log_probs` and, on request, `entropy`: of each sample [n] nats, n response tokens on this rank.

        Entropies are over the whole vocabulary. Every tensor-parallel rank must call.

        Args:
            call: of the output layer, with hidden states [s / C, b, H] of these samples.
            settings: the loss settings.
            with_entropy: whether entropies are wanted.
        """
        rows, places = zip(*self._places(), strict=True)
        starts = torch.tensor([0, *map(len, self.tokens)]).cumsum(0).tolist()
        wanted = torch.cat([place + start for place, start in zip(places, starts, strict=False)])
        index = torch.stack([torch.cat(rows), wanted]).to(call.hidden.device)  # one copy to the device
        logprobs, entropy, _ = rows_of(
            enter(call.hidden, call.tp_group, call.sequence_parallel).flatten(0, -2),
            call.weight,
            torch.cat([*self.tokens])[index[1]],
            index[0],
            vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap),
            head_of(call, settings),
            self._restriction(places, whole_entropy=with_entropy),
        )
        found = {"log_probs": logprobs} | ({"entropy": entropy} if with_entropy else {})
        return {name: list(values.split([len(place) for place in places])) for name, values in found.items()}

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Of each sample, on this context-parallel rank: rows of the logits, and places of the tokens they predict."""
        layout, start = ("thd" if self.row_width is None else "bshd"), 0
        for number, (tokens, length) in enumerate(zip(self.tokens, self.lengths, strict=True)):
            end = len(tokens) - 1
            positions = slice_with_cp(torch.arange(end + 1), -1, layout, self.row_width)
            rows = ((positions >= end - length) & (positions < end)).nonzero()[:, 0]
            yield start + rows if self.row_width is None else rows * len(self.tokens) + number, positions[rows] + 1
            start += len(positions)

    def _restriction(self, places: Sequence[Tensor], *, whole_entropy: bool) -> Restriction | None:
        if self.kept_ids is None:
            return None
        device = self.tokens[0].device
        ids = torch.cat([torch.as_tensor(each, dtype=torch.int32) for each in self.kept_ids])
        counts = torch.cat([torch.as_tensor(each, dtype=torch.int64).diff() for each in self.kept_offsets])
        # sets follow each other by response token, so prompts leave no gaps between them
        first = torch.tensor([*self.lengths]).cumsum(0) - torch.tensor([len(tokens) for tokens in self.tokens])
        here = torch.cat([place + start for place, start in zip(places, first.tolist(), strict=True)])
        mask = SamplingMask.of(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0))).at(here)
        return Restriction(sampling_mask=mask.to(lambda values: values.to(device)), whole_entropy=whole_entropy)
