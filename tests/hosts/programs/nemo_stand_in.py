"""Modules with NeMo-RL's names and interfaces; `Policy.train` shards, packs and sums in one process as NeMo-RL does."""

import enum
import pickle
from types import ModuleType, SimpleNamespace
from typing import Any

import nemo_oracle
import pytest
import torch
from megatron.core import parallel_state
from torch import Tensor

RANKS, ROWS = 2, 2  # data-parallel ranks, one after the other, and rows of a padded micro-batch
OFF = (
    *("disable_ppo_ratio", "sequence_level_importance_ratios", "use_kl_in_reward", "use_cispo"),
    *("use_importance_sampling_correction", "use_on_policy_kl_approximation", "force_on_policy_ratio"),
)
ABSENT = ("ratio_clip_c", *(f"truncated_importance_sampling_{name}" for name in ("type", "ratio", "ratio_min")))
DEFAULTS = (
    dict.fromkeys(OFF, False)
    | dict.fromkeys(ABSENT)
    | {
        "token_level_loss": True,
        "ratio_clip_min": 0.2,
        "ratio_clip_max": 0.2,
        "reference_policy_kl_penalty": 0.01,
        "reference_policy_kl_type": "k3",
        "kl_input_clamp_value": 20.0,
        "kl_output_clamp_value": 10.0,
        "positive_example_nll_weight": 0.0,
    }
)


class Options(SimpleNamespace):
    """Its `loss_fn`, a pydantic model there."""

    model_fields = {  # noqa: RUF012
        name: SimpleNamespace(get_default=lambda call_default_factory, value=value: value)
        for name, value in (DEFAULTS | {"metrics_level": "all"}).items()
    }

    def __init__(self, **given: object) -> None:
        super().__init__(**DEFAULTS | given)

    def model_dump(self) -> dict[str, object]:
        return dict(vars(self))


def master_config(loss_fn: Options, **policy: object) -> SimpleNamespace:
    known = {"megatron_cfg": {"enabled": True}, "train_global_batch_size": 16}
    grpo = SimpleNamespace(num_generations_per_prompt=4)
    return SimpleNamespace(loss_fn=loss_fn, data_plane=None, grpo=grpo, policy=known | policy)


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGIT = "logit"
    LOGPROB = "logprob"


class ClippedPGLossFn:
    def __init__(self, cfg: Any) -> None:
        raise AssertionError("its signature is all that is asked for")


class LossPostProcessor:
    def __init__(
        self, loss_fn: Any, cfg: Any, num_microbatches: int = 1, cp_normalize: bool = True, sampling_params: Any = None
    ) -> None:
        raise AssertionError("its signature is all that is asked for")


def calculate_kl(logprobs, logprobs_reference, kl_type="k3", input_clamp_value=20.0, output_clamp_value=10.0):
    assert (kl_type, input_clamp_value, output_clamp_value) == ("k3", None, None)
    difference = logprobs_reference - logprobs
    return difference.exp() - 1 - difference


def setup(master_config, tokenizer, dataset, val_dataset, processor=None):
    """Makes the loss by the name that its module holds then."""
    import nemo_rl.algorithms.grpo as grpo

    return None, grpo.ClippedPGLossFn(master_config.loss_fn), None


class Policy:
    """Gradients of every step in `steps`."""

    def __init__(self, *, packed: bool, rows_per_step: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.parameters = [
            (0.5 * torch.randn(nemo_oracle.VOCABULARY, 6, generator=generator)).requires_grad_() for _ in range(2)
        ]
        self.cfg, self.packed = {"train_global_batch_size": rows_per_step}, packed
        self.steps: list[list[Tensor]] = []

    def train(self, data, loss_fn, eval_mode=False, gbs=None, mbs=None, timer=None):
        size, metrics = gbs or self.cfg["train_global_batch_size"], []
        starts = range(0, len(data["input_ids"]), size)
        for first in starts:
            step = {name: values[first : first + size] for name, values in data.items()}
            tokens = (step["token_mask"][:, 1:] * step["sample_mask"][:, None]).sum()
            for rank in range(RANKS):
                shard = {name: values.chunk(RANKS)[rank] for name, values in step.items()}
                of_rank = pickle.loads(pickle.dumps(loss_fn))
                forward = self._packed if self.packed else self._padded
                metrics += forward(shard, of_rank, {"global_valid_seqs": None, "global_valid_toks": tokens})
            self.steps.append([parameter.grad.clone() for parameter in self.parameters])
            for parameter in self.parameters:
                parameter.grad = None
        divided = {
            name: [each[name] if "_min" in name or "_max" in name else each[name] / len(starts) for each in metrics]
            for name in metrics[0]
        }
        return {"all_mb_metrics": divided}

    def _logits(self, tokens: Tensor) -> Tensor:
        embedding, head = self.parameters
        return embedding[tokens] @ head.T

    def _padded(self, shard: dict[str, Tensor], loss_fn: Any, counts: dict[str, Any]) -> list[dict]:
        found = []
        for start in range(0, len(shard["input_ids"]), ROWS):
            rows = {name: values[start : start + ROWS] for name, values in shard.items()}
            output = {"logits": self._logits(rows["input_ids"])}
            if getattr(loss_fn, "input_type", None) is LossInputType.LOGPROB:
                values = output.pop("logits")[:, :-1].log_softmax(dim=-1).gather(2, rows["input_ids"][:, 1:, None])
                output = {"next_token_logprobs": values[:, :, 0]}
            loss, metrics = loss_fn(data=rows, **output, **counts)
            loss.backward()
            found.append(metrics)
        return found

    def _packed(self, shard: dict[str, Tensor], loss_fn: Any, counts: dict[str, Any]) -> list[dict]:
        """One row of all sequences, whose loss is called for each and added up, as its wrapper does."""
        lengths = [-(-int(length) // 4) * 4 for length in shard["input_lengths"]]
        logits = self._logits(torch.cat([t[:n] for t, n in zip(shard["input_ids"], lengths, strict=True)])[None])
        total, sums, start = 0, {}, 0
        for i, length in enumerate(lengths):
            row = {name: v[i : i + 1, :length] if v.ndim > 1 else v[i : i + 1] for name, v in shard.items()}
            loss, metrics = loss_fn(logits=logits.narrow(1, start, length), data=row, **counts)
            total, start = total + loss, start + length
            sums = {name: sums.get(name, 0) + value for name, value in metrics.items()}
        total.backward()
        return [sums]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make them importable as `nemo_rl`, in a process of one rank, until the test ends."""
    names = {
        "algorithms.grpo": {"setup": setup, "ClippedPGLossFn": type("ClippedPGLossFn", (ClippedPGLossFn,), {})},
        "algorithms.utils": {"calculate_kl": calculate_kl},
        "algorithms.loss.interfaces": {"LossType": LossType, "LossInputType": LossInputType},
        "models.policy.lm_policy": {"Policy": type("Policy", (Policy,), {"train": Policy.train})},
        "models.megatron.train": {"LossPostProcessor": LossPostProcessor},
    }
    modules = {"nemo_rl": ModuleType("nemo_rl")}

    def module_of(name: str) -> ModuleType:
        if name not in modules:
            above, _, last = name.rpartition(".")
            modules[name] = ModuleType(name)
            setattr(module_of(above), last, modules[name])
        return modules[name]

    for name, content in names.items():
        vars(module_of(f"nemo_rl.{name}")).update(content)
    for name, module in modules.items():
        monkeypatch.setitem(__import__("sys").modules, name, module)
    alone = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    for kind in ("context", "tensor_model"):
        monkeypatch.setattr(parallel_state, f"get_{kind}_parallel_group", lambda: alone)
