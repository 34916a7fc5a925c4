"""Replaces Python when Ray starts a worker: `client.py SOCKET SCRIPT ARGUMENTS...`.

A fork server (tests/forks/servers.py) runs the script in a process with its imports. If the server does not
respond, this process becomes the requested Python."""

import json
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

ANSWER_SECONDS = 30.0
"""Half of Ray's limit for a worker to report; the other half is for one that starts alone."""


def handed_over(path: str, words: list[str]) -> bool:
    """Return True if the fork server at a socket accepted the script."""
    request = {
        "words": words,
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "oom_score": Path("/proc/self/oom_score_adj").read_text(),  # Ray gives one to what it starts
    }
    data = json.dumps(request).encode()
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.settimeout(ANSWER_SECONDS)
        server.connect(path)
        socket.send_fds(server, [len(data).to_bytes(8, "big")], [0, 1, 2])
        server.sendall(data)
        return bool(server.recv(1))
    return False


if __name__ == "__main__":
    if not handed_over(sys.argv[1], sys.argv[2:]):
        os.execv(sys.executable, [sys.executable, *sys.argv[2:]])
