"""Waiting for remote calls: always with a deadline, and an error that names the first cause.

When one rank dies its peers fail a moment later with broken collectives. So after the first failure the others get a short
grace, and a death is reported before the errors that follow from it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from mrl.errors import MrlError, WorkerLost
from mrl.observe.phases import PhaseClock

GRACE_SECONDS = 8.0
"""For what still runs after a first failure: an engine that lost a worker process needs some seconds to notice and leave."""
POLL_SECONDS = 1.0


def wait_all(
    calls: Mapping[str, Any],
    *,
    phase: str,
    deadline_seconds: float,
    clock: PhaseClock | None = None,
) -> dict[str, Any]:
    """Results of remote calls by worker name ("trainer rank 1", "engine 0").

    Raises WorkerLost for a death or a missed deadline, else the worker's own error; names worker and phase.
    `clock` counts what was spent waiting.
    """
    import ray

    names = {ref: name for name, ref in calls.items()}
    pending, start = list(names), time.monotonic()
    results: dict[str, Any] = {}
    while pending:
        done, pending = ray.wait(pending, num_returns=len(pending), timeout=0)
        if failed := _take(done, names, results):
            _raise_first(failed, pending, names, phase)
        if not pending:
            break
        if time.monotonic() - start > deadline_seconds:
            late = ", ".join(names[r] for r in pending)
            raise WorkerLost(f"{late} did not answer within {deadline_seconds:g} s in phase {phase}")
        with clock.waiting() if clock else contextlib.nullcontext():
            ray.wait(pending, num_returns=1, timeout=POLL_SECONDS)
    return {name: results[name] for name in calls}


def _take(done: list[Any], names: Mapping[Any, str], results: dict[str, Any]) -> dict[str, BaseException]:
    """The values of ended calls into `results`, each unpacked once; the errors of those that failed."""
    import ray

    failures = {}
    for ref in done:
        try:
            results[names[ref]] = ray.get(ref, timeout=0)
        except Exception as error:  # sorted by kind in _raise_first
            failures[names[ref]] = error
    return failures


def _raise_first(
    failed: dict[str, BaseException], pending: list[Any], names: Mapping[Any, str], phase: str
) -> None:
    import ray

    deadline = time.monotonic() + GRACE_SECONDS
    while pending and time.monotonic() < deadline:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        failed |= _take(done, names, {})
    name, error = min(failed.items(), key=lambda item: _severity(item[1]))
    if _severity(error) == 0:
        raise WorkerLost(f"{name} died in phase {phase}: {first_line(error)}") from error
    cause = getattr(error, "cause", None)
    if isinstance(cause, MrlError):
        raise type(cause)(f"{name}, phase {phase}: {cause}") from error
    raise WorkerLost(f"{name} failed in phase {phase}: {first_line(cause or error)}\n{error}") from error


def _severity(error: BaseException) -> int:
    """0: a process died; 1: our own typed error; 2: anything else (often a consequence)."""
    from ray.exceptions import RayActorError

    if isinstance(error, RayActorError):
        return 0
    return 1 if isinstance(getattr(error, "cause", None), MrlError) else 2


def first_line(error: BaseException) -> str:
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0] if text else 'no message'}"
