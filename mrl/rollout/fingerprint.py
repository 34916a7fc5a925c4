"""What tells whether two responses are the same to the last bit, and about where they part: made where the tokens are."""

from __future__ import annotations

import base64

import numpy as np
import xxhash

MOST_MARKS = 64


def fingerprint(tokens: np.ndarray, logprobs: np.ndarray) -> tuple[str, str, str]:
    """Return (digest of the tokens [T], digest of their log-probs [T], marks).

    Marks find the first token that differs: one byte, of a hash of all tokens and log-probs so far, for each of
    at most 64 equal parts.
    """
    tokens, logprobs = tokens.astype(np.int32), logprobs.astype(np.float32)
    digests = (f"{xxhash.xxh3_64_intdigest(array.tobytes()):016x}" for array in (tokens, logprobs))
    return *digests, base64.b64encode(_marks(tokens, logprobs)).decode()  # type: ignore[return-value]


def _marks(tokens: np.ndarray, logprobs: np.ndarray) -> bytes:
    count = len(tokens)
    bits = logprobs.view(np.uint32).astype(np.uint64)
    mixed = (tokens.astype(np.uint64) << np.uint64(32) | bits) * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    mixed *= np.arange(count, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    so_far = np.cumsum(mixed, dtype=np.uint64) * np.uint64(0xD6E8FEB86659FD93)
    return (so_far[ends_of_parts(count) - 1] >> np.uint64(56)).astype(np.uint8).tobytes()


def ends_of_parts(count: int) -> np.ndarray:
    """One past the last token of each part."""
    size = max(1, -(-count // MOST_MARKS))
    return np.minimum(np.arange(size, count + size, size), count) if count else np.zeros(0, np.int64)
