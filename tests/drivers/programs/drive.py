"""Command lines of the hosts' drivers on the toy, each for four optimizer steps.

What a run leaves in its folder: `log.txt`, `metrics.jsonl` of our loss, and the files of `recorder`.
"""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import job
import processes

PROGRAMS = Path(__file__).parent
PYTHON = processes.ROOT / ".venv" / "drivers" / "bin" / "python"
PROMPTS, GROUP = 4, 4  # prompts of a rollout, samples of a prompt
ROLLOUTS, STEPS_PER_ROLLOUT = 2, 2
STEPS = ROLLOUTS * STEPS_PER_ROLLOUT
SETTINGS = {
    "RAY_raylet_start_wait_time_s": "600",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_DEDUP_LOGS": "0",
    "HYDRA_FULL_ERROR": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "CUDA_DEVICE_MAX_CONNECTIONS": "1",
}


def begin(host: str, folder: Path, command: Sequence[str], *last: Path, **settings: str) -> subprocess.Popen:
    """A driver in its folder, with our programs first on the path of all its processes and `last` at its end."""
    (folder / "steps").mkdir(parents=True)
    environment = processes.environment(PROGRAMS) | SETTINGS | settings
    environment["PYTHONPATH"] = os.pathsep.join([environment["PYTHONPATH"].rstrip(os.pathsep), *map(str, last)])
    environment |= {"DRIVER": host, "DRIVER_OUT": str(folder / "steps")}
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen([str(PYTHON), *command], env=environment, cwd=folder, stdout=log, stderr=log)
    processes.RUNNING.add(process)
    return process


def wait_for(process: subprocess.Popen, folder: Path) -> None:
    """The end of a driver that must succeed."""
    try:
        status = process.wait(processes.HANG)
    finally:
        processes.end(process)
    assert status == 0, (folder / "log.txt").read_text(encoding="utf-8", errors="replace")[-6000:]


def sizes(layout: Mapping[str, int]) -> dict[str, int]:
    """Megatron's names of the sizes of parallel groups."""
    return {
        f"{name}_parallel_size" if name == "context" else f"{name}_model_parallel_size": size
        for name, size in layout.items()
    }


def options(values: Mapping[str, object], prefix: str = "") -> list[str]:
    """Hydra's overrides of nested values."""
    words = []
    for name, value in values.items():
        if isinstance(value, Mapping):
            words += options(value, f"{prefix}{name}.")
        else:
            words.append(f"{prefix}{name}={value}")
    return words


def write_inputs(folder: Path, **more: object) -> Path:
    """Model, prompts and rollouts that the hosts read, with these arguments of `inputs.write`; returns the folder."""
    prompts = [[(7 * number + place) % 61 for place in range(4)] for number in range(32)]
    code = f"import inputs; inputs.write({str(folder)!r}, {prompts}, {PROMPTS}, {GROUP}, **{more!r})"
    environment = processes.environment(PROGRAMS) | SETTINGS
    subprocess.run([str(PYTHON), "-c", code], env=environment, check=True)
    return folder


# --- verl ---

OPTIONS_OF_VERL = "actor_rollout_ref.actor.megatron.override_mcore_model_config.megatron_pg"
METRICS_FILE = {"pg_metrics_file": "metrics.jsonl"}
VERL = {
    "algorithm.adv_estimator": "grpo",
    "trainer": {
        "val_before_train": False,
        "test_freq": -1,
        "save_freq": -1,
        "n_gpus_per_node": job.GPUS,
        "nnodes": 1,
        "balance_batch": False,
        "total_epochs": 1000,
        "logger": "[console]",
    },
    "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
    "data": {
        "train_batch_size": PROMPTS,
        "max_prompt_length": 16,
        "max_response_length": 16,
        "dataloader_num_workers": 0,
        "shuffle": False,
    },
    "reward.num_workers": 1,
    "reward.custom_reward_function.path": PROGRAMS / "inputs.py",
    "actor_rollout_ref.rollout": {
        "name": "table",
        "tensor_model_parallel_size": 1,
        "n": GROUP,
        "agent.num_workers": 1,
        "calculate_log_probs": True,
        "log_prob_use_dynamic_bsz": True,
        "log_prob_max_token_len_per_gpu": 64,
    },
    "actor_rollout_ref.actor": {
        "ppo_mini_batch_size": PROMPTS // STEPS_PER_ROLLOUT,
        "use_dynamic_bsz": True,
        "ppo_max_token_len_per_gpu": 64,
        "optim.lr": 1e-2,
    },
    **{f"{'' if name == 'num_cpus' else '+'}ray_kwargs.ray_init.{name}": value for name, value in job.RAY.items()},
}


def begin_verl(
    folder: Path,
    inputs: Path,
    *,
    checkout: Path | None,
    ours: Mapping[str, object] | None,
    layout: Mapping[str, int] = {},
    is_fused: bool = False,
    rollouts: int = ROLLOUTS,
    more: Mapping[str, object] = {},
    **settings: str,
) -> subprocess.Popen:
    """verl's `main_ppo`, with our loss and these options of it, or with verl's own loss; `more` options of verl."""
    changes = {
        "trainer.total_training_steps": rollouts,
        "data": {"train_files": inputs / "train.parquet", "val_files": inputs / "train.parquet"},
        "actor_rollout_ref.model": {"path": inputs / "model", "use_fused_kernels": is_fused},
        "actor_rollout_ref.actor.megatron": sizes(layout),
        "hydra.run.dir": folder / "hydra",
    }
    words = options(VERL) + options(changes) + options(more)
    if ours is not None:
        words.append("actor_rollout_ref.model.external_lib=megatron_pg.verl")
        words += [f"+{OPTIONS_OF_VERL}.{name}={value}" for name, value in {**METRICS_FILE, **ours}.items()]
    command = ["-m", "verl.trainer.main_ppo", "--config-name=ppo_megatron_trainer", *words]
    return begin("verl", folder, command, *([checkout] if checkout else []), VERL_ENGINE_DEVICE="cuda", **settings)


# --- slime and miles ---

ROLLOUT_HOST = {
    "rollout_batch_size": PROMPTS,
    "n_samples_per_prompt": GROUP,
    "global_batch_size": PROMPTS * GROUP // STEPS_PER_ROLLOUT,
    "actor_num_nodes": 1,
    "actor_num_gpus_per_node": job.GPUS,
    "num_layers": 2,
    "hidden_size": 16,
    "num_attention_heads": 2,
    "ffn_hidden_size": 32,
    "seq_length": 128,
    "max_position_embeddings": 128,
    "vocab_size": 64,
    "make_vocab_size_divisible_by": 1,
    "transformer_impl": "local",
    "position_embedding_type": "none",
    "norm_epsilon": 1e-6,
    "lr": 1e-2,
    "lr_decay_style": "constant",
    "optimizer": "adam",
    "clip_grad": 1.0,
    "max_tokens_per_gpu": 64,
    "distributed_backend": "gloo",
    "attention_dropout": 0,
    "hidden_dropout": 0,
    "custom_model_provider_path": "rollout_on_cpu.provide",
    "advantage_estimator": "grpo",
    "eps_clip": 0.2,
    "eps_clip_high": 0.28,
}
SWITCHES = (
    *("debug_train_only", "untie_embeddings_and_output_weights", "use_dynamic_batch_size", "use_cpu_initialization"),
    *("no_gradient_accumulation_fusion", "no_persist_layer_norm", "no_masked_softmax_fusion"),
    *("no_bias_gelu_fusion", "no_bias_dropout_fusion", "no_rope_fusion", "disable_rollout_global_dataset"),
)
RESUMED = ("no_load_optim", "no_load_rng")  # torch's Adam has no state yet when Megatron asks for its shape


def begin_rollout_host(
    host: str,
    folder: Path,
    inputs: Path,
    *,
    checkout: Path,
    ours: Mapping[str, object] | None,
    layout: Mapping[str, int] = {},
    is_fused: bool = False,
    rollouts: int = ROLLOUTS,
    checkpoints: Path | None = None,
    more: Mapping[str, object] = {},
    without: Sequence[str] = (),
    **settings: str,
) -> subprocess.Popen:
    """The `train.py` of slime or miles, started by our launcher with these flags, or by itself.

    `more` are flags of the host, None for a switch; it is not given those named in `without`. With `checkpoints` it
    continues from the latest one, and saves one after each rollout.
    """
    start = inputs / ("model" if host == "slime" else "empty")
    values = ROLLOUT_HOST | sizes(layout)
    values["num_rollout"] = rollouts
    values["load_debug_rollout_data"] = inputs / f"rollout_{'{rollout_id}' if rollouts <= ROLLOUTS else 0}.pt"
    values |= {"hf_checkpoint": inputs / "model", "load" if host == "slime" else "ref_load": start}
    if checkpoints is not None:
        values |= {"load": checkpoints, "save": checkpoints, "save_interval": 1, "ref_load": start}
    if ours is not None:
        values |= METRICS_FILE | ours | ({"pg_fused_head": "forward"} if is_fused else {})
    values |= dict.fromkeys((*SWITCHES, *(RESUMED if checkpoints is not None else ()))) | dict(more)
    words = [
        word
        for name, value in values.items()
        if name not in without
        for word in (flag(name), *([] if value is None else [str(value)]))
    ]
    launcher = [] if ours is None else ["-m", f"megatron_pg.{host}"]
    return begin(host, folder, [*launcher, str(checkout / "train.py"), *words], checkout, **settings)


def flag(name: str) -> str:
    """`--as-a-flag`."""
    return "--" + name.replace("_", "-")


# --- NeMo-RL ---

SETTINGS_OF_NEMO_RL = {
    "NEMO_RL_PY_EXECUTABLES_SYSTEM": "1",
    "TORCH_CUDA_ARCH_LIST": "9.0",
    "NRL_DISABLE_NUMA_BINDING": "1",
}
NEMO_RL = {
    "grpo": {
        "num_prompts_per_step": PROMPTS,
        "num_generations_per_prompt": GROUP,
        "max_num_epochs": 1000,
        "val_period": 0,
    },
    "loss_fn.reference_policy_kl_penalty": 0,
    "policy": {
        "precision": "float32",
        "train_global_batch_size": PROMPTS * GROUP // STEPS_PER_ROLLOUT,
        "train_micro_batch_size": 2,
        "max_total_sequence_length": 64,
        "sequence_packing.enabled": True,
        "generation.max_new_tokens": 8,
        "megatron_cfg": {
            "freeze_moe_router": False,
            "optimizer": {"bf16": False, "use_precision_aware_optimizer": False, "lr": 1e-2},
            "distributed_data_parallel_config": {"overlap_grad_reduce": False, "overlap_param_gather": False},
        },
    },
    "data": {
        "train": {"dataset_name": "ResponseDataset", "split_validation_size": 0},
        "default.prompt_file": "null",
        "num_workers": 0,
    },
    "env.math.num_workers": 1,
    "cluster.gpus_per_node": job.GPUS,
}


def begin_nemo_rl(
    folder: Path,
    inputs: Path,
    *,
    checkout: Path,
    ours: Mapping[str, object] | None,
    layout: Mapping[str, int] = {},
    rollouts: int = ROLLOUTS,
) -> subprocess.Popen:
    """NeMo-RL's `run_grpo.py`, started by our launcher with these options in `loss_fn.megatron_pg`, or by itself."""
    changes = {
        "grpo.max_num_steps": rollouts,
        "policy": {
            "model_name": inputs / "model",
            "make_sequence_length_divisible_by": 2 * layout.get("context", 1),
            "megatron_cfg": sizes(layout),
        },
        "logger.log_dir": folder / "logs",
        "+data.train.data_path": inputs / "train.jsonl",
        "++checkpointing.pretrained_checkpoint": f"{{path: {inputs / 'ckpt'}, format: megatron_lm}}",
    }
    words = options(NEMO_RL) + options(changes)
    if ours:
        words.append(f"+loss_fn.megatron_pg={{{', '.join(f'{name}: {value}' for name, value in ours.items())}}}")
    launcher = [] if ours is None else ["-m", "megatron_pg.nemo_rl"]
    config = checkout / "examples" / "configs" / "grpo_math_1B_megatron.yaml"
    command = [*launcher, str(checkout / "examples" / "run_grpo.py"), "--config", str(config), *words]
    return begin("nemo_rl", folder, command, checkout, **SETTINGS_OF_NEMO_RL)
