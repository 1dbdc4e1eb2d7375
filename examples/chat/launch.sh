#!/usr/bin/env bash
# GRPO on a real chat model: Megatron trains it, transformers samples from it. On GPUs in bfloat16 over NCCL, without a GPU in float32 over gloo.
# Usage: MODEL=FILE.gguf bash examples/chat/launch.sh [any flag of Megatron, megatron_pg or the example]
#   MODEL      a GGUF file, which is converted once into a folder next to it, or a folder of transformers
#   DTYPE=fp32 trains and samples in float32 on GPUs
#   In the environment too: PYTHON, PROCESSES, RUN_DIR, the sizes TP and PP, SP=1 for sequence parallelism, and PYTHONPATH with transformers and gguf
set -euo pipefail
cd "$(dirname "$0")/../.."
source examples/launch/given.sh

PYTHON=${PYTHON:-python}
MODEL=${MODEL:-.venv/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf}
TP=${TP:-1}
PP=${PP:-1}
RUN_DIR=$(given --run-dir "${RUN_DIR:-runs/chat}" "$@")
GPUS=$( (nvidia-smi --list-gpus 2>/dev/null || true) | wc -l)
PROCESSES=${PROCESSES:-$((GPUS > 0 ? GPUS : TP * PP))}
export PYTHONPATH=examples:$PWD${PYTHONPATH:+:$PYTHONPATH}
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export CUDA_DEVICE_MAX_CONNECTIONS=${CUDA_DEVICE_MAX_CONNECTIONS:-1}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((GPUS > 0 ? 4 : 1 + ($(nproc) - 1) / PROCESSES))}

if [[ $MODEL == *.gguf ]]; then
    if [[ ! -d ${MODEL%.gguf} ]]; then
        [[ -f $MODEL ]] || {
            echo "MODEL=$MODEL does not exist. Run make chat, which downloads it, or give the file or folder of a Llama model." >&2
            exit 1
        }
        "$PYTHON" -m chat.pretrained "$MODEL"
    fi
    MODEL=${MODEL%.gguf}
fi
FLAGS=$("$PYTHON" -m chat.pretrained "$MODEL")
mapfile -t MODEL_ARGS <<<"$FLAGS"
MODEL_ARGS+=(
    --chat-model "$MODEL"
    --transformer-impl local # runs without Transformer Engine
    --make-vocab-size-divisible-by 1
    --tokenizer-type NullTokenizer
    --seq-length 1024 # for Megatron's count of operations: packed rows are as long as their answers
    --attention-dropout 0
    --hidden-dropout 0
    --no-persist-layer-norm # needs Apex
    --no-gradient-accumulation-fusion # needs Apex
    --no-masked-softmax-fusion
    --no-rope-fusion
    --no-bias-swiglu-fusion # compiled again for every length of a packed row
    --no-bias-dropout-fusion
)
if ((GPUS > 0)); then
    DEVICE_ARGS=()
    [[ ${DTYPE:-bf16} == fp32 ]] || DEVICE_ARGS=(--bf16)
else
    DEVICE_ARGS=(--distributed-backend gloo --use-cpu-initialization)
fi

PARALLEL_ARGS=(--tensor-model-parallel-size "$TP" --pipeline-model-parallel-size "$PP" ${SP:+--sequence-parallel})

GRPO_ARGS=(
    --loss-aggregation sample_mean
    --pg-metrics with_entropy
)
if [[ -z $(given --pg-objective "" "$@") ]]; then # another one brings the numbers that it reads
    GRPO_ARGS+=(--pg-clip-eps-low 0.2 --pg-clip-eps-high 0.28)
fi

OPTIMIZER_ARGS=(
    --optimizer adam
    --lr 3e-5
    --lr-decay-style constant
    --weight-decay 0
    --adam-beta2 0.98
    --clip-grad 1.0
    --micro-batch-size 96
    --global-batch-size 384
    --train-iters 25
    --seed 1234
)

LOGGING_ARGS=(
    --run-dir "$RUN_DIR"
    --log-interval 1000000
    --logging-level 40
    --eval-iters 0
    --eval-interval 1000000
    --dataloader-type external
)

exec "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node "$PROCESSES" -m chat.train \
    "${MODEL_ARGS[@]}" "${DEVICE_ARGS[@]}" "${PARALLEL_ARGS[@]}" "${GRPO_ARGS[@]}" "${OPTIMIZER_ARGS[@]}" \
    "${LOGGING_ARGS[@]}" "$@"
