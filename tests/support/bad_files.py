"""What a program says to a bad file: a result, or one sentence of an error of ours, within bounds of time and memory."""

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
"""Of processor time: what else runs on the machine does not count."""
WAITING_SECONDS = 60
"""By the wall, where nothing is computed at all: a file that never ends or never begins."""
BYTES = 4 * 2**30
"""Of memory beyond what the process has."""
LONGEST = 20_000
"""Characters of a sentence."""


class TooLong(BaseException):
    """No `except Exception` catches it."""


def outcome[T](call: Callable[[], T]) -> tuple[T | None, str]:
    """(what the call gave, "") or (None, the sentence of its MrlError); every other exception passes."""
    with _bounds():
        try:
            return call(), ""
        except MrlError as error:
            said = str(error)
    assert said.strip() and "Traceback" not in said, f"{said!r} is no sentence"
    assert len(said) < LONGEST, f"{len(said)} characters are no sentence: {said[:300]}"
    return None, said


def failures(kind: str, numbers: Iterable[int], case: Callable[[Mutator, Path], None], folder: Path) -> str:
    """Runs the case for each number, with a mutator of its seed and a folder of its own; a report of those that failed, empty where
    none did."""
    found: list[str] = []
    for number in numbers:
        seed = f"{kind}-{number}"
        mutator, own = Mutator(seed), folder / seed
        own.mkdir()
        print(seed, flush=True)  # of a case that hangs the last line
        try:
            case(mutator, own)
        except (Exception, TooLong) as error:
            where = "".join(traceback.format_exception(error)[-8:])
            found.append(f"seed {seed} ({', '.join(mutator.told)}):\n{where}")
    return "\n".join(found)


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
