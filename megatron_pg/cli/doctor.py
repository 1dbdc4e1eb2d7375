"""`megatron-pg doctor`: what is installed, which contract and kernels apply, what would fail and why.

Everything that is imported is imported in a process of its own. Exit code 0: nothing that is required fails; 1: something does.
"""

import argparse
import json
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path

from megatron_pg import __version__
from megatron_pg.cli.terminal import progress, say, show_json
from megatron_pg.rollouts.printable import printable

TRIED = ("0.16", "0.17", "0.18", "0.19")  # docs/megatron.md
_TIMEOUT = 180  # seconds for one probe


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was looked at, how it stands, and what to do where it does not."""

    name: str
    status: str  # "ok", "note" or "fail"
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe said before it ended, and why it failed, where it did."""

    facts: Mapping[str, object]
    error: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """`doctor` has no options of its own."""


def run(options: argparse.Namespace) -> int:
    """Print the findings."""
    with progress("looking"):
        findings = examine(_probe_all())
    failed = any(finding.status == "fail" for finding in findings)
    if options.json:
        show_json({"ok": not failed, "findings": [asdict(finding) for finding in findings]})
        return int(failed)
    width = max(len(finding.name) for finding in findings)
    for finding in findings:
        say(f"  {finding.status:<4}  {finding.name:<{width}}  {finding.found}")
        if finding.fix:
            say(f"  {'':<4}  {'':<{width}}  → {finding.fix}")
    say("something that is required fails" if failed else "nothing that is required fails")
    return int(failed)


def examine(probes: Mapping[str, Probe]) -> list[Finding]:
    """Every finding, from what the probes said."""
    return [
        Finding("megatron_pg", "ok", __version__),
        _python(),
        _torch(probes["torch"]),
        _kernel(probes["torch"], probes["triton"]),
        *_core(probes["megatron"]),
        _training(probes["megatron"]),
        _transformer_engine(probes["megatron"]),
        _gloo(probes["gloo"]),
        *(_package(name, required=True) for name in ("numpy", "packaging")),
        *(_package(name, required=False) for name in ("matplotlib", "tensorboard", "wandb")),
    ]


def _probe_all() -> dict[str, Probe]:
    names = ("megatron", "torch", "triton")  # the longest first
    with ThreadPoolExecutor(2) as pool:
        found = dict(zip(names, pool.map(_probe, names), strict=True))
    return found | {"gloo": _gloo_probe()}


def _probe(*words: str) -> Probe:
    command = [sys.executable, "-W", "ignore", "-m", "megatron_pg.cli.probe", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT)
    except subprocess.TimeoutExpired:
        return Probe({}, f"no answer within {_TIMEOUT} s")
    facts: dict[str, object] = {}
    for line in done.stdout.splitlines():
        if line.startswith("{"):
            facts |= json.loads(line)
    if done.returncode == 0:
        return Probe(facts, None)
    last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit code {done.returncode}")
    return Probe(facts, printable(last.strip(), limit=240))


def _gloo_probe() -> Probe:
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        file = str(Path(folder) / "meeting")
        both = list(pool.map(lambda rank: _probe("gloo", str(rank), file), range(2)))
    return next((probe for probe in both if probe.error), both[0])


def _python() -> Finding:
    version = platform.python_version()
    if sys.version_info < (3, 12):
        return Finding("Python", "note", version, "megatron.training of megatron-core 0.18 and later needs Python 3.12")
    return Finding("Python", "ok", version)


def _torch(probe: Probe) -> Finding:
    if "version" not in probe.facts:
        return Finding("torch", "fail", f"cannot be imported: {probe.error}", "install torch 2.6 or later")
    version = str(probe.facts["version"])
    if _release(version) < (2, 6):
        return Finding("torch", "fail", version, "install torch 2.6 or later")
    if probe.error:
        return Finding("torch", "fail", f"{version}: {probe.error}", "repair the CUDA driver or the installation")
    devices = probe.facts["devices"]
    if not probe.facts["cuda"]:
        return Finding("torch", "note", f"{version}, a build without CUDA: gloo and the torch kernels only")
    if not devices:
        return Finding(
            "torch",
            "note",
            f"{version}, built for CUDA {probe.facts['cuda']}, no device visible",
            "is this a GPU machine?",
        )
    nccl = "NCCL" if probe.facts["nccl"] else "no NCCL"
    return Finding("torch", "ok", f"{version}, CUDA {probe.facts['cuda']}, {nccl}, {len(devices)} × {devices[0]}")


def _kernel(torch: Probe, triton: Probe) -> Finding:
    on_cuda = bool(torch.facts.get("cuda_available"))
    default = "triton" if on_cuda else "torch"
    if triton.error:
        fix = "install triton 3.2 or later, or choose --pg-kernel torch"
        return Finding("--pg-kernel", "fail" if on_cuda else "note", f"default {default}; triton: {triton.error}", fix)
    version = triton.facts["version"]
    if not on_cuda:
        return Finding(
            "--pg-kernel", "ok", f"default torch; triton {version} needs a CUDA device (TRITON_INTERPRET=1: tests)"
        )
    return Finding("--pg-kernel", "ok", f"default triton ({version}); neither falls back to the other")


def _core(probe: Probe) -> list[Finding]:
    if "version" not in probe.facts:
        fix = "install megatron-core 0.16 or later"
        if "transformer" in str(probe.error).lower() or "libcu" in str(probe.error):
            fix = "uninstall transformer-engine where there is no CUDA: megatron.core imports it"
        return [Finding("megatron-core", "fail", f"cannot be imported: {probe.error}", fix)]
    version = str(probe.facts["version"])
    tried = any(version.startswith(f"{release}.") for release in TRIED)
    old = _release(version) < (0, 16)
    status = "fail" if old else "ok" if tried else "note"
    fix = "" if tried else "install 0.16 or later" if old else f"tried are {', '.join(TRIED)}; run the tests"
    return [Finding("megatron-core", status, version, fix), *_contracts(probe)]


def _contracts(probe: Probe) -> list[Finding]:
    """What the schedule of this release does, against what docs/megatron.md says it does."""
    rows = []
    for name, key, expected, text in (
        (
            "contract, flag off",
            "per_microbatch",
            [0.5, 0.0],
            "(K·D·S, report): the schedule multiplies by C and divides by K",
        ),
        (
            "contract, flag on",
            "per_token",
            [1.0, 3.0],
            "(Q·S, n, report): the schedule leaves it, finalize divides by Σ n",
        ),
    ):
        if key not in probe.facts:
            rows.append(Finding(name, "note", f"not checked: {probe.facts.get('contract_error') or probe.error}"))
        elif probe.facts[key] == expected:
            rows.append(Finding(name, "ok", f"{text} (tried on this release's schedule)"))
        else:
            fix = "gradients would be scaled wrongly: use a release of docs/megatron.md"
            rows.append(Finding(name, "fail", f"a loss of 1 became {probe.facts[key]}, not {expected} (K 4, C 2)", fix))
    return rows


def _training(probe: Probe) -> Finding:
    if "pretrain_hook" not in probe.facts:
        error = printable(str(probe.facts.get("training_error") or probe.error), limit=240)
        fix = "megatron_pg.pretrain needs it: pip install 'megatron-pg[training]', megatron-core 0.17 or later, its Python"
        return Finding("megatron.training", "note", f"cannot be imported: {error}", fix)
    if probe.facts["pretrain_hook"]:
        return Finding("megatron.training", "ok", "flags enter by pretrain(extra_args_provider=)")
    if probe.facts["parse_hook"]:
        return Finding("megatron.training", "ok", "flags enter by parse_and_validate_args(extra_args_provider=)")
    return Finding(
        "megatron.training", "fail", "takes our flags in no way that is known", "use a release of docs/megatron.md"
    )


def _transformer_engine(megatron: Probe) -> Finding:
    version = _version("transformer-engine") or _version("transformer_engine_torch")
    if version is None:
        return Finding(
            "transformer-engine",
            "note",
            "absent: packed rows (thd) and context parallelism need it on GPUs",
            "pip install --no-build-isolation 'megatron-pg[te]' on a machine with nvcc",
        )
    if megatron.error and "version" not in megatron.facts:
        return Finding(
            "transformer-engine", "fail", f"{version}, and megatron.core cannot be imported", "see megatron-core above"
        )
    return Finding("transformer-engine", "ok", version)


def _gloo(probe: Probe) -> Finding:
    if probe.error or probe.facts.get("sum") != 2.0:
        fix = "processes cannot meet: look at the firewall, GLOO_SOCKET_IFNAME and the shared memory"
        return Finding("gloo, 2 processes", "fail", f"{probe.error or probe.facts}", fix)
    return Finding("gloo, 2 processes", "ok", "an all-reduce is right")


def _package(name: str, *, required: bool) -> Finding:
    version = _version(name)
    if version is not None:
        return Finding(name, "ok", version)
    return Finding(name, "fail" if required else "note", "absent", f"pip install {name}" if required else "optional")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _release(version: str) -> tuple[int, ...]:
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdecimal()) if all(part.isdecimal() for part in parts) else (99,)
