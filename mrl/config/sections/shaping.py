"""Reward shaping, and the choice of groups that are worth training on."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from mrl.section import Section


class OverlongSection(Section):
    """DAPO's soft penalty on long responses (arXiv 2503.14476, eq. 13)."""

    max_tokens: int = Field(ge=1)
    """Length at which the full penalty is reached."""
    buffer_tokens: int = Field(ge=1)
    """Tokens before max_tokens over which the penalty grows linearly."""
    factor: float = Field(default=1.0, ge=0)
    """Full penalty. The paper's 1.0 is for rewards of +1 and -1; where they are 1 and 0, 0.5 is the same."""

    def faults(self) -> Iterator[str]:
        if self.buffer_tokens > self.max_tokens:
            yield f"overlong.buffer_tokens = {self.buffer_tokens} exceeds max_tokens = {self.max_tokens}"


class ShapingSection(Section):
    """What happens to a domain's rewards before the estimator, in the order of the fields."""

    clip: tuple[float, float] | None = None
    """Least and largest raw reward; null leaves rewards as they are."""
    overlong: OverlongSection | None = None
    """Soft length penalty."""
    stop_properly: float | None = Field(default=None, le=1)
    """Truncated samples: in [0, 1] multiplies a positive reward, below 0 replaces the reward (ProRL)."""
    missing_eos_penalty: float = Field(default=0.0, ge=0)
    """Subtracted from the reward of a sample without an end-of-text token."""
    mask_truncated: bool = False
    """Truncated samples stay in their group's statistics and are not trained on (DAPO's overlong
    filtering)."""

    def faults(self) -> Iterator[str]:
        if self.clip is not None and self.clip[0] >= self.clip[1]:
            yield f"shaping.clip = {list(self.clip)}: the first must be below the second"


MOST_PROMPTS = 4096
"""Prompts that dynamic sampling takes in one step at most, whatever max_rounds allows."""


class FilterSection(Section):
    """Dynamic sampling: which groups are worth training on, and what may be spent to find them."""

    min_reward_range: float | None = Field(default=0.0, ge=0)
    """A group is kept if max - min of its raw rewards is above this; null does not look at the spread."""
    mean_range: tuple[float, float] | None = None
    """A group is kept if its mean reward is above the first and below the second (-.inf and .inf leave a side open); null does
    not look at the mean."""
    max_rounds: int = Field(default=4, ge=1)
    """Rounds of generation in one step; when they are spent and groups are missing, it trains on fewer."""

    def faults(self) -> Iterator[str]:
        if self.min_reward_range is None and self.mean_range is None:
            yield "filter: min_reward_range and mean_range are both None; give one, or filter: null"
        if self.mean_range is not None and self.mean_range[0] >= self.mean_range[1]:
            yield f"filter.mean_range = {list(self.mean_range)}: the first must be below the second"
