"""Corrections of the mismatch between engine and trainer, by kind, each with its own constants.

A bound of 2 means something else in each kind, so a file or override that changes the kind drops the
constants given before it (mrl/config/load.py, CHOICES).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import BeforeValidator, Discriminator, Field

from mrl.section import Section, known_name

CORRECTION_KINDS = Literal["off", "truncated", "icepop", "sequence_mask", "geometric", "off_policy_mask"]
"""Every value of correction.kind."""


class NoCorrection(Section):
    """No correction: the mismatch between engine and trainer is only measured."""

    kind: Literal["off"] = "off"
    """Choose the correction."""


class _Bounded(Section):
    """Section whose weights exp(old - engine log-prob) have a lower and an upper bound."""

    def faults(self) -> Iterator[str]:
        bounds: Any = self  # each kind declares its own
        if bounds.low >= bounds.high:
            yield f"correction.low = {bounds.low} must be below correction.high = {bounds.high}"


class TruncatedCorrection(Section):
    """Truncated importance sampling (TIS): each token's weight, capped."""

    kind: Literal["truncated"] = "truncated"
    """Choose the correction."""
    high: float = Field(default=2.0, gt=0)
    """Cap the weight of a token; 2 is also verl's (rollout_is_threshold)."""


class IcepopCorrection(_Bounded):
    """IcePop (arXiv 2510.18855): each token's weight, set to 0 outside the bounds."""

    kind: Literal["icepop"] = "icepop"
    """Choose the correction."""
    low: float = Field(default=0.5, ge=0)
    """Drop tokens with a weight below this; the paper's alpha."""
    high: float = Field(default=5.0, gt=0)
    """Drop tokens with a weight above this; the paper's beta."""


class SequenceMaskCorrection(_Bounded):
    """Rejection of sequences whose geometric mean of token weights is outside the bounds."""

    kind: Literal["sequence_mask"] = "sequence_mask"
    """Choose the correction."""
    low: float = Field(default=0.999, ge=0)
    """Drop sequences with a mean weight below this; verl's bound for geometric means (decoupled_geo_rs)."""
    high: float = Field(default=1.001, gt=0)
    """Drop sequences with a mean weight above this; to widen it, see policy/rollout_weight_geometric."""
    token_weights: Literal["none", "raw", "truncated"] = "none"
    """Weight tokens of kept sequences by 1 (none), raw weights, or weights truncated at 2 (as TIS)."""


class GeometricCorrection(Section):
    """Geometric mean of a sequence's weights, capped, applied to all its tokens."""

    kind: Literal["geometric"] = "geometric"
    """Choose the correction."""
    high: float = Field(default=1.2, gt=0)
    """Cap the weight of a sequence; ROLL's bound (train_infer_correction)."""


class OffPolicyMaskCorrection(Section):
    """Mask of sequences with a negative advantage that the policy has left (DeepSeek-V3.2, arXiv
    2512.02556)."""

    kind: Literal["off_policy_mask"] = "off_policy_mask"
    """Choose the correction."""
    max_kl: float = Field(default=0.1, gt=0)
    """Drop a sequence of negative advantage if the mean of engine minus policy log-prob, nats per token, is
    above this. The paper gives no value; Trinity-RFT takes 0.1."""


def _with_kind(value: Any) -> Any:
    """Return the section with its kind, off if empty; refuse an unknown kind, or constants without a kind."""
    if not isinstance(value, dict):
        return value
    if value and "kind" not in value:
        kinds = ", ".join(get_args(CORRECTION_KINDS)[1:])
        raise ValueError(f"{', '.join(value)} needs a correction.kind that defines it: {kinds}")
    return value | {"kind": known_name("correction", CORRECTION_KINDS)(value.get("kind", "off"))}


Correction = Annotated[
    Annotated[
        NoCorrection
        | TruncatedCorrection
        | IcepopCorrection
        | SequenceMaskCorrection
        | GeometricCorrection
        | OffPolicyMaskCorrection,
        Discriminator("kind"),
    ],
    BeforeValidator(_with_kind),
]
