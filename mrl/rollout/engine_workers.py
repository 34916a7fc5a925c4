"""Calls on an engine's workers: addresses, devices, memory use and where each tensor lands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.agreement import as_one_rank, require_agreement, require_written_once
from mrl.resharding.planner.manifest import RankManifest, replicas
from mrl.resharding.transfer.session import Session
from mrl.rollout.engine_process import EngineProcess

_RECEIVE_DEADLINES = 20
"""Longest weight sync, as a multiple of sync.deadline_seconds (which bounds each single wait)."""


class EngineWorkers:
    """Worker processes of one engine or dp rank, called by their extension (resharding/vllm/plugin.py)."""

    _engine: Any
    """vLLM's LLMEngine."""

    def __init__(self, part: EngineProcess, sync: SyncSection) -> None:
        self.part, self._sync = part, sync

    def prepare_sync(self, host: str | None = None) -> list[str]:
        """Return the workers' addresses by tensor-parallel rank; the same at every call.

        `host`: this machine's address, needed if sync.transport is not auto.
        """
        answers = self._on_workers("mrl_prepare_sync", self._sync.deadline_seconds, host)
        return [a["address"] for a in answers]

    def devices(self) -> list[str]:
        """Return the UUID of each worker's GPU by tensor-parallel rank; "cpu" without one."""
        return [a["device"] for a in self._on_workers("mrl_device")]

    def memory_use(self) -> list[dict[str, float]]:
        """Return each worker's GPU and host memory use by tensor-parallel rank (observe/memory_use.py)."""
        return [a["use"] for a in self._on_workers("mrl_memory_use")]

    def engine_manifests(self, checkpoint: Sequence[CheckpointTensor]) -> list[RankManifest]:
        """Return where each worker's weight loaders put every checkpoint tensor, by tensor-parallel rank.

        Raises:
            WeightSyncError: Names the tensors that engine or checkpoint lacks, or whose shapes differ.
        """
        rows = [(t.name, t.shape, t.dtype, t.stack) for t in checkpoint]
        manifests = [a["manifest"] for a in self._on_workers("mrl_manifest", rows)]
        if self.part.dp == 1:  # otherwise each dp rank has part of the experts (RolloutGroup.engine_ranks)
            require_agreement([as_one_rank(checkpoint)], manifests)
        for group in replicas(manifests):
            require_written_once(group)
        return manifests

    def stage(self, session: Session) -> None:
        """Start to take a sync session's bytes on all workers, beside the weights that the engine serves.

        Returns at once; an error of the session reaches its senders. `receive` loads the bytes, once the
        senders report that all were taken."""
        self._on_workers("mrl_stage", dataclasses.asdict(session))

    def release_sync(self) -> None:
        """Unmap the trainer's buffers on all workers; the trainer may free them afterwards."""
        self._on_workers("mrl_release_sync")

    def _on_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call every worker; raise WeightSyncError with the traceback of each worker that failed."""
        answers = self._ask_workers(call, *arguments)
        if error := self._errors(call, answers):
            raise WeightSyncError(error)
        return answers

    def _ask_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """Call a method of every worker's extension by name; return the replies, errors included."""
        timeout = self._sync.deadline_seconds * _RECEIVE_DEADLINES
        return self._engine.collective_rpc(call, timeout=timeout, args=arguments)

    def _errors(self, call: str, answers: Sequence[dict[str, Any]]) -> str:
        errors = [f"worker {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
        return f"{self.part.name}, {call}: " + "\n".join(errors) if errors else ""
