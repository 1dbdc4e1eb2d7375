"""One optimizer step over D x C x TP ranks in one process, through Megatron's own schedule function.

Every rank is a thread with real (threaded) process groups; the "model" is a table of logits, one leaf per
micro-batch, so the gradient with respect to every logit of every sample can be compared. What DDP and finalize do to
gradients (a factor, a sum) is applied by formula.
"""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace

import threads
import torch
import torch.distributed as dist
from cpu import cpu_megatron
from megatron.core.pipeline_parallel.schedules import forward_backward_no_pipelining
from megatron.core.transformer import TransformerConfig
from torch import Tensor

from megatron_pg.batch import PackedBatch, pack
from megatron_pg.kernels import LossTerms
from megatron_pg.objectives import objective_of
from megatron_pg.objectives.corrections.correction import NONE, Correction
from megatron_pg.plan.planned_step import PlannedStep
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.loss import microbatch_loss
from megatron_pg.step.loss_scaling import LossScaling

EPS_LOW, EPS_HIGH = 0.2, 0.28


@dataclass(frozen=True)
class Layout:
    """Sizes of a run: data, context, tensor parallel, micro-batches per rank."""

    data: int = 1
    context: int = 1
    tensor: int = 1
    microbatches: int = 1
    qkv_format: str = "thd"
    pipeline: int = 1  # stages before the last contribute the identity to the metrics
    padding: int = 0  # further multiples of 2·C·TP positions in every row

    @property
    def world_size(self) -> int:
        return self.data * self.context * self.tensor

    @property
    def name(self) -> str:
        """Short, for the ids of tests."""
        sizes = {"D": self.data, "C": self.context, "T": self.tensor, "M": self.microbatches, "P": self.pipeline}
        parts = [f"{letter}{size}" for letter, size in sizes.items() if size > 1 or letter == "M"]
        return "-".join(
            [*parts, *(["bshd"] if self.qkv_format == "bshd" else []), *(["padded"] if self.padding else [])]
        )

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        return rank // (self.context * self.tensor), rank // self.tensor % self.context, rank % self.tensor


LAYOUTS = [
    Layout(),
    Layout(microbatches=3, qkv_format="bshd"),
    Layout(data=2, microbatches=2),
    Layout(context=2, microbatches=2),
    Layout(context=2, microbatches=2, qkv_format="bshd"),
    Layout(context=4, padding=1),
    Layout(tensor=2, microbatches=2),
    Layout(data=2, context=2, tensor=2, microbatches=2),
]


@dataclass
class Outcome:
    """What the optimizer and the log would see."""

    gradients: list[Tensor]  # [n, V] of every sample, after DDP and finalize
    reported: float  # Megatron's sum over sum of the report
    metrics: dict[str, float]
    num_nonfinite: int  # trained tokens that the step's check would stop at


GRPO = LossTerms(objective=objective_of("grpo", clip_eps_low=EPS_LOW, clip_eps_high=EPS_HIGH))


def settings(
    aggregation: str,
    *,
    per_token: bool,
    divisor: float | None = None,
    reducer=None,
    temperature: float = 1.0,
    terms: LossTerms = GRPO,
    correction: Correction = NONE,
    **rest,
) -> LossSettings:
    return LossSettings(
        aggregation=aggregation,
        divisor=divisor,
        reducer=reducer,
        per_token=per_token,
        terms=terms,
        correction=correction,
        temperature=temperature,
        impl="torch",
        metrics=metrics_of("with_entropy", terms, correction),
        **rest,
    )


def scatter_samples(samples: Sequence[Sample], layout: Layout, rng: random.Random) -> list[list[list[int]]]:
    """A random assignment of samples to [data rank][micro-batch]; some micro-batches and ranks stay empty."""
    cells = [[[] for _ in range(layout.microbatches)] for _ in range(layout.data)]
    used = [row for row in cells if rng.random() < 0.8] or cells
    order = list(range(len(samples)))
    rng.shuffle(order)
    for i in order:
        rng.choice(rng.choice(used)).append(i)
    return cells


@dataclass(frozen=True)
class Step:
    """One optimizer step and how it is cut."""

    samples: Sequence[Sample]
    logits: Sequence[Tensor]  # [n, V] of every sample
    loss: LossSettings
    cells: list[list[list[int]]]  # samples of [data rank][micro-batch]
    filling: float = math.nan  # logits at positions without a sample
    batches: list[list[PackedBatch]] | None = None  # of [data rank][micro-batch], where they were packed already
    weight_version: int | None = None  # the trainer's


def run_step(
    samples: Sequence[Sample], logits: Sequence[Tensor], layout: Layout, loss: LossSettings, rng: random.Random
) -> Outcome:
    """One randomly cut step of the whole world; `logits` are [n, V] per sample."""
    return run_steps([Step(samples, logits, loss, scatter_samples(samples, layout, rng))], layout)[0]


def run_steps(steps: Sequence[Step], layout: Layout) -> list[Outcome]:
    """Independent steps, one after the other, in one world: starting the ranks and groups is paid for once."""
    ranks = threads.run(layout.world_size, lambda rank: _run_rank(rank, steps, layout))
    return [_finalize(results, step, layout) for step, *results in zip(steps, *ranks, strict=True)]


def groups_of(rank: int, layout: Layout) -> list[dist.ProcessGroup]:
    """The data-, tensor- and context-parallel groups of a rank."""
    shared = ((1, 2), (0, 1), (0, 2))  # coordinates that the members of each have in common
    return [
        threads.subgroup(lambda r, own=own: tuple(layout.coordinates(r)[k] for k in own), layout.world_size, rank)
        for own in shared
    ]


def _run_rank(rank: int, steps: Sequence[Step], layout: Layout) -> list[SimpleNamespace]:
    groups = groups_of(rank, layout)
    return [_run_rank_step(rank, step, layout, groups) for step in steps]


def _run_rank_step(rank: int, step: Step, layout: Layout, groups: Sequence[dist.ProcessGroup]) -> SimpleNamespace:
    d, loss = layout.coordinates(rank)[0], step.loss
    cells = step.cells[d]
    batches = step.batches[d] if step.batches else pack_cells(step.samples, cells, layout)
    # one process has numbered the samples
    rule = replace(loss.plan_rule, numbers_may_repeat=False, weight_version=step.weight_version)
    planned = PlannedStep.of(lambda: batches, loss, group=groups[0], rule=rule)
    found = train(planned, step.logits, cells, loss, layout, rank, groups, filling=step.filling)
    found.plan = planned.plan
    return found


def train(
    planned: PlannedStep,
    logits: Sequence[Tensor],
    cells: Sequence[Sequence[int]],
    loss: LossSettings,
    layout: Layout,
    rank: int,
    groups: Sequence[dist.ProcessGroup],
    *,
    filling: float = math.nan,
    **scaling,
) -> SimpleNamespace:
    """A rank's micro-batches through Megatron's schedule; `logits` are those of all samples of the step."""
    tensor_rank = layout.coordinates(rank)[2]
    locals_ = planned.slices(lambda _: groups[2])
    leaves = [
        _leaf(local, [logits[i] for i in cell], logits[0], tensor_rank, layout.tensor, filling)
        for local, cell in zip(locals_, cells, strict=True)
    ]
    scale = LossScaling(
        per_token=loss.per_token,
        num_microbatches=len(cells),
        data_parallel_size=layout.data,
        context_parallel_size=layout.context,
        **scaling,
    )
    tensor_group = groups[1] if layout.tensor > 1 else None
    outputs, reports, counted = _schedule(locals_, leaves, scale, loss, layout, tensor_group)
    rows = zip(locals_, leaves, cells, strict=True)
    return SimpleNamespace(
        rank=rank,
        pieces=[piece for each in rows for piece in _sample_rows(*each)],
        reports=reports,
        counted=counted,
        kept=[output.kept for output in outputs if output.kept is not None],
        partials=torch.stack([output.partial for output in outputs]),
        num_nonfinite=sum(int(output.nonfinite[0]) for output in outputs),
    )


def _schedule(locals_, leaves, scaling: LossScaling, loss: LossSettings, layout: Layout, tp_group):
    """Megatron's schedule over this rank's micro-batches."""
    outputs, finalized = [], []

    def forward_step(data_iterator, model):
        local, leaf = next(data_iterator)
        with torch._C.DisableTorchFunction():  # the mode below is for Megatron, and slow
            total, found = microbatch_loss(leaf.reshape(-1, leaf.shape[-1]), local.fields, loss, tp_group)
        outputs.append(found)
        return total, lambda out: scaling.outputs(out, policy=found.policy)

    config = TransformerConfig(
        num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=scaling.per_token
    )
    config.finalize_model_grads_func = lambda model, count, **rest: finalized.append(count)
    model = torch.nn.Module()
    model.config, model.set_input_tensor, model.model_type = config, lambda tensor: None, None
    size = lambda n: SimpleNamespace(size=lambda: n, rank=lambda: 0)  # noqa: E731
    groups = SimpleNamespace(
        tp=size(layout.tensor),
        cp=size(layout.context),
        pp=size(1),
        dp_cp=size(layout.data * layout.context),
        embd=None,  # 0.16 asks for them
        pos_embd=None,
    )
    with cpu_megatron.CudaMeansCPU():
        reports = forward_backward_no_pipelining(
            forward_step_func=forward_step,
            data_iterator=iter(list(zip(locals_, leaves, strict=True))),
            model=model,
            num_microbatches=len(locals_),
            seq_length=0,
            micro_batch_size=0,
            pg_collection=groups,
        )
    return outputs, reports, int(finalized[0]) if scaling.per_token else 0


def pack_cells(samples: Sequence[Sample], cells: Sequence[Sequence[int]], layout: Layout) -> list[PackedBatch]:
    return [_pack([samples[i] for i in cell], layout) for cell in cells]


def _pack(samples: Sequence[Sample], layout: Layout) -> PackedBatch:
    filling = layout.padding * 2 * layout.context * layout.tensor
    if layout.qkv_format == "bshd":
        width = 24 + -24 % (2 * layout.context) + filling
        return pack(samples, qkv_format="bshd", cp_size=layout.context, max_seq_len=width, rows=max(len(samples), 2))
    settings = {"qkv_format": "thd", "cp_size": layout.context, "multiple_of": layout.tensor * layout.context}
    batch = pack(samples, **settings)
    return pack(samples, **settings, max_seq_len=batch.num_positions + filling) if filling else batch


def _leaf(local, logits: Sequence[Tensor], like: Tensor, tp_rank: int, tp_size: int, filling: float) -> Tensor:
    """[W/C, B, V/tp] leaf: this rank's rows and vocabulary slice, `filling` at positions without a sample.

    `logits` are those of the samples of the micro-batch, which may have none; `like` those of any sample.
    """
    whole, vocabulary = local.whole, like.shape[1]
    rows = like.new_full((*whole.tokens.shape, vocabulary), filling)
    for i, table in enumerate(logits):
        rows[whole.sample_index == i] = table
    shard = vocabulary // tp_size
    mine = rows[:, local.row_index, tp_rank * shard : (tp_rank + 1) * shard]
    return mine.transpose(0, 1).contiguous().requires_grad_()


def _sample_rows(local, leaf: Tensor, cell: Sequence[int]) -> list[tuple[int, Tensor, Tensor]]:
    """(sample, positions, gradient rows) of what this rank holds."""
    index = local.whole.sample_index[:, local.row_index]
    positions = local.whole.position_ids[:, local.row_index]
    gradient = leaf.grad.transpose(0, 1)
    assert not gradient[index == -1].any(), "a padding position has a gradient"
    return [(sample, positions[index == i], gradient[index == i]) for i, sample in enumerate(cell)]


def gradients_of(results, logits: Sequence[Tensor], layout: Layout, factor: float) -> list[Tensor]:
    """[n, V] of every sample, the sum over all ranks, times a factor."""
    gradients = [torch.zeros_like(table) for table in logits]
    for result in results:
        tensor_rank = layout.coordinates(result.rank)[2]
        for sample, positions, rows in result.pieces:
            columns = slice(tensor_rank * rows.shape[1], (tensor_rank + 1) * rows.shape[1])
            gradients[sample][positions, columns] += rows * factor
    return gradients


def _finalize(results, step: Step, layout: Layout) -> Outcome:
    loss, first = step.loss, [r for r in results if layout.coordinates(r.rank)[2] == 0]
    counted = sum(result.counted for result in first)
    factor = 1.0 / counted if loss.per_token else 1.0 / (layout.data * layout.context)
    gradients = gradients_of(results, step.logits, layout, factor)
    numerator, denominator = (
        sum(sum(float(report["pg_loss"][k]) for report in result.reports) for result in first) for k in (0, 1)
    )
    idle = torch.tensor(loss.metrics.identity(), dtype=torch.float64).repeat(
        (layout.pipeline - 1) * layout.world_size, 1
    )
    partials = torch.cat([idle, *(result.partials for result in first)])
    metrics = loss.metrics.finish(loss.metrics.combine(partials).tolist(), results[0].plan)
    return Outcome(gradients, numerator / denominator, metrics, sum(result.num_nonfinite for result in first))
