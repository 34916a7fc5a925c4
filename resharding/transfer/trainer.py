"""A trainer rank as the weight sync sees it, and what is made sure of before the first byte of a session."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.models.family import Family
from mrl.models.layout import Layout
from mrl.models.tensors import LocalTensor, Spec
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.trainer_manifests import trainer_rank_manifests
from mrl.resharding.transfer.collectives import RankGroup
from mrl.resharding.transfer.endpoints import Endpoints, open_endpoints
from mrl.resharding.transfer.lease import Lent, describe_files
from mrl.resharding.transfer.proof import ReadBoxes, TrainerProof
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.slot_tables import leased_tensors


class Memory(Protocol):
    """What is read of a Megatron worker's parameter memory."""

    @property
    def buffers(self) -> Sequence[Any]: ...

    def export(self) -> list[tuple[int, int]]: ...

    def lease(self) -> int: ...

    def release(self) -> None: ...


class SyncedTrainer(Protocol):
    """What is read of a Megatron worker."""

    family: Family
    hf_config: dict[str, Any]
    layout: Layout
    dtype: torch.dtype
    device: torch.device

    @property
    def spec(self) -> Spec:
        """Whose layers name the parameters."""
        ...

    def local_tensors(self) -> Sequence[tuple[LocalTensor, torch.Tensor, int, int]]: ...

    def loaded_boxes(self) -> ReadBoxes | None:
        """Reads the folder whose weights the parameters are; None once they were changed."""
        ...

    @property
    def memory(self) -> Memory: ...


def manifests_of(trainer: SyncedTrainer) -> list[RankManifest]:
    """What every trainer rank holds, from the layout."""
    dtype = str(trainer.dtype).removeprefix("torch.")
    return trainer_rank_manifests(trainer.hf_config, trainer.layout, dtype=dtype, spec=trainer.spec)


def group_of(trainer: SyncedTrainer) -> dist.ProcessGroup | None:
    return dist.group.WORLD if trainer.layout.world_size > 1 else None


def endpoints_of(
    trainer: SyncedTrainer, sync: SyncSection, addresses: Sequence[str], store: str | None
) -> Endpoints:
    world = trainer.layout.world_size
    rank = dist.get_rank() if world > 1 else 0
    return open_endpoints(sync, addresses, rank=rank, num_trainers=world, device=trainer.device, store=store)


def reads_neighbours(trainer: SyncedTrainer, endpoints: Endpoints) -> bool:
    """Whether processes of one node read parameters out of one another's memory: without GPUs, and without a mesh."""
    return trainer.device.type == "cpu" and endpoints.mesh is None


def lent_by(trainer: SyncedTrainer) -> Lent:
    """What this rank lends in every session."""
    files = describe_files(trainer.memory.export()) if trainer.device.type == "cpu" else ()
    return Lent(leased_tensors(trainer.local_tensors()), files)


class Start:
    """What is made sure of before the first byte of a session."""

    def __init__(self, trainer: SyncedTrainer, sync: SyncSection, facts: Mapping[str, object]) -> None:
        """`facts`: what else must be the same on all ranks, by the words an error names it with."""
        self._trainer = trainer
        self._facts = {
            "sync": sync,
            "layout": trainer.layout,
            "dtype": trainer.dtype,
            "model": json.dumps(trainer.hf_config, sort_keys=True, default=str),
            **facts,
        }
        self._compared = False

    def check(
        self,
        session: Session,
        ranks: RankGroup,
        proof: Callable[[], TrainerProof],
        absent: Sequence[int] = (),
    ) -> None:
        """WeightSyncError on all ranks where they disagree about anything, or hold other weights than the
        folder they loaded (asked once, in the first session that is proved)."""
        opened = (session, session.session_id, session.full, session.digest)
        ranks.agree(self._facts | {"session": opened, "absent engine ranks": list(absent)})
        if session.digest != self._facts["plan"]:
            raise WeightSyncError(
                f"{session} was made for another plan (digest {session.digest[:12]}, here {str(self._facts['plan'])[:12]})"
            )
        if session.full and not self._compared:
            ranks.together(lambda: self._require_loaded(proof()))
            self._compared = True

    def _require_loaded(self, proof: TrainerProof) -> None:
        read = self._trainer.loaded_boxes()
        if read is not None:
            arrays = [tensor.detach().reshape(-1) for _, tensor, _, _ in self._trainer.local_tensors()]
            proof.require_loaded(arrays, read)
