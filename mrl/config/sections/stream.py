"""Settings of the stream schedule: how far generation may run ahead of training."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from mrl.section import Section


class StreamSection(Section):
    """Staleness of the stream schedule; only read with loop.schedule = stream."""

    max_staleness: int = Field(default=1, ge=0)
    """Limit the staleness of any trained token to this many versions (with sync_every 1), by admitting
    prompts later, never by dropping tokens; 0 is on-policy."""
    sync_every: int = Field(default=1, ge=1)
    """Sync weights at least every this many steps; n adds n - 1 versions to the largest staleness. A
    checkpoint, a validation and, on shared slots, an incomplete batch sync earlier."""
    kv_cache: Literal["recompute", "keep"] = "recompute"
    """Continue unfinished responses after a weight sync on a KV cache recomputed by the new version
    (recompute), or on the cache as it is, partly of earlier versions (keep: log-probs then match no version
    exactly)."""
