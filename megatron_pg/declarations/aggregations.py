"""The aggregations: the weight of a trained token is 1/δ, with one denominator δ per sample."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from megatron_pg.declarations.declaration import load


@dataclass(frozen=True, slots=True, kw_only=True)
class AggregationDeclaration:
    """An aggregation: its formula, what it counts, and the reducer that computes it.

    Texts are formatted with `counted` and `tokens`, which --pg-denominator decides, and with `divisor`.
    """

    formula: str  # the policy term, N_r rollouts, P prompts, T trained tokens of the step
    denominator: str  # δ in words
    numbers: str  # δ where the number of rollouts is not known before the step
    known_numbers: str | None = None  # if it is known; also formatted with `rollouts` and `product`, times `divisor`
    unit: str  # what the denominator counts: "rollout", "prompt" (which needs prompt ids), "turn" (turns) or "token"
    per_rollout: Callable[[float, float, float | None], float]
    """δ / N_r of an answer, from its length, the mean length of the step's answers, and the divisor; where `unit` is
    "turn", δ / N_turn of a turn, from the lengths of turns."""
    elsewhere: str  # its names in other frameworks, for a reader
    aliases: tuple[str, ...] = ()  # their names for it, for "did you mean"; never accepted
    takes_divisor: bool = False  # L, `--loss-aggregation-divisor`
    is_per_token: bool = False  # the objective that Megatron's --calculate-per-token-loss asks for
    reducer: str  # `package.module:function` from StepCounts to [S] float64

    def load(self) -> Callable:
        """The reducer."""
        return load(self.reducer)


AGGREGATIONS = {
    "sample_mean": AggregationDeclaration(
        formula="(1/N_r) Σ_rollouts (Σ m·ℓ)/M_rollout",
        denominator="N_r · M_rollout: rollouts of the step{counted} · {tokens} tokens of the token's rollout",
        numbers="N_r·M, M {tokens} tokens of the rollout",
        known_numbers="N_r·M = {rollouts}·M, M {tokens} tokens of the rollout",
        unit="rollout",
        per_rollout=lambda length, mean, divisor: length,
        elsewhere="slime, miles: the default; verl: seq-mean-token-mean (weighs rows); TRL: grpo (rows); NeMo-RL: "
        "token_level_loss false",
        aliases=("grpo", "seq_mean_token_mean"),
        reducer="megatron_pg.reducers.sample_mean:sample_mean",
    ),
    "prompt_mean": AggregationDeclaration(
        formula="(1/P) Σ_prompts (Σ m·ℓ)/M_group",
        denominator="P · M_group: prompts of the step{counted} · {tokens} tokens of the token's prompt group",
        numbers="P·M, P prompts of the step{counted}, M {tokens} tokens of the group",
        unit="prompt",
        per_rollout=lambda length, mean, divisor: length,
        elsewhere="DAPO as printed; ScaleRL's prompt average; no flag of slime, miles, verl or TRL",
        reducer="megatron_pg.reducers.prompt_mean:prompt_mean",
    ),
    "token_mean": AggregationDeclaration(
        formula="(Σ m·ℓ)/T",
        denominator="T: {tokens} tokens of the step",
        numbers="T, the {tokens} tokens of the step",
        unit="token",
        per_rollout=lambda length, mean, divisor: mean,
        elsewhere="slime, miles, Megatron: --calculate-per-token-loss; verl: token-mean; TRL: dapo; NeMo-RL: "
        "token_level_loss true",
        aliases=("token", "bnpo"),
        is_per_token=True,
        reducer="megatron_pg.reducers.token_mean:token_mean",
    ),
    "constant": AggregationDeclaration(
        formula="(Σ m·ℓ)/(N_r·L)",
        denominator="N_r · L: rollouts of the step{counted} · {divisor:.12g}",
        numbers="N_r·L = N_r·{divisor:g}, N_r rollouts of the step{counted}",
        known_numbers="N_r·L = {rollouts}·{divisor:g} = {product:.12g}, the same at every step, micro-batch and rank",
        unit="rollout",
        per_rollout=lambda length, mean, divisor: divisor or math.nan,
        elsewhere="Dr. GRPO; verl: seq-mean-token-sum-norm with loss_scale_factor; TRL: dr_grpo (L is "
        "max_completion_length)",
        aliases=("dr_grpo", "seq_mean_token_sum", "seq_mean_token_sum_norm"),
        takes_divisor=True,
        reducer="megatron_pg.reducers.constant:constant",
    ),
    "turn_mean": AggregationDeclaration(
        formula="(1/N_turn) Σ_turns (Σ m·ℓ)/M_turn",
        denominator="N_turn · M_turn: turns of the step with a {tokens} token · {tokens} tokens of the token's turn",
        numbers="N_turn·M, N_turn turns of the step with a {tokens} token, M {tokens} tokens of the turn",
        unit="turn",
        per_rollout=lambda length, mean, divisor: length,
        elsewhere="RLinf: turn_level; no flag of slime, miles, verl, TRL or NeMo-RL",
        reducer="megatron_pg.reducers.turn_mean:turn_mean",
    ),
}
DEFAULT = "sample_mean"
STEP_MEANS = {False: DEFAULT, True: "token_mean"}  # what Megatron's per-token flag by itself means
_TWO_MEANINGS = {"dapo": "token_mean (DAPO's code) or prompt_mean (DAPO's paper)"}


def is_by_turn(aggregation: str | None) -> bool:
    """Whether its denominators count turns."""
    return aggregation in AGGREGATIONS and AGGREGATIONS[aggregation].unit == "turn"


def elsewhere() -> dict[str, str]:
    """Our names of aggregations, by their names in other frameworks."""
    return {alias: name for name, declared in AGGREGATIONS.items() for alias in declared.aliases} | _TWO_MEANINGS
