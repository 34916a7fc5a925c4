"""Import what processes on a GPU import, before any starts, and report versions and faults.

An extension that does not load, or a second cuDNN in the process, otherwise ends a trainer rank minutes into
a start. `gpu_libraries` runs this file in a process of its own, which may crash; its last line is JSON.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from mrl.compile_cache import use_own_compile_cache
from mrl.processes.start import module_command
from mrl.user_code import child_path

MODULES = {
    "transformer-engine": ("transformer_engine.pytorch", "megatron.core.extensions.transformer_engine"),
    "vllm": ("vllm._C_stable_libtorch", "vllm._moe_C_stable_libtorch", "vllm.cumem_allocator"),
    "flash-linear-attention": ("fla.ops.gated_delta_rule",),
    "deep-ep": ("deep_ep",),
}
"""Modules with compiled code or kernels, by the distribution that brings them."""
COMPILERS = ("gcc", "ninja", "nvcc")
"""Programs that FlashInfer, DeepGEMM and Triton start."""
SINGLE = ("libcudnn.so", "libnccl.so")
"""Libraries of which two in a process do not get along."""
SECONDS = 240.0
AGAIN = "install requirements/cuda.lock again (`make setup-cuda`)"


@dataclasses.dataclass(frozen=True, slots=True)
class Libraries:
    """Libraries of one node."""

    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Versions that the loaded libraries report, and the compilers on PATH; to compare between nodes."""
    faults: tuple[str, ...] = ()


def gpu_libraries(modules: Sequence[str] | None = None, *, seconds: float = SECONDS) -> Libraries:
    """Import the modules (default: all installed of MODULES) in another process; return what it found."""
    if modules is None:
        modules = [module for name in MODULES if _is_installed(name) for module in MODULES[name]]
    command, path = module_command("mrl.launch.cluster.gpu_libraries", *modules), child_path()
    try:
        done = subprocess.run(
            command, env=os.environ | path, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as late:
        last = _last_import((late.stdout or b"").decode(errors="replace"))
        return Libraries(faults=(f"{last} was not imported within {seconds:g} s; check the file system",))
    if done.returncode:
        code, last = done.returncode, _last_import(done.stdout)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"code {code}"
        words = (done.stderr.strip().splitlines() or [""])[-1]
        return Libraries(faults=(f"importing {last} ended its process with {how}: {words}; {AGAIN}",))
    report = json.loads(done.stdout.splitlines()[-1])
    return Libraries(report["versions"], tuple(report["faults"]))


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _last_import(output: str) -> str:
    lines = [line for line in output.splitlines() if line.startswith("import ")]
    return lines[-1].removeprefix("import ") if lines else "torch"


def loaded_twice(maps: Iterable[str]) -> list[str]:
    """Return a fault per library of SINGLE that a process has from two files, by the lines of its maps."""
    files = {line.split()[-1] for line in maps if ".so" in line}
    faults = []
    for name in SINGLE:
        places = sorted({os.path.realpath(file) for file in files if Path(file).name.startswith(name)})
        if len(places) > 1:
            faults.append(
                f"two {name} are loaded, {' and '.join(places)}: kernels of one fail with handles of the "
                "other; remove the one outside the environment, or its folder from LD_LIBRARY_PATH, "
                "CUDA_HOME and CUDNN_HOME"
            )
    return faults


def _report(modules: Sequence[str]) -> dict[str, Any]:
    """Import the modules in this process."""
    import torch

    use_own_compile_cache()  # for PATH
    faults = []
    versions = {"CUDA": str(torch.version.cuda)}
    for name in modules:
        print(f"import {name}", flush=True)
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a library raises
            first = (str(error).strip().splitlines() or [""])[0]
            faults.append(
                f"{name} is installed and cannot be imported: {type(error).__name__}: {first}; {AGAIN}"
            )
    if torch.version.cuda:
        versions["cuDNN"] = str(torch.backends.cudnn.version())
        versions["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[attr-defined]
    extension = sys.modules.get("transformer_engine_torch")
    if extension is not None and hasattr(extension, "get_cudnn_version"):
        other = str(extension.get_cudnn_version())
        if other != versions.get("cuDNN"):
            faults.append(
                f"Transformer Engine uses cuDNN {other}, torch {versions.get('cuDNN')}: remove the one "
                "outside the environment"
            )
    faults += loaded_twice(Path("/proc/self/maps").read_text().splitlines())
    compilers = [name for name in COMPILERS if shutil.which(name)]
    return {"versions": versions | {"compilers": " ".join(compilers) or "none"}, "faults": faults}


if __name__ == "__main__":
    print(json.dumps(_report(sys.argv[1:])))
