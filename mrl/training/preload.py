"""What a trainer rank imports, ahead of its start."""

from __future__ import annotations

import os
import sys

from mrl.config.root import Config

CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Nothing is compiled on CPU (training/platform/cpu.py); said before Megatron is imported, its compiler is not."""


def without_wandb() -> None:
    """Megatron's code for inference imports wandb where it is installed, and uses nothing of it here; the import makes
    temporary folders, which a rank that is killed would leave behind."""
    sys.modules["wandb"] = None  # type: ignore[assignment]


def variables(config: Config) -> dict[str, str]:
    """What the imports are made under."""
    return CPU_ENVIRONMENT


def preload(config: Config) -> None:
    """The imports of a rank on CPU, which take seconds and no memory of a slot; they start no thread."""
    os.environ.update(CPU_ENVIRONMENT)
    without_wandb()
    import mrl.algorithms.objective
    import mrl.training.profiler
    import mrl.training.worker  # noqa: F401
