#!/usr/bin/env bash
# GRPO on GPUs: a GPT of 31 million parameters learns to run programs on lists, writing as many steps as it likes. Over NCCL, without any patch.
# Usage: bash examples/launch_gpu.sh [any flag of Megatron, megatron_pg or the example]
#   In the environment: PYTHON, SCRIPT, PROCESSES and RUN_DIR, the sizes TP, PP, CP and EP, and SP=1 for sequence parallelism.
#   CACHED= computes rows again for every token: the sampler's cache does not go with PP, CP, EP, SP or experts.
#   The rest of the processes is data parallel: TP=2 SP=1 bash examples/launch_gpu.sh
#   On several nodes: NODES, NODE_RANK, MASTER_ADDR and, unless it is 29500, MASTER_PORT.
set -euo pipefail
cd "$(dirname "$0")/.."
source examples/launch/given.sh

PYTHON=${PYTHON:-python}
PROCESSES=${PROCESSES:-$(nvidia-smi --list-gpus | wc -l)}
RUN_DIR=$(given --run-dir "${RUN_DIR:-runs/grpo}" "$@") # also of megatron.log and the TensorBoard files
TP=${TP:-1}
PP=${PP:-1}
CP=${CP:-1}
EP=${EP:-1}
if ((PP == 1 && CP == 1 && EP == 1)) && [[ -z ${SP:-} ]]; then CACHED=${CACHED-1}; else CACHED=${CACHED:-}; fi
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1} # overlapped expert communication wants 32

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
    --transformer-impl local # runs without Transformer Engine
    --num-layers 4
    --hidden-size 800
    --num-attention-heads 10
    --seq-length 84 # a prompt and its longest response are 82
    --max-position-embeddings 84
    --attention-dropout 0
    --hidden-dropout 0
    --tokenizer-type NullTokenizer
    --vocab-size 20
    --make-vocab-size-divisible-by 4
    --no-persist-layer-norm # needs Apex
    --no-gradient-accumulation-fusion # needs Apex
    --no-masked-softmax-fusion
    --bf16
)

PARALLEL_ARGS=(
    --tensor-model-parallel-size "$TP"
    --pipeline-model-parallel-size "$PP"
    --context-parallel-size "$CP"
    --expert-model-parallel-size "$EP"
    ${SP:+--sequence-parallel}
)
if ((PROCESSES * ${NODES:-1} > 1)); then # Megatron's sharded states of torch's Adam cannot be loaded: to resume, install Transformer Engine
    PARALLEL_ARGS+=(--use-distributed-optimizer)
fi

ROLLOUT_ARGS=(
    --task long_programs
    ${CACHED:+--cached-sampling}
    --warm-up-iters 600
    --prompts-per-rollout 16
    --group-size 16
)

GRPO_ARGS=(
    --loss-aggregation sample_mean
    --pg-temperature 1.0
    --pg-metrics with_entropy
)

TRAIN_ITERS=$(given --train-iters 900 "$@")
LR_WARMUP_ITERS=$(warm_up 50 "$(given --lr-decay-iters "$TRAIN_ITERS" "$@")" "$@")
OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 5e-4
    --min-lr 5e-5
    --lr-decay-style cosine
    --lr-warmup-iters "$LR_WARMUP_ITERS"
    --weight-decay 0
    --adam-beta2 0.98
    --clip-grad 1.0
    --micro-batch-size 128
    --global-batch-size 256
    --train-iters "$TRAIN_ITERS"
    --seed 1234
)

LOGGING_ARGS=(
    --run-dir "$RUN_DIR"
    --megatron-log "$RUN_DIR/megatron.log"
    --tensorboard-dir "$RUN_DIR/tensorboard"
    --tensorboard-log-interval 1
    --log-interval 10
    --eval-iters 0
    --eval-interval 1000
    --dataloader-type external
)

for word in "$@"; do
    if [[ $word == --help || $word == -h ]]; then exec "$PYTHON" "${SCRIPT:-examples/train_grpo.py}" --help; fi
done
exec "$PYTHON" -m torch.distributed.run "${DISTRIBUTED_ARGS[@]}" "${SCRIPT:-examples/train_grpo.py}" \
    "${MODEL_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${ROLLOUT_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
