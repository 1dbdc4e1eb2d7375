"""`megatron-pg explain` and `validate`: what they say, what they refuse, and that they need no torch."""

import json
import re
import subprocess
import sys
from argparse import ArgumentParser

import launches
import processes
import pytest

from megatron_pg.args import add_arguments, own_arguments
from megatron_pg.cli import main
from megatron_pg.flags.megatron import MEGATRON_FLAGS, RULE_ARGUMENTS

EXAMPLE = "--loss-aggregation constant --loss-aggregation-divisor 8192 --global-batch-size 512 --micro-batch-size 2"


def test_the_numbers_of_a_constant_divisor(cli):
    """Worked by hand: N_r·L = 512·8192; D = 8/2 = 4, K = 512/(2·4) = 64, K·D = 256."""
    said = cli.json("explain", EXAMPLE, "--context-parallel-size 2 --world-size 8 --lengths 10,1000")
    assert said["sizes"] == {"world": 8, "D": 4, "C": 2, "K": 64, "N_r": 512}
    assert "= 4194304, the same at every step" in said["factors"]["denominator"]
    assert "= 256·S" in said["factors"]["returned"]
    assert said["factors"]["schedule"] == "× C = 2, ÷ K = 64"
    assert said["factors"]["DDP"].startswith("÷ (D·C) = 8,")
    short, long = said["weights"]
    assert short["token"] == long["token"] == pytest.approx(2.384185791015625e-07, rel=1e-12)
    assert short["answer"] == pytest.approx(2.384185791015625e-06, rel=1e-12)
    assert long["answer"] == pytest.approx(2.384185791015625e-04, rel=1e-12)
    assert (short["share"], long["share"]) == pytest.approx((1 / 101, 100 / 101))


# the denominator under a rejection; the weight of a token of 10 and of 1000, in units of 1/N_r, in a step of both in
# equal numbers (mean 505)
MODES = {
    "sample_mean": ("N_r·M, M kept tokens of the rollout", (1 / 10, 1 / 1000)),
    "prompt_mean": ("P·M, P prompts of the step with a kept token, M kept tokens of the group", (1 / 10, 1 / 1000)),
    "token_mean": ("T, the kept tokens of the step", (1 / 505, 1 / 505)),
    "constant": ("N_r·L = N_r·4096, N_r rollouts of the step with a kept token", (1 / 4096, 1 / 4096)),
}


@pytest.mark.parametrize("mode", MODES)
def test_weights_of_every_aggregation_with_and_without_a_rejection(cli, mode):
    """With one, the number of rollouts that count is unknown before the step; the 512 sampled ones divide nothing."""
    denominator, tokens = MODES[mode]
    chosen = f"--loss-aggregation {mode}" + (" --loss-aggregation-divisor 4096" if mode == "constant" else "")
    said = cli.json("explain --lengths 10,1000", chosen)
    assert ("finalize" in said["factors"]) == (mode == "token_mean")
    assert said["arguments"]["loss_aggregation"] == mode
    step = "--global-batch-size 512 --micro-batch-size 2 --world-size 8 --lengths 10,1000"
    words = "explain", chosen, "--pg-correction icepop --pg-denominator kept", step
    rejected = cli.json(*words)
    assert rejected["factors"]["denominator"] == denominator
    assert rejected["factors"]["N_r"].startswith("the rollouts with a kept token among 512, one sample each")
    assert (rejected["sizes"]["N_r"], rejected["sizes"]["K"]) == (None, 32)
    assert "without rejected tokens" in cli.done(*words)
    for each in (said, rejected):
        assert each["weights_unit"] == "1/N_r"
        assert tuple(row["token"] for row in each["weights"]) == pytest.approx(tokens, rel=1e-12)
        assert sum(row["share"] for row in each["weights"]) == pytest.approx(1)


def test_a_short_and_a_long_turn_weigh_the_same_under_turn_mean(cli):
    words = "explain --lengths 20,400 --loss-aggregation turn_mean --global-batch-size 512 --micro-batch-size 2"
    said = cli.json(words, "--world-size 8")
    denominator = "N_turn·M, N_turn turns of the step with a trained token, M trained tokens of the turn"
    assert said["factors"]["denominator"] == denominator
    assert (said["sizes"]["N_r"], said["weights_unit"]) == (None, "1/N_turn")
    assert [row["token"] for row in said["weights"]] == [1 / 20, 1 / 400]
    assert [row["share"] for row in said["weights"]] == [0.5, 0.5]
    text = cli.done(words)
    assert "what a turn weighs, in units of 1/N_turn" in text
    assert "whole turn" in text
    by_weight = cli.done("explain --pg-weight-denominator weights")
    assert "in a step with equally many answers of these lengths, counted by their tokens' weights" in by_weight


def test_only_units_with_a_trained_token_count_under_live(cli):
    words = "explain", EXAMPLE, "--world-size 8 --pg-denominator live"
    said = cli.json(*words)
    assert said["factors"]["denominator"] == "N_r·L = N_r·8192, N_r rollouts of the step with a trained token"
    assert said["objective"]["weight"] == "1/δ, δ = N_r · L: rollouts of the step with a trained token · 8192"
    assert "in units of 1/N_r" in cli.done(*words)


def test_samples_of_other_terms_are_no_rollouts_of_the_objective(cli):
    with_sft = cli.json("explain", EXAMPLE, "--world-size 8 --pg-term sft:ce")
    assert with_sft["factors"]["N_r"].startswith("the rollouts of the objective among 512, one sample each")
    assert with_sft["factors"]["denominator"] == "N_r·L = N_r·8192, N_r rollouts of the step"
    assert with_sft["weights_unit"] == "1/N_r"
    with_teacher = cli.json("explain", EXAMPLE, "--world-size 8 --pg-term teacher:opd,on=rl")
    assert with_teacher["factors"]["N_r"].startswith("512 rollouts, ")


def test_the_text_holds_formula_factors_and_weights(cli):
    out = cli.done("explain --world-size 8", EXAMPLE)
    for text in ("(Σ m·ℓ)/(N_r·L)", "N_r·L = 512·8192", "returned     K·D·S = 32·8·S", "10 tokens", "Dr. GRPO; verl"):
        assert text in out


def test_every_flag_of_the_plugin_is_shown(cli):
    assert tuple(cli.json("explain --pg-clip-eps-high 0.28")["arguments"]) == own_arguments()


def test_given_flags_and_defaults_are_separate_rows(cli):
    words = "explain --calculate-per-token-loss --pg-clip-eps-high 0.28 --pg-kl-coef 0"
    assert cli.json(words)["given"] == ["calculate_per_token_loss", "pg_clip_eps_high", "pg_kl_coef"]
    rows = dict(line.split(maxsplit=1) for line in cli.done(words).splitlines())
    assert rows["given"] == "--calculate-per-token-loss, --pg-clip-eps-high 0.28, --pg-kl-coef 0"
    assert rows["default"].startswith("--loss-aggregation token_mean, --pg-objective grpo, --pg-correction none, ")
    assert rows["flags"] == "--loss-aggregation token_mean --pg-clip-eps-high 0.28"
    assert rows["note"].endswith("--calculate-per-token-loss makes --loss-aggregation token_mean, not sample_mean.")


def test_evaluation_without_an_interval_is_said(cli):
    assert "  note: [W11] --eval-iters 0 without --eval-interval raises a TypeError " in cli.done(
        "validate --eval-iters 0"
    )
    assert "note" not in cli.done("validate --eval-iters 0 --eval-interval 9")


BAD_LAUNCHES = {
    "": "no flags are given. Give some, such as --loss-aggregation token_mean, or --args-file FILE",
    "launch.sh": "launch.sh is not a flag. .*MEGATRON_PG_DRY_RUN=1 in the environment .*: --args-file FILE",
    "--args-file absent": r"absent: cannot be read \(No such file or directory\)",
    "--args-file=--": "--args-file has no value",
    "--loss-agregation token_mean": "--loss-agregation is not a flag of megatron_pg. Did you mean --loss-aggregation?",
    "--pg-kl 0.1": r"--pg-kl is not a flag of megatron_pg. Did you mean --pg-kl-coef\?",
    "--loss-aggregation dr_grpo": r"\[E3\] --loss-aggregation 'dr_grpo' is not one of .*\. Did you mean constant\?",
    "--pg-metrics all": "--pg-metrics 'all' is not one of none, basic, with_entropy\\.",
    "--loss-aggregation": "--loss-aggregation has no value, expected one argument",
    "--pg-temperature hot": "--pg-temperature 'hot' is not a number\\.",
    "--loss-aggregation constant": r"\[E5\] --loss-aggregation constant needs",
    "--pg-clip-eps-low 2 --pg-temperature 0": r"\[E24\] --pg-.*\[E24\] --pg-",
    "--global-batch-size 10 --micro-batch-size 3 --world-size 2": "10 is not a multiple of --micro-batch-size 3 ",
    "--context-parallel-size -1 --world-size 6": "--context-parallel-size -1 must be at least 1",
    "--micro-batch-size 0 --global-batch-size 6": "--micro-batch-size 0 must be at least 1",
    "--world-size 0 --loss-aggregation token_mean": "--world-size 0 is not a number of ranks",
    "--tensor-model-parallel-size 4 --world-size 6": "6 ranks are not a multiple of TP·PP·CP = 4",
    "--world-size two --loss-aggregation token_mean": "--world-size 'two' is not a whole number\\.",
    "--loss-aggregation token_mean --lengths 10,x": "not a list of positive lengths",
    "--loss-aggregation token_mean --lengths 0": "not a list of positive lengths",
    "--yaml-cfg a.yaml": "--yaml-cfg replaces all flags",
    "--pg-kl-coef 0 trainer.n=1": "'trainer.n=1' is an override of Hydra, which only the host reads",
    "--pg-kl-coef 0 +pg_objective=cispo": r"'\+pg_objective=cispo' is an override of Hydra",
    "--pg-kl-coef 0 --other +x.megatron_pg={pg_metrics:none} a.b=1": "'a.b=1' is an override of Hydra",
    "--custom-pg-loss-reducer-function-path nowhere.at:all": r"\[E14\].*cannot be imported",
}


@pytest.mark.parametrize("words", BAD_LAUNCHES)
def test_a_bad_launch_is_one_line_and_exit_code_two(cli, words):
    message = cli.refused("explain", words)
    assert re.search(BAD_LAUNCHES[words], message), message


def test_values_of_other_flags_are_not_overrides(cli):
    assert cli.done("validate --pg-kl-coef 0 --data-path a.b=1 --split pg_objective=1 --x=1 y=2")


def test_flags_that_are_not_read_are_named(cli):
    row = "not read: --use-tis, --tis-clip; docs/migrating.md translates flags of other frameworks"
    assert row in cli.done("validate --pg-kl-coef 0 --use-tis --tis-clip 2 --tis-clip=3")
    assert re.search(r"not read +--use-tis; docs/migrating", cli.done("explain --pg-kl-coef 0 --use-tis"))
    assert "not read" not in cli.done("validate --pg-kl-coef 0")
    assert "not read: --score; docs" in cli.done("validate --pg-kl-coef 0 --score -.5e-3")


LAYOUTS = [
    "--global-batch-size 15 --micro-batch-size 4 --world-size 2",
    "--tensor-model-parallel-size 4 --world-size 6",
    "--context-parallel-size 0 --world-size 6",
    "--micro-batch-size 0 --global-batch-size 6",
    "--global-batch-size 15 --micro-batch-size 4 --world-size 2 --pg-temperature 0",
]


@pytest.mark.parametrize("words", LAYOUTS)
def test_validate_refuses_the_sizes_that_explain_refuses(cli, words):
    (code, out, said), explained = cli("validate", words), cli.refused("explain", words)
    assert (code, out) == (2, "")
    messages = [line.removeprefix("megatron-pg validate: ") for line in said.splitlines()]
    assert explained == f"megatron-pg explain: {'; '.join(messages)}\n"
    assert "[layout] --" in said or "[layout] 6 ranks" in said
    verdict = json.loads(cli("validate --json", words)[1])
    shown = [f"[{violation['rule']}] {violation['message']}" for violation in verdict["violations"]]
    assert (verdict["valid"], shown) == (False, messages)


def test_a_step_of_documents_has_their_number_of_rollouts(cli):
    words = "explain --docs-per-step 256 --micro-batch-size 1 --world-size 8"
    said = cli.json(words)
    assert (said["sizes"]["N_r"], said["sizes"]["K"]) == (256, None)
    assert said["factors"]["K"] == "as many micro-batches as the step's documents need"
    assert cli.json(words, "--docs-per-step-policy at_least")["sizes"]["N_r"] is None


def test_the_divisor_of_the_gradient_is_one_of_the_factors(cli):
    said = cli.json("explain --pg-grad-divisor 256")
    assert said["factors"]["DDP"].endswith("∇Σ w·ℓ / 256  (--pg-grad-divisor)")


# --- validate ---


def test_validate_prints_every_violation_on_its_line(cli):
    code, out, err = cli("validate --dataloader-type cyclic --use-torch-fsdp2 --sft")
    assert (code, out) == (2, "")
    rules = [line.split("[")[1].split("]")[0] for line in err.splitlines()]
    assert sorted(rules) == ["E19", "E29", "E30"]


def test_validate_as_json(cli):
    code, out, _ = cli("validate --json --loss-aggregation constant --loss-aggregation-divisor 0")
    said = json.loads(out)
    assert (code, said["valid"], [v["rule"] for v in said["violations"]]) == (2, False, ["E8"])
    said = cli.json("validate --calculate-per-token-loss")
    assert said["valid"]
    assert said["arguments"]["loss_aggregation"] == "token_mean"
    assert said["remarks"] == ["[R2] --calculate-per-token-loss makes --loss-aggregation token_mean, not sample_mean."]


@pytest.mark.parametrize(("pattern", "depths"), [("M*M*/MM/MM", 2), ("*-|*-", None)])
@pytest.mark.parametrize("flag", ["--hybrid-layer-pattern", "--hybrid-override-pattern"])
def test_the_depths_of_a_pattern_are_what_megatron_derives_from_it(cli, flag, pattern, depths):
    assert cli.json(f"explain {flag} '{pattern}'")["megatron_arguments"].get("mtp_num_layers") == depths


def test_validate_probes_a_custom_reducer(cli, tmp_path, monkeypatch):
    (tmp_path / "cli_reducers.py").write_text(
        "def local_mean(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
        "    return lambda x: x.mean()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = cli.refused("validate --custom-pg-loss-reducer-function-path cli_reducers:local_mean")
    assert "[E16] custom reducer 'cli_reducers:local_mean'" in message


def test_a_reducer_that_asks_megatron_for_its_layout_is_answered_as_in_training(cli, tmp_path, monkeypatch):
    """In the form of the file of miles, which refuses context parallelism."""
    pytest.importorskip("megatron.core")
    (tmp_path / "asking_reducers.py").write_text(
        "from megatron.core import mpu\n\n\n"
        "def constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):\n"
        "    assert mpu.get_context_parallel_world_size() == 1, 'only without context parallelism'\n"
        "    parts = lambda x: zip(x.split(response_lengths), loss_masks, strict=True)\n"
        "    return lambda x: sum((part * mask).sum() / 1000.0 for part, mask in parts(x))\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    words = "--custom-pg-loss-reducer-function-path asking_reducers.constant --tensor-model-parallel-size 2"
    assert "  elsewhere  slime, miles: the same flag and the same function; " in cli.done("explain", words)
    cli.done("validate", words)
    message = cli.refused("validate", words, "--context-parallel-size 2")
    assert "[E16] custom reducer 'asking_reducers.constant' fails on a tiny step of whole samples" in message
    assert "only without context parallelism" in message


def test_validate_tries_an_objective_of_the_users_own(cli, tmp_path, monkeypatch):
    (tmp_path / "cli_objectives.py").write_text(
        "def mean(tokens, parameters):\n    return (tokens.ratios * tokens.advantages).mean()\n\n\n"
        "def sequences(tokens, parameters):\n    return -tokens.sequence_ratios * tokens.advantages\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    message = cli.refused("validate --pg-custom-objective-path cli_objectives:mean")
    assert "[E16] custom objective 'cli_objectives:mean' gives shape ()" in message
    words = "validate --pg-custom-objective-path cli_objectives:sequences --pg-fused-head"
    assert "[E55] --pg-fused-head forward computes" in cli.refused(words, "forward")
    cli.done(words, "recompute")
    assert "else forward; recompute if the custom objective reads whole sequences" in cli.done(words)


# --- the command itself ---


def test_torch_is_not_imported():
    words = [command.split() for command in (f"explain {EXAMPLE}", f"validate {EXAMPLE}", "--help")]
    code = (
        "import sys\nfrom megatron_pg.cli import main\n"
        f"try:\n    assert not any(main(words) for words in {words})\nexcept SystemExit:\n    pass\n"
        "assert not {'torch', 'numpy', 'megatron', 'matplotlib'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=processes.PACKAGE, capture_output=True)


def test_it_runs_as_a_module():
    command = [sys.executable, "-m", "megatron_pg", "--version"]
    done = subprocess.run(command, cwd=processes.PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stdout.startswith("megatron-pg 0.")


@pytest.mark.parametrize("words", ["", "explode", "plot", "--jsn", "compare a --bogus"])
def test_a_bad_command_line_is_one_line(cli, words):
    code, out, err = cli(words)
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert "--help shows the options" in err


@pytest.mark.parametrize("command", ["explain", "validate", "compare", "plot", "convert", "doctor"])
def test_every_subcommand_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    out = capsys.readouterr().out
    assert f"megatron-pg {command}" in out
    assert "--json" in out
    if command == "explain":
        assert all(f"--{name.replace('_', '-')}" in out for name in own_arguments())
        assert "--pg-cispo-cap" not in out


# --- Megatron's flags ---


def test_every_megatron_argument_of_the_rules_is_read():
    sizes = {"data_parallel_size", "gtp_weight_remat_size", "padded_vocab_size", "virtual_pipeline_model_parallel_size"}
    derived = sizes | {"params_dtype"}  # of others
    assert set(RULE_ARGUMENTS) - MEGATRON_FLAGS.keys() == derived


@launches.launch
def megatrons_flags(folder, full):
    """How Megatron parses its flags, in a separate process: megatron.training warns."""
    code = (
        "import argparse, json\n"
        "from megatron.training.arguments import add_megatron_arguments\n"
        "parser = argparse.ArgumentParser(allow_abbrev=False)\n"
        "add_megatron_arguments(parser)\n"
        "actions = [(s, a) for a in parser._actions for s in a.option_strings]\n"
        "print(json.dumps({s: [a.dest, str(a.nargs), type(a).__name__] for s, a in actions}))\n"
    )
    return json.loads(processes.run_warm("-c", code).stdout.splitlines()[-1])


def test_megatrons_flags_are_parsed_as_megatron_parses_them(megatrons_flags):
    parser = ArgumentParser()
    for name, keywords in MEGATRON_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        action = parser.add_argument(flag, **keywords)
        if flag in megatrons_flags:
            assert megatrons_flags[flag] == [name, str(action.nargs), type(action).__name__], flag
    assert len(megatrons_flags.keys() & {f"--{name.replace('_', '-')}" for name in MEGATRON_FLAGS}) > 20
    from megatron_pg.cli.launch import _check_spelling

    our_flags = {s for a in add_arguments(ArgumentParser(add_help=False))._actions for s in a.option_strings}
    _check_spelling(list(megatrons_flags), our_flags)  # no flag of Megatron is taken for a misspelled flag of ours
