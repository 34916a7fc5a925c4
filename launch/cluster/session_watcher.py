"""Cleans up after a driver, however it ended: `session_watcher.py FOLDER`, started by it with a pipe as
standard input.

Waits until the driver is gone (the pipe closes), gives the session's processes some seconds to follow it,
kills what is left of exactly this session, then removes the folder. A process is the session's when
MRL_SESSION in its environment is the folder, or when it has a file of the folder open: Ray's agents overwrite
their environment with a process title. The driver itself, which keeps Ray's log open while it leaves, is
never killed. One that closes says so in the pipe; of one that ended without a word the watcher says it,
because Ray ends a driver that hands something to a raylet that died, or whose GCS has not answered for a
minute. Imports nothing that is not Python's own: it starts before all else.
"""

import contextlib
import os
import shutil
import signal
import sys
import time

GRACE_SECONDS = 8.0
LONGEST_SECONDS = 40.0
CLOSES = "closes"
"""What a driver says that ends by itself."""
GO_ON = "the same command goes on from the last checkpoint"
WHY = f"it was killed, or Ray ended it, whose raylet or GCS was gone; what it started is ended, and {GO_ON}, if there is one"


def belongs(pid: int, folder: str) -> bool:
    """Whether a process is of the session; not where it cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            if os.fsencode(f"MRL_SESSION={folder}") in environment.read().split(b"\0"):
                return True
        files = f"/proc/{pid}/fd"
        return any(os.readlink(f"{files}/{number}").startswith(folder) for number in os.listdir(files))
    except OSError:
        return False


def members(folder: str, spared: set[int]) -> list[int]:
    """Pids of the session, without those that are spared."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - spared
    return [pid for pid in pids if belongs(pid, folder)]


def main(folder: str) -> None:
    os.setsid()
    owner = os.getppid()
    spared = {os.getpid(), owner}
    if sys.stdin.read() != CLOSES:
        with contextlib.suppress(OSError):  # who reads it may be gone too
            print(f"mrl: process {owner} ended without closing: {WHY}", file=sys.stderr, flush=True)
    start = time.monotonic()
    while (waited := time.monotonic() - start) < LONGEST_SECONDS:
        left = members(folder, spared)
        if not left:
            break
        for pid in left if waited > GRACE_SECONDS else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
