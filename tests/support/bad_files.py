"""Check that a program answers a bad file with a result or one error sentence, within time and memory."""

from __future__ import annotations

import contextlib
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType

import psutil

from mrl.errors import MrlError
from tests.support.mutations import Mutator

SECONDS = 20
"""Limit of processor time, so that the machine's load does not count."""
WAITING_SECONDS = 60
"""Limit of wall time, for a file that never ends or never begins."""
BYTES = 4 * 2**30
"""Limit of memory beyond the process's own."""
LONGEST = 20_000
"""Limit of an error's characters."""


class TooLong(BaseException):
    """Derives from BaseException so that no `except Exception` catches it."""


def outcome[T](call: Callable[[], T]) -> tuple[T | None, str]:
    """Return (the result, "") or (None, the sentence of its MrlError); let other exceptions pass."""
    with _bounds():
        try:
            return call(), ""
        except MrlError as error:
            message = str(error)
    assert message.strip() and "Traceback" not in message, f"{message!r} is no sentence"
    assert len(message) < LONGEST, f"{len(message)} characters are no sentence: {message[:300]}"
    return None, message


def failures(kind: str, numbers: Iterable[int], case: Callable[[Mutator, Path], None], folder: Path) -> str:
    """Run the case for each number with a seeded mutator in a folder; report those that failed."""
    reports: list[str] = []
    for number in numbers:
        seed = f"{kind}-{number}"
        mutator, case_folder = Mutator(seed), folder / seed
        case_folder.mkdir()
        print(seed, flush=True)  # the last line if the case hangs
        try:
            case(mutator, case_folder)
        except (Exception, TooLong) as error:
            where = "".join(traceback.format_exception(error)[-8:])
            reports.append(f"seed {seed} ({', '.join(mutator.told)}):\n{where}")
    return "\n".join(reports)


@contextlib.contextmanager
def _bounds() -> Iterator[None]:
    def end(number: int, frame: FrameType | None) -> None:
        raise TooLong(f"{SECONDS} s of processor time, or {WAITING_SECONDS} s of waiting")

    limits = resource.getrlimit(resource.RLIMIT_AS)
    handlers = {number: signal.signal(number, end) for number in (signal.SIGPROF, signal.SIGUSR2)}
    waiting = threading.Timer(WAITING_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGUSR2))
    waiting.daemon = True
    resource.setrlimit(resource.RLIMIT_AS, (psutil.Process().memory_info().vms + BYTES, limits[1]))
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    waiting.start()
    try:
        yield
    finally:
        waiting.cancel()
        waiting.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        resource.setrlimit(resource.RLIMIT_AS, limits)
