"""Settings of processes and machines."""

from pydantic import Field

from mrl.section import Section


class ProfileSection(Section):
    """Steps and trainer ranks to profile; profiles go to profile/ in the run's folder."""

    steps: tuple[int, ...] = ()
    """Profile these loop steps, counted from 1; empty profiles none."""
    ranks: tuple[int, ...] = (0,)
    """Profile these trainer ranks."""
    memory: bool = False
    """Also record a GPU's allocations, as a snapshot for pytorch.org/memory_viz."""


class LaunchSection(Section):
    """Processes and machines."""

    ray_address: str | None = None
    """Connect to this Ray cluster; null starts one on this machine and stops it at the end."""
    slots_per_node: int | None = Field(default=None, ge=1)
    """Use this many slots of a node: its GPUs, or shares of a machine without GPUs; null takes all GPUs, or
    without GPUs as many slots as the run needs."""
    engine_slots: int = Field(default=0, ge=0)
    """Give engines this many slots of their own, after the trainer's: their number and `rollout.tp` are then
    free of the layout, and nothing is off-loaded or put to sleep. 0: engines and trainer take turns on the
    same slots."""
    start_deadline_seconds: float = Field(default=600.0, gt=0)
    """Wait at most this many seconds for all workers to start; begins anew while engines' nodes compile."""
    object_store_bytes: int | None = Field(default=None, ge=80 << 20)
    """Size Ray's object store, which carries a step's batches and results, on each node that the command,
    torchrun or the batch script starts; null takes a tenth of the memory, at most half of the free
    /dev/shm."""
    elastic: tuple[tuple[str, ...], ...] = ()
    """Resume with fewer nodes: entries of command-line words (`training.layout.dp=2`), each for fewer slots
    than the one before; torchrun and the batch script take the first that fits the nodes available."""
    profile: ProfileSection = ProfileSection()
    """Record steps and trainer ranks with torch's profiler."""
