"""Pack what changed in a message since the version before, without loss. Pure.

A packed message lists the 16-bit words that changed: the distances between them and their exclusive ors with
the old words, compressed by zlib. With bfloat16 weights and small steps most words stay.
"""

from __future__ import annotations

import zlib

import numpy as np
import torch

from mrl.errors import WeightSyncError

_LONGEST = 65535
"""Largest distance of a list entry; longer ones take several entries, whose words change by 0."""
_MOST_CHANGED = 0.3
"""Share of changed words from which a message is sent whole: packing no longer pays for its time."""


def packed_changes(old: torch.Tensor, new: torch.Tensor) -> torch.Tensor | None:
    """Return what turns `old` into `new` as flat uint8; None if the whole message is as small.

    Both are flat uint8 of one even size (`schedule.ALIGN`)."""
    before, after = _words(old), _words(new)
    places = np.flatnonzero(before != after)
    if len(places) > _MOST_CHANGED * len(after):
        return None
    changes = before[places] ^ after[places]
    distances = np.diff(places, prepend=-1) - 1
    empty = distances // _LONGEST
    entries = np.arange(len(places)) + np.cumsum(empty)
    listed = np.full((2, len(places) + int(empty.sum())), [[_LONGEST], [0]], np.uint16)
    listed[0, entries], listed[1, entries] = distances - empty * _LONGEST, changes
    packed = zlib.compress(listed.tobytes(), 1)
    return torch.frombuffer(bytearray(packed), dtype=torch.uint8) if len(packed) < new.numel() else None


def apply_changes(old: torch.Tensor, packed: torch.Tensor) -> None:
    """Turn `old` into the new message in place; raise WeightSyncError if `packed` does not fit it."""
    words = _words(old)
    try:
        most = 4 * (len(words) + len(words) // _LONGEST + 1)
        data = zlib.decompressobj().decompress(packed.numpy().tobytes(), most)
        listed = np.frombuffer(data, np.uint16).reshape(2, -1)
    except (zlib.error, ValueError) as error:
        raise WeightSyncError(f"malformed changes of a weight sync message: {error}") from error
    changed = listed[1] != 0
    places = np.cumsum(listed[0].astype(np.int64) + changed)[changed] - 1
    if len(places) and places[-1] >= len(words):
        raise WeightSyncError(f"a weight sync message changes word {places[-1]} of {len(words)}")
    words[places] ^= listed[1][changed]


def pays(num_bytes: int, packed_bytes: int, pack_seconds: float, bytes_per_second: float) -> bool:
    """Return True if packing takes less time than it saves on a link of this rate."""
    return pack_seconds < (num_bytes - packed_bytes) / bytes_per_second


def _words(data: torch.Tensor) -> np.ndarray:
    return data.numpy().view(np.uint16)
