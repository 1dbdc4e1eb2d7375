"""Real Megatron ranks over gloo: a script that runs a list of cases and leaves their results as files.

    python -m torch.distributed.run --nproc-per-node 2 tests/ranks/programs/ranks.py OUT_DIR case [case …]

Starting processes is what costs, so one launch runs many cases: `tp2s-constant-tied` trains one step of that layout and
aggregation and saves the gradients, `dp2-constant-docs` takes the same samples as one step of `--docs-per-step`,
`dp2-constant-nan` seeds a fault of `rank_faults`, `startup-loss_aggregation` starts with arguments that differ between
the ranks.
"""

import faulthandler
import gc
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from cpu import cpu_megatron

cpu_megatron.enable()

import megatron.core
import prediction_oracle
import rank_faults
import rank_model
import torch
from capped_layers import put_cap_into
from compare import OF_RANKS
from loop.routing_replay import MegatronReplay, chosen_experts
from loss_terms import kl_and_entropy
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from rank_model import EXPERTS, LAYERS, LOSSES, OPTIONS, VOCABULARY, WIDTH, Layout
from samples import random_step
from teacher_files import write_head
from torch.distributed import distributed_c10d

from megatron_pg.batch import cut_over_ranks, pack
from megatron_pg.declarations.loss_terms import LossTerm
from megatron_pg.kernels import LossTerms
from megatron_pg.lm_head.teacher_file import TeacherHead
from megatron_pg.metrics import Reduction
from megatron_pg.objectives import objective_of
from megatron_pg.plan.documents import DocumentAccumulator, EndOfDocuments, Packing, Position, StepRule
from megatron_pg.plan.settings import LossSettings, metrics_of
from megatron_pg.plan.shared_documents import SharedDocumentAccumulator
from megatron_pg.rollouts.payloads import PAYLOADS
from megatron_pg.rollouts.payloads.topk import TokenSets
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.forward_step import PolicyGradientStep

DIVISOR = 32.0
PARTS = 4  # micro-batches of a step, on all ranks, whose router's losses are compared
DOCUMENTS_WIDTH = (
    12  # of rows of documents: small, so that the ranks need several micro-batches, and not the same number
)


@dataclass(frozen=True)
class Case:
    """A layout and an aggregation, with options and a fault: `dp2-constant-dist-nan`."""

    name: str
    layout: Layout
    aggregation: str
    fault: str = ""
    takes_documents: bool = False
    part: int | None = None  # the one micro-batch that is run of the step's PARTS

    @classmethod
    def parse(cls, name: str) -> "Case":
        layout, aggregation, *words = name.split("-")
        options = frozenset(word for word in words if word in OPTIONS)
        part = next((int(word[-1]) for word in words if re.fullmatch(r"part\d", word)), None)
        fault = "".join(word for word in words if word not in (*OPTIONS, "docs", f"part{part}"))
        return cls(name, Layout(layout, options), aggregation, fault, "docs" in words, part)

    @property
    def is_router_alone(self) -> bool:
        """Whether the gradient is that of the router's losses: nothing has an advantage."""
        return bool(self.layout.options & LOSSES.keys())


def samples(options: frozenset[str] = frozenset()):
    """The one step that every case trains on; with `replay` each token has experts at random, another choice in every
    layer."""
    step, rng = random_step(random.Random(11), vocabulary=VOCABULARY, poison=True), random.Random(12)
    if options & {"terms", "whole"}:
        step = [mixed(sample, number) for number, sample in enumerate(step)]
        return [taught(sample, number) for number, sample in enumerate(step)] if "whole" in options else step
    if "turns" in options:
        return [with_turns(sample, rng) for sample in step]
    if "kept" in options:
        return [with_sampling_masks(sample, rng) for sample in step]
    if "critic" in options:
        return [with_values(sample, rng) for sample in step]
    if "replay" not in options:
        return step
    chosen = [[[rng.sample(range(EXPERTS), 2) for _ in range(LAYERS)] for _ in each.tokens[1:]] for each in step]
    return [
        replace(each, routed_experts=torch.tensor(own, dtype=torch.int32))
        for each, own in zip(step, chosen, strict=True)
    ]


NUM_SAMPLES = len(samples())  # with any options


TERMS = (
    *kl_and_entropy(entropy_coef=0.05, aggregation="sample_mean"),
    LossTerm(name="sft", kind="ce", weight=0.3, aggregation="token_mean"),
    LossTerm(name="echo", kind="ce", weight=0.05, aggregation="constant", divisor=9.0),
    LossTerm(name="teacher", kind="opd", weight=0.5, aggregation="prompt_mean", on="rl", estimator="k3_weighted"),
    LossTerm(
        name="wide", kind="topk_jsd", weight=0.4, aggregation="sample_mean", on="rl", mixture=0.3, tail_floor=1e-6
    ),
    LossTerm(name="far", kind="topk_reverse_kl", weight=0.2, aggregation="token_mean", on="sft", tail_floor=1e-6),
)


WHOLE = (
    *TERMS[:4],
    LossTerm(name="wide", kind="full_jsd", weight=0.4, aggregation="sample_mean", on="rl", mixture=0.3),
    LossTerm(name="far", kind="full_jsd", weight=0.2, aggregation="token_mean", on="sft", mixture=0.3),
)
STATES = 6  # width of the teacher's


def taught(sample: Sample, number: int) -> Sample:
    """With a teacher's hidden states in the place of its top-k tokens."""
    states = torch.randn(sample.response_length, STATES, generator=torch.Generator().manual_seed(number))
    return replace(sample, teacher_topk=None, teacher_hidden=states.bfloat16() if number % 2 else states)


def teacher_head() -> TeacherHead:
    """Written by every rank for itself."""
    path = Path(tempfile.mkdtemp()) / "teacher.safetensors"
    write_head(path, torch.randn(VOCABULARY, STATES, generator=torch.Generator().manual_seed(0)))
    return TeacherHead.of(str(path))


def mixed(sample: Sample, number: int) -> Sample:
    """Every third sample is supervised, without what only the objective reads; the others have a teacher, and further
    tokens of `echo`.

    All have the top-k tokens of one, some of them their own.
    """
    sample = replace(sample, teacher_topk=likeliest(sample, number))
    if number % 3 == 2:
        return replace(sample, term="sft", old_logprobs=None, advantages=None)
    teacher = torch.where(sample.loss_mask, 0.5 * sample.old_logprobs - 1.0, torch.nan)
    return replace(sample, teacher_logprobs=teacher, masks={"echo": ~sample.loss_mask} if number % 3 else {})


def with_values(sample: Sample, rng: random.Random) -> Sample:
    """For a critic alone: old values near the model's, and returns."""
    drawn = [torch.tensor([rng.gauss(0.0, 1.0) for _ in sample.loss_mask], dtype=torch.float64) for _ in range(2)]
    values, returns = (torch.where(sample.loss_mask, own, torch.nan) for own in drawn)
    return replace(sample, values=values, returns=returns, old_logprobs=None, advantages=None)


def with_sampling_masks(sample: Sample, rng: random.Random) -> Sample:
    """With 1 to 6 tokens that could be sampled, over which `tp` ranks lie, or the whole vocabulary; one alone is
    certain."""
    sets = []
    for token in sample.tokens[-sample.response_length :].tolist():
        size = rng.randint(0, 6)
        sets.append([token, *rng.sample(sorted({*range(VOCABULARY)} - {token}), size - 1)] if size else [])
    sampling_mask = PAYLOADS["sampling_mask"].of(sets, sample.sample_id)
    known = {name: getattr(sample, name) for name in ("old_logprobs", "ref_logprobs", "rollout_logprobs")}
    certain = {
        n: torch.where(sampling_mask.counts == 1, 0.0, values) for n, values in known.items() if values is not None
    }
    return replace(sample, sampling_mask=sampling_mask, **certain)


def with_turns(sample: Sample, rng: random.Random) -> Sample:
    """With turns of 1 to 4 tokens, and weights of every token."""
    size, turns = sample.response_length, []
    while (rest := size - sum(turns)) > 0:
        turns.append(min(rest, rng.randint(1, 4)))
    weights = torch.tensor([rng.choice([0.0, 1.0, rng.uniform(0.1, 3.0)]) for _ in range(size)], dtype=torch.float64)
    return replace(sample, turns=turns, token_weights=weights)


def likeliest(sample: Sample, number: int) -> TokenSets:
    """1 to 5 of the vocabulary, over which `tp` ranks lie."""
    generator = torch.Generator().manual_seed(number)
    scores = torch.randn(sample.response_length, VOCABULARY, generator=generator).log_softmax(dim=1)
    logprobs, ids = scores.topk(1 + number % 5, dim=1)
    return TokenSets(ids=ids.int(), logprobs=logprobs)


CAP = 1.0  # that some logits are near
HEAD_MODES = {"fused": "forward", "scaled_exp": "scaled_exp", "recompute": "recompute"}


def settings(aggregation: str, options: frozenset[str] = frozenset()) -> LossSettings:
    if "critic" in options:
        terms = LossTerms(objective=objective_of("value_loss", clip=0.7))
        base = settings(aggregation, options - {"critic"})
        return replace(base, terms=terms, metrics=metrics_of("basic", terms, base.correction))
    terms = WHOLE if "whole" in options else TERMS if "terms" in options else ()
    by_default = "forward" if "whole" in options else None
    objective = ("gspo", {}) if "turns" in options else ("grpo", {"clip_eps_low": 0.2, "clip_eps_high": 0.28})
    return LossSettings(
        terms_of_samples=frozenset({"rl", "sft", "echo"}),
        aggregation=aggregation,
        divisor=DIVISOR if aggregation == "constant" else None,
        reducer=None,
        per_token=aggregation == "token_mean",
        terms=LossTerms(objective=objective_of(objective[0], **objective[1]), further=terms),
        sums_weights="turns" in options,
        denominator="varied" if "turns" in options and aggregation != "turn_mean" else "scheduled",
        sequence_level="turn" if "turns" in options else "sample",
        temperature=1.0,
        softcap=CAP if "capped" in options else None,
        impl="torch",
        float32_logits="fp32" in options,
        head_mode=next((mode for word, mode in HEAD_MODES.items() if word in options), by_default),
        teacher_head=teacher_head() if "whole" in options else None,
        mtp_depths=Layout("dp1", options).depths,
        mtp_aggregation="policy" if "own" in options else "token_mean",
        mtp_target="policy" if "policy" in options else "token",
        metrics=Reduction(
            "basic" if "scaled_exp" in options else "with_entropy",
            {"clip", *(["mtp", "further"] if Layout("dp1", options).depths else [])},
        ),
    )


def parts_of(case: Case) -> list[list]:
    """This data-parallel rank's samples in two micro-batches, four in a pipeline (one process: everything in one)."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if case.is_router_alone:
        idle = [
            replace(sample, advantages=torch.zeros_like(sample.advantages)) for sample in samples(case.layout.options)
        ]
        parts = [idle[k::PARTS] for k in range(PARTS)]
        return parts[rank::size] if case.part is None else [parts[case.part]]
    every = samples(case.layout.options)
    if torch.distributed.get_world_size() == 1:
        return [every]
    mine = every[rank::size]
    if "uneven" in case.fault:  # no fault: the last data-parallel rank has nothing to do
        mine = every if rank == 0 else []
    # virtual stages mix their tensors up, if they do, only with more micro-batches than stages
    count = 4 if case.layout.sizes["pp"] > 1 and not case.fault else 2
    return [mine[k::count] for k in range(count)]


def dynamic_batches(case: Case) -> list:
    """This rank's micro-batches: short rows, so that documents lie on one rank, on two and on more."""
    plane = parallel_state.get_data_parallel_group(with_context_parallel=True)
    shape = {"num_microbatches": 4, "rank": plane.rank(), "num_ranks": plane.size()}
    multiple = case.layout.sizes["tp"] if case.layout.sequence_parallel else 1
    return cut_over_ranks(
        samples(case.layout.options), **shape, max_tokens=16, attention_length=8.0, multiple_of=multiple
    )


def shared_documents() -> SharedDocumentAccumulator:
    """What cuts the one step over its own ranks, and then finds no other."""
    plane = parallel_state.get_data_parallel_group(with_context_parallel=True)

    def cut(mine: list, count: int) -> list:
        shape = {"num_microbatches": count, "rank": plane.rank(), "num_ranks": plane.size()}
        return cut_over_ranks(mine, **shape, max_tokens=16, attention_length=8.0)

    rule = StepRule(num_documents=NUM_SAMPLES, policy="exact", end="stop")
    return SharedDocumentAccumulator(rule=rule, cut=cut, room=16 * plane.size(), position=Position(0, (0,)))


def groups_of(case: Case) -> list[list]:
    """This data-parallel rank's documents: every second prompt group, or all of them; under dynamic_cp all."""
    groups: dict[int, list] = {}
    for sample in samples(case.layout.options):
        groups.setdefault(sample.prompt_id, []).append(sample)
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    if "dynamic" in case.layout.options:
        rank, size = 0, 1
    return rank_faults.groups(case.fault, list(groups.values())[rank::size])


def documents_of(case: Case) -> DocumentAccumulator | SharedDocumentAccumulator:
    """What cuts the one step, and then finds no other."""
    if "dynamic" in case.layout.options:
        return shared_documents()
    sizes, is_thd = case.layout.sizes, case.layout.qkv_format == "thd"
    packing = Packing(
        qkv_format=case.layout.qkv_format,
        seq_length=DOCUMENTS_WIDTH,
        micro_batch_size=rows_of(case),
        cp_size=sizes["cp"],
        multiple_of=sizes["tp"] * sizes["cp"] if case.layout.sequence_parallel and is_thd else 1,
        is_static=sizes["pp"] > 1,
    )
    rule = StepRule(num_documents=NUM_SAMPLES + (case.fault == "short"), policy="exact", end="stop")
    position = Position(0, (0,) * parallel_state.get_data_parallel_world_size())
    return DocumentAccumulator(rule=rule, packing=packing, position=position)


def pack_parts(layout: Layout, parts: list[list]) -> list:
    cp_size = layout.sizes["cp"]
    if (
        layout.options & LOSSES.keys()
    ):  # the router sees padding, so every layout has that of two context-parallel ranks
        if layout.qkv_format == "thd":
            return [pack(part, qkv_format="thd", cp_size=2) for part in parts]
        return [pack(part, qkv_format="bshd", max_seq_len=WIDTH, rows=-(-NUM_SAMPLES // PARTS)) for part in parts]
    if layout.qkv_format == "thd":
        multiple = layout.sizes["tp"] * cp_size if layout.sequence_parallel else 1
        return [pack(part, qkv_format="thd", cp_size=cp_size, multiple_of=multiple) for part in parts]
    rows = NUM_SAMPLES if len(parts) == 1 else NUM_SAMPLES // 2 + 1
    return [pack(part, qkv_format="bshd", cp_size=cp_size, max_seq_len=WIDTH, rows=rows) for part in parts]


def run_oracle(case: Case, out: Path) -> None:
    """The case's gradient and metrics by `prediction_oracle`, in one process."""
    (model,) = rank_model.build(case.layout, per_token=False)
    options = {"depths": case.layout.depths, "factor": rank_model.MTP_FACTOR, "own": "own" in case.layout.options}
    options["of_policy_target"] = "policy" in case.layout.options
    divisor = DIVISOR if case.aggregation == "constant" else None
    metrics = prediction_oracle.backward(model, samples(), aggregation=case.aggregation, divisor=divisor, **options)
    for parameter in model.parameters():
        parameter.main_grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    rank_model.save_gradients(out / f"{case.name}.0.npz", case.layout, [SimpleNamespace(module=model)])
    (out / f"{case.name}.0.json").write_text(json.dumps({"metrics": metrics}), encoding="utf-8")


def run_case(case: Case, out: Path) -> None:
    model_parallel_cuda_manual_seed(1)
    MTPLossLoggingHelper.tracker.clear()  # Megatron's own log, for the number of depths of the first model
    if case.fault == "oracle":
        run_oracle(case, out)
        return
    reports = []
    step = PolicyGradientStep(
        rank_faults.settings(case.fault, settings(case.aggregation, case.layout.options)),
        reports.append,
        documents_of(case) if case.takes_documents else None,
        MegatronReplay() if case.layout.options & {"replay", "choice"} else None,
        "dynamic" in case.layout.options,
    )
    chunks = rank_model.build(case.layout, per_token=case.aggregation == "token_mean")
    rank_faults.change_model(case.fault, chunks[-1])
    for chunk in chunks:
        if chunk.post_process and "gemma" in case.layout.options:
            put_cap_into(chunk.output_layer, CAP)
        if chunk.post_process and case.fault != "detached":
            step.attach(chunk)
            rank_faults.change_prediction(case.fault, step, chunk)
    plans: list = []
    if "pieces" in case.layout.options:
        rank_model.count_plans(chunks, plans)
    wrapped = rank_model.wrap(case.layout, chunks)
    if case.fault == "unreduced":
        chunks[0].config.finalize_model_grads_func = None
    virtual = len(chunks) > 1
    if case.takes_documents:
        parts, source = [], rank_faults.documents(case.fault, groups_of(case))
    else:
        parts = parts_of(case)
        if "choice" in case.layout.options:
            parts = [
                [replace(each, routed_experts=chosen_experts(chunks[0], each.tokens)) for each in part]
                for part in parts
            ]
        make = lambda parts: pack_parts(case.layout, parts)  # noqa: E731
        if "dynamic" in case.layout.options:
            made = dynamic_batches(case)
            parts, make = [list(batch.samples) for batch in made], lambda parts: made
        source = rank_faults.batches(case.fault, parts, make)
    arguments = {
        "forward_step_func": step.forward_step,
        "data_iterator": source,
        "model": wrapped if virtual else wrapped[0],
        "num_microbatches": len(parts),  # of no consequence with documents
        "seq_length": DOCUMENTS_WIDTH if case.takes_documents else WIDTH,
        "micro_batch_size": rows_of(case),
        "forward_only": case.fault == "evaluate",
    }
    if virtual:
        arguments["data_iterator"] = [arguments["data_iterator"], None]  # one source is read, for all stages
    given = rank_faults.arguments(case.fault, arguments)
    losses = step.forward_backward(get_forward_backward_func(), **given)
    assert len(plans) == (len(parts) * len(chunks) if "pieces" in case.layout.options else 0)
    rank = torch.distributed.get_rank()
    rank_model.save_gradients(out / f"{case.name}.{rank}.npz", case.layout, wrapped)
    farewell = end_of(step, given) if case.takes_documents else None
    save_report(out / f"{case.name}.{rank}.json", losses, reports[0], farewell, len(plans))


def rows_of(case: Case) -> int:
    if case.is_router_alone:
        return 1 if case.layout.qkv_format == "thd" else -(-NUM_SAMPLES // PARTS)
    if case.layout.qkv_format == "thd":
        return 1
    return 3 if case.takes_documents else NUM_SAMPLES // 2 + 1


def end_of(step: PolicyGradientStep, arguments: dict) -> str | None:
    """What a further step says, for which no document is left."""
    try:
        step.forward_backward(get_forward_backward_func(), **arguments)
    except EndOfDocuments as end:
        return str(end)
    return None


def save_report(path: Path, losses: list, report, farewell: str | None, plans: int) -> None:
    reported = [[float(v) for v in next(iter(loss.values()))] for loss in losses]
    result = {
        "metrics": {name: value for name, value in report.metrics.items() if name not in OF_RANKS},
        "num_tokens": report.plan.num_tokens,
        "num_positions": report.plan.num_positions,
        "reported": reported,
        "release": megatron.core.__shortversion__,
        "farewell": farewell,
        "plans": plans,
    }
    path.write_text(json.dumps(result), encoding="utf-8")


def save_error(path: Path, error: Exception, seconds: float) -> None:
    record = {"message": f"{type(error).__name__}: {error}", "seconds": seconds}
    path.write_text(json.dumps(record), encoding="utf-8")


def free_groups() -> None:
    """Megatron forgets its groups and never frees them, and every one of gloo's keeps its threads."""
    parallel_state.destroy_model_parallel()
    free_groups_but({torch.distributed.group.WORLD})


def free_groups_but(kept: set) -> None:
    """Some cases make their own groups: meshes of FSDP, ranks of micro-batches."""
    if made := [group for group in distributed_c10d._world.pg_map if group not in kept]:
        getattr(RotaryEmbedding.forward, "cache_clear", int)()  # it remembers arguments, groups among them
        take_apart_fsdp()
        gc.collect()
        for group in made:
            torch.distributed.destroy_process_group(group)


def take_apart_fsdp() -> None:
    """Empty what Megatron-FSDP has made, whose hooks are in cycles that Python's collector cannot see.

    Otherwise its groups are never freed. Each of gloo's groups has a thread that wakes up a hundred times a second:
    after fifty cases, 650 of them took half of the time.
    """
    for each in gc.get_objects():
        if "megatron_fsdp" in type(each).__module__ and hasattr(each, "__dict__"):
            each.__dict__.clear()


def main() -> None:
    faulthandler.enable()  # a crash prints where every thread was
    torch.set_num_threads(1)
    gc.freeze()  # free_groups then goes over the groups, not over all of torch and Megatron
    torch.distributed.init_process_group("gloo")
    out, previous = Path(sys.argv[1]), None
    for name in sys.argv[2:]:
        started = time.monotonic()
        case = None if name.startswith("startup-") else Case.parse(name)
        groups = None if case is None or case.fault else (case.layout.sizes, case.layout.virtual_stages)
        if groups is None or groups != previous:  # a fault gets its own
            free_groups()
            if case is not None:
                rank_model.initialize(case.layout)
        previous, before = groups, set(distributed_c10d._world.pg_map)
        try:
            if case is None:
                rank_faults.start_with(name.split("-", 1)[1], out)
            else:
                run_case(case, out)
        except Exception as error:
            if case is not None and not case.fault:
                raise
            save_error(out / f"{name}.{torch.distributed.get_rank()}.error", error, time.monotonic() - started)
        torch.distributed.barrier()
        free_groups_but(before)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
