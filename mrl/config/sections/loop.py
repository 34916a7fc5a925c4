"""Settings of the training loop: order and amount of work."""

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from mrl.section import Section, known_name

SCHEDULES = Literal["on_policy", "stream"]
Schedule = Annotated[SCHEDULES, BeforeValidator(known_name("schedule", SCHEDULES))]


class ValidationSection(Section):
    """Validation on held-out rows."""

    every_steps: int = Field(default=10, ge=0)
    """Validate every this many steps; 0 validates only as before_training and after_training say."""
    before_training: bool = True
    """Validate the starting point."""
    after_training: bool = True
    """Validate the last step."""
    num_prompts: int = Field(default=512, ge=1)
    """Validate this many rows, the first of the file."""
    num_samples: int = Field(default=0, ge=0)
    """Draw this many samples per prompt for avg@k; 0 decodes greedily only."""
    temperature: float | None = Field(default=None, gt=0)
    """Draw them at this temperature; null takes rollout.temperature."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Draw them with this top_p; null takes rollout.top_p."""
    top_k: int | None = Field(default=None, ge=0)
    """Draw them with this top_k; null takes rollout.top_k."""


class CheckpointSection(Section):
    """Checkpoints to resume from."""

    every_steps: int = Field(default=50, ge=0)
    """Save every this many steps; 0 saves only at the end."""
    at_end: bool = True
    """Save after the last step."""
    async_save: bool = False
    """Copy each node's state to host memory and write the files while the next step generates (the last
    step's at once); a run that dies before the next update resumes from the previous checkpoint."""
    keep: int = Field(default=2, ge=1)
    """Keep this many newest committed checkpoints."""
    max_failed: int = Field(default=3, ge=1)
    """Stop the run after this many failed saves in a row (a full disk)."""


class LoopSection(Section):
    """Number of training steps, and the order of their phases."""

    schedule: Schedule = "on_policy"
    """Generate, then train (on_policy), or generate up to stream.max_staleness versions ahead (stream)."""
    steps: int = Field(default=100, ge=0)
    """Run this many steps; each generates, rewards, updates and syncs once."""
    prompts_per_step: int = Field(default=32, ge=1)
    """Train on this many groups per step."""
    samples_per_prompt: int = Field(default=8, ge=1)
    """Draw this many samples per prompt (group size G)."""
    deterministic: bool = False
    """Give bitwise the same tokens and losses for the same seed, config and machine."""
    max_no_reward_fraction: float = Field(default=0.05, ge=0, le=1)
    """Stop the run above this share of samples without a reward in a step."""
    phase_deadline_seconds: float = Field(default=1800.0, gt=0)
    """End the run, naming the phase, if one phase of a step takes longer than this many seconds; in commands
    that query one engine (`mrl eval`, `mrl make preferences`), the longest gap between
    responses or verdicts."""
    max_rollout_mismatch: float | None = Field(default=None, gt=0)
    """Stop the run above this |engine - trainer log-prob| outside router near-ties; null only measures."""
    validation: ValidationSection = ValidationSection()
    """Validate on held-out rows."""
    checkpoint: CheckpointSection = CheckpointSection()
    """Save checkpoints."""
