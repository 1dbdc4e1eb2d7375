"""The teacher in the head: its hidden states and weight, and its logits of a chunk of rows."""

from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from megatron_pg.kernels import PolicyLoss, Vocabulary
from megatron_pg.kernels.teacher import Form
from megatron_pg.lm_head.products import product_into


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Teacher:
    """The teacher of n rows, y = h_T W_T^T, and the divergence from it."""

    form: Form
    slots: Tensor  # [n] int64, rows of `states`
    states: Tensor  # [m, H_T], of the weight's dtype
    weight: Tensor  # [V / tp, H_T]
    softcap: float | None = None  # of its logits; 0: none, None: the student's

    def at(self, rows: Tensor) -> "Teacher":
        """Select rows."""
        return replace(self, slots=self.slots.index_select(0, rows))


def teacher_of(policy_loss: PolicyLoss, weight: Tensor, teacher_weight: Tensor | None) -> Teacher | None:
    """The teacher of a loss over a teacher's whole vocabulary, with the student's weight [V / tp, H].

    None: no row here has one.

    Raises:
        ValueError: the teacher's weight is missing or does not fit the student's, or another loss term reads a row of
            logits in another way.
    """
    known, form = policy_loss.fields.hidden, cast(Form, policy_loss.terms.whole_form)
    if teacher_weight is None:
        raise ValueError(
            "teacher_weight is missing, and a loss term reads the teacher's whole vocabulary. Give the rows of its "
            "head [V / tp, H_T]."
        )
    if len({(term.kind, term.mixture, term.softcap) for term in policy_loss.terms.further if term.reads_hidden}) > 1:
        raise ValueError(
            "two divergences from a teacher's hidden states are in the loss, and a row's logits are read for one, with "
            "one softcap. "
            "Leave out one of them."
        )
    if policy_loss.terms.reads_topk:
        raise ValueError(
            "a loss over a teacher's whole vocabulary and one over its top-k tokens are given, and a row's logits are "
            "read for one of them. Leave out the other."
        )
    if known.states.dim() != 2:
        raise ValueError(
            f"the teacher's hidden states have shape {tuple(known.states.shape)}, not [m, H_T]. Give one row per state."
        )
    if not len(known.states):
        return None
    if teacher_weight.shape != (len(weight), known.states.shape[1]) or teacher_weight.dtype != weight.dtype:
        raise ValueError(
            f"teacher_weight has shape {tuple(teacher_weight.shape)} and dtype {teacher_weight.dtype}, not "
            f"[{len(weight)}, {known.states.shape[1]}] {weight.dtype}: the columns of the student and the width of the "
            "teacher's hidden states. Give its rows for the student's columns, in its dtype."
        )
    states = known.states.to(weight.device, non_blocking=True).to(weight.dtype)
    cap = next(term.softcap for term in policy_loss.terms.further if term.reads_hidden)
    return Teacher(form=form, slots=known.slots, states=states, weight=teacher_weight, softcap=cap)


class TeacherLogits:
    """The teacher's logits of a chunk, made once, in a buffer that is used again."""

    def __init__(self, teacher: Teacher, vocabulary: Vocabulary):
        self.form = teacher.form
        self._teacher, self._vocabulary = teacher, vocabulary
        self._buffer: Tensor | None = None
        self._start = -1  # of the chunk in the buffer

    def of(self, chunk: slice, student: Tensor) -> Tensor:
        """[c, V / tp] of a chunk of the wanted rows, like the student's, with padding hidden."""
        if self._buffer is None:
            self._buffer = torch.empty_like(student)  # the first chunk is the longest
        out = self._buffer[: len(student)]
        if chunk.start == self._start:
            return out
        self._start = chunk.start
        states = self._teacher.states.index_select(0, self._teacher.slots[chunk])
        product_into(states, self._teacher.weight.t(), out)
        if cap := self._vocabulary.softcap if self._teacher.softcap is None else self._teacher.softcap:
            out.div_(cap).tanh_().mul_(cap)
        return self._vocabulary.hide_padding(out)
