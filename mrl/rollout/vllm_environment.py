"""Environment variables that vLLM reads, set before it is imported. Its arguments are in `vllm_start.py`."""

from __future__ import annotations

import logging
import os
import sys
import warnings

from mrl.compile_cache import use_own_compile_cache
from mrl.config.sections.rollout import RolloutSection
from mrl.errors import RolloutError
from mrl.rollout.engine_process import EngineProcess


def prepare(
    rollout: RolloutSection,
    part: EngineProcess,
    meeting: tuple[str, int] | None,
    *,
    compiled: bool,
    on_cpu: bool,
) -> None:
    """Set the variables that vLLM reads; call it before vLLM's first import in this process.

    On GPUs the engine's log has vLLM's INFO lines: the kernels that it chose for attention, linear layers and
    experts, seconds of compiling, and the memory of each sleep.
    """
    if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RolloutError(
            "vllm was imported before mrl.rollout.vllm_environment.prepare, whose settings it would not "
            "read; create the RolloutEngine in its own process, before anything imports vllm"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING" if on_cpu else "INFO")
    use_own_compile_cache()
    for name, value in variables(rollout, part, meeting, compiled=compiled).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def variables(
    rollout: RolloutSection, part: EngineProcess, meeting: tuple[str, int] | None, *, compiled: bool
) -> dict[str, str | None]:
    """Return the variables of a process that imports vLLM; None removes one.

    The engine core runs in the caller's process, which steps it; no hub is contacted; threads are not pinned
    because engines and trainer ranks share the cores. Unless `compiled`, functions with a torch.compile
    decorator run eagerly too; vLLM's one for log-prob ranks alone costs 15 s of start-up on CPU.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(rollout.num_threads),
        # Orphaned workers exit at once; a longer grace period only delays the end of a run.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
        # If inherited, it would override the byte-exact engine argument.
        "VLLM_CPU_KVCACHE_SPACE": None,
        "TORCHDYNAMO_DISABLE": None if compiled else "1",
        **_of_dp_rank(part, meeting),
    }


def _of_dp_rank(part: EngineProcess, meeting: tuple[str, int] | None) -> dict[str, str | None]:
    """Return the data-parallel variables of vLLM's "offline SPMD" mode, which has no arguments for them. Each
    rank sees only its own devices, so its local rank is always 0."""
    address, port = meeting or ("127.0.0.1", 0)
    values = {
        "SIZE": part.dp,
        "RANK": part.dp_rank,
        "RANK_LOCAL": 0,
        "MASTER_IP": address,
        "MASTER_PORT": port,
    }
    return {f"VLLM_DP_{name}": str(value) if part.dp > 1 else None for name, value in values.items()}


def quiet() -> None:
    """Hide vLLM's and torch's log lines below ERROR; call it before their first import.
    VLLM_LOGGING_LEVEL=INFO in the environment shows them again."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM applies the level above
    # torch's CUDA build warns on a machine without a GPU that it found no runtime; preflight reports it.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def select_newer_runner() -> None:
    """Select the model runner that records routes and sampling masks on GPUs; call it before vLLM's first
    import."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
