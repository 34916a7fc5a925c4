"""A store at an address of loopback is reached from this machine alone."""

from __future__ import annotations

import json
import socket
import subprocess
import sys

RANKS = """
import datetime, json, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
from torch.distributed import rendezvous
from mrl.resharding.wire.loopback_store import keep_to_loopback

port, ours = int(sys.argv[1]), sys.argv[2] == "ours"
if ours:
    keep_to_loopback()
    keep_to_loopback()

def store(rank):
    return next(rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, timeout=datetime.timedelta(seconds=60)))[0]

with ThreadPoolExecutor(2) as threads:
    first, second = threads.map(store, range(2))
    second.set("said", "by the second")
    again = next(threads.map(store, range(2)))
own = psutil.Process().net_connections("inet")
heard = {each.laddr.ip for each in own if each.laddr.port == port and not each.raddr}
print(json.dumps([sorted(heard), again.get("said").decode()]))
"""


def stores(whose: str) -> tuple[list[str], str]:
    """Where those of two groups at one port are heard, and what one finds in the other's."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = [sys.executable, "-c", RANKS, str(port), whose]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    heard, said = json.loads(done.stdout.splitlines()[-1])
    return heard, said


def test_a_store_of_loopback_is_heard_there_alone_and_serves_every_group_of_its_port() -> None:
    assert stores("ours") == (["127.0.0.1"], "by the second")
    assert stores("torch's own")[0] != ["127.0.0.1"], "torch does so itself: loopback_store.py can go"
