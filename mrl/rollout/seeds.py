"""Seeds of a run: no two samples or requests share one."""

from __future__ import annotations

import functools
import hashlib
import struct

from mrl.errors import ConfigError

MAX_ATTEMPTS = 1 << 10
"""Largest number of requests per sample; each has its own seed."""

_PROMPT_LOW_BITS, _SAMPLE_LOW_BITS = 20, 12
_PROMPT_HIGH_BITS, _SAMPLE_HIGH_BITS, _ATTEMPT_BITS = 17, 4, MAX_ATTEMPTS.bit_length() - 1
_LOW_BITS = _PROMPT_LOW_BITS + _SAMPLE_LOW_BITS
_MASK_32 = (1 << 32) - 1


def request_id(prompt_index: int, sample_index: int) -> str:
    """Return the name of a sample and its requests, unique in a run."""
    return f"{prompt_index}.{sample_index}"


def sample_of(request_id: str) -> tuple[int, int]:
    """Return (prompt index, sample index) of a request's id."""
    prompt_index, sample_index = request_id.split(".")
    return int(prompt_index), int(sample_index)


def seed_of_request(run_seed: int, request_id: str, attempt: int = 0) -> int:
    """Return a request's `sample_seed`; validation prompts (negative indices) map above all others."""
    index, number = sample_of(request_id)
    return sample_seed(run_seed, index if index >= 0 else (1 << 36) - index, number, attempt)


def sample_seed(run_seed: int, prompt_index: int, sample_index: int, attempt: int = 0) -> int:
    """Return the 63-bit seed of one sample's random stream; no two samples or attempts of a run share one.

    One to one by construction: the low 32 bits are a keyed permutation of (prompt modulo 2^20, sample modulo
    2^12); the high 31 bits are the remaining bits and the attempt. torch's CPU generator uses only the low 32
    bits of a seed, which also differ between all samples of 2^20 neighbouring prompts.
    """
    limits = (
        ("prompt_index", prompt_index, _PROMPT_LOW_BITS + _PROMPT_HIGH_BITS),
        ("sample_index", sample_index, _SAMPLE_LOW_BITS + _SAMPLE_HIGH_BITS),
        ("attempt", attempt, _ATTEMPT_BITS),
    )
    for name, value, bits in limits:
        if not 0 <= value < 1 << bits:
            raise ConfigError(f"{name} = {value} has no seed of its own; it must be in 0..2^{bits} - 1")
    prompt_high, prompt_low = divmod(prompt_index, 1 << _PROMPT_LOW_BITS)
    sample_high, sample_low = divmod(sample_index, 1 << _SAMPLE_LOW_BITS)
    high = (prompt_high << _SAMPLE_HIGH_BITS | sample_high) << _ATTEMPT_BITS | attempt
    return high << _LOW_BITS | _permute_32(prompt_low << _SAMPLE_LOW_BITS | sample_low, _keys(run_seed, high))


@functools.lru_cache(maxsize=1024)
def _keys(run_seed: int, high: int) -> tuple[int, ...]:
    """Return four 32-bit words."""
    digest = hashlib.blake2b(f"{run_seed}.{high}".encode(), digest_size=16).digest()
    return struct.unpack("<4I", digest)


def _permute_32(value: int, keys: tuple[int, ...]) -> int:
    """Permute 0..2^32 - 1: xor, odd multiplication and shift-xor are each invertible."""
    for key in keys:
        value ^= key
        value = value * 0x9E3779B1 & _MASK_32
        value ^= value >> 15
        value = value * 0x85EBCA77 & _MASK_32
        value ^= value >> 13
    return value
