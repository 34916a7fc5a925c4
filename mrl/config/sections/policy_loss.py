"""The policy losses by name, each with its own constants.

Bounds mean different things under different names, so a file or override that changes the name leaves the constants
given before it (mrl/config/load.py, CHOICES).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Union

from pydantic import Discriminator, Field

from mrl.section import Section, chosen


class LossSection(Section):
    """The constants of one policy loss. A subclass in this file is a choice of `algorithm.loss`, by its name."""

    name: Any


class PpoClipLoss(LossSection):
    """Clipped surrogate of PPO (arXiv 1707.06347) with separate bounds (DAPO)."""

    name: Literal["ppo_clip"] = "ppo_clip"
    """Loss."""
    clip_low: float = Field(default=0.2, ge=0, le=1)
    """The ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=0.2, ge=0)
    """The ratio is clipped above at 1 + clip_high."""
    dual_clip: float | None = Field(default=None, gt=1)
    """Ratio at which the loss of a negative advantage stops growing (arXiv 1912.09729; usually 3); null: it does not."""


class GspoLoss(LossSection):
    """Clipped surrogate with the length-normalised ratio of the sequence, in its token form (arXiv
    2507.18071)."""

    name: Literal["gspo"] = "gspo"
    """Loss."""
    clip_low: float = Field(default=3e-4, ge=0, le=1)
    """The sequence ratio is clipped below at 1 - clip_low."""
    clip_high: float = Field(default=4e-4, ge=0)
    """The sequence ratio is clipped above at 1 + clip_high."""


class CispoLoss(LossSection):
    """REINFORCE with a clipped, detached ratio as weight (MiniMax-M1, arXiv 2506.13585)."""

    name: Literal["cispo"] = "cispo"
    """Loss."""
    clip_low: float = Field(default=1.0, ge=0, le=1)
    """The weight is at least 1 - clip_low; 1 means no lower bound."""
    clip_high: float = Field(default=4.0, ge=0)
    """The weight is at most 1 + clip_high."""


class ReinforceLoss(LossSection):
    """Plain policy gradient; old log-probs are only measured."""

    name: Literal["reinforce"] = "reinforce"
    """Loss."""


class CustomLoss(LossSection):
    """A loss of the user's own, imported by path."""

    name: Literal["custom"] = "custom"
    """Loss."""
    function: str = Field(pattern=r"^.+:\w+$")
    """package.module:function or file.py:function, called with mrl.algorithms.losses.Tokens and the options; it returns PerToken."""
    options: dict[str, float | int | bool | str] = {}
    """Keyword arguments of the function."""


LOSSES = tuple(LossSection.__subclasses__())
"""Every section that algorithm.loss can be."""

LOSS_NAMES = tuple(str(section.model_fields["name"].default) for section in LOSSES)
"""Every value of loss.name; "custom" imports a function."""

if TYPE_CHECKING:
    PolicyLoss = LossSection
else:
    PolicyLoss = Annotated[
        Annotated[Union[LOSSES], Discriminator("name")],  # noqa: UP007 made of what is there
        chosen("loss", "name", LOSS_NAMES, default="ppo_clip"),
    ]
