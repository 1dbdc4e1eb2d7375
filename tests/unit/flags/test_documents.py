"""--docs-per-step and its companions: each rule broken alone, and its near misses. `-k E55` finds one rule."""

import pytest
from namespaces import accepts, arguments, breaks, docs, row

# Each breaks exactly one rule.
BROKEN = [
    row(
        "E60",
        "negative",
        docs(-1),
        "--docs-per-step must be a whole number of documents below 2^62, or 0 for off, got -1",
    ),
    row("E60", "beyond 62 bits", docs(2**62), "got 4611686018427387904"),
    row("E60", "true in YAML", docs(True), "got True"),
    row("E60", "string", docs("256"), "got '256'"),
    row("E60", "float", docs(2.0), "got 2.0"),
    row("E60", "null", docs(None), "got None"),
    row(
        "E61",
        "policy",
        {"docs_per_step_policy": "exact"},
        "--docs-per-step-policy exact has no effect without --docs-per-step",
    ),
    row("E61", "end", {"docs_per_step_end": "stop"}, "--docs-per-step-end stop has no effect without --docs-per-step"),
    row(
        "E62",
        "ramp-up",
        docs(8, rampup_batch_size=[8, 8, 100]),
        "--rampup-batch-size sets the number of micro-batches by",
    ),
    row("E62", "decrease", docs(8, decrease_batch_size_if_needed=True), "--decrease-batch-size-if-needed changes"),
    row("E62", "samples", docs(8, train_samples=1000), "--train-samples is divided", "use --train-iters"),
    row("E62", "graphs", docs(8, cuda_graph_impl="local"), "--cuda-graph-impl captures a number of micro-batches"),
]

NEAR_MISSES = [
    row("E60", "off", docs(0)),
    row("E60", "one", docs(1)),
    row("E61", "with a number", docs(256, docs_per_step_policy="at_least", docs_per_step_end="stop")),
    row("E61", "defaults", docs(0, docs_per_step_policy=None, docs_per_step_end=None)),
    row("E62", "off", docs(0, rampup_batch_size=[8, 8, 100], train_samples=1000, cuda_graph_impl="local")),
    row("E62", "iterations", docs(256, train_samples=None, rampup_batch_size=None, cuda_graph_impl="none")),
]


pytestmark = pytest.mark.usefixtures("rank_zero", "user_code")


@pytest.mark.parametrize(("overrides", "rule", "fragments"), BROKEN)
def test_a_broken_rule_is_named_alone_and_changes_nothing(overrides, rule, fragments):
    breaks(arguments(**overrides), rule, *fragments)


@pytest.mark.parametrize(("overrides", "rule", "fragments"), NEAR_MISSES)
def test_a_near_miss_passes(overrides, rule, fragments):
    accepts(arguments(**overrides))
