"""What an engine asks its workers: addresses, devices, memory, and where each tensor lands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.agreement import as_one_rank, require_agreement, require_written_once
from mrl.resharding.planner.manifest import RankManifest, replicas
from mrl.rollout.part import Part

_RECEIVE_DEADLINES = 20
"""Longest weight sync, in units of sync.deadline_seconds (which bounds each single wait)."""


class EngineWorkers:
    """The worker processes of one engine, or of one dp rank of it, by their extension (resharding/vllm/plugin.py)."""

    _engine: Any
    """vLLM's LLMEngine."""

    def __init__(self, part: Part, sync: SyncSection) -> None:
        self.part, self._sync = part, sync

    def prepare_sync(self, host: str | None = None) -> list[str]:
        """The addresses of this engine's workers, by tensor-parallel rank; the same at every call.

        `host`: this machine's address, needed where sync.transport is not auto.
        """
        answers = self._on_workers("mrl_prepare_sync", self._sync.deadline_seconds, host)
        return [a["address"] for a in answers]

    def devices(self) -> list[str]:
        """The UUID of each worker's GPU, by tensor-parallel rank; "cpu" without one."""
        return [a["device"] for a in self._on_workers("mrl_device")]

    def memory_use(self) -> list[dict[str, float]]:
        """What each worker's process has of its GPU and host, by tensor-parallel rank (observe/memory_use.py)."""
        return [a["use"] for a in self._on_workers("mrl_memory_use")]

    def engine_manifests(self, checkpoint: Sequence[CheckpointTensor]) -> list[RankManifest]:
        """Where each worker's own loaders put every checkpoint tensor, by tensor-parallel rank (ranks from 0).

        WeightSyncError names the tensors that engine and checkpoint do not both have, or not in one shape.
        """
        rows = [(t.name, t.shape, t.dtype, t.stack) for t in checkpoint]
        manifests = [a["manifest"] for a in self._on_workers("mrl_manifest", rows)]
        if self.part.dp == 1:  # else each dp rank has a part of the experts (RolloutGroup.engine_ranks)
            require_agreement([as_one_rank(checkpoint)], manifests)
        for group in replicas(manifests):
            require_written_once(group)
        return manifests

    def release_sync(self) -> None:
        """Unmaps the trainer's buffers on all workers; the trainer may free them afterwards."""
        self._on_workers("mrl_release_sync")

    def _on_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """One call on every worker; WeightSyncError with every failing worker's traceback."""
        answers = self._ask_workers(call, *arguments)
        if error := self._errors(call, answers):
            raise WeightSyncError(error)
        return answers

    def _ask_workers(self, call: str, *arguments: Any) -> list[dict[str, Any]]:
        """Every worker's answer to a call of its extension, which vLLM reaches by name; an error is an answer too."""
        timeout = self._sync.deadline_seconds * _RECEIVE_DEADLINES
        return self._engine.collective_rpc(call, timeout=timeout, args=arguments)

    def _errors(self, call: str, answers: Sequence[dict[str, Any]]) -> str:
        errors = [f"worker {i}: {a['error']}" for i, a in enumerate(answers) if "error" in a]
        return f"{self.part.name}, {call}: " + "\n".join(errors) if errors else ""
