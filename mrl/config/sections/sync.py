"""Settings of the weight sync from trainer to engines."""

from typing import Literal

from pydantic import Field

from mrl.section import Section


class SyncSection(Section):
    """Weight sync: transport, buffers and checks."""

    transport: Literal["auto", "distributed", "nixl"] = "auto"
    """Move weights through memory shared by a slot's trainer and engine (auto: CUDA IPC on GPUs, shared
    memory on CPU; if engines have their own slots, shared memory on one machine without GPUs, else
    distributed), by torch.distributed messages (NCCL or gloo), or by the same messages written by NVIDIA's
    NIXL over UCX (nixl; extra `nixl`)."""
    delta: Literal["off", "auto", "on"] = "off"
    """Send engines on other slots only what changed since the version that they have, losslessly: never, if
    that takes less time on the measured link, or always; engines without that version get everything. Every
    trainer rank keeps another copy of its weights, every engine rank one of what it receives. Only for
    messages over gloo, without GPUs."""
    overlap: Literal["auto", "on", "off"] = "auto"
    """Send the weights to engines on other slots while they generate with the earlier version, and stop
    generation only to load them: with loop.schedule stream, if weights go as messages between machines
    without GPUs (auto), also on GPUs (on), or never. Every engine rank keeps another copy of what it
    receives, in host memory."""
    bucket_bytes: int = Field(default=64 << 20, ge=1024)
    """Size each of a slot's two receive and two send buckets."""
    verify: Literal["full", "wire"] = "full"
    """Compare the engines' weights with the trainer's parameters before a version becomes visible, after
    every start and failure and every `verify_every` versions, and check as wire in between (full); or check
    only the digest of each message (wire)."""
    verify_every: int = Field(default=10, ge=1)
    """Make a full comparison every this many versions."""
    deadline_seconds: float = Field(default=300.0, gt=0)
    """Wait at most this many seconds for the peer inside a weight sync, on both sides."""

    def needs_full_verify(self, proved: int | None, version: int) -> bool:
        """Return True if the sync to `version` compares the engines with the trainer's parameters.

        `proved` is the last version that was compared; None after a start or a failure.
        """
        due = proved is None or version - proved >= self.verify_every
        return self.verify == "full" and due
