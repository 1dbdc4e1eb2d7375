"""Steps with `--pg-entropy-target` on real ranks over gloo, alternately closed and open.

    torchrun ... tests/ranks/programs/entropy_ranks.py OUT CASE...

A case is one of `ranks.py`, `dp2-constant-fused`; the word `gspo` takes that objective. Before every step all weights
are multiplied, so that the entropy moves to both sides of the target. Every step is repeated with its coefficient as
`--pg-entropy-coef`, which must give the same bits, and a model that is made in the middle continues from a checkpoint's
state.
"""

import argparse
import json
import sys
from pathlib import Path

import ranks  # enables the CPU before Megatron is imported

# isort: split
import open_ranks
import rank_model
import torch
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from ranks import DIVISOR, Case

from megatron_pg.args import add_arguments, validate_args
from megatron_pg.plan.settings import LossSettings

FACTORS = (3.0, 1.2, 0.2, 0.9, 1.1, 5.0, 0.9)
RESUMES = 3  # the step before which another model loads the state
TARGETED = ("--pg-entropy-coef", "0.05", "--pg-entropy-target", "2.2,step=0.04,max=0.1")


def settings(case: Case, *flags: str) -> LossSettings:
    """By the command line that a user would write."""
    words = ["--loss-aggregation", case.aggregation, "--pg-kernel", "torch", *flags]
    words += ["--loss-aggregation-divisor", f"{DIVISOR}"] if case.aggregation == "constant" else []
    words += ["--pg-objective", "gspo"] if case.fault == "gspo" else []
    words += ["--pg-fused-head"] if "fused" in case.layout.options else []
    parser = add_arguments(argparse.ArgumentParser())
    parser.set_defaults(calculate_per_token_loss=False)
    return LossSettings.from_args(validate_args(parser.parse_args(words)))


class Trial(open_ranks.Trial):
    def loss(self) -> LossSettings:
        return settings(self.case, *TARGETED)

    def train(self, number: int) -> list[torch.Tensor]:
        """The gradient of one step; a multiple of the same weights is not trained."""
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


def run(case: Case, out: Path) -> None:
    model_parallel_cuda_manual_seed(1)
    trial, resumed, records = Trial(case), None, []
    for number, factor in enumerate(FACTORS):
        if number == RESUMES:
            resumed = Trial(case)
            for earlier in FACTORS[:RESUMES]:
                resumed.scale(earlier)
            resumed.step.load_state_dict(json.loads(json.dumps(trial.step.state_dict())))
        trial.scale(factor)
        gradients, metrics = trial.train(number), trial.reports[-1].metrics
        after = trial.step.settings
        trial.step.settings = settings(case, "--pg-entropy-coef", repr(metrics["entropy_coef"]))
        assert open_ranks.same_bits(trial.train(number), gradients), number
        trial.step.settings = after
        if resumed is not None:
            resumed.scale(factor)
            assert open_ranks.same_bits(resumed.train(number), gradients), number
            assert resumed.reports[-1].metrics == metrics
            assert resumed.step.state_dict() == trial.step.state_dict()
        names = ("entropy_coef", "entropy_mean", "entropy_loss", "pg_loss", "loss")
        records.append({name: metrics[name] for name in names} | {"state": trial.step.state_dict()})
    rank = torch.distributed.get_rank()
    (out / f"{case.name}.{rank}.json").write_text(json.dumps(records), encoding="utf-8")


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    for name in sys.argv[2:]:
        case = Case.parse(name)
        ranks.free_groups()
        rank_model.initialize(case.layout)
        run(case, Path(sys.argv[1]))
        torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
