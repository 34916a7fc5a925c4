"""The stream schedule: how far generation may run ahead of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.section import Section


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
