"""Independent oracle of an optimizer step: the losses of `token_oracle` with their weights, over all documents of the
step.

    L = sum_s lambda_s sum_t w^s_t loss^s_t,    w^s_t = 1 / delta^s of the token's document, where term s trains the
    token

Under `turn_mean` delta is of the token's turn. A token's own weight is a further factor on it, in every term.

The objective is the term `rl` with lambda 1; its tokens also carry the factor kappa gamma of the correction. A document
is a member of the term that it names, whose tokens are in its mask, and of those that it has a further mask for. Every
term counts its members alone. With M trained tokens of a rollout or prompt group, N_r rollouts, P prompt groups, T
trained tokens:

    sample_mean: delta = N_r M_rollout              constant:    delta = N_r L
    prompt_mean: delta = P M_prompt                 token_mean:  delta = max(T, 1)
    turn_mean:   delta = N_turn M_turn, N_turn turns of the step with a token that counts
    root_length: delta = N_r sqrt(R), or max(T, 1) sqrt(R) per token, of a document's R response tokens, trained or not:
                 the tests' custom reducer

    scheduled    a unit (rollout or prompt group) of a member without a trained token counts
    live, kept   over the tokens of rl, only units with a trained token count; what the correction rejects is left out
                 under kept, by the objective alone. Terms over other tokens count as under scheduled.

    varied       over the tokens of rl, no document counts or has a weight whose prompt group has at least two rollouts
                 with a reward, all equal

With `weight_denominator` weights, M and T are sums of the tokens' weights. Where M is 0, delta is infinite: under
kept, the rejected tokens of such a unit have no weight in a term with the objective's aggregation. With
`sequence_level` turn, a sequence-level loss, ratio or rejection is over the trained tokens of one turn instead of those
of the document.

Trap: a field is read only where a term that reads it trains the token; everything else may be NaN.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import token_oracle
from token_oracle import DivergenceRow, Tokens

POLICY = "rl"
PENALTY = "kl_cov"  # kind of term: |log r| of the penalised tokens, with the weights of the objective
USUAL_BOUNDS = {  # of a correction where Settings leaves a bound out; opsm has none for its threshold
    "none": (None, None),
    "tis": (0.0, 2.0),
    "seq_tis": (0.0, 2.0),
    "icepop": (0.5, 5.0),
    "kpop": (None, 0.1),
    "mis": (0.0, 3.0),
    "seq_mask_tis": (0.999, 1.002),
    "opsm": (None, None),
}


@dataclass
class Document:
    """One sample: R response positions and the logit rows that predict them; fields may be None where nothing reads
    them.

    Args:
        logits: [R, V]; row t predicts targets[t].
        targets: [R] in [0, V).
        mask: [R] bool, the trained tokens of the sample's term.
        term: the term that its mask belongs to.
        masks: [R] bool of further terms, by name.
        old, advantages, rollout, ref, teacher: [R], log-probabilities in nats.
        topk: [R] the teacher's top-k tokens of each: ids and log-probabilities.
        whole: [R, V], the teacher's logits.
        sets: [R] the tokens that each could be sampled from, an empty list for all of them; None: all of them
            everywhere.
        keeps_entropy: whether entropies are over those too.
        kept: [R] bool, what a choice of the whole step leaves in the objective; None: everything.
        penalised: [R] bool, tokens of a term of kind PENALTY.
        token_weights: [R] >= 0, factors on the tokens' weights in every term; None: 1.
        turns: lengths of the response's turns, one after another; None: one turn.
        versions: [R] optimizer steps that the weights which sampled each token had seen; None: not known.
        rollout_id: shared by the samples of one trajectory; None: the sample is its own trajectory.
        prompt_id: shared by the samples of one prompt group; needed by prompt_mean.
    """

    logits: np.ndarray
    targets: np.ndarray
    mask: np.ndarray
    old: np.ndarray | None = None
    advantages: np.ndarray | None = None
    rollout: np.ndarray | None = None
    ref: np.ndarray | None = None
    teacher: np.ndarray | None = None
    topk: Sequence[tuple[Sequence[int], Sequence[float]]] | None = None
    whole: np.ndarray | None = None
    term: str = POLICY
    masks: Mapping[str, np.ndarray] = field(default_factory=dict)
    sets: Sequence[Sequence[int]] | None = None
    keeps_entropy: bool = False
    kept: np.ndarray | None = None
    penalised: np.ndarray | None = None
    token_weights: np.ndarray | None = None
    turns: Sequence[int] | None = None
    versions: Sequence[int] | None = None
    rollout_id: object = None
    prompt_id: object = None
    reward: float | None = None

    def rows(self, tokens: str) -> np.ndarray | None:
        """[k] positions that the term of this name trains, None where the document is not a member."""
        mask = self.mask if tokens == self.term else self.masks.get(tokens)
        return None if mask is None else np.flatnonzero(mask)

    def factors(self, rows: np.ndarray) -> np.ndarray:
        """[k] what the tokens of these rows weigh."""
        return np.ones(len(rows)) if self.token_weights is None else np.asarray(self.token_weights)[rows]

    def turn_of(self, rows: np.ndarray) -> np.ndarray:
        """[k] the turn of each of these rows, from 0 on."""
        ends = np.cumsum([len(self.mask)] if self.turns is None else self.turns)
        return np.searchsorted(ends, rows, side="right")

    def tokens(self, rows: np.ndarray, temperature: float, *names: str, is_sampled: bool = True) -> Tokens:
        """The tokens of these rows with the named fields; `is_sampled`: over what could be sampled."""
        logits = np.array(self.logits[rows], dtype=np.float64)
        for line, row in zip(logits, rows, strict=True) if is_sampled and self.sets is not None else ():
            if allowed := set(self.sets[row]):
                line[[j for j in range(len(line)) if j not in allowed]] = -math.inf
        picked = {name: values[rows] for name in names if (values := getattr(self, name)) is not None}
        return token_oracle.tokens_of(logits, np.asarray(self.targets)[rows], temperature, **picked)


@dataclass
class Term:
    """A further loss, as it is asked for. None: the objective's aggregation with its divisor, and the kind's
    estimator."""

    name: str
    kind: str  # ce, opd, kl, entropy, kl_cov, topk_…, full_…
    weight: float = 1.0
    aggregation: str | None = None  # or "policy", the weights of the objective's tokens
    divisor: float | None = None
    on: str | None = None
    estimator: str | None = None
    share: float | None = None  # beta or alpha of a teacher's divergence; None: the usual one

    @property
    def tokens(self) -> str:
        return self.on or self.name


@dataclass
class Settings:
    """What a step computes. A field that the chosen objective or correction does not name is not read."""

    objective: str = "grpo"
    numbers: Mapping[str, float] = field(default_factory=lambda: {"clip_eps_low": 0.2, "clip_eps_high": 0.2})
    aggregation: str = "sample_mean"
    divisor: float | None = None  # L of constant
    temperature: float = 1.0
    softcap: float | None = None  # of the logits, before the temperature
    teacher_softcap: float | None = None  # of the logits of a teacher over the whole vocabulary; 0: none
    correction: str = "none"
    correction_low: float | None = None
    correction_high: float | None = None  # opsm: the threshold, nats per token
    penalty_coef: float = 0.0
    denominator: str = "scheduled"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    aux_aggregation: str = "default"  # of the KL and entropy terms
    per_token: bool = False  # Megatron's calculate_per_token_loss
    grad_divisor: float = 1.0
    terms: Sequence[Term] = ()  # in addition to the KL and entropy terms
    has_policy: bool = True
    tail_floor: float = 1e-6
    weight_denominator: str = "tokens"  # or "weights"
    sequence_level: str = "sample"  # or "turn"
    weight_version: int | None = None  # optimizer steps that the trainer's weights have seen

    @property
    def bounds(self) -> tuple[float | None, float | None]:
        """Lower and upper bound of the correction."""
        low, high = USUAL_BOUNDS[self.correction]
        return (
            low if self.correction_low is None else self.correction_low,
            high if self.correction_high is None else self.correction_high,
        )

    @property
    def step_mean(self) -> str:
        """The aggregation of a term that has none."""
        return "token_mean" if self.per_token else "sample_mean"

    @property
    def all_terms(self) -> list[Term]:
        """Every further loss of weight > 0 with its aggregation and estimator."""
        shorthands = "policy" if self.aux_aggregation == "policy" else self.step_mean
        found = [
            Term("kl", "kl", self.kl_coef, shorthands, on=POLICY, estimator=self.kl_estimator),
            Term("entropy", "entropy", self.entropy_coef, shorthands, on=POLICY),
            Term(PENALTY, PENALTY, self.penalty_coef, "policy", on=POLICY),
        ]
        has_reducer = self.aggregation == "root_length"
        usual = {
            "aggregation": self.step_mean if has_reducer else self.aggregation,
            "divisor": None if has_reducer else self.divisor,
        }
        for term in self.terms:
            own = usual if term.aggregation is None else {}
            own = own | ({"estimator": "k3_weighted"} if term.kind == "opd" and term.estimator is None else {})
            own = own | ({"share": token_oracle.DEFAULT_SHARES.get(term.kind)} if term.share is None else {})
            found.append(replace(term, **own))
        return [term for term in found if term.weight > 0]


@dataclass
class TermResult:
    """What one term adds. A list has an entry for each document, None where the document has no token of the term."""

    tokens: str
    denominators: list[
        float | np.ndarray | None
    ]  # None: no member, or no token of it that weighs anything; [k] by turn
    values: list[np.ndarray | None]  # [k] loss of each token of the term; with its factor, of the objective
    sizes: list[np.ndarray | None]  # [k] magnitude of what the value is computed from
    factors: list[np.ndarray | None]  # [k] kappa gamma, of the objective
    slopes: list[np.ndarray | None]  # [k] factor times g, of the objective
    token_weights: list[np.ndarray | None]  # [k] the tokens' own factors
    rows: list[DivergenceRow] = field(default_factory=list)  # of the tokens of a teacher's divergence
    num_rollouts: int = 0  # of its members

    @property
    def weights(self) -> list[np.ndarray | float]:
        """[k] w of each document's tokens."""
        pairs = zip(self.token_weights, self.denominators, strict=True)
        return [0.0 if delta is None or own is None else own / delta for own, delta in pairs]

    def _sum(self, parts: Sequence[np.ndarray | None]) -> float:
        pairs = zip(self.weights, parts, strict=True)
        return math.fsum(product for w, part in pairs if part is not None for product in w * part)

    @property
    def weight(self) -> float:
        """Sum of w."""
        return self._sum([None if part is None else np.ones(len(part)) for part in self.values])

    @property
    def loss(self) -> float:
        """Sum of w loss, before lambda."""
        return self._sum(self.values)

    @property
    def magnitude(self) -> float:
        """Sum of w times the sizes, on whose scale the loss is compared."""
        return self._sum(self.sizes)

    @property
    def num_tokens(self) -> int:
        return sum(len(part) for part in self.values if part is not None)

    @property
    def mean(self) -> float:
        """Of the loss over its tokens; NaN without one."""
        return _mean(self.values)

    @property
    def mean_magnitude(self) -> float:
        """Of the sizes over its tokens."""
        return _mean(self.sizes)


def _mean(parts: Sequence[np.ndarray | None]) -> float:
    flat = [value for part in parts if part is not None for value in part]
    return math.fsum(flat) / len(flat) if flat else math.nan


@dataclass
class StepResult:
    terms: dict[str, TermResult]  # by name, without those of weight 0; the objective is `rl`
    loss: float  # of all terms, times their weights
    magnitude: float
    gradients: list[np.ndarray]  # [R, V] of each document, d loss / d logits / grad_divisor

    @property
    def pg_loss(self) -> float:
        return self.terms[POLICY].loss

    @property
    def kl_loss(self) -> float:
        return self.terms["kl"].loss

    @property
    def entropy_loss(self) -> float:
        """Sum of w H."""
        return -self.terms["entropy"].loss


# ---- Counting ----


def denominators(
    documents: Sequence[Document],
    counts: Sequence[int | None],
    aggregation: str,
    divisor: float | None = None,
    *,
    live_only: bool = False,
    amounts: Sequence[float | None] | None = None,
) -> list[float | None]:
    """delta of every member: `counts` are its tokens that count, None for a document that is not a member; `amounts`
    are what they add to M and T, by default the counts.

    Raises:
        ValueError: prompt_mean, and a member has no prompt_id.
    """
    totals: dict[object, int] = {}
    parts: dict[object, list[float]] = {}
    keys: list[object] = []
    for i, document in enumerate(documents):
        by_prompt = aggregation == "prompt_mean" and counts[i] is not None
        if by_prompt and document.prompt_id is None:
            raise ValueError("prompt_mean needs a prompt_id for every member; one has None.")
        keys.append(("prompt", document.prompt_id) if by_prompt else rollout_of(documents, i))
        if counts[i] is not None:
            totals[keys[i]] = totals.get(keys[i], 0) + counts[i]
            parts.setdefault(keys[i], []).append((counts if amounts is None else amounts)[i])
    units = sum(1 for total in totals.values() if total > 0 or not live_only)
    sums = {key: math.fsum(own) or math.inf for key, own in parts.items()}
    whole = math.fsum(value for own in parts.values() for value in own) or 1.0
    found: list[float | None] = []
    for key, count in zip(keys, counts, strict=True):
        if count is None:
            found.append(None)
        elif aggregation == "token_mean":  # has no units
            found.append(whole)
        elif live_only and totals[key] == 0:
            found.append(None)
        elif aggregation == "constant":
            found.append(units * divisor if sums[key] < math.inf else math.inf)
        else:
            found.append(units * sums[key])
    return found


def turn_denominators(
    documents: Sequence[Document],
    trained: Sequence[np.ndarray | None],
    counted: Sequence[np.ndarray | None],
    *,
    by_weight: bool,
) -> list[np.ndarray | None]:
    """[k] delta of each trained token; inf where no token of its turn counts. Rows of every document, None where it is
    not a member."""
    sums: dict[tuple[int, int], list[float]] = {}
    for i, rows in enumerate(counted):
        if rows is not None:
            own = documents[i].factors(rows) if by_weight else np.ones(len(rows))
            for turn, value in zip(documents[i].turn_of(rows).tolist(), own.tolist(), strict=True):
                sums.setdefault((i, turn), []).append(value)
    amounts = {key: math.fsum(own) or math.inf for key, own in sums.items()}
    found: list[np.ndarray | None] = []
    for i, rows in enumerate(trained):
        turns = None if rows is None else documents[i].turn_of(rows).tolist()
        known = None if turns is None else [len(sums) * amounts.get((i, turn), math.inf) for turn in turns]
        found.append(None if known is None else np.array(known, dtype=np.float64))
    return found


def rollout_of(documents: Sequence[Document], i: int) -> object:
    """What the documents of one trajectory share."""
    known = documents[i].rollout_id
    return ("alone", i) if known is None else ("rollout", known)


def of_rows(
    documents: Sequence[Document],
    settings: Settings,
    rows: Sequence[np.ndarray | None],
    aggregation: str,
    divisor: float | None,
    *,
    live_only: bool,
    trained: Sequence[np.ndarray | None],
) -> list[float | np.ndarray | None]:
    """delta where these rows of every document count; `trained`: the rows that get a weight."""
    by_weight = settings.weight_denominator == "weights"
    if aggregation == "turn_mean":
        return turn_denominators(documents, trained, rows, by_weight=by_weight)
    counts = [None if own is None else len(own) for own in rows]
    pairs = zip(documents, rows, strict=True)
    amounts = [None if own is None else math.fsum(document.factors(own)) for document, own in pairs]
    amounts = amounts if by_weight else None
    return denominators(documents, counts, aggregation, divisor, live_only=live_only, amounts=amounts)


def varied_rows(
    documents: Sequence[Document], settings: Settings, rows: Sequence[np.ndarray | None]
) -> list[np.ndarray | None]:
    """The rows without those of documents whose prompt group has no variance, where that is asked for."""
    groups: dict[object, dict[object, float]] = {}
    for i, document in enumerate(documents):
        if document.reward is not None and document.rows(POLICY) is not None:
            groups.setdefault(document.prompt_id, {})[rollout_of(documents, i)] = document.reward
    flat = {prompt for prompt, own in groups.items() if len(own) > 1 and len(set(own.values())) == 1}
    flat = flat if settings.denominator == "varied" else set()
    return [None if document.prompt_id in flat else own for document, own in zip(documents, rows, strict=True)]


def policy_denominators(
    documents: Sequence[Document], settings: Settings, kept: Sequence[np.ndarray | None]
) -> list[float | np.ndarray | None]:
    """Those of the objective; `kept`: the rows of each member that the correction leaves."""
    trained = [document.rows(POLICY) for document in documents]
    if settings.aggregation != "root_length":
        counted = varied_rows(documents, settings, kept if settings.denominator == "kept" else trained)
        live_only, named = settings.denominator in ("live", "kept"), (settings.aggregation, settings.divisor)
        return of_rows(documents, settings, counted, *named, live_only=live_only, trained=trained)
    by = "token_mean" if settings.per_token else "constant"
    counts = [None if own is None else len(own) for own in trained]
    step_means = denominators(documents, counts, by, 1.0, live_only=settings.denominator == "live")
    roots = [math.sqrt(len(document.mask)) for document in documents]
    return [None if mean is None else mean * root for mean, root in zip(step_means, roots, strict=True)]


def term_denominators(
    documents: Sequence[Document], settings: Settings, term: Term, of_policy: Sequence[float | np.ndarray | None]
) -> list[float | np.ndarray | None]:
    if term.aggregation == "policy":
        return list(of_policy)
    live_only = term.tokens == POLICY and settings.denominator in ("live", "kept")
    rows, named = [document.rows(term.tokens) for document in documents], (term.aggregation, term.divisor)
    counted = varied_rows(documents, settings, rows) if term.tokens == POLICY else rows
    return of_rows(documents, settings, counted, *named, live_only=live_only, trained=rows)


# ---- Losses of the tokens of a document: tokens, values, g, coefficient of the negative entropy, sizes ----


def divergence(document: Document, rows: np.ndarray, term: Term, temperature: float) -> tuple:
    """A KL estimator against the teacher or the reference.

    Near 0 it is a difference of log-probabilities, times the ratio where that multiplies it: its size.

    Raises:
        ValueError: the document has no log-probabilities to compare with.
    """
    against = document.teacher if term.kind == "opd" else document.ref
    if against is None:
        raise ValueError(f"{term.kind} needs reference log-probabilities; a document has none.")
    is_weighted = term.estimator.endswith("_weighted")
    tokens = document.tokens(rows, temperature, *(["old"] if is_weighted else []), is_sampled=term.kind == "kl")
    values, slopes = token_oracle.kl_of(tokens, against[rows], term.estimator)
    sizes = np.abs(values) + np.abs(tokens.new) * (tokens.ratio if is_weighted else 1.0)
    return tokens, values, slopes, 0.0, sizes


def cross_entropy(document: Document, rows: np.ndarray, term: Term, temperature: float) -> tuple:
    tokens = document.tokens(rows, temperature, is_sampled=False)
    return tokens, -tokens.new, -np.ones(len(rows)), 0.0, np.abs(tokens.new)


def negative_entropy(document: Document, rows: np.ndarray, term: Term, temperature: float) -> tuple:
    tokens = document.tokens(rows, temperature, is_sampled=document.keeps_entropy)
    return tokens, -tokens.entropy, np.zeros(len(rows)), 1.0, np.abs(tokens.entropy)


def penalty(document: Document, rows: np.ndarray, term: Term, temperature: float) -> tuple:
    tokens = document.tokens(rows, temperature, "old")
    values = np.where(document.penalised[rows], np.abs(tokens.log_ratio), 0.0)
    return tokens, values, document.penalised[rows] * np.sign(tokens.log_ratio), 0.0, values


KINDS: dict[str, Callable] = {
    "ce": cross_entropy,
    "opd": divergence,
    "kl": divergence,
    "entropy": negative_entropy,
    PENALTY: penalty,
}


def teacher_row(document: Document, row: int, term: Term, settings: Settings) -> DivergenceRow:
    """The divergence of one token from the teacher's distribution."""
    options = {"temperature": settings.temperature, "share": term.share}
    if term.kind.startswith("full_"):
        teacher, cap = document.whole[row], settings.teacher_softcap
        teacher = token_oracle.softcapped(teacher, cap)[0] if cap else teacher
        return token_oracle.full_divergence(term.kind, document.logits[row], teacher, **options)
    options["floor"] = settings.tail_floor
    return token_oracle.topk_divergence(term.kind, document.logits[row], *document.topk[row], **options)


# ---- The step ----


def run(documents: Sequence[Document], settings: Settings) -> StepResult:
    """Loss, gradients and what every term adds, of one optimizer step: all documents of all ranks and micro-batches.

    Raises:
        ValueError: no loss of the step has a token, a trained value is not finite, or a field is missing.
    """
    if settings.softcap is not None:
        return _of_capped(documents, settings)
    gradients = [np.zeros(np.shape(document.logits)) for document in documents]
    terms, weights = {}, {}
    of_policy: list[float | None] = [None] * len(documents)
    if settings.has_policy:
        terms[POLICY], weights[POLICY] = _policy(documents, settings, gradients), 1.0
        of_policy = terms[POLICY].denominators
    for term in settings.all_terms:
        terms[term.name], weights[term.name] = _term(documents, settings, term, of_policy, gradients), term.weight
    if not any(result.num_tokens for result in terms.values()):
        raise ValueError("the step has no trained token, so no mean is defined. Give at least one.")
    return StepResult(
        terms=terms,
        loss=math.fsum(weights[name] * result.loss for name, result in terms.items()),
        magnitude=math.fsum(weights[name] * result.magnitude for name, result in terms.items()),
        gradients=[gradient / settings.grad_divisor for gradient in gradients],
    )


def capped(documents: Sequence[Document], cap: float | None) -> list[Document]:
    """The documents with capped logits."""
    if cap is None:
        return list(documents)
    return [replace(each, logits=token_oracle.softcapped(np.asarray(each.logits), cap)[0]) for each in documents]


def _of_capped(documents: Sequence[Document], settings: Settings) -> StepResult:
    """Of capped logits, with the gradient by the logits before the cap."""
    found = run(capped(documents, settings.softcap), replace(settings, softcap=None))
    slopes = [token_oracle.softcapped(np.asarray(each.logits), settings.softcap)[1] for each in documents]
    pairs = zip(found.gradients, slopes, strict=True)
    return replace(found, gradients=[np.where(gradient == 0, 0.0, gradient * s) for gradient, s in pairs])


def _policy(documents: Sequence[Document], settings: Settings, gradients: Sequence[np.ndarray]) -> TermResult:
    """The objective's part; its gradient is added."""
    found, kept = [], []
    for document in documents:
        rows = document.rows(POLICY)
        own = (
            []
            if rows is None
            else [_policy_sequence(document, part, settings) for part in sequences(document, settings)]
        )
        found.append(own)
        kept.append(None if rows is None else np.concatenate([rows[:0], *(each.rows[each.kept] for each in own)]))
    result = _result(documents, POLICY, policy_denominators(documents, settings, kept))
    is_shared = settings.objective in token_oracle.ONE_LOSS_PER_DOCUMENT
    for i, own in enumerate(found):
        if not own:
            continue
        factors, values, slopes = (
            np.concatenate([getattr(each, name) for each in own]) for name in ("factors", "values", "slopes")
        )
        result.values[i], result.sizes[i] = factors * values, np.abs(factors * values)
        result.factors[i], result.slopes[i] = factors, factors * slopes
        coefficients = np.split(result.weights[i] * factors, np.cumsum([len(each.rows) for each in own])[:-1])
        for each, c in zip(own, coefficients, strict=True):
            share = token_oracle.sequence_share(c) if is_shared else c
            gradients[i][each.rows] += token_oracle.logit_gradient(
                each.tokens, share * each.slopes, 0.0, settings.temperature
            )
    return result


def sequences(document: Document, settings: Settings) -> list[np.ndarray]:
    """The objective's rows of a document, those of each turn apart where turns are the sequences; none is empty."""
    rows = document.rows(POLICY)
    if settings.sequence_level == "sample":
        return [rows] if len(rows) else []
    turns = document.turn_of(rows)
    return [rows[turns == turn] for turn in np.unique(turns)]


@dataclass
class _Sequence:
    """[k] each, of the objective's tokens of one sequence."""

    rows: np.ndarray
    tokens: Tokens
    factors: np.ndarray  # kappa gamma
    kept: np.ndarray  # kappa
    values: np.ndarray
    slopes: np.ndarray


def _policy_sequence(document: Document, rows: np.ndarray, settings: Settings) -> _Sequence:
    tokens = document.tokens(rows, settings.temperature, "old", "advantages", "rollout")
    gamma, kappa = token_oracle.correction(settings.correction, tokens, *settings.bounds)
    kappa = kappa if document.kept is None else document.kept[rows]
    # where, not a product: a rejected token is absent, with any weight
    values, slopes = token_oracle.loss_of(settings.objective, tokens, settings.numbers)
    return _Sequence(rows, tokens, np.where(kappa, gamma, 0.0), kappa, values, slopes)


def _term(
    documents: Sequence[Document],
    settings: Settings,
    term: Term,
    of_policy: Sequence[float | None],
    gradients: Sequence[np.ndarray],
) -> TermResult:
    """The part of a further loss; lambda times its gradient is added."""
    result = _result(documents, term.tokens, term_denominators(documents, settings, term, of_policy))
    for i, document in enumerate(documents):
        rows = document.rows(term.tokens)
        if rows is None or not len(rows):
            continue
        w = term.weight * np.broadcast_to(result.weights[i], len(rows))
        if term.kind in KINDS:
            tokens, values, slopes, bonus, sizes = KINDS[term.kind](document, rows, term, settings.temperature)
            gradients[i][rows] += token_oracle.logit_gradient(tokens, w * slopes, w * bonus, settings.temperature)
        else:
            own = [teacher_row(document, row, term, settings) for row in rows]
            values, sizes = np.array([row.value for row in own]), np.array([row.magnitude for row in own])
            gradients[i][rows] += np.array([c * row.gradient for c, row in zip(w, own, strict=True)])
            result.rows.extend(own)
        result.values[i], result.sizes[i] = values, sizes
    return result


def _result(documents: Sequence[Document], tokens: str, deltas: list[float | None]) -> TermResult:
    nothing = [[None] * len(documents) for _ in range(4)]
    members = {rollout_of(documents, i) for i, document in enumerate(documents) if document.rows(tokens) is not None}
    found = [document.rows(tokens) for document in documents]
    own = [None if rows is None else document.factors(rows) for document, rows in zip(documents, found, strict=True)]
    return TermResult(tokens, deltas, *nothing, token_weights=own, num_rollouts=len(members))
