"""A store at a loopback address is reachable from this machine only."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.ranks import free_port

RANKS = """
import datetime, json, sys
from concurrent.futures import ThreadPoolExecutor
import psutil
from torch.distributed import rendezvous
from mrl.resharding.wire.loopback_store import keep_to_loopback

def stores(port):  # where those of two groups at one port are heard, and what one finds in the other's
    def store(rank):
        return next(rendezvous(f"tcp://127.0.0.1:{port}", rank, 2, timeout=datetime.timedelta(seconds=60)))[0]

    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(store, range(2))
        second.set("said", "by the second")
        again = next(threads.map(store, range(2)))
    own = psutil.Process().net_connections("inet")
    heard = {each.laddr.ip for each in own if each.laddr.port == port and not each.raddr}
    return sorted(heard), again.get("said").decode()

torchs = stores(int(sys.argv[1]))
keep_to_loopback()
keep_to_loopback()
print(json.dumps([torchs, stores(int(sys.argv[2]))]))
"""


def test_a_store_of_loopback_is_heard_there_alone_and_serves_every_group_of_its_port() -> None:
    words = [sys.executable, "-c", RANKS, str(free_port()), str(free_port())]
    done = subprocess.run(words, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    torchs, ours = json.loads(done.stdout.splitlines()[-1])
    assert ours == [["127.0.0.1"], "by the second"]
    assert torchs[0] != ["127.0.0.1"], "torch does so itself: loopback_store.py can go"
