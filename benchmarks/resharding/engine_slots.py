"""The generation side of one engine's slots: a real vLLM engine with its workers, loaders and processing."""

from __future__ import annotations

import dataclasses
import json
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

import numpy as np

from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.sync import SyncSection
from mrl.models.tensors import CheckpointTensor
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.session import Session
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.request import GenerationRequest

_LENGTH = 64


@dataclasses.dataclass(frozen=True, slots=True)
class EngineKind:
    """Settings of every engine."""

    tp: int
    quantization: Literal["none", "fp8_block"] = "none"


class EngineSlots:
    """An engine of `kind.tp` workers with dummy weights; same calls as `StorageSlot`, results by worker."""

    def __init__(
        self, hf_config: dict[str, Any], kind: EngineKind, engine_index: int, deadline_seconds: float
    ) -> None:
        self._folder = tempfile.TemporaryDirectory()
        Path(self._folder.name, "config.json").write_text(json.dumps(hf_config))
        self._vocab = hf_config["vocab_size"]
        self._engine = RolloutEngine(
            RolloutSection(
                tp=kind.tp,
                quantization=kind.quantization,
                enforce_eager=True,
                kv_cache_bytes=64 << 20,
                max_num_seqs=8,
            ),
            self._folder.name,
            max_length=_LENGTH,
            seed=1,
            part=EngineProcess(engine_index),
            sync=SyncSection(deadline_seconds=deadline_seconds),
        )

    def addresses(self) -> list[str]:
        return self._engine.prepare_sync()

    def manifests(self, checkpoint: list[CheckpointTensor]) -> list[RankManifest]:
        return self._engine.engine_manifests(checkpoint)

    def receive(self, session: Session) -> list[dict[str, float]]:
        return self._engine.receive(session)

    def logprobs(self) -> list[list[float]]:
        """Return log-probs of a few greedy continuations, computed with the processed weights."""
        prompts = np.random.default_rng(0).integers(2, self._vocab, (4, 8)).astype(np.int32)
        requests = [
            GenerationRequest(f"{i}.0", prompt, i, 8, greedy=True, ignore_stop=True)
            for i, prompt in enumerate(prompts)
        ]
        return [
            completion.logprobs.tolist()
            for completion in self._engine.generate(requests, deadline=time.monotonic() + 120)
        ]

    def release(self) -> None:
        self._engine.release_sync()

    def close(self) -> None:
        self._engine.close()
        self._folder.cleanup()
