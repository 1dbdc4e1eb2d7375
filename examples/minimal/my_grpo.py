"""The smallest training script: a GPT on a rollout file. Copy this folder, then change model and data.

Without a GPU it needs `cpu_megatron.py` of examples/cpu in its folder.
"""

import torch

if not torch.cuda.is_available():
    import cpu_megatron

    cpu_megatron.enable()  # before megatron is imported

from megatron.core import parallel_state as mpu
from megatron.core.enums import ModelType
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.num_microbatches_calculator import get_num_microbatches
from megatron.training import get_args
from megatron.training.arguments import core_transformer_config_from_args
from torch.distributed.elastic.multiprocessing.errors import record

from megatron_pg import cut_microbatches, read_steps
from megatron_pg.pretrain import pretrain


def model_provider(pre_process=True, post_process=True, vp_stage=None, config=None, pg_collection=None):
    """A small GPT model."""
    args = get_args()
    return GPTModel(
        config=config or core_transformer_config_from_args(args),
        transformer_layer_spec=get_gpt_layer_local_spec(),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=args.max_position_embeddings,
        pre_process=pre_process,
        post_process=post_process,
        vp_stage=vp_stage,
        pg_collection=pg_collection,
    )


def micro_batches():
    """This data-parallel rank's micro-batches, from the step after the checkpoint on."""
    args = get_args()
    for samples in read_steps("rollouts.jsonl")[args.iteration :]:
        yield from cut_microbatches(
            samples,
            num_microbatches=get_num_microbatches(),
            data_parallel_rank=mpu.get_data_parallel_rank(),
            data_parallel_size=mpu.get_data_parallel_world_size(),
            qkv_format="bshd",
            rows=args.micro_batch_size,
            max_seq_len=args.seq_length,
        )


def datasets_provider(num_samples, vp_stage=None):
    """The training data of this rank."""
    return micro_batches(), None, None


@record  # torchrun shows the error of the rank that failed first
def main():
    """Train."""
    datasets_provider.is_distributed = True  # every rank has its own iterator
    pretrain(
        train_valid_test_dataset_provider=datasets_provider,
        model_provider=model_provider,
        model_type=ModelType.encoder_or_decoder,
        metrics_file="metrics.jsonl",
    )
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
