"""Messages of a pool to an environment's host: JSON, which never makes a host of another node run code."""

from __future__ import annotations

import dataclasses
import json

from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.errors import ConfigError


def opening_message(spec: EnvironmentSpec, deadlines: Deadlines) -> bytes:
    """Return a host's first message. Raise ConfigError if the options are not JSON (dates, non-text keys)."""
    options = dict(spec.options)
    try:
        data = json.dumps([spec.name, options, dataclasses.asdict(deadlines)])
    except TypeError as error:
        raise ConfigError(f"agent.options of {spec.name!r}: {error}") from error
    if json.loads(data)[1] != options:
        raise ConfigError(f"agent.options of {spec.name!r}: keys must be text and values must be JSON")
    return data.encode()


def read_opening(data: bytes) -> tuple[EnvironmentSpec, Deadlines]:
    """Return the arguments of `opening_message`."""
    name, options, deadlines = json.loads(data)
    return EnvironmentSpec(name, options), Deadlines(**deadlines)


def call_message(key: str, turn: int, operation: str, payload: bytes) -> bytes:
    """Return the message of a call; `payload`, JSON for the guest of this key, is on its own line."""
    return json.dumps([key, turn, operation]).encode() + b"\n" + payload


def read_call(data: bytes) -> tuple[str, int, str, bytes]:
    """Return the arguments of `call_message`."""
    head, _, payload = data.partition(b"\n")
    key, turn, operation = json.loads(head)
    return key, turn, operation, payload
