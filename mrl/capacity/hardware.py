"""Hardware of a capacity estimate: sizes, bandwidths, and the share of them assumed to be reached."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import Field, ValidationError, model_validator

from mrl.errors import ConfigError
from mrl.files import CONFIGS, shipped
from mrl.section import Section

GPU_ASSUMPTIONS = CONFIGS / "hardware" / "assumptions" / "gpu.yaml"
"""Shares and latencies that GPUs are assumed to reach, with sources, where a hardware file gives none."""


class Hardware(Section):
    """One kind of node; bandwidths are per GPU and direction."""

    name: str
    """Name for people."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """Kind of slots; on cpu, engines never sleep and a node's slots share its memory."""
    gpus_per_node: int = Field(ge=1)
    """Slots of a node (GPUs, or their stand-ins)."""
    memory_bytes: int = Field(ge=1)
    """Memory of one slot that its processes can allocate."""
    peak_flops: float = Field(gt=0)
    """Dense bfloat16 FLOP/s of one GPU."""
    memory_bytes_per_second: float = Field(gt=0)
    """Device memory bandwidth, reads and writes together."""
    node_bytes_per_second: float = Field(gt=0)
    """Bandwidth between GPUs of a node."""
    network_bytes_per_second: float = Field(gt=0)
    """Bandwidth between nodes (one network card per GPU: a rail)."""
    host_bytes_per_second: float = Field(gt=0)
    """Bandwidth between a GPU and host memory."""
    host_memory_bytes: int = Field(ge=1)
    """Host memory of one node."""
    storage_bytes_per_second: float = Field(default=2.0e9, gt=0)
    """Bandwidth between one node and the run folder's file system (assumption)."""
    trainer_process_bytes: int = Field(default=10_000_000_000, ge=0)
    """Device memory of a trainer process outside every category, which off-load does not free: context,
    kernels, and NCCL's communicators (7 GB for dense and 9.5 GB for mixture-of-experts models on 8 H100:
    verl, pull request 6408)."""
    engine_process_bytes: int = Field(default=2_000_000_000, ge=0)
    """Device memory of an engine process outside gpu_memory_utilization, or kept asleep: context, kernels and
    communicators, which vLLM creates before it measures free memory, and CUDA graphs (assumption)."""
    training_efficiency: float = Field(gt=0, le=1)
    """Share of peak_flops that training a dense model with Transformer Engine's layers reaches, besides
    communication and idle pipeline stages."""
    moe_efficiency: float = Field(gt=0, le=1)
    """The same share for a mixture of experts."""
    local_efficiency: float = Field(gt=0, le=1)
    """Share of these that training.spec = local reaches on GPUs, unfused."""
    link_efficiency: float = Field(gt=0, le=1)
    """Share of a link's bandwidth that collectives and weight syncs reach."""
    decode_efficiency: float = Field(gt=0, le=1)
    """Share of memory bandwidth that decoding reaches."""
    decode_flops_efficiency: float = Field(gt=0, le=1)
    """Share of peak_flops that decoding reaches if arithmetic limits it."""
    decode_step_seconds: float = Field(ge=0)
    """Shortest decode step: launches, scheduling."""
    all_reduce_seconds: float = Field(ge=0)
    """Seconds of a small all-reduce between an engine's tp ranks in a node."""
    all_reduce_bytes_per_second: float = Field(gt=0)
    """Bytes of a larger one per second above that."""
    collective_seconds: float = Field(ge=0)
    """Seconds of any other collective before its first hop."""
    node_hop_seconds: float = Field(ge=0)
    """Seconds of a ring's hop inside a node."""
    network_hop_seconds: float = Field(ge=0)
    """Seconds of a ring's hop between nodes."""
    dp_step_seconds: float = Field(ge=0)
    """Seconds of each decode step in which an engine's dp ranks in a node agree."""
    dp_step_network_seconds: float = Field(ge=0)
    """The same if its ranks are on several nodes."""
    compile_seconds: float = Field(ge=0)
    """Seconds before the first step in which engines compile with cold caches."""
    ranges: dict[str, tuple[float, float]] = {}
    """Assumption -> its worst and best value."""
    has_speeds: bool = True
    """The speeds are known; if not, a plan leaves out seconds."""
    mean_response_fraction: float = Field(default=0.5, gt=0, le=1)
    """Mean response length as a share of the longest (assumption)."""

    @model_validator(mode="before")
    @classmethod
    def _split_ranges(cls, fields: Any) -> Any:
        """Turn each `name: [worst, likely, best]` into the likely value and a range."""
        if not isinstance(fields, dict):
            return fields
        triples = {name: value for name, value in fields.items() if isinstance(value, list)}
        if wrong := [name for name, value in triples.items() if len(value) != 3]:
            raise ValueError(f"{', '.join(wrong)}: expected one value or three: [worst, likely, best]")
        likely = {name: value[1] for name, value in triples.items()}
        ranges = {name: (value[0], value[2]) for name, value in triples.items()}
        return fields | likely | ({"ranges": ranges} if ranges else {})

    def at(self, end: Literal["worst", "best"]) -> Hardware:
        """Return the hardware with all assumptions at this end of their ranges."""
        values = {name: ends[end == "best"] for name, ends in self.ranges.items()}
        return self.model_copy(update=values)


def cpu_node(name: str, *, slots: int, memory_bytes: int) -> Hardware:
    """Return a machine without GPUs, of unknown speed, whose slots share its available memory."""
    sizes = {"gpus_per_node": slots, "memory_bytes": memory_bytes // slots, "host_memory_bytes": memory_bytes}
    return load_hardware("laptop").model_copy(update={"name": name, "has_speeds": False, **sizes})


def gpu_node(gpus: int, free_bytes: Sequence[int]) -> Hardware:
    """Return a node of GPUs of unknown kind with this free memory each; their memory is the smallest."""
    sizes = {"gpus_per_node": gpus, "memory_bytes": min(free_bytes)}
    return load_hardware("8x80gb").model_copy(update={"name": "these GPUs", **sizes})


def load_hardware(name: str | Path) -> Hardware:
    """Load hardware from a file, or by the name of one in configs/hardware ("8x80gb")."""
    known = {path.stem: path for path in sorted((CONFIGS / "hardware").glob("*.yaml"))}
    path = known.get(str(name)) or shipped(Path(name))
    if not path.is_file():
        raise ConfigError(f"hardware '{name}' is neither a file nor one of {sorted(known)}")
    try:
        fields = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(fields, dict) and fields.get("kind", "gpu") == "gpu":
            fields = yaml.safe_load(GPU_ASSUMPTIONS.read_text(encoding="utf-8")) | fields
        return Hardware.model_validate(fields)
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path} does not describe hardware: {error}") from error


def with_mean_response(hardware: Hardware, tokens: float, longest: int) -> Hardware:
    """Return the hardware for responses of this mean length; raise ConfigError if it exceeds the longest."""
    if not 0 < tokens <= longest:
        raise ConfigError(
            f"--mean-response {tokens:g} must be above 0 and at most rollout.max_response_tokens = {longest}"
        )
    return hardware.model_copy(update={"mean_response_fraction": tokens / longest})


def with_network(hardware: Hardware, gbit_per_second: float) -> Hardware:
    """Return the hardware with another link between nodes; raise ConfigError unless its rate is positive."""
    if not gbit_per_second > 0:
        raise ConfigError(f"--network-gbit {gbit_per_second} must be above 0")
    return hardware.model_copy(update={"network_bytes_per_second": gbit_per_second * 1e9 / 8})
