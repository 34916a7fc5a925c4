"""Nothing outside a sandbox can be reached from inside, and nothing of it remains: with a cgroup, without
one, and for a plain user."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mrl.agents.environment import SandboxLost
from mrl.agents.sandboxes import bubblewrap
from mrl.agents.sandboxes.door import MAX_CONNECTIONS
from mrl.agents.sandboxes.providers import (
    TMP,
    Sandbox,
    SandboxLimits,
    TooLarge,
    find_provider,
    model_variables,
    open_sandbox,
)
from mrl.agents.sandboxes.work_files import MAX_DEPTH, WorkFile, overlay, read_folder
from mrl.errors import ConfigError
from mrl.rewards.code import cgroup
from tests.support.sandbox_probes import (
    LIMITS,
    PROBE_MARK,
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

SECONDS = 120.0


@pytest.fixture(scope="module")
def complete() -> Iterator[Callable[[str], str]]:
    with guarded() as complete, pytest.MonkeyPatch.context() as patch:
        patch.setenv("MRL_TEST_KEY", SECRET)
        yield complete


@pytest.fixture(scope="module")
def plain_users(complete: Callable[[str], str]) -> dict[str, tuple[int, str]]:
    """Ends of all probes in a plain user's sandboxes."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.sandbox_probes"],
        input=json.dumps([complete(text) for text in REACHED.values()]),
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[3],
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return dict(zip(REACHED, json.loads(done.stdout), strict=True))


@pytest.fixture
def sandbox() -> Iterator[Sandbox]:
    with open_sandbox(limits=LIMITS) as sandbox:
        yield sandbox


@pytest.mark.parametrize("kind", ["the machine's", "without a cgroup", "a plain user's"])
@pytest.mark.parametrize("name", REACHED)
def test_nothing_outside_is_reached(
    name: str,
    kind: str,
    complete: Callable[[str], str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if kind == "a plain user's":
        assert request.getfixturevalue("plain_users")[name] == [0, ""]
        return
    if kind == "without a cgroup":
        monkeypatch.setattr(cgroup, "make_cgroup", lambda **limits: None)
    with open_sandbox(limits=LIMITS) as sandbox:
        done = probe(sandbox, complete(REACHED[name]))
        assert (done.status, done.output) == (0, "")


def test_two_sandboxes_do_not_meet(complete: Callable[[str], str]) -> None:
    """Neither files, nor processes, nor the key and the door of one are there in the other."""
    text = complete(REACHED["memory and files by other processes"]) + (
        "for line in open('/proc/net/tcp'):\n    if line.split()[3] == '0A': print('door')\n"  # TCP_LISTEN
    )
    seconds = str(2_000_000 + os.getpid())  # no other test's
    with answering() as model, open_sandbox(limits=LIMITS, model=model) as first:
        first.write({"secret": WorkFile(SECRET.encode())})
        running = threading.Thread(
            target=first.run, args=(["sleep", seconds],), kwargs={"seconds": 120, "env": {"KEY": SECRET}}
        )
        with open_sandbox(limits=LIMITS) as second:
            running.start()
            done = probe(second, text)
            assert running.is_alive()
        assert (done.status, done.output) == (0, "")
        assert SECRET.encode() not in b"".join(map(command_line, psutil.pids()))
        for process in sleepers(seconds):
            process.kill()
        running.join()
    # the same program finds the door of a sandbox that has one
    with answering() as model, open_sandbox(limits=LIMITS, model=model) as sandbox:
        assert probe(sandbox, text).output == "door\n"


def test_a_door_forwards_whole_messages() -> None:
    with answering() as model, open_sandbox(limits=SandboxLimits(), model=model) as sandbox:
        assert sandbox.model is not None and sandbox.model.url != model.url
        for _ in range(2):
            assert echoes(sandbox) == "done\n"


def test_more_connections_than_a_door_takes_wait() -> None:
    text = f"""
import os, socket, urllib.parse
address = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
socks = [socket.create_connection((address.hostname, address.port)) for _ in range({MAX_CONNECTIONS + 10})]
last, first = socks[-1], socks[0]
last.settimeout(0.5)
last.sendall(b"POST /v1 HTTP/1.0\\r\\nContent-Length: 2\\r\\n\\r\\nab")
try: print(last.recv(99))
except TimeoutError: print("waits")
for one in socks[:-1]: one.close()
last.settimeout(30)
data = b""
while part := last.recv(99): data += part
print(data[-2:])
"""
    with answering() as model, open_sandbox(limits=LIMITS, model=model) as sandbox:
        sandbox.write({"probe.py": WorkFile(text.encode())})
        done = sandbox.run(["python3", "probe.py"], seconds=SECONDS, env=model_variables(sandbox))
        assert done.output == "waits\nb'ab'\n"


def test_how_a_command_ends(sandbox: Sandbox) -> None:
    assert sandbox.run(["sh", "-c", "echo out; echo err >&2; exit 7"], seconds=SECONDS).status == 7
    assert sandbox.run(["sh", "-c", "kill -9 $$"], seconds=SECONDS).status == 137
    done = sandbox.run(["sleep", "600"], seconds=0.2)
    assert done.timed_out and done.status == 137 and done.seconds < SECONDS
    done = sandbox.run(["sh", "-c", "yes | head -c 3000000; echo end"], seconds=SECONDS)
    assert done.output.endswith("end\n") and len(done.output) < 100_000
    with pytest.raises(SandboxLost, match="no-such-command"):
        sandbox.run(["no-such-command"], seconds=SECONDS)
    done = sandbox.run(["sh", "-c", "no-such-command"], seconds=SECONDS)
    assert done.status == 127, "what a program does is no fault of the sandbox"


@pytest.mark.parametrize("kind", ["the machine's", "without a cgroup"])
def test_memory_is_bounded(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Limit one process, and all together; what processes share counts once."""
    if kind == "without a cgroup":
        monkeypatch.setattr(cgroup, "make_cgroup", lambda **limits: None)
    forking = """
import os, time
x = bytearray(b"x" * (SIZE << 20))
for number in range(6):
    if os.fork() == 0:
        if TOUCHES: x[:] = b"y" * len(x)
        time.sleep(SECONDS)
        os._exit(0)
for number in range(6): os.wait()
"""
    with open_sandbox(limits=LIMITS) as sandbox:
        assert "MemoryError" in probe(sandbox, "x = bytearray(2**30)").output
        assert not probe(sandbox, "SIZE, TOUCHES, SECONDS = 60, False, 2" + forking).out_of_memory
        # with a cgroup only the largest process is killed
        seconds = 10.0 if kind == "the machine's" else SECONDS
        done = probe(sandbox, "SIZE, TOUCHES, SECONDS = 60, True, 600" + forking, seconds=seconds)
        assert done.out_of_memory and not (done.timed_out and kind == "without a cgroup")


def test_nothing_of_a_command_remains(sandbox: Sandbox) -> None:
    """No process, however it was left, writes after the command's end."""
    text = """
import os, sys, time
for number in range(4):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            for fd in range(3): os.close(fd)
            while True:
                with open(f'/work/{number}', 'a') as file: file.write('x' * 4096)
                os.truncate(f'/work/{number}', 4096)
        os._exit(0)
while len([name for name in os.listdir('/work') if name.isdigit()]) < 4: time.sleep(0.001)
"""
    for _ in range(10):
        assert probe(sandbox, text).status == 0
        assert PROBE_MARK.encode() not in b"".join(map(command_line, psutil.pids()))
        before = sandbox.run(["sh", "-c", "cat /proc/[0-9]*/comm; stat -c '%y' /work/*"], seconds=SECONDS)
        after = sandbox.run(["sh", "-c", "cat /proc/[0-9]*/comm; stat -c '%y' /work/*"], seconds=SECONDS)
        assert before.output == after.output and "python" not in after.output


def test_nothing_remains_of_a_command_whose_bubblewrap_is_killed_at_its_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Until its mounts are made, the command's first process does not end with bubblewrap."""

    def kill(process: subprocess.Popen[bytes], *_: object, **__: object) -> bool:
        process.kill()
        return process.wait() == 0

    monkeypatch.setattr(bubblewrap, "wait_for_command", kill)
    mounts = {}
    for number in range(500):
        (tmp_path / str(number)).mkdir()
        mounts[str(tmp_path / str(number))] = f"/mounts/{number}"
    with open_sandbox(mounts=mounts, limits=LIMITS) as sandbox:
        with pytest.raises(SandboxLost, match="could not run a command"):
            sandbox.run(["sleep", "600"], seconds=SECONDS)
        assert not [child for child in psutil.Process().children() if child.name() == "bwrap"]


def test_nothing_of_a_sandbox_remains() -> None:
    """Neither after its close, nor after the death of the process that opened it."""
    seconds = str(1_000_000 + os.getpid())  # no other test's
    opened = "from mrl.agents.sandboxes.providers import open_sandbox\nsandbox = open_sandbox()\n"
    running = f"{opened}sandbox.run(['sh', '-c', 'sleep {seconds} & sleep {seconds}'], seconds=600)"
    with subprocess.Popen([sys.executable, "-c", running]) as process:
        until(lambda: len(sleepers(seconds)) == 2)
        children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        until(lambda: not sleepers(seconds))
        until(lambda: not any(is_running(child) for child in children))
    cgroup.kill_owned_by(process.pid, deadline_seconds=30.0)
    before, others = set(os.listdir("/dev/shm")), set(psutil.Process().children(recursive=True))
    with open_sandbox(limits=LIMITS) as sandbox:
        children = set(psutil.Process().children(recursive=True)) - others
        assert children
        sandbox.run(["sh", "-c", "sleep 600 & echo x > /dev/shm/left"], seconds=SECONDS)
    assert not any(is_running(child) for child in children)
    assert "left" not in set(os.listdir("/dev/shm")) - before


def test_a_sandbox_ends_with_the_parent_of_its_process() -> None:
    """Writing files as another user does not end `die_with_parent`."""
    seconds = str(4_000_000 + os.getpid())  # no other test's
    text = f"""
import os, time
from mrl.agents.sandboxes.providers import open_sandbox
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.processes.lifeline import die_with_parent
parent = os.getpid()
if os.fork(): time.sleep(600)
die_with_parent(parent)
sandbox = open_sandbox()
sandbox.write({{"x": WorkFile(b"x")}})
sandbox.run(["sleep", "{seconds}"], seconds=600)
"""
    with subprocess.Popen([sys.executable, "-c", text]) as process:
        until(lambda: len(sleepers(seconds)) == 1)
        (owner,) = psutil.Process(process.pid).children()
        process.kill()
        until(lambda: not sleepers(seconds))
        until(lambda: not is_running(owner))
    cgroup.kill_owned_by(owner.pid, deadline_seconds=30.0)


def test_links_lead_nowhere(sandbox: Sandbox, tmp_path: Path) -> None:
    """Files that leave a sandbox are its own, and files that enter one stay in it."""
    (tmp_path / "secret").write_text(SECRET)
    tmp_path.chmod(0o777)
    text = f"""
import os, socket
os.symlink({str(tmp_path / "secret")!r}, 'to_file')
os.symlink({str(tmp_path)!r}, 'to_folder')
os.symlink('/proc/self/environ', 'to_proc')
os.symlink('inside', 'to_inside')
os.symlink({str(tmp_path / "made")!r}, 'to_nothing')
os.mkfifo('fifo')
socket.socket(socket.AF_UNIX).bind('socket')
os.makedirs('a/b'); open('a/b/file', 'w').write('1')
open('inside', 'w').write('2')
os.mkdir('locked'); open('locked/file', 'w').write('3'); os.chmod('locked', 0)
deep = 'd'
for _ in range({MAX_DEPTH} + 20): os.mkdir(deep); os.chdir(deep)
open('too_deep', 'w').close()
"""
    assert probe(sandbox, text).output == ""
    assert set(sandbox.read(["*"])) == {"a/b/file", "inside", "probe.py"}
    new = WorkFile(b"new")
    paths = ["to_file", "to_folder/made", "to_nothing", "to_proc", "fifo", "a"]
    sandbox.write(dict.fromkeys(paths, new))
    assert {path: sandbox.read([path]) for path in paths} == {path: {path: new} for path in paths}
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("secret", SECRET)]
    for path in ("../x", "/work/x", "a/../../x"):
        with pytest.raises(ValueError, match="not a relative path"):
            sandbox.write({path: new})


def test_what_leaves_a_sandbox_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bubblewrap, "KEPT_MIB", 1)
    with open_sandbox(limits=LIMITS) as sandbox:
        sandbox.run(["sh", "-c", "truncate -s 1000000 a; truncate -s 10M b"], seconds=SECONDS)
        assert len(sandbox.read(["a"])["a"].data) == 1_000_000
        with pytest.raises(TooLarge):
            sandbox.read(["b"])
        monkeypatch.setattr(bubblewrap, "KEPT_FILES", 5)
        sandbox.run(["sh", "-c", "for n in 1 2 3 4 5 6; do echo x > c$n; done"], seconds=SECONDS)
        with pytest.raises(TooLarge):
            sandbox.read(["c*"])
        with pytest.raises(TooLarge):
            sandbox.write({"large": WorkFile(bytes(LIMITS.disk_mib * 2**20 + 1))})


def test_usual_programs_run(sandbox: Sandbox) -> None:
    text = """
set -e
git init -q repository && cd repository
echo 'print(1)' > a.py && git add a.py
git -c user.name=x -c user.email=x@y commit -qm first
echo 'print(2)' > a.py && git diff > ../change.patch
python3 -c 'import subprocess, sys; print(subprocess.run([sys.executable, "a.py"]).returncode)'
printf 'x y' | awk '{print $2}'
python3 -m http.server 8123 --bind 127.0.0.1 > /dev/null 2>&1 &
for n in 1 2 3 4 5 6 7 8 9; do sleep 0.5; python3 -c '
import urllib.request; print(len(urllib.request.urlopen("http://127.0.0.1:8123/a.py").read()))' && exit; done
"""
    sandbox.write({"usual.sh": WorkFile(text.encode(), is_executable=True)})
    done = sandbox.run(["sh", "usual.sh"], seconds=SECONDS)
    assert done.status == 0 and done.output.replace("\n", " ").startswith("2 0 y ")
    assert b"+print(2)" in sandbox.read(["*.patch"])["change.patch"].data


def test_an_image_is_the_root(tmp_path: Path) -> None:
    """Files of this machine are not there, unless they are mounted."""
    image, mounted = tmp_path / "image", tmp_path / "mounted"
    for folder in (image / "bin", image / "opt", mounted):
        folder.mkdir(parents=True)
    (mounted / "file").write_text("mounted")
    os.symlink("/usr/bin/python3", image / "bin/python")
    mounts = {"/usr": "/usr", "/lib": "/lib", "/lib64": "/lib64", str(mounted): "/mounted"}
    with open_sandbox(image=str(image), mounts=mounts) as sandbox:
        code = "import os; print(sorted(os.listdir('/')), open('/mounted/file').read())"
        done = sandbox.run(["/bin/python", "-c", code], seconds=SECONDS)
        names = ["bin", "dev", "lib", "lib64", "mounted", "opt", "proc", "tmp", "usr", "work"]
        assert done.output == f"{names} mounted\n"


def test_what_is_missing_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not an absolute path"):
        open_sandbox(image="/no/such")
    with pytest.raises(ConfigError, match="not an absolute path"):
        open_sandbox(mounts={"relative": "/x"})
    with pytest.raises(ConfigError, match="choose one of bubblewrap"):
        find_provider("no-such")
    with pytest.raises(ConfigError, match=r"sandbox\.options of bubblewrap"):
        find_provider("bubblewrap", {"unknown": 1})
    with monkeypatch.context() as patch:
        patch.setattr(bubblewrap, "mount_scratch", not_permitted)
        with pytest.raises(SandboxLost, match=r"cannot boot: PermissionError.*no namespaces"):
            open_sandbox()
    if os.geteuid() == 0:
        private = tmp_path / "private"
        private.mkdir(mode=0o700)
        with open_sandbox(mounts={str(private): "/opt"}) as sandbox:
            assert sandbox.run(["ls", "/opt"], seconds=SECONDS).status == 0
        monkeypatch.setattr(cgroup, "make_cgroup", lambda **limits: None)
        with pytest.raises(ConfigError, match="other users cannot read"):
            open_sandbox(mounts={str(private): "/opt"})
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="install it"):
        open_sandbox()


def test_earlier_layers_have_priority() -> None:
    def files(**contents: str) -> dict[str, WorkFile]:
        return {path.replace("__", "/"): WorkFile(text.encode()) for path, text in contents.items()}

    merged = overlay(files(a="1", b__c="1"), files(a="2", a__x="2", b="2", b__c__y="2", b__d="2", e="2"))
    assert merged == files(a="1", b__c="1") | files(b__d="2", e="2")
    link = {"l": WorkFile(b"/etc", kind="link")}
    assert overlay(link, files(l__passwd="2")) == link


def test_folders_are_read_with_links_and_empty_folders(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    (tmp_path / "run.sh").chmod(0o755)
    os.symlink("run.sh", tmp_path / "link")
    files = read_folder(tmp_path)
    assert {path: (file.kind, file.is_executable) for path, file in files.items()} == {
        "empty": ("folder", False),
        "run.sh": ("file", True),
        "link": ("link", False),
    }
    with open_sandbox(limits=LIMITS) as sandbox:
        sandbox.write(files)
        assert sandbox.run(["sh", "-c", "./link && rmdir empty"], seconds=SECONDS).status == 0
        sandbox.write({"note": WorkFile(b"x")}, TMP)
        assert sandbox.run(["cat", "/tmp/note"], seconds=SECONDS).output == "x"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_folder(tmp_path / "missing")


def not_permitted(*arguments: object) -> None:
    raise PermissionError("no namespaces here")


def command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
