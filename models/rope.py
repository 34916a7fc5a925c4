"""Read the rotary embedding's settings (arXiv 2104.09864), with YaRN (arXiv 2309.00071) and Llama 3.1's form
(arXiv 2407.21783), from config.json.

kernels/rotary.py computes the angles; this module imports no engine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

from mrl.models.hf_config import HfConfig, field

SCALED = {"factor", "original_max_position_embeddings"}
KEYS = {
    "default": {"mrope_section", "mrope_interleaved"},
    "yarn": SCALED | {"mscale", "mscale_all_dim", "beta_fast", "beta_slow", "truncate"},
    "llama3": SCALED | {"low_freq_factor", "high_freq_factor"},
}
"""Kind of embedding -> settings that are read, besides those of every kind. Sections concern image positions;
text positions are the same in all sections."""


@dataclasses.dataclass(frozen=True, slots=True)
class Yarn:
    """YaRN: frequencies below index `low` are kept, from `high` on divided by `factor`, between blended."""

    factor: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3:
    """Llama 3.1's scaling: frequencies with more than `length` / `low` positions per turn are divided by
    `factor`, those with less than `length` / `high` are kept, those between are blended."""

    factor: float
    low: float
    high: float
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Llama 4's scaling of rotated queries, by 1 + beta * log(1 + floor(position / length))."""

    beta: float
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """Rotary embedding over the first `width` dimensions of a head; the others are not rotated."""

    theta: float
    width: int
    scaling: Yarn | Llama3 | None = None
    scale: float = 1.0
    """Multiplies cosines and sines."""
    query_growth: QueryGrowth | None = None


def rope_settings(hf: HfConfig) -> Mapping[str, Any]:
    """Return the rotary settings: `rope_parameters` in transformers 5, `rope_scaling` in 4."""
    newer, older = hf.get("rope_parameters"), hf.get("rope_scaling")
    return newer or older or {}


def kind(hf: HfConfig) -> str:
    """Return "default", "yarn", "llama3", or another name of transformers' table."""
    settings = rope_settings(hf)
    return settings.get("rope_type", settings.get("type", "default"))


def rotary_share(hf: HfConfig, *, default: float = 1.0) -> float:
    """Return the share of a head's dimensions that is rotated; transformers 4 has it outside the settings."""
    newer, older = rope_settings(hf).get("partial_rotary_factor"), hf.get("partial_rotary_factor")
    return newer or older or default


def max_positions(hf: HfConfig) -> int | None:
    """Return the maximum sequence length; None if config.json does not set it.

    YaRN's factor scales the original length: vLLM's table has that size, even if `max_position_embeddings`
    was not updated.
    """
    settings, length = rope_settings(hf), hf.get("max_position_embeddings")
    original = settings.get("original_max_position_embeddings")
    if kind(hf) == "yarn" and original:
        return int(original * float(field(settings, "factor")))
    return None if length is None else int(length)


def unsupported(
    hf: HfConfig, kinds: Collection[str], *, partial: bool, keys: Collection[str] = ()
) -> list[str]:
    """List as text a kind outside `kinds`, keys that neither this module nor the family (`keys`) reads, and a
    rotated share unless `partial`."""
    if kind(hf) not in kinds:
        return [f"rope_type = {kind(hf)!r} (supported: {', '.join(map(repr, sorted(kinds)))})"]
    read = KEYS[kind(hf)] | set(keys) | {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    problems = [f"{key} of rope_type {kind(hf)!r}" for key in sorted(rope_settings(hf).keys() - read)]
    if not partial and (share := rotary_share(hf)) != 1:
        problems.append(f"partial_rotary_factor = {share} (supported: 1)")
    return problems


def rope(hf: HfConfig, *, width: int) -> Rope:
    """Return the embedding of kind "default", "yarn" or "llama3", as transformers computes it."""
    settings, older = rope_settings(hf), hf.get("rope_theta")
    theta = float(settings.get("rope_theta") or older or field(hf, "rope_theta"))
    if kind(hf) == "default":
        return Rope(theta, width)
    factor = float(field(settings, "factor"))
    length = settings.get("original_max_position_embeddings") or field(hf, "max_position_embeddings")
    if kind(hf) == "llama3":
        low, high = (float(field(settings, f"{name}_freq_factor")) for name in ("low", "high"))
        return Rope(theta, width, Llama3(factor, low, high, length))
    fast, slow = settings.get("beta_fast") or 32, settings.get("beta_slow") or 1
    low, high = (
        width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (fast, slow)
    )
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    yarn = Yarn(factor, low=max(low, 0), high=min(high, width - 1))
    over, under = settings.get("mscale"), settings.get("mscale_all_dim")
    scale = mscale(factor, over) / mscale(factor, under) if over and under else mscale(factor)
    return Rope(theta, width, yarn, scale)


def mscale(factor: float, weight: float = 1.0) -> float:
    """Return YaRN's temperature for contexts `factor` times longer.

    >>> mscale(1.0), round(mscale(40.0), 4)
    (1.0, 1.3689)
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
