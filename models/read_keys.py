"""Find the keys of config.json that a family reads, by recording its accesses."""

from __future__ import annotations

from typing import Any

from mrl.models.family import Family, outer_rows
from mrl.models.hf_config import HARMLESS, HfConfig, RecordingConfig, field
from mrl.models.layout import Layout
from mrl.models.tensors import TRAINER


def unread_keys(family: Family, hf: HfConfig) -> list[str]:
    """Return the keys of config.json that no code reads and that are not known to be harmless.

    Null and an empty object set nothing (transformers 4 writes `pruned_heads` so)."""
    known = _read_keys(family, hf) | HARMLESS | set(family.harmless)
    return sorted(key for key, value in hf.items() if value not in (None, {}) and key not in known)


def computed_from(family: Family, hf: HfConfig) -> dict[str, Any]:
    """Return the part of config.json that, besides the weights, determines training and serving."""
    keys = _read_keys(family, hf) - HARMLESS - set(family.harmless)
    return {key: hf.get(key) for key in sorted(keys)}


def _read_keys(family: Family, hf: HfConfig) -> set[str]:
    noted = RecordingConfig(hf)
    for read in (family.unsupported, family.draft_prefixes, family.transformer_fields, family.rotary):
        read(noted)
    for number in range(field(noted, "num_hidden_layers")):
        family.layer(noted, number, TRAINER, range(0))
    outer_rows(noted, Layout())
    return noted.read_keys
