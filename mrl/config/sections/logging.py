"""Settings of what a run writes besides metrics.jsonl."""

from typing import Any, Literal

from pydantic import Field, field_validator

from mrl.section import Section


class LoggingSection(Section):
    """Trackers and sample dumps; metrics.jsonl is always written."""

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Also log to these trackers, one or a list; one that fails or hangs is switched off with a warning."""
    wandb_project: str = "mrl"
    """Log to this Weights & Biases project if trackers names wandb. The W&B run is called run.name; wandb's
    environment variables set everything else (host, key, entity, mode, group, tags: WANDB_ENTITY, WANDB_MODE,
    WANDB_RUN_GROUP, WANDB_TAGS)."""
    samples_per_step: int = Field(default=16, ge=0)
    """Write this many samples to samples.jsonl per step (best and worst of the first groups); 0: none."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_word_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
