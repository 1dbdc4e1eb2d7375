"""The model of every driver: Megatron's GPTModel with an embedding, a head, and a layer that does nothing.

Its logits are `embedding[token] @ head.T`, so that a float64 oracle needs three lines, and context parallelism needs no
attention.
"""

from pathlib import Path
from typing import Any

VOCABULARY, WIDTH, LENGTH = 64, 16, 128
WEIGHTS = "toy.pt"  # in a checkpoint's folder
SHAPE = {"hidden_size": WIDTH, "num_attention_heads": 2, "num_query_groups": 2}  # TransformerConfig's


def build(config: Any, **stage: bool) -> Any:
    """The model of a pipeline stage; `stage` is `pre_process` and `post_process`."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer import MegatronModule, ModuleSpec
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    class Nothing(MegatronModule):
        def __init__(self, config: Any, layer_number: int = 1, **rest: Any):
            super().__init__(config)
            self.layer_number = layer_number

        def forward(self, hidden_states: Any, **rest: Any) -> tuple:
            return hidden_states, None

    model = GPTModel(
        config,
        TransformerBlockSubmodules(layer_specs=[ModuleSpec(module=Nothing)]),
        vocab_size=VOCABULARY,
        max_sequence_length=LENGTH,
        position_embedding_type="none",
        share_embeddings_and_output_weights=False,
        **stage,
    )
    for name, weight in model.named_parameters():
        weight.data.copy_(_shard(initial(name)))
    return model


def in_dtype(model: Any, config: Any) -> Any:
    """The model in the dtype of its parameters."""
    return model.to(config.params_dtype)


def initial(name: str) -> Any:
    """[V, H]: the weights of embedding and head before the first step."""
    import torch

    generator = torch.Generator().manual_seed(1 + name.startswith("output_layer"))
    return 0.5 * torch.randn(VOCABULARY, WIDTH, generator=generator)


def _shard(whole: Any) -> Any:
    """This tensor-parallel rank's rows."""
    from megatron.core import parallel_state

    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    return whole.chunk(size)[rank]


def whole(chunks: Any) -> dict[str, Any]:
    """Embedding and head [V, H] float32 of all ranks, every one of which must call."""
    import torch
    from megatron.core import parallel_state

    weights = torch.zeros(2, VOCABULARY, WIDTH)
    size, rank = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_tensor_model_parallel_rank()
    rows = slice(rank * VOCABULARY // size, (rank + 1) * VOCABULARY // size)
    is_copy = parallel_state.get_data_parallel_rank(with_context_parallel=True) > 0
    for name, weight in () if is_copy else (pair for chunk in chunks for pair in chunk.named_parameters()):
        weights[int("output_layer" in name), rows] = weight.detach().float()
    torch.distributed.all_reduce(weights)
    return {"embedding": weights[0], "head": weights[1]}


def save(chunks: Any, path: str) -> None:
    """Write a checkpoint; every rank must call."""
    import torch

    weights = whole(chunks)
    if torch.distributed.get_rank() == 0:
        torch.save(weights, Path(path) / WEIGHTS)


def load(chunks: Any, path: str) -> None:
    """Read a checkpoint; a folder without one leaves the first weights."""
    import torch

    weights = torch.load(Path(path) / WEIGHTS) if (Path(path) / WEIGHTS).exists() else {}
    for name, weight in (pair for chunk in chunks for pair in chunk.named_parameters() if weights):
        weight.data.copy_(_shard(weights["head" if "output_layer" in name else "embedding"]))


def table_of(weights: Any) -> Any:
    """[V, V] float32: the logits after each token."""
    return (weights["embedding"] @ weights["head"].T).numpy()


def sample(table: Any, last: int, seed: str) -> tuple[list[int], list[float]]:
    """A response of 2 to 7 tokens from a table [V, V] of logits, and its log-probabilities."""
    import random

    import numpy as np

    source = random.Random(seed)
    tokens, logprobs = [], []
    for _ in range(source.randrange(2, 8)):
        logits = table[last].astype(np.float64)
        probabilities = np.exp(logits - logits.max())
        probabilities /= probabilities.sum()
        (last,) = source.choices(range(len(probabilities)), probabilities)
        tokens.append(last)
        logprobs.append(float(np.log(probabilities[last])))
    return tokens, logprobs
