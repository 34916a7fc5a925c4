"""Clean up after a driver, however it ended: `session_watcher.py FOLDER`; the driver starts it with a pipe as
stdin.

Waits until the driver is gone (the pipe closes), gives the session's processes some seconds to end, kills the
remaining processes of exactly this session, then removes the folder. A process belongs to the session if
MRL_SESSION in its environment is the folder, or if it has a file of the folder open: Ray's agents overwrite
their environment with a process title. The driver itself, which keeps Ray's log open while it exits, is never
killed. A driver that closes writes to the pipe. If one ends without that, the watcher reports it, because Ray
ends a driver whose raylet died or whose GCS has not responded for a minute. Imports only the standard
library: it starts first.
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
"""What a driver writes to the pipe if it ends by itself."""
RESUME_HINT = "the same command resumes from the last checkpoint"
WHY = (
    "it was killed, or Ray ended it because its raylet or GCS was gone; its processes are being ended, and "
    f"{RESUME_HINT}, if there is one"
)


def belongs(pid: int, folder: str) -> bool:
    """Return True if a process belongs to the session; False if its files cannot be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            if os.fsencode(f"MRL_SESSION={folder}") in environment.read().split(b"\0"):
                return True
        files = f"/proc/{pid}/fd"
        return any(os.readlink(f"{files}/{number}").startswith(folder) for number in os.listdir(files))
    except OSError:
        return False


def members(folder: str, spared: set[int]) -> list[int]:
    """Return the session's pids, without the spared ones."""
    pids = {int(name) for name in os.listdir("/proc") if name.isdigit()} - spared
    return [pid for pid in pids if belongs(pid, folder)]


def main(folder: str) -> None:
    os.setsid()
    owner = os.getppid()
    spared = {os.getpid(), owner}
    if sys.stdin.read() != CLOSES:
        with contextlib.suppress(OSError):  # the reader may be gone too
            print(f"mrl: process {owner} ended without closing: {WHY}", file=sys.stderr, flush=True)
    start = time.monotonic()
    while (waited := time.monotonic() - start) < LONGEST_SECONDS:
        remaining = members(folder, spared)
        if not remaining:
            break
        for pid in remaining if waited > GRACE_SECONDS else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1])
