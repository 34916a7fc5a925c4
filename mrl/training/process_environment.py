"""What a trainer rank's process is told before it imports Megatron."""

from __future__ import annotations

import sys

CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Nothing is compiled on CPU (training/platform/cpu.py), and Megatron's import then loads no compiler."""


def without_wandb() -> None:
    """Keep Megatron's code for inference from importing wandb, which it imports where it is installed and does not use here.

    The import makes temporary folders, which a rank that is killed would leave behind.
    """
    sys.modules["wandb"] = None  # type: ignore[assignment]
