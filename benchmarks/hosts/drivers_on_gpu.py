"""Step time and peak memory of the hosts' own drivers with their own loss, with ours, and with ours and the fused head.

    python benchmarks/hosts/drivers_on_gpu.py WORK --slime CHECKOUT                  # one GPU and two
    python benchmarks/hosts/drivers_on_gpu.py WORK --slime CHECKOUT --gpus 1 --cpu \
        --layers 2 --hidden 64 --heads 4 --ffn 128 --columns 512 --lengths 32 129 --tokens 160   # does it run

verl's `main_ppo` and slime's `train.py` as tests/drivers starts them, for two rollouts and four optimizer steps of a
random model of 0.5 billion parameters. Responses are random tokens. Ray, workers, model, DDP, optimizer and NCCL are
real. A case prints a JSON object, and is not run again with the same WORK unless it failed: WORK/failures.txt has the
end of its log, also of a case that SIGINT or SIGTERM has ended.
"""

import argparse
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

HERE = Path(__file__).parent
TESTS = HERE.parents[1] / "tests"
GIB = 2**30
CASES = {  # whether the loss is ours, and whether the head is fused
    "own": (False, False),
    "own, fused": (False, True),  # verl's own kernels; slime has none
    "ours": (True, False),
    "ours, fused": (True, True),
}
LOSSES_IN_LOG = {  # of a host's own loss: one number per rollout in verl, per step in slime
    "verl": re.compile(r"actor/pg_loss:(?:np\.float\d+\()?([-+.\de]+)"),
    "slime": re.compile(r"'train/pg_loss': ([-+.\de]+)"),
}
INTERRUPTED = "interrupted"
ERROR = re.compile(r"^.*(?:Error|Exception|error:).*$", re.MULTILINE)


def options() -> argparse.Namespace:
    """Of the command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("work", type=Path, help="folder of inputs, runs, results.jsonl and failures.txt")
    parser.add_argument("--slime", type=Path, help="checkout; without it, verl alone")
    parser.add_argument("--hosts", nargs="+", choices=("verl", "slime"), default=["verl", "slime"])
    parser.add_argument("--gpus", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--cpu", action="store_true", help="gloo, PyTorch's kernels")
    sizes = {"layers": 24, "hidden": 896, "heads": 14, "groups": 2, "ffn": 4864, "columns": 151_936}
    for name, size in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--lengths", nargs=2, type=int, default=[2048, 8193], help="of responses, end excluded")
    parser.add_argument("--tokens", type=int, default=8448, help="of a micro-batch at most")
    parser.add_argument("--limit", type=float, default=180.0, help="seconds after which a case has failed")
    given = parser.parse_args()
    given.sizes = {name: getattr(given, name) for name in (*sizes, "lengths")}
    return given


def load() -> ModuleType:
    """The command lines of tests/drivers, started with this interpreter; jobs also find this folder's modules."""
    os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep)
    folders = ("drivers/programs", "helpers", "helpers/runs")
    sys.path[:0] = [str(TESTS.parent), *(str(TESTS / folder) for folder in folders)]
    import drive

    drive.PYTHON = Path(sys.executable)
    return drive


def write_inputs(drive: ModuleType, given: argparse.Namespace) -> Path:
    """Configuration of the model, prompts, and slime's rollouts."""
    folder = given.work / "inputs"
    if not folder.exists():
        folder.mkdir(parents=True)
        shape = {
            "vocab_size": given.columns,
            "hidden_size": given.hidden,
            "num_hidden_layers": given.layers,
            "num_attention_heads": given.heads,
            "num_key_value_heads": given.groups,
            "intermediate_size": given.ffn,
            "max_position_embeddings": 2 * given.lengths[1],
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
        }
        drive.write_inputs(folder, shape=shape, lengths=tuple(given.lengths), logprob=-12.0)
    return folder


# --- the hosts' options ---


def of_verl(given: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """What `drive.begin_verl` is given in addition."""
    more = {
        "trainer.n_gpus_per_node": gpus,
        "data.max_response_length": given.lengths[1],
        "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu": given.tokens,
        "actor_rollout_ref.actor": {"ppo_max_token_len_per_gpu": given.tokens, "optim.lr": 1e-6},
        "++ray_kwargs.ray_init.num_gpus": gpus,
    }
    return {"checkout": None, "more": more}


def of_slime(given: argparse.Namespace, gpus: int) -> dict[str, Any]:
    """What `drive.begin_rollout_host` is given in addition."""
    switches = ("group_query_attention", "add_qkv_bias", "disable_bias_linear", "swiglu")
    more = {
        "actor_num_gpus_per_node": gpus,
        "num_layers": given.layers,
        "hidden_size": given.hidden,
        "num_attention_heads": given.heads,
        "num_query_groups": given.groups,
        "ffn_hidden_size": given.ffn,
        "vocab_size": given.columns,
        "seq_length": 2 * given.lengths[1],
        "max_position_embeddings": 2 * given.lengths[1],
        "max_tokens_per_gpu": given.tokens,
        "position_embedding_type": "rope",
        "rotary_base": 1_000_000,
        "normalization": "RMSNorm",
        "lr": 1e-6,
        "distributed_backend": "gloo" if given.cpu else "nccl",
        **dict.fromkeys(switches),
    }
    of_a_cpu = () if given.cpu else ("use_cpu_initialization",)
    without = ("untie_embeddings_and_output_weights", *of_a_cpu)
    return {"host": "slime", "checkout": given.slime, "more": more, "without": without}


# --- a case ---


def run(drive: ModuleType, host: str, gpus: int, case: str, given: argparse.Namespace) -> dict[str, Any]:
    """The host's driver from its start to its end."""
    name = f"{host}, {gpus} GPU, {case}"
    folder, number = given.work / name.replace(", ", "_").replace(" ", "_"), 0
    while (folder / str(number)).exists():  # of a run that failed
        number += 1
    folder = folder / str(number)
    is_ours, is_fused = CASES[case]
    settings = {
        "DRIVER_SIZES": json.dumps(given.sizes),
        "DRIVER_MODEL": "driver_model",
        "DRIVER_RECORDER": "driver_meter",
        **({} if given.cpu else {"DRIVER_GPUS": str(gpus)}),
    }
    begin, more = (
        (drive.begin_verl, of_verl(given, gpus))
        if host == "verl"
        else (drive.begin_rollout_host, of_slime(given, gpus))
    )
    ours = ({"pg_kernel": "torch"} if given.cpu else {}) if is_ours else None
    process = begin(folder=folder, inputs=given.work / "inputs", ours=ours, is_fused=is_fused, **more, **settings)
    begun = time.monotonic()
    status = end_of(process, given.limit)
    log = (folder / "log.txt").read_text(encoding="utf-8", errors="replace")
    row = {"case": name, "s, whole": round(time.monotonic() - begun, 1)}
    try:
        if status != 0:
            raise ValueError(f"exit status {status}")
        return row | measured(folder) | {"losses": losses(folder, host, is_ours, log)}
    except (OSError, ValueError) as error:
        with (given.work / "failures.txt").open("a") as file:
            file.write(f"=== {name}: {error}\n{log[:2000]}\n[...]\n{log[-30_000:]}\n")
        first = ERROR.search(log)
        return row | {"error": f"{error}: {first[0][:300] if first else 'no error in the log'}"}


def end_of(process: subprocess.Popen, limit: float) -> int | str:
    """Its exit status; a driver that takes too long, or that a signal ends, is ended."""
    try:
        return process.wait(limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as reason:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return INTERRUPTED if isinstance(reason, KeyboardInterrupt) else f"none after {limit:.0f} s"


def measured(folder: Path) -> dict[str, Any]:
    """Of the steps of all ranks: what docs/hosts/drivers.md lists."""
    ranks = [
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        for path in sorted((folder / "steps").glob("*.jsonl"))
    ]
    steps = list(zip(*ranks, strict=True))
    if len(steps) != 4:
        raise ValueError(f"{len(steps)} steps")
    seconds = [max(rank["seconds"] for rank in step) for step in steps]
    everything = [rank for step in steps for rank in step]
    return {
        "s": round(statistics.median(seconds[1:]), 4),
        "s, each": [round(second, 4) for second in seconds],
        "s, second rollout": round(ranks[0][2]["since"] + ranks[0][3]["since"], 3),
        "GiB, steps": round(max(rank["peak"] for rank in everything) / GIB, 3),
        "GiB, job": round(max(max(rank["peak"], rank["before"]) for rank in everything) / GIB, 3),
        "tokens": [sum(rank["tokens"] for rank in step) for step in steps],
        "norms": [step[0]["grad_norm"] for step in steps],
    }


def losses(folder: Path, host: str, is_ours: bool, log: str) -> list[float]:
    """What was logged."""
    if is_ours:
        lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        return [json.loads(line)["pg_loss"] for line in lines]
    return [float(value) for value in LOSSES_IN_LOG[host].findall(log)]


def done(results: Path) -> Mapping[str, Any]:
    """The cases that have run, without those that failed."""
    lines = results.read_text(encoding="utf-8").splitlines() if results.exists() else []
    rows = [json.loads(line) for line in lines]
    return {row["case"]: row for row in rows if "error" not in row}


def main() -> None:
    """Every case in turn."""
    given = options()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    given.work = given.work.resolve()
    drive = load()
    write_inputs(drive, given)
    results = given.work / "results.jsonl"
    hosts = [host for host in given.hosts if host == "verl" or given.slime]
    for gpus in given.gpus:
        for host in hosts:
            for case in given.cases:
                if (host, case) == ("slime", "own, fused") or f"{host}, {gpus} GPU, {case}" in done(results):
                    continue
                row = run(drive, host, gpus, case, given)
                print(json.dumps(row), flush=True)
                with results.open("a") as file:
                    file.write(json.dumps(row) + "\n")
                if INTERRUPTED in row.get("error", ""):
                    return


if __name__ == "__main__":
    main()
