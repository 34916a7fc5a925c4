"""Training low-rank changes of frozen weights."""

from typing import Literal

from pydantic import Field, field_validator

from mrl.section import Section

Target = Literal["attention", "mlp", "shared_experts", "routed_experts"]
"""The linear layers of a model by what they belong to; mlp: those of layers without experts."""


class LoraSection(Section):
    """Low-rank adapters (LoRA, arXiv 2106.09685): a weight W is trained as W + (alpha / rank) B A, where W stays.

    There is no dropout: two passes over a sample must give it the same log-probs.
    """

    rank: int = Field(default=16, ge=1)
    """Rows of A, columns of B."""
    alpha: float = Field(default=32.0, gt=0)
    """B A counts alpha / rank times."""
    targets: tuple[Target, ...] = Field(default=("attention",), min_length=1)
    """The linear layers that have adapters: attention, mlp, shared_experts, routed_experts (each expert its own)."""

    @field_validator("targets")
    @classmethod
    def _named_once(cls, targets: tuple[Target, ...]) -> tuple[Target, ...]:
        if len(set(targets)) != len(targets):
            raise ValueError(f"targets names something twice: {', '.join(targets)}")
        return targets

    @property
    def scale(self) -> float:
        """How often B A counts."""
        return self.alpha / self.rank
