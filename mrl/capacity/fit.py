"""Say whether a run fits the memory that is free where it starts: what cannot fit, and what hardly does."""

from __future__ import annotations

import dataclasses

from mrl.capacity.advice import memory_suggestions
from mrl.capacity.estimate import Estimate
from mrl.capacity.hardware import Hardware
from mrl.capacity.memory_timeline import Event
from mrl.config.root import Config


@dataclasses.dataclass(frozen=True, slots=True)
class Fit:
    """Sentences about a run's memory; both empty if it fits."""

    refusal: str = ""
    """Why it cannot fit: what is counted alone exceeds the free memory."""
    warning: str = ""
    """Why it may not fit: with what processes are assumed to take besides."""


def fit(config: Config, hardware: Hardware) -> Fit:
    """Compare a slot's fullest moment with `hardware.memory_bytes`, its free memory."""
    bare = hardware.model_copy(update={"trainer_process_bytes": 0, "engine_process_bytes": 0})
    counted, whole = Estimate(config, bare), Estimate(config, hardware)
    if (worst := _fullest(counted)).free < 0:
        return Fit(refusal=f"a slot needs at least {_needs(worst, counted)}")
    if (worst := _fullest(whole)).free < 0:
        return Fit(warning=f"a slot probably needs {_needs(worst, whole)}")
    return Fit()


def _fullest(estimate: Estimate) -> Event:
    return min(estimate.timeline, key=lambda event: event.free)


def _needs(worst: Event, estimate: Estimate) -> str:
    largest = sorted(worst.parts, key=lambda part: -worst.parts[part])[:3]
    parts = ", ".join(f"{part} {_gib(worst.parts[part])}" for part in largest)
    where = (
        "the GPU with least free memory has"
        if estimate.on_gpus
        else "its share of this machine's available memory is"
    )
    changes = memory_suggestions(estimate) + ["end other programs"]
    return (
        f"{_gib(worst.total)} in '{worst.name}' ({parts}), but {where} {_gib(worst.total + worst.free)}; "
        f"{'; '.join(changes)}"
    )


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"
