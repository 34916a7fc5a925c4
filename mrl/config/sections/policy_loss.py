"""Policy losses by name, each with its own constants.

A bound means something else in each loss, so a file or override that changes the name drops the constants
given before it (mrl/config/load.py, CHOICES).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field

from mrl.section import Section, chosen


class LossSection(Section):
    """Constants of one policy loss; `algorithm.loss` chooses a subclass in this file by its name."""

    name: Any


class PpoClipLoss(LossSection):
    """PPO's clipped surrogate (arXiv 1707.06347) with separate bounds (DAPO)."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """Choose the loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """Clip the ratio below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """Clip the ratio above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Bound the loss of a negative advantage at this ratio (arXiv 1912.09729; usually 3); null: no bound."""


class GspoLoss(LossSection):
    """Clipped surrogate with the sequence's length-normalised ratio, in token form (arXiv 2507.18071)."""

    name: Literal["gspo"] = "gspo"
    """Choose the loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """Clip the sequence ratio below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """Clip the sequence ratio above at 1 + clip_high."""


class CispoLoss(LossSection):
    """REINFORCE weighted by a clipped, detached ratio (MiniMax-M1, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """Choose the loss."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """Clip the weight below at 1 - clip_low; 1 sets no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """Clip the weight above at 1 + clip_high."""


class DppoTvLoss(LossSection):
    """Policy gradient without tokens whose probability moved too far (arXiv 2602.04879, binary TV)."""

    name: Literal["dppo_tv"] = "dppo_tv"
    """Choose the loss."""
    low: float = Field(default=0.2, gt=0, le=1)
    """Drop tokens of negative advantage whose probability fell by more than this; prime-rl's default."""
    high: float = Field(default=0.2, gt=0, le=1)
    """Drop tokens of positive advantage whose probability rose by more than this."""


class ReinforceLoss(LossSection):
    """Plain policy gradient; old log-probs are only measured."""

    name: Literal["reinforce"] = "reinforce"
    """Choose the loss."""


class CustomLoss(LossSection):
    """Your own loss, imported by path."""

    name: Literal["custom"] = "custom"
    """Choose the loss."""
    function: str = Field(pattern=r"^.+:\w+$")
    """Call this package.module:function or file.py:function with mrl.algorithms.losses.Tokens and the
    options; it returns PerToken."""
    options: dict[str, float | int | bool | str] = {}
    """Pass these keyword arguments to the function."""


LOSSES = tuple(LossSection.__subclasses__())
"""Every section that algorithm.loss can be."""

LOSS_NAMES = tuple(str(section.model_fields["name"].default) for section in LOSSES)
"""Every value of loss.name; "custom" imports a function."""

if TYPE_CHECKING:
    PolicyLoss = LossSection
else:
    PolicyLoss = Annotated[
        Annotated[Union[LOSSES], Discriminator("name")],  # noqa: UP007 the members are a tuple
        chosen("loss", "name", LOSS_NAMES, default="ppo_clip"),
    ]
