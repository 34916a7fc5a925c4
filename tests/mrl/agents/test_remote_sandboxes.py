"""Sandboxes of a server, over this machine's loopback: they are like local ones, end with both ends of their
connection, and open to nobody without the key."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from mrl.agents.environment import SandboxLost
from mrl.agents.sandboxes.providers import OUTPUT_BYTES, SandboxLimits, TooLarge, find_provider, open_sandbox
from mrl.agents.sandboxes.remote import sandbox_client, sandbox_messages, tunnel
from mrl.agents.sandboxes.remote.sandbox_messages import (
    CALL,
    CLOSED,
    DATA,
    MOST_BYTES,
    OPENED,
    PASSED,
    PATH,
    json_message,
    make_key,
    read_key,
)
from mrl.agents.sandboxes.remote.sandbox_server import ServerOptions
from mrl.agents.sandboxes.remote.sandbox_session import SandboxRules
from mrl.agents.sandboxes.remote.tunnel import Tunnel
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.processes.start import module_command
from tests.support.sandbox_probes import (
    LIMITS,
    REACHED,
    SECRET,
    answering,
    echoes,
    guarded,
    is_running,
    probe,
    sleepers,
    until,
)
from tests.support.sandbox_server import SandboxServer, serving

SECONDS = 120.0
_NUMBERS = iter(range(3_000_000 + os.getpid(), 10_000_000, 100_000))
OPENING = {
    **{"call": "open", "image": None, "limits": {"disk_mib": 16, "boot_seconds": 30}},
    **{"model": False, "folders": []},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SandboxServer]:
    with serving(tmp_path_factory.mktemp("server")) as server:
        yield server


def own_seconds() -> str:
    """Return a duration of `sleep` that no other test has."""
    return str(next(_NUMBERS))


def raw(server: SandboxServer) -> ClientConnection:
    """Connect with the key, and without the client's checks."""
    headers = {"Authorization": f"Bearer {read_key(str(server.key_file))}"}
    return connect(
        server.url.replace("http", "ws") + PATH, additional_headers=headers, compression=None, proxy=None
    )


def sleeping(server: SandboxServer, seconds: str) -> subprocess.Popen[bytes]:
    """Start a client whose sandbox sleeps; return its process."""
    text = f"""
from mrl.agents.sandboxes.providers import open_sandbox
sandbox = open_sandbox("remote", options={server.options!r})
sandbox.run(["sh", "-c", "sleep {seconds} & sleep {seconds}"], seconds=600)
"""
    client = subprocess.Popen([sys.executable, "-c", text], stderr=subprocess.DEVNULL)
    until(lambda: len(sleepers(seconds)) == 2)
    return client


def test_how_a_command_ends(server: SandboxServer) -> None:
    threads = threading.active_count()
    with open_sandbox("remote", limits=LIMITS, options=server.options) as sandbox:
        assert sandbox.describe().startswith(f"{server.url}: bubblewrap: ") and sandbox.model is None
        done = sandbox.run(["sh", "-c", "echo $X; echo err >&2; exit 7"], seconds=SECONDS, env={"X": "out"})
        assert (done.status, done.output, done.timed_out) == (7, "out\nerr\n", False)
        done = sandbox.run(["sleep", "600"], seconds=0.2)
        assert done.timed_out and done.status == 137 and done.seconds < SECONDS
        done = sandbox.run(["sh", "-c", "yes | head -c 3000000; echo end"], seconds=SECONDS)
        assert done.output.endswith("end\n") and len(done.output) == OUTPUT_BYTES
        assert "MemoryError" in probe(sandbox, "x = bytearray(2**30)").output
        with pytest.raises(SandboxLost, match="no-such-command"):
            sandbox.run(["no-such-command"], seconds=SECONDS)
        assert sandbox.run(["true"], seconds=SECONDS).status == 0, "it is still there"
    assert threading.active_count() == threads


def test_files_cross(server: SandboxServer) -> None:
    large = os.urandom(3_000_000)
    files = {
        "a/large": WorkFile(large),
        "run.sh": WorkFile(b"#!/bin/sh\ncat a/large > b; echo x > /tmp/note\n", is_executable=True),
        "empty": WorkFile(kind="folder"),
        "link": WorkFile(b"run.sh", kind="link"),
        "none": WorkFile(),
    }
    with open_sandbox("remote", limits=LIMITS, options=server.options, folders=["/logs"]) as sandbox:
        sandbox.write({"seen": WorkFile(b"x")}, "/logs")
        assert sandbox.run(["cp", "/logs/seen", "/logs/again"], seconds=SECONDS).status == 0
        assert sandbox.read(["again"], "/logs") == {"again": WorkFile(b"x")}
        sandbox.write(files)
        assert sandbox.run(["sh", "-c", "./link && rmdir empty"], seconds=SECONDS).status == 0
        left = sandbox.read(["*"])
        assert left == {path: files[path] for path in ("a/large", "run.sh", "none")} | {"b": WorkFile(large)}
        assert sandbox.read(["*"], "/tmp") == {"note": WorkFile(b"x\n")}
        assert sandbox.read(["nothing"]) == {}
        for size in (LIMITS.disk_mib << 20) - 4_000_000, (LIMITS.disk_mib << 20) + 1:  # there, and here
            with pytest.raises(TooLarge, match="do not fit"):
                sandbox.write({"more": WorkFile(bytes(size))})
    with open_sandbox("remote", limits=SandboxLimits(disk_mib=100), options=server.options) as sandbox:
        sandbox.run(["truncate", "--size", "65M", "large"], seconds=SECONDS)
        with pytest.raises(TooLarge, match="the files to keep"):
            sandbox.read(["large"])
        sandbox.run(["rm", "large"], seconds=SECONDS)
        with pytest.raises(ValueError, match="not a relative path"):
            sandbox.write({"../x": WorkFile()})
        assert sandbox.read(["*"]) == {}, "it is still there"


def test_the_model_is_all_that_is_reached(server: SandboxServer) -> None:
    """Many large messages pass at once, to a model that the server itself does not know."""
    with answering() as model, open_sandbox("remote", model=model, options=server.options) as sandbox:
        assert sandbox.model is not None and sandbox.model.url != model.url
        assert (sandbox.model.key, sandbox.model.name) == (model.key, model.name)
        for _ in range(2):
            assert echoes(sandbox) == "done\n"
        with guarded() as complete:
            for name in ("the network", "sockets of the host", "files of the host", "open descriptors"):
                done = probe(sandbox, complete(REACHED[name]))
                assert (name, done.status, done.output) == (name, 0, "")


def test_a_model_that_is_gone_closes_connections(server: SandboxServer) -> None:
    text = """
import os, urllib.request
try: urllib.request.urlopen(os.environ["OPENAI_BASE_URL"], timeout=60)
except OSError as error: print(type(error).__name__)
"""
    with answering() as model:
        pass
    with open_sandbox("remote", model=model, options=server.options) as sandbox:
        sandbox.write({"probe.py": WorkFile(text.encode())})
        assert sandbox.model is not None
        env = sandbox.model.variables()
        done = sandbox.run(["python3", "probe.py"], seconds=SECONDS, env=env)
        assert done.output in ("RemoteDisconnected\n", "URLError\n", "ConnectionResetError\n")


def test_a_sandbox_ends_with_its_client(server: SandboxServer) -> None:
    seconds = own_seconds()
    client = sleeping(server, seconds)
    sessions = psutil.Process(server.process.pid).children()
    client.kill()
    client.wait()
    until(lambda: not sleepers(seconds))
    until(lambda: not any(map(is_running, sessions)))
    with open_sandbox("remote", options=server.options) as sandbox:
        assert sandbox.run(["true"], seconds=SECONDS).status == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_sandbox_ends_with_its_server(number: signal.Signals, tmp_path: Path) -> None:
    seconds = own_seconds()
    with serving(tmp_path) as server:
        client = sleeping(server, seconds)
        processes = psutil.Process(server.process.pid).children(recursive=True)
        assert len(processes) > 2
        server.process.send_signal(number)
        status = server.process.wait(60)
        assert status == (0 if number != signal.SIGKILL else -9)
        until(lambda: not sleepers(seconds))
        until(lambda: not any(map(is_running, processes)))
        assert client.wait(60) == 1, "a lost sandbox"


def test_a_sandbox_ends_if_its_client_is_silent(tmp_path: Path) -> None:
    seconds = own_seconds()
    with serving(tmp_path, "--lease", "12") as server, sleeping(server, seconds) as client:
        client.send_signal(signal.SIGSTOP)
        try:
            until(lambda: not sleepers(seconds))
        finally:
            client.kill()


def test_a_sandbox_ends_after_its_longest_life(server: SandboxServer) -> None:
    seconds, limits = own_seconds(), SandboxLimits(life_seconds=2.0)
    with (
        pytest.raises(SandboxLost, match="process ended"),
        open_sandbox("remote", limits=limits, options=server.options) as sandbox,
    ):
        sandbox.run(["sleep", seconds], seconds=SECONDS)
    until(lambda: not sleepers(seconds))


def test_a_server_that_is_silent_is_a_lost_sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox_client, "_SILENT_SECONDS", 5.0)
    monkeypatch.setattr(sandbox_client, "_CLOSE_SECONDS", 4.0)
    with serving(tmp_path) as server, open_sandbox("remote", options=server.options) as sandbox:
        server.process.send_signal(signal.SIGSTOP)
        try:
            with pytest.raises(SandboxLost, match="keepalive ping timeout"):
                sandbox.run(["sleep", own_seconds()], seconds=SECONDS)
            with pytest.raises(SandboxLost):
                sandbox.read(["*"])
        finally:
            server.process.send_signal(signal.SIGCONT)


def test_no_more_sandboxes_than_places(tmp_path: Path) -> None:
    with serving(tmp_path, "--sandboxes", "1", "--boots", "1") as server:
        with open_sandbox("remote", options=server.options):
            with pytest.raises(SandboxLost, match="did not answer within"):
                open_sandbox("remote", limits=SandboxLimits(boot_seconds=1.0), options=server.options)
            assert len(psutil.Process(server.process.pid).children()) == 1
        with open_sandbox("remote", options=server.options) as sandbox:
            assert sandbox.run(["true"], seconds=SECONDS).status == 0


def test_a_port_that_is_taken_is_reported(server: SandboxServer) -> None:
    words = ["sandboxes", "--key-file", str(server.key_file), "--listen", server.url.removeprefix("http://")]
    done = subprocess.run(module_command("mrl.cli", *words), capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "Address already in use" in done.stderr


def test_nobody_enters_without_the_key(server: SandboxServer, tmp_path: Path) -> None:
    make_key(str(tmp_path / "other"))
    with pytest.raises(ConfigError, match="refuses the key"):
        open_sandbox("remote", options=server.options | {"key_file": str(tmp_path / "other")})
    key = read_key(str(server.key_file))
    for given, path, status in (
        ({}, PATH, 401),
        ({"Authorization": f"Bearer {key[:-1]}"}, PATH, 401),
        ({"Authorization": f"bearer {key}x"}, PATH, 401),
        ({"Authorization": f"Bearer {key}"}, "/other", 404),
    ):
        with pytest.raises(urllib.error.HTTPError) as error:
            urllib.request.urlopen(urllib.request.Request(server.url + path, headers=given), timeout=60)
        assert error.value.code == status
        error.value.close()
    until(lambda: not psutil.Process(server.process.pid).children())  # of earlier tests


def test_the_key_is_shown_to_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(tmp_path) as server, open_sandbox("remote", options=server.options) as sandbox:
        key = read_key(str(server.key_file)).encode()
        processes = [server.process.pid, *(p.pid for p in psutil.Process(server.process.pid).children())]
        assert len(processes) == 2
        for pid in processes:
            for name in ("cmdline", "environ"):
                assert key not in Path(f"/proc/{pid}/{name}").read_bytes()
        assert key.decode() not in sandbox.run(["env"], seconds=SECONDS).output
    assert key not in server.log.read_bytes()
    assert server.key_file.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("sent", "code"),
    [
        ([b"C" + bytes(MOST_BYTES)], 1009),
        ([json_message({"no": "call"})], 1011),
        ([json_message({"call": "write", "folder": "/etc", "files": []})], 1011),
        ([b"Zx"], 1008),
        ([PASSED], 1008),
        ([OPENED + bytes(4)], 1008),
    ],
    ids=["too large", "no call", "folder", "kind", "no number", "opened"],
)
def test_malformed_messages_end_the_sandbox(sent: list[bytes], code: int, server: SandboxServer) -> None:
    """Whoever has the key: the server itself goes on."""
    with raw(server) as connection:
        connection.send(json_message(OPENING))
        assert b"bubblewrap" in connection.recv(SECONDS, decode=False)
        for message in sent:
            connection.send(message)
        with pytest.raises(ConnectionClosed) as closed:
            connection.recv(SECONDS, decode=False)
        assert closed.value.rcvd is not None and closed.value.rcvd.code == code
    until(lambda: not psutil.Process(server.process.pid).children())
    assert server.process.poll() is None


@pytest.mark.parametrize("sent", [b"Cnot JSON", json_message({"call": "other"}), DATA + b"x"])
def test_mistakes_are_answered(sent: bytes, server: SandboxServer) -> None:
    with raw(server) as connection:
        connection.send(json_message(OPENING))
        connection.recv(SECONDS)
        for _ in range(2):
            connection.send(sent)
            answer = connection.recv(SECONDS, decode=False)
            assert answer[:1] == CALL and b'"error": "ValueError"' in answer


def test_more_files_than_the_disk_are_not_read(server: SandboxServer) -> None:
    with raw(server) as connection:
        connection.send(json_message(OPENING))
        connection.recv(SECONDS)
        listed = [["x", "file", False, (16 << 20) + 1]]
        connection.send(json_message({"call": "write", "folder": "/work", "files": listed}))
        answer = connection.recv(SECONDS, decode=False)
        assert answer[:1] == CALL and b"TooLarge" in answer
        with pytest.raises(ConnectionClosed):
            connection.recv(SECONDS)


def test_the_server_decides_about_images_and_mounts(tmp_path: Path) -> None:
    allowed, other, mounted = tmp_path / "images", tmp_path / "other", tmp_path / "mounted"
    for folder in (allowed / "one", other, mounted):
        folder.mkdir(parents=True)
    (allowed / "two").symlink_to(other)
    (mounted / "file").write_text(SECRET)
    tmp_path.chmod(0o755)
    words = ("--image", f"{allowed}/*", "--mount", f"{mounted}:/opt/mounted")
    with serving(tmp_path, *words) as server:
        with open_sandbox("remote", options=server.options) as sandbox:
            done = sandbox.run(["cat", "/opt/mounted/file"], seconds=SECONDS)
            # Another user's folder cannot be passed if the tests' own folder is private.
            assert done.output == SECRET or "denied" in done.output
        for image in (f"{allowed}/../other", f"{allowed}/two", "/", "--privileged"):
            with pytest.raises(ConfigError, match="does not allow the image"):
                open_sandbox("remote", image=image, options=server.options)
        with pytest.raises(ConfigError, match=r"mrl sandboxes --mount"):
            open_sandbox("remote", mounts={"/usr": "/opt"}, options=server.options)
    rules = SandboxRules("docker", {}, ("python:3.*", "/srv/images/*"), {})
    rules.require_image(None)
    rules.require_image("python:3.12-slim")
    for image in ("python:2", "ubuntu", "-v/:/host"):
        with pytest.raises(ConfigError, match="does not allow"):
            rules.require_image(image)


def test_addresses_and_keys_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "key"
    assert make_key(str(file)) and not make_key(str(file)), "an earlier key is kept"
    key = read_key(str(file))
    assert len(key) >= 43
    for url, reason in (
        ("http://198.51.100.1:8700", "without TLS"),
        (["http://127.0.0.1:1", "http://host:1"], "without TLS"),
        ("https://user:pass@host", "has a password"),
        ("ws://host", "must look like https"),
        ("https://host/path", "must look like https"),
    ):
        with pytest.raises(ConfigError, match=reason):
            find_provider("remote", {"url": url, "key_file": str(file)})
    find_provider("remote", {"url": "http://198.51.100.1:8700", "key_file": str(file), "plain": True})
    with pytest.raises(ConfigError, match="certificate"):
        find_provider("remote", {"url": "https://host", "key_file": str(file), "certificate": "/no/such"})
    rules = SandboxRules("bubblewrap", {}, (), {})
    with pytest.raises(ConfigError, match=r"--listen 0\.0\.0\.0 without TLS"):
        ServerOptions("0.0.0.0", 1, key, rules).context()
    assert ServerOptions("0.0.0.0", 1, key, rules, plain=True).context() is None
    (tmp_path / "link").symlink_to(file)
    (tmp_path / "short").write_text("short")
    (tmp_path / "short").chmod(0o600)
    for name, reason in (("none", "cannot be read"), ("link", "cannot be read"), ("short", "at least 32")):
        with pytest.raises(ConfigError, match=reason):
            read_key(str(tmp_path / name))
    file.chmod(0o640)
    with pytest.raises(ConfigError, match="mode 0600"):
        read_key(str(file))
    monkeypatch.delenv(sandbox_messages.KEY_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=sandbox_messages.KEY_VARIABLE):
        read_key(None)
    monkeypatch.setenv(sandbox_messages.KEY_VARIABLE, key)
    assert read_key(None) == key


def test_connections_are_encrypted_by_a_certificate(tmp_path: Path) -> None:
    certificate, private = tmp_path / "certificate.pem", tmp_path / "private.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"),
            *("-nodes", "-keyout", str(private), "-out", str(certificate), "-days", "2"),
            *("-subj", "/CN=sandboxes", "-addext", "subjectAltName=IP:127.0.0.1"),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    with serving(tmp_path, "--certificate", str(certificate), "--private-key", str(private)) as server:
        assert server.url.startswith("https://")
        options = server.options | {"certificate": str(certificate)}
        with answering() as model, open_sandbox("remote", model=model, options=options) as sandbox:
            assert echoes(sandbox) == "done\n"
        with pytest.raises(SandboxLost, match="CERTIFICATE_VERIFY_FAILED"):
            open_sandbox("remote", options=server.options)
        with pytest.raises(SandboxLost, match=r"127\.0\.0\.1"):
            open_sandbox("remote", options=server.options | {"url": server.url.replace("https", "http")})


def test_a_server_that_is_not_there_is_a_lost_sandbox(tmp_path: Path) -> None:
    make_key(str(tmp_path / "key"))
    with socket.create_server(("127.0.0.1", 0)) as silent:  # its queue accepts, but nobody answers
        for url in (f"http://127.0.0.1:{silent.getsockname()[1]}", "http://127.0.0.1:1"):
            before = threading.active_count()
            with pytest.raises(SandboxLost, match="http://127"):
                open_sandbox(
                    "remote",
                    limits=SandboxLimits(boot_seconds=1.0),
                    options={"url": url, "key_file": str(tmp_path / "key")},
                )
            assert threading.active_count() == before


def test_a_connection_that_takes_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise one program could hold up all other messages of its sandbox."""
    monkeypatch.setattr(tunnel, "STALLED_SECONDS", 0.1)

    async def check() -> None:
        sent: list[bytes] = []

        async def send(message: bytes) -> None:
            sent.append(message)

        inside, outside = socket.socketpair()
        with inside:
            end = Tunnel(send)
            await end.accept(*await asyncio.open_connection(sock=outside))
            number = sent[0][1:]
            for _ in range(400):
                await end.take(PASSED + number + bytes(1 << 16))
                if sent[-1] == CLOSED + number:
                    break
            assert sent == [OPENED + number, CLOSED + number]
            await end.take(PASSED + number + b"late")
            await end.close()

    asyncio.run(asyncio.wait_for(check(), 60))
