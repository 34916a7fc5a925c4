"""Fault injection: MRL_FAULT=update:train-1:2 kills trainer rank 1 inside the run's second update phase.

To see before it matters what a death does on a machine: how fast it is found, what is said, whether the next start resumes.
Several faults are separated by commas. Targets: driver, train-N, engine-N, vllm-N (a worker process of engine N; there is one where
rollout.tp is above 1), reward. They must live on the driver's node. The target is stopped as soon as the phase begins, so that
its work in the phase stays undone, and killed a moment later; the phase does not end before that. What was done is written to
faults.jsonl in the run folder just before the kill.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import psutil

from mrl.errors import ConfigError
from mrl.launch.workers.actor_group import ActorGroup
from mrl.launch.workers.colocated import Hybrid
from mrl.observe.phases import STREAM_PHASES, Event, PhaseClock

VARIABLE = "MRL_FAULT"
STOPPED_SECONDS = 0.3
NOTICE_SECONDS = 1.0
"""Left to Ray to tell the driver of the death before the phase ends."""


@dataclasses.dataclass
class Fault:
    """One death to come, of a process in a phase."""

    phase: str
    target: str
    count: int
    """Which occurrence of the phase in this process, from 1."""

    @classmethod
    def parse(cls, text: str) -> Fault:
        phase, target, count = (text.split(":") + ["1"])[:3] if ":" in text else (text, "", "1")
        kind, _, number = target.partition("-")
        known = kind in ("driver", "reward") if not number else kind in ("train", "engine", "vllm")
        if phase not in STREAM_PHASES or not known or not (count + number).isdigit():
            raise ConfigError(
                f"{VARIABLE} has {text!r}; a fault is PHASE:TARGET:COUNT with a phase of {', '.join(STREAM_PHASES)} and a target of "
                "driver, train-N, engine-N, vllm-N, reward"
            )
        return cls(phase, target, int(count))


class FaultInjector:
    """Listens to the phases and does what the faults say."""

    def __init__(self, faults: Sequence[Fault], hybrid: Hybrid, clock: PhaseClock, record: Path) -> None:
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

    def _begin(self, fault: Fault) -> None:
        pid = self._pid_of(fault.target)
        if pid != os.getpid():
            os.kill(pid, signal.SIGSTOP)
        self._thread = threading.Thread(target=self._kill, args=(fault, pid), name="fault")
        self._thread.start()

    def _kill(self, fault: Fault, pid: int) -> None:
        time.sleep(STOPPED_SECONDS)
        row = {**dataclasses.asdict(fault), "during": self._clock.current, "pid": pid, "time": time.time()}
        with self._record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.kill(pid, signal.SIGKILL)

    def _pid_of(self, target: str) -> int:
        kind, _, number = target.partition("-")
        if kind == "driver":
            return os.getpid()
        if kind == "reward":
            return _child(os.getpid(), "mrl.rewards.pool.worker")
        group = self._hybrid.train if kind == "train" else self._hybrid.rollout
        pid = _actor_pid(group, int(number))
        return _child(pid, "VLLM::Worker", "spawn_main") if kind == "vllm" else pid


def requested() -> list[Fault]:
    """What MRL_FAULT asks for; nothing where it is not set."""
    return [Fault.parse(part.strip()) for part in os.environ.get(VARIABLE, "").split(",") if part.strip()]


def install(faults: Sequence[Fault], hybrid: Hybrid, clock: PhaseClock, folder: Path) -> None:
    """Before the other listeners, so that they see what it did."""
    if faults:
        clock.listeners.insert(0, FaultInjector(faults, hybrid, clock, folder / "faults.jsonl"))


def _actor_pid(group: ActorGroup, number: int) -> int:
    import ray

    return ray.get(group.actors[number].__ray_call__.remote(lambda _: os.getpid()), timeout=60)


def _child(pid: int, *words: str) -> int:
    for process in psutil.Process(pid).children():
        if any(word in " ".join(process.cmdline()) for word in words):
            return process.pid
    raise ConfigError(f"{VARIABLE}: process {pid} has no child with one of {words} in its command")
