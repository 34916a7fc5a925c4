"""One trainer rank's side of every weight sync that gathers (`sync.mode: gather`).

Consumes: the Megatron worker's description of itself. Produces: full tensors sent. Waits for: peers and the slot's
receiver, each with sync.deadline_seconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from mrl.config.sections.sync import SyncSection
from mrl.resharding.planner.topology import Topology
from mrl.resharding.transfer import gather, gather_plan
from mrl.resharding.transfer.collectives import Ranks
from mrl.resharding.transfer.lease import Lease, Lent, of_lenders
from mrl.resharding.transfer.session import Session
from mrl.resharding.transfer.trainer import (
    Start,
    Trainer,
    endpoints_of,
    group_of,
    lent_by,
    manifests_of,
    reads_neighbours,
)


class GatherSync:
    """Sends full checkpoint tensors, one bucket at a time, to this rank's receivers. Trainer ranks that are all on one
    node without GPUs read one another's memory."""

    def __init__(
        self,
        trainer: Trainer,
        sync: SyncSection,
        addresses: Sequence[str],
        *,
        topology: Topology | None = None,
        store: str | None = None,
    ) -> None:
        """`addresses`: of every engine rank. `topology`: where all ranks are; None: nothing is known. `store`: the
        trainers' torch.distributed store (distributed transport)."""
        self._trainer, self._sync = trainer, sync
        manifests = manifests_of(trainer)
        self.plan = gather_plan.build(
            trainer.family.checkpoint_tensors(trainer.hf_config),
            [m.tensors for m in manifests],
            sync.bucket_bytes,
        )
        self._endpoints = endpoints_of(trainer, sync, addresses, store)
        nodes = [] if topology is None else [topology.nodes[slot] for slot in topology.trainer_slots]
        facts = {"plan": self.plan.digest, "engine ranks": len(addresses), "nodes": nodes}
        self._start = Start(trainer, sync, facts)
        self._together = len(set(nodes)) == 1 and reads_neighbours(trainer, self._endpoints)
        self._lent: list[Lent] = []
        self._lease: Lease | None = None

    @property
    def digest(self) -> str:
        """What a session must carry; equal on all ranks."""
        return self.plan.digest

    def redial(self, addresses: Mapping[int, str]) -> None:
        """Other processes have taken the places of these engine ranks."""
        self._endpoints.redial(addresses)

    def send(self, session: Session, absent: Sequence[int] = ()) -> dict[str, float]:
        """Sends one session, not to the `absent` engine ranks; all trainer ranks call it together. Seconds are this
        rank's, bytes this slot's."""
        ranks = Ranks(group_of(self._trainer), self._sync.deadline_seconds, self._trainer.device)
        self._start.check(session, ranks, lambda: gather.proof_of(self.plan, ranks.rank, 1), absent)
        self._endpoints.leave_out(absent)
        self._trainer.memory.lease()
        try:
            stats = gather.send(
                [self._endpoints.senders[n] for n in self._endpoints.present(absent)],
                session,
                self.plan,
                [tensor for _, tensor, _, _ in self._trainer.local_tensors()],
                group=group_of(self._trainer),
                device=self._trainer.device,
                deadline_seconds=self._sync.deadline_seconds,
                mesh=self._endpoints.mesh,
                lent=self._neighbours(ranks) if self._together else None,
                digests=self._sync.verify != "off",
            )
        finally:
            self._trainer.memory.release()
        return stats.figures

    def _neighbours(self, ranks: Ranks) -> dict[int, list[torch.Tensor]]:
        """By trainer rank, its tensors; mapped in the first session."""
        if self._lease is None:
            self._lent = ranks.told(ranks.together(lambda: lent_by(self._trainer)))
            files = [file for rank in self._lent for file in rank.files]
            self._lease = ranks.together(lambda: Lease(files))
        lease = self._lease
        flat = iter([lease.flat(tensor) for tensor in of_lenders(self._lent)])
        return {
            rank: [next(flat).view(t.shape) for t in held] for rank, held in enumerate(self.plan.trainers)
        }

    def close(self) -> None:
        """Frees the buffers; the receivers must have released them."""
        if self._lease is not None:
            self._lease.close()
        self._endpoints.close()
