"""The record of a stream's schedule: what the driver took from engines, environments and reward workers, in order, and digests of what
engines brought.

One file for each start of a run, `schedule/attempt-NNN.jsonl`, a JSON value a line. The first one is the `Header`; then events:

| event | values |
|---|---|
| start | version, digests of the trainer ranks' weights |
| validates | before the first step: the validation behind the checkpoint that the start resumed from, which was not made |
| pump, beside | prompts admitted; what follows came in one pump, with a trainer at work or without |
| took | engines whose next calls were taken, their responses, [engine, beats] of each call (mrl/rollout/stint.py) |
| answers | [key, turn, messages, reward, end of the episode or null, reason, seconds] each |
| verdicts | [sample, kind, value, what else there is] each |
| park | responses, [engine, beats] of each call that was under way |
| trained | step, prompts of its groups, digests of the weights made of them |
| lost | before the end of a step: an engine was lost in it or before, and what came is no function of this record any more |
| end | step |

A response is [sample, attempt, status, tokens, digest of tokens, digest of log-probs, marks] (mrl/rollout/fingerprint.py).
"""

from __future__ import annotations

import base64
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import mrl
from mrl.agents.answer import EnvironmentAnswer
from mrl.agents.episode import EndedBy
from mrl.errors import ReplayError
from mrl.files import highest_number
from mrl.observe.metrics_log import append_lines
from mrl.rollout.fingerprint import ends_of_parts, fingerprint
from mrl.rollout.request import Response
from mrl.samples import Verdict, VerdictKind

FOLDER, FORMAT = "schedule", 2
NUM_VALUES = {
    "start": 2,
    "validates": 0,
    "pump": 1,
    "beside": 1,
    "took": 3,
    "answers": 1,
    "verdicts": 1,
    "park": 2,
    "trained": 3,
}
NUM_VALUES |= {"lost": 0, "end": 1}
"""Of each event."""

Event = list[Any]
"""A name and its values."""


@dataclasses.dataclass(frozen=True, slots=True)
class Header:
    """What a record was made by."""

    config: Mapping[str, Any]
    """The resolved configuration, as JSON values."""
    first_step: int
    """The step that the start began with; above 1 it resumed from the checkpoint of the step before."""
    code: str
    """`code_digest` of the driver's package."""
    devices: Sequence[str]
    """Of the trainer ranks."""
    format: int = FORMAT


def code_digest() -> str:
    """Of all of the package's source files, with its folders at the top of a checkout."""
    state, root = xxhash.xxh3_64(), Path(mrl.__path__[0])
    found = [
        Path(folder) / name
        for folder, _, names in os.walk(root, followlinks=True)
        for name in names
        if name.endswith(".py")
    ]
    for path in sorted(found):
        state.update(str(path.relative_to(root)).encode())
        state.update(path.read_bytes())
    return state.hexdigest()


class ScheduleFile:
    """Writes one record. Lines are durable once their step is over; a full disk never ends the run."""

    def __init__(self, run_folder: Path, header: Header) -> None:
        folder = run_folder / FOLDER
        folder.mkdir(exist_ok=True)
        self.path = folder / f"attempt-{highest_number(folder, 'attempt-*.jsonl') + 1:03d}.jsonl"
        self._unwritten = [json.dumps(dataclasses.asdict(header)) + "\n"]

    def add(self, *event: Any) -> None:
        self._unwritten.append(json.dumps(event, separators=(",", ":")) + "\n")

    def flush(self) -> None:
        if append_lines(self.path, self._unwritten):
            self._unwritten = []


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleRecord:
    """What was read of one file."""

    path: Path
    header: Header
    events: list[Event]
    """Up to the end of the last step that is whole, before any engine was lost."""
    last_step: int
    """That step; 0 where none is."""


def read_record(run_folder: Path, attempt: int | None = None) -> ScheduleRecord:
    """The record of a run's start, by default its last. ReplayError where there is none, or another release wrote it."""
    paths = sorted((run_folder / FOLDER).glob("attempt-*.jsonl"))
    wanted = [path for path in paths if attempt is None or path.stem == f"attempt-{attempt:03d}"]
    if not wanted:
        names = ", ".join(path.stem for path in paths) or "none"
        raise ReplayError(
            f"{run_folder} has no record of {'its schedule' if attempt is None else f'attempt {attempt}'} (there: {names}); "
            "streams write one where stream.record is true, without stream.in_flight = keep"
        )
    path = wanted[-1]
    values, faulty = _lines(path)
    header = _header(path, values[:1])
    events = values[1:]
    lost = next((number for number, event in enumerate(events) if event[0] == "lost"), len(events))
    events, cut = events[:lost], ": an engine was lost" * (lost < len(events))
    ends = [number for number, event in enumerate(events) if event[0] == "end"]
    if not ends:
        cut = f": line {faulty} cannot be read" if faulty else cut
        raise ReplayError(
            f"{path} has no whole step{cut}; the run ended in its first one. An earlier attempt may have some: --attempt"
        )
    return ScheduleRecord(path, header, events[: ends[-1] + 1], int(events[ends[-1]][1]))


def _lines(path: Path) -> tuple[list[Any], int]:
    """(the values of the file's lines up to the first that is none, the number of that one or 0)."""
    values: list[Any] = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), 1):
        if not line:
            continue
        try:
            value = json.loads(line)
        except ValueError:
            return values, number
        if values and not _is_event(value):
            return values, number
        values.append(value)
    return values, 0


def _is_event(value: Any) -> bool:
    """Whether a line's value has an event's name, and as many values as it has."""
    named = isinstance(value, list) and value and isinstance(value[0], str)
    return bool(named) and len(value) - 1 == NUM_VALUES.get(value[0])


def _header(path: Path, first: Sequence[Any]) -> Header:
    if not first:
        raise ReplayError(
            f"{path} is empty or cut in its first line, which has the configuration, so that it cannot be replayed; an earlier "
            "attempt may be whole: --attempt"
        )
    told = first[0] if isinstance(first[0], dict) else {}
    if told.get("format") != FORMAT or set(told) != {field.name for field in dataclasses.fields(Header)}:
        raise ReplayError(
            f"{path} is no record of this release (format {told.get('format')}, this one reads {FORMAT}); replay it with the "
            "release that wrote it (versions.json of the run names it)"
        )
    return Header(**told)


def told_response(response: Response) -> Event:
    """What the record says of a response, or of a segment of one."""
    attempt = response.segments[0].attempt if response.segments else 0
    digests = response.recorded or fingerprint(response.tokens, response.logprobs)
    return [response.request_id, attempt, response.status.value, len(response.tokens), *digests]


def describe_difference(recorded: Event, came: Event) -> str:
    """How a response is another one than the record says, as words; empty where it is not."""
    if recorded == came:
        return ""
    name = f"sample {came[0]}, request {came[1]}"
    if recorded[:2] != came[:2]:
        return f"{name} came where the record has sample {recorded[0]}, request {recorded[1]}"
    what = "tokens" if recorded[4] != came[4] else "log-probs of the same tokens"
    if recorded[3] != came[3]:
        what = f"{came[3]} tokens where the record has {recorded[3]}"
    elif recorded[2] != came[2] and what != "tokens":
        return f"{name} ended {came[2]}, in the record {recorded[2]}"
    return f"{name}: other {what}{_where(recorded, came)}"


def _where(recorded: Event, came: Event) -> str:
    if recorded[3] != came[3]:
        return ""
    theirs, ours = (np.frombuffer(base64.b64decode(told[6]), np.uint8) for told in (recorded, came))
    differ = np.flatnonzero(theirs != ours)
    ends = ends_of_parts(came[3])
    part = int(differ[0]) if len(differ) else len(ends) - 1
    first, last = (int(ends[part - 1]) if part else 0), int(ends[part]) - 1
    place = f"token {first}" if first == last else f"tokens {first} to {last}"
    return f" from {place} of {came[3]} on (counted from 0)"


def told_answer(answer: EnvironmentAnswer) -> Event:
    """All of it that an episode reads."""
    ended_by = answer.ended_by and answer.ended_by.value
    said = [list(answer.messages), answer.reward, ended_by]
    return [answer.key, answer.turn, *said, answer.reason, answer.seconds]


def answer_told(told: Event) -> EnvironmentAnswer:
    """The answer that `told_answer` told."""
    key, turn, messages, reward, name, reason, seconds = told
    ended_by = None if name is None else EndedBy(name)
    return EnvironmentAnswer(
        key, turn, tuple(messages), reward, ended_by=ended_by, reason=reason, seconds=seconds
    )


def told_verdict(name: str, verdict: Verdict) -> Event:
    """All of a verdict that a step reads; its reason and its seconds are in samples.jsonl and metrics.jsonl."""
    more: dict[str, Any] = {}
    if verdict.parts:
        more["parts"] = dict(verdict.parts)
    if verdict.token_values is not None:
        values = verdict.token_values.astype(np.float32).tobytes()
        more["token_values"] = base64.b64encode(values).decode()
    if verdict.is_return:
        more["is_return"] = True
    if not verdict.applies:
        more["applies"] = False
    return [name, verdict.kind.value, verdict.value, more]


def verdict_told(told: Event) -> tuple[str, Verdict]:
    """(sample, the verdict that `told_verdict` told)."""
    name, kind, value, more = told
    if "token_values" in more:
        values = np.frombuffer(base64.b64decode(more["token_values"]), np.float32)
        more = more | {"token_values": values}
    return name, Verdict(VerdictKind(kind), value, **more)
