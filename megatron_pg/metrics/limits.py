"""What a healthy run looks like by metric, and the values beyond which it does not."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A red flag as numbers: the console marks a value beyond it, `megatron-pg report` lists the steps."""

    low: float = -math.inf
    high: float = math.inf
    in_step_1: bool = False  # check step 1 only: its rollouts are on-policy by construction
    steps: int = 1  # consecutive steps before it is reported
    cause: str  # where to look

    def is_exceeded(self, value: float, iteration: int) -> bool:
        """Whether the value of that step is beyond the limit."""
        return (value < self.low or value > self.high) and (iteration == 1 or not self.in_step_1)

    @property
    def bounds(self) -> str:
        """The values beyond the limit."""
        sides = [f"< {self.low:g}"] * (self.low > -math.inf) + [f"> {self.high:g}"] * (self.high < math.inf)
        running = f" for {self.steps} steps" if self.steps > 1 else ""
        return " or ".join(sides) + (" in step 1" if self.in_step_1 else running)

    def __str__(self) -> str:
        return f"{self.bounds}: {self.cause}"


_STEP_1 = "temperature, tokenizer, a shift by one, precision of the head, or rollouts of other weights"
_ADVISED = 3  # consecutive steps before advice is given

# Signs of a healthy run and a red flag, in words or as a limit; "–" for none.
SIGNS: dict[str, tuple[str, str | Limit]] = {
    "pg_loss": ("near 0, either sign", "a jump; never compare its size across aggregations"),
    "explained_variance": ("rises towards 1", "below 0: the values are worse than the mean return"),
    "kl_loss": ("grows slowly", "β·kl_loss near |pg_loss|: the reference policy dominates"),
    "kl_cov_loss": (
        "0 in the first update of a batch, then small",
        "β·kl_cov_loss near |pg_loss|: the penalty dominates",
    ),
    "mtp_loss": (
        "falls, then follows the entropy",
        "rises while pg_loss is stable: the extra heads lag behind the policy",
    ),
    "mtp_acceptance": ("stable", "falls: speculative decoding with these heads becomes slower"),
    "reward": ("rises", "falls, or does not rise"),
    "zero_variance_fraction": (
        "stable; rises when the prompts are solved",
        Limit(high=0.9, cause="almost no prompt gives a gradient: solved, too hard, or a reward that does not vary"),
    ),
    "response_length": ("changes slowly", "a collapse, or a rise to the length limit"),
    "truncated_fraction": (
        "stable",
        Limit(high=0.5, cause="most responses end at the length limit: raise it, or mask them"),
    ),
    "num_tokens_masked": ("–", "most of the responses"),
    "num_tokens_missing": ("0, or a few in a million", "many: tokens and masks come from different engine steps"),
    "new_logprobs": ("rises slowly", "approaches 0: the policy collapses"),
    "ratio_new_old": (
        "1 on the first step over a rollout batch, then within a few percent",
        Limit(
            low=0.95,
            high=1.05,
            in_step_1=True,
            cause="temperature, dropout, precision, stale old log-probabilities, or rollouts of other weights",
        ),
    ),
    "ess": ("> 0.9", Limit(low=0.5, cause="few tokens dominate the step: take fewer steps per rollout batch")),
    "mean_abs_log_ratio": ("0 on-policy, < 0.05", Limit(high=0.05, in_step_1=True, cause=_STEP_1)),
    "kl_new_old": ("0 on-policy, < 0.01", Limit(high=0.01, in_step_1=True, cause=_STEP_1)),
    "clipped_ratio_fraction": ("< 0.2", Limit(high=0.5, cause="learning rate, steps per rollout batch")),
    "clipped_high_fraction": ("< 0.1", "far above clipped_low_fraction: raise ε_high or lower the learning rate"),
    "clipped_low_fraction": ("< 0.1", "rises over the run"),
    "correction_factor": ("near 1", "far from 1: trainer and rollout engine have different policies"),
    "rejected_fraction": ("< 0.05", Limit(high=0.2, cause="few tokens are left to learn from")),
    "selected_fraction": (
        "about f (kl_cov), at most f (clip_cov), 1 - f (top_entropy), < 0.05 (m2po)",
        "0: too few tokens, or no candidates",
    ),
    "clamped_log_ratio_fraction": (
        "0",
        Limit(high=0.0, cause="misaligned tokens or log-probabilities of another model"),
    ),
    "advantage": ("near 0 with a group baseline", "–"),
    "aggregation_ess": ("–", "near 0: a few short answers dominate the step"),
    "kl_new_ref": ("grows slowly", "a jump"),
    "mismatch_kl": ("< 5e-3", "an upward trend: precision, weight sync, sampling filter, temperature"),
    "mismatch_max": ("< 2", Limit(high=5.0, cause="another token, template or model")),
    "mismatch/difference": ("0", "–"),
    "mismatch/spread": (
        "< 0.09",
        Limit(high=0.1, steps=_ADVISED, cause="quantized or stale weights, or precision of the head"),
    ),
    "mismatch/correlation": ("near 0", "–"),
    "mismatch/temperature": ("absent", Limit(low=0.97, high=1.03, steps=_ADVISED, cause="the temperatures differ")),
    "mismatch/missing_mass": (
        "< 0.003",
        Limit(high=0.01, steps=_ADVISED, cause="truncated sampling (top-p, top-k), or padded columns in one softmax"),
    ),
    "mismatch/outlier_fraction": (
        "< 1e-3",
        Limit(high=0.03, steps=_ADVISED, cause="other tokens, another template or start of documents"),
    ),
    "mismatch/rank_factor": ("< 1.4", Limit(high=2.0, steps=_ADVISED, cause="one rank or one engine only")),
    "entropy": ("falls slowly", "near 0 early"),
}
LIMITS = {name: flag for name, (_, flag) in SIGNS.items() if isinstance(flag, Limit)}


def red_flags(record: Mapping[str, Any]) -> dict[str, Limit]:
    """The limits that the values of one step exceed, by metric; `record` includes `iteration`."""
    known = {name: limit for name, limit in LIMITS.items() if isinstance(record.get(name), (int, float))}
    return {name: limit for name, limit in known.items() if limit.is_exceeded(record[name], record["iteration"])}
