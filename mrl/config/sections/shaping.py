"""Settings of reward shaping and dynamic sampling."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from mrl.section import Section


class OverlongSection(Section):
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13)."""

    max_tokens: int = Field(ge=1)
    """Apply the full penalty at this length."""
    buffer_tokens: int = Field(ge=1)
    """Grow the penalty linearly over this many tokens before max_tokens."""
    factor: float = Field(default=1.0, ge=0)
    """Set the full penalty. The paper's 1.0 is for rewards of +1 and -1; 0.5 is equivalent for 1 and 0."""

    def faults(self) -> Iterator[str]:
        if self.buffer_tokens > self.max_tokens:
            yield f"overlong.buffer_tokens = {self.buffer_tokens} exceeds max_tokens = {self.max_tokens}"


class ShapingSection(Section):
    """Changes to a domain's rewards before the estimator, in the order of the fields."""

    clip: tuple[float, float] | None = None
    """Clip raw rewards to this range; null does not clip."""
    overlong: OverlongSection | None = None
    """Penalise long responses softly."""
    stop_properly: float | None = Field(default=None, le=1)
    """Truncated samples: multiply positive rewards by this if in [0, 1], else replace them (ProRL)."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtract this from the reward of a sample without an end-of-text token."""
    mask_truncated: bool = False
    """Keep truncated samples in group statistics but do not train on them (DAPO's overlong filtering)."""

    def faults(self) -> Iterator[str]:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"shaping.clip = {list(self.clip)}: the first value must be below the second"


MOST_PROMPTS = 4096
"""Most prompts that dynamic sampling takes in one step, whatever max_rounds allows."""


class FilterSection(Section):
    """Dynamic sampling: which groups to train on, and how much generation may be spent to find them."""

    min_reward_range: float | None = Field(default=0.0, ge=0)
    """Keep a group if max - min of its raw rewards is above this; null ignores the range."""
    mean_range: tuple[float, float] | None = None
    """Keep a group if its mean reward is strictly inside this range (-.inf, .inf: open); null: any."""
    max_rounds: int = Field(default=4, ge=1)
    """Generate at most this many rounds per step, then train on the groups found."""

    def faults(self) -> Iterator[str]:
        if self.min_reward_range is None and self.mean_range is None:
            yield "filter: min_reward_range and mean_range are both null; set one, or filter: null"
        if self.mean_range is not None and self.mean_range[0] >= self.mean_range[1]:
            yield f"filter.mean_range = {list(self.mean_range)}: the first value must be below the second"
