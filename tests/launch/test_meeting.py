"""How a launcher's nodes meet in a store with keys of an earlier start, and learn of each other's end."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from mrl.cpu import gloo
from mrl.errors import ConfigError, WorkerLost
from mrl.launch import torchrun
from mrl.launch.cluster import node_facts
from tests.support.runs import until


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "POLL_SECONDS", 0.05)


def met(port: int, number: int, num_nodes: int, stores: dict[int, Any]) -> None:
    client = TCPStore("127.0.0.1", port, is_master=False)
    stores[number] = torchrun._of_this_start(client, number, num_nodes, 30.0)


def test_nodes_that_start_again_over_one_store_read_nothing_of_the_last_start() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    starts = []
    for num_nodes in (3, 2, 3):
        server.set(f"asks-{server.add('asking', 1)}", "one that died before it was answered")
        stores: dict[int, Any] = {}
        nodes = [
            threading.Thread(target=met, args=(server.port, number, num_nodes, stores))
            for number in reversed(range(num_nodes))
        ]
        for node in nodes:
            node.start()
        for node in nodes:
            node.join(60)
        assert sorted(stores) == list(range(num_nodes))
        assert not any(store.check(["exit_code"]) for store in stores.values())
        stores[0].set("exit_code", str(len(starts)))
        starts.append(stores)
    for number, stores in enumerate(starts):
        assert {store.get("exit_code") for store in stores.values()} == {str(number).encode()}


def test_a_node_that_never_comes_ends_the_meeting() -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(WorkerLost, match=r"0 of 1 nodes met node 0 within 0\.2 s"):
        torchrun._of_this_start(server, 0, 2, 0.2)


def test_gloo_listens_where_the_node_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_HOST_IP", "")
    for name in (names := ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")):
        monkeypatch.setenv(name, "")  # what is set here goes with the test
        monkeypatch.delenv(name)
    node_facts.listen_on_own_node("127.0.0.1")
    assert [os.environ[name] for name in names] == ["lo", "lo"], "of a run on one machine, nothing else"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,no-such-interface")
    node_facts.listen_on_own_node("127.0.0.1")
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo,no-such-interface", "the user's is kept"
    gloo._devices.cache_clear()
    try:
        with pytest.raises(RuntimeError, match="no-such-interface"):
            gloo._devices()
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
        assert len(gloo._devices()) == 1
    finally:
        gloo._devices.cache_clear()


PATIENT = """
import os, pathlib, signal, sys, time
heard = pathlib.Path(sys.argv[1])
def handle(number, frame):
    with heard.open("a") as file:
        file.write(f"{number}\\n")
    if len(heard.read_text().split()) > 2:
        os._exit(7)
signal.signal(signal.SIGTERM, handle)
heard.write_text(f"{os.getpgrp()}\\n")
time.sleep(120)
"""
"""A driver that records its process group and signals, and ends at its second SIGTERM."""


@pytest.mark.parametrize("first", ["node", "signal"])
def test_a_node_that_is_told_to_end_and_torchruns_signal_are_one_request(first: str, tmp_path: Path) -> None:
    """The driver gets it once; the next request is the second one, at which it exits at once."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    heard = tmp_path / "heard"
    codes: list[int] = []

    def requests() -> None:
        def is_heard(number: int) -> bool:
            return heard.is_file() and len(heard.read_text().split()) > number

        until(lambda: is_heard(0), every=0.02)
        for source in ("node", "signal") if first == "node" else ("signal", "node"):
            if source == "node":
                store.set("told to end", "yes")
            else:
                os.kill(os.getpid(), signal.SIGTERM)
            until(lambda: is_heard(1), every=0.02)
            for _ in range(2):  # node 0 looks again, because unhandled signals would merge into one
                store.delete_key("alive")
                until(lambda: store.check(["alive"]), every=0.02)
        codes.append(len(heard.read_text().split()))
        os.kill(os.getpid(), signal.SIGTERM)

    asking = threading.Thread(target=requests, daemon=True)
    before = signal.signal(signal.SIGTERM, lambda *_: None)  # one that comes too late is none for the tests
    try:
        asking.start()
        assert torchrun._run([sys.executable, "-c", PATIENT, str(heard)], dict(os.environ), store) == 7
        asking.join(60)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert codes == [2], "its group and one SIGTERM"
    assert int(heard.read_text().split()[0]) != os.getpgrp()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_node_that_is_told_to_end_says_so_and_stays_until_the_driver_has_left(number) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    reports: list[bool] = []
    before = signal.getsignal(number)

    def node_0() -> None:
        until(lambda: signal.getsignal(number) is not before, every=0.02)
        os.kill(os.getpid(), number)
        until(lambda: store.check(["told to end"]), every=0.02)
        reports.append(True)
        store.set("exit_code", "143")

    telling = threading.Thread(target=node_0, daemon=True)
    telling.start()
    assert torchrun._follow(store, 1) == 143
    telling.join(60)
    assert reports == [True] and signal.getsignal(number) is before
    assert store.add("readers", 0) == 1, "node 0 waits for those that have read it"


class Swallowed:
    """A store behind a network that neither responds nor refuses."""

    def check(self, keys: list[str]) -> bool:
        threading.Event().wait()
        raise AssertionError(keys)


def test_a_node_whose_questions_are_swallowed_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "SILENCE_SECONDS", 0.3)
    with pytest.raises(WorkerLost, match=r"node 1: no heartbeat from node 0 for 0\.3 s"):
        torchrun._follow(Swallowed(), 1)


def test_a_store_that_strangers_read_does_not_have_the_cluster_s_secret(tmp_path, monkeypatch) -> None:
    """The secret is in the run folder, for this user only; the store's content is useless without it."""
    monkeypatch.delenv(torchrun.TOKEN, raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun.publish_head(store, tmp_path / "run", "10.0.0.1:12000 12000")
    where, token = torchrun.read_head(store, tmp_path / "run", 1, 30.0)
    assert where == "10.0.0.1:12000 12000" and len(token) == 64
    secret = tmp_path / "run" / torchrun.SECRET_FILE
    assert secret.read_text() == token and secret.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in secret.parent.iterdir()] == [secret.name]
    keys = store.list_keys()  # type: ignore[attr-defined] not in torch's stubs
    assert keys and not any(token in store.get(key).decode() for key in keys)


def test_nodes_take_the_secret_of_their_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv(torchrun.TOKEN, "one secret " * 4)
    torchrun.publish_head(store, tmp_path / "run", "10.0.0.1:12000 12000")
    assert torchrun.read_head(store, tmp_path / "run", 1, 30.0)[1] == "one secret " * 4
    assert not (tmp_path / "run").exists()
    monkeypatch.setenv(torchrun.TOKEN, "another secret " * 4)
    with pytest.raises(ConfigError, match="node 1 does not have the secret of node 0's Ray"):
        torchrun.read_head(store, tmp_path / "run", 1, 30.0)


@pytest.mark.parametrize("attack", ["another head", "another secret", "a readable file", "a link"])
def test_who_reaches_the_store_or_the_folder_sends_no_node_to_another_head(
    attack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node would send that head the secret and run its commands."""
    monkeypatch.delenv(torchrun.TOKEN, raising=False)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    torchrun.publish_head(store, tmp_path, "10.0.0.1:12000 12000")
    secret = tmp_path / torchrun.SECRET_FILE
    if attack == "another head":
        signature = store.get("cluster").decode().split()[-1]
        store.set("cluster", f"10.6.6.6:12000 12000 {signature}")
    elif attack == "another secret":
        store.set("cluster", f"10.6.6.6:12000 12000 {torchrun._signed('10.6.6.6:12000 12000', 'mine')}")
    elif attack == "a readable file":
        secret.chmod(0o644)
    else:
        secret.rename(tmp_path / "elsewhere")
        secret.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"its file {torchrun.SECRET_FILE}"):
        torchrun.read_head(store, tmp_path, 1, 0.3)
