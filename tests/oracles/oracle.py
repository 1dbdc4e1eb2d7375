"""Independent oracle of the clipped policy-gradient objective, its gradient and its metrics: loops in float64.

    J = sum_t w_t * loss_t,    w_t = 1 / delta of the token's sample, on trained tokens (mask 1)

Trap: values at mask 0, and logit rows that predict no trained token, may be NaN or infinite. They are never read;
multiplying them by a mask would let them in.
"""

import math
from dataclasses import dataclass

MAX_LOG_RATIO = 20.0


@dataclass
class OracleSample:
    """One training sequence of n tokens, of which the last R are the response, over a vocabulary of V.

    Args:
        tokens: [n] in [0, V), prompt then response.
        mask: [R] 0 or 1; 1 marks a trained token.
        old_logprobs: [R] nats, of the sampling policy. Not read at mask 0.
        advantages: [R]. Not read at mask 0.
        logits: [n][V]; row k predicts tokens[k + 1]. A row that predicts no trained token is not read.
        rollout: hashable id, shared by the samples of one trajectory.
        prompt: hashable id, shared by the samples of one prompt group.
    """

    tokens: list[int]
    mask: list[int]
    old_logprobs: list[float]
    advantages: list[float]
    logits: list[list[float]]
    rollout: object
    prompt: object
    ref_logprobs: list[float] | None = None  # [R] nats, of the reference policy. Not read at mask 0.
    rollout_logprobs: list[float] | None = None  # [R] nats, of the rollout engine. Not read at mask 0.
    reward: float | None = None
    truncated: bool | None = None


@dataclass
class TrainedToken:
    """One trained token: the logit row that predicts it, its data, and its distribution under the model."""

    row: int
    target: int
    old_logprob: float
    advantage: float
    log_probabilities: list[float]
    ref_logprob: float | None = None
    rollout_logprob: float | None = None

    @property
    def new_logprob(self) -> float:
        return self.log_probabilities[self.target]

    @property
    def log_ratio(self) -> float:
        """log pi_new - log pi_old in nats, not clamped."""
        return self.new_logprob - self.old_logprob

    @property
    def is_clamped(self) -> bool:
        return abs(self.log_ratio) > MAX_LOG_RATIO

    @property
    def ratio(self) -> float:
        """pi_new / pi_old, with the log-ratio clamped to +-MAX_LOG_RATIO."""
        return math.exp(min(max(self.log_ratio, -MAX_LOG_RATIO), MAX_LOG_RATIO))

    @property
    def entropy(self) -> float:
        """-sum_v p_v log p_v in nats; a probability of 0 adds 0."""
        return -math.fsum(math.exp(x) * x for x in self.log_probabilities if math.exp(x) > 0.0)


def log_softmax(logits: list[float], temperature: float) -> list[float]:
    """Log-probabilities of softmax(logits / temperature), in nats."""
    scaled = [z / temperature for z in logits]
    largest = max(scaled)
    log_sum = math.log(math.fsum(math.exp(z - largest) for z in scaled))
    return [z - largest - log_sum for z in scaled]


def trained_tokens(sample: OracleSample, temperature: float) -> list[TrainedToken]:
    """The trained tokens of one sample, in order of position.

    Raises:
        ValueError: the first token of the sample is trained, which no logit row predicts.
    """
    num_prompt_tokens = len(sample.tokens) - len(sample.mask)
    result = []
    for t, trained in enumerate(sample.mask):
        if not trained:
            continue
        position = num_prompt_tokens + t
        if position < 1:
            raise ValueError(
                f"mask[{t}]={trained} trains position {position} of the sample, which no logit row predicts, "
                "so its loss is not defined. Put at least one token before the first trained one."
            )
        log_probabilities = log_softmax(sample.logits[position - 1], temperature)
        token = TrainedToken(
            row=position - 1,
            target=sample.tokens[position],
            old_logprob=sample.old_logprobs[t],
            advantage=sample.advantages[t],
            log_probabilities=log_probabilities,
            ref_logprob=None if sample.ref_logprobs is None else sample.ref_logprobs[t],
            rollout_logprob=None if sample.rollout_logprobs is None else sample.rollout_logprobs[t],
        )
        result.append(token)
    return result


def num_trained_tokens_by(keys: list[object], samples: list[OracleSample]) -> dict[object, int]:
    """Trained tokens of the samples under each key; a key without a trained token is present with 0."""
    counts = dict.fromkeys(keys, 0)
    for key, sample in zip(keys, samples, strict=True):
        counts[key] += sample.mask.count(1)
    return counts


def denominators(samples: list[OracleSample], aggregation: str, divisor: float | None = None) -> list[float]:
    """Denominator delta of each sample of the step: its trained tokens weigh 1 / delta.

        sample_mean: (number of rollouts) * max(trained tokens of the rollout, 1)
        prompt_mean: (number of prompts) * max(trained tokens of the prompt group, 1)
        token_mean:  max(trained tokens of the step, 1)
        constant:    (number of rollouts) * divisor
        root_length: (number of rollouts) * sqrt(response tokens of the sample, trained or not)
        root_length_per_token: max(trained tokens of the step, 1) * the same root

    The last two are not the package's: they are what `cases.root_length_reducer` must come to. Rollouts and prompt
    groups without a trained token count in the numbers of rollouts and prompts.

    Raises:
        ValueError: the aggregation is unknown, or `constant` has no divisor.
    """
    rollouts = [sample.rollout for sample in samples]
    if aggregation in ("root_length", "root_length_per_token"):
        trained = sum(sample.mask.count(1) for sample in samples)
        units = max(trained, 1) if aggregation == "root_length_per_token" else len(set(rollouts))
        return [units * math.sqrt(len(sample.mask)) for sample in samples]
    if aggregation == "constant":
        if divisor is None:
            raise ValueError("divisor=None leaves constant without a denominator. Give a positive number.")
        return [float(len(set(rollouts)) * divisor)] * len(samples)
    units = {
        "sample_mean": rollouts,
        "prompt_mean": [sample.prompt for sample in samples],
        "token_mean": ["step"] * len(samples),
    }
    if aggregation not in units:
        raise ValueError(f"aggregation={aggregation!r} is not one of {[*units, 'constant']}, so no weight is defined.")
    keys = units[aggregation]
    counts = num_trained_tokens_by(keys, samples)
    return [float(len(counts) * max(counts[key], 1)) for key in keys]


def token_loss(token: TrainedToken, eps_low: float, eps_high: float) -> float:
    """-min(r A, clip(r, 1 - eps_low, 1 + eps_high) A)."""
    clipped_ratio = min(max(token.ratio, 1.0 - eps_low), 1.0 + eps_high)
    return -min(token.ratio * token.advantage, clipped_ratio * token.advantage)


def token_coefficient(token: TrainedToken, eps_low: float, eps_high: float) -> float:
    """d loss / d log pi_new: -r A, or 0 beyond a bound in the direction of A and where the log-ratio is clamped."""
    if token.is_clamped or token.advantage == 0.0:
        return 0.0
    if token.advantage > 0.0 and token.ratio > 1.0 + eps_high:
        return 0.0
    if token.advantage < 0.0 and token.ratio < 1.0 - eps_low:
        return 0.0
    return -token.ratio * token.advantage


def weighted_losses(
    samples: list[OracleSample],
    aggregation: str,
    *,
    divisor: float | None,
    eps_low: float,
    eps_high: float,
    temperature: float,
) -> list[float]:
    """w_t * loss_t of every trained token of the step."""
    result = []
    for sample, delta in zip(samples, denominators(samples, aggregation, divisor), strict=True):
        for token in trained_tokens(sample, temperature):
            result.append(token_loss(token, eps_low, eps_high) / delta)
    return result


def sample_gradient(
    sample: OracleSample, delta: float, *, eps_low: float, eps_high: float, temperature: float
) -> list[list[float]]:
    """dJ/dlogits of one sample, [n][V].

    dJ/dz_v = w / temperature * (d loss / d log pi_new) * (1[v = target] - p_v)
    """
    gradient = [[0.0] * len(row) for row in sample.logits]
    for token in trained_tokens(sample, temperature):
        scale = token_coefficient(token, eps_low, eps_high) / (delta * temperature)
        for v, log_probability in enumerate(token.log_probabilities):
            is_target = 1.0 if v == token.target else 0.0
            gradient[token.row][v] = scale * (is_target - math.exp(log_probability))
    return gradient


def objective(
    samples: list[OracleSample],
    aggregation: str,
    *,
    divisor: float | None = None,
    eps_low: float,
    eps_high: float,
    temperature: float,
) -> tuple[float, list[list[list[float]]]]:
    """J of the step and dJ/dlogits, nested like the samples' logits.

    Both bounds are inclusive: a token exactly on one keeps its gradient, and so does a log-ratio of exactly
    +-MAX_LOG_RATIO. Rows that predict no trained token have gradient 0.
    """
    settings = {"eps_low": eps_low, "eps_high": eps_high, "temperature": temperature}
    losses = weighted_losses(samples, aggregation, divisor=divisor, **settings)
    deltas = denominators(samples, aggregation, divisor)
    gradients = [sample_gradient(sample, delta, **settings) for sample, delta in zip(samples, deltas, strict=True)]
    return math.fsum(losses), gradients


def weighted_absolute(
    samples: list[OracleSample],
    aggregation: str,
    *,
    divisor: float | None = None,
    eps_low: float,
    eps_high: float,
    temperature: float,
) -> float:
    """sum_t |w_t * loss_t|, the scale by which errors of J are normalised."""
    settings = {"eps_low": eps_low, "eps_high": eps_high, "temperature": temperature}
    return math.fsum(abs(x) for x in weighted_losses(samples, aggregation, divisor=divisor, **settings))


def near_kink(
    samples: list[OracleSample], *, eps_low: float, eps_high: float, temperature: float, margin: float
) -> bool:
    """Whether the ratio of any trained token, whatever its advantage, lies within `margin` of a clip bound."""
    for sample in samples:
        for token in trained_tokens(sample, temperature):
            for bound in (1.0 - eps_low, 1.0 + eps_high):
                if abs(token.ratio - bound) <= margin:
                    return True
    return False


def cancellation(samples: list[OracleSample], *, eps_low: float, eps_high: float, temperature: float, **rest) -> float:
    """max |c_t w_t / temperature| over max |dJ/dz|, at least 1: what 1 - p of a near-certain token loses to rounding."""
    clip = {"eps_low": eps_low, "eps_high": eps_high}
    scales = [
        abs(token_coefficient(token, **clip)) / (delta * temperature)
        for sample, delta in zip(samples, denominators(samples, **rest), strict=True)
        for token in trained_tokens(sample, temperature)
    ]
    _, gradients = objective(samples, temperature=temperature, **clip, **rest)
    largest = max((abs(x) for table in gradients for row in table for x in row), default=0.0)
    return max(scales) / largest if largest > 0 else 1.0


def token_metrics(token: TrainedToken, eps_low: float, eps_high: float) -> dict[str, float]:
    """The metrics of one trained token that are averaged within and then over documents."""
    is_clipped = token.ratio < 1.0 - eps_low or token.ratio > 1.0 + eps_high
    return {
        "new_logprobs": token.new_logprob,
        "old_logprobs": token.old_logprob,
        "ratio_new_old": token.ratio,
        "kl_new_old": token.ratio - 1.0 - token.log_ratio,
        "clipped_ratio_fraction": float(is_clipped),
        "clamped_log_ratio_fraction": float(token.is_clamped),
        "advantage": token.advantage,
        "entropy": token.entropy,
    }


def mean_by_name(rows: list[dict[str, float]]) -> dict[str, float]:
    """Unweighted mean over the rows of each of their common entries."""
    return {name: math.fsum(row[name] for row in rows) / len(rows) for name in rows[0]}


def metrics(samples: list[OracleSample], *, eps_low: float, eps_high: float, temperature: float) -> dict[str, float]:
    """Metrics of the step; empty if it has no trained token.

    Means are over the samples that have a trained token, of the sample's mean over its trained tokens. max_advantage,
    min_advantage and num_tokens are over all trained tokens. Fractions are 0 to 1; logprobs, kl and entropy in nats.
    """
    documents = [trained_tokens(sample, temperature) for sample in samples]
    documents = [tokens for tokens in documents if tokens]
    if not documents:
        return {}
    result = mean_by_name(
        [mean_by_name([token_metrics(token, eps_low, eps_high) for token in tokens]) for tokens in documents]
    )
    advantages = [token.advantage for tokens in documents for token in tokens]
    result["max_advantage"] = max(advantages)
    result["min_advantage"] = min(advantages)
    result["num_tokens"] = float(len(advantages))
    return result


def all_metrics(
    samples: list[OracleSample],
    aggregation: str,
    *,
    divisor: float | None = None,
    eps_low: float,
    eps_high: float,
    temperature: float,
) -> dict[str, float]:
    """`metrics`, and what needs the aggregation, whole-step sums or optional fields."""
    result = metrics(samples, eps_low=eps_low, eps_high=eps_high, temperature=temperature)
    if not result:
        return {}
    documents = [trained_tokens(sample, temperature) for sample in samples]
    tokens = [token for document in documents for token in document]
    ratios = [token.ratio for token in tokens]
    weights = [
        1 / d
        for d, document in zip(denominators(samples, aggregation, divisor), documents, strict=True)
        for _ in document
    ]
    responses = sum(len(sample.mask) for sample in samples)
    result |= {
        "ratio_new_old_sum": math.fsum(ratios),
        "ratio_new_old_squared_sum": math.fsum(r * r for r in ratios),
        "ess": math.fsum(ratios) ** 2 / (math.fsum(r * r for r in ratios) * len(tokens)),
        "aggregation_ess": math.fsum(weights) ** 2 / (math.fsum(w * w for w in weights) * len(tokens)),
        "mean_abs_log_ratio": document_mean(documents, lambda t: abs(t.log_ratio)),
        "clipped_high_fraction": document_mean(documents, lambda t: t.advantage > 0 and t.ratio > 1 + eps_high),
        "clipped_low_fraction": document_mean(documents, lambda t: t.advantage < 0 and t.ratio < 1 - eps_low),
        "num_tokens_masked": responses - len(tokens),
        "num_samples": len(samples),
        "num_rollouts": len({sample.rollout for sample in samples}),
        "num_prompts": len({sample.prompt for sample in samples}),
    }
    return result | optional_metrics(documents) | rollout_metrics(samples)


def optional_metrics(documents: list[list[TrainedToken]]) -> dict[str, float]:
    """Metrics of the documents that carry reference or rollout log-probabilities; absent without such a document."""
    result = {}
    with_ref = [d for d in documents if d and d[0].ref_logprob is not None]
    with_rollout = [d for d in documents if d and d[0].rollout_logprob is not None]
    if with_ref:
        result["kl_new_ref"] = document_mean(
            with_ref, lambda t: math.exp(t.ref_logprob - t.new_logprob) - 1 - (t.ref_logprob - t.new_logprob)
        )
        result["ratio_new_ref"] = document_mean(with_ref, lambda t: math.exp(t.new_logprob - t.ref_logprob))
    if with_rollout:
        result["mismatch_kl"] = document_mean(
            with_rollout,
            lambda t: math.exp(t.old_logprob - t.rollout_logprob) - 1 - (t.old_logprob - t.rollout_logprob),
        )
        result["mismatch_max"] = max(abs(t.old_logprob - t.rollout_logprob) for d in with_rollout for t in d)
        result |= gap_metrics([(t.old_logprob, t.rollout_logprob) for d in with_rollout for t in d])
    return result


def gap_metrics(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Statistics of trainer (o) against rollout engine (b), from the tokens one by one."""
    every = [o - b for o, b in pairs]
    near = [(o, b) for o, b in pairs if abs(o - b) <= 3]
    lost = [1 - math.fsum(math.exp(min(sign * d, 3)) for d in every) / len(every) for sign in (1, -1)]
    result = {
        "mismatch/missing_mass": max(lost),
        "mismatch/outlier_fraction": sum(abs(d) > 0.5 for d in every) / len(every),
    }
    if not near:
        return result
    d, b, o = [o - b for o, b in near], [b for _, b in near], [o for o, _ in near]
    result["mismatch/difference"] = math.fsum(d) / len(d)
    result["mismatch/spread"] = math.sqrt(covariance(d, d))
    if len(set(d)) == 1 or len(set(b)) == 1:
        return result
    result["mismatch/correlation"] = covariance(d, b) / math.sqrt(covariance(d, d) * covariance(b, b))
    if abs(result["mismatch/correlation"]) >= 0.5:
        signs = min((1, -1), key=lambda sign: abs(math.fsum(math.exp(sign * x) - 1 for x in d)))
        e = [math.exp(signs * x) for x in d]
        kappa = covariance(e, o) / covariance(e, b)
        if kappa > 0:
            result["mismatch/temperature"] = 1 / kappa
    return result


def covariance(x: list[float], y: list[float]) -> float:
    """Of the numbers given, not of a population."""
    at = math.fsum(x) / len(x), math.fsum(y) / len(y)
    return math.fsum((a - at[0]) * (b - at[1]) for a, b in zip(x, y, strict=True)) / len(x)


def rollout_metrics(samples: list[OracleSample]) -> dict[str, float]:
    """Metrics of whole rollouts, fully masked ones too, over those that carry the value; absent without one."""
    rollouts: dict[object, list[OracleSample]] = {}
    for i, sample in enumerate(samples):
        rollouts.setdefault(("alone", i) if sample.rollout is None else sample.rollout, []).append(sample)
    lengths = [sum(len(sample.mask) for sample in own) for own in rollouts.values()]
    result = {"response_length": math.fsum(lengths) / len(lengths), "max_response_length": max(lengths)}
    given = {key: [s.reward for s in own if s.reward is not None] for key, own in rollouts.items()}
    rewards = {key: max(own) for key, own in given.items() if own}
    if rewards:
        mean = math.fsum(rewards.values()) / len(rewards)
        result |= {
            "reward": mean,
            "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in rewards.values()) / len(rewards)),
            "max_reward": max(rewards.values()),
            "min_reward": min(rewards.values()),
            "num_rewards": len(rewards),
        }
    groups: dict[object, list[float]] = {}
    for key, reward in rewards.items():
        groups.setdefault(rollouts[key][0].prompt, []).append(reward)
    equal = [len(set(group)) == 1 for group in groups.values() if len(group) > 1]
    if equal:
        result["zero_variance_fraction"] = sum(equal) / len(equal)
    said = [[s.truncated for s in own if s.truncated is not None] for own in rollouts.values()]
    if any(said):
        result["truncated_fraction"] = sum(any(own) for own in said) / sum(bool(own) for own in said)
    return result


def document_mean(documents: list[list[TrainedToken]], value) -> float:
    """Mean over documents with a trained token of the document's mean."""
    means = [math.fsum(value(token) for token in document) / len(document) for document in documents if document]
    return math.fsum(means) / len(means)
