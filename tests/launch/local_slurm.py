"""A real Slurm on this machine: munged, one controller and two node daemons, which end with the test.

Debian packages: slurm-wlm, munge. munged and slurmd need root.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol", "squeue")


def missing() -> list[str]:
    """Return what is missing for these tests: programs, or root."""
    programs = [
        f"{name} (Debian: slurm-wlm, munge)" for name in PROGRAMS if not shutil.which(name, path=_path())
    ]
    return programs + ([] if os.geteuid() == 0 else ["root (slurmd starts jobs as users)"])


def _path() -> str:
    return os.environ.get("PATH", "") + ":/usr/sbin:/sbin"


class LocalSlurm:
    """A running Slurm; commands find it through SLURM_CONF."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, "PATH": _path(), "SLURM_CONF": str(folder / "slurm.conf")}
        self._pids: list[tuple[str, int]] = []

    def start(self) -> None:
        host, ports = socket.gethostname().split(".")[0], _free_ports(3)
        munge = self.folder / "munge"
        munge.mkdir(mode=0o755)
        for name in ("state", "log", "cloud"):
            (self.folder / name).mkdir()
        (self.folder / "slurm.conf").write_text(
            f"""ClusterName=local
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={munge}/socket
CryptoType=crypto/munge
StateSaveLocation={self.folder}/state
SlurmdSpoolDir={self.folder}/spool-%n
SlurmctldPidFile={self.folder}/slurmctld.pid
SlurmdPidFile={self.folder}/slurmd-%n.pid
SlurmctldLogFile={self.folder}/log/slurmctld.log
SlurmdLogFile={self.folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/linear
ReturnToService=2
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
KillWait=20
SchedulerParameters=requeue_delay=1,batch_sched_delay=1
NodeName=n[1-2] NodeHostname={host} NodeAddr=127.0.0.1 Port=[{ports[1]}-{ports[1] + 1}] CPUs=2 State=UNKNOWN
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
        )
        key = munge / "key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)
        words = [
            "munged", "--force", f"--key-file={key}", f"--socket={munge}/socket", f"--pid-file={munge}/pid",
        ]  # fmt: skip
        words += [f"--log-file={munge}/log", f"--seed-file={munge}/seed"]
        self._daemon(words, munge / "pid")
        self._daemon(["slurmctld", "-f", self.environment["SLURM_CONF"]], self.folder / "slurmctld.pid")
        for node in ("n1", "n2"):
            self._daemon(
                ["slurmd", "-N", node, "-f", self.environment["SLURM_CONF"]],
                self.folder / f"slurmd-{node}.pid",
            )
        self.wait_until(
            lambda: self.run("sinfo", "-h", "-o", "%t %D").split() == ["idle", "2"], 60, "two idle nodes"
        )

    def _daemon(self, command: list[str], pid_file: Path) -> None:
        self.run(*command)
        self.wait_until(
            lambda: pid_file.is_file() and pid_file.read_text().strip() != "", 30, f"{command[0]}'s pid"
        )
        self._pids.append((command[0], int(pid_file.read_text())))

    def run(self, *command: str) -> str:
        done = subprocess.run(
            command, env=self.environment, timeout=240, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        words = self.run("scontrol", "show", "job", "-o", number).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_until(self, condition, seconds: float, name: str) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"{name}: not within {seconds:g} s"
            time.sleep(0.5)

    def stop(self) -> None:
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            self.run("scancel", "--user=root")
            self.wait_until(lambda: not self.run("squeue", "-h"), 60, "an empty queue")
        for _, pid in reversed(self._pids):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)
        deadline = time.monotonic() + 20
        for _, pid in self._pids:
            while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                time.sleep(0.2)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def local_slurm(folder: Path) -> Iterator[LocalSlurm]:
    slurm = LocalSlurm(folder)
    try:
        slurm.start()
        yield slurm
    finally:
        slurm.stop()


def _free_ports(count: int) -> list[int]:
    for first in range(26000 + os.getpid() % 500 * 8, 31900, count):
        sockets = []
        try:
            for offset in range(count):
                sockets.append(socket.socket())
                sockets[-1].bind(("127.0.0.1", first + offset))
            return list(range(first, first + count))
        except OSError:
            continue
        finally:
            for listener in sockets:
                listener.close()
    raise AssertionError("no free ports")
