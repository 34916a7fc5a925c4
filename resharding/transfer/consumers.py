"""What a receiver feeds: an engine's modules (`vllm/modules.py`), or bare storages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.transfer.proof import EngineProof
from mrl.resharding.transfer.slot_tables import Tables


class Consumer(Protocol):
    """What a receiver feeds with the windows of a plan."""

    @property
    def processing_seconds(self) -> float:
        """What applying windows spent in the engine's processing of complete modules."""
        ...

    @property
    def manifest(self) -> RankManifest | None:
        """What this engine rank itself says of its loader layout; None where it was never asked."""
        ...

    def start(self, tables: Tables, proof: EngineProof | None) -> None:
        """A session's bytes are about to arrive. `proof` wants every target of the tables after its last byte and before
        anything is made of it (`EngineProof.look`): parameters in loader layout, whole tensors before they are loaded."""
        ...

    def apply(self, index: int, sources: Sequence[torch.Tensor], bucket: torch.Tensor) -> None:
        """Runs one window's copies, from flat leased tensors and from the filled bytes of the bucket; loads the whole
        tensors that are complete with it."""
        ...

    def finish(self) -> None:
        """Everything arrived: check completeness, process."""
        ...

    def abort(self) -> None:
        """Put loading state back so that a full resend starts clean; must not raise."""
        ...
