"""The device and the kernel are those that exist: a CUDA build of torch on a machine without a driver runs on the
CPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_pg.kernels import device
from megatron_pg.kernels.device import chosen

ROOT = Path(__file__).parents[3]
CUDA_BUILD_WITHOUT_DRIVER = """
import argparse, json, sys, types, warnings
import torch

warnings.simplefilter("ignore")

def no_driver(*args, **kwargs):
    raise RuntimeError("Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU.")

torch.version.cuda = "13.0"
torch.cuda._lazy_init = no_driver
torch.accelerator.current_accelerator = lambda check_available=False: torch.device("cuda")
torch.accelerator.is_available = lambda: True
torch.accelerator.current_stream = torch.accelerator.synchronize = no_driver

from megatron_pg.kernels.device import chosen
before = str(chosen())

from cpu import cpu_megatron
cpu_megatron._patch_megatron = lambda: None  # which nothing here asks for
cpu_megatron.enable()
assert torch.cuda.is_available()

from megatron_pg import LossSettings, add_arguments, validate_args
settings = LossSettings.from_args(validate_args(add_arguments(argparse.ArgumentParser()).parse_args([])))
weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
optimizer = torch.optim.Adam([weight], lr=0.125)
weight.square().sum().backward()
optimizer.step()
print(json.dumps({"before": before, "after": str(chosen()), "kernel": settings.kernel, "weight": weight.tolist()}))
"""


def test_a_cuda_build_without_a_driver_trains_on_the_cpu():
    """In its own process, because torch is patched."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples")])}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CUDA_BUILD_WITHOUT_DRIVER],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    build = f"torch {torch.__version__} was built for CUDA 13.0, but "
    assert (
        found["before"] == f"{build}no GPU can be used (Found no NVIDIA driver on your system): CPU, --pg-kernel torch"
    )
    assert found["after"] == f"{build}tensors made on cuda are on the cpu here: CPU, --pg-kernel torch"
    assert found["kernel"] == "torch"
    assert found["weight"] == pytest.approx([0.875] * 3, abs=1e-6)  # Adam's first step is the learning rate


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "_device", lambda: (torch.device("cpu"), "torch was built without CUDA"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def test_triton_is_refused_without_a_gpu_and_runs_in_its_interpreter(no_gpu, monkeypatch):
    with pytest.raises(ValueError, match="--pg-kernel triton cannot run here: torch was built without CUDA"):
        chosen("triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert chosen("triton").kernel == "triton"
    assert str(chosen()) == "torch was built without CUDA: CPU, --pg-kernel torch"


@pytest.mark.parametrize(("asked", "kernel"), [(None, "triton"), ("triton", "triton"), ("torch", "torch")])
def test_a_gpu_that_exists_gets_the_triton_kernels_unless_torch_is_asked_for(asked, kernel, monkeypatch):
    monkeypatch.setattr(device, "_device", lambda: (torch.device("cuda", 1), "torch 2.13.0, CUDA 13.0, H200"))
    assert str(chosen(asked)) == f"torch 2.13.0, CUDA 13.0, H200: cuda:1, --pg-kernel {kernel}"
