"""What examples/train_grpo.py says of samples, sizes and layers that it cannot take; a process, since it patches torch."""

from types import SimpleNamespace

import train_grpo

from megatron_pg import Sample

SIZES = {
    "prompts_per_rollout": 2,
    "group_size": 2,
    "global_batch_size": 4,
    "exact_match_prompts": 2,
    "docs_per_step": 0,
    "num_experts": None,
    "teacher": None,
    "task": "digit_sort",
    "seq_length": 12,
    "cached_sampling": False,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 1,
    "sequence_parallel": False,
    "pg_fused_head": None,
    "fp32_lm_head": False,
    "demonstrations_per_step": 0,
    "microbatch_means": None,
    "loss_aggregation": "constant",
    "top_p": 1.0,
    "top_p_logprobs": "sampling_mask",
    "teacher_num_layers": None,
    "teacher_hidden_size": None,
    "discard_rollouts": False,
    "transformer_impl": "local",
    "fp8": None,
    "use_rope_scaling": False,
    "rollouts": None,
    "pg_vocab_size": 12,
}
WRONG = [
    {"pg_vocab_size": 11},
    {"task": "list_programs"},
    {"cached_sampling": True},
    {"cached_sampling": True, "task": "list_programs", "seq_length": 48, "context_parallel_size": 2},
    {"demonstrations_per_step": 4},
    {"demonstrations_per_step": 1, "rollouts": "x"},
    {"microbatch_means": 2},
    {"microbatch_means": 2, "demonstrations_per_step": 2},
    {"top_p_logprobs": "engine"},
    {"teacher_hidden_size": 8},
    {"discard_rollouts": True, "docs_per_step": 4},
    {"top_p": 0.0},
    {"top_p": 0.9, "docs_per_step": 4},
    {"fp8": "hybrid"},
    {"use_rope_scaling": True, "hybrid_layer_pattern": "*-"},
]


def refused(function, *arguments, **options) -> None:
    try:
        function(*arguments, **options)
    except ValueError as error:
        print(error)


if __name__ == "__main__":
    args = SimpleNamespace(seq_length=4, padded_vocab_size=12, task="digit_sort")
    sample = Sample.build(tokens=[1, 2, 13], response_length=1, loss_mask=[1], old_logprobs=[-1.0], advantage=1.0)
    refused(train_grpo._check_fits, sample, args)
    train_grpo.mpu.get_data_parallel_world_size = lambda: 1
    for wrong in WRONG:
        refused(train_grpo.check_example, SimpleNamespace(**SIZES | wrong))
    train_grpo.check_example(SimpleNamespace(**SIZES))
    for pattern in ("M-*-", "*E"):
        refused(train_grpo.hybrid_model, SimpleNamespace(num_moe_experts=None), pattern, local=True)
