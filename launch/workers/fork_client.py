"""Stands for Python where Ray starts a worker: `fork_client.py SOCKET SCRIPT ARGUMENTS...` hands the script to a fork server
(launch/workers/fork_server.py), which runs it in a process that has made its imports.

Without an answer, and where another user listens, this process becomes the Python that was asked for. Imports nothing that is
not Python's own, and few of that.
"""

import json
import os
import socket
import struct
import sys
from contextlib import suppress
from pathlib import Path

ANSWER_SECONDS = 30.0
"""Half of what Ray gives a worker to report in: the other half is for one that starts by itself."""


def handed_over(name: str, words: list[str]) -> bool:
    """Whether the fork server that listens at the abstract socket `name` has taken the script."""
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),  # Ray gives one to what it starts
    }
    data = json.dumps(request).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(ANSWER_SECONDS)
        server.connect("\0" + name)
        _, uid, _ = struct.unpack("3i", server.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
        if uid != os.getuid():
            return False  # an environment has keys in it
        socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(data)
        return bool(server.recv(1))
    return False


if __name__ == "__main__":
    if not handed_over(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
