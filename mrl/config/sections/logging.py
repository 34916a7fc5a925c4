"""What is written about a run beside metrics.jsonl."""

from typing import Any, Literal

from pydantic import Field, field_validator

from mrl.section import Section


class WandbSection(Section):
    """Words of `wandb.init`; what only wandb's own settings know (host, key) comes from its environment
    variables."""

    project: str = "mrl"
    """Project the run belongs to."""
    entity: str | None = None
    """User or team that owns the project; the account's default when absent."""
    name: str | None = None
    """Display name; run.name when absent."""
    group: str | None = None
    """Group of runs it is shown with."""
    tags: tuple[str, ...] = ()
    """Labels of the run."""
    mode: Literal["online", "offline"] | None = None
    """Whether rows go to the server or to files for `wandb sync`; WANDB_MODE, else online, when absent."""


class LoggingSection(Section):
    """Trackers and dumps; metrics.jsonl is always written."""

    trackers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Further trackers, a list or one word; one that fails or hangs is switched off with a warning and never
    stops training."""
    wandb: WandbSection = WandbSection()
    """Weights & Biases, where trackers names it."""
    tracker_deadline_seconds: float = Field(default=10.0, gt=0)
    """Longest the end of a run waits for a tracker."""
    tracker_samples_every_steps: int = Field(default=20, ge=0)
    """Steps between two tables of samples in trackers, each of what the step writes to samples.jsonl; 0 sends none."""
    device_peak_flops: float | None = Field(default=None, gt=0)
    """Operations per second of one device in training.dtype, for the utilisation (mfu); by the device's name
    when absent, left out for unknown ones."""
    samples_per_step: int = Field(default=16, ge=0)
    """Samples written to samples.jsonl each step (best and worst of the first groups); 0 writes none."""
    token_values: int = Field(default=4, ge=0)
    """The first of these samples that are written with each token's text, log-prob, ratio, age and advantage."""

    @field_validator("trackers", mode="before")
    @classmethod
    def _one_word_is_a_list(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value
