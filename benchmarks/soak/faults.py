"""`mrl` under faults: `MRL_FAULT=update:train-1:2 python -m benchmarks.soak.faults train CONFIG` kills trainer rank 1 inside the run's
second update phase.

To see before it matters what a death does on a machine: how fast it is found, what is said, whether the next start resumes.
Several faults are separated by commas. Targets: driver, train-N, engine-N (of engines with dp ranks each is counted), vllm-N (a worker
process of engine N; there is one where rollout.tp is above 1), rollouts-N (the rollout worker of node N), reward, host (of the
environment), guest (an episode's process), tool (a tool server of an episode), watcher (what cleans up after the driver), and, of a Ray
that the run has started itself, gcs, raylet and agent. They must live on the driver's node, those of environments and rewards below the
driver (rollout.workers: driver). The target is stopped as soon as the phase begins, so that its work in the phase stays undone, and
killed a moment later.
With a fourth word, HOW@SECONDS, it is let alone for so long, and then killed (`kill`), asked to end (`term`: SIGTERM), stopped for
PAUSE_SECONDS (`pause`) or for good (`stop`). The phase does not end before that. What was done is written to faults.jsonl in the run
folder just before.
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
"""Left to Ray to tell the driver of the death before the phase ends."""
PAUSE_SECONDS = 3.0
"""Far below all deadlines."""
KINDS = {"driver": False, "reward": False, "host": False, "guest": False, "tool": False}
KINDS |= {"watcher": False, "gcs": False, "raylet": False, "agent": False}
KINDS |= {"train": True, "engine": True, "vllm": True, "rollouts": True}
"""Kinds of targets; whether they have a number."""
HOST = ("mrl.agents.environment_host",)
"""An episode's process is forked from the host's and keeps its command."""
CHILDREN = {"reward": [("mrl.rewards.pool.reward_worker",)], "host": [HOST], "guest": [HOST, HOST]}
CHILDREN["tool"] = [HOST, HOST, ("",)]
CHILDREN |= {"watcher": [("session_watcher.py",)]}
RAYLET = ("raylet/raylet",)
CHILDREN |= {"gcs": [("gcs/gcs_server",)], "raylet": [RAYLET], "agent": [RAYLET, ("DashboardAgent",)]}
"""The commands on the way from the driver to processes of its own."""
VLLM_WORKER = ("VLLM::Worker", "spawn_main")
FIND_SECONDS = 60.0
"""For an episode, or its tool, to begin, and for an actor to say its process."""
SIGNALS = {"kill": signal.SIGKILL, "term": signal.SIGTERM, "pause": signal.SIGSTOP, "stop": signal.SIGSTOP}


@dataclasses.dataclass
class InjectedFault:
    """One death to come, of a process in a phase."""

    phase: str
    target: str
    count: int
    """Which occurrence of the phase in this process, from 1."""
    how: str = "kill"
    """A name in SIGNALS."""
    after: float | None = None
    """Seconds of the phase before it; None: the target is stopped at its beginning, and killed a moment later."""

    @classmethod
    def parse(cls, text: str) -> InjectedFault:
        """ConfigError for what is no fault."""
        said = re.fullmatch(r"(\w+):([a-z]+)(?:-(\d+))?(?::(\d+)(?::(\w+)@(\d+(?:\.\d+)?))?)?", text)
        phase, kind, number, count, how, after = said.groups() if said else [""] * 6
        if (
            phase not in STREAM_PHASES
            or KINDS.get(kind) is not bool(number)
            or (how or "kill") not in SIGNALS
        ):
            raise ConfigError(
                f"{VARIABLE} has {text!r}; a fault is PHASE:TARGET:COUNT or PHASE:TARGET:COUNT:HOW@SECONDS with a phase of "
                f"{', '.join(STREAM_PHASES)}, a target of {', '.join(k + '-N' * v for k, v in KINDS.items())} and HOW of {', '.join(SIGNALS)}"
            )
        target = f"{kind}-{number}" if number else kind
        return cls(phase, target, int(count or 1), how or "kill", float(after) if after else None)


class FaultInjector:
    """Listens to the phases and does what the faults say."""

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
        if fault.how == "pause":  # this process may be the one that is stopped
            subprocess.Popen(["sh", "-c", f"sleep {PAUSE_SECONDS}; kill -CONT {pid}"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, SIGNALS[fault.how])

    def _finder(self, target: str) -> Callable[[], int]:
        """What gives the target's pid; an actor is asked for its own now, in this thread."""
        kind, _, number = target.partition("-")
        if kind == "driver":
            return os.getpid
        if kind in CHILDREN:
            return lambda: _descendant(os.getpid(), *CHILDREN[kind])
        rollout = self._hybrid.rollout
        group = {"train": self._hybrid.train, "rollouts": rollout.workers}.get(kind, rollout)
        if group is None:
            raise ConfigError(
                f"{VARIABLE} has {target!r}: there are rollout workers only with rollout.workers = node"
            )
        pid = _actor_pid(group, int(number))
        return (lambda: _descendant(pid, VLLM_WORKER, deep=True)) if kind == "vllm" else (lambda: pid)


def requested() -> list[InjectedFault]:
    """What MRL_FAULT asks for; nothing where it is not set."""
    return [
        InjectedFault.parse(part.strip()) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()
    ]


@contextlib.contextmanager
def injected(faults: Sequence[InjectedFault]) -> Iterator[None]:
    """Let the runs of this process have these faults, which come before what else listens to the phases."""
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
    """The first process of the last generation, each of which has one of its words in its name or command; waited for. `deep`: others may
    lie between two generations, as a server does that forks vLLM's workers."""
    deadline = time.monotonic() + FIND_SECONDS
    while time.monotonic() < deadline:
        found = [psutil.Process(pid)]
        for words in generations:
            found = [child for each in found for child in _children(each, deep) if _says(child, words)]
        if found:
            return found[0].pid
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
