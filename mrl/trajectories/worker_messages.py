"""What the driver and a rollout worker send each other: msgpack in frames, never pickles.

| from the driver | | from the worker | |
|---|---|---|---|
| ConnectEngine | an engine is up | EngineConnected, EngineGone | it is connected; its connection ended |
| GiveUpEngine | an engine is lost | GroupsDone | judged groups |
| PauseRollouts | stop engines at a token boundary | RolloutsPaused | all stopped; partial groups if asked |
| ResumeRollouts | let engines step again | GroupsProgress | what groups still lack |
| | | WorkerPulse | each second: the worker lives |
| | | WorkerFailure | something of ours failed |

A connection begins as an engine's does (mrl/rollout/handshake.py).
Groups begin and are dropped by Ray calls, which keep their order: prompts do not fit here, because a row's ground
truth may be any object (`GroupStart`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec

from mrl.rollout.request import Sampling
from mrl.samples import Prompt, Sample
from mrl.trajectories.group_messages import GroupFields, plain_number


@dataclasses.dataclass(frozen=True, slots=True)
class GroupStart:
    """A group to begin."""

    number: int
    """Its name in messages; one that is begun again elsewhere has another."""
    prompt: Prompt
    sampling: Sampling
    """Without `lengths`."""
    lengths: tuple[int, ...] | None
    """`Sampling.lengths` of its samples."""
    records: tuple[Sample, ...]
    """What came of its samples before."""
    engine: int
    """The engine that takes its requests; -1 if the worker chooses."""


class WorkerMessage(msgspec.Struct, tag=True, array_like=True):
    """One frame."""


class ConnectEngine(WorkerMessage):
    """Connect an engine, which is paused."""

    engine: int
    host: str
    port: int


class GiveUpEngine(WorkerMessage):
    """Generate elsewhere what an engine has."""

    engine: int
    why: str


class PauseRollouts(WorkerMessage):
    """Stop all engines at a token boundary."""

    snapshot: bool
    """Send what has come so far of each open group."""


class ResumeRollouts(WorkerMessage):
    """Let the engines step again."""

    training: bool
    """False: only requests of a validation run."""


class EngineConnected(WorkerMessage):
    """An engine was tried; `EngineGone` came before if it cannot be reached."""

    engine: int


class EngineGone(WorkerMessage):
    """The connection of an engine ended."""

    engine: int
    why: str
    kind: str
    """Class of the error that the engine named; empty without one."""


class GroupsDone(WorkerMessage):
    """Judged groups."""

    newest_version: int
    """Newest version on the tokens that came since the last pause; -1 without any."""
    groups: list[tuple[int, GroupFields]]
    """Number of each, and its samples."""


class GroupProgress(msgspec.Struct, array_like=True):
    """What an open group lacks."""

    number: int
    unanswered: list[int]
    """Samples without a response."""
    unjudged: list[int]
    """Samples without a verdict."""
    waits_for_environments: bool


class GroupsProgress(WorkerMessage):
    """The open groups that changed."""

    newest_version: int
    groups: list[GroupProgress]


class RolloutsPaused(WorkerMessage):
    """No engine of the worker steps any more; all that ended before has been sent."""

    num_requests: int
    num_tokens: int
    groups: list[tuple[int, GroupFields]]
    """Each open group and what has come of it, if a snapshot was asked for."""


class WorkerPulse(WorkerMessage):
    """The worker lives."""

    silent_seconds: dict[int, float]
    """How long each engine has had work and made no step; without those that step."""
    num_started_over: int
    """Requests that were generated again on another engine."""
    lacks: dict[int, str]
    """What the oldest open groups lack, for people."""


class WorkerFailure(WorkerMessage):
    """Something of ours failed, which ends the run."""

    kind: str
    """Class of the error, if it is one of mrl.errors; else empty."""
    text: str


_decoder = msgspec.msgpack.Decoder(
    ConnectEngine
    | GiveUpEngine
    | PauseRollouts
    | ResumeRollouts
    | EngineConnected
    | EngineGone
    | GroupsDone
    | GroupsProgress
    | RolloutsPaused
    | WorkerPulse
    | WorkerFailure
)
encode_worker_message: Callable[[WorkerMessage], bytes] = msgspec.msgpack.Encoder(
    enc_hook=plain_number
).encode
"""The bytes of a message."""


def decode_worker_message(data: bytes | memoryview) -> Any:
    """Return the message of these bytes. msgspec.ValidationError or DecodeError for anything else."""
    return _decoder.decode(data)
