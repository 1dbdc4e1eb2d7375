"""`megatron-pg doctor`: verdicts on installations of every kind, and one look at the real one."""

import json
import subprocess
import sys
from pathlib import Path

import processes
import pytest

from megatron_pg.cli import doctor, main
from megatron_pg.cli.doctor import Probe, examine
from megatron_pg.kernels.device import chosen

ROOT = Path(__file__).parents[2]
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
    assert "multiplies by C and divides by K" in by_name["contract, flag off"].found


BAD = {
    "torch is missing": (
        {"torch": Probe({}, "ModuleNotFoundError: No module named 'torch'")},
        "torch",
        "fail",
        "install torch",
    ),
    "torch is old": ({"torch": Probe({"version": "2.4.1"}, None)}, "torch", "fail", "install torch 2.6"),
    "the driver is broken": (
        {"torch": Probe({"version": "2.9.0", "cuda": "13.0"}, "RuntimeError: CUDA driver")},
        "torch",
        "fail",
        "repair the CUDA driver",
    ),
    "no GPU is visible": (
        {"torch": Probe({"version": "2.9.0", "cuda": "13.0", "capability": None, "devices": [], "nccl": True}, None)},
        "torch",
        "note",
        "is this a GPU machine",
    ),
    "triton is missing on a GPU": (
        {"triton": Probe({}, "No module named 'triton'")},
        "device and kernel",
        "fail",
        "--pg-kernel torch",
    ),
    "the kernel was not tried with this Triton": (
        {"triton": Probe({"version": "3.9.0"}, None)},
        "device and kernel",
        "note",
        "",
    ),
    "the empty transformer-engine package": (
        {"megatron": Probe({}, "RuntimeError: Found empty `transformer-engine` meta package installed.")},
        "megatron-core",
        "fail",
        "uninstall transformer-engine",
    ),
    "megatron is missing": (
        {"megatron": Probe({}, "No module named 'megatron'")},
        "megatron-core",
        "fail",
        "install megatron-core",
    ),
    "megatron is old": ({"megatron": Probe({"version": "0.14.0"}, None)}, "megatron-core", "fail", "0.16 or later"),
    "megatron is newer than what was tried": (
        {"megatron": Probe({"version": "0.25.0", "per_microbatch": [0.5, 0], "per_token": [1, 3]}, None)},
        "megatron-core",
        "note",
        "run the tests",
    ),
    "the schedule scales otherwise": (
        {"megatron": Probe({"version": "0.19.0", "per_microbatch": [0.25, 0.0], "per_token": [1.0, 3.0]}, None)},
        "contract, flag off",
        "fail",
        "gradients would have the wrong scale",
    ),
    "the schedule cannot be asked": (
        {"megatron": Probe({"version": "0.19.0", "contract_error": "TypeError: forward_step_calc_loss()"}, None)},
        "contract, flag on",
        "note",
        "",
    ),
    "megatron.training is missing": (
        {
            "megatron": Probe(
                {"version": "0.19.0", "training_error": "ImportError: cannot import name 'override'"}, None
            )
        },
        "megatron.training",
        "note",
        "only megatron_pg.pretrain needs it",
    ),
    "pretrain takes no flags": (
        {"megatron": Probe({"version": "0.19.0", "pretrain_hook": False, "parse_hook": False}, None)},
        "megatron.training",
        "fail",
        "use a release",
    ),
    "processes cannot meet": (
        {"gloo": Probe({}, "no answer within 180 s")},
        "gloo, 2 processes",
        "fail",
        "GLOO_SOCKET_IFNAME",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_wrong_is_named_with_a_way_out(name):
    changes, row, status, fix = BAD[name]
    finding = findings(**changes)[row]
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


def test_the_exit_code_says_whether_something_required_fails(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_probe_all", lambda: HEALTHY)
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("everything that is required works\n")
    monkeypatch.setattr(doctor, "_probe_all", lambda: HEALTHY | {"megatron": Probe({}, "No module named 'megatron'")})
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


def test_arguments_are_refused(capsys):
    assert main(["doctor", "everything"]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_probe_that_crashes_or_hangs_is_a_finding(monkeypatch):
    monkeypatch.setattr(doctor, "_TIMEOUT", 0.001)
    assert doctor._probe("triton").error == "no answer within 0.001 s"
    monkeypatch.setattr(doctor, "_TIMEOUT", 1800)
    assert "KeyError: 'nothing'" in doctor._probe("nothing").error


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
        assert by_name["contract, flag off"]["status"] == by_name["contract, flag on"]["status"] == "ok"
    assert "looking: " in done.stderr
