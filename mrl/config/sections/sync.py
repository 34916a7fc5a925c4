"""How weights travel from the trainer to the engines."""

from typing import Literal

from pydantic import Field

from mrl.section import Section


class SyncSection(Section):
    """The weight sync."""

    transport: Literal["auto", "distributed", "nixl"] = "auto"
    """auto: through memory a slot's trainer and engine share (CUDA IPC on GPUs, shared memory on CPU); where
    engines have slots of their own, shared memory on one machine without GPUs, and else distributed;
    distributed: torch.distributed messages (NCCL or gloo), which need no common memory; nixl: the same, written
    by NVIDIA's NIXL over UCX (extra `nixl`)."""
    bucket_bytes: int = Field(default=64 << 20, ge=1024)
    """Size of each of a slot's two receive buckets and two send buckets."""
    verify: Literal["full", "wire"] = "full"
    """full: before a version becomes visible, what lies in the engines is compared with the trainer's own
    parameters, after every start and failure and every `verify_every` versions, and like wire in between;
    wire: only bytes on their way, each message by the digest that its sender took."""
    verify_every: int = Field(default=10, ge=1)
    """Versions from one full comparison to the next."""
    deadline_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for the peer inside a weight sync, on both sides."""

    def full_after(self, proved: int | None, version: int) -> bool:
        """Whether the sync to `version` compares the engines with the trainer's parameters.

        `proved`: the last version that did, None after a start or a failure.
        """
        due = proved is None or version - proved >= self.verify_every
        return self.verify == "full" and due
