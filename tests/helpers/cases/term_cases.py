"""Random steps with further loss terms, from flags to samples, as cases of `step_cases`.

A step may lack the tokens of any term, a sample may have tokens of several, and the samples of a rollout may be of
different terms. What no live term reads is NaN or absent: fields at other tokens, logits of other rows, fields of
samples.
"""

import math
import random
import tempfile
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

import step_cases
import torch
from namespaces import arguments, objective_arguments, with_options
from samples import share_an_advantage
from step_cases import BY_SAMPLE, CUSTOM, VOCABULARY, StepCase, first_row, numbers_of
from step_oracle import Settings, Term
from teacher_files import write_head
from token_oracle import DEFAULT_SHARES, KL_ESTIMATORS
from torch import Tensor

from megatron_pg.args import ArgumentError, validate_args
from megatron_pg.declarations.objectives import OBJECTIVES
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.topk import TokenSets
from megatron_pg.rollouts.sample import Sample

NAMES = ("sft", "echo", "teacher", "ref", "h")
REDUCER = "step_cases:root_length_reducer"
TOPK = (
    "topk_forward_kl",
    "topk_reverse_kl",
    "topk_jsd",
    "topk_skew_forward",
    "topk_skew_reverse",
    "topk_generalised_reverse",  # the one without a tail
)
FULL = ("full_forward_kl", "full_reverse_kl", "full_jsd")
WEIGHTS = (1.0, 1e-9, 1e6)
USUAL_FLOOR = Settings().tail_floor
FIELDS = ("old_logprobs", "advantages", "rollout_logprobs", "ref_logprobs", "teacher_logprobs")
# Objectives that take any samples: products of ratios and one advantage per sequence need their own samples.
PLAIN = [
    name
    for name, declared in OBJECTIVES.items()
    if name not in step_cases.PRODUCTS and not declared.has_one_advantage_per_sequence
]


def case_of(
    samples: Sequence[Sample], logits: Sequence[Tensor], asked: Settings, *, keeps_entropy: bool = False
) -> StepCase:
    """The case with the package's settings through its flags."""
    return StepCase(samples, logits, asked, loss_of(asked, keeps_entropy), keeps_entropy=keeps_entropy)


def loss_of(asked: Settings, keeps_entropy: bool = False) -> LossSettings:
    """What the package makes of the flags that ask for this.

    Raises:
        ArgumentError: they contradict each other.
    """
    floor = None if asked.tail_floor == USUAL_FLOOR else asked.tail_floor
    texts = [flag_text(term, asked.temperature, floor, asked.teacher_softcap) for term in asked.terms]
    texts += [] if asked.has_policy else ["rl:rl,weight=0"]
    is_custom, reads_hidden = asked.aggregation == CUSTOM, any(term.kind in FULL for term in asked.terms)
    low, high = asked.bounds
    args = arguments(
        loss_aggregation=None if is_custom else asked.aggregation,
        loss_aggregation_divisor=None if is_custom else asked.divisor,
        custom_pg_loss_reducer_function_path=REDUCER if is_custom else None,
        calculate_per_token_loss=asked.per_token,
        **objective_arguments(asked.objective, {name: asked.numbers[name] for name in numbers_of(asked.objective)}),
        pg_correction=with_options(asked.correction, low=low, high=high),
        pg_denominator=asked.denominator,
        pg_weight_denominator=asked.weight_denominator,
        pg_sequence_level=asked.sequence_level,
        pg_kl_coef=asked.kl_coef,
        pg_kl_estimator=asked.kl_estimator if asked.kl_coef else None,
        pg_entropy_coef=asked.entropy_coef,
        pg_aux_aggregation=asked.aux_aggregation,
        pg_grad_divisor=asked.grad_divisor,
        pg_temperature=asked.temperature,
        pg_logit_softcap=asked.softcap,
        pg_term=texts or None,
        pg_fused_head="recompute" if reads_hidden else None,
        pg_metrics="with_entropy",
        pg_sampling_mask_entropy="kept" if keeps_entropy else "full",
        pg_kernel="torch",
        padded_vocab_size=VOCABULARY,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return LossSettings.from_args(validate_args(args))


def flag_text(term: Term, temperature: float, tail_floor: float | None, softcap: float | None = None) -> str:
    options = {name: getattr(term, name) for name in ("weight", "aggregation", "divisor", "on", "estimator")}
    if term.kind in TOPK:
        options |= {"temperature": temperature, "beta" if term.kind == "topk_jsd" else "alpha": term.share}
    if term.kind == "full_jsd":
        options |= {"beta": term.share}
    if term.kind in FULL:
        options |= {"head": teacher_head(), "softcap": softcap}
    if have_tail([term]):
        options |= {"tail_floor": tail_floor}
    return with_options(f"{term.name}:{term.kind}", **options)


@cache
def teacher_head() -> str:
    """A head whose logits are the hidden states."""
    path = Path(tempfile.mkdtemp()) / "teacher.safetensors"
    write_head(path, torch.eye(VOCABULARY))
    return f"{path}:weight"


def names_of_tokens(asked: Settings) -> list[str]:
    """Terms that samples may be of."""
    return ["rl", *(term.name for term in asked.terms if term.on is None)]


# ---- Settings ----


def random_case(rng: random.Random, **given) -> StepCase:
    """A step with a trained token; `given`: see `random_settings`."""
    while True:
        asked = random_settings(rng, **given)
        samples = random_samples(rng, asked)
        if not any(live_rows(asked, sample) for sample in samples):
            continue
        case = case_of(samples, poisoned_logits(rng, asked, samples), asked)
        if asked.denominator == "kept" and not case.wanted.terms["rl"].magnitude:
            continue  # the correction rejects every token
        return case


def random_settings(
    rng: random.Random,
    objective: str | None = None,
    denominator: str | None = None,
    keeps_entropy: bool = False,
    **given,
) -> Settings:
    """Settings whose flags do not contradict each other; `given`: fields of them that are not drawn."""
    while True:
        asked = step_cases.random_settings(rng, objective or rng.choice([*PLAIN, "grpo", "gspo", "gspo"]))
        if denominator not in (None, asked.denominator):
            continue
        has_policy = given.get("has_policy", rng.random() > 0.12)
        if not has_policy and objective is None:  # a rule refuses the objective, reducer, correction, … that is dropped
            asked = step_cases.random_settings(rng, "grpo")
        terms = random_terms(rng, has_policy)
        if rng.random() < 0.25:  # one of weight 0, which has tokens
            terms = (*_on_off_tokens(rng, terms), Term("off", rng.choice(["ce", "opd"]), 0.0))
        asked = replace(
            asked,
            per_token=asked.aggregation == "token_mean" or asked.per_token,
            aux_aggregation=asked.aux_aggregation if asked.kl_coef or asked.entropy_coef else "default",
            has_policy=has_policy,
            terms=terms,
            tail_floor=rng.choice([1e-5, 1e-3, 0.05]) if have_tail(terms) and rng.random() < 0.4 else USUAL_FLOOR,
        )
        if has_policy and rng.random() < 0.2:
            asked = replace(asked, aggregation=CUSTOM, denominator="scheduled")
        if not has_policy:
            plain = {"correction": "none", "denominator": "scheduled", "aux_aggregation": "default"}
            asked = replace(asked, kl_coef=0.0, entropy_coef=0.0, **plain)
        asked = replace(asked, **given)
        try:
            loss_of(asked, keeps_entropy)
        except ArgumentError:
            continue
        return asked


def random_terms(rng: random.Random, has_policy: bool) -> tuple[Term, ...]:
    names = rng.sample(NAMES, rng.randint(1, 3))
    own = [name for name in names if rng.random() < 0.6]
    terms = []
    for name in names:
        on = None if name in own else rng.choice(["rl", "rl", *own])
        kind = rng.choice(["ce", "opd", "opd", "kl", "entropy", *rng.sample(TOPK, 2)])
        has_estimator = kind == "kl" or (kind == "opd" and rng.random() < 0.6)
        aggregation = rng.choice([None, *BY_SAMPLE, *(["policy"] if on == "rl" and has_policy else [])])
        terms.append(
            Term(
                name=name,
                kind=kind,
                weight=rng.choice([*WEIGHTS, rng.uniform(0.01, 2.0), rng.uniform(0.01, 2.0)]),
                aggregation=aggregation,
                divisor=rng.uniform(1, 5000) if aggregation == "constant" else None,
                on=on,
                estimator=rng.choice(sorted(KL_ESTIMATORS)) if has_estimator else None,
                share=rng.uniform(0.02, 0.98) if kind in DEFAULT_SHARES and rng.random() < 0.6 else None,
            )
        )
    return tuple(terms)


def _on_off_tokens(rng: random.Random, terms: Sequence[Term]) -> list[Term]:
    """Some of them over the tokens of a term of weight 0."""
    moved = [replace(term, on="off") if term.on and rng.random() < 0.1 else term for term in terms]
    return [replace(t, aggregation=None) if (t.on, t.aggregation) == ("off", "policy") else t for t in moved]


def full_terms(rng: random.Random) -> tuple[Term, ...]:
    """Terms of which some read a teacher's hidden states, by one kind of divergence; none reads top-k tokens."""
    kind, share = rng.choice(FULL), rng.choice([None, 0.2, 0.9])
    terms = random_terms(rng, has_policy=True)
    readers = rng.sample(range(len(terms)), rng.randint(1, len(terms)))
    full = {"kind": kind, "estimator": None, "share": share if kind == "full_jsd" else None}
    plain = {"kind": "ce", "estimator": None, "share": None}
    return tuple(
        replace(term, **(full if i in readers else plain if term.kind in TOPK else {})) for i, term in enumerate(terms)
    )


def have_tail(terms: Sequence[Term]) -> bool:
    return any(term.kind in TOPK[:-1] for term in terms)


# ---- Samples ----


def random_samples(rng: random.Random, asked: Settings) -> list[Sample]:
    """Prompts with rollouts, rollouts of several samples, and samples of one rollout in several terms."""
    names = names_of_tokens(asked)
    weights = [rng.choice([0, 1, 2]) if rng.random() < 0.4 else 2 for _ in names]
    if not any(weights):
        weights[0] = 1
    samples: list[Sample] = []
    has_id = rng.random() < 0.9
    has_prompt = loss_of(asked).plan_rule.needs_prompt_ids or rng.random() < 0.8
    for prompt in range(rng.randint(1, 4)):
        for rollout in range(rng.randint(1, 3)):
            begin = len(samples)
            for _ in range(rng.choice([1, 1, 1, 2]) if has_id else 1):
                rest = {
                    "rollout_id": f"{prompt}/{rollout}" if has_id else None,
                    "prompt_id": prompt if has_prompt else None,
                }
                name = rng.choices(names, weights)[0]
                samples.append(random_sample(rng, asked, name, sample_id=str(len(samples)), **rest))
            share_an_advantage([sample for sample in samples[begin:] if sample.term == "rl"])
    return samples


def random_sample(rng: random.Random, asked: Settings, term: str, **ids) -> Sample:
    length = rng.choice([1, 1, 2, rng.randint(1, 14)])
    others = [name for name in names_of_tokens(asked) if name not in ("rl", term)]
    sample = Sample.build(
        tokens=[rng.randrange(VOCABULARY) for _ in range(rng.choice([1, 2, rng.randint(1, 6)]) + length)],
        response_length=length,
        loss_mask=random_mask(rng, length),
        term=term,
        masks={name: random_mask(rng, length) for name in others if rng.random() < 0.4},
        old_logprobs=[0.0] * length,
        advantage=0.0,
        reward=random_reward(rng, ids["rollout_id"]),
        **ids,
    )
    known = {name: random_field(rng, asked, sample, name) for name in FIELDS}
    topk, hidden = random_topk(rng, asked, sample), random_hidden(rng, asked, sample)
    return replace(sample, **known, teacher_topk=topk, teacher_hidden=hidden)


def random_reward(rng: random.Random, rollout_id: str | None) -> float | None:
    """One for a rollout, or none."""
    own = rng.choice([None, 0.0, 1.0, 2.5])
    return own if rollout_id is None or own is None else random.Random(rollout_id).choice([0.0, 1.0, 2.5])


def random_mask(rng: random.Random, length: int) -> list[int]:
    kind = rng.random()
    return [0] * length if kind < 0.2 else [int(kind < 0.45 or rng.random() < 0.6) for _ in range(length)]


def random_field(rng: random.Random, asked: Settings, sample: Sample, name: str) -> Tensor | None:
    """Values where a live term reads them; elsewhere NaN, as far as a sample may hold it, or no field at all."""
    read = rows_that_read(asked, sample, name)
    is_required = read is not None or (sample.term == "rl" and name in ("old_logprobs", "advantages"))
    if not is_required and rng.random() < 0.6:
        return None
    values = []
    for t, trained in enumerate(sample.loss_mask.tolist()):
        if t not in (read or ()) and not trained:
            values.append(float("nan"))
        elif name == "advantages":
            values.append(rng.choice([-1.0, 1.0]) * rng.uniform(0.1, 2.0))
        else:
            values.append(rng.uniform(-4.0, -0.5) + (rng.choice([-25.0, 0.0]) if rng.random() < 0.02 else 0.0))
    return torch.tensor(values, dtype=torch.float64)


def random_topk(rng: random.Random, asked: Settings, sample: Sample) -> TokenSets | None:
    """Where it is read some of the vocabulary, from one token to all; elsewhere nothing, or values that must not be
    read."""
    read = rows_that_read(asked, sample, "teacher_topk")
    if read is None and rng.random() < 0.6:
        return None
    trained = torch.stack([sample.loss_mask, *sample.masks.values()]).any(dim=0)
    width = rng.choice([1, 2, rng.randint(1, VOCABULARY), VOCABULARY])
    ids = torch.full((len(trained), width), -1, dtype=torch.int32)
    logprobs = torch.full((len(trained), width), torch.nan)
    for t in range(len(trained)):
        if t in (read or ()):
            named, values = random_teacher(rng, rng.randint(1, width) if rng.random() < 0.3 else width)
            places = rng.sample(range(width), len(named))
            ids[t, places] = torch.tensor(named, dtype=torch.int32)
            logprobs[t, places] = torch.tensor(values)
        elif not trained[t]:
            ids[t] = rng.choice([-7, 3, 2**31 - 1])
    return TokenSets(ids=ids, logprobs=logprobs)


def random_teacher(rng: random.Random, count: int) -> tuple[list[int], list[float]]:
    """Ids and their log-probabilities: the top ones, or any; of a teacher that may give the others a probability of
    0."""
    logits = [rng.gauss(0, 1.5) for _ in range(VOCABULARY)]
    by_size = sorted(range(VOCABULARY), key=logits.__getitem__, reverse=True)
    named = by_size[:count] if rng.random() < 0.7 else rng.sample(by_size, count)
    gap = rng.choice([0.0, 0.0, 0.0, math.inf])  # between, 1 - Σ p has no digits that two sums would share
    lowered = [z if j in named else z - gap for j, z in enumerate(logits)]
    total = math.log(sum(map(math.exp, lowered)))
    return named, [lowered[j] - total for j in named]


def random_hidden(rng: random.Random, asked: Settings, sample: Sample) -> Tensor | None:
    """Where it is read logits of a teacher, some of them so far that a probability is 0; elsewhere nothing, or
    poison."""
    if not any(term.kind in FULL for term in asked.terms):
        return None
    if rows_that_read(asked, sample, "teacher_hidden") is None and rng.random() < 0.6:
        return None
    trained = torch.stack([sample.loss_mask, *sample.masks.values()]).any(dim=0)
    generator = torch.Generator().manual_seed(rng.getrandbits(60))
    states = rng.choice([1.0, 5.0]) * torch.randn(len(trained), VOCABULARY, generator=generator)
    states = states.bfloat16() if rng.random() < 0.5 else states
    states[~trained] = torch.nan
    return states


# ---- What is read where ----


def rows_of(sample: Sample, tokens: str) -> set[int] | None:
    """Response tokens that a term over these tokens trains, None where the sample is not a member."""
    mask = sample.mask_of(tokens)
    return None if mask is None else set(mask.nonzero()[:, 0].tolist())


def rows_that_read(asked: Settings, sample: Sample, name: str) -> set[int] | None:
    """Response tokens at which a loss reads the field, None where the sample is not a member of any that does."""
    found = [rows for tokens in _readers(asked, name) if (rows := rows_of(sample, tokens)) is not None]
    return set().union(*found) if found else None


def _readers(asked: Settings, name: str) -> Iterable[str]:
    """Whose tokens the losses that read a field train."""
    if asked.has_policy and name in ("old_logprobs", "advantages", "rollout_logprobs"):
        yield "rl"
    for term in asked.all_terms:
        against = {"opd": "teacher_logprobs", "kl": "ref_logprobs"}.get(term.kind)
        is_weighted = against is not None and term.estimator.endswith("_weighted")
        if (
            name == against
            or (name == "teacher_topk" and term.kind in TOPK)
            or (name == "teacher_hidden" and term.kind in FULL)
            or (name == "old_logprobs" and is_weighted)
        ):
            yield term.tokens


def live_rows(asked: Settings, sample: Sample) -> set[int]:
    """Response tokens that a loss of the step trains."""
    tokens = {*(["rl"] if asked.has_policy else []), *(term.tokens for term in asked.all_terms)}
    return set().union(*(rows_of(sample, name) or () for name in tokens))


def poisoned_logits(rng: random.Random, asked: Settings, samples: Sequence[Sample]) -> list[Tensor]:
    """[n, V] per sample; NaN, infinite or huge wherever no live term trains the token that is predicted."""

    def silent(sample: Sample) -> set[int]:
        return set(range(len(sample.tokens))) - {first_row(sample) + t for t in live_rows(asked, sample)}

    return step_cases.poisoned_logits(samples, rng, silent=silent)


# ---- Samples that say what could be sampled ----

WHOLE = ("ce", "opd")  # kinds that are over the whole vocabulary


def random_masked_case(rng: random.Random) -> StepCase:
    """KL and entropy terms on any tokens, together with terms over the whole vocabulary; one of three has no
    objective."""
    keeps_entropy = rng.random() < 0.5
    given = {"terms": _masked_terms(rng), "tail_floor": USUAL_FLOOR, "keeps_entropy": keeps_entropy}
    if rng.random() < 0.3:
        given["has_policy"] = False
    asked = random_settings(rng, **given)
    while True:
        samples = [_with_sets(asked, sample, rng, keeps_entropy) for sample in random_samples(rng, asked)]
        if not any(live_rows(asked, sample) for sample in samples):
            continue
        case = case_of(samples, poisoned_logits(rng, asked, samples), asked, keeps_entropy=keeps_entropy)
        policy = case.wanted.terms.get("rl")
        is_empty = policy is None or not policy.num_tokens
        if is_empty or policy.magnitude > 1e-3:  # not of rejected and certain tokens alone
            return case


def _masked_terms(rng: random.Random) -> tuple[Term, ...]:
    on = rng.choice([None, None, "rl"])
    estimator = rng.choice(["k1", "k2", "k3", "k3_weighted"])
    terms = [Term("ref", "kl", rng.uniform(0.1, 2.0), on=on, estimator=estimator)]
    terms += [Term("h", "entropy", rng.uniform(0.1, 2.0), on=rng.choice([None, "rl", on or "ref"]))]
    return (*terms, *([Term("echo", rng.choice(WHOLE), 0.3)] if rng.random() < 0.6 else []))


def _with_sets(asked: Settings, sample: Sample, rng: random.Random, keeps_entropy: bool) -> Sample:
    """The sample with sets that hold its token where a term reads them, none where one reads the whole vocabulary,
    else any."""
    if sample.term != "rl" and rng.random() < 0.3:
        return sample
    pairs = [("kl", "rl")] if asked.has_policy else []
    pairs += [(term.kind, term.tokens) for term in asked.terms]
    read, whole = (
        {k for kind, tokens in pairs if kind in kinds for k in rows_of(sample, tokens) or ()}
        for kinds in (("kl", "entropy") if keeps_entropy else ("kl",), WHOLE)
    )
    sets = []
    for k, token in enumerate(sample.tokens[-sample.response_length :].tolist()):
        own, others = step_cases.random_set(rng, token)
        is_checked = sample.term == "rl" and bool(sample.loss_mask[k])
        sets.append((own if k not in whole else []) if k in read else others if is_checked else [99, 99, -7])
    return step_cases.with_certain_tokens(
        replace(sample, sampling_mask=PAYLOADS["sampling_mask"].of(sets, sample.sample_id))
    )
