"""Processes and machines."""

from pydantic import Field

from mrl.section import Section


class ProfileSection(Section):
    """Steps whose trainer ranks are recorded; what is written lies in the run's folder, in profile/."""

    steps: tuple[int, ...] = ()
    """Steps of the loop, from 1; none records nothing."""
    ranks: tuple[int, ...] = (0,)
    """Trainer ranks that record."""
    memory: bool = False
    """Also the history of a GPU's allocations, as a snapshot for pytorch.org/memory_viz."""


class LaunchSection(Section):
    """Processes and machines."""

    ray_address: str | None = None
    """Address of an existing Ray cluster; null starts one on this machine and stops it at the end."""
    slots_per_node: int | None = Field(default=None, ge=1)
    """Slots of a node: its GPUs, or the shares of a machine without GPUs; null means all of its GPUs, or
    without GPUs as many as the run takes."""
    engine_slots: int = Field(default=0, ge=0)
    """Slots that engines have to themselves, after the trainer's; their number and `rollout.tp` are then free of
    the layout, nobody off-loads or sleeps. 0: engines share the
    trainer's slots and take turns with it."""
    start_deadline_seconds: float = Field(default=600.0, gt=0)
    """Longest time until all workers are up."""
    object_store_bytes: int | None = Field(default=None, ge=80 << 20)
    """Size of Ray's object store on each node that the command, torchrun or the batch script starts; it holds
    a step's batches and results on their way. null means a tenth of the memory, at most half of what is free
    in /dev/shm."""
    elastic: tuple[tuple[str, ...], ...] = ()
    """What to go on with when nodes are lost: entries of command-line words (`training.layout.dp=2`), each for fewer slots
    than the one before. torchrun and the batch script take the first that fits the nodes that are there."""
    profile: ProfileSection = ProfileSection()
    """Steps and trainer ranks that torch's profiler records."""
