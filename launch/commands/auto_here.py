"""Replace `auto` by values for this machine."""

from __future__ import annotations

from mrl.capacity.auto_settings import auto_values, resolve_auto
from mrl.config.root import Config
from mrl.launch.cluster.cluster import own_gpus
from mrl.launch.cluster.node_facts import available_memory


def with_values(
    config: Config, *, gpus: bool | None = None, engines: bool = True
) -> tuple[Config, list[str]]:
    """Return the configuration with values in place of `auto`, and a line about them for the user, if any.

    Args:
        gpus: The slots are GPUs; None: if this machine has any.
        engines: The command has engines; without, the section rollout stays.
    """
    gpus = own_gpus() > 0 if gpus is None else gpus
    resolved = resolve_auto(config, gpus=gpus, memory_bytes=available_memory())
    if not engines:
        resolved = resolved.model_copy(update={"rollout": config.rollout})
    line = auto_values(config, resolved, gpus=gpus)
    return resolved, [line] if line else []
