"""Which flag a word was meant to be."""

from argparse import ArgumentParser

import pytest

from megatron_pg.args import add_arguments
from megatron_pg.flags.spelling import NAMES, meant_flags

FLAGS = {flag for action in add_arguments(ArgumentParser(add_help=False))._actions for flag in action.option_strings}

MEANT = {
    # by its name elsewhere, or by its meaning
    "--pg-kl": ["--pg-kl-coef"],
    "--pg-beta": ["--pg-kl-coef"],
    "--pg-kl-loss-type": ["--pg-kl-estimator"],
    "--pg-clip": ["--pg-clip-eps-low", "--pg-clip-eps-high"],
    "--pg-eps-clip-high=0.28": ["--pg-clip-eps-high"],
    "--pg-entropy": ["--pg-entropy-coef"],
    "--pg-aggregation": ["--loss-aggregation"],
    "--pg-loss": ["--pg-objective"],
    "--pg-tis": ["--pg-correction"],
    # a beginning, which Megatron's parser does not complete
    "--loss-agg": ["--loss-aggregation", "--loss-aggregation-divisor"],
    "--loss-agg=token_mean": ["--loss-aggregation", "--loss-aggregation-divisor"],
    "--custom-pg-loss-reducer": ["--custom-pg-loss-reducer-function-path"],
    "--fp32-lm": ["--fp32-lm-head", "--fp32-lm-head-backward"],
    "--docs-per-step-e": ["--docs-per-step-end"],
    "--loss-aggregation-d": ["--loss-aggregation-divisor"],
    "--loss": ["--loss-aggregation", "--loss-aggregation-divisor"],
    "--pg": [],  # too many
    # renamed in 0.3.0
    "--pg-support-missing": ["--pg-sampling-mask-missing"],
    "--pg-entropy-support=kept": ["--pg-sampling-mask-entropy"],
    # a slip
    "-loss-aggregation": ["--loss-aggregation"],
    "-pg-kl-coef=0.1": ["--pg-kl-coef"],
    "--Loss-Aggregation": ["--loss-aggregation"],
    "--loss_aggregation": ["--loss-aggregation"],
    "--loss-agregation": ["--loss-aggregation"],
    "--pg-kl-coeff": ["--pg-kl-coef"],
    "--pg-entropy-coefficient": ["--pg-entropy-coef"],
    "--pg-zzzzzzzzzzzz": [],
    "--pg-value-coef": [],  # there is no value loss, and nothing close
    "--pg-correctoin-hgih": ["--pg-correction-high"],
}


@pytest.mark.parametrize("word", MEANT)
def test_a_word_that_resembles_ours_is_one_of_ours(word):
    assert meant_flags(word, FLAGS) == MEANT[word]


@pytest.mark.parametrize("flag", sorted(FLAGS))
def test_every_beginning_of_a_flag_is_one_of_ours(flag):
    for end in range(4, len(flag)):
        assert flag[:end] in FLAGS or meant_flags(flag[:end], FLAGS) is not None
    assert flag in meant_flags(flag[1:], FLAGS)  # one dash


@pytest.mark.parametrize(
    "word", ["--vocab-size", "--loss-scale", "--lr", "-l", "-1", "-1e-3", "8", "kl", "--", "---", ""]
)
def test_what_belongs_to_other_parsers_is_left_alone(word):
    assert meant_flags(word, FLAGS) is None


def test_the_names_are_of_flags_that_exist_and_are_no_flags():
    assert NAMES.keys() <= FLAGS
    assert not FLAGS & {f"--{prefix}{name}" for names in NAMES.values() for name in names for prefix in ("", "pg-")}
    assert all(meant_flags(f"--pg-{name}", FLAGS)[0] in NAMES for names in NAMES.values() for name in names)
