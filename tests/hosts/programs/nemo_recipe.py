"""NeMo-RL's own train call with our loss (`recipe_ranks`, `NEMO_RL` names its checkout), against loops in float64."""

import functools
import importlib
import inspect
import os
from typing import Any

import host_cases as hosts
import nemo_oracle
import nemo_trainer
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.enums import ModelType
from megatron.core.tensor_parallel import copy_to_tensor_model_parallel_region
from megatron.core.transformer import MegatronModule, TransformerConfig
from nemo_oracle import BETA, CAP, DIVISOR, LOW, PLAIN, TIS, VOCABULARY, Case, Found
from torch import Tensor

ROWS = len(nemo_oracle.LENGTHS)
# Objectives: what NeMo-RL's options say, and the oracle's case.
LOSSES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "grpo": ({}, {}),
    "gspo": ({"sequence_level_importance_ratios": True}, {"objective": "gspo"}),
    "cispo, TIS": ({"use_cispo": True, "ratio_clip_max": CAP - 1, **TIS}, {"objective": "cispo", "tis": True}),
    "grpo, KL": ({"reference_policy_kl_penalty": BETA}, {"kl": "k3"}),
}
LAYOUTS = {  # context- and tensor-parallel size, and how rows make micro-batches
    "dp2, padded rows": (1, 1, "padded"),
    "dp2, dynamic batches": (1, 1, "dynamic"),
    "dp2, packed": (1, 1, "packed"),
    "cp2, packed": (2, 1, "packed"),
    "tp2, packed": (1, 2, "packed"),
}
UNCLAMPED = {"kl_input_clamp_value": None, "kl_output_clamp_value": None}


class Toy(MegatronModule):
    """Vocabulary-parallel logits of the next token from the token only; context parallelism needs no attention."""

    def __init__(self, config: TransformerConfig, *, whole: bool = False):
        super().__init__(config)
        generator = torch.Generator().manual_seed(3)
        embedding, head = (0.5 * torch.randn(VOCABULARY, 6, generator=generator) for _ in range(2))
        self.embedding = torch.nn.Parameter(embedding)
        self.head = torch.nn.Parameter(head if whole else part(head))
        self.model_type = ModelType.encoder_or_decoder
        self.post_process, self.vocab_size, self.position_embedding_type = True, VOCABULARY, "none"

    def forward(self, input_ids, position_ids=None, attention_mask=None, **rest):
        hidden = copy_to_tensor_model_parallel_region(self.embedding[input_ids])
        logits = hidden @ self.head.T  # [b, s, V / tp]
        if not rest.get("return_logprobs_for_linear_ce_fusion"):
            return logits
        return logits.log_softmax(dim=-1).gather(2, rest["labels"].roll(-1, dims=1)[:, :, None])[:, :, 0]

    def set_input_tensor(self, tensor):
        pass


def config() -> TransformerConfig:
    return TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1, calculate_per_token_loss=True)


def part(head: Tensor) -> Tensor:
    """This tensor-parallel rank's rows."""
    parts = head.chunk(parallel_state.get_tensor_model_parallel_world_size())
    return parts[parallel_state.get_tensor_model_parallel_rank()]


def build() -> DistributedDataParallel:
    """Megatron's wrapper as NeMo-RL asks for it."""
    settings = config()
    settings.finalize_model_grads_func = finalize_model_grads
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, average_in_collective=False)
    return DistributedDataParallel(settings, ddp, Toy(settings))


def options(**chosen: object) -> Any:
    return importlib.import_module("nemo_rl.algorithms.loss").ClippedPGLossConfig(**PLAIN | chosen)


def train(
    loss_fn: Any, *, rows: str, steps_of: int = ROWS, batch: dict[str, Tensor] | None = None, **settings: object
) -> tuple[list[list[Tensor]], dict[str, float]]:
    """Gradients of every step, and the metrics as NeMo-RL's driver would log them."""
    model = build()
    found, results = nemo_trainer.train(
        model,
        lambda: [parameter.main_grad.clone() for parameter in model.module.parameters()],
        nemo_oracle.batch() if batch is None else batch,
        loss_fn,
        rows=rows,
        steps_of=steps_of,
        **settings,
    )
    logged = {name: sum(values) for name, values in results["all_mb_metrics"].items() if name not in ("lr", "wd")}
    return found, logged


def expected(case: Case, steps_of: int = ROWS) -> list[Found]:
    """Of every step."""
    parameters = list(Toy(config(), whole=True).parameters())
    batch = nemo_oracle.batch()
    return [
        nemo_oracle.oracle(parameters, nemo_oracle.rows_of(batch, first, first + steps_of), case)
        for first in range(0, ROWS, steps_of)
    ]


def error_of(found: list[list[Tensor]], steps: list[Found]) -> float:
    """The largest of any rank."""
    errors = [
        hosts.error(mine, [step.gradients[0], part(step.gradients[1])]) for mine, step in zip(found, steps, strict=True)
    ]
    worst = torch.tensor(max(errors), dtype=torch.float64)
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    return float(worst)


def ours(*, rows: str, steps_of: int) -> tuple[dict[str, float], float]:
    """Largest gradient errors by aggregation and objective, and the largest of a metric."""
    loss_class = importlib.import_module("megatron_pg.nemo_rl").PolicyGradientLossFn
    errors, worst = {}, 0.0
    for mode in ("sample_mean", "prompt_mean", "token_mean", "constant"):
        given: dict[str, Any] = {"loss_aggregation": mode}
        if mode == "constant":
            given["loss_aggregation_divisor"] = DIVISOR
        for name, (theirs, fields) in LOSSES.items():
            if "kl" in fields:
                given["pg_kl_estimator"] = "k3"
            kl_mode = "token_mean" if mode == "token_mean" else "sample_mean"
            case = Case(mode, kl_mode=kl_mode, **fields)
            steps = expected(case, steps_of)
            loss_fn = loss_class(options(megatron_pg=given, **theirs))
            batch = nemo_oracle.with_holes(nemo_oracle.batch())
            found, logged = train(loss_fn, rows=rows, steps_of=steps_of, batch=batch)
            errors[f"{mode}, {name}"] = error_of(found, steps)
            worst = max(worst, metrics_error(logged, steps, case))
    return errors, worst


# Metrics by their names in the log; what NeMo-RL's own loss logs under the others' names.
HOST = ("loss", "num_valid_samples", "token_mult_prob_error", "gen_kl_error", "policy_kl_error", "js_divergence_error")
HOST += ("sampling_importance_ratio",)
MEANS = ("new_logprobs", "old_logprobs", "ratio_new_old", "mean_abs_log_ratio", "kl_new_old", "advantage")


def metrics_error(logged: dict[str, float], steps: list[Found], case: Case) -> float:
    """The largest relative error; sums are averaged over the steps, means over samples are over all steps."""
    names = {name: name for name in HOST} | {"pg/pg_loss": "pg_loss", "pg/num_tokens": "num_tokens"}
    if case.kl:
        names["pg/kl_loss"] = "kl_loss"
    pairs = [(logged[name], sum(step.metrics[known] for step in steps) / len(steps)) for name, known in names.items()]
    call = expected(case)[0].metrics
    pairs += [(logged[f"pg/{name}"], call[name]) for name in (*MEANS, *(("correction_factor",) if case.tis else ()))]
    return max(abs(found - value) / max(abs(value), 1e-3) for found, value in pairs)


def theirs(*, rows: str) -> dict[str, float]:
    """NeMo-RL's own loss, which shows that the harness is right."""
    loss_class = importlib.import_module("nemo_rl.algorithms.loss").ClippedPGLossFn
    cases = {
        "token_mean, grpo": ({}, Case("token_mean")),
        "sample_mean, grpo": ({"token_level_loss": False}, Case("sample_mean")),
        "sample_mean, gspo": (
            {"token_level_loss": False, "sequence_level_importance_ratios": True},
            Case("sample_mean", "gspo"),
        ),
        "token_mean, cispo, TIS": (LOSSES["cispo, TIS"][0], Case("token_mean", "cispo", tis=True)),
        "token_mean, grpo, KL": (
            {"reference_policy_kl_penalty": BETA, **UNCLAMPED},
            Case("token_mean", kl="k2", kl_mode="token_mean"),
        ),
    }
    return {
        name: error_of(train(loss_class(options(**given)), rows=rows)[0], expected(case))
        for name, (given, case) in cases.items()
    }


def beside_each_other(*, rows: str) -> dict[str, float]:
    """Our gradient against theirs, with their options alone: nothing is below `megatron_pg`."""
    both = [
        importlib.import_module("nemo_rl.algorithms.loss").ClippedPGLossFn,
        importlib.import_module("megatron_pg.nemo_rl").PolicyGradientLossFn,
    ]
    sequence = {"token_level_loss": False}
    cases = {
        "their defaults": {"reference_policy_kl_penalty": 0.01, "ratio_clip_max": LOW},
        "token_level_loss false": sequence,
        "gspo": {**sequence, "sequence_level_importance_ratios": True},
        "gspo, sequence TIS": {**sequence, "sequence_level_importance_ratios": True, **TIS},
        "cispo, TIS": LOSSES["cispo, TIS"][0],
        "dual clip": {"ratio_clip_c": 3.0},
        "REINFORCE": {"disable_ppo_ratio": True},
        "untruncated correction": {"use_importance_sampling_correction": True},
        "icepop": {**TIS, "truncated_importance_sampling_type": "icepop"},
        "seq-mask-tis": {**TIS, "truncated_importance_sampling_type": "seq-mask-tis"},
        "forced ratio": {"force_on_policy_ratio": True, "ratio_clip_c": 3.0},
        "forced ratio, TIS": {"force_on_policy_ratio": True, **TIS},
        "fuse_loss, TIS": TIS,
        "top_p": TIS,
    }
    settings = {"fuse_loss, TIS": {"fuse_loss": rows == "packed"}, "top_p": {"top_p": 0.95}}
    if rows != "packed" and has_fused_linear(both[0]):  # NeMo-RL refuses packed rows
        cases["use_fused_linear_logprobs"], settings["use_fused_linear_logprobs"] = TIS, {"fused_linear": True}
    found = {}
    for name, given in cases.items():
        fused_linear = [True] if name == "use_fused_linear_logprobs" else []
        losses = [loss_class(options(**given), *fused_linear) for loss_class in both]
        if name in settings:
            losses[1].take_logprobs()
        (expected_, known), (mine, logged) = (train(loss, rows=rows, **settings.get(name, {})) for loss in losses)
        found[name] = hosts.error(mine[0], [gradient.double() for gradient in expected_[0]])
        if name == "forced ratio":  # theirs truncates the ratio of its metric, too
            found[f"{name}, metrics"] = max(abs(logged[each] / known[each] - 1) for each in HOST)
    return found


def has_fused_linear(loss_class: type) -> bool:
    """Whether the release has use_fused_linear_logprobs, which v0.7.0 does not have."""
    return "use_fused_linear_logprobs" in inspect.signature(loss_class).parameters


def draft() -> float:
    """Our gradients against theirs, of the logits of model and draft, where NeMo-RL adds the draft's loss."""
    wrapper, utils = (importlib.import_module(f"nemo_rl.algorithms.loss.{name}") for name in ("wrapper", "utils"))
    rows_of = importlib.import_module("nemo_rl.distributed.batched_data_dict").BatchedDataDict
    where = {
        "vocab_parallel_rank": 0,
        "vocab_parallel_group": parallel_state.get_tensor_model_parallel_group(),
        "context_parallel_group": parallel_state.get_context_parallel_group(),
    }
    found = []
    for module, name in (
        ("nemo_rl.algorithms.loss", "ClippedPGLossFn"),
        ("megatron_pg.nemo_rl", "PolicyGradientLossFn"),
    ):
        loss, batch = getattr(importlib.import_module(module), name)(options(**TIS)), nemo_oracle.batch()
        if name == "PolicyGradientLossFn":
            loss.take_logprobs()
            importlib.import_module("megatron_pg.hosts.nemo_rl.rows").plan_steps(batch, loss.planning, ROWS)
        generator = torch.Generator().manual_seed(4)
        shape = (*batch["input_ids"].shape, VOCABULARY)
        logits = [torch.randn(shape, generator=generator).requires_grad_() for _ in range(2)]
        data = rows_of({**batch, "student_logits": logits[1]})
        prepared = {"prepare_fn": utils.prepare_loss_input, **where}
        policy = functools.partial(wrapper.wrap_loss_fn_with_input_preparation, loss_fn=loss, **prepared)
        added = wrapper.DraftLossWrapper(loss_fn=policy, data_dict=data, loss_weight=0.5, **prepared)
        num_tokens = (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
        added(logits[0], data, batch["sample_mask"].sum(), num_tokens)[0].backward()
        found.append([each.grad for each in logits])
    return hosts.error(found[1], [each.double() for each in found[0]])


def first_step() -> dict[str, list[float]]:
    """Loss and gradient norm of the first step under NeMo-RL's defaults, theirs and ours."""
    found = {}
    classes = {"theirs": ("nemo_rl.algorithms.loss", "ClippedPGLossFn")}
    classes["ours"] = ("megatron_pg.nemo_rl", "PolicyGradientLossFn")
    given = options(reference_policy_kl_penalty=0.01, ratio_clip_max=LOW)
    for name, (module, class_name) in classes.items():
        gradients, logged = train(getattr(importlib.import_module(module), class_name)(given), rows="padded")
        norm = torch.cat([gradient.flatten() for gradient in gradients[0]]).double().norm()
        found[name] = [logged["loss"], float(norm)]
    return found


def by_triton() -> float:
    """Through the interpreter: the gradient is written over the logits, which packed sequences share."""
    given = {"loss_aggregation": "prompt_mean", "pg_kernel": "triton"}
    theirs, fields = LOSSES["gspo"]
    loss_fn = importlib.import_module("megatron_pg.nemo_rl").PolicyGradientLossFn(options(megatron_pg=given, **theirs))
    return error_of(train(loss_fn, rows="packed")[0], expected(Case("prompt_mean", **fields)))


def figures() -> dict[str, object]:
    """Errors by layout."""
    os.environ["TRITON_INTERPRET"] = "1"
    nemo_trainer.load(os.environ["NEMO_RL"])
    their_loss = importlib.import_module("nemo_rl.algorithms.loss").ClippedPGLossFn
    make = their_loss.__init__
    importlib.import_module("megatron_pg.nemo_rl").install()
    their_loss.__init__ = make  # to have both in one process
    result: dict[str, object] = {"has fused linear": has_fused_linear(their_loss)}
    for layout, (cp_size, tp_size, rows) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(tp_size, context_parallel_size=cp_size)
        if rows == "packed":
            result[f"Triton, {layout}"] = by_triton()
        elif "first step" not in result:
            result["first step"], result["draft"] = first_step(), draft()
        result[f"theirs, {layout}"] = theirs(rows=rows)
        result[f"ours against theirs, {layout}"] = beside_each_other(rows=rows)
        for steps in (1, 2):
            errors, of_metrics = ours(rows=rows, steps_of=ROWS // steps)
            result[f"ours, {layout}, steps {steps}"] = errors
            result[f"metrics, {layout}, steps {steps}"] = of_metrics
        parallel_state.destroy_model_parallel()
    return result
