"""A launch script on `megatron_pg.pretrain`, examples/recipes/plain_after.py, in which a rank is lost.

Its points are, in the order of a job: `arguments`, before the ranks know each other; `model` and `data`, in the
providers; `barrier`, before a collective of the script's own, in which the others wait and cannot be told; `batch`,
`forward`, `backward` and `optimizer`, in the second step; `between`, in the callback after it; `checkpoint`, where
every rank begins to save, and `writing`, in the middle of a file, which rank 0 alone writes.
"""

import sys
from collections.abc import Callable, Iterator
from datetime import timedelta

import plain_after
import torch
from lost import LOST_STEP, NCCL_SILENCE, PATIENCE, SILENCE, STEPS, Case, lose, time_out_after, wait_no_longer_than
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.training import checkpointing
from rank_model import Layout
from torch.optim.optimizer import register_optimizer_step_pre_hook

from megatron_pg import StepLog
from megatron_pg.plan import collectives
from megatron_pg.pretrain import pretrain

FLAGS = """\
    --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 12
    --max-position-embeddings 12 --attention-dropout 0 --hidden-dropout 0 --tokenizer-type NullTokenizer --vocab-size 12
    --make-vocab-size-divisible-by 1 --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
    --micro-batch-size 4 --global-batch-size 16 --lr 1e-3 --lr-decay-style constant --log-interval 1 --eval-iters 0
    --eval-interval 1000 --dataloader-type external --ckpt-format torch --save saved --save-interval 1
"""


class Script:
    """The callbacks of a rank's `pretrain`, and its fault."""

    def __init__(self, case: Case, rank: int, backend: str):
        self.case, self.is_victim, self.step, self.backend = case, rank == case.victim, 1, backend

    def at(self, point: str) -> None:
        """Every rank passes here; one of them is lost, once."""
        if self.is_victim and point == self.case.point and (self.case.is_at_startup or self.step == LOST_STEP):
            lose(self.case.kind)

    def arguments(self, parser):
        # nobody is there yet who could see a closed connection, so that all faults are waited for
        patience = SILENCE if self.case.point == "arguments" else PATIENCE
        parser.set_defaults(distributed_timeout_minutes=patience / timedelta(minutes=1))
        self.at("arguments")
        return parser

    def model(self, *positional: object, **keywords: object) -> GPTModel:
        if self.case.kind == "stop" and self.case.is_at_startup:
            wait_no_longer_than(SILENCE)
        self.at("model")
        model = plain_after.model_provider(*positional, **keywords)
        model.register_forward_pre_hook(lambda *_: self.at("forward"))
        next(model.parameters()).register_hook(lambda _: self.at("backward"))
        register_optimizer_step_pre_hook(lambda *_: self.at("optimizer"))
        self._seed_in(checkpointing, "get_rng_state", "checkpoint")
        self._seed_in(torch.Tensor, "__reduce_ex__", "writing")
        return model

    def _seed_in(self, owner: object, name: str, point: str) -> None:
        original: Callable = getattr(owner, name)

        def seeded(*positional: object, **keywords: object) -> object:
            self.at(point)
            return original(*positional, **keywords)

        setattr(owner, name, seeded)

    def datasets(self, num_samples: object, vp_stage: int | None = None) -> tuple:
        self.at("data")
        collectives.LAST_WORDS = SILENCE
        self.at("barrier")
        torch.distributed.barrier()
        return self.batches(), None, None

    def batches(self) -> Iterator:
        for batch in plain_after.micro_batches():
            self.at("batch")
            yield batch

    def on_step(self, log: StepLog) -> None:
        self.step = log.iteration
        self.at("between")
        self.step = log.iteration if self.case.point in ("checkpoint", "writing") else log.iteration + 1
        if log.iteration == LOST_STEP - 1 and self.backend == "nccl":
            time_out_after(NCCL_SILENCE)  # of every case: between GPUs of one host no connection closes
        elif log.iteration == LOST_STEP - 1 and self.case.kind == "stop":
            wait_no_longer_than(SILENCE)


def train(case: Case, rank: int, backend: str = "gloo") -> None:
    """As a launcher starts a rank and the script ends it; the rest of its environment is there."""
    sizes = Layout(case.layout).sizes
    parallel = ["--tensor-model-parallel-size", str(sizes["tp"]), "--pipeline-model-parallel-size", str(sizes["pp"])]
    sys.argv = ["script", *FLAGS.split(), *parallel, "--train-iters", str(STEPS), "--distributed-backend", backend]
    script = Script(case, rank, backend)
    script.datasets.__func__.is_distributed = True
    pretrain(
        script.datasets,
        script.model,
        ModelType.encoder_or_decoder,
        extra_args_provider=script.arguments,
        on_step=script.on_step,
        metrics_file="metrics.jsonl",
    )
    torch.distributed.destroy_process_group()
