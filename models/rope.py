"""What a config.json says about the rotary embedding (arXiv 2104.09864), YaRN (arXiv 2309.00071) and Llama 3.1's
form (arXiv 2407.21783) included.

The angles themselves are computed in kernels/rotary.py; this module imports no engine.
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
"""Kind of the embedding -> the keys of its settings that are read, beside those that every kind has. Sections are of
positions in images; those of text are the same in all of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Yarn:
    """Frequencies below `low` stay, those from `high` on are divided by `factor`, those between are blended."""

    factor: float
    low: float
    high: float


@dataclasses.dataclass(frozen=True, slots=True)
class Llama3:
    """Frequencies of more than `length` / `low` positions a turn are divided by `factor`, those of less than
    `length` / `high` stay, those between are blended."""

    factor: float
    low: float
    high: float
    length: int


@dataclasses.dataclass(frozen=True, slots=True)
class Rope:
    """One rotary embedding over the first `width` dimensions of a head; the others are not turned."""

    theta: float
    width: int
    scaling: Yarn | Llama3 | None = None
    scale: float = 1.0
    """Multiplies cosines and sines."""


def parameters(hf: HfConfig) -> Mapping[str, Any]:
    """The rotary settings: transformers 5 keeps them in `rope_parameters`, 4 in `rope_scaling`."""
    newer, older = hf.get("rope_parameters"), hf.get("rope_scaling")
    return newer or older or {}


def kind(hf: HfConfig) -> str:
    """ "default", "yarn", "llama3", or another name of transformers' table."""
    settings = parameters(hf)
    return settings.get("rope_type", settings.get("type", "default"))


def turned_share(hf: HfConfig, *, default: float = 1.0) -> float:
    """The share of a head's dimensions that are turned: transformers 5 keeps it among the rotary settings, 4
    beside them."""
    newer, older = parameters(hf).get("partial_rotary_factor"), hf.get("partial_rotary_factor")
    return newer or older or default


def max_positions(hf: HfConfig) -> int | None:
    """How long a sequence may be; None where config.json does not say. YaRN's factor stretches the original length, which is
    what vLLM makes a table of, also where a user has added the settings and left `max_position_embeddings` as it was."""
    settings, length = parameters(hf), hf.get("max_position_embeddings")
    original = settings.get("original_max_position_embeddings")
    if kind(hf) == "yarn" and original:
        return int(original * float(field(settings, "factor")))
    return None if length is None else int(length)


def unsupported(hf: HfConfig, kinds: Collection[str], *, partial: bool) -> list[str]:
    """The kind of the embedding where it is none of `kinds`, the keys of its settings that are not read, and a
    share of the head where it is not `partial`; as text."""
    if kind(hf) not in kinds:
        return [f"rope_type = {kind(hf)!r} (only {' or '.join(map(repr, sorted(kinds)))})"]
    read = KEYS[kind(hf)] | {"type", "rope_type", "rope_theta", "partial_rotary_factor"}
    problems = [f"{key} of rope_type {kind(hf)!r}" for key in sorted(parameters(hf).keys() - read)]
    if not partial and (share := turned_share(hf)) != 1:
        problems.append(f"partial_rotary_factor = {share} (only 1)")
    return problems


def rope(hf: HfConfig, *, width: int) -> Rope:
    """The embedding of kind "default", "yarn" or "llama3", as transformers reads it."""
    settings, older = parameters(hf), hf.get("rope_theta")
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
    """YaRN's temperature for contexts `factor` times longer.

    >>> mscale(1.0), round(mscale(40.0), 4)
    (1.0, 1.3689)
    """
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0
