"""The example's own parts, and that its launch scripts parse and validate."""

import itertools
import json
import random
import re
import shlex
import subprocess
import warnings
from argparse import ArgumentParser
from pathlib import Path
from types import SimpleNamespace

import launches
import processes
import pytest
import torch
from cpu.all_gather_attention import AllGatherAttention, allowed
from loop import run_folder
from matplotlib.figure import Figure
from samples import make_sample
from tasks.digit_sort import DigitSort
from tasks.list_programs import ListPrograms

from megatron_pg import RolloutWriter, Sample, add_arguments, read_rollouts, validate_args

ROOT = Path(__file__).parents[2]
SCRIPTS = [*sorted((ROOT / "examples").glob("launch_*.sh")), ROOT / "examples/chat/launch.sh"]


def flags_of(script: Path) -> list[str]:
    """The words inside the script's GRPO_ARGS array."""
    body = re.search(r"GRPO_ARGS=\((.*?)\)", script.read_text(encoding="utf-8"), re.DOTALL).group(1)
    return shlex.split(body, comments=True)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: p.name)
def test_every_launch_script_is_valid_bash_with_flags_that_validate(script):
    subprocess.run(["bash", "-n", str(script)], check=True)
    args = add_arguments(ArgumentParser(allow_abbrev=False)).parse_args(flags_of(script))
    args.calculate_per_token_loss = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        validate_args(args)


def test_the_task_is_right_about_its_own_answers():
    generator = torch.Generator().manual_seed(0)
    task = DigitSort()
    for prompt in task.prompts(50, generator):
        answer = task.answer(prompt)
        assert answer == [*sorted(prompt[:-1]), task.stop]
        assert task.exact(prompt, answer) == task.reward(prompt, answer) == 1.0
        assert len(prompt) + len(answer) <= task.max_length
        assert task.exact(prompt, answer[:-1]) == 0.0
        assert task.reward(prompt, answer[:-1]) == pytest.approx(1 - 1 / len(answer))
        assert task.reward(prompt, [task.stop]) == 0.0


@pytest.mark.parametrize(("digits", "most_operations"), [(4, 3), (5, 5)])
def test_every_style_of_a_program_is_right_and_fits(digits, most_operations):
    task, generator = ListPrograms(digits=digits, most_operations=most_operations), torch.Generator().manual_seed(0)
    lengths = set()
    for prompt in task.prompts(300, generator):
        shown = task.demonstration(prompt, generator)
        assert len(prompt) == task.prompt_length
        assert len(shown) <= task.max_response
        assert task.exact(prompt, shown) == 1.0
        assert task.exact(prompt, shown[:-1]) == 0.0
        wrong = [*shown[:-2], (shown[-2] + 1) % 10, shown[-1]]
        assert task.exact(prompt, wrong) == 0.0
        lengths.add(len(shown))
    assert len(lengths) > most_operations


@pytest.mark.parametrize("size", [1, 2, 4])
def test_prompts_and_draws_of_a_step_do_not_depend_on_the_ranks_that_share_it(sampled_by_ranks, size):
    assert sampled_by_ranks[str(size)] == sampled_by_ranks["1"]
    assert len({tuple(tokens) for tokens in sampled_by_ranks["1"]}) > 100


def test_attention_over_gathered_keys_keeps_to_documents_and_to_the_window_of_its_layer():
    config = SimpleNamespace(kv_channels=4, window_size=(2, 0), window_attn_skip_freq=2)
    windows = [AllGatherAttention(config, layer_number=number).reach for number in (1, 2, 3)]
    assert windows == [2, None, 2]  # every second layer sees all
    document = [0, 0, 0, 0, 0, 1, 1, 1]
    for reach in (2, None):
        seen = allowed([5, 3], reach, torch.device("cpu"))
        for query, key in itertools.product(range(8), range(8)):
            is_near = 0 <= query - key <= (8 if reach is None else reach)
            assert bool(seen[query, key]) == (is_near and document[query] == document[key])


def test_a_run_folder_writes_every_step_and_draws(tmp_path, capfd):
    folder = run_folder.RunFolder(str(tmp_path / "run"), train_iters=4)
    (folder.path / "arguments.json").write_text(json.dumps({"loss_aggregation": "constant"}))
    for i in range(1, 5):
        line = {"iteration": i, "phase": "grpo", "pg_loss": -0.5 * i, "reward": 0.1 * i, "response_length": 3.0}
        folder.metrics.write(line | ({"kl_new_old": float("nan")} if i == 3 else {}))
        folder.show(line, every=2)
    folder.close()
    records = [json.loads(line) for line in (folder.path / "metrics.jsonl").read_text().splitlines()]
    assert [r["pg_loss"] for r in records] == [-0.5, -1.0, -1.5, -2.0]
    assert records[2]["kl_new_old"] is None
    assert records[2]["nonfinite"] == [{"metric": "kl_new_old"}]
    assert (folder.path / "curves.png").stat().st_size > 10_000
    shown = capfd.readouterr().out
    assert "pg_loss -1.0000" in shown
    assert "left" in shown


@pytest.mark.parametrize(
    ("steps", "per_panel", "is_named"), [(0, 0, False), (9, 1, False), (19, 1, False), (20, 2, True)]
)
def test_the_curves_name_the_thick_line_that_they_draw(steps, per_panel, is_named, tmp_path, monkeypatch):
    """A short run has one line per panel; the title named a second one, the mean of ten steps."""
    drawn = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    lines = [{"iteration": i, "phase": "grpo", "reward": i / 40, "response_length": 3.0} for i in range(steps)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "arguments.json").write_text(json.dumps({"loss_aggregation": "constant"}))
    run_folder.draw(tmp_path)
    (figure,) = drawn
    assert [len(axis.lines) for axis in figure.axes[:3]] == [per_panel, 0, per_panel]
    assert ("thick: mean of 10 steps" in figure.get_suptitle()) == is_named


def test_samples_that_are_sampled_again_stay_in_a_copy(tmp_path):
    path, rng = tmp_path / "rollouts.jsonl", random.Random(1)
    samples = [make_sample(prompt_length=1, mask=[1], rng=rng, prompt_id=i, rollout_id=i) for i in range(4)]
    for i, sample in enumerate(samples):
        object.__setattr__(sample, "step", i)
    with RolloutWriter(path) as writer:
        writer.write(samples)
    before = path.read_bytes()
    run_folder.continue_rollouts(path, 3).close()
    assert [sample.step for sample in read_rollouts(path)] == [0, 1, 2]
    assert (tmp_path / "rollouts.jsonl.1").read_bytes() == before
    for _ in range(2):  # a fresh start, and a second one that finds nothing
        run_folder.continue_rollouts(path, 0).close()
    assert len(read_rollouts(tmp_path / "rollouts.jsonl.2")) == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rollouts.jsonl", "rollouts.jsonl.1", "rollouts.jsonl.2"]


def test_a_recorded_step_with_demonstrations_has_the_metrics_of_its_rollouts():
    """Demonstrations have no reward, and made a run from a recorded file of them fail."""
    common = {"tokens": [1, 2, 3], "response_length": 2, "loss_mask": [1, 1], "prompt_id": 0, "step": 0}
    trained = common | {"old_logprobs": [-1.0, -2.0], "advantage": 1.0}
    rollouts = [Sample.build(**trained, rollout_id=i, reward=float(i)) for i in range(2)]
    shown = Sample.build(**common, rollout_id=2, term="sft")
    metrics = {"reward": 0.5, "response_length": 2.0}
    assert run_folder.recorded_metrics([*rollouts, shown]) == run_folder.recorded_metrics(rollouts) == metrics
    assert run_folder.recorded_metrics([shown]) == {}


@launches.launch
def sampled_by_ranks(folder, full):
    """Rollouts of a policy that does not look at its prompts, by 1, 2 and 4 ranks, in the order of the step."""
    code = (
        "import json, sys, types, torch\nfrom cpu import cpu_megatron\n"
        "cpu_megatron.enable()\n"
        "from tasks import sampling, task_samples\n"
        "class Uniform(sampling.Policy):\n"
        "    def _reader(self, prompts, max_tokens):\n"
        "        return lambda responses, rows: torch.full((len(rows), 20), 1 / 20).log()\n"
        "sampling._shares_experts = lambda model: False\n"
        "args = types.SimpleNamespace(task='list_programs', prompts_per_rollout=8, group_size=16, top_p=1.0)\n"
        "found = {}\n"
        "for size in (1, 2, 4):\n"
        "    found[size] = []\n"
        "    for rank in range(size):\n"
        "        task_samples.mpu.get_data_parallel_rank = lambda: rank\n"
        "        task_samples.mpu.get_data_parallel_world_size = lambda: size\n"
        "        policy = Uniform([None], width=48, temperature=1.0)\n"
        "        samples = task_samples.rollout(policy, 3, args, torch.Generator().manual_seed(1))\n"
        "        found[size] += [sample.tokens.tolist() for sample in samples]\n"
        "print('FOUND', json.dumps(found))\n"
    )
    done = processes.run_warm("-c", code)
    return json.loads(done.stdout.split("FOUND")[1])


OFF = ("cached_sampling", "sequence_parallel", "fp32_lm_head", "discard_rollouts", "use_rope_scaling")
OFF += ("overlap_param_gather", "use_megatron_fsdp")
ABSENT = ("num_experts", "teacher", "pg_fused_head", "microbatch_means", "teacher_num_layers", "teacher_hidden_size")
SIZES = dict.fromkeys(OFF, False) | dict.fromkeys((*ABSENT, "fp8", "rollouts"))
SIZES |= {"prompts_per_rollout": 2, "group_size": 2, "global_batch_size": 4, "exact_match_prompts": 2}
SIZES |= {"task": "digit_sort", "seq_length": 12, "pg_vocab_size": 12, "docs_per_step": 0, "demonstrations_per_step": 0}
SIZES |= {"pipeline_model_parallel_size": 1, "context_parallel_size": 1, "loss_aggregation": "constant"}
SIZES |= {"top_p": 1.0, "top_p_logprobs": "sampling_mask", "transformer_impl": "local", "attention_dropout": 0.0}
MICROBATCHES = "--microbatch-means 2 needs --loss-aggregation token_mean (not constant), one data-parallel rank (not 1)"
DEMONSTRATED = "--microbatch-means 2 reweighs advantages, and the samples of --demonstrations-per-step 2 have none"
NO_DIGITS = "--seq-length 12 is shorter than a prompt and its longest response of --task list_programs"
PROGRAMS = {"cached_sampling": True, "task": "list_programs", "seq_length": 48, "context_parallel_size": 2}
WRONG = [  # sizes, and what the example says of them
    ({"pg_vocab_size": 11}, "--pg-vocab-size 11 is smaller than the task's vocabulary of 12 tokens"),
    ({"task": "list_programs"}, NO_DIGITS),
    ({"cached_sampling": True}, "--cached-sampling does not support --task digit_sort"),
    (PROGRAMS, "--cached-sampling does not support context parallelism"),
    ({"demonstrations_per_step": 4}, "--demonstrations-per-step 4 is not a multiple of"),
    ({"demonstrations_per_step": 1, "rollouts": "x"}, "-per-step 1 needs rollouts that this run samples in steps"),
    ({"microbatch_means": 2}, MICROBATCHES),
    ({"microbatch_means": 2, "demonstrations_per_step": 2}, DEMONSTRATED),
    ({"top_p_logprobs": "engine"}, "--top-p-logprobs engine without --top-p"),
    ({"teacher_hidden_size": 8}, "--teacher-hidden-size without"),
    ({"discard_rollouts": True, "docs_per_step": 4}, "--discard-rollouts with"),
    ({"top_p": 0.0}, "--top-p 0.0 is not valid: it must be above 0"),
    ({"top_p": 0.9, "docs_per_step": 4}, "--top-p 0.9 is not valid: it must be above 0"),
    ({"use_megatron_fsdp": True}, "and sampling calls the model inside the wrapper. Train from --rollouts"),
    ({"attention_dropout": 0.1, "context_parallel_size": 2}, "--attention-dropout 0.1 or --softmax-type vanilla has"),
    ({"softmax_type": "learnable", "docs_per_step": 4}, "--attention-dropout 0.0 or --softmax-type learnable has"),
    ({"fp8": "hybrid"}, "--fp8-format hybrid has no effect on the layers of --transformer-impl local"),
]
REFUSED = """\
import train_grpo, types
from megatron_pg import Sample
args = types.SimpleNamespace(seq_length=4, padded_vocab_size=12, task='digit_sort')
fields = dict(loss_mask=[1], old_logprobs=[-1.0], advantage=1.0)
sample = Sample.build(tokens=[1, 2, 13], response_length=1, **fields)
try:
    train_grpo._check_fits(sample, args)
except ValueError as error:
    print(error)
train_grpo.mpu.get_data_parallel_world_size = lambda: 1
scaled = dict(use_rope_scaling=True, hybrid_layer_pattern='*-')
for wrong in (*wrong, scaled):
    try:
        train_grpo.check_example(types.SimpleNamespace(**sizes | wrong))
    except ValueError as error:
        print(error)
train_grpo.check_example(types.SimpleNamespace(**sizes))
train_grpo.mpu.get_data_parallel_world_size = lambda: 2
for waits in (dict(num_experts=4), dict(overlap_param_gather=True)):
    for documents in (0, 4):
        try:
            train_grpo.check_example(types.SimpleNamespace(**sizes | waits | dict(docs_per_step=documents)))
        except ValueError as error:
            print(documents, error)
counted = (('sample_mean', 'scheduled', None), ('prompt_mean', 'scheduled', None), ('token_mean', 'varied', []),
    ('token_mean', 'live', ['a:ce', 'b:ce,aggregation=prompt_mean']))
names = 'loss_aggregation', 'pg_denominator', 'pg_term'
groups = [train_grpo._group_field(types.SimpleNamespace(**dict(zip(names, values)))) for values in counted]
print('GROUPS', *groups)
texts = 'none', 'tis', 'top_entropy', 'top_entropy,fraction=0.3'
print('ENTROPIES', *(train_grpo._reads_entropies(types.SimpleNamespace(pg_correction=text)) for text in texts))
for pattern in ('M-*-', '*E'):
    try:
        train_grpo.hybrid_model(types.SimpleNamespace(num_moe_experts=None), pattern, local=True)
    except ValueError as error:
        print(error)
"""


@launches.launch
def refusals(folder, full):
    """What the example says of a sample and of sizes; in its own process: it patches torch when there is no GPU."""
    code = f"sizes = {SIZES!r}\nwrong = {[sizes for sizes, _ in WRONG]!r}\n{REFUSED}"
    done = processes.run_warm("-c", code)
    return done.stdout


def test_the_example_refuses_sizes_that_do_not_divide_and_files_that_do_not_fit(refusals):
    assert "has 3 tokens up to id 13, and the model takes 4 tokens" in refusals
    assert [message for _, message in WRONG if message not in refusals] == []
    assert "--use-rope-scaling has no effect on the model of --hybrid-layer-pattern" in refusals
    assert "4 --num-experts 4: ranks that share experts would not take part. Under --docs-per-step on 2" in refusals
    assert "4 --overlap-param-gather: ranks that hold a part of the weights would not take part." in refusals
    assert refusals.count("would not take part") == 2
    assert "GROUPS rollout_id prompt_id prompt_id prompt_id" in refusals
    assert "ENTROPIES False False True True" in refusals
    assert "--hybrid-layer-pattern M-*- has M, which --transformer-impl local cannot build" in refusals
    assert "--hybrid-layer-pattern *E has layers of experts, and their number is not given" in refusals
