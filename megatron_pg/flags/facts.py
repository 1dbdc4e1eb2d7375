"""The arguments as the rules read them, with everything that is derived from them."""

import argparse
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar, cast

from megatron_pg.declarations.adaptive_entropy import NUMBERS, AdaptiveEntropy
from megatron_pg.declarations.aggregations import AGGREGATIONS, STEP_MEANS
from megatron_pg.declarations.corrections import CORRECTIONS, PENALTY
from megatron_pg.declarations.declaration import resolved
from megatron_pg.declarations.loss_terms import AS_POLICY, OBJECTIVE, LossTerm
from megatron_pg.declarations.objectives import CLIP_EPS_HIGH, CLIP_EPS_LOW, CRITIC, OBJECTIVES
from megatron_pg.flags.megatron import RULE_ARGUMENTS
from megatron_pg.flags.option_text import Selection
from megatron_pg.flags.term_text import parse

Declaration = TypeVar("Declaration")


class Facts:
    """The arguments and values derived from them, parsed once; they may violate any rule."""

    def __init__(self, args: argparse.Namespace):
        self.args = args
        self.per_token = vars(args).get("calculate_per_token_loss", False)
        self.is_mode_given = args.loss_aggregation is not None
        self.mode = args.loss_aggregation if self.is_mode_given else STEP_MEANS[self.per_token is True]  # R2
        self.aggregation = _declared(AGGREGATIONS, self.mode)
        self.is_per_token = self.aggregation is not None and self.aggregation.is_per_token  # the effective aggregation
        self.divisor = args.loss_aggregation_divisor
        self.reducer_path = args.custom_pg_loss_reducer_function_path
        self.is_critic = args.pg_role == "critic"
        self.fuses_head = args.pg_fused_head is not None
        self.has_own_head = bool(args.fp32_lm_head or args.pg_fused_head)
        documents = args.docs_per_step
        self.takes_documents = isinstance(documents, int) and not isinstance(documents, bool) and documents > 0
        self.selected_objective = Selection.of("--pg-objective", args.pg_objective)
        path = args.pg_custom_objective_path
        self.custom_objective = None if path is None else Selection.of("--pg-custom-objective-path", path)
        self.objective = CRITIC if self.is_critic else None  # None: it is custom or unknown
        if self.custom_objective is None and not self.is_critic:
            self.objective = _declared(OBJECTIVES, self.selected_objective.name)
        self.selected_correction = Selection.of("--pg-correction", args.pg_correction)
        self.correction = _declared(CORRECTIONS, self.selected_correction.name)
        target = args.pg_entropy_target
        self.selected_target = None if target is None else Selection.of("--pg-entropy-target", target)
        self.has_entropy_term = args.pg_entropy_coef != 0 or target is not None
        self.given_terms: list[LossTerm] = []  # of --pg-term, without the wrong ones
        self.wrong_terms: list[tuple[object, ValueError]] = []  # the texts, each with its error (rule E71)
        for text in args.pg_term if isinstance(args.pg_term, (list, tuple)) else ():
            try:
                self.given_terms.append(parse(text if isinstance(text, str) else repr(text)))
            except ValueError as error:
                self.wrong_terms.append((text, error))
        self.has_objective = all(term.name != OBJECTIVE.name for term in self.given_terms)  # in the loss

    def megatron(self, name: str, default: object = None) -> Any:
        """Megatron's argument, or `default` where this release does not have it."""
        if name not in RULE_ARGUMENTS:
            raise KeyError(name)
        return vars(self.args).get(name, default)

    @property
    def terms_of_samples(self) -> frozenset[str]:
        """The loss terms that a sample's tokens can be of, those of weight 0 too."""
        return frozenset({OBJECTIVE.name, *(term.name for term in self.given_terms if term.on is None)})

    @property
    def objective_numbers(self) -> dict[str, float]:
        """The objective's numbers by name, given ones before defaults. A custom objective gets those that are given."""
        if self.is_critic:
            return resolved(CRITIC.numbers, vars(self.args))
        flags = {name: vars(self.args)[name] for name in (CLIP_EPS_LOW.attribute, CLIP_EPS_HIGH.attribute)}
        if self.custom_objective is None:
            declared = OBJECTIVES[str(self.selected_objective.name)]
            return self.selected_objective.resolved(declared.numbers, flags)
        clip = {number.name: flags[number.attribute] for number in (CLIP_EPS_LOW, CLIP_EPS_HIGH)}
        return {name: value for name, value in clip.items() if value is not None} | self.custom_objective.numbers

    @property
    def correction_numbers(self) -> dict[str, float]:
        """The correction's numbers by name, given ones before defaults."""
        selected = self.selected_correction
        return selected.resolved(CORRECTIONS[str(selected.name)].numbers, {})

    @property
    def correction_words(self) -> dict[str, str]:
        """The correction's options that are words, in the declared order."""
        selected = self.selected_correction
        return {option: selected.given[option] for option in CORRECTIONS[str(selected.name)].words}

    @property
    def adaptive_entropy(self) -> AdaptiveEntropy | None:
        """The entropy coefficient before the first step; None: it is constant."""
        first, chosen = self.args.pg_entropy_coef, cast(Any, self.selected_target)
        return chosen and AdaptiveEntropy(target=chosen.amount, coefficient=first, **chosen.resolved(NUMBERS, {}))

    @property
    def corrects_sequences(self) -> bool:
        """Whether the correction reads whole sequences."""
        level = self.selected_correction.given.get("level", "")
        return (self.correction is not None and self.correction.reads_sequences) or level.startswith("seq")

    @property
    def teacher_head(self) -> str | None:
        """PATH[:NAME] of the teacher's output layer, if a loss term reads it."""
        return next((term.head for term in self.further if term.reads_hidden), None)

    @property
    def further(self) -> tuple[LossTerm, ...]:
        """The loss terms beyond the objective with a weight > 0, or one that can rise; those with a flag first."""
        args, step_mean = self.args, STEP_MEANS[self.per_token]
        make = partial(
            LossTerm, on=OBJECTIVE.name, aggregation=AS_POLICY if args.pg_aux_aggregation == "policy" else step_mean
        )
        aggregation, divisor = (self.mode, self.divisor) if self.reducer_path is None else (step_mean, None)
        terms = [
            make(name="kl", kind="kl", weight=args.pg_kl_coef, estimator=args.pg_kl_estimator),
            make(name="entropy", kind="entropy", weight=args.pg_entropy_coef),
        ]
        if self.selected_correction.name == PENALTY:  # on the tokens that it selects, with the objective's weights
            weight = self.correction_numbers["coef"]
            terms.append(make(name=PENALTY, kind=PENALTY, weight=weight, aggregation=AS_POLICY, estimator="abs"))
        terms += [term.resolved(aggregation, divisor) for term in self.given_terms if term.name != OBJECTIVE.name]
        return tuple(t for t in terms if t.weight or (t.name == "entropy" and self.selected_target))


def _declared(table: Mapping[str, Declaration], name: object) -> Declaration | None:
    """The entry of that name; None if it is unknown."""
    return table.get(name) if isinstance(name, str) else None
