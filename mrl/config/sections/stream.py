"""The stream schedule: how far generation may run ahead of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.section import Section


class PoolSection(Section):
    """Where judged groups wait for their step."""

    memory_bytes: int = Field(default=1 << 30, ge=0)
    """Memory of the driver that they take, about 13 bytes a token and the text; beyond it they go to files, about 8 bytes a
    token and the text."""
    folder: str | None = None
    """Folder of these files, of this run alone, on the driver's node; null is `pool` in the run's folder. Nothing in it outlives
    the run: what a checkpoint needs is in the checkpoint."""


class StreamSection(Section):
    """Read by loop.schedule = stream."""

    max_age: int = Field(default=1, ge=0)
    """Versions that any trained token may be behind the weights it trains, with sync_every at 1. Kept by admitting
    prompts; nothing is dropped for its age. 0 is on-policy."""
    sync_every: int = Field(default=1, ge=1)
    """Most steps between two weight syncs; n adds n - 1 versions to the largest age. A checkpoint, a validation and, on shared
    slots, a batch that is not complete bring the sync forward."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """What a weight sync does to unfinished responses. recompute: they continue over a KV cache that the new version computes;
    keep: they continue over the cache as it is, of earlier versions in part, so that their log-probs are of no version exactly."""
    pool: PoolSection = PoolSection()
    """Where judged groups wait for their step."""
