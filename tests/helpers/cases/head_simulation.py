"""The simulation's steps with the fused head in the place of stored logits."""

import dataclasses
import threading
from functools import partial

import pytest
import simulation
import torch

from megatron_pg import lm_head
from megatron_pg.lm_head.output_layer import HeadCall
from megatron_pg.step.loss import microbatch_head_loss


def fused(grad_scales: dict[int, float], rows, fields, loss, tp_group):
    """The loss by the fused head; hidden states are the logits, the weight is the identity with padding columns."""
    columns, trained = rows.shape[1], fields.mask.nonzero()[:, 0]
    padding = 4 if tp_group is None else 0
    weight = torch.nn.Parameter(torch.cat([torch.eye(columns), torch.full((padding, columns), 3.0)]).to(rows.dtype))
    weight.main_grad, weight.grad_added_to_main_grad = torch.zeros_like(weight), False
    mode = "recompute" if loss.terms.reads_sequences or len(trained) % 2 else "forward"
    loss = dataclasses.replace(loss, head_mode=mode, vocab_size=columns if padding else None)
    call = HeadCall(rows, weight, tp_group, sequence_parallel=False)
    teacher = None
    if loss.teacher_head is not None:
        first = 0 if tp_group is None else tp_group.rank() * columns
        teacher = loss.teacher_head.read(first, len(weight), dtype=weight.dtype, device=rows.device)
    scale = grad_scales[threading.get_ident()]
    return microbatch_head_loss(call, fields, trained, loss, grad_scale=scale, teacher_weight=teacher)


@pytest.fixture
def through_the_fused_head(monkeypatch):
    grad_scales, schedule = {}, simulation._schedule

    def schedule_with_grad_scale(locals_, leaves, scaling, *rest):
        grad_scales[threading.get_ident()] = scaling.grad_scale
        return schedule(locals_, leaves, scaling, *rest)

    monkeypatch.setattr(simulation, "_schedule", schedule_with_grad_scale)
    monkeypatch.setattr(simulation, "microbatch_loss", partial(fused, grad_scales))
    # a rank's hidden states are its own columns of the logits: there is nothing to add over the ranks
    monkeypatch.setattr(lm_head.loss, "enter", lambda hidden, *_: hidden)
    monkeypatch.setattr(lm_head.products, "chunk_rows", lambda *_: 3)
    monkeypatch.setattr(lm_head.products, "block_rows", lambda *_: 6)
