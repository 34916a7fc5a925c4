"""The process environment vLLM reads, set in one place before vLLM is imported.

Owns environment variables only; the engine's own arguments are in `engine.py`.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings

from mrl.compile_cache import use_own_compile_cache
from mrl.config.sections.rollout import RolloutSection
from mrl.errors import RolloutError
from mrl.rollout.part import Part


def prepare(rollout: RolloutSection, part: Part, meeting: tuple[str, int] | None, *, compiled: bool) -> None:
    """Sets what vLLM reads from the environment; must come before vLLM's first import in this process."""
    if "vllm" in sys.modules and os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") != "0":
        raise RolloutError(
            "vllm was imported before mrl.rollout.environment.prepare; its settings would not be read. "
            "Make the RolloutEngine first in a process of its own"
        )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    use_own_compile_cache()
    for name, value in variables(rollout, part, meeting, compiled=compiled).items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def variables(
    rollout: RolloutSection, part: Part, meeting: tuple[str, int] | None, *, compiled: bool
) -> dict[str, str | None]:
    """Of the environment of a process that imports vLLM; None: not in it.

    The engine core runs in the caller's process (we step it), its logging stays quiet, nothing looks for a hub, and
    threads are not pinned: several engines and trainer ranks share the cores. Where nothing is `compiled`, torch.compile's
    decorated functions run eagerly too: vLLM compiles one for log-prob ranks, which alone costs 15 s of start-up on CPU.
    """
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(rollout.num_threads),
        # Workers that lost their work exit at once; a longer grace only delays the end of a run.
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "2",
        # It overrides the byte-exact engine argument where the launcher's environment carries it.
        "VLLM_CPU_KVCACHE_SPACE": None,
        "TORCHDYNAMO_DISABLE": None if compiled else "1",
        **_of_dp_rank(part, meeting),
    }


def _of_dp_rank(part: Part, meeting: tuple[str, int] | None) -> dict[str, str | None]:
    """vLLM's ranks in data parallel that are stepped by others (its "offline SPMD") learn of each other here only. Each sees its
    own devices alone, so that its number on its node is always 0."""
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
    """Keeps what vLLM and torch say below an error off the screen of a process without a log file; comes before their first
    import. VLLM_LOGGING_LEVEL=INFO in the environment brings it back."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    logging.getLogger("vllm").setLevel(logging.ERROR)  # until vLLM sets up its own by the level above
    # torch's build for CUDA says on a machine without a GPU that it found no runtime; preflight says it better.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")


def tell_routes() -> None:
    """On GPUs, the model runner that can; comes before vLLM's first import."""
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1"
