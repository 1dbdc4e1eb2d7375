"""Which flag a word was meant to be."""

from argparse import ArgumentParser

import pytest

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.flags.option_text import split
from megatron_pg.flags.spelling import NAMES, meant_flags, replacement

FLAGS = {f"--{name.replace('_', '-')}" for name in own_arguments()}

MEANT = {
    # by its name elsewhere, or by its meaning
    "--pg-kl": ["--pg-kl-coef"],
    "--pg-beta": ["--pg-kl-coef"],
    "--pg-kl-loss-type": ["--pg-kl-estimator"],
    "--pg-clip": ["--pg-clip-eps-low", "--pg-clip-eps-high"],
    "--pg-eps-clip-high=0.28": ["--pg-clip-eps-high"],
    "--pg-entropy": ["--pg-entropy-coef"],
    "--pg-adaptive-entropy": ["--pg-entropy-target"],
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
    "--pg-correctoin": ["--pg-correction"],
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


MOVED = {
    "--pg-cispo-cap 1.28": "--pg-objective cispo,cap=1.28",
    "--pg-cispo-cap=1.28": "--pg-objective cispo,cap=1.28",
    "--pg-correction-high 2": "--pg-correction NAME,high=2",
    "--pg-teacher-head a.safetensors:w": "--pg-term NAME:full_…,head=a.safetensors:w",
    "--pg-stream sft:ce": "--pg-term sft:ce",
    "--pg-entropy-support kept": "--pg-sampling-mask-entropy kept",
}


@pytest.mark.parametrize("words", MOVED)
def test_a_flag_of_an_earlier_release_is_refused_with_the_line_to_write(words, capsys):
    with pytest.raises(SystemExit):
        add_arguments(ArgumentParser(allow_abbrev=False)).parse_args(words.split())
    name = words.replace("=", " ").split()[0]
    assert f"{name} is not a flag since 0.3.0. Write {MOVED[words]}.\n" in capsys.readouterr().err


def test_every_moved_flag_is_written_as_a_flag_that_exists():
    parser = add_arguments(ArgumentParser(add_help=False))
    moved = [flag for action in parser._actions for flag in action.option_strings if flag not in FLAGS]
    assert moved
    for flag in moved:
        written = replacement(flag, "1")
        assert written.split()[0] in FLAGS
        assert split(written.split()[1])
    assert replacement("pg_objective") is None
