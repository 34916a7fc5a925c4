"""Environment of a trainer rank's process before it imports Megatron."""

from __future__ import annotations

import sys

CPU_ENVIRONMENT = {"TORCHDYNAMO_DISABLE": "1"}
"""Compile nothing on CPU (mrl/cpu/megatron_calls.py); importing Megatron then loads no compiler."""


def without_wandb() -> None:
    """Keep Megatron's inference code from importing wandb, which it would import if installed and never uses
    here. The import creates temporary folders, which a killed rank would leave behind."""
    sys.modules["wandb"] = None  # type: ignore[assignment]
