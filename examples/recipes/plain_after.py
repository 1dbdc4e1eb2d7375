"""A Megatron-LM pretrain script on recorded documents. plain_before.py trains by cross-entropy, plain_after.py by
RL."""

import sys
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
if not torch.cuda.is_available():
    from cpu import cpu_megatron

    cpu_megatron.enable()

from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args

from megatron_pg import pack, read_rollouts
from megatron_pg.pretrain import pretrain

DOCUMENTS = Path(__file__).with_name("rollouts.jsonl")
VOCABULARY = 12  # releases differ in what NullTokenizer adds


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """A small GPT model."""
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=VOCABULARY,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def micro_batches():
    """This rank's documents, one per row, for ever."""
    args = get_args()
    documents = read_rollouts(DOCUMENTS)
    mine = documents[mpu.get_data_parallel_rank() :: mpu.get_data_parallel_world_size()]
    rows = args.micro_batch_size
    while True:
        for start in range(0, len(mine), rows):
            part = mine[start : start + rows]
            yield pack(part, qkv_format="bshd", max_seq_len=args.seq_length, rows=rows)


def datasets_provider(num_samples, vp_stage=None):
    """The training data of this rank."""
    return micro_batches(), None, None


if __name__ == "__main__":
    datasets_provider.is_distributed = True
    pretrain(
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
    )
    torch.distributed.destroy_process_group()
