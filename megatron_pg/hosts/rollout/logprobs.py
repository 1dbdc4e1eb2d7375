"""Log-probabilities of responses by the fused head, for the passes of slime and miles before training.

The products are those of the training forward. They are at the response tokens only, and no logits are stored.
"""

from collections.abc import Iterator, Sequence

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

Lists = Sequence[Sequence[int] | Tensor]  # one for each sample


def response_logprobs(
    call: HeadCall,  # of the output layer, with hidden states [s / C, b, H] of these samples
    settings: LossSettings,
    *,
    tokens: Sequence[Tensor],  # of whole samples
    lengths: Sequence[int],  # response tokens of each sample
    row_width: int | None,  # of padded rows (bshd); None: packed (thd)
    kept: tuple[Lists, Lists] | None,  # ids that the engine could have sampled, and their offsets by response token
    with_entropy: bool,
) -> dict[str, list[Tensor]]:
    """`log_probs` and, on request, `entropy`: of each sample [n] nats, n response tokens on this rank.

    Entropies are over the whole vocabulary. Every tensor-parallel rank must call.
    """
    rows, places = zip(*_places(tokens, lengths, row_width), strict=True)
    starts = torch.tensor([0, *map(len, tokens)]).cumsum(0).tolist()
    wanted = torch.cat([place + start for place, start in zip(places, starts, strict=False)])
    index = torch.stack([torch.cat(rows), wanted]).to(call.hidden.device)  # one copy to the device
    restriction = None
    if kept is not None:
        # sets follow each other by response token, so prompts leave no gaps between them
        first = torch.tensor([*lengths]).cumsum(0) - torch.tensor([len(each) for each in tokens])
        here = torch.cat([place + start for place, start in zip(places, first.tolist(), strict=True)])
        ids = torch.cat([torch.as_tensor(each, dtype=torch.int32) for each in kept[0]])
        counts = torch.cat([torch.as_tensor(each, dtype=torch.int64).diff() for each in kept[1]])
        mask = SamplingMask.of(ids, torch.nn.functional.pad(counts.cumsum(0), (1, 0))).at(here)
        mask = mask.to(lambda values: values.to(tokens[0].device))
        restriction = Restriction(sampling_mask=mask, whole_entropy=with_entropy)
    logprobs, entropy, _ = rows_of(
        enter(call.hidden, call.tp_group, call.sequence_parallel).flatten(0, -2),
        call.weight,
        torch.cat([*tokens])[index[1]],
        index[0],
        vocabulary_of(len(call.weight), settings, call.tp_group, call.softcap),
        head_of(call, settings),
        restriction,
    )
    found = {"log_probs": logprobs} | ({"entropy": entropy} if with_entropy else {})
    return {name: list(values.split([len(place) for place in places])) for name, values in found.items()}


def _places(tokens: Sequence[Tensor], lengths: Sequence[int], row_width: int | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each sample, on this context-parallel rank: rows of the logits, and places of the tokens they predict."""
    layout, start = ("thd" if row_width is None else "bshd"), 0
    for number, (sample, length) in enumerate(zip(tokens, lengths, strict=True)):
        end = len(sample) - 1
        positions = slice_with_cp(torch.arange(end + 1), -1, layout, row_width)
        rows = ((positions >= end - length) & (positions < end)).nonzero()[:, 0]
        yield start + rows if row_width is None else rows * len(tokens) + number, positions[rows] + 1
        start += len(positions)
