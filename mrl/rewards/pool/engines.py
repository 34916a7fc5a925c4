"""Servers of `reward.engines`: started next to the workers, each supervised by a thread of the driver."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from mrl.files import folder_for_sockets
from mrl.processes.start import module_command
from mrl.rewards.judges.judge_cache import json_digest
from mrl.rewards.judges.judge_rules import EngineSection
from mrl.rewards.judges.supervisor import ServerJob, ServerSupervisor
from mrl.rewards.kinds.reward_section import KindPart, RewardSection
from mrl.rewards.reward_part import Served
from mrl.user_code import child_path

_log = logging.getLogger(__name__)

CPU_CACHE_BYTES = 1 << 30
"""Default KV cache of a CPU rank in bytes: vLLM would take 92 % of the memory and exit if less is free."""
BASE = {"llm": "/v1", "reward_model": ""}
"""Kind -> path prefix of a server's routes."""
START_SECONDS = 600.0
"""Default start deadline of an engine, without a run's configuration."""


def _job(
    section: RewardSection, name: str, log_folder: Path, start_deadline_seconds: float
) -> tuple[ServerJob, Served]:
    """Return the start job of the engine of this name, and its server's address."""
    engine, words = section.engines[name], _needed_words(section, name)
    sockets = _socket_folder()
    served = Served(f"{sockets}/server", _answers(engine, words))
    command = module_command("mrl.rollout.serve", str(os.getpid()), "--uds", served.socket)
    job = ServerJob(
        f"reward.engines.{name}",
        [*command, "--model", engine.model, *_words(engine), *words, *engine.arguments],
        {**child_path(), **_environment(engine), "VLLM_RPC_BASE_PATH": sockets},
        served.socket,
        log_folder / f"engine-{name}.log",
        engine.restarts,
        start_deadline_seconds,
    )
    return job, served


class RewardEngines:
    """All reward engines of a run, which start at once; `with` ends them."""

    def __init__(
        self,
        section: RewardSection,
        log_folder: Path | None = None,
        *,
        start_deadline_seconds: float = START_SECONDS,
    ) -> None:
        """Start the engines.

        Args:
            log_folder: The run's; without it the logs go to a new temporary folder.
            start_deadline_seconds: Longest start or restart of an engine.
        """
        self._section = section
        self._engines: dict[str, ServerSupervisor] = {}
        self._served: dict[str, Served] = {}
        if section.engines:
            folder = log_folder or Path(tempfile.mkdtemp(prefix="mrl-engines-"))
            try:
                for name in section.engines:
                    job, self._served[name] = _job(section, name, folder, start_deadline_seconds)
                    self._engines[name] = ServerSupervisor(job)
            except BaseException:
                self.close()
                raise

    def ready(self) -> RewardSection:
        """Wait until all engines respond; return the rewards with their servers' addresses."""
        start = time.monotonic()
        for engine in self._engines.values():
            engine.ready()
        if self._engines:
            _log.info("engines %s are up after %.1f s", sorted(self._engines), time.monotonic() - start)
        return self._with_addresses()

    def check(self) -> None:
        """Raise WorkerLost if an engine is lost for good."""
        for engine in self._engines.values():
            engine.check()

    def restarts(self) -> int:
        """Return the number of engine restarts."""
        return sum(engine.restarts for engine in self._engines.values())

    def close(self) -> None:
        for engine in self._engines.values():
            engine.close()

    def __enter__(self) -> RewardEngines:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _with_addresses(self) -> RewardSection:
        section = self._section
        if not section.engines:
            return section
        domains = {name: self._addressed(spec) for name, spec in section.domains.items()}
        return self._addressed(section).model_copy(update={"domains": domains})

    def _addressed(self, part: Any) -> Any:
        """Return a part, and its sub-parts, with the server's address."""
        parts = tuple(self._addressed(sub) for sub in getattr(part, "parts", ()))
        changed: dict[str, Any] = {"parts": parts} if parts else {}
        if part.engine is not None:
            tokenizer = {"tokenizer": self._section.engines[part.engine].model}
            server = part.server.model_copy(update=tokenizer)
            changed |= {"path": f"http://engine{BASE[part.kind]}", "server": server}
        addressed = part.model_copy(update=changed)
        return addressed if part.engine is None else addressed.served_by(self._served[part.engine])


@contextlib.contextmanager
def served(section: RewardSection, log_folder: Path | None = None) -> Iterator[RewardSection]:
    """Start the engines and yield the rewards with their addresses."""
    with RewardEngines(section, log_folder) as engines:
        yield engines.ready()


def verifiers_of_engine(section: RewardSection, name: str) -> list[KindPart]:
    """Return the verifiers that use an engine."""
    return [part for part in section.all_verifiers() if part.engine == name]


def _needed_words(section: RewardSection, name: str) -> list[str]:
    """Return the `vllm serve` words that the engine's verifiers need."""
    parts = verifiers_of_engine(section, name)
    if any(part.kind == "llm" and part.llm.constrained for part in parts):  # type: ignore[attr-defined]
        return ["--logprobs-mode", "processed_logprobs"]
    return []


def _answers(section: EngineSection, words: Sequence[str]) -> str:
    """Return a digest of all that decides the server's replies: its model's files and its settings."""
    files = sorted(path for path in Path(section.model).glob("*") if path.is_file())
    folder = [[path.name, path.stat().st_size, path.stat().st_mtime_ns] for path in files]
    return json_digest(folder, section.dtype, section.max_length, section.arguments, list(words))


def _words(section: EngineSection) -> list[str]:
    """Return the `vllm serve` words besides the model and the socket."""
    words = ["--dtype", section.dtype, "--tensor-parallel-size", str(section.tp)]
    words += ["--max-num-seqs", str(section.max_num_seqs)]
    if section.max_length is not None:
        words += ["--max-model-len", str(section.max_length)]
    if cache := section.kv_cache_bytes or (0 if section.gpus else CPU_CACHE_BYTES):
        words += ["--kv-cache-memory-bytes", str(cache)]
    if section.shares_slots:  # memory that vLLM requires to be free at its start; the cache size is explicit
        words += ["--gpu-memory-utilization", "0.01"]
    return words


def _environment(section: EngineSection) -> dict[str, str]:
    environment = {
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_PLUGINS": "",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    if "--enforce-eager" in section.arguments:
        environment["TORCHDYNAMO_DISABLE"] = "1"
    if section.gpus:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(visible_gpus(section.gpus))
    return environment


def visible_gpus(numbers: Sequence[int]) -> list[str]:
    """Return the CUDA_VISIBLE_DEVICES names of these GPUs, numbered among those this process sees."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = shown.split(",") if shown else None
    return [names[number] if names else str(number) for number in numbers]


def _socket_folder() -> str:
    """Create a folder of mode 0700 for the sockets of a server and its processes."""
    return tempfile.mkdtemp(prefix="mrl-judge-", dir=folder_for_sockets())
