"""GRPO on a real chat model inside Megatron-LM's own pretrain(), with transformers as the rollout engine.

    bash examples/chat/launch.sh --task times_table

Before every optimizer step the engine receives the trainer's weights (engine.py) and samples a group of answers per
prompt. A program checks them (tasks.py). The trainer computes its own log-probabilities of the packed answers, and the
engine's are recorded as `rollout_logprobs`. A step is one rollout batch of --global-batch-size answers.

With --imitate the steps imitate demonstrations instead. --export FOLDER writes the trained model for transformers, and
the next run starts from it with MODEL=FOLDER. The run folder has metrics.jsonl, rollouts.jsonl, curves.png, and
conversations.txt, the text of every prompt and answer with its reward.
"""

import json
import sys
import time
import warnings
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

warnings.filterwarnings("ignore", module=r"(megatron|torch|transformers)\.")
from chat import pretrained  # transformers, before CUDA's names mean the CPU

if not torch.cuda.is_available():
    from cpu import cpu_megatron

    cpu_megatron.enable()

from chat import rollouts, weights
from chat.attention import layer_spec
from chat.engine import LEVELS, Engine
from chat.scoring import with_trainers_logprobs
from chat.tasks import TASKS
from chat.teacher import Teacher
from chat.transcript import Transcript
from evidence.other_trainers import microbatch_means
from loop.run_folder import RunFolder, say
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_pg import PackedBatch, Sample, StepLog, cut_microbatches, step_record
from megatron_pg.plan.collectives import all_reduced
from megatron_pg.pretrain import pretrain
from megatron_pg.rollouts.advantages import RULES


def add_chat_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The example's own flags."""
    group = parser.add_argument_group("chat example")
    group.add_argument("--chat-model", metavar="FOLDER", required=True, help="the pretrained model (launch.sh: MODEL)")
    group.add_argument("--task", choices=TASKS, default="times_table", help="what is learned")
    group.add_argument("--group-size", type=int, default=8, help="answers per prompt")
    group.add_argument("--advantages", choices=RULES, default="group_norm", help="advantages of a group's rewards")
    group.add_argument("--imitate", action="store_true", help="imitate demonstrations of the task instead of sampling")
    group.add_argument("--demonstrations", type=int, default=0, help="of a step's conversations: samples of term sft")
    group.add_argument("--teacher", metavar="FOLDER", help="a model that scores the answers, for --pg-term opd")
    group.add_argument("--microbatch-means", type=int, metavar="ROWS", help="average the means of this many answers")
    group.add_argument("--top-p", type=float, default=1.0, help="sample from the most probable tokens of this total")
    group.add_argument("--top-k", type=int, default=0, help="sample from this many tokens; 0: from all")
    group.add_argument("--no-sampling-mask", action="store_true", help="train without what top-p and top-k left")
    group.add_argument("--max-new-tokens", type=int, help="most tokens of a turn; default: the task's")
    group.add_argument("--engine-dtype", choices=("bf16", "fp32"), help="default: as the trainer's (--bf16)")
    group.add_argument("--engine-fp32-head", action="store_true", help="the engine computes its logits in float32")
    group.add_argument("--engine-weights", choices=LEVELS, help="round the engine's linear layers after every refresh")
    group.add_argument("--engine-batch-size", type=int, default=512, help="sequences that the engine samples at a time")
    group.add_argument("--evaluation-prompts", type=int, default=256, help="the same in each evaluation")
    group.add_argument("--evaluation-interval", type=int, default=5, help="optimizer steps between evaluations")
    group.add_argument("--export", metavar="FOLDER", help="write the trained model, as transformers reads it")
    group.add_argument("--run-dir", default="runs/chat", help="folder for metrics, rollouts, conversations and curves")
    return parser


class ChatRun:
    """What the callbacks of pretrain() share."""

    def __init__(self) -> None:
        self.chunks: list[GPTModel] = []
        self.engine: Engine | None = None
        self.teacher: Teacher | None = None
        self.folder: RunFolder | None = None
        self.transcript: Transcript | None = None
        self.task_metrics: dict[str, float] = {}  # of the step that is being trained
        self.started = self.step_started = time.perf_counter()  # after torch and Megatron were imported

    # --- callbacks of pretrain() ---

    def model_provider(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """A stage of the GPTModel that the flags describe, with the pretrained weights."""
        args = get_args()
        config = config or core_transformer_config_from_args(args)
        config.variable_seq_lengths = args.pipeline_model_parallel_size > 1  # packed rows have different lengths
        self.engine = self.engine or _engine(args)
        if args.teacher and self.teacher is None:
            self.teacher = Teacher(args.teacher, args.params_dtype)
        model = GPTModel(
            config,
            layer_spec(config, args.rotary_base, vp_stage),
            vocab_size=self.engine.model.config.vocab_size,  # NullTokenizer adds one
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
            position_embedding_type="none",
            vp_stage=vp_stage,
            pg_collection=pg_collection,
        )
        weights.load(model, dict(self.engine.model.state_dict()))
        self.chunks.append(model)
        return model

    def datasets(self, num_samples, vp_stage=None):
        """The training data: an endless iterator of this rank's micro-batches."""
        args = get_args()
        if self.folder is None and torch.distributed.get_rank() == 0:
            self.folder = RunFolder(args.run_dir, train_iters=args.train_iters, sampled=args.iteration, version=3)
            self.folder.write_arguments(args)
            self.transcript = Transcript(Path(args.run_dir) / "conversations.txt", self.engine)
        return self.steps(args), None, None

    def on_step(self, log: StepLog) -> None:
        """Write and show what the step did."""
        if self.folder is not None:
            phase = "sft" if get_args().imitate else "grpo"
            seconds = {"step_seconds": time.perf_counter() - self.step_started}
            line = {"phase": phase, **step_record(log), **self.task_metrics, **seconds}
            self.folder.metrics.write(line)
            self.folder.show(line, every=1)

    # --- data ---

    def steps(self, args: Namespace) -> Iterator[PackedBatch]:
        """This rank's micro-batches of each step, sampled from the weights of that moment."""
        step = args.iteration
        while True:
            evaluated = {} if step % args.evaluation_interval else {"exact_match": self.exact_match(args)}
            started = self.step_started = time.perf_counter()
            samples = self.samples(step, args)
            sampled = time.perf_counter()
            batches = with_trainers_logprobs(self.chunks, microbatches(samples, args))
            if self.teacher is not None:
                batches = [self.teacher.scored(batch) for batch in batches]
            seconds = {"sampling_seconds": sampled - started, "scoring_seconds": time.perf_counter() - sampled}
            self.task_metrics = lengths_and_reward(samples) | evaluated | seconds
            everyone = with_everyones_logprobs(samples, batches)
            if self.folder is not None:
                self.folder.rollouts.write(everyone)
                self.transcript.write(everyone, step)
            yield from batches
            step += 1

    def samples(self, step: int, args: Namespace) -> list[Sample]:
        """All ranks' samples of a step, the same on every rank."""
        self.engine.refresh(self.chunks)
        shown = rollouts.problems_of(task_of(args), (args.seed, step, True), num_shown(args))
        shown = rollouts.demonstrated(self.engine, shown)
        if args.imitate:
            return rollouts.samples_of(shown, step, group_size=1, rule=None, environment=args.task)
        return self.answers(step, args) + rollouts.demonstrations_of(shown, step, args.task)

    def answers(self, step: int, args: Namespace) -> list[Sample]:
        """The sampled answers of a step, group by group."""
        num_prompts = (args.global_batch_size - args.demonstrations) // args.group_size
        problems = rollouts.problems_of(task_of(args), (args.seed, step, False), num_prompts)
        problems = [problem for problem in problems for _ in range(args.group_size)]
        samples = rollouts.samples_of(
            rollouts.sampled(self.engine, task_of(args), problems, args.seed * 1_000_003 + step),
            step,
            group_size=args.group_size,
            rule=args.advantages,
            environment=args.task,
            has_masks=not args.no_sampling_mask,
        )
        return microbatch_means(samples, args.microbatch_means) if args.microbatch_means else samples

    def exact_match(self, args: Namespace) -> float:
        """Share of prompts that a sampled answer gets right; the same prompts and seed every time."""
        self.engine.refresh(self.chunks)
        problems = rollouts.problems_of(task_of(args), "evaluation", args.evaluation_prompts)
        return mean([c.reward for c in rollouts.sampled(self.engine, task_of(args), problems, 0)])

    def finish(self, args: Namespace) -> None:
        """The last weights: evaluate them, also without the engine's rounding, and export them."""
        accuracies = {"exact_match": self.exact_match(args)}
        if self.engine.quantized:
            self.engine.quantized = None
            accuracies["exact_match_of_trainer"] = self.exact_match(args)
        if torch.distributed.get_rank() == 0:
            seconds = time.perf_counter() - self.started
            text = ", ".join(f"{name} {value:.3f}" for name, value in accuracies.items())
            steps = f"{args.evaluation_prompts} prompts after {args.train_iters} optimizer steps"
            say(f"{text} on {steps}, {seconds:.0f} s after the start")
            (self.folder.path / "final.json").write_text(json.dumps(accuracies), encoding="utf-8")
            if args.export:
                config, tokenizer = self.engine.model.config, self.engine.tokenizer
                pretrained.write(Path(args.export), dict(self.engine.model.named_parameters()), config, tokenizer)
                say(f"wrote {args.export}")


def _engine(args: Namespace) -> Engine:
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32, None: args.params_dtype}[args.engine_dtype]
    return Engine(
        args.chat_model,
        dtype,
        float32_head=args.engine_fp32_head,
        quantized=args.engine_weights,
        batch_size=args.engine_batch_size,
        top_p=args.top_p,
        top_k=args.top_k,
    )


def num_shown(args: Namespace) -> int:
    """Demonstrations in a step."""
    return args.global_batch_size if args.imitate else args.demonstrations


def task_of(args: Namespace):
    """The task of --task, with the length of --max-new-tokens."""
    return TASKS[args.task].with_length(args.max_new_tokens)


def microbatches(samples: list[Sample], args: Namespace) -> list[PackedBatch]:
    """The K packed rows that Megatron's schedule takes from this rank in a step."""
    return cut_microbatches(
        samples,
        num_microbatches=get_num_microbatches(),
        qkv_format="thd",
        multiple_of=args.tensor_model_parallel_size if args.sequence_parallel else 1,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
    )


def with_everyones_logprobs(samples: list[Sample], batches: list[PackedBatch]) -> list[Sample]:
    """All samples of the step with the trainer's log-probabilities, which other ranks have computed for some."""
    width = max(sample.response_length for sample in samples)
    mine = {s.rollout_id: s.old_logprobs for batch in batches for s in batch.samples}
    table = torch.zeros(len(samples), width, dtype=torch.float64)
    for row, sample in zip(table, samples, strict=True):
        if (values := mine.get(sample.rollout_id)) is not None:
            row[: len(values)] = values
    table = all_reduced(table, torch.distributed.ReduceOp.SUM, mpu.get_data_parallel_group())
    return [replace(s, old_logprobs=row[: s.response_length]) for s, row in zip(samples, table, strict=True)]


def lengths_and_reward(samples: list[Sample]) -> dict[str, float]:
    """Means over the step's answers; lengths are of the tokens that the assistant wrote."""
    samples = [sample for sample in samples if sample.reward is not None]
    lengths = {
        "response_length": [s.num_trained for s in samples],
        "length_of_right": [s.num_trained for s in samples if s.reward == 1],
        "length_of_wrong": [s.num_trained for s in samples if s.reward == 0],
    }
    return {"reward": mean([s.reward for s in samples])} | {k: mean(v) for k, v in lengths.items() if v}


def mean(values: list[float]) -> float:
    """The mean."""
    return sum(values) / len(values)


def check_chat(args: Namespace) -> None:
    """Refuse what the example does not support."""
    answers = args.global_batch_size - args.demonstrations
    if args.group_size < 1 or args.demonstrations < 0 or answers < 1 or answers % args.group_size:
        raise ValueError(
            f"--global-batch-size {args.global_batch_size} without --demonstrations {args.demonstrations} is not a "
            f"positive multiple of --group-size {args.group_size}, and a step has whole groups. Choose a multiple."
        )
    if not 0 < args.top_p <= 1 or args.top_k < 0:
        raise ValueError(f"--top-p {args.top_p} --top-k {args.top_k} keep no token. Use 0 < P <= 1 and K >= 0.")
    if args.export and Path(args.export).exists():
        raise ValueError(f"--export {args.export} exists, and nothing is overwritten. Choose another folder.")
    refused = {
        f"--pg-temperature {args.pg_temperature}": args.pg_temperature != 1,
        f"--context-parallel-size {args.context_parallel_size}": args.context_parallel_size > 1,
        f"--docs-per-step {args.docs_per_step}": bool(args.docs_per_step),
        f"--position-embedding-type {args.position_embedding_type}": args.position_embedding_type != "none",
        f"--pg-correction {args.pg_correction} with --imitate": args.imitate and args.pg_correction != "none",
        "--overlap-param-gather": bool(args.overlap_param_gather),
        "--imitate with --demonstrations": args.imitate and args.demonstrations > 0,
        "--imitate with --teacher": args.imitate and args.teacher is not None,
        "--microbatch-means without token_mean, or with --imitate": args.microbatch_means is not None
        and (args.imitate or args.loss_aggregation != "token_mean"),
    }
    if found := [name for name, is_found in refused.items() if is_found]:
        raise ValueError(f"examples/chat does not support {', '.join(found)}. Leave it out.")


@record
def main() -> None:
    """Train, then evaluate."""
    run = ChatRun()

    def datasets(num_samples, vp_stage=None):
        check_chat(get_args())
        return run.datasets(num_samples, vp_stage)

    datasets.is_distributed = True  # every rank builds its own iterator
    try:
        pretrain(
            train_valid_test_dataset_provider=datasets,
            model_provider=run.model_provider,
            model_type=ModelType.encoder_or_decoder,
            extra_args_provider=add_chat_arguments,
            on_step=run.on_step,
            say=lambda text: None if text.startswith("pg ") else say(text),  # the folder has a progress line
        )
        run.finish(get_args())
    finally:
        if run.folder is not None:
            run.folder.close()
            say(f"run folder: {run.folder.path}  (conversations.txt, {run.folder.files})")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
