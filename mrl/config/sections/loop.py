"""Order and amount of work."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.section import Section, named

SCHEDULES = Literal["on_policy", "stream"]
Schedule = Annotated[SCHEDULES, BeforeValidator(named("schedule", SCHEDULES))]


class ValidationSection(Section):
    """Measuring on held-out rows."""

    every_steps: int = Field(default=10, ge=0)
    """Steps between validations; 0 means only where before_training and after_training say so."""
    before_training: bool = True
    """Validate the starting point."""
    after_training: bool = True
    """Validate the last step."""
    num_prompts: int = Field(default=512, ge=1)
    """Rows validated (the first ones of the file)."""
    num_samples: int = Field(default=0, ge=0)
    """Samples per prompt for avg@k; 0 means greedy only."""
    temperature: float | None = Field(default=None, gt=0)
    """Temperature of those samples; rollout.temperature when absent."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Their top_p; rollout.top_p when absent."""
    top_k: int | None = Field(default=None, ge=0)
    """Their top_k; rollout.top_k when absent."""


class CheckpointSection(Section):
    """Saving for resume."""

    every_steps: int = Field(default=50, ge=0)
    """Steps between saves; 0 saves at the end alone."""
    at_end: bool = True
    """Save after the last step."""
    beside_training: bool = False
    """Copy the state to plain memory (of each node: what its ranks hold) and write the files while the next
    step generates; the last step's checkpoint is written at once. A run that dies before the next step's update
    resumes from the checkpoint before."""
    keep: int = Field(default=2, ge=1)
    """Newest committed checkpoints that are kept."""
    max_failed: int = Field(default=3, ge=1)
    """Saves that may fail in a row (a full disk) before the run stops."""


class LoopSection(Section):
    """Steps of training, and the order of their phases."""

    schedule: Schedule = "on_policy"
    """on_policy: a step generates, then trains; stream: generation runs ahead by at most stream.max_age versions."""
    steps: int = Field(default=100, ge=0)
    """Steps of the loop: each generates, rewards, updates and syncs once."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Groups trained on in one step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Group size G."""
    deterministic: bool = False
    """Same seed, config and machine give the same tokens and losses to the last bit."""
    max_no_reward_fraction: float = Field(default=0.05, ge=0, le=1)
    """Share of samples without a reward in a step above which the run stops."""
    phase_deadline_seconds: float = Field(default=1800.0, gt=0)
    """Longest time one phase of a step may take before the run ends with the phase named; of commands that ask one engine (`mrl eval`,
    `mrl difficulty`, `mrl make preferences`) the longest from one response or verdict to the next."""
    max_rollout_mismatch: float | None = Field(default=None, gt=0)
    """Largest allowed |engine - trainer log-prob| outside router near-ties; null only measures."""
    validation: ValidationSection = ValidationSection()
    """Validation."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Checkpoints."""
