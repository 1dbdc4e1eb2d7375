"""Samples as other trainers dump them."""


# --- slime and miles: Sample.to_dict() of slime/utils/types.py and miles/utils/types.py ---


def slime_sample(index: int, group: int, reward: object, **changes) -> dict:
    return {
        "group_index": group,
        "index": index,
        "rollout_id": None,
        "prompt": "2+2=",
        "tokens": [10 + group, 11, 20 + index, 21, 22],
        "multimodal_inputs": None,
        "multimodal_train_inputs": None,
        "response": "4",
        "response_length": 3,
        "label": "4",
        "reward": reward,
        "loss_mask": None,
        "weight_versions": ["7"],
        "rollout_log_probs": [-0.5, -0.25, -1.0 - index],
        "rollout_routed_experts": None,
        "remove_sample": False,
        "teacher_log_probs": None,
        "status": "completed",
        "metadata": {"source": "math"},
        "generate_function_path": None,
        "train_metadata": None,
        "non_generation_time": 0.0,
        "spec_info": {"spec_accept_token_num": 0},
        "prefix_cache_info": {"cached_tokens": 0},
    } | changes


SLIME = [
    slime_sample(0, 0, 1.0),
    slime_sample(1, 0, 0.0, loss_mask=[1, 0, 1]),
    slime_sample(2, 0, 0.5, status="truncated", remove_sample=True),
    slime_sample(3, 1, 1.0, rollout_id=40),
    slime_sample(4, 1, 1.0, rollout_id=40),
    slime_sample(5, 1, 0.0, rollout_id=41),
]


# --- NeMo-RL: log_batched_dict_as_jsonl of nemo_rl/utils/logger.py ---


def nemo_row(
    i: int, prompt: list[int], response: list[int], mask: list[int] | None = None, width: int = 8, **changes
) -> dict:
    ids = [*prompt, *response]
    padding = [0] * (width - len(ids))
    live = [0] * len(prompt) + (mask or [1] * len(response))
    return {
        "content": ["text"],
        "rewards": [float(i % 2)],
        "input_lengths": [len(ids)],
        "token_ids": [ids + padding],
        "token_loss_mask": [live + padding],
        "sample_loss_mask": [1.0],
        "advantages": [[0.25 * (i + 1)] * width],
        "generation_logprobs": [[0.0] * len(prompt) + [-0.5 - k for k in range(len(response))] + [0.0] * len(padding)],
        "prev_logprobs": [[-9.0] * len(prompt) + [-0.25 - k for k in range(len(response))] + [0.0] * len(padding)],
        "idx": i,
    } | changes


NEMO = [
    nemo_row(0, [1, 2], [5, 6, 7]),
    nemo_row(1, [1, 2], [5], sample_loss_mask=[0.0]),
    nemo_row(2, [1, 2, 3], [5, 6, 7, 8], [1, 0, 0, 1]),
    nemo_row(3, [1, 2, 3], [9, 9]),
]
