"""Independent oracle of the metrics of a step of the clipped objective: loops over documents and their trained tokens.

A mean is over the documents that have a trained token (and the field that it reads), of the document's mean over its
trained tokens. Fractions are 0 to 1; log-probabilities, KL and entropy in nats.
"""

import math
from collections.abc import Callable, Sequence

import numpy as np
from step_oracle import POLICY, Document, Settings, TermResult
from token_oracle import MAX_LOG_RATIO, Tokens

AGES = [("age_0", 0, 0), ("age_1", 1, 1), ("age_2", 2, 2), ("age_3_to_4", 3, 4), ("age_5_to_8", 5, 8)]
AGES += [("age_9_or_more", 9, math.inf)]


def policy_tokens(documents: Sequence[Document], temperature: float) -> list[Tokens]:
    """The objective's tokens of every document that has some."""
    names = "old", "advantages", "rollout", "ref"
    rows = [(document, document.rows(POLICY)) for document in documents]
    return [d.tokens(own, temperature, *names) for d, own in rows if own is not None and len(own)]


def document_mean(documents: Sequence[Tokens], value: Callable[[Tokens], np.ndarray]) -> float:
    """Mean over the documents of the document's mean."""
    return math.fsum(math.fsum(value(own)) / len(own.new) for own in documents) / len(documents)


def token_metrics(documents: Sequence[Document], settings: Settings) -> dict[str, float]:
    """Metrics of the objective's tokens, of any objective."""
    found = policy_tokens(documents, settings.temperature)
    whole = [
        own.tokens(rows, settings.temperature, is_sampled=own.keeps_entropy)
        for own in documents
        if (rows := own.rows(POLICY)) is not None and len(rows)
    ]
    ratios = np.concatenate([own.ratio for own in found])
    advantages = np.concatenate([own.advantages for own in found])
    total, squares = math.fsum(ratios), math.fsum(ratios**2)
    return {
        "new_logprobs": document_mean(found, lambda t: t.new),
        "old_logprobs": document_mean(found, lambda t: t.old),
        "ratio_new_old": document_mean(found, lambda t: t.ratio),
        "kl_new_old": document_mean(found, lambda t: t.ratio - 1.0 - t.log_ratio),
        "clamped_log_ratio_fraction": document_mean(found, lambda t: np.abs(t.log_ratio) > MAX_LOG_RATIO),
        "advantage": document_mean(found, lambda t: t.advantages),
        "entropy": document_mean(whole, lambda t: t.entropy),
        "mean_abs_log_ratio": document_mean(found, lambda t: np.abs(t.log_ratio)),
        "max_advantage": float(max(advantages)),
        "min_advantage": float(min(advantages)),
        "num_tokens": float(len(advantages)),
        "ratio_new_old_sum": total,
        "ratio_new_old_squared_sum": squares,
        "ess": total**2 / (squares * len(ratios)),
        **_optional(found),
        **staleness_metrics(documents, settings),
    }


def _optional(found: Sequence[Tokens]) -> dict[str, float]:
    """Metrics of the documents that carry reference or rollout log-probabilities; absent without such a document."""
    result = {}
    if with_ref := [own for own in found if own.ref is not None]:
        result["kl_new_ref"] = document_mean(with_ref, lambda t: np.exp(t.ref - t.new) - 1 - (t.ref - t.new))
        result["ratio_new_ref"] = document_mean(with_ref, lambda t: np.exp(t.new - t.ref))
    if with_rollout := [own for own in found if own.rollout is not None]:
        result["mismatch_kl"] = document_mean(
            with_rollout, lambda t: np.exp(t.old - t.rollout) - 1 - (t.old - t.rollout)
        )
        result["mismatch_max"] = max(float(np.abs(own.old - own.rollout).max()) for own in with_rollout)
        pairs = [pair for own in with_rollout for pair in zip(own.old.tolist(), own.rollout.tolist(), strict=True)]
        result |= gap_metrics(pairs)
    return result


def staleness_metrics(documents: Sequence[Document], settings: Settings) -> dict[str, float]:
    """By the age of the weights that sampled them: tokens with a version, one by one; absent without one."""
    found: list[tuple[int, float, float]] = []  # age, ratio, |log-ratio|
    for document in documents:
        own = document.rows(POLICY)
        if settings.weight_version is None or document.versions is None or own is None or not len(own):
            continue
        tokens = document.tokens(own, settings.temperature, "old")
        ages = [settings.weight_version - int(document.versions[row]) for row in own]
        found += zip(ages, tokens.ratio.tolist(), np.abs(tokens.log_ratio).tolist(), strict=True)
    result = {}
    if found:
        result["staleness/mean_age"] = sum(age for age, *_ in found) / len(found)
        result["staleness/max_age"] = max(age for age, *_ in found)
    for name, first, last in AGES:
        members = [(ratio, size) for age, ratio, size in found if first <= age <= last]
        if members:
            result[f"staleness/{name}"] = len(members) / len(found)
            result[f"staleness/ratio_new_old_{name}"] = math.fsum(ratio for ratio, _ in members) / len(members)
            result[f"staleness/abs_log_ratio_{name}"] = math.fsum(size for _, size in members) / len(members)
    return result


def step_metrics(
    documents: Sequence[Document],
    settings: Settings,
    policy: TermResult,
    rewards: Sequence[float | None],
    truncated: Sequence[bool | None],
) -> dict[str, float]:
    """All metrics of a step of the objective but its losses; `rewards` and `truncated` are those of the documents."""
    pairs = zip(policy.weights, policy.values, strict=True)
    weights = [w for own, part in pairs if part is not None for w in np.broadcast_to(own, len(part))]
    return token_metrics(documents, settings) | {
        **(_clip_metrics(documents, settings) if settings.objective == "grpo" else {}),
        "aggregation_ess": math.fsum(weights) ** 2 / (math.fsum(w * w for w in weights) * len(weights)),
        "num_tokens_masked": sum(len(document.mask) for document in documents) - len(weights),
        "num_samples": len(documents),
        "num_rollouts": len({document.rollout_id for document in documents}),
        "num_prompts": len({document.prompt_id for document in documents}),
        **_rollout_metrics(documents, rewards, truncated),
    }


def _clip_metrics(documents: Sequence[Document], settings: Settings) -> dict[str, float]:
    found = policy_tokens(documents, settings.temperature)
    low, high = 1 - settings.numbers["clip_eps_low"], 1 + settings.numbers["clip_eps_high"]
    return {
        "clipped_ratio_fraction": document_mean(found, lambda t: (t.ratio < low) | (t.ratio > high)),
        "clipped_high_fraction": document_mean(found, lambda t: (t.advantages > 0) & (t.ratio > high)),
        "clipped_low_fraction": document_mean(found, lambda t: (t.advantages < 0) & (t.ratio < low)),
    }


def _rollout_metrics(
    documents: Sequence[Document], rewards: Sequence[float | None], truncated: Sequence[bool | None]
) -> dict[str, float]:
    """Metrics of whole rollouts, fully masked ones too, over those that carry the value; absent without one."""
    rollouts: dict[object, list[int]] = {}
    for i, document in enumerate(documents):
        rollouts.setdefault(("alone", i) if document.rollout_id is None else document.rollout_id, []).append(i)
    lengths = [sum(len(documents[i].mask) for i in own) for own in rollouts.values()]
    result = {"response_length": math.fsum(lengths) / len(lengths), "max_response_length": max(lengths)}
    given = {key: [rewards[i] for i in own if rewards[i] is not None] for key, own in rollouts.items()}
    known = {key: max(own) for key, own in given.items() if own}
    if known:
        mean = math.fsum(known.values()) / len(known)
        result |= {
            "reward": mean,
            "reward_std": math.sqrt(math.fsum((r - mean) ** 2 for r in known.values()) / len(known)),
            "max_reward": max(known.values()),
            "min_reward": min(known.values()),
            "num_rewards": len(known),
        }
    groups: dict[object, list[float]] = {}
    for key, reward in known.items():
        groups.setdefault(documents[rollouts[key][0]].prompt_id, []).append(reward)
    equal = [len(set(group)) == 1 for group in groups.values() if len(group) > 1]
    if equal:
        result["zero_variance_fraction"] = sum(equal) / len(equal)
    said = [[truncated[i] for i in own if truncated[i] is not None] for own in rollouts.values()]
    if any(said):
        result["truncated_fraction"] = sum(any(own) for own in said) / sum(bool(own) for own in said)
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
    if abs(result["mismatch/correlation"]) >= 0.5 and result["mismatch/spread"] >= 0.02:
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
