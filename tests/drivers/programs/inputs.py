"""Files that the hosts read, written with their own libraries."""

import json
from pathlib import Path

SHAPE = {  # of transformers' LlamaConfig
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 2,  # a stage of a pipeline has at least one
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
}
LENGTHS = (2, 8)  # of responses


def write(
    folder: str,
    prompts: list[list[int]],
    num_prompts: int,
    group: int,
    *,
    shape: dict = SHAPE,
    lengths: tuple[int, int] = LENGTHS,
    logprob: float = -4.1,
) -> None:
    """Everything; a rollout has `group` samples of each of `num_prompts` prompts, and one log-probability."""
    place = Path(folder)
    (place / "empty").mkdir()  # where miles looks for a checkpoint
    write_model(place / "model", shape)
    write_verl_prompts(place / "train.parquet", prompts)
    write_rollouts(place, prompts[:num_prompts], group, shape["vocab_size"] - 4, lengths, logprob)
    write_nemo_rl_prompts(place, prompts)


def write_model(folder: Path, shape: dict) -> None:
    """A tokenizer of as many words as the vocabulary has, and the configuration of a model that no run builds."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    special = ("\n", "<pad>", "<eos>")
    names = [f"w{number}" for number in range(shape["vocab_size"] - len(special))]
    words = {word: number for number, word in enumerate([*names, *special])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    roles = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "w0"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    fast.save_pretrained(folder)
    config = LlamaConfig(**shape)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)


def write_verl_prompts(path: Path, prompts: list[list[int]]) -> None:
    """The prompts as verl's dataset of conversations."""
    import pandas

    rows = [
        {
            "data_source": "toy",
            "prompt": [{"role": "user", "content": " ".join(f"w{token}" for token in prompt)}],
            "ability": "toy",
            "reward_model": {"style": "rule", "ground_truth": "w1"},
            "extra_info": {"index": number},
        }
        for number, prompt in enumerate(prompts)
    ]
    pandas.DataFrame(rows).to_parquet(path)


def write_rollouts(
    folder: Path, prompts: list[list[int]], group: int, words: int, lengths: tuple[int, int], logprob: float
) -> None:
    """Two rollouts in the form in which slime and miles store theirs."""
    import random

    import torch

    source = random.Random(1)
    for number in range(2):
        samples = []
        for index in range(len(prompts) * group):
            response = [source.randrange(words) for _ in range(source.randrange(*lengths))]
            samples.append(
                {
                    "group_index": index // group,
                    "index": len(prompts) * group * number + index,
                    "prompt": "",
                    "tokens": prompts[index // group] + response,
                    "response": "",
                    "response_length": len(response),
                    "label": "",
                    "reward": float(source.random() > 0.5),
                    "loss_mask": [1] * len(response),
                    "status": "completed",
                    "metadata": {},
                    "rollout_log_probs": [logprob] * len(response),
                    "multimodal_inputs": None,
                }
            )
        torch.save({"rollout_id": number, "samples": samples}, folder / f"rollout_{number}.pt")


def write_nemo_rl_prompts(folder: Path, prompts: list[list[int]]) -> None:
    """The prompts as NeMo-RL's dataset of responses, and an empty checkpoint in place of a converted model."""
    lines = (json.dumps({"input": " ".join(f"w{token}" for token in prompt), "output": "w1"}) for prompt in prompts)
    (folder / "train.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    (folder / "ckpt" / "iter_0000001").mkdir(parents=True)
    (folder / "ckpt" / "latest_checkpointed_iteration.txt").write_text("1", encoding="utf-8")
    (folder / "ckpt" / "iter_0000001" / "metadata.json").write_text("{}", encoding="utf-8")


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info=None, **rest) -> float:
    """verl's reward: it depends on the length of the text only."""
    return float(len(solution_str) % 5) / 5
