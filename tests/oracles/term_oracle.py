"""Independent oracle of a step with loss terms: loops in float64 over samples and tokens, closed-form gradients, no autograd.

    L = sum_s lambda_s sum_t w^s_t loss^s_t,    w^s_t = 1 / delta^s of the token's sample, where s trains the token

The objective is the loss term `rl` with lambda 1; its tokens also carry the factor of the correction. A sample is a member of
the loss term that it names, whose tokens are in its mask, and of those that it has a further mask for. Every loss term counts its
members alone, by the aggregations of `objective_oracle.document_weights`: a unit (rollout, prompt group) of a member without a
trained token counts, that of a sample which is no member does not.

    scheduled    every unit of its members counts
    live, kept   over the tokens of rl, only units with a trained token count; what the correction rejects is left out under
                 kept, by the objective alone. Loss terms over other tokens count as under scheduled.

Trap: a field is read only where a loss term that reads it trains the token; everything else may be NaN.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import objective_oracle as oracle
import teacher_oracle
import topk_oracle

POLICY = "rl"


@dataclass
class TermDocument:
    """One sample: R response positions and the logit rows that predict them; fields may be None where nothing reads them.

    Args:
        logits: [R, V]; row t predicts targets[t].
        targets: [R] in [0, V).
        loss term: whose tokens `mask` [R] bool holds.
        masks: [R] bool of further loss terms, by name.
        old, advantages, rollout, ref, teacher: [R], log-probabilities in nats.
        topk: [R] the teacher's likeliest tokens of each: ids and log-probabilities.
        whole: [R, V], the teacher's logits.
        sets: [R] the tokens that each could be sampled from, an empty list for all of them; None: all of them everywhere.
        keeps_entropy: whether entropies are over those too.
        rollout_id, prompt_id: as in `objective_oracle.Document`.
    """

    logits: np.ndarray
    targets: np.ndarray
    term: str
    mask: np.ndarray
    masks: dict[str, np.ndarray] = field(default_factory=dict)
    old: np.ndarray | None = None
    advantages: np.ndarray | None = None
    rollout: np.ndarray | None = None
    ref: np.ndarray | None = None
    teacher: np.ndarray | None = None
    topk: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None
    whole: np.ndarray | None = None
    sets: Sequence[Sequence[int]] | None = None
    keeps_entropy: bool = False
    rollout_id: object = None
    prompt_id: object = None

    def rows(self, tokens: str) -> list[int] | None:
        """Positions that a loss term trains, by whose tokens they are; None where the sample is no member."""
        mask = self.mask if tokens == self.term else self.masks.get(tokens)
        return None if mask is None else [t for t in range(len(mask)) if mask[t]]


@dataclass
class Term:
    """A further loss, as it is asked for: None is the objective's aggregation with its divisor, and the kind's estimator."""

    name: str
    kind: str  # ce, opd, kl, entropy, topk_…, full_…
    weight: float = 1.0
    aggregation: str | None = None  # or "policy", the weights of the objective's tokens
    divisor: float | None = None
    on: str | None = None
    estimator: str | None = None
    share: float | None = None  # beta or alpha of a teacher's divergence; None: 0.5 of jsd, 0.1 of the skewed

    @property
    def tokens(self) -> str:
        return self.on or self.name


@dataclass
class TermStep:
    """One optimizer step: `settings` are the objective's and the shorthands' (KL and entropy terms)."""

    documents: Sequence[TermDocument]
    settings: oracle.Settings
    terms: Sequence[Term] = ()
    has_policy: bool = True
    tail_floor: float = 1e-6
    has_root_length: bool = False  # the objective by a reducer: a sample's sum over the root of its response length


@dataclass
class TermResult:
    """What one loss term adds: lists have one entry per document."""

    denominators: list[float | None]  # None: no member, or no token of it that weighs anything
    weight: float  # sum of w
    loss: float  # sum of w loss, before lambda
    mean: float  # of loss, over its tokens; NaN without one
    mean_magnitude: float  # the mean of what `magnitude` sums, without w
    magnitude: float  # sum of |w| times what the loss is computed from: itself and, of a divergence, log pi
    num_tokens: int
    num_rollouts: int  # of its members
    topk: list[topk_oracle.Row] = field(default_factory=list)  # of its tokens, of a top-k divergence


@dataclass
class StepResult:
    loss: float
    magnitude: float  # of the loss terms' magnitudes times lambda
    terms: dict[str, TermResult]  # by name; the objective and the shorthands too, without those of weight 0
    gradients: list[np.ndarray]  # [R, V], d loss / d logits / grad_divisor


DEFAULT_SHARES = {"topk_jsd": 0.5, "full_jsd": 0.5, "topk_skew_forward": 0.1, "topk_skew_reverse": 0.1}


def all_terms(step: TermStep) -> list[Term]:
    """Every further loss of weight > 0 with its aggregation and estimator; the shorthands are loss terms over rl's tokens."""
    settings = step.settings
    step_mean = "token_mean" if settings.per_token else "sample_mean"
    of_shorthands = "policy" if settings.aux_aggregation == "policy" else step_mean
    of_objective = (step_mean, None) if step.has_root_length else (settings.aggregation, settings.divisor)
    terms = [
        Term("kl", "kl", settings.kl_coef, of_shorthands, on=POLICY, estimator=settings.kl_estimator),
        Term("entropy", "entropy", settings.entropy_coef, of_shorthands, on=POLICY),
    ]
    for term in step.terms:
        if term.aggregation is None:
            term = replace(term, aggregation=of_objective[0], divisor=of_objective[1])
        if term.share is None and term.kind in DEFAULT_SHARES:
            term = replace(term, share=DEFAULT_SHARES[term.kind])
        if term.kind == "opd" and term.estimator is None:
            term = replace(term, estimator="k3_weighted")
        terms.append(term)
    return [term for term in terms if term.weight > 0]


# ---- Counting ----


def rollout_of(step: TermStep, i: int) -> object:
    document = step.documents[i]
    return ("alone", i) if document.rollout_id is None else ("rollout", document.rollout_id)


def denominators_of(
    step: TermStep, counts: Sequence[int | None], aggregation: str, divisor: float | None, live_only: bool
) -> list[float | None]:
    """delta of every member: `counts` are the tokens that count, None for a sample that is no member."""
    totals: dict[object, int] = {}
    keys: list[object] = []
    for i, document in enumerate(step.documents):
        by_prompt = aggregation == "prompt_mean" and counts[i] is not None
        if by_prompt and document.prompt_id is None:
            raise ValueError("prompt_mean needs a prompt_id for every member; one has None.")
        keys.append(("prompt", document.prompt_id) if by_prompt else rollout_of(step, i))
        if counts[i] is not None:
            totals[keys[i]] = totals.get(keys[i], 0) + counts[i]
    units = sum(1 for total in totals.values() if total > 0 or not live_only)
    tokens = sum(totals.values())
    found: list[float | None] = []
    for key, count in zip(keys, counts, strict=True):
        if count is None:
            found.append(None)
        elif aggregation == "token_mean":  # has no units
            found.append(float(max(tokens, 1)))
        elif live_only and totals[key] == 0:
            found.append(None)
        elif aggregation == "constant":
            found.append(units * divisor)
        else:
            found.append(float(units * max(totals[key], 1)))
    return found


def policy_denominators(step: TermStep, kept: Sequence[int | None]) -> list[float | None]:
    """Those of the objective; `kept`: tokens of each member that the correction leaves."""
    settings = step.settings
    rows = [document.rows(POLICY) for document in step.documents]
    counts = [None if r is None else len(r) for r in rows]
    if not step.has_root_length:
        counted = kept if settings.denominator == "kept" else counts
        live_only = settings.denominator in ("live", "kept")
        return denominators_of(step, counted, settings.aggregation, settings.divisor, live_only)
    by = "token_mean" if settings.per_token else "constant"
    step_means = denominators_of(step, counts, by, 1.0, settings.denominator == "live")
    lengths = [math.sqrt(len(document.mask)) for document in step.documents]
    return [None if mean is None else mean * length for mean, length in zip(step_means, lengths, strict=True)]


def term_denominators(step: TermStep, term: Term, of_policy: Sequence[float | None]) -> list[float | None]:
    if term.aggregation == "policy":
        return list(of_policy)
    rows = [document.rows(term.tokens) for document in step.documents]
    counts = [None if r is None else len(r) for r in rows]
    live_only = term.tokens == POLICY and step.settings.denominator in ("live", "kept")
    return denominators_of(step, counts, term.aggregation, term.divisor, live_only)


# ---- Losses of tokens: value and d value / d log pi; the entropy has its own gradient ----


def sampled_from(document: TermDocument, row: int) -> np.ndarray:
    """The logits of a row, -inf at what could not be sampled in its place."""
    allowed = [] if document.sets is None else document.sets[row]
    return np.array([z if not allowed or j in allowed else -math.inf for j, z in enumerate(document.logits[row])])


def tokens_at(
    document: TermDocument, rows: Sequence[int], reads: Sequence[str], temperature: float, *, is_sampled: bool
) -> oracle.Tokens:
    """The tokens of these rows, with the fields that are read; the others are NaN, so that reading one would be seen.

    `is_sampled`: their distributions are over what could be sampled.
    """
    picked = {}
    for name in ("old", "advantages", "rollout", "ref"):
        values = getattr(document, name)
        is_absent = name not in reads or values is None
        nothing = None if name in ("rollout", "ref") else np.full(len(rows), math.nan)
        picked[name] = nothing if is_absent else np.array([values[t] for t in rows], dtype=np.float64)
    row_of = sampled_from if is_sampled else lambda document, t: document.logits[t]
    logits = np.array([row_of(document, t) for t in rows], dtype=np.float64)
    log_probabilities = oracle.log_softmax(logits, temperature)
    targets = np.array([document.targets[t] for t in rows])
    new = np.array([line[y] for line, y in zip(log_probabilities, targets, strict=True)])
    return oracle.Tokens(log_probabilities=log_probabilities, targets=targets, new=new, **picked)


def divergence(document: TermDocument, rows, term: Term, temperature: float):
    """A KL estimator against the teacher or the reference."""
    against = document.teacher if term.kind == "opd" else document.ref
    is_weighted = term.estimator.endswith("_weighted")
    reads = ("old",) if is_weighted else ()
    tokens = tokens_at(document, rows, reads, temperature, is_sampled=term.kind == "kl")
    gaps = tokens.new - np.array([against[t] for t in rows], dtype=np.float64)
    ratio = tokens.ratio if is_weighted else np.full(len(rows), math.nan)
    value, slope = oracle.KL_ESTIMATORS[term.estimator](gaps, ratio)
    return tokens, value, slope * tokens.moves if is_weighted else slope, 0.0


def rounding_scale(tokens: oracle.Tokens, term: Term) -> np.ndarray | float:
    """What a divergence near 0 is a difference of: log-probabilities, times the ratio where that multiplies it."""
    if term.kind not in ("opd", "kl"):
        return 0.0
    return np.abs(tokens.new) * (tokens.ratio if term.estimator.endswith("_weighted") else 1.0)


def cross_entropy(document: TermDocument, rows, term: Term, temperature: float):
    tokens = tokens_at(document, rows, (), temperature, is_sampled=False)
    return tokens, -tokens.new, -np.ones(len(rows)), 0.0


def negative_entropy(document: TermDocument, rows, term: Term, temperature: float):
    tokens = tokens_at(document, rows, (), temperature, is_sampled=document.keeps_entropy)
    return tokens, -tokens.entropy, np.zeros(len(rows)), 1.0


KINDS: dict[str, Callable] = {"ce": cross_entropy, "opd": divergence, "kl": divergence, "entropy": negative_entropy}


# ---- The step ----


def result_of(step: TermStep, tokens: str, denominators, losses: Sequence[tuple | None]) -> TermResult:
    """Sums of one loss term; `losses` of a document that trains nothing are None, else values and their sizes."""
    weights, terms, sizes, plain, plain_sizes = [], [], [], [], []
    for delta, pair in zip(denominators, losses, strict=True):
        for value, size in () if pair is None else zip(*pair, strict=True):
            weights.append(0.0 if delta is None else 1.0 / delta)
            terms.append(weights[-1] * value)
            sizes.append(weights[-1] * size)
            plain.append(value)
            plain_sizes.append(size)
    members = [i for i, document in enumerate(step.documents) if document.rows(tokens) is not None]
    return TermResult(
        denominators=list(denominators),
        weight=math.fsum(weights),
        loss=math.fsum(terms),
        mean=math.fsum(plain) / len(plain) if plain else math.nan,
        mean_magnitude=math.fsum(plain_sizes) / len(plain) if plain else math.nan,
        magnitude=math.fsum(sizes),
        num_tokens=len(plain),
        num_rollouts=len({rollout_of(step, i) for i in members}),
    )


def add_rows(gradient: np.ndarray, rows: Sequence[int], values: np.ndarray) -> None:
    for row, value in zip(rows, values, strict=True):
        gradient[row] += value


def policy_parts(step: TermStep, gradients: Sequence[np.ndarray]) -> tuple[TermResult, list[float | None]]:
    """The objective's sums and denominators; its gradient is added."""
    settings, temperature = step.settings, step.settings.temperature
    found, kept = [], []
    for document in step.documents:
        rows = document.rows(POLICY)
        pair = None
        if rows:
            tokens = tokens_at(document, rows, ("old", "advantages", "rollout"), temperature, is_sampled=True)
            pair = tokens, *oracle.correction(tokens, settings)
        kept.append(None if rows is None else 0 if pair is None else int(pair[2].sum()))
        found.append(pair)
    denominators = policy_denominators(step, kept)
    losses: list[tuple | None] = []
    for i, document in enumerate(step.documents):
        if found[i] is None:
            losses.append(None)
            continue
        tokens, gamma, kappa = found[i]
        factors = np.where(kappa, gamma, 0.0)
        values, slopes = oracle.OBJECTIVES[settings.objective](tokens, settings)
        losses.append((factors * values, np.abs(factors * values)))
        w = 0.0 if denominators[i] is None else 1.0 / denominators[i]
        share = oracle.sequence_share(w * factors) if settings.objective == "gspo" else w * factors
        rows_of_logits = oracle.logit_gradient(tokens, share * slopes, 0.0, temperature)
        add_rows(gradients[i], document.rows(POLICY), rows_of_logits)
    return result_of(step, POLICY, denominators, losses), denominators


def term_parts(step: TermStep, term: Term, of_policy, gradients: Sequence[np.ndarray]) -> TermResult:
    """Sums of a further loss term; lambda times its gradient is added."""
    denominators = term_denominators(step, term, of_policy)
    losses: list[tuple | None] = []
    teachers: list[topk_oracle.Row] = []
    for i, document in enumerate(step.documents):
        rows = document.rows(term.tokens)
        if not rows:
            losses.append(None)
            continue
        if term.kind.startswith(("topk_", "full_")):
            found = (topk_rows if term.kind.startswith("topk_") else whole_rows)(document, rows, term, step)
            teachers += found if term.kind.startswith("topk_") else []
            losses.append((np.array([row.value for row in found]), np.array([row.magnitude for row in found])))
            w = 0.0 if denominators[i] is None else term.weight / denominators[i]
            add_rows(gradients[i], rows, [w * row.gradient for row in found])
            continue
        tokens, values, slopes, bonus = KINDS[term.kind](document, rows, term, step.settings.temperature)
        losses.append((values, np.abs(values) + rounding_scale(tokens, term)))
        w = 0.0 if denominators[i] is None else term.weight / denominators[i]
        add_rows(gradients[i], rows, oracle.logit_gradient(tokens, w * slopes, w * bonus, step.settings.temperature))
    return replace(result_of(step, term.tokens, denominators, losses), topk=teachers)


def topk_rows(document: TermDocument, rows, term: Term, step: TermStep) -> list[topk_oracle.Row]:
    options = {"temperature": step.settings.temperature, "share": term.share, "floor": step.tail_floor}
    return [topk_oracle.row_of(term.kind, document.logits[t], *document.topk[t], **options) for t in rows]


def whole_rows(document: TermDocument, rows, term: Term, step: TermStep) -> list[teacher_oracle.Row]:
    options = {"temperature": step.settings.temperature, "share": term.share}
    return [teacher_oracle.row_of(term.kind, document.logits[t], document.whole[t], **options) for t in rows]


def policy_means(step: TermStep) -> dict[str, float]:
    """Means over the samples with a token of the objective of their means over those tokens; of the reference where there is one."""
    rows_of_name: dict[str, list[float]] = {}
    for document in step.documents:
        if not (rows := document.rows(POLICY)):
            continue
        temperature = step.settings.temperature
        tokens = tokens_at(document, rows, ("old", "advantages", "ref"), temperature, is_sampled=True)
        of_entropy = tokens_at(document, rows, (), temperature, is_sampled=document.keeps_entropy)
        values = {
            "new_logprobs": tokens.new,
            "old_logprobs": tokens.old,
            "advantage": tokens.advantages,
            "entropy": of_entropy.entropy,
        }
        if tokens.ref is not None:
            gaps = tokens.new - tokens.ref
            values["kl_new_ref"] = np.expm1(-gaps) + gaps
        for name, each in values.items():
            rows_of_name.setdefault(name, []).append(math.fsum(each) / len(rows))
    return {name: math.fsum(means) / len(means) for name, means in rows_of_name.items()}


def run(step: TermStep) -> StepResult:
    """Loss, gradients and what every loss term reports of one optimizer step.

    Raises:
        ValueError: no loss of the step has a token.
    """
    gradients = [np.zeros(np.shape(document.logits)) for document in step.documents]
    terms: dict[str, TermResult] = {}
    of_policy: list[float | None] = [None] * len(step.documents)
    if step.has_policy:
        terms[POLICY], of_policy = policy_parts(step, gradients)
    parts = [(1.0, terms[POLICY])] if step.has_policy else []
    for term in all_terms(step):
        terms[term.name] = term_parts(step, term, of_policy, gradients)
        parts.append((term.weight, terms[term.name]))
    if not any(result.num_tokens for result in terms.values()):
        raise ValueError("the step has no trained token, so no mean is defined. Give at least one.")
    return StepResult(
        loss=math.fsum(weight * part.loss for weight, part in parts),
        magnitude=math.fsum(weight * part.magnitude for weight, part in parts),
        terms=terms,
        gradients=[gradient / step.settings.grad_divisor for gradient in gradients],
    )
