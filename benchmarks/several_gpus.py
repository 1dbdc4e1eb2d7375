"""Every figure that needs several GPUs of one host, in parts that each end within minutes.

    python benchmarks/several_gpus.py heads kernels lost_ranks     # a table of each, below runs/several_gpus
    python benchmarks/several_gpus.py layouts --only "KL|teacher"  # layouts whose name holds the expression

heads: the fused LM head with the vocabulary over 2, 4 and 8 GPUs, in its three modes (lm_head.py under torchrun).
kernels: objectives from logits whose vocabulary lies over the GPUs (objectives.py under torchrun).
layouts: the example under every layout, losses and gradient norms compared (runs/gpu_layouts.py).
throughput: a dense model and a mixture of experts on all GPUs, compared with Megatron's own cross-entropy
(runs/throughput.py), with the layers of Transformer Engine where it is installed.
lost_ranks: a rank is killed, stopped or fails; what every other rank ends with (runs/lost_jobs.py).

Figures are kept for each card, number of GPUs and release of torch. A second call measures the rows that have no
figures yet: it continues where the minutes of the first were over. Remove a row from the JSON, or the folder of a run,
to measure it again.
"""

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch

sys.path.insert(0, str(Path(__file__).with_name("runs")))

from records import FAILED, NOT_RUN, OUT_OF_TIME, Deadline, Machine, Row, error_in, is_measured, table

ROOT = Path(__file__).parents[1]
COUNTS = (2, 4, 8)  # of GPUs that share a vocabulary
WIDTHS = ("1024", "2048", "4096", "8192")
FAULTS = ("kill", "stop", "raise")
POINTS = ("forward", "backward", "optimizer")
LOST_LAYOUTS = {2: ("dp2", "tp2", "pp2"), 4: ("dp4", "tp2pp2"), 8: ("tp2pp2dp2", "tp4pp2")}
THROUGHPUT = (("dense", "^DP"), ("experts", "^EP"), ("dense", "^"))  # in this order, because the time may be over
LEAST = 30  # seconds that a new launch should have
GRACE = 20  # seconds in which a launcher ends its ranks, within the minutes


class Launch(NamedTuple):
    """A process that measures rows, and prints a line of JSON for each, whose `case` is its word."""

    rows: dict[str, str]  # name in the table: the word that selects it on the command line
    gpus: int
    command: list[str]  # before the words


def torchrun(gpus: int, script: str, *flags: str) -> list[str]:
    """The command line of ranks on one host."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(gpus)]
    return [*launcher, str(ROOT / "benchmarks" / script), *flags]


def heads() -> list[Launch]:
    """A row per width and number of GPUs, with all modes in it."""
    return [
        Launch({f"TP{n}, H {width}": width for width in WIDTHS}, n, torchrun(n, "lm_head.py", "--widths"))
        for n in COUNTS
    ]


def kernels() -> list[Launch]:
    """A row per objective, dtype and number of GPUs, with and without entropies."""
    cases = [f"{c[0]},{c[1]}{c[2]}" for c in product(("grpo", "gspo"), ("bfloat16", "float32"), ("", ",entropy"))]
    return [
        Launch(
            {f"TP{n}, {case.replace(',', ', ')}": case for case in cases}, n, torchrun(n, "objectives.py", "--cases")
        )
        for n in COUNTS
    ]


def lost_ranks(gpus: int, folder: Path, minutes: float) -> list[Launch]:
    """A row per layout, fault and point. Which rank is lost changes from case to case."""
    cases = [
        f"pretrain-{layout}-{fault}-{point}-{number % gpus}"
        for layout in LOST_LAYOUTS[gpus]
        for number, (point, fault) in enumerate(product(POINTS, FAULTS))
    ]
    script = str(ROOT / "benchmarks" / "runs" / "lost_jobs.py")
    flags = ["--out", str(folder), "--minutes", f"{minutes:.2f}", "--cases"]
    rows = {case.removeprefix("pretrain-").replace("-", ", "): case for case in cases}
    return [Launch(rows, gpus, [sys.executable, script, *flags])]


def environment(gpus: int) -> dict[str, str]:
    """This one, with the package importable and only so many GPUs visible."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(gpus)))).split(",")
    path = f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"
    return os.environ | {"PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ",".join(visible[:gpus])}


def run(command: list[str], gpus: int, seconds: float, output: Path | None) -> bool:
    """Run a command, with its output in a file or on the terminal; False if the time was over before it ended."""
    file = output.open("w") if output else None
    process = subprocess.Popen(
        command, env=environment(gpus), stdout=file, stderr=file and subprocess.STDOUT, start_new_session=True
    )
    if file:
        file.close()
    try:
        process.wait(seconds)
        return True
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGTERM)  # a launcher ends its ranks, which have separate sessions
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return False


def printed_rows(output: str, words: dict[str, str]) -> dict[str, Row]:
    """The rows in an output: lines of JSON with a `case`, under the names of the table."""
    names, found = {word: name for name, word in words.items()}, {}
    for line in re.findall(r'^\{"case": .*\}$', output, re.MULTILINE):
        row = json.loads(line)
        found[names[row.pop("case")]] = row
    return found


def measure(launch: Launch, rows: dict[str, Row], gpus: int, deadline: Deadline, output: Path) -> dict[str, Row]:
    """The rows of a launch that `rows` has no figures of: measured, failed or not run."""
    missing = {name: word for name, word in launch.rows.items() if not is_measured(rows.get(name))}
    if launch.gpus > gpus:
        return {name: {NOT_RUN: f"needs {launch.gpus} GPUs"} for name in missing}
    found: dict[str, Row] = {}
    while todo := {name: word for name, word in missing.items() if name not in found}:
        if deadline.left() < LEAST + GRACE:
            return found | {name: rows.get(name, {NOT_RUN: OUT_OF_TIME}) for name in todo}
        has_ended = run([*launch.command, *todo.values()], launch.gpus, deadline.left() - GRACE, output)
        found |= printed_rows(output.read_text(errors="replace"), todo)
        failed = next((name for name in todo if name not in found), None)
        if failed and has_ended:  # the rows after it get a new launch
            found[failed] = {FAILED: error_in(output)}
    return found


def saved(path: Path, machine: Machine) -> dict[str, Row]:
    """The rows of an earlier call on such a machine."""
    if not path.exists():
        return {}
    found = json.loads(path.read_text())
    return found["rows"] if Machine(found["card"], found["gpus"], found["torch"]) == machine else {}


def run_launches(part: str, launches: list[Launch], machine: Machine, out: Path, deadline: Deadline) -> None:
    """Measure what is missing of a part; its table and its JSON are written after every launch."""
    path = out / f"{part}.json"
    rows = saved(path, machine)
    for number, launch in enumerate(launches):
        rows |= measure(launch, rows, machine.gpus, deadline, out / f"{part}.{number}.txt")
        path.write_text(json.dumps(machine._asdict() | {"rows": rows}, indent=1) + "\n")
    text = f"{machine.heading}, {part}\n\n{table(rows)}\n"
    (out / f"{part}.md").write_text(text)
    print(text, flush=True)


def scripts(part: str, machine: Machine, out: Path, only: str) -> list[list[str]]:
    """The command lines of a part whose script has its own table and continues by itself."""
    runs = ROOT / "benchmarks" / "runs"
    if part == "layouts":
        share = max(4, os.cpu_count() // (2 * machine.gpus))  # the runs wait for the host, not for the GPU
        command = [sys.executable, str(runs / "gpu_layouts.py"), "--share", str(share)]
        return [[*command, "--out", str(out / part), "--only", only]]
    layers = "engine" if find_spec("transformer_engine") else "local"
    common = [sys.executable, str(runs / "throughput.py"), "--layers", layers, "--gpus", str(machine.gpus)]
    return [
        [*common, "--out", str(out / f"{part}-{model}"), "--model", model, "--only", f"{layouts}.*({only})"]
        for model, layouts in THROUGHPUT
    ]


def run_scripts(commands: list[list[str]], machine: Machine, deadline: Deadline) -> None:
    """Run the scripts one after the other, each with the minutes that are left."""
    for command in commands:
        minutes = max(deadline.left() - 2 * GRACE, 0) / 60  # without any, it prints the table of what is there
        if not run([*command, "--minutes", f"{minutes:.2f}"], machine.gpus, deadline.left() - GRACE, None):
            print(f"{Path(command[1]).name}: {OUT_OF_TIME}", flush=True)


def folder_of(out: Path, machine: Machine) -> Path:
    """Where the figures of such a machine are kept."""
    return out / re.sub(r"[^a-z0-9.]+", "-", f"{machine.gpus} {machine.card} torch {machine.torch}".lower())


def run_part(part: str, machine: Machine, out: Path, only: str, minutes: float) -> None:
    """Run a part until it is complete or its minutes are over."""
    deadline = Deadline(minutes)
    if part in ("layouts", "throughput"):
        run_scripts(scripts(part, machine, out, only), machine, deadline)
        return
    launches = {
        "heads": heads,
        "kernels": kernels,
        "lost_ranks": lambda: lost_ranks(machine.gpus, out / part, minutes - 2 * GRACE / 60),
    }[part]()
    launches = [
        launch._replace(rows={n: w for n, w in launch.rows.items() if re.search(only, n)}) for launch in launches
    ]
    run_launches(part, launches, machine, out, deadline)


PARTS = ("heads", "kernels", "layouts", "throughput", "lost_ranks")


def main() -> None:
    """Run the parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="+", choices=PARTS, metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--gpus", type=int, help="so many of this machine's GPUs: 2, 4 or 8")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "several_gpus")
    parser.add_argument("--minutes", type=float, default=8, help="of each part")
    parser.add_argument("--only", default="", help="regular expression of the rows that are run")
    options = parser.parse_args()
    gpus = min(options.gpus or 8, torch.cuda.device_count())
    if gpus not in COUNTS:
        parser.error(f"--gpus {gpus} is not 2, 4 or 8. Give one of these, on a machine that has them.")
    machine = Machine.here(gpus)
    out = folder_of(options.out.resolve(), machine)
    out.mkdir(parents=True, exist_ok=True)
    for part in options.parts:
        run_part(part, machine, out, options.only, options.minutes)


if __name__ == "__main__":
    main()
