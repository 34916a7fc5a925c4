"""Both ends of one slot in this process: a trainer rank with random weights, a receiver's parameters."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.resharding.made_up import MadeUp
from benchmarks.resharding.storage import Storage, StorageConsumer
from benchmarks.resharding.trainer import BenchTrainer
from mrl.config.sections.sync import SyncSection
from mrl.errors import WeightSyncError
from mrl.resharding.planner.manifest import RankManifest
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer.planned_sync import PlannedSync
from mrl.resharding.transfer.receiver import Receiver
from mrl.resharding.transfer.session import ReceiverState, Session
from tests.resharding.exchanges import Receiving

CPU = torch.device("cpu")
SYNC = SyncSection(bucket_bytes=64 << 10, deadline_seconds=60.0)


class Slot:
    def __init__(
        self,
        trainer: BenchTrainer,
        manifests: Sequence[RankManifest],
        rank: int = 0,
        *,
        planned_for: Sequence[RankManifest] = (),
        slots_per_node: int = 1,
        sync: SyncSection = SYNC,
        store: str | None = None,
    ) -> None:
        """`planned_for`: manifests reported to the trainer if they differ from the real ones."""
        self.trainer, self.storage = trainer, Storage(manifests[rank], CPU)
        host = None if sync.transport == "auto" else "127.0.0.1"
        self.receiver = Receiver(deadline_seconds=60.0, device=CPU, host=host)
        addresses: list[Any] = [self.receiver.address]
        if dist.is_initialized():
            addresses = [None] * dist.get_world_size()
            dist.all_gather_object(addresses, self.receiver.address)
        topology = Topology.shared(len(addresses), slots_per_node=slots_per_node)
        if host is not None:
            topology = Topology.separate_slots(topology.nodes)
        wanted = list(planned_for or manifests)
        self.weight_sync = PlannedSync(trainer, sync, addresses, wanted, topology=topology, store=store)
        self.figures: dict[str, float] = {}
        """Figures of the last committed session."""
        self._number = 0

    def sync(self, version: int, windows: StorageConsumer | None = None, *, full: bool = True) -> str:
        """Run a session from poisoned parameters; return the sender's error or an empty string."""
        self.storage.poison()
        self._number += 1
        committed = self.receiver.progress.version
        session = Session(f"{self._number:032x}", committed, version, self.weight_sync.digest, full=full)
        thread = Receiving(self.receiver, session, windows or StorageConsumer(self.storage))
        try:
            self.figures = self.weight_sync.send(session)
        except WeightSyncError as error:
            return str(error)
        finally:
            if thread.end(60) is not None:
                assert self.receiver.progress.state is ReceiverState.FAILED
            assert self.trainer.memory.leases == 0
        return ""

    def outcome(self, version: int) -> tuple[bool, str | None]:
        """Return (is the version committed, errors in its bytes)."""
        made = MadeUp(self.trainer.checkpoint, version=version)
        return self.receiver.progress.version == version, self.storage.first_difference(made)

    def close(self) -> None:
        self.receiver.close()
        self.weight_sync.close()
        self.trainer.close()
