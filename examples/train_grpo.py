"""GRPO with megatron_pg inside Megatron-LM's own pretrain(): learn to sort digits, or to run programs, from a
rule-based reward.

    bash examples/launch_cpu.sh --loss-aggregation constant --loss-aggregation-divisor 8

A warm start imitates right answers for a while (the same loss, advantage 1), then every rollout batch samples a
group of responses per prompt, rewards the right ones and takes its optimizer steps. On a machine without a GPU it
runs over gloo through cpu_megatron.py, on GPUs over NCCL without any patch.

A run resumed with --load is the run that was not stopped, bit for bit, from a checkpoint at any step: prompts and draws
follow from the seed and the first step of the rollout batch, and the rest of an unfinished batch is read back from
rollouts.jsonl, because the weights that sampled it are gone. Resume with the same flags and --run-dir.

With --docs-per-step 256 a step is 256 documents, packed into rows of up to --micro-batch-size x --seq-length tokens,
and every rank samples when it has used up its own rollouts (rollout_documents.py).

With --top-p P the rollouts are drawn as engines draw them for that flag, and the samples say of which tokens
(docs/sampling_masks.md).

With --teacher DIR the samples carry the log-probabilities of an earlier run's policy, for --pg-term teacher:opd,on=rl
(teacher.py).

With --demonstrations-per-step 32 that many samples of --global-batch-size are right answers, of --pg-term sft:ce.
"""

import contextlib
import itertools
import sys
import time
import warnings
from argparse import ArgumentParser
from collections.abc import Iterator
from pathlib import Path

import torch

warnings.filterwarnings("ignore", module=r"(megatron|torch)\.")  # about CUDA, Apex and their own deprecations
if not torch.cuda.is_available():
    from cpu import cpu_megatron

    cpu_megatron.enable()

from cpu import local_layers
from cpu.hybrid_layers import HybridModel, hybrid_model
from evidence.other_trainers import microbatch_means, without_sampling_mask
from loop.rollout_documents import SampledDocuments, groups_of, skip_documents
from loop.run_folder import RunFolder, recorded_metrics, say
from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from tasks.sampling import CachedPolicy, Policy
from tasks.task_samples import (
    DEMONSTRATIONS,
    TASKS,
    demonstrations,
    gather_samples,
    imitation,
    of_this_rank,
    rollout,
    task_of,
    with_values,
)
from tasks.teacher import load_teacher
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_pg import (
    Documents,
    PackedBatch,
    RolloutFileError,
    Sample,
    StepLog,
    cut_microbatches,
    cut_steps,
    read_rollouts,
    read_steps,
    step_record,
)
from megatron_pg.plan.collectives import all_gather_rows
from megatron_pg.pretrain import pretrain


def add_example_arguments(parser: ArgumentParser) -> ArgumentParser:
    """The example's own flags."""
    group = parser.add_argument_group("GRPO example")
    group.add_argument("--task", choices=TASKS, default="digit_sort", help="what is learned")
    group.add_argument(
        "--cached-sampling",
        action="store_true",
        help="keep keys and values of what was sampled, instead of computing rows again",
    )
    group.add_argument("--warm-up-iters", type=int, default=60, help="optimizer steps that imitate right answers first")
    group.add_argument("--prompts-per-rollout", type=int, default=32, help="prompts of a rollout batch, all ranks")
    group.add_argument("--group-size", type=int, default=8, help="responses per prompt")
    group.add_argument("--top-p", type=float, default=1.0, metavar="P", help="sample rollouts with top-p P")
    group.add_argument(
        "--top-p-logprobs",
        choices=("sampling_mask", "engine", "recomputed"),
        default="sampling_mask",
        help=(
            "with --top-p, what training knows of it: `sampling_mask` replays it; the others are other trainers' ways "
            "(other_trainers.py)"
        ),
    )
    group.add_argument(
        "--microbatch-means",
        type=int,
        metavar="ROWS",
        help=(
            "weigh tokens as a trainer does that takes the mean of ROWS samples' means, under token_mean "
            "(other_trainers.py)"
        ),
    )
    group.add_argument("--exact-match-prompts", type=int, default=256, help="held-out prompts, all ranks")
    group.add_argument(
        "--exact-match-interval", type=int, default=30, help="optimizer steps between evaluations on them"
    )
    group.add_argument("--rollouts", metavar="FILE", help="train from this rollout file instead of sampling")
    group.add_argument("--teacher", metavar="DIR", help="the --save of an earlier run, whose policy scores the samples")
    group.add_argument("--teacher-num-layers", type=int, help="of the teacher, unless they are this run's --num-layers")
    group.add_argument("--teacher-hidden-size", type=int, help="of the teacher, unless it is this run's --hidden-size")
    group.add_argument(
        "--demonstrations-per-step",
        type=int,
        default=0,
        help="right answers of the loss term sft, of --global-batch-size",
    )
    group.add_argument("--run-dir", default="runs/grpo", help="folder for metrics, rollouts, arguments and curves")
    group.add_argument(
        "--discard-rollouts",
        action="store_true",
        help="write no rollouts.jsonl: the run can then be resumed between rollout batches only",
    )
    group.add_argument("--megatron-log", metavar="FILE", help="Megatron's own output goes here instead of the terminal")
    group.add_argument("--progress-interval", type=int, default=10, help="optimizer steps between progress lines")
    return parser


class Example:
    """What the callbacks of pretrain() share."""

    def __init__(self):
        self.chunks: list[GPTModel | HybridModel] = []
        self.sampled_tokens, self.sampling_seconds = 0, 0.0  # of this rank's rollouts
        self.task_metrics: dict[str, float | None] = {}  # of the step that is being trained
        self.folder: RunFolder | None = None
        self.documents: SampledDocuments | None = None  # under --docs-per-step
        self.teacher: Policy | None = None

    # --- callbacks of pretrain() ---

    def model_provider(self, *positional, **keywords):
        """The model under training, as Megatron asks for its stages."""
        self.chunks.append(self.build(*positional, **keywords))
        return self.chunks[-1]

    def build(self, pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
        """The model that the flags describe: with `--hybrid-layer-pattern` a HybridModel, otherwise a GPTModel.

        Its layers are Transformer Engine's or, with `--transformer-impl local`, Megatron's own.
        """
        args = get_args()
        config = config or core_transformer_config_from_args(args)
        local, packed = args.transformer_impl == "local", bool(args.docs_per_step)
        arguments = {
            "vocab_size": task_of(args).vocabulary,  # releases differ in what NullTokenizer adds
            "max_sequence_length": args.max_position_embeddings,
            "pre_process": pre_process,
            "post_process": post_process,
            "share_embeddings_and_output_weights": not args.untie_embeddings_and_output_weights,
            "position_embedding_type": args.position_embedding_type,
            "rotary_percent": args.rotary_percent,
            "rotary_base": args.rotary_base,
            "vp_stage": vp_stage,
            "pg_collection": pg_collection,
        }
        of_gpt = {"rope_scaling": args.use_rope_scaling, "rope_scaling_factor": args.rope_scaling_factor}
        if vars(args).get("hybrid_layer_pattern"):
            return hybrid_model(config, args.hybrid_layer_pattern, local=local, packed=packed, **arguments)
        layers = (
            local_layers.layer_spec(config, packed=packed, vp_stage=vp_stage)
            if local
            else get_gpt_layer_with_transformer_engine_spec(
                config.num_moe_experts, config.moe_grouped_gemm, qk_layernorm=config.qk_layernorm
            )
        )
        predictions = local_layers.prediction_spec(config, layers, local=local, vp_stage=vp_stage)
        return GPTModel(config, layers, mtp_block_spec=predictions, **arguments, **of_gpt)

    def datasets(self, num_samples, vp_stage=None):
        """The training data: an endless iterator of this rank's micro-batches, or its documents."""
        args = get_args()
        if self.folder is None and torch.distributed.get_rank() == 0:
            sampled = None if args.docs_per_step or args.discard_rollouts else _sampled_steps(args)
            self.folder = RunFolder(args.run_dir, train_iters=args.train_iters, sampled=sampled, version=_version(args))
            self.folder.write_arguments(args)
        torch.distributed.barrier()  # the other ranks may read rollouts.jsonl now
        if args.docs_per_step:
            return self.recorded_documents(args) if args.rollouts else self.sampled_documents(args), None, None
        return self.recorded_steps(args) if args.rollouts else self.sampled_steps(args), None, None

    def on_step(self, log: StepLog) -> None:
        """Write and show what the step did."""
        args = get_args()
        if self.documents is not None:
            self.task_metrics = self._document_metrics(log.iteration, args)
        if self.folder is None:
            return
        line = {
            "phase": "warm-up" if not args.rollouts and log.iteration <= args.warm_up_iters else "grpo",
            **step_record(log),
            **self.task_metrics,
        }
        self.folder.metrics.write(line)
        self.folder.show(line, every=args.progress_interval)

    # --- data ---

    def recorded_documents(self, args) -> Documents:
        """This rank's groups of a rollout file, in the order of the file, of any step."""
        samples = read_rollouts(args.rollouts)
        for sample in samples:
            _check_fits(sample, args)
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        groups = groups_of(samples, _group_field(args))[rank::size]
        return Documents(begin=lambda position: skip_documents(groups, position))

    def sampled_documents(self, args) -> Documents:
        """Right answers first, then rollouts of the policy at the time when this rank needs them."""
        if self.documents is None:
            self.policy = self._policy(args)
            self.documents = SampledDocuments(
                Path(args.run_dir) / f"rollouts.{mpu.get_data_parallel_rank()}.jsonl",
                lambda number: self._document_batch(number, args),
                iteration=args.iteration,
                version=_version(args),
                is_writer=mpu.get_model_parallel_src_rank() == torch.distributed.get_rank()
                and mpu.get_context_parallel_rank() == 0,
                group_by=_group_field(args),
            )
            torch.distributed.barrier()  # peers read what the writer has left of the file
        return Documents(begin=self.documents.begin)

    def _policy(self, args) -> Policy:
        kind = CachedPolicy if args.cached_sampling else Policy
        return kind(self.chunks, width=args.seq_length, temperature=args.pg_temperature)

    def _document_batch(self, number: int, args) -> list[Sample]:
        generator = torch.Generator().manual_seed(hash((args.seed, number, mpu.get_data_parallel_rank())) % 2**63)
        if number < args.warm_up_iters:
            count = -(-args.docs_per_step // mpu.get_data_parallel_world_size())
            samples = imitation(self.policy, number, count, args, generator)
        else:
            samples = rollout(self.policy, number, args, generator)
        return [_with_step(sample, args.curr_iteration) for sample in self._taught(samples, self.policy)]

    def _document_metrics(self, iteration: int, args) -> dict[str, float]:
        values = {
            "reward": mean_over_ranks([sample.reward for sample in self.documents.batch]),
            "response_length": mean_over_ranks([sample.response_length for sample in self.documents.batch]),
        }
        behind_warm_up = iteration - args.warm_up_iters
        if (behind_warm_up > 0 and behind_warm_up % args.exact_match_interval == 0) or iteration == args.train_iters:
            values["exact_match"] = exact_match(self.policy, args)
        return values

    def recorded_steps(self, args) -> Iterator[PackedBatch]:
        """This rank's micro-batches of each step of a rollout file, which is read and checked whole before training."""
        steps = read_steps(args.rollouts)
        for sample in itertools.chain.from_iterable(steps):
            _check_fits(sample, args)
        if len(steps) < args.train_iters:
            raise ValueError(
                f"{args.rollouts} holds {len(steps)} optimizer steps, --train-iters asks for {args.train_iters}, so "
                "the run ends early. Lower --train-iters."
            )
        for step in steps:
            if len(step) > args.global_batch_size:
                raise ValueError(
                    f"step {step[0].step} of {args.rollouts} has {len(step)} samples, more than --global-batch-size "
                    f"{args.global_batch_size}; none may be dropped. Raise it."
                )
        return self._recorded_microbatches(steps[args.iteration :], args)

    def _recorded_microbatches(self, steps: list[list[Sample]], args) -> Iterator[PackedBatch]:
        rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
        for step in steps:
            self.task_metrics = recorded_metrics(step)
            yield from microbatches(step, args, data_parallel_rank=rank, data_parallel_size=size)

    def sampled_steps(self, args) -> Iterator[PackedBatch]:
        """This rank's micro-batches of each optimizer step: right answers first, then rollouts of the current
        policy."""
        policy = self._policy(args)
        self.teacher = load_teacher(args.teacher, self.build, args) if args.teacher else None
        step = args.iteration
        while True:
            generator = torch.Generator().manual_seed(hash((args.seed, step)) % 2**63)
            if step < args.warm_up_iters:
                count = _rollouts_per_step(args) // mpu.get_data_parallel_world_size()
                batches = [self._taught(imitation(policy, step, count, args, generator), policy)]
                self.task_metrics = {}
            elif step == args.iteration < _sampled_steps(args):
                batches = open_batch(step, args)
            else:
                batches = self._rollout_batch(policy, step, args, generator)
            for samples in batches:
                if step >= args.warm_up_iters:
                    self.task_metrics = self._task_metrics(policy, step, samples, args)
                    samples = microbatch_means(samples, args.microbatch_means) if args.microbatch_means else samples
                yield from microbatches(samples, args)
                step += 1

    def _taught(self, samples: list[Sample], policy: Policy) -> list[Sample]:
        """The samples with the teacher's log-probabilities, if there is one, and with what the correction reads of
        their policy."""
        values = {"old_entropies": policy.entropies} if _reads_entropies(get_args()) else {}
        if self.teacher is not None:
            values["teacher_logprobs"] = self.teacher.score
        for name, values_of in values.items():
            samples = with_values(samples, name, values_of)
        return samples

    def _rollout_batch(self, policy: Policy, step: int, args, generator) -> list[list[Sample]]:
        started = time.perf_counter()
        samples = rollout(policy, step, args, generator)
        self.sampling_seconds += time.perf_counter() - started
        self.sampled_tokens += sum(sample.response_length for sample in samples)
        if args.top_p < 1 and args.top_p_logprobs != "sampling_mask":
            samples = without_sampling_mask(samples, policy, args.top_p_logprobs)
        samples = self._taught(samples, policy)
        size = mpu.get_data_parallel_world_size()
        steps = cut_steps(samples, samples_per_step=_rollouts_per_step(args) // size)
        numbered = [
            [_with_step(s, step + k) for s in (*chunk, *demonstrations(step + k, args, generator))]
            for k, chunk in enumerate(steps)
        ]
        for chunk in numbered if not args.discard_rollouts else ():
            everyone = gather_samples(chunk, args)
            if self.folder is not None:
                self.folder.rollouts.write(everyone)
        return numbered

    def _task_metrics(self, policy: Policy, step: int, samples: list[Sample], args) -> dict[str, float]:
        sampled = [sample for sample in samples if sample.term != DEMONSTRATIONS]
        lengths_if = {
            right: [s.response_length for s in sampled if (s.reward == 1) == right] for right in (True, False)
        }
        values = {
            "reward": mean_over_ranks([sample.reward for sample in sampled]),
            "response_length": mean_over_ranks([sample.response_length for sample in sampled]),
            "length_of_right": mean_over_ranks(lengths_if[True]),
            "length_of_wrong": mean_over_ranks(lengths_if[False]),
        }
        last = step == args.train_iters - 1
        if (step - args.warm_up_iters) % args.exact_match_interval == 0 or last:
            values["exact_match"] = exact_match(policy, args)
        return values


def microbatches(samples: list[Sample], args, **ranks: int) -> list[PackedBatch]:
    """The K micro-batches that Megatron's schedule takes in a step: of this rank's samples, or of all where `ranks`
    says so."""
    layout = {"rows": args.micro_batch_size, "max_seq_len": args.seq_length}
    cp_size, count = mpu.get_context_parallel_world_size(), get_num_microbatches()
    return cut_microbatches(samples, num_microbatches=count, qkv_format="bshd", cp_size=cp_size, **layout, **ranks)


def _version(args) -> int:
    """Version of the rollout file that the run's samples need."""
    if args.demonstrations_per_step or args.top_p < 1:
        return 3
    return 2 if args.teacher or _reads_entropies(args) else 1


def _reads_entropies(args) -> bool:
    """Whether a correction chooses tokens by the entropy of the policy that sampled them."""
    return args.pg_correction.split(",")[0] == "top_entropy"


def _group_field(args) -> str:
    """What a step must not cut: prompt groups if a denominator counts them."""
    counts_prompts = args.loss_aggregation == "prompt_mean" or args.pg_denominator == "varied"
    counts_prompts |= any("aggregation=prompt_mean" in term for term in args.pg_term or ())
    return "prompt_id" if counts_prompts else "rollout_id"


def _rollouts_per_step(args) -> int:
    return args.global_batch_size - args.demonstrations_per_step


def _steps_per_batch(args) -> int:
    return args.prompts_per_rollout * args.group_size // _rollouts_per_step(args)


def _sampled_steps(args) -> int:
    """Optimizer steps that have samples when a run resumes: to the end of the rollout batch that is open, if one is."""
    trained = max(args.iteration - args.warm_up_iters, 0) % _steps_per_batch(args)
    return args.iteration + (_steps_per_batch(args) - trained if trained else 0)


def open_batch(step: int, args) -> list[list[Sample]]:
    """This rank's samples of the steps that are left of an open rollout batch, as they were sampled before the stop."""
    rank, size = mpu.get_data_parallel_rank(), mpu.get_data_parallel_world_size()
    path, count = Path(args.run_dir) / "rollouts.jsonl", args.global_batch_size // size
    try:
        samples = read_rollouts(path)
    except RolloutFileError:  # a header alone: nothing was sampled in this folder
        samples = []
    left = [[s for s in samples if s.step == number] for number in range(step, _sampled_steps(args))]
    for number, samples in enumerate(left, start=step):
        if len(samples) != args.global_batch_size:
            raise ValueError(
                f"{path} has {len(samples)} of the {args.global_batch_size} samples of step {number}, whose rollout "
                "batch was open when the checkpoint was saved, so the run cannot go on as it was. Resume with the "
                "--run-dir and the flags of that run, or from a checkpoint between two batches (every "
                f"{_steps_per_batch(args)} steps after --warm-up-iters)."
            )
    return [samples[rank * count : (rank + 1) * count] for samples in left]


def exact_match(policy: Policy, args) -> float:
    """Share of held-out prompts that a sampled response answers right; the same prompts and draws every time."""
    generator, task = torch.Generator().manual_seed(10_000), task_of(args)
    held_out = of_this_rank(task.prompts(args.exact_match_prompts, generator))
    uniforms = torch.rand(args.exact_match_prompts, task.max_response, generator=generator)
    done = policy.sample(held_out, of_this_rank(uniforms), stop=task.stop)
    return mean_over_ranks([task.exact(p, r) for p, r in zip(held_out, done.responses, strict=True)])


def mean_over_ranks(values: list[float]) -> float | None:
    """Mean over all data-parallel ranks' values, None where there are none."""
    mine = torch.tensor([sum(values), len(values)], dtype=torch.float64)
    total, count = all_gather_rows(mine, mpu.get_data_parallel_group()).sum(dim=0).tolist()
    return total / count if count else None


def _with_step(sample: Sample, step: int) -> Sample:
    object.__setattr__(sample, "step", step)
    return sample


def _check_fits(sample: Sample, args) -> None:
    vocabulary = task_of(args).vocabulary
    if len(sample.tokens) > args.seq_length or int(sample.tokens.max()) >= vocabulary:
        raise ValueError(
            f"sample {sample.sample_id} has {len(sample.tokens)} tokens up to id {int(sample.tokens.max())}, and the "
            f"model takes {args.seq_length} tokens (--seq-length) of a vocabulary of {vocabulary}. Drop the sample."
        )


def check_example(args) -> None:
    """Refuse sizes that do not divide, and files and flags that the example cannot combine."""
    size = mpu.get_data_parallel_world_size()
    _check_demonstrations(args, size)
    _check_rollouts(args, size)
    _check_division(args, size)
    _check_layers(args)
    _check_task(args)
    if ignored := _without_effect(args):
        raise ValueError(f"{ignored} has no effect here. Leave it out.")


def _check_rollouts(args, size: int) -> None:
    """Where rollouts come from: this run, --rollouts, or documents."""
    if args.teacher and (args.rollouts or args.docs_per_step):
        raise ValueError(
            f"--teacher {args.teacher} scores rollouts that this run samples in steps. Leave out --rollouts and "
            "--docs-per-step."
        )
    if not 0 < args.top_p <= 1 or (args.top_p < 1 and (args.rollouts or args.docs_per_step)):
        raise ValueError(
            f"--top-p {args.top_p} is not valid: it must be above 0 and at most 1, and below 1 it needs rollouts that "
            "this run samples in steps, without --rollouts and --docs-per-step."
        )
    if args.docs_per_step and not args.rollouts and size > 1 and (shared := _of_several_ranks(args)):
        raise ValueError(
            f"{shared} would not take part. Under --docs-per-step on {size} data-parallel ranks, each samples when its "
            "own rollouts are used up. Train from --rollouts."
        )
    if args.use_megatron_fsdp and not args.rollouts:
        raise ValueError(
            "--use-megatron-fsdp gathers weights only in a forward of its wrapper, and sampling calls the model inside "
            "the wrapper. Train from --rollouts."
        )
    if args.rollouts and Path(args.rollouts).resolve() == (Path(args.run_dir) / "rollouts.jsonl").resolve():
        raise ValueError(
            f"--rollouts {args.rollouts} is the file that this run would overwrite. Choose another --run-dir."
        )
    if args.cached_sampling and (reason := _cannot_cache(args)):
        raise ValueError(
            f"--cached-sampling does not support {reason}: one rank keeps a row's keys and values, for prompts of one "
            "length. Leave it out."
        )


def _of_several_ranks(args) -> str | None:
    """What of the flags makes a forward wait for other data-parallel ranks, which sample at other times."""
    waiting = {
        f"--num-experts {args.num_experts}: ranks that share experts": bool(args.num_experts),
        "--overlap-param-gather: ranks that hold a part of the weights": args.overlap_param_gather,
    }
    return next((text for text, applies in waiting.items() if applies), None)


def _check_demonstrations(args, size: int) -> None:
    if args.demonstrations_per_step and (args.rollouts or args.docs_per_step):
        raise ValueError(
            f"--demonstrations-per-step {args.demonstrations_per_step} needs rollouts that this run samples in steps. "
            "Leave out --rollouts and --docs-per-step."
        )
    if args.demonstrations_per_step and args.microbatch_means:
        raise ValueError(
            f"--microbatch-means {args.microbatch_means} reweighs advantages, and the samples of "
            f"--demonstrations-per-step {args.demonstrations_per_step} have none. Leave one of them out."
        )
    if not 0 <= args.demonstrations_per_step < args.global_batch_size or args.demonstrations_per_step % size:
        raise ValueError(
            f"--demonstrations-per-step {args.demonstrations_per_step} is not a multiple of {size} data-parallel ranks "
            f"below --global-batch-size {args.global_batch_size}. Give such a multiple."
        )


def _check_division(args, size: int) -> None:
    """Parts of a step for --microbatch-means, and steps of a rollout batch."""
    if args.microbatch_means and (
        args.loss_aggregation != "token_mean" or args.global_batch_size % args.microbatch_means or size > 1
    ):
        raise ValueError(
            f"--microbatch-means {args.microbatch_means} needs --loss-aggregation token_mean (not "
            f"{args.loss_aggregation}), one data-parallel rank (not {size}) and a divisor of --global-batch-size "
            f"{args.global_batch_size}. Correct them."
        )
    # Steps of documents need not divide a rollout batch.
    samples = 0 if args.docs_per_step else args.prompts_per_rollout * args.group_size
    if args.prompts_per_rollout % size or samples % _rollouts_per_step(args) or args.exact_match_prompts % size:
        raise ValueError(
            f"--prompts-per-rollout {args.prompts_per_rollout} x --group-size {args.group_size} = {samples} samples do "
            f"not divide over {size} data-parallel ranks and steps of {_rollouts_per_step(args)} (--global-batch-size "
            "less the demonstrations). Choose multiples."
        )


def _check_layers(args) -> None:
    if args.transformer_impl not in ("local", "transformer_engine"):
        raise ValueError(
            f"--transformer-impl {args.transformer_impl} is not supported by the example. Choose local or "
            "transformer_engine."
        )
    if args.transformer_impl == "local" and args.fp8:
        raise ValueError(
            f"--fp8-format {args.fp8} has no effect on the layers of --transformer-impl local, so the run is not in "
            "FP8. Use --transformer-impl transformer_engine."
        )
    gathers = args.transformer_impl == "local" and (args.docs_per_step or args.context_parallel_size > 1)
    softmax = vars(args).get("softmax_type") or "vanilla"
    if gathers and (args.attention_dropout or softmax != "vanilla"):
        raise ValueError(
            f"--attention-dropout {args.attention_dropout} or --softmax-type {softmax} has no effect on the attention "
            "of packed rows and context parallelism with --transformer-impl local. Give 0 and vanilla, or use "
            "transformer_engine."
        )
    if args.use_rope_scaling and vars(args).get("hybrid_layer_pattern"):
        raise ValueError(
            "--use-rope-scaling has no effect on the model of --hybrid-layer-pattern, which takes no scaling. Leave "
            "one of them out."
        )


def _check_task(args) -> None:
    """The task's prompts and tokens fit the model."""
    vocabulary, longest = task_of(args).vocabulary, task_of(args).max_length
    if not args.rollouts and args.seq_length < longest:
        raise ValueError(
            f"--seq-length {args.seq_length} is shorter than a prompt and its longest response of --task {args.task}, "
            f"and samples would not fit. Give {longest} or more, also for --max-position-embeddings."
        )
    if args.pg_vocab_size is not None and args.pg_vocab_size < vocabulary:
        raise ValueError(
            f"--pg-vocab-size {args.pg_vocab_size} is smaller than the task's vocabulary of {vocabulary} tokens. Leave "
            "it out."
        )


def _without_effect(args) -> str | None:
    """A flag that nothing would read."""
    is_sampled = not (args.rollouts or args.docs_per_step)
    ignored = {
        f"--top-p-logprobs {args.top_p_logprobs} without --top-p": args.top_p == 1
        and args.top_p_logprobs != "sampling_mask",
        "--teacher-num-layers without --teacher": args.teacher_num_layers and not args.teacher,
        "--teacher-hidden-size without --teacher": args.teacher_hidden_size and not args.teacher,
        "--microbatch-means with --rollouts or --docs-per-step": args.microbatch_means and not is_sampled,
        "--discard-rollouts with --rollouts or --docs-per-step": args.discard_rollouts and not is_sampled,
    }
    return next((name for name, applies in ignored.items() if applies), None)


def _cannot_cache(args) -> str | None:
    """What of the flags the cached sampler does not take."""
    refused = {
        f"--task {args.task}": task_of(args).prompt_length is None,
        "a pipeline of several stages": args.pipeline_model_parallel_size > 1,
        "context parallelism": args.context_parallel_size > 1,
        "--sequence-parallel": args.sequence_parallel,
        "--num-experts": bool(args.num_experts),
        "--hybrid-layer-pattern": bool(vars(args).get("hybrid_layer_pattern")),
    }
    return next((name for name, applies in refused.items() if applies), None)


@contextlib.contextmanager
def megatron_output(path: str | None) -> Iterator[None]:
    """Send the standard output to a file while Megatron runs."""
    if path is None:
        yield
        return
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


@record
def main() -> None:
    """Parse the example's flags early, because the output moves before Megatron starts."""
    parser = add_example_arguments(ArgumentParser(add_help=False, allow_abbrev=False))
    early, _ = parser.parse_known_args(sys.argv[1:])
    example = Example()

    def datasets(num_samples, vp_stage=None):
        check_example(get_args())
        return example.datasets(num_samples, vp_stage)

    datasets.is_distributed = True  # every rank builds its own iterator
    try:
        with megatron_output(early.megatron_log):
            pretrain(
                train_valid_test_dataset_provider=datasets,
                model_provider=example.model_provider,
                model_type=ModelType.encoder_or_decoder,
                extra_args_provider=add_example_arguments,
                on_step=example.on_step,
                say=lambda text: None if text.startswith("pg ") else say(text),  # the folder has a progress line
            )
    finally:
        if example.documents is not None:
            example.documents.close()
        if example.folder is not None:
            example.folder.close()
            say(f"run folder: {example.folder.path}  ({example.folder.files})")
            if example.sampled_tokens:
                speed = example.sampled_tokens / example.sampling_seconds
                say(f"rank 0 sampled {example.sampled_tokens} response tokens, {speed:.0f} per second")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
