"""Micro-batches for every kind of reader, and their loss by autograd in float64, row by row. Nothing of it is the
package's; divergences from a teacher are the oracle's.

Some rows are the objective's, some the further terms', some both, and some nobody's. Fields are NaN wherever no loss
reads them.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

import token_oracle
import torch
from torch import Tensor

from megatron_pg.batch import TokenFields
from megatron_pg.batch.fields import SamplingMask, TeacherStates, TermFields, TopK
from megatron_pg.declarations.loss_terms import KINDS, LossTerm
from megatron_pg.kernels import LossTerms, PolicyLoss
from megatron_pg.objectives import objective_of

TOPK = tuple(kind for kind, declared in KINDS.items() if declared.reads_topk)
FULL = ("full_forward_kl", "full_reverse_kl", "full_jsd")
READERS = ("plain", "mask_full", "mask_kept", *TOPK, *FULL)
SHARE, FLOOR, BONUS = 0.3, 1e-6, 0.2
LOW, HIGH = 0.2, 0.28
MOST = 20.0  # of a log-ratio, beyond which there is no gradient
COUNTS = (0, 1, 5, -1, 3, 100)  # tokens that could be sampled, by row; -1: all, 0: no set
PLAIN = (
    LossTerm(name="ce", kind="ce", weight=0.7),
    LossTerm(name="opd", kind="opd", weight=0.3, estimator="k3_weighted"),
    LossTerm(name="kl", kind="kl", weight=0.4, estimator="k2", on="rl", aggregation="policy"),
)
READ = {"old_logprobs": ("rl", "opd"), "advantages": ("rl",), "teacher_logprobs": ("opd",), "ref_logprobs": ("rl",)}


def further_terms(reader: str, *others: str) -> tuple[LossTerm, ...]:
    """The terms of a case before the entropy bonus, which is the objective's."""
    if reader == "plain":
        return PLAIN
    if reader.startswith("mask"):
        return ()
    terms = []
    for number, kind in enumerate((reader, *others)):
        mixture, floor = SHARE if KINDS[kind].mixture else None, FLOOR if KINDS[kind].has_tail else None
        terms.append(LossTerm(name=f"t{number}", kind=kind, weight=0.5 + number, mixture=mixture, tail_floor=floor))
    return tuple(terms)


@dataclass(frozen=True)
class ReaderCase:
    """One micro-batch; its logits are given separately."""

    policy_loss: PolicyLoss
    size: int  # columns that are not padding
    sets: list[list[int]] | None = None  # what could be sampled, by row

    @classmethod
    def draw(
        cls,
        reader: str,
        size: int,
        *others: str,
        rows: int = len(COUNTS),
        width: int = 5,
        is_shared: bool = False,
        log_p: Tensor | None = None,
        counts: tuple[int, ...] = COUNTS,
    ) -> "ReaderCase":
        """From torch's generator.

        Args:
            reader: of `READERS`.
            size: columns that are not padding.
            others: further terms over the same teacher.
            rows: how many; with a sampling mask as many as counts.
            width: ids per row.
            is_shared: all terms are over the objective's tokens.
            log_p: of the top-k teacher [rows, size]; None: at random.
            counts: tokens that could be sampled, by row.
        """
        terms = further_terms(reader, *others)
        masks = {name: torch.rand(rows) < 0.6 for name in ("rl", *(term.name for term in terms if term.on != "rl"))}
        for number, mask in enumerate(masks.values()):
            known = [True, *(i == number for i in range(len(masks))), False]  # all, one each, none
            mask[: len(known)] = torch.tensor(known[:rows])
        if reader.startswith("mask"):
            rows = len(counts)
            masks["rl"] = torch.arange(rows) != 4
        if is_shared:
            terms = tuple(replace(term, on="rl") for term in terms)
            masks = {"rl": masks["rl"]}
        union = torch.stack([*masks.values()]).any(dim=0)
        has_own = len(masks) > 1
        weights = {term.name: masks.get(term.name, masks["rl"]) for term in terms} | {"rl": masks["rl"]}
        weights = {name: torch.where(mask, torch.rand(rows).double(), 0) for name, mask in weights.items()}
        values = {name: -torch.rand(rows).double() - 3 for name in READ} | {"advantages": torch.randn(rows).double()}
        for name, readers in READ.items():
            read = [masks.get(each, masks["rl"]) for each in readers if each in ("rl", *(term.name for term in terms))]
            values[name] = torch.where(torch.stack(read).any(dim=0), values[name], math.nan) if read else None
        values["ref_logprobs"] = values["ref_logprobs"] if reader == "plain" else None
        targets = torch.randint(0, size, (rows,))
        details, sets = {}, None
        if reader.startswith("mask"):
            sets, targets, details["sampling_mask"] = _sampling_mask(size, counts, masks["rl"])
        elif reader in TOPK:
            details["teacher_topk"] = _topk(size, width, _read(masks, terms), targets, log_p)
        elif reader in FULL:
            slots = (_read(masks, terms).cumsum(0) - 1).clamp(min=0)
            states = torch.randn(int(slots.max()) + 1, 12).double()
            states[1:2] *= 10  # probabilities that are 0 in float32
            details["teacher_hidden"] = TeacherStates(slots=slots, states=states)
        token_fields = TokenFields(
            targets=torch.where(union, targets, -100),
            mask=union,
            weights=weights["rl"],
            corrections=torch.linspace(0, 2, rows).double() if reader == "plain" else None,
            **values,
            **details,
            terms={
                term.name: TermFields(weights=weights[term.name], mask=masks[term.name] if has_own else None)
                for term in terms
                if term.on != "rl" or is_shared
            }
            | ({"rl": TermFields(mask=masks["rl"])} if has_own else {}),
        )
        objective = objective_of("grpo", clip_eps_low=LOW, clip_eps_high=HIGH)
        if sets:  # a slope that is not a ratio shows the rounding of the distributions alone
            objective = objective_of("reinforce")
        loss = LossTerms(
            objective=objective,
            grad_divisor=2.0,
            further=(*terms, LossTerm(name="h", kind="entropy", weight=BONUS, on="rl")),
            **({"sampling_mask_entropy": reader[5:]} if sets else {}),
        )
        return cls(PolicyLoss(loss, token_fields), size, sets)

    def on(self, device: str, dtype: torch.dtype | None = None) -> "ReaderCase":
        """The same there; `dtype`: of the teacher's hidden states."""
        known = self.policy_loss.fields
        moved = {name: values.to(device) for name, values in known.per_token().items()}
        for name, payload in known.payloads.items():
            tensors = {each.name: getattr(payload, each.name) for each in fields(payload)}
            tensors = {each: values.to(device) for each, values in tensors.items() if isinstance(values, Tensor)}
            moved[name] = replace(payload, **tensors)
        if dtype is not None and known.teacher_hidden is not None:
            moved["teacher_hidden"] = replace(
                moved["teacher_hidden"], states=known.teacher_hidden.states.to(device, dtype)
            )
        return replace(self, policy_loss=replace(self.policy_loss, fields=TokenFields.of(moved)))

    def expected(self, logits: Tensor, temperature: float, teacher_logits: Tensor | None = None) -> Tensor:
        """The sum of all losses; rows [T, V] that no loss reads are not read here. `teacher_logits`: one row per
        state."""
        total = torch.zeros((), dtype=torch.float64)
        for t in self.policy_loss.fields.mask.nonzero()[:, 0].tolist():
            for value in self._losses(t, logits[t, : self.size] / temperature, temperature, teacher_logits):
                total = total + value
        return total

    def logprobs(self, logits: Tensor, temperature: float) -> Tensor:
        """[T], 0 where the objective trains nothing."""
        f = self.policy_loss.fields
        rows = f.objective_mask.nonzero()[:, 0].tolist()
        found = torch.zeros(len(f.mask), dtype=torch.float64)
        for t in rows:
            found[t] = self._kept(t, logits[t, : self.size] / temperature)[int(f.targets[t])]
        return found

    def _kept(self, t: int, z: Tensor) -> Tensor:
        """log-probabilities [V] over what could be sampled; -inf elsewhere."""
        if not (self.sets and self.sets[t]):
            return z.log_softmax(0)
        kept = torch.tensor(self.sets[t])
        return torch.full_like(z, -math.inf).index_copy(0, kept, z[kept].log_softmax(0))

    def _losses(self, t: int, z: Tensor, temperature: float, teacher_logits: Tensor | None) -> Iterator[Tensor]:
        f, terms = self.policy_loss.fields, self.policy_loss.terms
        log_q = self._kept(t, z)
        new = log_q[int(f.targets[t])]
        if f.objective_mask[t]:
            log_ratio, advantage = new - f.old_logprobs[t], f.advantages[t]
            ratio = log_ratio.clamp(-MOST, MOST).exp()
            surrogate = torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage)
            correction = 1.0 if f.corrections is None else f.corrections[t]
            surrogate = advantage * new if terms.objective.name == "reinforce" else surrogate
            yield -f.weights[t] * correction * surrogate
        for term in terms.further:
            own = f.of_term(term.name)
            if own.mask[t]:
                weight = term.weight * own.weights[t]
                yield weight * self._term(term, t, z, log_q, new, temperature, teacher_logits)

    def _term(self, term: LossTerm, t: int, z, log_q, new, temperature, teacher_logits) -> Tensor:
        f = self.policy_loss.fields
        if term.kind == "ce":
            return -new
        if term.kind == "kl":
            return (new - f.ref_logprobs[t]).square() / 2
        if term.kind == "entropy":
            is_kept = self.policy_loss.terms.sampling_mask_entropy == "kept"
            over = log_q[log_q.isfinite()] if is_kept else z.log_softmax(0)
            return (over.exp() * over).sum()
        if term.kind == "opd":
            # the gradient of k3 times the ratio is that of its value, and of the ratio's expectation
            gap, drift = new - f.teacher_logprobs[t], (new - f.old_logprobs[t]).exp()
            k3 = (-gap).exp() - 1 + gap
            return (drift * k3).detach() + (drift * gap).detach() * (new - new.detach())
        options = {"temperature": 1.0, "share": term.mixture}
        if term.kind in FULL:
            teacher = teacher_logits[f.teacher_hidden.slots[t]][: self.size] / temperature
            row = token_oracle.full_divergence(term.kind, z.tolist(), teacher.tolist(), **options)
        else:
            ids, logprobs = f.teacher_topk.ids[t], f.teacher_topk.logprobs[t]
            named = [each[ids >= 0].tolist() for each in (ids, logprobs)]
            row = token_oracle.topk_divergence(term.kind, z.tolist(), *named, **options, floor=FLOOR)
        return row.value + (torch.as_tensor(row.gradient, device=z.device) * (z - z.detach())).sum()


def _read(masks: dict[str, Tensor], terms: tuple[LossTerm, ...]) -> Tensor:
    """[T] rows whose teacher a term reads."""
    return torch.stack([masks.get(term.name, masks["rl"]) for term in terms]).any(dim=0)


def _sampling_mask(size: int, counts: tuple[int, ...], mask: Tensor) -> tuple[list[list[int]], Tensor, SamplingMask]:
    """Sets of so many tokens, a target of each, and the mask; the sets of masked rows hold no token."""
    sets = [torch.randperm(size)[: size if n < 0 else n].tolist() for n in counts]
    targets = torch.tensor([each[len(each) // 2] if each else int(torch.randint(0, size, ())) for each in sets])
    poisoned = [each if m else [size + 5, -9] for each, m in zip(sets, mask.tolist(), strict=True)]
    ids = torch.tensor([j for each in poisoned for j in each], dtype=torch.int32)
    found = SamplingMask.of(ids, torch.tensor([0, *map(len, poisoned)]).cumsum(0))
    found.counts[~mask] = 0  # as a batch has it
    return sets, targets, found


def _topk(size: int, width: int, read: Tensor, targets: Tensor, log_p: Tensor | None) -> TopK:
    """Of every second row the teacher's top tokens, of the others any; some rows name fewer, row 0 names its target."""
    rows, width = len(read), min(width, size)
    log_p = (2 * torch.randn(rows, size)).double().log_softmax(dim=1) if log_p is None else log_p
    ids = log_p.topk(width, dim=1).indices
    ids[::2] = torch.stack([torch.randperm(size)[:width] for _ in ids[::2]])
    ids[0, 0] = ids[0, 0] if (ids[0] == targets[0]).any() else targets[0]
    fewer = (torch.rand(rows, width) < 0.2) & (torch.arange(width) > 0) & (torch.arange(rows) > 0)[:, None]
    ids = torch.where(fewer, -1, ids)
    named = torch.zeros(rows, size + 1, dtype=torch.bool).scatter_(1, torch.where(fewer, size, ids), True)[:, :size]
    logprobs = torch.where(fewer, math.nan, log_p.gather(1, ids.clamp(min=0)))
    return TopK(
        ids=torch.where(read[:, None], ids, 3).int(),
        logprobs=torch.where(read[:, None], logprobs, math.nan),
        tails=torch.where(read, torch.where(named, 0, log_p.exp()).sum(dim=1), math.nan),
    )
