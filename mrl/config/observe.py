"""What is written about a run beside metrics.jsonl."""

from typing import Literal

from pydantic import Field

from mrl.config.section import Section


class ObserveSection(Section):
    """Trackers and dumps; metrics.jsonl is always written."""

    trackers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Further trackers; one that fails or hangs is switched off with a warning and never stops training."""
    tracker_deadline_seconds: float = Field(default=10.0, gt=0)
    """Longest a tracker may take over one step."""
    samples_per_step: int = Field(default=16, ge=0)
    """Samples written to samples.jsonl each step (best and worst of the first groups); 0 writes none."""
