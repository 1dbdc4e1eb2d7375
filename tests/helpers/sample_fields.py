"""A sample of three response tokens as `Sample.build` takes it, for what else a sample may have."""

FIELDS = {
    "tokens": [5, 6, 7, 8, 9],
    "response_length": 3,
    "loss_mask": [1, 1, 0],
    "old_logprobs": [-1.5, -2.0, 0.0],
    "advantage": 0.5,
    "prompt_id": 1,
    "rollout_id": 2,
    "reward": 1.0,
    "step": 0,
}
