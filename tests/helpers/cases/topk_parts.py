"""A micro-batch's token fields with top-k divergences, and their loss written out in float64."""

import math
from dataclasses import dataclass, replace

import torch
from loss_terms import kl_and_entropy
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import TermFields, TopK
from megatron_pg.declarations.loss_terms import KINDS, LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

NAMES = tuple(kind for kind, declared in KINDS.items() if declared.reads_topk)
SHARE = 0.3
FLOOR = 1e-6


def terms_of(*kinds: str) -> tuple[LossTerm, ...]:
    """One loss term of each kind, and an entropy bonus over the objective's tokens."""
    found = []
    for i, kind in enumerate(kinds):
        mixture = SHARE if KINDS[kind].mixture else None
        floor = FLOOR if KINDS[kind].has_tail else None
        found.append(LossTerm(name=f"t{i}", kind=kind, weight=0.5 + i, mixture=mixture, tail_floor=floor))
    return *found, LossTerm(name="h", kind="entropy", weight=0.2, on="rl")


@dataclass(frozen=True)
class Parts:
    """Rows of which some are the objective's, some the loss terms', some both, and some nobody's, where everything is
    poison."""

    fields: TokenFields
    loss_terms: tuple[LossTerm, ...]
    size: int  # columns that are no padding

    @classmethod
    def draw(cls, rows: int, size: int, width: int, *kinds: str, log_p: Tensor | None = None) -> "Parts":
        """From torch's generator; `log_p` [rows, size]: the teacher, else one at random."""
        log_p = (2 * torch.randn(rows, size, dtype=torch.float64)).log_softmax(dim=1) if log_p is None else log_p
        loss_terms = terms_of(*kinds)
        masks = {term.name: torch.rand(rows) < 0.6 for term in loss_terms}
        for i, mask in enumerate(masks.values()):
            mask[:4] = torch.tensor([True, i == 0, i == len(masks) - 1, False])
        union = torch.stack([*masks.values()]).any(dim=0)
        read = torch.stack([masks[term.name] for term in loss_terms[:-1]]).any(dim=0)
        targets = torch.randint(0, size, (rows,))
        ids = log_p.topk(width, dim=1).indices
        ids[::2] = torch.stack([torch.randperm(size)[:width] for _ in ids[::2]])
        ids[0, 0] = targets[0] if not (ids[0] == targets[0]).any() else ids[0, 0]  # a target that is named
        logprobs = log_p.gather(1, ids)
        fewer = (torch.rand(rows, width) < 0.2) & (torch.arange(width) > 0)
        fewer[0] = False
        ids = torch.where(fewer, -1, ids)
        named = torch.zeros(rows, size + 1, dtype=torch.bool).scatter_(1, torch.where(fewer, size, ids), True)[:, :size]
        tails = torch.where(named, 0, log_p.exp()).sum(dim=1)
        weights = {name: torch.where(mask, torch.rand(rows, dtype=torch.float64), 0) for name, mask in masks.items()}
        teacher = TopK(
            ids=torch.where(read[:, None], ids, 3).int(),
            logprobs=torch.where(read[:, None] & ~fewer, logprobs, math.nan),
            tails=torch.where(read, tails, math.nan),
        )
        fields = TokenFields(
            targets=torch.where(union, targets, -100),
            mask=union,
            weights=weights["h"],
            old_logprobs=torch.where(masks["h"], -torch.rand(rows, dtype=torch.float64) - 2, math.nan),
            advantages=torch.where(masks["h"], torch.randn(rows, dtype=torch.float64), math.nan),
            teacher_topk=teacher,
            terms={"rl": TermFields(mask=masks["h"])}
            | {s.name: TermFields(weights=weights[s.name], mask=masks[s.name]) for s in loss_terms[:-1]},
        )
        return cls(fields, loss_terms, size)

    @property
    def policy_loss(self) -> PolicyLoss:
        """The package's."""
        objective = objective_of("reinforce")
        return PolicyLoss(LossTerms(objective=objective, further=self.loss_terms), self.fields)

    def expected(self, logits: Tensor, temperature: float) -> Tensor:
        """The sum of all losses in float64 by autograd over [T, V], row by row; rows that nothing trains are not
        read."""
        total = torch.zeros((), dtype=torch.float64)
        f = self.fields
        for t in f.mask.nonzero()[:, 0].tolist():
            log_q = torch.log_softmax(logits[t, : self.size].double() / temperature, dim=0)
            if f.objective_mask[t]:
                bonus = 0.2 * f.weights[t] * (log_q.exp() * log_q).sum()
                total = total - f.weights[t] * f.advantages[t] * log_q[f.targets[t]] + bonus
            for term in self.loss_terms[:-1]:
                if f.of_term(term.name).mask[t]:
                    own = f.of_term(term.name).weights[t]
                    total = total + term.weight * own * self._divergence(term, log_q, t)
        return total

    def _divergence(self, term: LossTerm, log_q: Tensor, t: int) -> Tensor:
        ids, teacher = self.fields.teacher_topk.ids[t], self.fields.teacher_topk
        named = [int(token) for token in ids if token >= 0]
        others = [j for j in range(self.size) if j not in named]
        q, p = [log_q[j] for j in named], [teacher.logprobs[t, k] for k in range(len(ids)) if ids[k] >= 0]
        if others and term.tail_floor is not None:
            q.append(torch.logsumexp(log_q[others], dim=0))
            p.append(teacher.tails[t].clamp(min=term.tail_floor).log())
        return divergence(term.kind, torch.stack(p), torch.stack(q))


def divergence(kind: str, log_p: Tensor, log_q: Tensor) -> Tensor:
    """Of categories, as the papers have it."""
    p, q = log_p.exp(), log_q.exp()

    def kl(a: Tensor, log_a: Tensor, b: Tensor) -> Tensor:
        return (a * (log_a - b.log())).sum()

    if kind == "topk_forward_kl":
        return (p * (log_p - log_q)).sum()
    if kind == "topk_reverse_kl":
        return (q * (log_q - log_p)).sum()
    if kind == "topk_jsd":
        m = SHARE * p + (1 - SHARE) * q
        return SHARE * kl(p, log_p, m) + (1 - SHARE) * kl(q, log_q, m)
    if kind == "topk_skew_forward":
        return kl(p, log_p, SHARE * p + (1 - SHARE) * q)
    if kind == "topk_skew_reverse":
        return kl(q, log_q, SHARE * q + (1 - SHARE) * p)
    return (q * (log_q - log_p) - q + p).sum()


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
    term, others = replace(terms_of(kind)[0], on="rl"), kl_and_entropy(**terms)
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
