"""Messages between the driver and a rollout worker: msgpack in frames, never pickles.

| from the driver | | from the worker | |
|---|---|---|---|
| ConnectEngine | an engine is up | EngineConnected, EngineGone | it is connected; its connection ended |
| GiveUpEngine | an engine is lost | GroupsDone | judged groups |
| PauseRollouts | stop engines at a token boundary | RolloutsPaused | all stopped; groups, with a snapshot |
| ResumeRollouts | let engines step again | GroupsProgress | what groups still lack |
| | | WorkerPulse | each second: the worker lives |
| | | WorkerFailure | an error that ends the run |

A connection begins as an engine's does (mrl/rollout/handshake.py). Ray calls start and drop groups, in order:
prompts do not fit here, because a row's ground truth may be any object (`GroupStart`)."""

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
    """A group to start."""

    number: int
    """Number of the group in messages; a restarted group has another."""
    prompt: Prompt
    sampling: Sampling
    """Without `lengths`."""
    lengths: tuple[int, ...] | None
    """`Sampling.lengths` of its samples."""
    records: tuple[Sample, ...]
    """Samples of earlier starts, complete or partial."""
    engine: int
    """The engine that takes its requests; -1 if the worker chooses."""


class WorkerMessage(msgspec.Struct, tag=True, array_like=True):
    """Base of all messages; one per frame."""


class ConnectEngine(WorkerMessage):
    """Connect a paused engine."""

    engine: int
    host: str
    port: int


class GiveUpEngine(WorkerMessage):
    """Generate an engine's requests elsewhere."""

    engine: int
    why: str


class PauseRollouts(WorkerMessage):
    """Pause all engines at a token boundary."""

    snapshot: bool
    """Send the partial rollouts of each open group."""


class ResumeRollouts(WorkerMessage):
    """Let the engines step again."""

    training: bool
    """False: only requests of a validation run."""


class EngineConnected(WorkerMessage):
    """Reply to ConnectEngine; `EngineGone` comes before it if the engine cannot be reached."""

    engine: int


class EngineGone(WorkerMessage):
    """The connection of an engine ended."""

    engine: int
    why: str
    kind: str
    """Class name of the engine's error; empty without one."""


class GroupsDone(WorkerMessage):
    """Judged groups."""

    newest_version: int
    """Newest version of the tokens since the last pause; -1 without any."""
    groups: list[tuple[int, GroupFields]]
    """Number and samples of each group."""


class GroupProgress(msgspec.Struct, array_like=True):
    """Missing responses and verdicts of an open group."""

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
    """No engine of the worker steps any more; all earlier results have been sent."""

    num_requests: int
    num_tokens: int
    groups: list[tuple[int, GroupFields]]
    """Number and partial rollouts of each open group, if a snapshot was requested."""


class WorkerPulse(WorkerMessage):
    """Heartbeat of the worker."""

    silent_seconds: dict[int, float]
    """Seconds without a step, for each engine that has work and does not step."""
    num_started_over: int
    """Requests that were generated again on another engine."""
    lacks: dict[int, str]
    """What the oldest open groups lack, for messages."""


class WorkerFailure(WorkerMessage):
    """An error that ends the run."""

    kind: str
    """Class name of the error if it is in mrl.errors; otherwise empty."""
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
"""Encode a message."""


def decode_worker_message(data: bytes | memoryview) -> Any:
    """Decode a message. Raise msgspec.ValidationError or DecodeError for anything else."""
    return _decoder.decode(data)
