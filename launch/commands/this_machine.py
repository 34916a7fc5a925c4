"""Fit a configuration to this machine: values in place of `auto`, folders of models, hardware of a plan."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Collection
from typing import Any

from mrl.capacity.auto_settings import KERNEL_PACKAGES, auto_values, resolve_auto
from mrl.capacity.fit import Fit, fit
from mrl.capacity.hardware import Hardware, cpu_node, gpu_node, load_hardware
from mrl.config.root import Config
from mrl.data.hub_models import model_folder
from mrl.launch.cluster.cluster import own_gpus
from mrl.launch.cluster.gpus import find_gpus
from mrl.launch.cluster.node_facts import available_memory


def with_values(
    config: Config, *, gpus: bool | None = None, sections: Collection[str] = ("training", "rollout")
) -> tuple[Config, list[str]]:
    """Return the configuration with values in place of `auto`, and a line about them for the user, if any.

    Args:
        gpus: The slots are GPUs; None: if this machine has any.
        sections: Sections that the command reads; others stay as they are.
    """
    gpus = own_gpus() > 0 if gpus is None else gpus
    packages = {name for name in KERNEL_PACKAGES if importlib.util.find_spec(name)}
    resolved = resolve_auto(config, gpus=gpus, memory_bytes=available_memory(), packages=packages)
    resolved = config.model_copy(update={name: getattr(resolved, name) for name in sections})
    line = auto_values(config, resolved, gpus=gpus)
    return resolved, [line] if line else []


def hardware_here(config: Config) -> Hardware:
    """Return this machine as the hardware of a plan if it has no GPU, else nodes of eight 80 GB GPUs."""
    if own_gpus():
        return load_hardware("8x80gb")
    memory, cores = available_memory(), len(os.sched_getaffinity(0))
    name = (
        f"this machine, {cores} CPU cores, {memory / 2**30:.0f} GiB available (--hardware plans for another)"
    )
    slots = config.launch.slots_per_node or config.num_slots
    return cpu_node(name, slots=slots, memory_bytes=memory)


def memory_fit(config: Config) -> Fit:
    """Return whether a run's slots on this machine fit the memory that is free now: of the fullest of its
    GPUs, if nvidia-smi tells, or without GPUs of the machine and its cgroup."""
    if not own_gpus():
        return fit(config, hardware_here(config))
    gpus = find_gpus()
    return fit(config, gpu_node(gpus.torch, gpus.free_bytes)) if gpus.free_bytes else Fit()


def with_local_models(config: Config, *, download: bool = True) -> Config:
    """Return the configuration with local folders in place of the hub names of policy, reference, critic and
    teachers. ConfigError if a model is not in the hub's cache and is not (or cannot be) downloaded."""

    def local(path: str | None, setting: str) -> str | None:
        return path and model_folder(path, setting, download=download)

    model, critic, distillation = config.model, config.critic, config.algorithm.distillation
    changes: dict[str, Any] = {"reference_path": local(model.reference_path, "model.reference_path")}
    if model.new is None:
        changes["path"] = local(model.path, "model.path")
    sections: dict[str, Any] = {"model": model.model_copy(update=changes)}
    if critic is not None:
        sections["critic"] = critic.model_copy(update={"path": local(critic.path, "critic.path")})
    if distillation is not None:
        name = "algorithm.distillation.teachers"
        teachers = {domain: local(path, name) for domain, path in distillation.teachers.items()}
        distillation = distillation.model_copy(update={"teachers": teachers})
        sections["algorithm"] = config.algorithm.model_copy(update={"distillation": distillation})
    return config.model_copy(update=sections)
