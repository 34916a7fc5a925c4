"""What a pool says to an environment's host: JSON, which the host of another node reads without running anything of it."""

from __future__ import annotations

import dataclasses
import json

from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.errors import ConfigError


def opening_message(spec: EnvironmentSpec, deadlines: Deadlines) -> bytes:
    """Return a host's first message. ConfigError for options that JSON has not, as dates and keys that are no text."""
    options = dict(spec.options)
    try:
        data = json.dumps([spec.name, options, dataclasses.asdict(deadlines)])
    except TypeError as error:
        raise ConfigError(f"agent.options of {spec.name!r}: {error}") from error
    if json.loads(data)[1] != options:
        raise ConfigError(f"agent.options of {spec.name!r}: keys are text, and values what JSON has")
    return data.encode()


def read_opening(data: bytes) -> tuple[EnvironmentSpec, Deadlines]:
    """Return what `opening_message` was called with."""
    name, options, deadlines = json.loads(data)
    return EnvironmentSpec(name, options), Deadlines(**deadlines)


def call_message(key: str, turn: int, operation: str, payload: bytes) -> bytes:
    """Return the message of a call: `payload`, JSON for the guest of this key, is a line of its own."""
    return json.dumps([key, turn, operation]).encode() + b"\n" + payload


def read_call(data: bytes) -> tuple[str, int, str, bytes]:
    """Return what `call_message` was called with."""
    head, _, payload = data.partition(b"\n")
    key, turn, operation = json.loads(head)
    return key, turn, operation, payload
