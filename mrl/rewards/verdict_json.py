"""Verdicts as JSON types, for the replies of reward workers to the pool."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mrl.errors import RewardError
from mrl.rewards.contract import checked_value, printable_reason
from mrl.samples import Verdict, VerdictKind

_MAX_REASON = 500
_MAX_PARTS = 64


def encode_verdict(verdict: Verdict | None) -> dict[str, Any] | None:
    """Return a verdict as JSON types; None (does not apply) stays None."""
    if verdict is None:
        return None
    tokens = verdict.token_values
    return {
        "kind": verdict.kind.value,
        "value": verdict.value,
        "reason": verdict.reason[:_MAX_REASON],
        "parts": dict(verdict.parts),
        "verifier": verdict.verifier,
        "version": verdict.version,
        "seconds": verdict.seconds,
        "token_values": None if tokens is None else [None if math.isnan(v) else float(v) for v in tokens],
    }


def decode_verdict(data: Any, *, verifier: str, version: str, num_tokens: int | None) -> Verdict | None:
    """Return the verdict in a reply; raise RewardError if it breaks the contract."""
    if data is None:
        return None
    if not isinstance(data, dict) or data.get("kind") not in {kind.value for kind in VerdictKind}:
        raise RewardError(f"verifier {verifier}: the reply {str(data)[:80]!r} is not a verdict")
    kind = VerdictKind(data["kind"])
    value = data.get("value")
    if (value is None) != (kind is VerdictKind.NO_REWARD):
        raise RewardError(
            f"verifier {verifier}: a verdict of kind {kind.value} cannot have the value {value!r}"
        )
    parts = data.get("parts") or {}
    if not isinstance(parts, dict) or len(parts) > _MAX_PARTS:
        raise RewardError(
            f"verifier {verifier}: the parts of a verdict must be at most {_MAX_PARTS} named numbers"
        )
    return Verdict(
        kind=kind,
        value=None if value is None else checked_value(value, verifier=verifier),
        reason=printable_reason(str(data.get("reason", ""))[:_MAX_REASON])[:_MAX_REASON],
        parts={str(name): checked_value(part, verifier=verifier) for name, part in parts.items()},
        verifier=str(data.get("verifier") or verifier),
        version=str(data.get("version") or version),
        seconds=checked_value(data.get("seconds", 0.0), verifier=verifier),
        token_values=_token_values(data.get("token_values"), verifier, num_tokens),
    )


def _token_values(values: Any, verifier: str, num_tokens: int | None) -> np.ndarray | None:
    if values is None:
        return None
    if not isinstance(values, list) or (num_tokens is not None and len(values) != num_tokens):
        shown = len(values) if isinstance(values, list) else type(values).__name__
        raise RewardError(f"verifier {verifier}: {shown} token values for a response of {num_tokens} tokens")
    floats = [math.nan if value is None else checked_value(value, verifier=verifier) for value in values]
    return np.asarray(floats, dtype=np.float32)
