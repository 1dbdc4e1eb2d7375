"""A Llama model on real ranks: transformers' weights, logits and samples, and Megatron's of the same model.

    torchrun … chat_ranks.py FOLDER OUT TP PP

OUT receives one JSON object with differences, largest and mean, and with what was counted.
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
from chat.engine import Engine, Turn, rounded
from chat.rollouts import demonstrated, problems_of, sampled, samples_of
from chat.scoring import with_trainers_logprobs
from chat.tasks import TASKS
from megatron.core import parallel_state as mpu
from megatron.core.models.gpt import GPTModel
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_pg import Sample, pack

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


def documents_of(tokens: torch.Tensor) -> list[Sample]:
    """Documents of several lengths, the longest of 200 tokens."""
    ends = [(0, 200, 150), (10, 40, 5), (60, 62, 1), (70, 150, 60)]
    return [
        Sample.build(tokens=tokens[a:b], response_length=r, loss_mask=[1] * r, old_logprobs=[0.0] * r, advantage=0.0)
        for a, b, r in ends
    ]


@torch.no_grad()
def engine_compared(folder: str, tp: int, pp: int) -> dict:
    """The engine's log-probabilities of what it samples from refreshed weights, and the trainer's."""
    engine = Engine(folder, torch.float32, float32_head=True, quantized=None, batch_size=3)
    model, task = megatrons(engine.model, torch.float32, tp, pp), TASKS["times_table"].with_length(12)
    for parameter in model.parameters():  # of the weights before, the trainer would give others
        parameter.mul_(1.01)
    problems = [problem for problem in problems_of(task, "ranks", 5) for _ in range(2)]
    found = {}
    for name, quantized in (("equal", None), ("int8", "int8"), ("int4", "int4")):
        engine.quantized = quantized
        engine.refresh([model])
        conversations = sampled(engine, task, problems, seed=3)
        samples = samples_of(conversations, 0, group_size=2, rule="group_mean", environment="times_table")
        (batch,) = with_trainers_logprobs([model], [pack(samples, qkv_format="thd")])
        gaps = [differences(s.old_logprobs, s.rollout_logprobs) for s in batch.samples]
        found[name] = [max(gap[0] for gap in gaps), sum(gap[1] for gap in gaps) / len(gaps)]
        found[f"texts_{name}"] = len({tuple(c.response) for c in conversations})
    weight = engine.model.model.layers[0].mlp.up_proj.weight
    found["levels"] = max(len(row.unique()) for row in rounded(torch.randn_like(weight), 7))
    return found


class ScriptedEngine(Engine):
    """Says the turns of demonstrations."""

    def sample(self, contexts, max_tokens, generator):
        """The next turn of the demonstration whose beginning the context is."""
        turns = []
        for context in contexts:
            (whole,) = [c for c in self.script if (c.prompt + c.response)[: len(context)] == context]
            tokens = (whole.prompt + whole.response)[len(context) :]
            tokens = tokens[: tokens.index(self.stop) + 1]
            turns.append(Turn(tokens, [-1.0] * len(tokens), has_ended=True))
        return turns


def turns_compared(folder: str) -> dict:
    """Conversations of several turns: sampled, demonstrated, and as the chat template writes them."""
    engine = ScriptedEngine(folder, torch.float32, float32_head=True, quantized=None, batch_size=3)
    task, count, wrong = TASKS["calculator"], 7, 0
    problems = problems_of(task, "turns", count)
    engine.script = demonstrated(engine, problems)
    for problem, shown, said in zip(problems, engine.script, sampled(engine, task, problems, seed=0), strict=True):
        messages = [{"role": "user", "content": problem.prompt}]
        for text in problem.demonstration:
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": problem.reply(text) or ""}]
        template = engine.tokenizer.apply_chat_template(messages[:-1], tokenize=False)
        end = template.rindex("<|im_end|>") + len("<|im_end|>")
        tokens = engine.tokenizer(template[:end], add_special_tokens=False).input_ids
        assistants = [t for t, bit in zip(said.response, said.mask, strict=True) if bit]
        wrong += not (
            (said.prompt, said.response, said.mask) == (shown.prompt, shown.response, shown.mask)
            and said.prompt + said.response == tokens
            and said.reward == 1.0
            and engine.text_of(assistants) == "".join(problem.demonstration)
        )
    return {"conversations": count, "wrong": wrong}


def main() -> None:
    """Compare in float32 and in bfloat16, then the engine and its conversations."""
    folder, out, tp, pp = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.distributed.init_process_group("gloo")
    mpu.initialize_model_parallel(tp, pp)
    model_parallel_cuda_manual_seed(1)
    init_num_microbatches_calculator(torch.distributed.get_rank(), None, 1, 1, 1)
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        theirs, tokenizer = pretrained.read(folder, torch.float32)
        tokens = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8")).input_ids[:200])
        found[str(dtype)] = compared(theirs, documents_of(tokens), dtype, tp, pp)
    found |= {"engine": engine_compared(folder, tp, pp), "turns": turns_compared(folder)}
    if torch.distributed.get_rank() == 0:
        out.write_text(json.dumps(found), encoding="utf-8")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
