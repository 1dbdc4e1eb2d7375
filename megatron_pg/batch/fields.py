"""One table of what the loss knows of a micro-batch's tokens: batch, loss, kernels, heads and metrics share it."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from megatron_pg.batch.sequences import Sequences


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenFields:
    """What is known of this rank's T tokens beside the model's output: [T] each, in the order of the logits' rows.

    Fields of masked tokens may hold anything: they are selected away before any exp. A field that is None is known of no
    token. A further field is one line here, and one where its values come from.
    """

    targets: Tensor  # int64, global ids; one outside the vocabulary at a trained token gives NaN
    old_logprobs: (
        Tensor | None
    )  # nats, of the sampling policy; None: it is the model being trained, whose own are taken, detached
    advantages: Tensor
    weights: Tensor  # w of the aggregation, without any correction
    mask: Tensor  # bool, trained tokens
    corrections: Tensor | None = None  # factor on the policy term's weight; None: there is none
    auxiliary_weights: Tensor | None = None  # of the KL and entropy terms; None: `weights`
    sample_weights: Tensor | None = None  # v = mask / trained tokens of the sample: sums to 1 over a sample
    ref_logprobs: Tensor | None = None  # nats, of the reference; NaN where the sample has none
    rollout_logprobs: Tensor | None = None  # nats, as the rollout engine reported them; likewise
    sequences: Sequences | None = None  # which sequence each token belongs to; terms of whole sequences need it

    @property
    def corrected_weights(self) -> Tensor:
        """The weights of the policy term."""
        return self.weights if self.corrections is None else self.weights * self.corrections

    @property
    def term_weights(self) -> Tensor:
        """The weights of the KL and entropy terms, which no correction touches."""
        return self.weights if self.auxiliary_weights is None else self.auxiliary_weights

    def per_token(self) -> dict[str, Any]:
        """The fields that are known, by name."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        return {name: values for name, values in found.items() if isinstance(values, torch.Tensor)}

    def at(self, rows: Tensor | slice) -> "TokenFields":
        """The fields of some of the rows, for a loss that reads no sequences."""
        return replace(self, **{name: values[rows] for name, values in self.per_token().items()})
