#!/usr/bin/env bash
# GRPO on a machine without a GPU: Megatron's pretrain() over gloo, two data-parallel processes.
# Usage: bash examples/launch_cpu.sh [any flag of Megatron, megatron_pg or the example]
#   PYTHON, PROCESSES and RUN_DIR may be set in the environment, and on several nodes NODES, NODE_RANK and MASTER_ADDR.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/launch/given.sh

PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-2}
RUN_DIR=$(given --run-dir "${RUN_DIR:-runs/grpo}" "$@") # also of megatron.log and the TensorBoard files
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

DISTRIBUTED_ARGS=(--nproc-per-node "$PROCESSES")
if ((${NODES:-1} > 1)); then # the same command on each of them, with its NODE_RANK
    DISTRIBUTED_ARGS+=(
        --nnodes "$NODES"
        --node-rank "${NODE_RANK:?is missing: the number of this node, 0 where MASTER_ADDR is}"
        --master-addr "${MASTER_ADDR:?is missing: the address of node 0, as every node reaches it}"
        --master-port "${MASTER_PORT:-29500}"
    )
else
    DISTRIBUTED_ARGS+=(--standalone)
fi

MODEL_ARGS=(
    --transformer-impl local
    --num-layers 3
    --hidden-size 96
    --num-attention-heads 4
    --seq-length 12
    --max-position-embeddings 12
    --attention-dropout 0
    --hidden-dropout 0
    --tokenizer-type NullTokenizer
    --vocab-size 12
    --make-vocab-size-divisible-by 1
)

# What a machine without a GPU needs: gloo, and none of the fused kernels.
CPU_ARGS=(
    --distributed-backend gloo
    --use-cpu-initialization
    --no-gradient-accumulation-fusion
    --no-persist-layer-norm
    --no-masked-softmax-fusion
    --no-bias-gelu-fusion
    --no-bias-dropout-fusion
    --no-rope-fusion
)

ROLLOUT_ARGS=(
    --warm-up-iters 60
    --prompts-per-rollout 32
    --group-size 8
    --exact-match-interval 30
)

GRPO_ARGS=(
    --loss-aggregation sample_mean
    --pg-temperature 1.0
    --pg-metrics basic
    --pg-kernel torch
)
if [[ -z $(given --pg-objective "" "$@") ]]; then # another one brings the numbers that it reads
    GRPO_ARGS+=(--pg-clip-eps-low 0.2 --pg-clip-eps-high 0.28)
fi

TRAIN_ITERS=$(given --train-iters 420 "$@")
LR_WARMUP_ITERS=$(warm_up 10 "$(given --lr-decay-iters "$TRAIN_ITERS" "$@")" "$@")
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 1e-3
    --min-lr 5e-5
    --lr-decay-style cosine
    --lr-warmup-iters "$LR_WARMUP_ITERS"
    --weight-decay 0
    --adam-beta2 0.98
    --clip-grad 1.0
    --micro-batch-size 64
    --global-batch-size 128
    --train-iters "$TRAIN_ITERS"
    --seed 1234
)

LOGGING_ARGS=(
    --run-dir "$RUN_DIR"
    --megatron-log "$RUN_DIR/megatron.log"
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --tensorboard-log-interval 1
    --log-interval 10
    --logging-level 40
    --eval-iters 0
    --eval-interval 1000
    --dataloader-type external
)

for word in "$@"; do
    if [[ $word == --help || $word == -h ]]; then exec "$PYTHON" examples/train_grpo.py --help; fi
done
exec "$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" examples/train_grpo.py \
    "${MODEL_ARGS[@]}" "${CPU_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
