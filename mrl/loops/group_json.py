"""Groups as plain JSON values and back, for checkpoints that keep surplus groups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from mrl.errors import CheckpointError
from mrl.samples import Group, Prompt, Sample, Segment, Status, Verdict, VerdictKind

ARRAYS = {
    "prompt_tokens": np.int32,
    "response_tokens": np.int32,
    "loss_mask": np.bool_,
    "rollout_logprobs": np.float32,
    "policy_versions": np.int32,
    "routed_experts": np.int16,
    "token_values": np.float32,
}


def to_json(group: Group) -> dict[str, Any]:
    """The samples and the prompt's index: rows may hold what JSON does not (dates, bytes), and the stream has them."""
    return {"prompt": group.prompt.index, "samples": _plain(group.samples)}


def from_json(value: dict[str, Any], prompt_at: Callable[[int], Prompt]) -> Group:
    """The group of `to_json`'s value. CheckpointError where another release saved it, whose samples have other fields."""
    try:
        return Group(prompt_at(value["prompt"]), tuple(_sample(s) for s in value["samples"]))
    except (TypeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"the checkpoint's surplus groups were saved by another release of mrl ({error}); finish the run with that one"
        ) from error


def _sample(value: dict[str, Any]) -> Sample:
    fields: dict[str, Any] = _arrays(value)
    fields["status"] = Status(value["status"])
    fields["verdict"] = _verdict(value["verdict"])
    fields["segments"] = tuple(Segment(**segment) for segment in value["segments"])
    return Sample(**fields)


def _verdict(value: dict[str, Any] | None) -> Verdict | None:
    if value is None:
        return None
    fields: dict[str, Any] = _arrays(value)
    fields["kind"] = VerdictKind(value["kind"])
    return Verdict(**fields)


def _arrays(value: dict[str, Any]) -> dict[str, Any]:
    return {k: np.array(v, ARRAYS[k]) if k in ARRAYS and v is not None else v for k, v in value.items()}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, Status | VerdictKind):
        return value.value
    if isinstance(value, tuple | list):
        return [_plain(v) for v in value]
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return value
