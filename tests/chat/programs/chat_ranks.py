"""A Llama model on real ranks: transformers' logits and weights, and Megatron's of the same model.

    torchrun … chat_ranks.py MODEL OUT TP PP

MODEL is a folder of transformers, or "tiny" for a random model of four layers. OUT receives one JSON object of largest
absolute differences.
"""

import json
import sys
from pathlib import Path

from chat import pretrained  # isort: skip, transformers, before CUDA's names mean the CPU
from cpu import cpu_megatron

cpu_megatron.enable()

import torch
from chat import weights
from chat.attention import layer_spec
from chat.scoring import with_trainers_logprobs
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_pg import Sample, pack

TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 1e5,
    "tie_word_embeddings": True,
}
TEXT = Path(__file__).parents[3] / "docs" / "index.md"


def config_of(theirs: LlamaConfig, dtype: torch.dtype, tp: int, pp: int) -> TransformerConfig:
    """Megatron's configuration, of the flags that launch.sh gives."""
    words = pretrained.megatron_flags(theirs)
    flags = {k: v for k, v in zip(words, [*words[1:], ""], strict=True) if k.startswith("--")}
    number = lambda name: int(flags[f"--{name}"])  # noqa: E731
    config = TransformerConfig(
        num_layers=number("num-layers"),
        hidden_size=number("hidden-size"),
        ffn_hidden_size=number("ffn-hidden-size"),
        num_attention_heads=number("num-attention-heads"),
        num_query_groups=number("num-query-groups"),
        kv_channels=number("kv-channels"),
        layernorm_epsilon=float(flags["--norm-epsilon"]),
        normalization=flags["--normalization"],
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
    )
    config.variable_seq_lengths = pp > 1
    return config


def megatrons(theirs: LlamaForCausalLM, dtype: torch.dtype, tp: int, pp: int) -> GPTModel:
    """This rank's stage, with the weights of transformers' model."""
    config = config_of(theirs.config, dtype, tp, pp)
    model = GPTModel(
        config,
        layer_spec(config, int(theirs.config.rope_parameters["rope_theta"])),
        vocab_size=theirs.config.vocab_size,
        max_sequence_length=2048,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=theirs.config.tie_word_embeddings,
        position_embedding_type="none",
    )
    model = model.to(dtype)
    weights.load(model, dict(theirs.state_dict()))
    return model.eval()


@torch.no_grad()
def compared(theirs: LlamaForCausalLM, samples: list[Sample], dtype: torch.dtype, tp: int, pp: int) -> dict:
    """Round trip of the weights, and log-probabilities and logits of both implementations and of float32."""
    exact = [theirs(sample.tokens[None]).logits[0] for sample in samples]
    theirs = theirs.to(dtype)
    model = megatrons(theirs, dtype, tp, pp)
    before = {name: weight.clone() for name, weight in theirs.named_parameters()}
    for weight in theirs.parameters():
        weight.fill_(torch.nan)
    weights.export([model], dict(theirs.named_parameters()))
    changed = sum(not torch.equal(weight, before[name]) for name, weight in theirs.named_parameters())
    (batch,) = with_trainers_logprobs([model], [pack(samples, qkv_format="thd")])
    of_theirs = [theirs(sample.tokens[None]).logits[0].float() for sample in samples]
    expected, reference = (
        torch.cat([logprobs_of(logits, sample) for logits, sample in zip(tables, samples, strict=True)])
        for tables in (of_theirs, exact)
    )
    scored = torch.cat([sample.old_logprobs for sample in batch.samples])
    found = {
        "tensors": len(before),
        "changed": changed,
        "logprobs": differences(scored, expected),
        "logprobs_of_both": [differences(x, reference)[1] for x in (scored, expected)],
    }
    if tp == pp == 1:  # unpacked rows, whose whole logits this rank has
        tokens = samples[0].tokens[None]
        logits = model(tokens, torch.arange(tokens.shape[1])[None], None).float()[0]
        found["logits"] = differences(logits, of_theirs[0])
        found["logits_of_both"] = [differences(x, exact[0])[1] for x in (logits, of_theirs[0])]
        found["length"] = tokens.shape[1]
        found["cross_entropy"] = -logprobs_of(exact[0], samples[0]).mean().item()
    return found


def logprobs_of(logits: torch.Tensor, sample: Sample) -> torch.Tensor:
    """[R] of the response tokens."""
    r = sample.response_length
    return logits[-r - 1 : -1].log_softmax(dim=-1).gather(1, sample.tokens[-r:, None])[:, 0]


def differences(a: torch.Tensor, b: torch.Tensor) -> tuple[float, float]:
    """Largest and mean."""
    gaps = (a - b).abs()
    return gaps.max().item(), gaps.mean().item()


def samples_of(tokens: torch.Tensor) -> list[Sample]:
    """Documents of several lengths, the longest of 200 tokens."""
    ends = [(0, 200, 150), (10, 40, 5), (60, 61 + 1, 1), (70, 150, 60)]
    return [
        Sample.build(tokens=tokens[a:b], response_length=r, loss_mask=[1] * r, old_logprobs=[0.0] * r, advantage=0.0)
        for a, b, r in ends
    ]


def main() -> None:
    """Compare in float32 and in bfloat16."""
    name, out, tp, pp = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(torch.distributed.get_rank(), None, 1, 1, 1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        if name == "tiny":
            torch.manual_seed(0)
            theirs, tokens = LlamaForCausalLM(LlamaConfig(**TINY)), torch.randint(0, 512, (200,))
        else:
            theirs, tokenizer = pretrained.read(name, torch.float32)
            tokens = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8")).input_ids[:200])
        found[str(dtype)] = compared(theirs.eval(), samples_of(tokens), dtype, tp, pp)
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
