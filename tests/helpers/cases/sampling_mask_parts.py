"""Rows of logits with what could be sampled, and what the oracle says of them."""

from dataclasses import dataclass

import numpy as np
import sampling_mask_oracle
import torch
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import SamplingMask
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

BONUS = 0.3
BONUSES = (LossTerm(name="entropy", kind="entropy", weight=BONUS, on="rl"),)


@dataclass(frozen=True)
class Parts:
    """Rows of which some are masked, where everything is poison; sets are none, one token, several, many, and all
    tokens."""

    fields: TokenFields
    sets: list[list[int]]
    size: int  # columns that are no padding

    @classmethod
    def draw(cls, size: int, counts: tuple[int, ...] = (0, 1, 2, 5, 3, 0, 7, -1, 4)) -> "Parts":
        """From torch's generator; a count of -1: all tokens."""
        counts = tuple(size if n < 0 else min(n, size) for n in counts)
        sets = [torch.randperm(size)[:n].tolist() for n in counts]
        targets = torch.tensor([s[len(s) // 2] if s else int(torch.randint(0, size, ())) for s in sets])
        rows = len(sets)
        mask = torch.arange(rows) != 4
        poisoned = [s if m else [size + 5, -9] for s, m in zip(sets, mask.tolist(), strict=True)]
        offsets = torch.tensor([0, *map(len, poisoned)]).cumsum(0)
        ids = torch.tensor([j for s in poisoned for j in s], dtype=torch.int32)
        sampling_mask = SamplingMask.of(ids, offsets)
        sampling_mask.counts[~mask] = 0  # as a batch has it
        random = torch.randn(3, rows, dtype=torch.float64)
        fields = TokenFields(
            targets=torch.where(mask, targets, -100),
            mask=mask,
            weights=torch.where(mask, random[0].abs(), 0),
            old_logprobs=torch.where(mask, -random[1].abs(), torch.nan),
            advantages=torch.where(mask, random[2], torch.nan),
            sampling_mask=sampling_mask,
        )
        return cls(fields, sets, size)

    def policy_loss(self, sampling_mask_entropy: str, *, bonus: bool = True) -> PolicyLoss:
        """REINFORCE and an entropy bonus: slopes a = -w A and e = -ηw."""
        terms = LossTerms(
            objective=objective_of("reinforce"),
            further=BONUSES if bonus else (),
            sampling_mask_entropy=sampling_mask_entropy,
        )
        return PolicyLoss(terms, self.fields)

    def expected(
        self, logits: Tensor, sampling_mask_entropy: str, *, temperature: float, bonus: bool = True
    ) -> tuple[float, Tensor, Tensor, Tensor]:
        """Loss, log-probabilities, entropies and the gradient of the logits [T, columns]."""
        f, table = self.fields, np.zeros(logits.shape)
        loss, logprobs, entropies = 0.0, np.zeros(len(table)), np.zeros(len(table))
        for t in f.mask.nonzero()[:, 0].tolist():
            w, advantage = float(f.weights[t]), float(f.advantages[t])
            a, e = -w * advantage, -BONUS * w * bonus
            logprobs[t], entropies[t], table[t, : self.size] = sampling_mask_oracle.row_of(
                logits[t, : self.size].tolist(),
                int(f.targets[t]),
                self.sets[t],
                temperature=temperature,
                kept=sampling_mask_entropy == "kept",
                a=a,
                e=e,
            )
            loss += a * logprobs[t] + e * entropies[t]
        return loss, *(torch.as_tensor(each, device=logits.device) for each in (logprobs, entropies, table))
