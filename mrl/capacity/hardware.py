"""What a capacity estimate knows of the machines: sizes, bandwidths, and the shares assumed to be reached."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import yaml
from pydantic import Field, ValidationError

from mrl.errors import ConfigError
from mrl.files import CONFIGS, shipped
from mrl.section import Section


class Hardware(Section):
    """One kind of node. Bandwidths are of one GPU and one direction."""

    name: str
    """What people call it."""
    kind: Literal["gpu", "cpu"] = "gpu"
    """On cpu engines never sleep and the slots of a node share its memory."""
    gpus_per_node: int = Field(ge=1)
    """Slots of a node (GPUs, or their stand-ins)."""
    memory_bytes: int = Field(ge=1)
    """Memory of one slot that its processes can get."""
    peak_flops: float = Field(gt=0)
    """Dense bfloat16 operations per second of one GPU."""
    memory_bytes_per_second: float = Field(gt=0)
    """Device memory bandwidth, reads and writes together."""
    node_bytes_per_second: float = Field(gt=0)
    """Between GPUs of a node."""
    network_bytes_per_second: float = Field(gt=0)
    """Between nodes (one network card per GPU: a rail)."""
    host_bytes_per_second: float = Field(gt=0)
    """Between a GPU and its host's memory."""
    host_memory_bytes: int = Field(ge=1)
    """Memory of one node's host."""
    storage_bytes_per_second: float = Field(default=2.0e9, gt=0)
    """Between one node and the file system of the run folder (assumption)."""
    trainer_process_bytes: int = Field(default=10_000_000_000, ge=0)
    """Device memory of a trainer process outside every category, which off-load does not give back: context, kernels, and
    NCCL's communicators (7 GB for dense and 9.5 GB for mixture-of-experts models on 8 H100: verl, pull request 6408)."""
    engine_process_bytes: int = Field(default=2_000_000_000, ge=0)
    """Device memory of an engine process outside gpu_memory_utilization, or kept asleep: context, kernels and
    communicators, which vLLM makes before it measures what is free, and CUDA graphs (assumption)."""
    training_efficiency: float = Field(default=0.30, gt=0, le=1)
    """Share of peak_flops that training reaches, on GPUs with Transformer Engine's layers (assumption)."""
    local_efficiency: float = Field(default=0.5, gt=0, le=1)
    """Share of training_efficiency that training.spec = local reaches on GPUs, without fusions (assumption)."""
    decode_efficiency: float = Field(default=0.60, gt=0, le=1)
    """Share of the memory bandwidth that decoding reaches (assumption)."""
    link_efficiency: float = Field(default=0.60, gt=0, le=1)
    """Share of a link's bandwidth that a weight sync reaches (assumption)."""
    decode_step_seconds: float = Field(default=0.012, ge=0)
    """Least time of one decode step: launches, small collectives, scheduling (assumption)."""
    mean_response_fraction: float = Field(default=0.5, gt=0, le=1)
    """Mean response length as a share of the longest (assumption)."""


def load_hardware(name: str | Path) -> Hardware:
    """Hardware by file, or by the name of one in configs/hardware ("8x80gb")."""
    known = {path.stem: path for path in sorted((CONFIGS / "hardware").glob("*.yaml"))}
    path = known.get(str(name)) or shipped(Path(name))
    if not path.is_file():
        raise ConfigError(f"hardware '{name}' is neither a file nor one of {sorted(known)}")
    try:
        return Hardware.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except (yaml.YAMLError, ValidationError) as error:
        raise ConfigError(f"{path} does not describe hardware: {error}") from error
