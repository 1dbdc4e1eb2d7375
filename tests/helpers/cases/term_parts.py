"""A micro-batch's token fields with every kind of loss term, and its loss written out in float64."""

import dataclasses
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import TermFields
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

LOW, HIGH = 0.2, 0.28
TERMS = (
    LossTerm(name="sft", kind="ce", weight=0.7),
    LossTerm(name="teacher", kind="opd", weight=0.3, estimator="k3_weighted"),
    LossTerm(name="ref", kind="kl", weight=0.4, estimator="k2", on="rl", aggregation="policy"),
    LossTerm(name="h", kind="entropy", weight=0.05, on="sft"),
)
READ = {
    "old_logprobs": ("rl", "teacher"),
    "advantages": ("rl",),
    "teacher_logprobs": ("teacher",),
    "ref_logprobs": ("rl",),
}


@dataclass(frozen=True)
class Parts:
    """Masks by loss term overlap in every way; fields are NaN wherever no loss reads them."""

    fields: TokenFields
    masks: dict[str, Tensor]  # [T] bool
    weights: dict[str, Tensor]  # [T] float64, by loss term
    grad_divisor: float

    @classmethod
    def draw(cls, rows: int, columns: int, grad_divisor: float = 1.0) -> "Parts":
        """From torch's generator; the first rows are of one loss term each, of all, and of none."""
        masks = {name: torch.rand(rows) < 0.5 for name in ("rl", "sft", "teacher")}
        for i, mask in enumerate(masks.values()):
            mask[:5] = torch.tensor([i == 0, i == 1, i == 2, True, False])
        masks |= {"ref": masks["rl"], "h": masks["sft"]}
        union = masks["rl"] | masks["sft"] | masks["teacher"]
        weights = {name: torch.where(mask, torch.rand(rows, dtype=torch.float64), 0) for name, mask in masks.items()}
        weights["ref"] = weights["rl"]
        values = {name: -torch.rand(rows, dtype=torch.float64) - 3 for name in READ}
        values["advantages"] = torch.randn(rows, dtype=torch.float64)
        read = {name: torch.stack([masks[s] for s in terms]).any(dim=0) for name, terms in READ.items()}
        fields = TokenFields(
            targets=torch.where(union, torch.randint(0, columns, (rows,)), -100),
            mask=union,
            weights=weights["rl"],
            corrections=torch.linspace(0, 2, rows, dtype=torch.float64),
            **{name: torch.where(read[name], each, math.nan) for name, each in values.items()},
            terms={"rl": TermFields(mask=masks["rl"])}
            | {s.name: TermFields(weights=weights[s.name], mask=masks[s.name]) for s in TERMS if s.on != "rl"},
        )
        return cls(fields, masks, weights, grad_divisor)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The package's."""
        objective = objective_of("grpo", clip_eps_low=LOW, clip_eps_high=HIGH)
        return PolicyLoss(LossTerms(objective=objective, further=TERMS, grad_divisor=self.grad_divisor), self.fields)

    def on(self, device: str) -> "Parts":
        """The same there."""
        moved = {name: values.to(device) for name, values in self.fields.per_token().items()}
        rest = {name: {s: each.to(device) for s, each in getattr(self, name).items()} for name in ("masks", "weights")}
        return dataclasses.replace(self, fields=TokenFields.of(moved), **rest)

    def expected(self, logits: Tensor, temperature: float = 1.0) -> Tensor:
        """The sum of all losses in float64; `logits` are [T, V], of which rows that nothing trains are not read."""
        log_p = {
            name: torch.log_softmax(logits[mask].double() / temperature, dim=1) for name, mask in self.masks.items()
        }
        total = torch.zeros((), dtype=torch.float64, device=logits.device)
        for name, loss in self._losses(log_p).items():
            total = total + (self.weights[name][self.masks[name]] * loss).sum()
        return total

    def _losses(self, log_p: dict[str, Tensor]) -> dict[str, Tensor]:
        """λ·ℓ of the tokens of every loss term, in their order."""

        def of(field: str, term: str) -> Tensor:
            return getattr(self.fields, field)[self.masks[term]]

        new = {name: table.gather(1, of("targets", name)[:, None])[:, 0] for name, table in log_p.items()}
        ratio = (new["rl"] - of("old_logprobs", "rl")).exp()
        advantages = of("advantages", "rl")
        surrogate = torch.minimum(ratio * advantages, ratio.clamp(1 - LOW, 1 + HIGH) * advantages)
        gap = new["teacher"] - of("teacher_logprobs", "teacher")
        drift = (new["teacher"] - of("old_logprobs", "teacher")).exp()
        k3 = (-gap).exp() - 1 + gap
        # the estimator's gradient is r·x: that of its value, and of the ratio whose expectation it is
        weighted = (drift * k3).detach() + (drift * gap).detach() * (new["teacher"] - new["teacher"].detach())
        return {
            "rl": -of("corrections", "rl") * surrogate,
            "sft": -0.7 * new["sft"],
            "teacher": 0.3 * weighted,
            "ref": 0.4 * (new["ref"] - of("ref_logprobs", "ref")).square() / 2,
            "h": 0.05 * (log_p["h"].exp() * log_p["h"]).sum(dim=1),
        }
