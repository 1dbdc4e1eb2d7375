"""`megatron-pg doctor`: verdicts on installations of every kind, and one look at the real one."""

import json
import os
import subprocess
import sys

import processes
import pytest

from megatron_pg.cli import doctor
from megatron_pg.cli.doctor import Probe, examine
from megatron_pg.kernels.device import chosen

HOOKS = {"pretrain_hook": False, "parse_hook": True}
HEALTHY = {
    "torch": Probe(
        {"version": "2.9.0+cu130", "cuda": "13.0", "capability": [9, 0], "devices": ["H200"] * 2, "nccl": True}
        | {"kernel": "triton", "chosen": "torch 2.9.0+cu130, CUDA 13.0, H200: cuda:0, --pg-kernel triton"},
        None,
    ),
    "triton": Probe({"version": "3.6.0"}, None),
    "megatron": Probe({"version": "0.19.2", "per_microbatch": [0.5, 0.0], "per_token": [1.0, 3.0]} | HOOKS, None),
    "gloo": Probe({"sum": 2.0}, None),
}


def findings(**changes: Probe) -> dict:
    return {finding.name: finding for finding in examine(HEALTHY | changes)}


def test_a_healthy_machine_has_nothing_that_fails():
    by_name = findings()
    assert not [f for f in by_name.values() if f.status == "fail"]
    assert "2 × H200" in by_name["torch"].found
    line = (
        "torch 2.9.0+cu130, CUDA 13.0, H200: cuda:0, --pg-kernel triton, Triton 3.6.0, a single pass where a row fits"
    )
    assert by_name["device and kernel"].found == line
    assert "parse_and_validate_args" in by_name["megatron.training"].found
    assert "multiplies by C and divides by K" in by_name["loss scaling, flag off"].found


TORCH, CORE = {"version": "2.9.0", "cuda": "13.0"}, {"version": "0.19.0"}
NEW_CORE = {"version": "0.25.0", "per_microbatch": [0.5, 0], "per_token": [1, 3]}
META = "RuntimeError: Found empty `transformer-engine` meta package installed."
SCHEDULE = {"per_microbatch": [0.25, 0.0], "per_token": [1.0, 3.0]}
BAD = {  # row, status and a part of the advice: which probe, what it found, and its error
    "torch: fail: install torch": ("torch", {}, "ModuleNotFoundError: No module named 'torch'"),
    "torch: fail: install torch 2.6": ("torch", {"version": "2.4.1"}, None),
    "torch: fail: repair the CUDA driver": ("torch", TORCH, "RuntimeError: CUDA driver"),
    "torch: note: is this a GPU machine": ("torch", TORCH | {"capability": None, "devices": [], "nccl": True}, None),
    "device and kernel: fail: --pg-kernel torch": ("triton", {}, "No module named 'triton'"),
    "device and kernel: fail: install triton 3.4": ("triton", {"version": "3.3.1"}, None),
    "device and kernel: note: ": ("triton", {"version": "3.10.0"}, None),  # not tried
    "megatron-core: fail: uninstall transformer-engine": ("megatron", {}, META),
    "megatron-core: fail: install megatron-core": ("megatron", {}, "No module named 'megatron'"),
    "megatron-core: fail: 0.16 or later": ("megatron", {"version": "0.14.0"}, None),
    "megatron-core: note: run the tests": ("megatron", NEW_CORE, None),
    "loss scaling, flag off: fail: gradients would have the wrong scale": ("megatron", CORE | SCHEDULE, None),
    "loss scaling, flag on: note: ": (
        "megatron",
        CORE | {"scaling_error": "TypeError: forward_step_calc_loss()"},
        None,
    ),
    "megatron.training: note: only megatron_pg.pretrain needs it": (
        "megatron",
        CORE | {"training_error": "ImportError: cannot import name 'override'"},
        None,
    ),
    "megatron.training: fail: use a release": ("megatron", CORE | {"pretrain_hook": False, "parse_hook": False}, None),
    "gloo, 2 processes: fail: GLOO_SOCKET_IFNAME": ("gloo", {}, "no answer within 180 s"),
}


@pytest.mark.parametrize("expected", BAD)
def test_what_is_wrong_is_named_with_a_way_out(expected):
    probe, facts, error = BAD[expected]
    row, status, fix = expected.split(": ")
    finding = findings(**{probe: Probe(facts, error)})[row]
    assert finding.status == status
    assert fix in finding.fix


def test_one_line_says_which_device_and_kernel_are_used_and_why():
    why = "torch 2.13.0+cu130 was built for CUDA 13.0, but no GPU can be used (Found no NVIDIA driver on your system)"
    facts = {"version": "2.13.0+cu130", "cuda": "13.0", "kernel": "torch", "chosen": f"{why}: CPU, --pg-kernel torch"}
    finding = findings(torch=Probe(facts, None), triton=Probe({}, "No module named 'triton'"))["device and kernel"]
    assert finding == doctor.Finding("device and kernel", "ok", f"{why}: CPU, --pg-kernel torch")
    assert findings(torch=Probe({}, "no torch"))["device and kernel"].found == "unknown: see torch above"


def test_the_probe_reports_the_device_and_kernel_of_this_machine():
    facts = doctor._probe("torch").facts
    assert facts["chosen"] == str(chosen())
    assert facts["kernel"] == chosen().kernel


def test_the_exit_code_says_whether_something_required_fails(monkeypatch, cli):
    monkeypatch.setattr(doctor, "_probe_all", lambda: HEALTHY)
    assert cli.done("doctor").endswith("all required checks passed\n")
    monkeypatch.setattr(doctor, "_probe_all", lambda: HEALTHY | {"megatron": Probe({}, "No module named 'megatron'")})
    code, out, _ = cli("doctor --json")
    assert (code, json.loads(out)["ok"]) == (1, False)


def test_arguments_are_refused(cli):
    cli.refused("doctor everything")


def test_a_probe_that_crashes_or_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_TIMEOUT", 0.001)
    assert doctor._probe("triton").error == "no answer within 0.001 s"
    monkeypatch.setattr(doctor, "_TIMEOUT", 1800)
    assert "KeyError: 'nothing'" in doctor._probe("nothing").error


def test_an_error_of_several_lines_is_shown_from_its_first_line(monkeypatch, tmp_path):
    (tmp_path / "triton.py").write_text("raise RuntimeError('the driver is too old\\nsee the manual')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert doctor._probe("triton").error == "RuntimeError: the driver is too old"


def test_this_machine(full):
    """The whole command, as it is run: half a minute of imports, so in the full tier only."""
    if not full:
        pytest.skip("runs in the full tier")
    code = (
        "import sys\nfrom megatron_pg.cli import main, terminal\n"
        "terminal.DELAY = 0.0\nsys.exit(main(['doctor', '--json']))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=processes.PACKAGE, capture_output=True, text=True)
    said = json.loads(done.stdout)
    by_name = {finding["name"]: finding for finding in said["findings"]}
    assert done.returncode == (0 if said["ok"] else 1)
    assert by_name["torch"]["status"] != "fail"
    assert by_name["gloo, 2 processes"]["status"] == "ok"
    if by_name["megatron-core"]["status"] == "ok":
        assert by_name["loss scaling, flag off"]["status"] == by_name["loss scaling, flag on"]["status"] == "ok"
    assert "probing: " in done.stderr
