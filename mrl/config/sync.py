"""How weights travel from the trainer to the engines."""

from typing import Literal

from pydantic import Field

from mrl.config.section import Section


class SyncSection(Section):
    """The weight hand-over."""

    mode: Literal["planned", "gather"] = "planned"
    """planned: by the static plan, nobody gathers; gather: full tensors, one at a time (oracle and fallback)."""
    transport: Literal["auto", "distributed"] = "auto"
    """auto: through memory a slot's trainer and engine share (CUDA IPC on GPUs, shared memory on CPU); distributed: torch.distributed messages (NCCL or gloo), which need no common memory."""
    bucket_bytes: int = Field(default=64 << 20, ge=1024)
    """Size of each of the two bucket buffers of a slot."""
    digests: bool = True
    """Compare digests of what was sent and what was loaded before a version becomes visible."""
    deadline_seconds: float = Field(default=300.0, gt=0)
    """Longest wait for the peer inside a hand-over, on both sides."""
