"""Mistakes that public systems made, seeded into the package one at a time: every one must be noticed.

Each mutant is a context manager that replaces a piece of the package while one step of the simulation runs.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import simulation
import torch
from simulation import Layout

import megatron_pg.kernels.api
import megatron_pg.kernels.logprobs
import megatron_pg.plan.exchange
import megatron_pg.plan.microbatches
import megatron_pg.plan.plan
import megatron_pg.plan.table
from megatron_pg.batch import TokenFields
from megatron_pg.batch.sequences import Sequences
from megatron_pg.kernels import PolicyGradientLoss, PolicyLoss, readers
from megatron_pg.metrics import Reduction
from megatron_pg.objectives.grpo import clipped_surrogate
from megatron_pg.objectives.interface.tokens import Parameters, ratio
from megatron_pg.plan import planned_step
from megatron_pg.step.loss_scaling import LossScaling

LAYOUT = Layout(data=2, context=2, tensor=2, microbatches=2)
MUTANTS: dict[str, Callable[[], contextlib.AbstractContextManager]] = {}


def mutant(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
    MUTANTS[function.__name__] = contextlib.contextmanager(function)
    return function


@contextlib.contextmanager
def weights_by(rule: Callable) -> Iterator[None]:
    """Replace the weight of every response token: rule(batch, plan, original weights)."""
    original = planned_step.token_weights

    def mutated(batch, plan, first, **rest):
        found = original(batch, plan, first, **rest)
        return found | {"weights": rule(batch, plan, found["weights"])}

    with mock.patch.object(planned_step, "token_weights", mutated):
        yield


@contextlib.contextmanager
def slices_by(rule: Callable) -> Iterator[None]:
    """Replace this rank's slice: rule(whole batch, local batch, cp_rank, cp_size) -> changed token fields."""
    original = planned_step.slice_batch

    def mutated(batch, weights, *, cp_rank, cp_size, **rest):
        local = original(batch, weights, cp_rank=cp_rank, cp_size=cp_size, **rest)
        changed = dataclasses.replace(local.fields, **rule(batch, local, cp_rank, cp_size))
        return dataclasses.replace(local, fields=changed)

    with mock.patch.object(planned_step, "slice_batch", mutated):
        yield


@contextlib.contextmanager
def reference_by(rule: Callable) -> Iterator[None]:
    with mock.patch.object(megatron_pg.kernels.api, "reference_loss", rule):
        yield


def per_sample(batch, values) -> torch.Tensor:
    return batch.per_token(torch.tensor(values, dtype=torch.float64))


@mutant
def token_mean_of_each_microbatch_averaged():
    def rule(batch, plan, weights):
        if plan.aggregation != "token_mean":
            return weights
        return batch.loss_mask / max(int(batch.loss_mask.sum()), 1) / (LAYOUT.data * LAYOUT.microbatches)

    with weights_by(rule):
        yield


@mutant
def an_empty_microbatch_counts_as_one_token():
    original = planned_step.plan_from_table

    def mutated(*args, **rest):
        plan = original(*args, **rest)
        extra = (plan.num_tokens + 1) / plan.num_tokens if plan.aggregation == "token_mean" else 1.0
        return dataclasses.replace(plan, denominators=plan.denominators * extra)

    with mock.patch.object(planned_step, "plan_from_table", mutated):
        yield


@mutant
def a_sample_without_trained_tokens_counts_as_one_token():
    original = megatron_pg.plan.table._tokens_of
    with mock.patch.object(megatron_pg.plan.table, "_tokens_of", lambda *a: original(*a).clamp(min=1)):
        yield


@mutant
def a_context_rank_counts_once_for_every_context_rank():
    with mock.patch.object(LossScaling, "local_count", lambda self, _: self.context_parallel_size):
        yield


@contextlib.contextmanager
def loss_scaled_by(factor: float) -> Iterator[None]:
    original = LossScaling.outputs
    with mock.patch.object(LossScaling, "outputs", lambda self, total, **rest: original(self, total * factor, **rest)):
        yield


@mutant
def gradient_divided_once_too_often_by_the_context_size():
    with loss_scaled_by(1 / LAYOUT.context):
        yield


@mutant
def loss_multiplied_by_the_context_size_that_megatron_multiplies_by():
    with loss_scaled_by(LAYOUT.context):
        yield


@mutant
def sample_mean_divides_by_the_shards_own_tokens():
    def rule(batch, local, rank, size):
        rows = batch.sample_index[:, local.row_index].t().reshape(-1)
        weights = local.fields.weights.clone()
        for i in range(len(batch.samples)):
            mine = (rows == i) & local.fields.mask
            weights[mine] = weights[mine] * batch.samples[i].num_trained / max(int(mine.sum()), 1)
        return {"weights": weights}

    with slices_by(rule):
        yield


@mutant
def prompt_totals_of_the_microbatch():
    def rule(batch, plan, weights):
        if plan.aggregation != "prompt_mean":
            return weights
        prompts = [sample.prompt_id for sample in batch.samples]
        totals = [sum(s.num_trained for s in batch.samples if s.prompt_id == prompt) for prompt in prompts]
        return batch.loss_mask / (plan.num_prompts * per_sample(batch, totals).clamp(min=1))

    with weights_by(rule):
        yield


@mutant
def fully_masked_samples_are_left_out_of_the_number_of_rollouts():
    original = planned_step.plan_from_table

    def mutated(table, rule, **rest):
        rows = table.rows[table.rows[:, 0] > 0]
        short = original(dataclasses.replace(table, rows=rows, held=rows[:, 1:3]), rule, **rest)
        plan = original(table, rule, **rest)
        factor = short.num_rollouts / plan.num_rollouts if plan.aggregation in ("sample_mean", "constant") else 1.0
        return dataclasses.replace(plan, denominators=plan.denominators * factor)

    with mock.patch.object(planned_step, "plan_from_table", mutated):
        yield


@mutant
def constant_divides_by_the_padded_width():
    def rule(batch, plan, weights):
        return weights * plan.divisor / batch.tokens.shape[1] if plan.aggregation == "constant" else weights

    with weights_by(rule):
        yield


@mutant
def next_token_shift_after_the_context_slice():
    def rule(batch, local, rank, size):
        return {"targets": local.inputs.tokens.roll(-1, dims=1).t().reshape(-1)}

    with slices_by(rule):
        yield


def contiguous(batch, name: str, rank: int, size: int) -> torch.Tensor:
    rows = batch.spread(batch.response_values(name))
    width = rows.shape[1] // size
    return rows[:, rank * width : (rank + 1) * width].t().reshape(-1)


@mutant
def old_logprobs_sliced_contiguously():
    with slices_by(lambda batch, local, rank, size: {"old_logprobs": contiguous(batch, "old_logprobs", rank, size)}):
        yield


@mutant
def advantages_of_the_neighbour():
    def rule(batch, local, rank, size):
        return {"advantages": local.fields.advantages.roll(1)}

    with slices_by(rule):
        yield


@mutant
def each_tensor_rank_uses_its_own_maximum():
    def combine(shares):
        common = shares.clone()
        common[:, :, 0] = shares[:, :, 0].amax(dim=0)  # as if every sum were relative to the same maximum
        return original(common)

    original = megatron_pg.kernels.logprobs.combine
    with mock.patch.object(megatron_pg.kernels.logprobs, "combine", combine):
        yield


def reference(logits, loss, vocabulary, *, safe: bool):
    """The eager loss with its mask applied by multiplication, before (safe) or after the exp."""
    fields = loss.fields
    keep = fields.mask.to(logits.dtype)
    reader = readers.PlainReader(vocabulary, torch.where(fields.mask, fields.targets, 0))
    logprobs, entropy, _ = readers.read(logits * keep[:, None] if safe else logits, reader)
    ratios, advantages = logprobs - fields.old_logprobs, fields.advantages
    ratios, advantages = (ratios * keep, advantages * keep) if safe else (ratios, advantages)
    losses = clipped_surrogate(ratio(ratios), advantages, loss.terms.objective.parameters)
    losses = losses * keep if safe else torch.where(fields.mask, losses, 0)
    total = (losses * fields.weights).sum()
    return PolicyGradientLoss(total, losses.detach(), logprobs.detach(), ratios.detach(), entropy.detach())


@mutant
def mask_applied_by_multiplication():
    with reference_by(lambda *args, **_: reference(*args, safe=True)):
        yield


@mutant
def mask_applied_after_exp_only():
    with reference_by(lambda *args, **_: reference(*args, safe=False)):
        yield


@contextlib.contextmanager
def objective_by(rule: Callable) -> Iterator[None]:
    """Replace the loss of a token: rule(tokens, parameters) -> arguments of the original."""

    def mutated(self, logprobs, entropy=None):
        objective = self.terms.objective
        wrong = dataclasses.replace(objective, loss=lambda t, p: objective.loss(*rule(t, p)))
        changed = dataclasses.replace(self, terms=dataclasses.replace(self.terms, objective=wrong))
        return original(changed, logprobs, entropy)

    original = PolicyLoss.__call__
    with mock.patch.object(PolicyLoss, "__call__", mutated):
        yield


def changed(parameters: Parameters, **numbers: float) -> Parameters:
    return Parameters(**(vars(parameters) | numbers))


@mutant
def clip_bounds_swapped():
    def rule(tokens, p):
        return tokens, changed(p, clip_eps_low=p.clip_eps_high, clip_eps_high=p.clip_eps_low)

    with objective_by(rule):
        yield


@mutant
def last_microbatch_dropped():
    original = simulation._schedule

    def mutated(locals_, leaves, *rest):
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        return original(locals_[:-1], leaves[:-1], *rest)

    with mock.patch.object(simulation, "_schedule", mutated):
        yield


@mutant
def samples_counted_instead_of_rollouts():
    original = megatron_pg.plan.microbatches.local_table_of

    def mutated(batches, rule, group, kept):
        table = original(batches, rule, group, kept)
        rows = table.rows.clone()
        rows[:, 1] = torch.arange(len(rows)) + (torch.distributed.get_rank(group) << 32)
        return dataclasses.replace(table, rows=rows, has_rollout_ids=True)

    with mock.patch.object(megatron_pg.plan.microbatches, "local_table_of", mutated):
        yield


@mutant
def a_zero_placeholder_in_the_extrema():
    original = Reduction.partial

    def mutated(self, tokens):
        found = original(self, tokens)
        found[len(self._added) :][: len(self._extrema)].clamp_(min=0)
        return found

    with mock.patch.object(Reduction, "partial", mutated):
        yield


@mutant
def micro_batch_means_in_the_metrics():
    original = Reduction.combine

    def mutated(self, partials):
        documents = partials[:, -3:-2].clamp(min=1e-9)
        scaled = partials.clone()
        scaled[:, : len(self._means)] /= documents
        total = original(self, scaled)
        total[: len(self._means)] *= total[-3] / (partials[:, -3] > 0).sum()
        return total

    with mock.patch.object(Reduction, "combine", mutated):
        yield


@mutant
def temperature_forgotten_in_the_gradient():
    original = readers.PlainReader.write_gradient

    def mutated(self, z, out, *rest):
        original(self, z, out, *rest)
        out.mul_(self._vocabulary.temperature)

    with mock.patch.object(readers.PlainReader, "write_gradient", mutated):
        yield


# --- objectives: noticed by the cases of `objective_cases`, on LAYOUT ---

OBJECTIVE_MUTANTS: dict[str, tuple[str, Callable[[], contextlib.AbstractContextManager]]] = {}


def objective_mutant(objective: str) -> Callable:
    """Register a mistake together with the objective whose cases must notice it."""

    def register(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        OBJECTIVE_MUTANTS[function.__name__] = objective, contextlib.contextmanager(function)
        return function

    return register


@contextlib.contextmanager
def averages_by(rule: Callable) -> Iterator[None]:
    """Replace the averages over sequences: rule(sequences, values, original)."""
    original = Sequences.averages
    with mock.patch.object(Sequences, "averages", lambda self, values: rule(self, values, original)):
        yield


@objective_mutant("gspo")
def sequence_ratio_of_the_context_shard():
    with averages_by(lambda own, values, original: original(dataclasses.replace(own, group=None), values)):
        yield


@objective_mutant("gspo")
def sequence_average_divided_by_the_shards_own_tokens():
    def rule(own, values, original):
        return original(dataclasses.replace(own, counts=own.lengths[:-1].double().clamp(min=1)), values)

    with averages_by(rule):
        yield


@objective_mutant("gspo")
def gradient_through_the_sum_over_context_ranks():
    original = PolicyLoss._tokens

    def mutated(self, logprobs, select):
        tokens, kept = original(self, logprobs, select)
        sequences = self.fields.sequences
        group = None if sequences is None else sequences.group
        if group is None or tokens.sequence_log_ratios is None:
            return tokens, kept
        ratios = tokens.sequence_log_ratios
        scaled = ratios.detach() + group.size() * (ratios - ratios.detach())
        return dataclasses.replace(tokens, sequence_log_ratios=scaled), kept

    with mock.patch.object(PolicyLoss, "_tokens", mutated):
        yield


@objective_mutant("gspo")
def sequence_loss_differentiated_with_each_tokens_own_factor():
    def mutated(self, losses, kept, select):
        token_losses = losses if kept is None else torch.where(kept, losses, 0)
        return (select(self.fields.corrected_weights) * token_losses).sum(), token_losses

    with mock.patch.object(PolicyLoss, "_policy_term", mutated):
        yield


@objective_mutant("gspo_token")
def advantages_averaged_over_the_sequence():
    with objective_by(lambda tokens, p: (dataclasses.replace(tokens, advantages=tokens.sequence_advantages), p)):
        yield


@objective_mutant("cispo")
def cap_taken_for_a_distance_from_one():
    with objective_by(lambda tokens, p: (tokens, changed(p, cispo_cap=1 + p.cispo_cap))):
        yield


@objective_mutant("sapo")
def temperatures_of_sapo_swapped():
    def rule(tokens, p):
        return tokens, changed(p, sapo_tau_pos=p.sapo_tau_neg, sapo_tau_neg=p.sapo_tau_pos)

    with objective_by(rule):
        yield


@objective_mutant("grpo")
def kl_and_entropy_with_the_weights_of_the_policy_term():
    original = planned_step.token_weights

    def mutated(*positional, **rest):
        return {name: v for name, v in original(*positional, **rest).items() if "." not in name}

    with mock.patch.object(planned_step, "token_weights", mutated):
        yield


@objective_mutant("reinforce")
def correction_multiplies_the_kl_term_too():
    original = TokenFields.of_term

    def mutated(self, name):
        own = original(self, name)
        return own if self.corrections is None else dataclasses.replace(own, weights=own.weights * self.corrections)

    with mock.patch.object(TokenFields, "of_term", mutated):
        yield


@objective_mutant("reinforce")
def corrections_sliced_contiguously():
    def rule(batch, local, rank, size):
        corrections = local.fields.corrections
        return {} if corrections is None else {"corrections": corrections.roll(1)}

    with slices_by(rule):
        yield


@objective_mutant("reinforce_is")
def rejected_tokens_counted_under_kept():
    original = megatron_pg.plan.microbatches.local_table_of
    with mock.patch.object(
        megatron_pg.plan.microbatches, "local_table_of", lambda *arguments: original(*arguments[:-1])
    ):
        yield


@objective_mutant("dppo_tv")
def fully_masked_units_counted_under_live():
    original = megatron_pg.plan.plan._counts

    def mutated(*arguments, live_only, **rest):
        return original(*arguments, live_only=False, **rest)

    with mock.patch.object(megatron_pg.plan.plan, "_counts", mutated):
        yield


@objective_mutant("grpo")
def divisor_applied_to_the_loss_too():
    original = PolicyLoss.__call__

    def mutated(self, logprobs, entropy=None):
        found = original(self, logprobs, entropy)
        return dataclasses.replace(found, loss=found.loss / self.terms.grad_divisor)

    with mock.patch.object(PolicyLoss, "__call__", mutated):
        yield


# --- loss terms: noticed by the cases of `term_cases`, on LAYOUT ---

TERM_MUTANTS: dict[str, tuple[dict[str, str], Callable[[], contextlib.AbstractContextManager]]] = {
    "correction_multiplies_the_loss_of_a_term": ({}, OBJECTIVE_MUTANTS["correction_multiplies_the_kl_term_too"][1])
}


def term_mutant(**given: str) -> Callable:
    """Register a mistake together with what its cases are not to draw."""

    def register(function: Callable[[], Iterator[None]]) -> Callable[[], Iterator[None]]:
        TERM_MUTANTS[function.__name__] = given, contextlib.contextmanager(function)
        return function

    return register


@contextlib.contextmanager
def plans_by(rule: Callable) -> Iterator[None]:
    """Replace the plan of a step: rule(plan, plan rule) -> changed fields."""
    original = planned_step.plan_from_table

    def mutated(table, plan_rule, **rest):
        plan = original(table, plan_rule, **rest)
        return dataclasses.replace(plan, **rule(plan, plan_rule))

    with mock.patch.object(planned_step, "plan_from_table", mutated):
        yield


@contextlib.contextmanager
def units_added_by(rule: Callable) -> Iterator[None]:
    """Replace the tokens that units are counted from: rule(tokens of loss terms [n, C]) -> tokens."""
    original = megatron_pg.plan.exchange._added

    def mutated(tokens, units, number):
        return original(torch.cat([tokens[:, :2], rule(tokens[:, 2:])], dim=1), units, number)

    with mock.patch.object(megatron_pg.plan.exchange, "_added", mutated):
        yield


@contextlib.contextmanager
def term_plans_by(rule: Callable) -> Iterator[None]:
    """Replace what loss terms are planned by: rule(plan rule, columns, count) -> arguments of the original."""
    original = megatron_pg.plan.plan._plan_terms
    with mock.patch.object(megatron_pg.plan.plan, "_plan_terms", lambda *given: original(*rule(*given))):
        yield


@term_mutant()
def one_number_of_tokens_for_all_terms():
    def rule(plan, plan_rule):
        shared = torch.full_like(plan.denominators, plan.num_trained)
        is_shared = {term.name: term.aggregation == "token_mean" for term in plan_rule.terms}
        return {
            "denominators": shared if plan.aggregation == "token_mean" else plan.denominators,
            "terms": {
                name: dataclasses.replace(own, denominators=shared) if is_shared[name] else own
                for name, own in plan.terms.items()
            },
        }

    with plans_by(rule):
        yield


@term_mutant()
def samples_that_are_not_of_a_term_counted_as_units_of_it():
    with units_added_by(lambda tokens: tokens.clamp(min=0)):
        yield


@term_mutant()
def members_without_a_token_left_out_of_a_term():
    with units_added_by(lambda tokens: torch.where(tokens > 0, tokens, -1)):
        yield


@term_mutant(denominator="live")
def live_units_counted_over_tokens_that_are_not_the_objectives():
    def rule(plan_rule, columns, count):
        return dataclasses.replace(plan_rule, policy=(*plan_rule.policy, *plan_rule.own_tokens)), columns, count

    with term_plans_by(rule):
        yield


@term_mutant(denominator="kept")
def terms_count_what_the_correction_leaves():
    def rule(plan_rule, columns, count):
        is_kept = plan_rule.denominator == "kept"
        return plan_rule, columns | ({"rl": 1} if is_kept else {}), count

    with term_plans_by(rule):
        yield


@term_mutant()
def masks_of_terms_sliced_otherwise_than_tokens():
    def rule(batch, local, rank, size):
        own = local.fields.terms
        rolled = {name: each if each.mask is None else dataclasses.replace(each, mask=each.mask.roll(1)) for name, each in own.items()}  # fmt: skip
        return {"terms": rolled}

    with slices_by(rule):
        yield


@term_mutant()
def weights_of_terms_sliced_contiguously():
    def rule(batch, local, rank, size):
        own = local.fields.terms
        rolled = {name: each if each.weights is None else dataclasses.replace(each, weights=each.weights.roll(1)) for name, each in own.items()}  # fmt: skip
        return {"terms": rolled}

    with slices_by(rule):
        yield


@term_mutant()
def weight_of_a_term_ignored():
    original = PolicyLoss._terms

    def mutated(self, *given):
        terms = tuple(dataclasses.replace(term, weight=1.0) for term in self.terms.further)
        return original(PolicyLoss(dataclasses.replace(self.terms, further=terms), self.fields), *given)

    with mock.patch.object(PolicyLoss, "_terms", mutated):
        yield


@term_mutant()
def objective_over_the_tokens_of_all_terms():
    with mock.patch.object(TokenFields, "of_policy", property(lambda self: self)):
        yield


@term_mutant()
def terms_over_the_tokens_of_all_terms():
    original = TokenFields.of_term

    def mutated(self, name):
        return dataclasses.replace(original(self, name), mask=self.mask)

    with mock.patch.object(TokenFields, "of_term", mutated):
        yield


@term_mutant(objective="gspo")
def sequence_means_divided_by_the_tokens_of_all_terms():
    def rule(batch, local, rank, size):
        sequences = local.fields.sequences
        terms = {name for sample in batch.samples for name in (sample.term, *sample.masks)}
        counts = torch.tensor(batch.tokens_of(*terms), dtype=torch.float64).clamp(min=1)
        return {} if sequences is None else {"sequences": dataclasses.replace(sequences, counts=counts)}

    with slices_by(rule):
        yield


@term_mutant()
def distillation_against_the_reference():
    original = PolicyLoss._of_term

    def mutated(self, *given):
        other = self.fields.ref_logprobs
        fields = self.fields if other is None else dataclasses.replace(self.fields, teacher_logprobs=other)
        return original(PolicyLoss(self.terms, fields), *given)

    with mock.patch.object(PolicyLoss, "_of_term", mutated):
        yield
