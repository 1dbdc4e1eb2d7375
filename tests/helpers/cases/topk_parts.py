"""One divergence over a top-k teacher on the objective's tokens, with logits of every kind."""

import math
from dataclasses import replace

import torch
from loss_terms import kl_and_entropy
from reader_cases import further_terms
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import TermFields, TopK
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of


def one_term(
    kind: str, width: int, rows: int = 20, size: int = 48, padding: int = 16, **terms
) -> tuple[PolicyLoss, Tensor]:
    """A divergence over the tokens of the objective, with KL and bonus, and logits [rows, size + padding].

    Among the rows: a tail of 1e-9 and one of 1e-26, a teacher's of 0, rows without and with one id, a target named and
        one not.
    """
    mask = torch.rand(rows) < 0.6
    mask[:8] = True  # the rows of which something is known
    logits = torch.randn(rows, size + padding, dtype=torch.float64)
    ids = torch.stack([torch.randperm(size)[:width] for _ in range(rows)]).int()
    for row, gap in ((1, 20.0), (2, 60.0)):
        logits[row] -= gap  # of the others: the interpreter's fma rounds twice, far from 0
        logits[row, ids[row].long()] += gap
    ids[3], ids[4, 1:] = -1, -1
    targets = torch.where(mask, torch.randint(0, size, (rows,)), -100)
    targets[[1, 2, 5]] = ids[[1, 2, 5], 0].long()
    targets[6] = next((j for j in range(size) if j not in ids[6]), 0)
    logprobs = torch.randn(rows, width).log_softmax(dim=1) + math.log(0.9)
    tails = torch.full((rows,), 0.1, dtype=torch.float64)
    tails[7] = 0.0
    own = (logits[:, :size] / 0.8).log_softmax(dim=1).gather(1, targets.clamp(min=0)[:, None])[:, 0]
    logits[~mask], logits[:, size:] = math.nan, 50.0
    nobodys = [torch.where(mask[:, None], v, math.nan) for v in (logprobs, tails[:, None])]
    advantages = torch.where(mask, torch.randn(rows), math.nan)
    term, others = replace(further_terms(kind)[0], on="rl"), kl_and_entropy(**terms)
    weights = {each.name: torch.where(mask, torch.rand(rows), math.nan) for each in (term, *others)}
    fields = TokenFields(
        targets=targets,
        mask=mask,
        old_logprobs=own + 0.3 * advantages,
        ref_logprobs=own - 0.2 * advantages,
        advantages=advantages,
        weights=torch.where(mask, torch.rand(rows), 0),
        teacher_topk=TopK(ids=ids, logprobs=nobodys[0], tails=nobodys[1][:, 0].double()),
        terms={name: TermFields(weights=each) for name, each in weights.items()},
    )
    loss_terms = (*others[:1], term, *others[1:])
    return PolicyLoss(
        LossTerms(objective=objective_of("reinforce_is"), grad_divisor=8.0, further=loss_terms), fields
    ), logits
