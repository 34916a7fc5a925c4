"""`mrl train` with engines that are left at an old version: python -m benchmarks.stale_engines STEP CONFIG ...

From the sync after STEP on, engines say the new version and keep the weights they have, as where a captured graph or a
copy made while loading goes on reading old memory. No digest sees that, because what was received was right.
"""

from __future__ import annotations

import sys

from mrl.cli import main
from mrl.launch.workers.colocated import Hybrid


def leave_engines_behind(last: int) -> None:
    """Hybrids of this process sync up to version `last`, and only say so for later ones."""
    sync = Hybrid.sync

    def sync_or_pretend(self: Hybrid, version: int) -> dict[str, float]:
        if version <= last:
            return sync(self, version)
        self.rollout.wake("weights")
        self.rollout.on_all(lambda actor: actor.engine._become_visible(version))
        self.rollout.wake("kv_cache")
        self.version = version
        return {"sync/seconds": 0.0}

    Hybrid.sync = sync_or_pretend


if __name__ == "__main__":
    leave_engines_behind(int(sys.argv[1]))
    raise SystemExit(main(["train", *sys.argv[2:]]))
