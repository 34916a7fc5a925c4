"""The corrections for the difference between engine and trainer, by kind, each with its own constants.

What a bound of 2 means differs from kind to kind, so a file or override that changes the kind leaves the constants
given before it (mrl/config/load.py, CHOICES).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field

from mrl.section import Section, named

CORRECTION_KINDS = Literal["off", "truncated", "icepop", "sequence_mask", "geometric"]
"""Every value of correction.kind."""


class NoCorrection(Section):
    """The difference between engine and trainer is measured and not acted on."""

    kind: Literal["off"] = "off"
    """Correction."""


class _Bounded(Section):
    """Weights exp(old - engine log-prob), or what is kept of them, between two bounds."""

    def faults(self) -> Iterator[str]:
        own: Any = self  # each kind declares bounds of its own
        if own.low >= own.high:
            yield f"correction.low = {own.low} must be below correction.high = {own.high}"


class TruncatedCorrection(Section):
    """Each token's weight, cut above: truncated importance sampling (TIS)."""

    kind: Literal["truncated"] = "truncated"
    """Correction."""
    high: float = Field(default=2.0, gt=0)
    """Largest weight of a token; 2 is also verl's (rollout_is_threshold)."""


class IcepopCorrection(_Bounded):
    """Each token's weight, and 0 for a token whose weight lies outside the bounds (IcePop, arXiv
    2510.18855)."""

    kind: Literal["icepop"] = "icepop"
    """Correction."""
    low: float = Field(default=0.5, ge=0)
    """Tokens below are dropped; the paper's alpha."""
    high: float = Field(default=5.0, gt=0)
    """Tokens above are dropped; the paper's beta."""


class SequenceMaskCorrection(_Bounded):
    """Sequences whose geometric mean of weights lies outside the bounds are dropped."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    """Correction."""
    low: float = Field(default=0.999, ge=0)
    """Sequences whose mean weight is below are dropped; verl's bound for geometric means
    (decoupled_geo_rs)."""
    high: float = Field(default=1.001, gt=0)
    """Sequences whose mean weight is above are dropped; see policy/rollout_weight_geometric before widening
    it."""
    token_weights: Literal["none", "raw", "truncated"] = "none"
    """Weights of the tokens in kept sequences: none (1), raw, or truncated at 2 (TIS's)."""


class GeometricCorrection(Section):
    """The geometric mean of a sequence's weights, cut above, for all its tokens."""

    kind: Literal["geometric"] = "geometric"
    """Correction."""
    high: float = Field(default=1.2, gt=0)
    """Largest weight of a sequence; ROLL's bound (train_infer_correction)."""


def _with_kind(value: Any) -> Any:
    """No correction at all is off; constants without a kind and an unknown kind are refused with the known
    ones."""
    if not isinstance(value, dict):
        return value
    if value and "kind" not in value:
        kinds = ", ".join(get_args(CORRECTION_KINDS)[1:])
        raise ValueError(f"{', '.join(value)} needs a correction.kind, whose constant it is: {kinds}")
    return value | {"kind": named("correction", CORRECTION_KINDS)(value.get("kind", "off"))}


Correction = Annotated[
    Annotated[
        NoCorrection | TruncatedCorrection | IcepopCorrection | SequenceMaskCorrection | GeometricCorrection,
        Discriminator("kind"),
    ],
    BeforeValidator(_with_kind),
]
