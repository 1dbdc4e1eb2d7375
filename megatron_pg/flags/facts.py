"""What the rules read, under the names of the decision table."""

import argparse
from typing import Any

from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS, AggregationDeclaration
from megatron_pg.declarations.corrections import CORRECTIONS, CorrectionDeclaration
from megatron_pg.declarations.objectives import OBJECTIVES, ObjectiveDeclaration
from megatron_pg.flags.megatron import RULE_ARGUMENTS


class Facts:
    """The arguments, and what follows from them; they may break any rule."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.divisor = args.loss_aggregation_divisor
        self.reducer_path = args.custom_pg_loss_reducer_function_path
        self.objective_path = args.pg_custom_objective_path
        self.per_token = vars(args).get("calculate_per_token_loss", False)
        self.is_mode_given = args.loss_aggregation is not None
        self.mode = args.loss_aggregation if self.is_mode_given else STEP_MEANS[self.per_token is True]  # R2

    def megatron(self, name: str, default: object = None) -> Any:
        """Megatron's argument, or `default` where this release does not have it."""
        if name not in RULE_ARGUMENTS:
            raise KeyError(name)
        return vars(self.args).get(name, default)

    @property
    def aggregation(self) -> AggregationDeclaration | None:
        """What the mode is; None where it is unknown."""
        return AGGREGATIONS.get(self.mode) if isinstance(self.mode, str) else None

    @property
    def is_per_token(self) -> bool:
        """Whether the aggregation in force is what the per-token flag asks for."""
        return self.aggregation is not None and self.aggregation.is_per_token

    @property
    def objective(self) -> ObjectiveDeclaration | None:
        """The objective; None where it is the user's own, or unknown."""
        name = self.args.pg_objective
        return OBJECTIVES.get(name) if self.objective_path is None and isinstance(name, str) else None

    @property
    def correction(self) -> CorrectionDeclaration | None:
        """The correction; None where it is unknown."""
        name = self.args.pg_correction
        return CORRECTIONS.get(name) if isinstance(name, str) else None
