"""Probes that run inside a sandbox: each prints what it reached, one item a line, or nothing."""

from __future__ import annotations

import http.server
import json
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from mrl.agents.environment import Model
from mrl.agents.sandboxes.providers import (
    Exit,
    Sandbox,
    SandboxLimits,
    find_provider,
    model_variables,
    open_sandbox,
)
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.rewards.code import cgroup

LIMITS = SandboxLimits(memory_mib=256, disk_mib=16, processes=24)
SECRET = "do-not-read-" + "x" * 8
"""Content of all that must not be reached; no probe's text contains it whole."""
PYTHON = "python3"

REACHED: dict[str, str] = {
    "files of the host": """
import os
for path in PATHS:
    if os.path.exists(path): print(path)
""",
    "processes of the host": """
import os
seen = [name for name in os.listdir('/proc') if name.isdigit()]
if len(seen) > 3: print(seen)
for pid in PIDS:
    try: os.kill(pid, 0); print('signal', pid)
    except ProcessLookupError: pass
""",
    "memory and files by other processes": """
import os
for pid in (name for name in os.listdir('/proc') if name.isdigit() and name != str(os.getpid())):
    for part in ('environ', 'root/work/secret', 'cwd/secret', 'cmdline'):
        try: data = open(f'/proc/{pid}/{part}', 'rb').read()
        except OSError: continue
        if SECRET_HEAD.encode() + b'x' * 8 in data: print(pid, part)
""",
    "secrets in the environment": """
import os
for name, value in os.environ.items():
    if SECRET_HEAD in value: print(name)
""",
    "open descriptors": """
import os
for number in range(3, 1024):
    try: print(number, os.readlink(f'/proc/self/fd/{number}'))
    except OSError: pass
""",
    "sockets of the host": """
import socket
for address in SOCKETS:
    one = socket.socket(socket.AF_UNIX)
    try: one.connect(address); print(repr(address))
    except OSError: pass
""",
    "the network": """
import socket
for address in ADDRESSES:
    one = socket.socket()
    one.settimeout(2)
    try: one.connect(tuple(address)); print(address)
    except OSError: pass
try: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).connect(('192.0.2.1', 53)); print('route')
except OSError: pass
""",
    "writable places": """
import os
for folder in ('/', '/usr', '/usr/bin', '/etc', '/dev', '/proc/self', '/opt', '/root', '/home'):
    try: open(folder + '/made', 'w'); print(folder)
    except OSError: pass
for path in ('/etc/passwd', '/proc/self/oom_score_adj', '/proc/self/autogroup', '/proc/sys/kernel/hostname'):
    try: open(path, 'r+'); print(path)
    except OSError: pass
""",
    "refused system calls": """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {
    'ptrace': lambda: libc.ptrace(16, os.getppid(), 0, 0),
    'mount': lambda: libc.mount(b'x', b'/tmp', b'tmpfs', 0, None),
    'unshare': lambda: libc.unshare(0x10000000),
    'chroot': lambda: libc.chroot(b'/tmp'),
    'setns': lambda: libc.setns(os.open('/proc/self/ns/net', 0), 0),
}
for name, call in calls.items():
    child = os.fork()
    if not child:
        os._exit(0 if call() == 0 else 1)
    status = os.waitpid(child, 0)[1]
    if status == 0: print(name)
""",
    "more processes than the limit": """
import os, time
count = 0
try:
    while count < 4 * PROCESSES:
        if os.fork() == 0: time.sleep(600)
        count += 1
except OSError: pass
if count > PROCESSES + 4: print(count)
""",
    "more disk than the limit": """
import os
total = 0
for folder in ('/work', '/tmp', '/dev/shm'):
    try:
        with open(folder + '/fill', 'wb') as file:
            while total < 8 * DISK: total += file.write(b'x' * 2**16)
    except OSError: pass
if total > DISK + 2**20: print(total)
for folder in ('/work', '/tmp', '/dev/shm'): os.unlink(folder + '/fill')
count = 0
try:
    for count in range(200000): open(f'/tmp/{count}', 'w').close()
except OSError: pass
if count > DISK // 4096: print(count, 'files')
""",
}  # fmt: skip


@contextmanager
def guarded() -> Iterator[Callable[[str], str]]:
    """Make what probes look for on this machine; yield a function that completes a probe's text."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        (folder / "secret").write_text(SECRET)
        (folder / "secret").chmod(0o644)
        abstract = f"\0mrl-test-{os.getpid()}"
        places = [str(folder / "socket"), abstract]
        with socket.create_server(("0.0.0.0", 0)) as listener:
            servers = [socket.socket(socket.AF_UNIX) for _ in places]
            for server, place in zip(servers, places, strict=True):
                server.bind(place)
                server.listen()
            os.chmod(folder / "socket", 0o777)
            port = listener.getsockname()[1]
            values = {
                "PATHS": [
                    str(folder / "secret"),
                    str(Path(__file__).parents[2]),
                    "/root/.ssh",
                    "/var",
                    "/run",
                ],
                "PIDS": [os.getpid(), os.getppid()],
                "SECRET_HEAD": SECRET[:12],
                "SOCKETS": [*places, "/var/run/docker.sock", "/run/dbus/system_bus_socket"],
                "ADDRESSES": [["127.0.0.1", port], [_own_address(), port], ["192.0.2.1", 53]],
                "PROCESSES": LIMITS.processes,
                "DISK": LIMITS.disk_mib * 2**20,
            }
            head = "".join(f"{key} = {value!r}\n" for key, value in values.items())
            yield lambda probe: head + probe
            for server in servers:
                server.close()


@contextmanager
def answering(reply: str | None = None) -> Iterator[Model]:
    """Serve a model's address, whose answers have this content, or are the requests' bodies."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            data = self.rfile.read(int(self.headers["Content-Length"]))
            if reply is not None:
                data = json.dumps({"choices": [{"message": {"content": reply}}]}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            """Stay silent."""

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield Model(f"http://127.0.0.1:{server.server_port}", "key")
        finally:
            server.shutdown()
            thread.join()


PROBE_MARK = f"probe-of-{os.getpid()}"
"""Argument of probes, by which a test knows its own among the machine's processes."""


def probe(sandbox: Sandbox, text: str, seconds: float = 60.0) -> Exit:
    """Run a probe's whole text in a sandbox."""
    sandbox.write({"probe.py": WorkFile(text.encode())})
    return sandbox.run([PYTHON, "probe.py", PROBE_MARK], seconds=seconds)


ECHO = """
import os, threading, urllib.request
def send(size):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/echo", os.urandom(1) * size)
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    with urllib.request.urlopen(request) as answer: data = answer.read()
    if data != request.data: print(size, len(data))
threads = [threading.Thread(target=send, args=(size,)) for size in (1, 10, 3_000_000, 400_000) * 5]
for thread in threads: thread.start()
for thread in threads: thread.join()
print("done")
"""
"""Program that sends large messages to the model at once, and checks that they come back."""


def echoes(sandbox: Sandbox) -> str:
    """Run ECHO in a sandbox whose model is `answering()`; return its output."""
    sandbox.write({"echo.py": WorkFile(ECHO.encode())})
    return sandbox.run([PYTHON, "echo.py"], seconds=120.0, env=model_variables(sandbox)).output


def sleepers(seconds: str) -> list[psutil.Process]:
    """Return the processes `sleep SECONDS` of this machine."""
    return [
        process
        for process in psutil.process_iter(["cmdline"])
        if process.info["cmdline"] == ["sleep", seconds]
    ]


def is_running(process: psutil.Process) -> bool:
    """Return True if a process has not ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def until(condition: Callable[[], bool], seconds: float = 120.0) -> None:
    """Wait until a condition is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _own_address() -> str:
    """Return an address of this machine that is not its loopback's, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as one:
        try:
            one.connect(("192.0.2.1", 53))
        except OSError:
            return "127.0.0.1"
        return one.getsockname()[0]


def main() -> None:
    """Run the probes of standard input as a plain user; write the end of each to standard output."""
    texts = json.load(sys.stdin)
    find_provider("bubblewrap")  # imports it: the checkout may be root's alone
    if os.geteuid() == 0:
        os.chdir("/")
        os.setgroups([])
        os.setresgid(65534, 65534, 65534)
        os.setresuid(65534, 65534, 65534)
    cgroup.make_cgroup = lambda **limits: None  # as for a plain user of a cluster
    ends = []
    for text in texts:
        with open_sandbox(limits=LIMITS) as sandbox:
            done = probe(sandbox, text)
            ends.append([done.status, done.output])
    json.dump(ends, sys.stdout)


if __name__ == "__main__":
    main()
