"""Open steps on real ranks over gloo, each compared with the closed step of the same model and wrapper.

    torchrun ... tests/ranks/programs/open_ranks.py OUT CASE...

A case is one of `ranks.py`, `dp2-constant-dist-overlap`. Its model runs an open step, a closed one, open steps with
other guesses of N, splits and micro-batches that are given to close, steps that fail and are abandoned, and closed
ones, which must have the bits of the first. The words `nothing` (all groups arrive on rank 0), `sft` (demonstrations
are given to close), `faults` (mistakes on rank 1), `memory` and `entropy` (with `gspo`, that objective) change it.
"""

import argparse
import gc
import json
import random
import sys
from dataclasses import replace
from pathlib import Path

import ranks  # enables the CPU before Megatron is imported

# isort: split
import rank_faults
import rank_model
import torch
from compare import OF_RANKS
from loop.routing_replay import MegatronReplay
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from rank_model import WIDTH
from ranks import Case

from megatron_pg import LossTerm
from megatron_pg.args import add_arguments, validate_args
from megatron_pg.batch import LocalBatch, PackedBatch, pack
from megatron_pg.plan.settings import LossSettings
from megatron_pg.rollouts.sample import Sample
from megatron_pg.step.forward_step import PolicyGradientStep

GUESSES = {"sample_mean": 7, "prompt_mean": 3, "token_mean": 100, "constant": 1}
NOTHING = "nothing was raised"
SFT = LossTerm(name="sft", kind="ce", weight=0.3, aggregation="token_mean")


class Trial:
    """One case's model, and its steps."""

    def __init__(self, case: Case):
        self.case, self.reports = case, []
        MTPLossLoggingHelper.tracker.clear()  # Megatron's own log, for the number of depths of the first model
        replay = MegatronReplay() if "replay" in case.layout.options else None
        self.step = PolicyGradientStep(self.loss(), self.reports.append, routing_replay=replay)
        chunks = rank_model.build(case.layout, per_token=case.aggregation == "token_mean")
        for chunk in chunks:
            if chunk.post_process:
                self.step.attach(chunk)
        self.wrapped = rank_model.wrap(case.layout, chunks)
        self.model = self.wrapped if len(chunks) > 1 else self.wrapped[0]
        self.samples = ranks.samples(case.layout.options)
        self.rank = parallel_state.get_data_parallel_rank()
        self.shape = {"seq_length": WIDTH, "micro_batch_size": ranks.rows_of(case)}

    def loss(self) -> LossSettings:
        loss = ranks.settings(self.case.aggregation, self.case.layout.options)
        loss = rank_faults.settings("gspo", loss) if "gspo" in self.case.fault else loss
        return replace(loss, terms=replace(loss.terms, further=(SFT,))) if "sft" in self.case.fault else loss

    def groups(self) -> list[list[Sample]]:
        """This data-parallel rank's prompt groups."""
        if "nothing" not in self.case.fault:
            return ranks.groups_of(replace(self.case, fault=""))
        return [self.samples] if self.rank == 0 else []

    def demonstrations(self) -> list[Sample]:
        own = self.samples[self.rank :: parallel_state.get_data_parallel_world_size()]
        if "sft" not in self.case.fault:
            return []
        changed = {"term": "sft", "old_logprobs": None, "advantages": None, "reward": None}
        named = [(sample, f"sft {sample.sample_id}") for sample in own]
        return [replace(sample, rollout_id=name, **changed | {"prompt_id": name}) for sample, name in named]

    def pack(self, parts: list[list[Sample]]) -> list[PackedBatch]:
        layout = self.case.layout
        if layout.qkv_format == "thd":
            return ranks.pack_parts(layout, parts)
        shape = {"max_seq_len": WIDTH, "rows": self.shape["micro_batch_size"]}
        return [pack(part, qkv_format="bshd", cp_size=layout.sizes["cp"], **shape) for part in parts]

    def split(self, samples: list[Sample]) -> list[list[Sample]]:
        """Micro-batches: their number suits virtual stages, and rows hold their samples."""
        count = max(2, -(-len(samples) // self.shape["micro_batch_size"]))
        count += count % 2
        return [samples[k::count] for k in range(count)]

    def closed(self) -> None:
        for chunk in self.wrapped:
            chunk.zero_grad_buffer()
        parts = self.split([sample for group in self.groups() for sample in group] + self.demonstrations())
        every = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(every, torch.tensor([len(parts)]))
        batches = self.pack(parts + [[]] * (int(max(every)) - len(parts)))
        iterator = iter(batches)
        self.step.forward_backward(
            get_forward_backward_func(),
            forward_step_func=self.step.forward_step,
            data_iterator=[iterator, None] if len(self.wrapped) > 1 else iterator,
            model=self.model,
            num_microbatches=len(batches),
            **self.shape,
        )

    def open(self, expected: int):
        return self.step.open_step(self.model, expected=expected, **self.shape)

    def add_all(self, opened, seed: object, *, held: int = 0) -> list[PackedBatch]:
        """Random adds; returns what is held back for close."""
        rng, groups = random.Random(f"{seed} {self.rank}"), self.groups()
        rng.shuffle(groups)
        rest, groups = groups[:held], groups[held:]
        while groups:
            count = rng.randint(1, len(groups))
            opened.add(self.pack(self.split([sample for group in groups[:count] for sample in group])))
            groups = groups[count:]
            if rng.random() < 0.3:
                opened.add([])
        left = [sample for group in rest for sample in group] + self.demonstrations()
        return self.pack(self.split(left)) if left else []

    def gradients(self) -> list[torch.Tensor]:
        if "dist" in self.case.layout.options:
            rank_model.gather_shards(self.wrapped)
        return [p.main_grad.clone() for chunk in self.wrapped for p in chunk.parameters()]

    def save(self, out: Path, name: str) -> None:
        rank = torch.distributed.get_rank()
        rank_model.save_gradients(out / f"{name}.{rank}.npz", self.case.layout, self.wrapped)
        metrics = {key: value for key, value in self.reports[-1].metrics.items() if key not in OF_RANKS}
        (out / f"{name}.{rank}.json").write_text(json.dumps({"metrics": metrics}), encoding="utf-8")

    def configuration(self) -> dict:
        return dict(vars(self.wrapped[0].config))


def same_bits(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, first, second))


def run(case: Case, out: Path) -> None:
    model_parallel_cuda_manual_seed(1)
    trial = Trial(case)
    before = trial.configuration()
    steps = [(16, 0), (GUESSES[case.aggregation], 1)]
    closed = None
    for number, (expected, held) in enumerate(steps):
        opened = trial.open(expected)
        report = opened.close(trial.add_all(opened, number, held=held if trial.groups() else 0))
        assert report is trial.reports[-1]
        trial.save(out, f"{case.name}-open{number}")
        if closed is None:
            trial.closed()
            trial.save(out, case.name)
            closed = trial.gradients()
    exact = trial.open(trial.reports[0].plan.number)
    exact.close(trial.add_all(exact, "exact"))
    trial.save(out, f"{case.name}-exact")
    abandon_in_every_way(trial, closed)
    assert trial.configuration() == before


def abandon_in_every_way(trial: Trial, closed: list[torch.Tensor]) -> None:
    """After adds, and after an exception in the middle of a backward on every rank: the next step has the same bits.

    A pipeline stage that fails alone leaves the others in a transfer, so there only the first is tried.
    """
    opened = trial.open(3)
    trial.add_all(opened, "abandoned")
    opened.abandon()
    trial.closed()
    assert same_bits(trial.gradients(), closed)
    if trial.case.layout.sizes["pp"] > 1:
        return
    opened = trial.open(3)
    parameters = [p for chunk in trial.wrapped for p in chunk.parameters() if p.requires_grad]
    hook = parameters[len(parameters) // 2].register_hook(broken)
    message = message_of(lambda: trial.add_all(opened, "broken"))
    hook.remove()
    assert message.startswith("ArithmeticError" if trial.groups() else NOTHING), message
    opened.abandon()
    trial.closed()
    assert same_bits(trial.gradients(), closed)


def broken(_: torch.Tensor) -> None:
    raise ArithmeticError("broken in the middle of a backward")


# ---- Mistakes: every rank reports them ----


def twice(trial: Trial, opened) -> None:
    (group, *_) = trial.groups()
    opened.add(trial.pack([group]))
    if trial.rank == 1:
        assert "two adds" in message_of(lambda: opened.add(trial.pack([group])))


def shared(trial: Trial, opened) -> None:
    """One rollout on both ranks."""
    opened.add(trial.pack([trial.samples[:1]]))


def not_finite(trial: Trial, opened) -> None:
    groups = trial.groups()
    if trial.rank == 1:
        next(s for group in groups for s in group if s.num_trained).old_logprobs.fill_(torch.nan)
    for group in groups:
        opened.add(trial.pack([group]))


def failing(trial: Trial, opened) -> None:
    """An exception of the user's model on one rank."""
    handle = trial.wrapped[0].register_forward_pre_hook(lambda *_: broken(None)) if trial.rank == 1 else None
    try:
        opened.add(trial.pack(trial.groups()[:1]))
    except ArithmeticError:
        assert trial.rank == 1
    if handle is not None:
        handle.remove()


def different_peers(trial: Trial, opened) -> None:
    """Tensor-parallel peers with other advantages."""
    (sample, *rest) = trial.groups()[0]
    sign = 1.0 if parallel_state.get_tensor_model_parallel_rank() else -1.0
    opened.add(trial.pack([[replace(sample, advantages=sign * sample.advantages), *rest]]))


def agreed(trial: Trial, opened) -> None:
    """No mistake: one rank decides, and its peers follow."""
    mine = parallel_state.get_tensor_model_parallel_rank()
    assert opened.agree([f"rollout {mine}", 7]) == ["rollout 0", 7]
    assert opened.agree([]) == []
    names = [group[0].prompt_id for group in trial.groups()][: 1 + mine]
    chosen = opened.agree(names)
    assert len(chosen) == 1
    opened.add(trial.pack([group for group in trial.groups() if group[0].prompt_id in chosen]))


FAULTS = {
    "twice": twice,
    "shared": shared,
    "notfinite": not_finite,
    "failing": failing,
    "peers": different_peers,
    "agreed": agreed,
}


def message_of(call) -> str:
    """What it raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return NOTHING


def run_fault(case: Case, out: Path) -> None:
    """The message of close on this rank; then the step is abandoned, and a closed one is as before."""
    model_parallel_cuda_manual_seed(1)
    trial = Trial(replace(case, fault=""))
    trial.closed()
    closed, messages = trial.gradients(), {}
    for name in ("agreed", "peers") if case.layout.sizes["tp"] > 1 else ("twice", "shared", "notfinite", "failing"):
        opened = trial.open(5)
        FAULTS[name](trial, opened)
        if name == "agreed":
            opened.close()
            continue
        messages[name] = message_of(opened.close)
        assert messages[name] != NOTHING, name
        messages["ended"] = message_of(opened.close)
        messages["while open"] = message_of(trial.closed)
        opened.abandon()
        messages["abandoned"] = message_of(opened.abandon)
        trial.closed()
        assert same_bits(trial.gradients(), closed)
    rank = torch.distributed.get_rank()
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(messages), encoding="utf-8")


# ---- Memory ----


def count_left() -> int:
    gc.collect()
    return sum(isinstance(each, LocalBatch) for each in gc.get_objects())


def run_memory(case: Case, out: Path) -> None:
    """Bytes of all live tensors after each of 20 adds of the same size, and how many LocalBatches are left."""
    model_parallel_cuda_manual_seed(1)
    trial = Trial(replace(case, fault=""))
    before, sizes, left = count_left(), [], []
    opened, group = trial.open(64), trial.groups()[0]
    for number in range(20):
        own = [replace(s, rollout_id=f"{trial.rank} {number} {s.rollout_id}", prompt_id=number) for s in group]
        opened.add(trial.pack([own, []]))
        del own
        left.append(count_left() - before)
        alive = [each for each in gc.get_objects() if isinstance(each, torch.Tensor)]
        storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in alive}
        sizes.append(sum(storages.values()))
        del alive
    opened.close()
    rank = torch.distributed.get_rank()
    result = {"bytes": sizes, "left": left, "samples": len(group)}
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


# ---- A coefficient that changes from step to step ----

FACTORS = (3.0, 1.2, 0.2, 0.9, 1.1, 5.0, 0.9)
RESUMES = 3  # the step before which another model loads the state
TARGETED = ("--pg-entropy-coef", "0.05", "--pg-entropy-target", "2.2,step=0.04,max=0.1")


def settings_of(case: Case, *flags: str) -> LossSettings:
    """By the command line that a user would write."""
    words = ["--loss-aggregation", case.aggregation, "--pg-kernel", "torch", *flags]
    words += ["--loss-aggregation-divisor", f"{ranks.DIVISOR}"] if case.aggregation == "constant" else []
    words += ["--pg-objective", "gspo"] if "gspo" in case.fault else []
    words += ["--pg-fused-head"] if "fused" in case.layout.options else []
    parser = add_arguments(argparse.ArgumentParser())
    parser.set_defaults(calculate_per_token_loss=False)
    return LossSettings.from_args(validate_args(parser.parse_args(words)))


class TargetedTrial(Trial):
    def loss(self) -> LossSettings:
        return settings_of(self.case, *TARGETED)

    def train(self, number: int) -> list[torch.Tensor]:
        """The gradient of one step, which changes no weight."""
        if number % 2 == 0:
            self.closed()
        else:
            opened = self.open(16)
            opened.close(self.add_all(opened, number))
        return self.gradients()

    def scale(self, factor: float) -> None:
        for chunk in self.wrapped:
            for parameter in chunk.parameters():
                parameter.data.mul_(factor)


def run_entropy(case: Case, out: Path) -> None:
    """Steps with an entropy target, alternately closed and open, each repeated with its coefficient as a constant.

    Before every step all weights are multiplied, so that the entropy moves to both sides of the target. From the middle
    on, a second model continues from the state, as from a checkpoint.
    """
    model_parallel_cuda_manual_seed(1)
    trial, resumed, records = TargetedTrial(case), None, []
    for number, factor in enumerate(FACTORS):
        if number == RESUMES:
            resumed = TargetedTrial(case)
            for earlier in FACTORS[:RESUMES]:
                resumed.scale(earlier)
            resumed.step.load_state_dict(json.loads(json.dumps(trial.step.state_dict())))
        trial.scale(factor)
        gradients, metrics = trial.train(number), trial.reports[-1].metrics
        after = trial.step.settings
        trial.step.settings = settings_of(case, "--pg-entropy-coef", repr(metrics["entropy_coef"]))
        assert same_bits(trial.train(number), gradients), number
        trial.step.settings = after
        if resumed is not None:
            resumed.scale(factor)
            assert same_bits(resumed.train(number), gradients), number
            assert resumed.reports[-1].metrics == metrics
            assert resumed.step.state_dict() == trial.step.state_dict()
        names = ("entropy_coef", "entropy_mean", "entropy_loss", "pg_loss", "loss")
        records.append({name: metrics[name] for name in names} | {"state": trial.step.state_dict()})
    rank = torch.distributed.get_rank()
    trial.step.load_state_dict({"entropy_coef": 0.01 + 0.01 * rank, "entropy": None})  # a mistake
    result = {"steps": records, "message": message_of(trial.closed)}
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what cases leave is looked for among their own objects, not among those of torch and Megatron
    torch.distributed.init_process_group("gloo")
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = Case.parse(name)
        ranks.free_groups()
        rank_model.initialize(case.layout)
        runners = {"faults": run_fault, "memory": run_memory, "entropy": run_entropy, "entropygspo": run_entropy}
        runners.get(case.fault, run)(case, out)
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
