"""Check that users' reward functions can be imported, in reward workers: an import may do anything."""

from __future__ import annotations

import select
from collections.abc import Sequence

from mrl.errors import ConfigError
from mrl.processes.worker_process import WorkerProcess
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.reward_part import RewardPart

DEADLINE_SECONDS = 60.0


def check_plugins(verifiers: Sequence[RewardPart]) -> None:
    """Raise ConfigError with one line per plug-in that is missing or does not fit its style."""
    faults = dict.fromkeys(_fault(part) for part in verifiers if part.kind == "plugin")
    if lines := [fault.replace("\n", " ") for fault in faults if fault]:
        raise ConfigError("\n".join(lines))


def _fault(part: RewardPart) -> str:
    kind = reward_kind(part)
    worker, ended = WorkerProcess("mrl.rewards.pool.reward_worker"), None
    worker.send((kind, kind.used_stages()[0]))
    try:
        while select.select([worker.replies], [], [], DEADLINE_SECONDS)[0]:
            for reply in worker.read_replies():
                return str(reply.get("broken", ""))
        return f"reward.path = {part.path!r}: importing it took more than {DEADLINE_SECONDS:g} s"
    except EOFError:
        ended = worker.end()
        return f"reward.path = {part.path!r}: importing it ended the process with {ended}"
    finally:
        if ended is None:
            worker.end()
