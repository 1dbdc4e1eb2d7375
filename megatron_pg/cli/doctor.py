"""`megatron-pg doctor`: what is installed, which loss scaling and kernels apply, what would fail and why.

Each package is imported in a separate process. Exit code 0: everything that is required works; 1: something fails.
"""

import argparse
import json
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

from megatron_pg import __version__
from megatron_pg.cli.terminal import progress, say, show_json
from megatron_pg.declarations.installation import installed_version
from megatron_pg.declarations.single_pass import path_of, too_old
from megatron_pg.rollouts.printable import printable

TRIED = ("0.16", "0.17", "0.18", "0.19")  # docs/parallelism.md
_TIMEOUT = 180  # seconds for one probe


@dataclass(frozen=True, slots=True)
class Finding:
    """One row: what was checked, its status, and a fix if it fails."""

    name: str
    status: str  # "ok", "note" or "fail"
    found: str
    fix: str = ""


@dataclass(frozen=True, slots=True)
class Probe:
    """What a probe reported before it ended, and its error if it failed."""

    facts: Mapping[str, Any]
    error: str | None


def add_options(parser: argparse.ArgumentParser) -> None:
    """`doctor` has no further options."""


def run(options: argparse.Namespace) -> int:
    """Print the findings."""
    with progress("probing"):
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
    say("a required check failed" if failed else "all required checks passed")
    return int(failed)


def examine(probes: Mapping[str, Probe]) -> list[Finding]:
    """All findings, from the results of the probes."""
    torch, triton, megatron, gloo = (probes[name] for name in ("torch", "triton", "megatron", "gloo"))
    python, newer = platform.python_version(), "megatron.training of megatron-core 0.18 and later needs Python 3.12"
    return [
        Finding("megatron_pg", "ok", __version__),
        _first("Python", (sys.version_info >= (3, 12), "ok", python), (True, "note", python, newer)),
        _torch(torch),
        _kernel(triton, torch),
        *_core(megatron),
        _training(megatron),
        _transformer_engine(can_import_core="version" in megatron.facts),
        _gloo(gloo),
        *(_package(name, "fail", f"pip install {name}") for name in ("numpy", "packaging")),
        *(_package(name, "note", "optional") for name in ("matplotlib", "tensorboard", "wandb")),
    ]


def _first(name: str, *cases: tuple) -> Finding:
    """The finding of the first case that applies; a case is a condition, a status, a text and perhaps a fix."""
    return next(Finding(name, *content) for applies, *content in cases if applies)


def _probe_all() -> dict[str, Probe]:
    names = ("megatron", "torch", "triton")  # the slowest first
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(2) as pool:
        probes = dict(zip(names, pool.map(_probe, names), strict=True))
        both = list(pool.map(lambda rank: _probe("gloo", str(rank), f"{folder}/meeting"), range(2)))
    return probes | {"gloo": next((probe for probe in both if probe.error), both[0])}


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
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [f"exit code {done.returncode}"]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]  # a text may have several lines
    return Probe(facts, printable((errors or lines)[-1], limit=240))


def _torch(probe: Probe) -> Finding:
    facts, install = probe.facts, "install torch 2.6 or later"
    version, cuda, devices = facts.get("version"), facts.get("cuda"), facts.get("devices") or []
    unseen = f"{version}, built for CUDA {cuda}, no device visible"
    seen = f"{version}, CUDA {cuda}, {'' if facts.get('nccl') else 'no '}NCCL, {len(devices)} × {''.join(devices[:1])}"
    return _first(
        "torch",
        (version is None, "fail", f"cannot be imported: {probe.error}", install),
        (_release(version) < (2, 6), "fail", version, install),
        (probe.error, "fail", f"{version}: {probe.error}", "repair the CUDA driver or the installation"),
        (not cuda, "note", f"{version}, a build without CUDA: gloo and the torch kernels only"),
        (not devices, "note", unseen, "is this a GPU machine?"),
        (True, "ok", seen),
    )


_KERNELS = "install triton 3.4 or later, or choose --pg-kernel torch"


def _kernel(triton: Probe, torch: Probe) -> Finding:
    name, chosen, version = "device and kernel", torch.facts.get("chosen"), str(triton.facts.get("version"))
    if chosen is None:
        return Finding(name, "note", "unknown: see torch above")
    if torch.facts["kernel"] == "torch":
        return Finding(name, "ok", chosen)
    if triton.error:
        return Finding(name, "fail", f"{chosen}; triton: {triton.error}", _KERNELS)
    if (needed := too_old(version)) is not None:
        return Finding(name, "fail", f"{chosen}; it needs {needed}", _KERNELS)
    path = path_of(tuple(torch.facts["capability"]), version)
    return Finding(name, "ok" if path.is_tried else "note", f"{chosen}, Triton {version}, {path.text}")


def _core(probe: Probe) -> list[Finding]:
    version, error = probe.facts.get("version"), str(probe.error)
    is_te = "transformer" in error.lower() or "libcu" in error
    remove_te = "uninstall transformer-engine on machines without CUDA: megatron.core imports it"
    core = _first(
        "megatron-core",
        (version is None and is_te, "fail", f"cannot be imported: {error}", remove_te),
        (version is None, "fail", f"cannot be imported: {error}", "install megatron-core 0.16 or later"),
        (_release(version) < (0, 16), "fail", version, "install 0.16 or later"),
        (str(version).startswith(tuple(f"{release}." for release in TRIED)), "ok", version),
        (True, "note", version, f"tested with {', '.join(TRIED)}; run the tests"),
    )
    return [core] if version is None else [core, *(_scaling(probe, *row) for row in SCALINGS)]


SCALINGS = (  # docs/design.md: a schedule's results for a loss of 1 and a count of 3
    ("off", "per_microbatch", [0.5, 0.0], "(K·D·S, report): the schedule multiplies by C and divides by K"),
    ("on", "per_token", [1.0, 3.0], "(Q·S, n, report): the schedule does not scale, finalize divides by Σ n"),
)


def _scaling(probe: Probe, flag: str, key: str, expected: list[float], text: str) -> Finding:
    """Compare the schedule of this release with docs/design.md."""
    results = probe.facts.get(key)
    fix = "gradients would have the wrong scale: use a release of docs/parallelism.md"
    return _first(
        f"loss scaling, flag {flag}",
        (results is None, "note", f"not checked: {probe.facts.get('scaling_error') or probe.error}"),
        (results == expected, "ok", f"{text} (tested on this release's schedule)"),
        (True, "fail", f"a loss of 1 became {results}, not {expected} (K 4, C 2)", fix),
    )


def _training(probe: Probe) -> Finding:
    facts, error = probe.facts, printable(str(probe.facts.get("training_error") or probe.error), limit=400)
    fix = "only megatron_pg.pretrain needs it; the loss inside other trainers does not"
    return _first(
        "megatron.training",
        ("pretrain_hook" not in facts, "note", error, fix),
        (facts.get("pretrain_hook"), "ok", "takes our flags by pretrain(extra_args_provider=)"),
        (facts.get("parse_hook"), "ok", "takes our flags by parse_and_validate_args(extra_args_provider=)"),
        (True, "fail", "has no known way to take our flags", "use a release of docs/parallelism.md"),
    )


def _transformer_engine(*, can_import_core: bool) -> Finding:
    version = installed_version("transformer-engine") or installed_version("transformer_engine_torch")
    absent = "absent: packed rows (thd) and context parallelism need it on GPUs"
    install = "pip install --no-build-isolation 'megatron-pg[te]' on a machine with nvcc"
    return _first(
        "transformer-engine",
        (version is None, "note", absent, install),
        (not can_import_core, "fail", f"{version}, and megatron.core cannot be imported", "see megatron-core above"),
        (True, "ok", version),
    )


def _gloo(probe: Probe) -> Finding:
    fix = "processes cannot connect: check the firewall, GLOO_SOCKET_IFNAME and the shared memory"
    is_right = not probe.error and probe.facts.get("sum") == 2.0
    return _first(
        "gloo, 2 processes",
        (is_right, "ok", "an all-reduce is correct"),
        (True, "fail", str(probe.error or probe.facts), fix),
    )


def _package(name: str, without: str, fix: str) -> Finding:
    version = installed_version(name)
    return Finding(name, "ok", version) if version else Finding(name, without, "absent", fix)


def _release(version: object) -> tuple[int, ...]:
    """The first two numbers of a version, or (99,) if it has none."""
    match = re.match(r"(\d+)\.(\d+)(?:\.|$)", str(version))
    return (int(match[1]), int(match[2])) if match else (99,)
