"""A pretrained model of the Llama family: from a GGUF file to a folder of transformers, and Megatron's flags for it.

python -m chat.pretrained FILE.gguf     # once; makes the folder FILE
python -m chat.pretrained FOLDER        # prints the flags that describe its model to Megatron
"""

import os
import shutil
import sys
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is in the file

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedTokenizerBase


def convert(file: Path) -> Path:
    """Write the model of a GGUF file, dequantized to float32, and its tokenizer into a folder next to it."""
    folder, scratch = file.with_suffix(""), file.with_suffix(".part")
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    shutil.rmtree(scratch, ignore_errors=True)
    del model.config.quantization_config
    write(scratch, dict(model.state_dict()), model.config, tokenizer)
    scratch.rename(folder)  # never half a model
    return folder


def write(
    folder: Path, weights: dict[str, torch.Tensor], config: LlamaConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """A model as transformers saves it: weights, configuration and tokenizer."""
    if config.tie_word_embeddings:
        weights.pop("lm_head.weight", None)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder)
    config.save_pretrained(folder)
    contiguous = {name: weight.detach().cpu().contiguous() for name, weight in weights.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})


def read(folder: str | Path, dtype: torch.dtype) -> tuple[torch.nn.Module, PreTrainedTokenizerBase]:
    """The model, on the CPU and in evaluation mode, and the tokenizer of a folder."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def megatron_flags(config: LlamaConfig) -> list[str]:
    """The flags of Megatron that describe the model.

    Raises:
        ValueError: the model is not of the Llama family, or has what the table of `weights.py` does not map.
    """
    rope = config.rope_parameters
    unknown = {
        f"model_type={config.model_type}": config.model_type != "llama",
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        f"rope_type={rope['rope_type']}": rope["rope_type"] != "default",
        f"hidden_act={config.hidden_act}": config.hidden_act != "silu",
    }
    if found := [name for name, is_found in unknown.items() if is_found]:
        raise ValueError(f"the model has {', '.join(found)}, which examples/chat does not map to Megatron.")
    sizes = {
        "num-layers": config.num_hidden_layers,
        "hidden-size": config.hidden_size,
        "ffn-hidden-size": config.intermediate_size,
        "num-attention-heads": config.num_attention_heads,
        "num-query-groups": config.num_key_value_heads,
        "kv-channels": config.head_dim,
        "vocab-size": config.vocab_size,
        "max-position-embeddings": config.max_position_embeddings,
        "rotary-base": int(rope["rope_theta"]),
        "norm-epsilon": config.rms_norm_eps,
        "normalization": "RMSNorm",
        "position-embedding-type": "none",  # the packed attention rotates (attention.py)
    }
    switches = ["group-query-attention", "swiglu", "disable-bias-linear"]
    if not config.tie_word_embeddings:
        switches.append("untie-embeddings-and-output-weights")
    return [f"--{name}" for name in switches] + [word for k, v in sizes.items() for word in (f"--{k}", str(v))]


if __name__ == "__main__":
    path = Path(sys.argv[1])
    if path.suffix == ".gguf":
        print(f"wrote {convert(path)}", file=sys.stderr)
    else:
        print(*megatron_flags(AutoConfig.from_pretrained(path)), sep="\n")
