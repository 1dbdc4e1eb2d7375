#!/usr/bin/env bash
# my_grpo.py on a machine without a GPU. Usage: bash launch.sh [further flags]
#   PYTHON and PROCESSES may be set in the environment.
set -euo pipefail
cd "$(dirname "$0")"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

MODEL_ARGS=(
    --transformer-impl local --num-layers 2 --hidden-size 32 --num-attention-heads 4
    --seq-length 16 --max-position-embeddings 16 --attention-dropout 0 --hidden-dropout 0
    --tokenizer-type NullTokenizer --vocab-size 12 --make-vocab-size-divisible-by 1
)
# What a machine without a GPU needs: gloo, and none of the fused kernels.
CPU_ARGS=(
    --distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-dropout-fusion --no-rope-fusion
)
TRAINING_ARGS=(
    --micro-batch-size 4 --global-batch-size 16 --train-iters 2 --lr 1e-3 --lr-decay-style constant
    --log-interval 1 --dataloader-type external --eval-iters 0 --eval-interval 1000000
)
GRPO_ARGS=(
    --loss-aggregation constant --loss-aggregation-divisor 6
)
exec "${PYTHON:-python}" -m torch.distributed.run --standalone --nproc-per-node "${PROCESSES:-2}" my_grpo.py \
    "${MODEL_ARGS[@]}" "${CPU_ARGS[@]}" "${TRAINING_ARGS[@]}" "${GRPO_ARGS[@]}" "$@"
