"""The example on two nodes: two launchers that know nothing of each other but an address, with a folder each."""

import os
import re
import signal
import socket
import subprocess
import time
from functools import partial

import example_runs
import launches
import processes
import pytest

SIZES = {"train-iters": 8, "micro-batch-size": 2, "group-size": 4}  # a step holds a prompt of each of four ranks
FLAGS = example_runs.words_of(example_runs.FLAGS | SIZES)
LAYOUTS = {"dp4": (), "tp2dp2": ("--tensor-model-parallel-size", "2")}
NODES, PER_NODE = 2, 2
pytestmark = pytest.mark.full_tier("launches on two nodes belong to `make prove`")
ENDLESS = ("--train-iters", "1000000", "--exact-match-interval", "1000000", "--save-interval", "1000000")


def begin_nodes(folder, *flags: str, script: str = "") -> list[subprocess.Popen]:
    """A launcher for every node."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = {"NODES": str(NODES), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [
        example_runs.begin(
            folder / f"node{node}", *flags, ranks=PER_NODE, script=script, NODE_RANK=str(node), **together
        )
        for node in range(NODES)
    ]


@launches.launch
def trained(folder, full):
    """Every layout on two nodes, and on one node."""

    def on_two(layout: str, flags: tuple[str, ...]) -> None:
        nodes = begin_nodes(folder / layout, *FLAGS, *flags)
        for process in nodes:
            processes.wait_for(process)

    for layout, flags in LAYOUTS.items():
        one = partial(example_runs.launch, folder / layout / "one", *FLAGS, *flags, ranks=NODES * PER_NODE)
        processes.beside_each_other(one, partial(on_two, layout, flags))
    return folder


@launches.launch
def lost(folder, full):
    """Either node disappears, with its launcher, after a step."""
    for victim in range(NODES):
        nodes = begin_nodes(folder / str(victim), *FLAGS, *ENDLESS, script="lost_node_example.py")
        ranks = range(victim * PER_NODE, (victim + 1) * PER_NODE)
        wait_for_step(folder / str(victim) / "node0", nodes)
        nodes[victim].kill()
        for rank in ranks:
            pid = (folder / str(victim) / f"node{victim}" / f"{rank}.pid").read_text(encoding="utf-8")
            os.kill(int(pid), signal.SIGKILL)
        processes.end(nodes[victim])
        processes.wait_for(nodes[1 - victim], check=False)  # it fails by itself
    return folder


def wait_for_step(folder, nodes) -> None:
    """Until a step is in the metrics; all ranks have started then."""
    path = folder / "metrics.jsonl"
    while not path.exists() or not path.read_bytes().count(b"\n"):
        assert all(process.poll() is None for process in nodes)
        time.sleep(0.05)


@pytest.mark.proof(
    "Two nodes: the example under two launchers writes the metrics and rollouts of one, byte for byte (steps)"
)
def test_two_nodes_train_as_one(trained, evidence):
    for layout in LAYOUTS:
        one, first = trained / layout / "one", trained / layout / "node0"
        for file in ("metrics.jsonl", "rollouts.jsonl"):
            assert (first / file).read_bytes() == (one / file).read_bytes(), (layout, file)
        evidence(cases=len(processes.records(first / "metrics.jsonl")))


@pytest.mark.proof(
    "Two nodes: the first writes metrics, rollouts and the arguments, the last TensorBoard's file (runs)"
)
def test_the_first_node_has_the_files_and_the_last_one_the_curves(trained, evidence):
    for layout in LAYOUTS:
        first, last = ({p.name for p in (trained / layout / f"node{node}").iterdir()} for node in range(NODES))
        assert {"metrics.jsonl", "rollouts.jsonl", "arguments.json", "curves.png"} <= first
        assert not {"metrics.jsonl", "rollouts.jsonl", "arguments.json", "curves.png"} & last
        assert "tensorboard" in last
        evidence(cases=1)


@pytest.mark.proof(
    "Two nodes: one that disappears with its launcher is a named error on every rank of the other (ranks)"
)
def test_a_node_that_disappears_is_a_named_error_on_every_other_rank(lost, evidence):
    for victim in range(NODES):
        survivor = 1 - victim
        for rank in range(survivor * PER_NODE, (survivor + 1) * PER_NODE):
            error = (lost / str(victim) / f"node{survivor}" / f"{rank}.error").read_text(encoding="utf-8")
            assert re.match(rf"LostPeerError: rank {rank} of {NODES * PER_NODE} lost another rank", error), error
        evidence(cases=PER_NODE)
