"""Real Megatron ranks over gloo: a script that runs a list of cases and leaves their results as files.

    python -m torch.distributed.run --nproc-per-node 2 tests/ranks.py OUT_DIR case [case …]

Starting processes is what costs, so one launch runs many cases. Parameters are filled by global name, so that every
layout starts from the same model, and gradients are saved under global names.
"""

import dataclasses
import hashlib
import json
import random
import sys
from dataclasses import dataclass
from pathlib import Path

import cpu_megatron

cpu_megatron.enable()

import all_gather_attention
import numpy as np
import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from support import make_sample, random_step

from megatron_pg.batch import pack
from megatron_pg.forward_step import PolicyGradientStep
from megatron_pg.loss import LossSettings
from megatron_pg.metrics import Reduction

WIDTH, VOCABULARY, DIVISOR = 24, 16, 32.0


@dataclass(frozen=True)
class Case:
    """A layout and an aggregation; the name says both, e.g. `dp2-constant`."""

    layout: str
    aggregation: str
    fault: str = ""

    @classmethod
    def parse(cls, name: str) -> "Case":
        return cls(*name.split("-"))

    @property
    def sizes(self) -> dict[str, int]:
        kind, size = self.layout[:2], int(self.layout[2])
        return {name: size if kind == name else 1 for name in ("tp", "pp", "cp")}

    @property
    def qkv_format(self) -> str:
        """Packed rows for the layouts whose name ends with t (cp2t), padded ones for the rest."""
        return "thd" if self.layout.endswith("t") else "bshd"


def samples():
    """The one step that every case trains on."""
    return random_step(random.Random(11), vocabulary=VOCABULARY, poison=True)


def settings(case: Case) -> LossSettings:
    return LossSettings(
        aggregation=case.aggregation,
        divisor=DIVISOR if case.aggregation == "constant" else None,
        reducer=None,
        per_token=case.aggregation == "token_mean",
        clip_eps_low=0.2,
        clip_eps_high=0.28,
        temperature=1.0,
        kernel="torch",
        metrics=Reduction("with_entropy"),
    )


def build_model(case: Case) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        tensor_model_parallel_size=case.sizes["tp"],
        pipeline_model_parallel_size=case.sizes["pp"],
        context_parallel_size=case.sizes["cp"],
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        calculate_per_token_loss=case.aggregation == "token_mean",
    )
    model = GPTModel(
        config=config,
        transformer_layer_spec=layer_spec(case),
        vocab_size=VOCABULARY,
        max_sequence_length=WIDTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=False,
        position_embedding_type="learned_absolute",
    )
    for name, parameter in model.named_parameters():
        fill(global_name(model, name), parameter)
    return model


def layer_spec(case: Case):
    spec = get_gpt_layer_local_spec()
    return all_gather_attention.use_in(spec) if case.sizes["cp"] > 1 or case.qkv_format == "thd" else spec


def global_name(model: GPTModel, name: str) -> str:
    """The parameter's name with its layer counted over all pipeline stages."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        parts[2] = str(model.decoder.layers[int(parts[2])].layer_number)
    return ".".join(parts)


def fill(name: str, parameter: torch.nn.Parameter) -> None:
    """Values that depend on the global name alone; a tensor-parallel rank takes its part."""
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    axis = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
    shape = list(parameter.shape)
    if axis >= 0:
        shape[axis] *= size
    generator = torch.Generator().manual_seed(int(hashlib.blake2b(name.encode(), digest_size=4).hexdigest(), 16))
    whole = torch.randn(shape, generator=generator) * 0.2 + (1.0 if "layernorm.weight" in name else 0.0)
    parameter.data.copy_(whole if axis < 0 else whole.chunk(size, dim=axis)[rank])


def microbatches(case: Case) -> list:
    """This data-parallel rank's two micro-batches (one rank: everything in one)."""
    rank, size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_world_size()
    mine = samples()[rank::size]
    if case.fault == "peers" and torch.distributed.get_rank() == 1:
        mine = mine[1:]
    parts = [mine[::2], mine[1::2]] if torch.distributed.get_world_size() > 1 else [mine]
    rows = len(samples()) if len(parts) == 1 else len(samples()) // 2 + 1
    if case.fault == "ended" and torch.distributed.get_rank() == 1:
        parts = parts[:1]
    if case.fault == "advantages" and torch.distributed.get_rank() == 1:
        for sample in mine:
            sample.advantages.mul_(-3.0)
    if case.fault == "vocabulary":
        mine[0].tokens[-1] = VOCABULARY
    if case.fault == "positions":
        long = [rng_sample(WIDTH + 1)]
        return [pack(long, qkv_format="bshd", max_seq_len=WIDTH + 1, rows=1) for _ in range(2)]
    if case.fault == "masked":
        for sample in mine:
            sample.loss_mask.zero_()
    if case.qkv_format == "thd":
        return [pack(part, qkv_format="thd", cp_size=case.sizes["cp"]) for part in parts]
    return [pack(part, qkv_format="bshd", cp_size=case.sizes["cp"], max_seq_len=WIDTH, rows=rows) for part in parts]


def rng_sample(length: int):
    """A sample of a given length."""
    return make_sample(prompt_length=length - 2, mask=[1, 1], rng=random.Random(0), prompt_id=0, rollout_id="r")


def run_case(case: Case, out: Path) -> None:
    sizes = case.sizes
    parallel_state.initialize_model_parallel(sizes["tp"], sizes["pp"], context_parallel_size=sizes["cp"])
    model_parallel_cuda_manual_seed(1)
    reports = []
    loss = settings(case)
    if case.fault == "reducer":
        loss = dataclasses.replace(loss, reducer=breaking_reducer)
    if case.fault == "flag":
        loss = dataclasses.replace(loss, per_token=False)
    step = PolicyGradientStep(loss, reports.append)
    model = build_model(case)
    if case.fault == "nan" and torch.distributed.get_rank() == 1:
        poison_logits(model)
    if parallel_state.is_pipeline_last_stage() and case.fault != "detached":
        step.attach(model)
    config = model.config
    config.finalize_model_grads_func = None if case.fault == "unreduced" else finalize_model_grads
    ddp = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), model)
    batches = microbatches(case)
    iterator = broken() if case.fault == "raises" and torch.distributed.get_rank() == 1 else iter(batches)
    losses = step.forward_backward(
        get_forward_backward_func(),
        forward_step_func=step.forward_step,
        data_iterator=iterator,
        model=[ddp],
        num_microbatches=2 if torch.distributed.get_world_size() > 1 else 1,
        seq_length=WIDTH + 8 if case.fault == "shape" else WIDTH,
        micro_batch_size=len(batches[0].tokens),
        forward_only=case.fault == "evaluate",
    )
    save(case, out, model, losses, reports[0])


def breaking_reducer(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
    """A user's reducer that fails on the data of one rank."""
    if torch.distributed.get_rank() == 1:
        raise RuntimeError("my reducer broke")
    return lambda x: sum((part * mask).sum() for part, mask in zip(x.split(response_lengths), loss_masks, strict=True))


def broken():
    """A data iterator that fails with something other than a ValueError."""
    raise RuntimeError("the sampler broke")
    yield


def poison_logits(model: GPTModel) -> None:
    """NaN logits for one token id, on this rank only."""
    original = model.output_layer.forward

    def forward(*args, **kwargs):
        logits, bias = original(*args, **kwargs)
        return logits * torch.where(torch.arange(logits.shape[-1]) == 3, float("nan"), 1.0), bias

    model.output_layer.forward = forward


def save(case: Case, out: Path, model: GPTModel, losses: list, report) -> None:
    rank = torch.distributed.get_rank()
    tp_rank = parallel_state.get_tensor_model_parallel_rank()
    arrays = {}
    for name, parameter in model.named_parameters():
        axis = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        arrays[f"{global_name(model, name)}|{axis}|{tp_rank}"] = parameter.main_grad.numpy()
    np.savez(out / f"{name_of(case)}.{rank}.npz", **arrays)
    reported = [[float(v) for v in loss["pg_loss"]] for loss in losses]
    result = {"metrics": report.metrics, "num_tokens": report.plan.num_tokens, "reported": reported}
    (out / f"{name_of(case)}.{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def name_of(case: Case) -> str:
    return "-".join(part for part in (case.layout, case.aggregation, case.fault) if part)


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    out = Path(sys.argv[1])
    for name in sys.argv[2:]:
        case = Case.parse(name)
        try:
            run_case(case, out)
        except Exception as error:
            if not case.fault:
                raise
            text = f"{type(error).__name__}: {error}"
            (out / f"{name}.{torch.distributed.get_rank()}.error").write_text(text, encoding="utf-8")
        torch.distributed.barrier()
        parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
