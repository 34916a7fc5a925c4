"""`mrl` with injected faults, to see how a death is detected and reported and whether the next start resumes.

`MRL_FAULT=update:train-1:2 python -m benchmarks.soak.faults train CONFIG` kills trainer rank 1 in the run's
second update phase. Commas separate faults. Targets: driver, train-N, engine-N (N counts dp ranks), vllm-N (a
worker process of engine N; needs rollout.tp above 1), rollouts-N (the rollout worker of node N), reward, host
(of environments), guest (an episode's process), tool (an episode's tool server), watcher (which cleans up
after the driver), and gcs, raylet and agent of a Ray that the run started. All must run on the driver's node;
those of environments and rewards below the driver (rollout.workers: driver).
The target is stopped when the phase begins, so that its work stays undone, and killed a moment later.
With HOW@SECONDS, it runs for so long, then is killed (`kill`), receives SIGTERM (`term`), or is stopped for
PAUSE_SECONDS (`pause`) or forever (`stop`); the phase waits for that. A record precedes it in faults.jsonl.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil

from mrl.cli import main
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.commands import train
from mrl.launch.commands.start_run import Parts
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.colocated import Hybrid
from mrl.observe.phases import STREAM_PHASES, Event, PhaseClock

VARIABLE = "MRL_FAULT"
STOPPED_SECONDS = 0.3
NOTICE_SECONDS = 1.0
"""Time for Ray to report the death to the driver before the phase ends."""
PAUSE_SECONDS = 3.0
"""Far below all deadlines."""
KINDS = {"driver": False, "reward": False, "host": False, "guest": False, "tool": False}
KINDS |= {"watcher": False, "gcs": False, "raylet": False, "agent": False}
KINDS |= {"train": True, "engine": True, "vllm": True, "rollouts": True}
"""Kind of target -> True if it has a number."""
HOST = ("mrl.agents.environment_host",)
"""An episode's process is forked from the host and keeps its command."""
CHILDREN = {"reward": [("mrl.rewards.pool.reward_worker",)], "host": [HOST], "guest": [HOST, HOST]}
CHILDREN["tool"] = [HOST, HOST, ("",)]
CHILDREN |= {"watcher": [("session_watcher.py",)]}
RAYLET = ("raylet/raylet",)
CHILDREN |= {"gcs": [("gcs/gcs_server",)], "raylet": [RAYLET], "agent": [RAYLET, ("DashboardAgent",)]}
"""Commands from the driver down to each kind of its processes."""
VLLM_WORKER = ("VLLM::Worker", "spawn_main")
FIND_SECONDS = 60.0
"""Deadline for an episode or its tool to start, and for an actor to return its pid."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP, "stop": signal.SIGSTOP}


@dataclasses.dataclass
class InjectedFault:
    """A fault of one process in a phase."""

    phase: str
    target: str
    count: int
    """Number of the phase in this process, from 1."""
    how: str = "kill"
    """A name in SIGNALS."""
    after: float | None = None
    """Seconds of the phase before it; None: stop the target when the phase begins, kill it a moment later."""

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """Parse a fault; raise ConfigError for any other text."""
        match = re.fullmatch(r"(\w+):([a-z]+)(?:-(\d+))?(?::(\d+)(?::(\w+)@(\d+(?:\.\d+)?))?)?", text)
        phase, kind, number, count, how, after = match.groups() if match else [""] * 6
        if (
            phase not in STREAM_PHASES
            or KINDS.get(kind) is not bool(number)
            or (how or "kill") not in SIGNALS
        ):
            raise ConfigError(
                f"{VARIABLE} has {text!r}; a fault is PHASE:TARGET:COUNT or PHASE:TARGET:COUNT:HOW@SECONDS "
                f"with a phase of {', '.join(STREAM_PHASES)}, a target of "
                f"{', '.join(k + '-N' * v for k, v in KINDS.items())} and HOW of {', '.join(SIGNALS)}"
            )
        target = f"{kind}-{number}" if number else kind
        return cls(phase, target, int(count or 1), how or "kill", float(after) if after else None)


class FaultInjector:
    """Listener of the phases that injects the faults."""

    def __init__(
        self, faults: Sequence[InjectedFault], hybrid: Hybrid, clock: PhaseClock, record: Path
    ) -> None:
        self._faults, self._hybrid, self._clock, self._record = faults, hybrid, clock, record
        self._seen: collections.Counter[str] = collections.Counter()
        self._thread: threading.Thread | None = None

    def __call__(self, event: Event) -> None:
        phase = self._clock.current
        if event == "enter":
            self._seen[phase] += 1
            for fault in self._faults:
                if (fault.phase, fault.count) == (phase, self._seen[phase]):
                    self._begin(fault)
        elif event == "leave" and self._thread is not None:
            self._thread.join()
            self._thread = None
            time.sleep(NOTICE_SECONDS)

    def _begin(self, fault: InjectedFault) -> None:
        find = self._finder(fault.target)
        if fault.after is None and fault.target != "driver":
            os.kill(find(), signal.SIGSTOP)
        self._thread = threading.Thread(target=self._end, args=(fault, find), name="fault")
        self._thread.start()

    def _end(self, fault: InjectedFault, find: Callable[[], int]) -> None:
        time.sleep(STOPPED_SECONDS if fault.after is None else fault.after)
        pid = find()
        row = {**dataclasses.asdict(fault), "during": self._clock.current, "pid": pid, "time": time.time()}
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        if fault.how == "pause":  # the target may be this process
            subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {pid}"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[fault.how])

    def _finder(self, target: str) -> Callable[[], int]:
        """Return a function that finds the target's pid; an actor returns its pid now, in this thread."""
        kind, _, number = target.partition("-")
        if kind == "driver":
            return os.getpid
        if kind in CHILDREN:
            return lambda: _descendant(os.getpid(), *CHILDREN[kind])
        rollout = self._hybrid.rollout
        group = {"train": self._hybrid.train, "rollouts": rollout.workers}.get(kind, rollout)
        if group is None:
            raise ConfigError(f"{VARIABLE} has {target!r}, which needs rollout.workers = node")
        pid = _actor_pid(group, int(number))
        return (lambda: _descendant(pid, VLLM_WORKER, deep=True)) if kind == "vllm" else (lambda: pid)


def requested() -> list[InjectedFault]:
    """Return the faults of MRL_FAULT; none if it is not set."""
    return [
        InjectedFault.parse(part.strip()) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()
    ]


@contextlib.contextmanager
def injected(faults: Sequence[InjectedFault]) -> Iterator[None]:
    """Inject these faults into this process's runs, before other listeners of the phases are called."""
    assembled = train.assembled

    @contextlib.contextmanager
    def disturbed(config: Config, **options: Any) -> Iterator[Parts]:
        with assembled(config, **options) as parts:
            record = Path(config.run_folder) / "faults.jsonl"
            parts.clock.listeners.insert(0, FaultInjector(faults, parts.hybrid, parts.clock, record))
            yield parts

    with patch.object(train, "assembled", disturbed if faults else assembled):
        yield


def _actor_pid(group: ActorGroup, number: int) -> int:
    return group.start_on(number, lambda actor: os.getpid()).future().result(FIND_SECONDS)


def _descendant(pid: int, *generations: tuple[str, ...], deep: bool = False) -> int:
    """Wait for a process of the last generation (one of its words is in its name or command); return its pid.

    `deep`: other processes may be between two generations, like the server that forks vLLM's workers."""
    deadline = time.monotonic() + FIND_SECONDS
    while time.monotonic() < deadline:
        level = [psutil.Process(pid)]
        for words in generations:
            level = [child for parent in level for child in _children(parent, deep) if _says(child, words)]
        if level:
            return level[0].pid
        time.sleep(0.05)
    raise ConfigError(f"{VARIABLE}: process {pid} has no descendant with {generations} in their commands")


def _children(process: psutil.Process, deep: bool) -> list[psutil.Process]:
    with contextlib.suppress(psutil.Error):
        return process.children(recursive=deep)
    return []


def _says(process: psutil.Process, words: tuple[str, ...]) -> bool:
    with contextlib.suppress(psutil.Error):
        return any(word in " ".join([process.name(), *process.cmdline()]) for word in words)
    return False


if __name__ == "__main__":
    with injected(requested()):
        sys.exit(main())
