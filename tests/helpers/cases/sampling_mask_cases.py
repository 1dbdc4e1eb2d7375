"""Random steps whose samples say what could be sampled, and what the oracle expects of them: logits of -inf outside it."""

import dataclasses
import itertools
import random
from collections.abc import Sequence

import cases
import numpy as np
import objective_cases
import objective_oracle as oracle
import simulation
import term_cases
import torch
from compare import gradient_error, scalar_error
from simulation import Layout, Outcome, Step
from term_oracle import Term
from torch import Tensor

from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.sample import Sample

OF_ROLLOUT = ("old_logprobs", "rollout_logprobs", "ref_logprobs")


@dataclasses.dataclass(frozen=True)
class Case:
    """A case of `objective_cases` with sampling masks; `kept`: entropies are over them."""

    base: objective_cases.Case
    samples: Sequence[Sample]
    kept: bool

    def step(self, layout: Layout, rng: random.Random) -> Step:
        terms = dataclasses.replace(self.base.loss.terms, sampling_mask_entropy="kept" if self.kept else "full")
        loss = dataclasses.replace(self.base.loss, terms=terms)
        return Step(self.samples, self.base.logits, loss, simulation.scatter_samples(self.samples, layout, rng))

    def error(self, found: Outcome) -> float:
        """Worst of loss, its terms and the gradient, as `objective_cases.Case.error`.

        The policy and its divergence see the restricted logits; so does the entropy, or it sees the whole ones.
        """
        plain = dataclasses.replace(self.base.expected, entropy_coef=0.0)
        policy = oracle.step(self._documents(restricted=True), plain)
        entropy, nothing = (
            oracle.step(self._documents(restricted=self.kept), dataclasses.replace(plain, entropy_coef=eta))
            for eta in (self.base.expected.entropy_coef, 0.0)
        )
        scale = sum(
            w * np.abs(f * x).sum() for w, f, x in zip(policy.weights, policy.factors, policy.token_losses, strict=True)
        )
        errors = [scalar_error(value, policy.pg_loss, scale) for value in (found.reported, found.metrics["pg_loss"])]
        terms = {
            "kl_loss": (self.base.expected.kl_coef, policy),
            "entropy_loss": (self.base.expected.entropy_coef, entropy),
        }
        for name, (coefficient, wanted) in terms.items():
            assert (name in found.metrics) == (coefficient != 0)
            if coefficient:
                value = getattr(wanted, name)
                errors.append(scalar_error(found.metrics[name], value, abs(value) + 1e-3))
        parts = zip(policy.gradients, entropy.gradients, nothing.gradients, strict=True)
        wanted = [self.base._spread(i, a + b - c) for i, (a, b, c) in enumerate(parts)]
        return max(*errors, gradient_error(found.gradients, wanted))

    def _documents(self, *, restricted: bool) -> list[oracle.Document]:
        tables = self.base.logits
        if restricted:
            tables = [restrict(s, table) for s, table in zip(self.samples, tables, strict=True)]
        return objective_cases.documents(self.samples, tables)


def restrict(sample: Sample, table: Tensor) -> Tensor:
    """The logits with -inf outside each response token's set, row by row."""
    table, first = table.clone(), len(sample.tokens) - sample.response_length - 1
    offsets = sample.sampling_mask.offsets.tolist()
    for k, (start, end) in enumerate(itertools.pairwise(offsets)):
        allowed = set(sample.sampling_mask.ids[start:end].tolist())
        for j in range(table.shape[1]):
            if allowed and j not in allowed:
                table[first + k, j] = -torch.inf
    return table


def random_case(rng: random.Random, objective: str) -> Case:
    base = objective_cases.random_case(rng, objective)
    samples = [_with_mask(sample, rng) for sample in base.samples]
    if objective in objective_cases.PRODUCTS:
        temperature = base.expected.temperature
        tables = [restrict(s, t) for s, t in zip(samples, base.logits, strict=True)]
        samples = [_certain(_near(s, t, temperature, rng)) for s, t in zip(samples, tables, strict=True)]
    case = Case(base, samples, rng.random() < 0.5)
    if base.expected.denominator == "kept" and not _keeps_some(case):
        return random_case(rng, objective)
    return case


def _near(sample: Sample, table: Tensor, temperature: float, rng: random.Random) -> Sample:
    return objective_cases._with_near_anchor(sample, table, temperature, rng)


def _keeps_some(case: Case) -> bool:
    return any(f.any() for f in oracle.step(case._documents(restricted=True), case.base.expected).factors)


def _with_mask(sample: Sample, rng: random.Random) -> Sample:
    """The sample with a set for each token: its token alone, several, all of the vocabulary, none; garbage where it is masked."""
    sets = []
    for token, trained in zip(
        sample.tokens[-sample.response_length :].tolist(), sample.loss_mask.tolist(), strict=True
    ):
        size = rng.choice([0, 1, 2, 3, 5, cases.VOCABULARY])
        others = rng.sample([j for j in range(cases.VOCABULARY) if j != token], max(size - 1, 0))
        own = rng.sample([token, *others], size) if size else []
        sets.append(own if trained else [99, 99, -7])
    return _certain(dataclasses.replace(sample, sampling_mask=PAYLOADS["sampling_mask"].of(sets, sample.sample_id)))


def _certain(sample: Sample) -> Sample:
    """A token that was the only one has log-probability 0 under every policy over its set."""
    alone = sample.sampling_mask.counts == 1
    known = {name: values for name in OF_ROLLOUT if (values := getattr(sample, name)) is not None}
    fields = {name: torch.where(alone, 0.0, values) for name, values in known.items()}
    return dataclasses.replace(sample, **fields)


# ---- Loss terms ----

WHOLE = ("ce", "opd")  # kinds that are over the whole vocabulary


def random_terms(rng: random.Random) -> tuple[Term, ...]:
    """KL and entropy terms on the objective's tokens and on their own, together with terms over the whole vocabulary."""
    on = rng.choice([None, None, "rl"])
    estimator = rng.choice(["k1", "k2", "k3", "k3_weighted"])
    terms = [Term("ref", "kl", rng.uniform(0.1, 2.0), on=on, estimator=estimator)]
    terms += [Term("h", "entropy", rng.uniform(0.1, 2.0), on=rng.choice([None, "rl", on or "ref"]))]
    return (*terms, *([Term("echo", rng.choice(WHOLE), 0.3)] if rng.random() < 0.6 else []))


def random_term_case(rng: random.Random) -> term_cases.Case:
    """A step with loss terms whose samples say what could be sampled; without the objective in one of three."""
    given = {"terms": random_terms(rng), "dropped": (), "keeps_entropy": rng.random() < 0.5}
    if rng.random() < 0.3:
        given["has_policy"] = False
    flags = term_cases.random_flags(rng, **given)
    while True:
        samples = [_with_sets(flags, sample, rng) for sample in term_cases.random_samples(rng, flags)]
        case = term_cases.Case(samples, term_cases.poisoned_logits(rng, flags, samples), flags)
        if not any(len(term_cases.live_rows(flags, sample)) for sample in samples):
            continue
        policy = case.wanted.terms.get("rl")
        if (
            policy is None or not policy.num_tokens or policy.magnitude > 1e-3
        ):  # not of rejected and certain tokens alone
            return case


def _with_sets(flags: term_cases.Flags, sample: Sample, rng: random.Random) -> Sample:
    """The sample with sets that hold its token where a term reads them, none where another reads the whole vocabulary, else any."""
    if sample.term != "rl" and rng.random() < 0.3:
        return sample
    by_kind = [("kl", "rl", flags.has_policy), *((t.kind, t.tokens, True) for t in flags.terms)]
    readers = [(kind, sample.mask_of(tokens)) for kind, tokens, is_there in by_kind if is_there]
    read, whole = (
        {k for kind, mask in readers if kind in kinds and mask is not None for k in mask.nonzero()[:, 0].tolist()}
        for kinds in (("kl", "entropy") if flags.keeps_entropy else ("kl",), WHOLE)
    )
    sets = []
    for k, token in enumerate(sample.tokens[-sample.response_length :].tolist()):
        size = rng.choice([0, 1, 2, 3, 5, cases.VOCABULARY])
        others = rng.sample([j for j in range(cases.VOCABULARY) if j != token], max(size - 1, 0))
        own = rng.sample([token, *others], size) if size else []
        is_checked = sample.term == "rl" and bool(sample.loss_mask[k])
        sets.append((own if k not in whole else []) if k in read else others if is_checked else [99, 99, -7])
    sample = dataclasses.replace(sample, sampling_mask=PAYLOADS["sampling_mask"].of(sets, sample.sample_id))
    return _certain(sample)
