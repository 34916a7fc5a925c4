"""Environments at work while engines generate: many episodes at once, and none of them is waited for.

consumes      open, step and close of episodes, from one thread
produces      poll(timeout) -> [Answer], each open and step exactly one, in order of completion
waits for     answers, in `poll` alone, with a time-out; `describe` waits too, with a deadline
unblocked by  hosts: one process for each environment, with a forked guest for each episode

No thread, and no environment's code in this process. Deadlines are kept by the hosts, so that a caller who is away for minutes
finds the answers as they came; a host that itself dies or says nothing is killed and replaced, its episodes are lost to us.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import select
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jsonschema

from mrl.agents.answer import EnvironmentAnswer, EnvironmentFault, decode_answer, failed
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.host_messages import call_message, opening_message
from mrl.agents.tool_calls import ToolCall
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError, RolloutError
from mrl.processes.channel import read_some
from mrl.processes.framing import BadReply
from mrl.processes.worker_process import WorkerProcess
from mrl.rewards.causes import CauseLog

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""For a host to read its environment's module."""
_UNSENT_SECONDS = 0.002
_DESCRIBING = "\0"
"""The key of a guest that is asked only what it is; no episode's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """What an environment says of itself."""

    tools: tuple[Mapping[str, Any], ...]
    """As chat templates take them."""
    replayable: bool

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """The schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}


@dataclasses.dataclass(slots=True)
class _Open:
    """An episode: its host, its turns so far, and what was asked of it and when."""

    host: _Host
    turn: int = 0
    waits_since: float | None = None
    limit: float = 0.0
    ended: bool = False

    def is_unheard(self, now: float) -> bool:
        """Whether its host should have said by now at least that it is late."""
        start = 0.0 if self.host.is_ready else _START_SECONDS
        return self.waits_since is not None and now > self.waits_since + 2 * self.limit + start


@dataclasses.dataclass(slots=True, eq=False)
class _Host:
    process: WorkerProcess
    environment: str
    is_ready: bool = False
    quiet_since: float | None = None
    """When it was first found to owe an answer and to say nothing; None since it said something."""


class EnvironmentPool:
    """The environments of a run. Hosts start on first need and end with `shutdown`, or with the thread that opened the first of
    their episodes."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentSpec],
        deadlines: Deadlines | None = None,
        *,
        host_seconds: float = 60.0,
    ) -> None:
        """`environments` by the name that `open` is given; `host_seconds`: of silence, by the clock, before a host that owes answers
        is given up."""
        self._specs, self._deadlines, self._host_seconds = (
            dict(environments),
            deadlines or Deadlines(),
            host_seconds,
        )
        self._hosts: dict[str, _Host] = {}
        """By environment."""
        self._episodes: dict[str, _Open] = {}
        self._answers: collections.deque[EnvironmentAnswer] = collections.deque()
        self._causes = CauseLog(_log)
        self._said: dict[str, Any] | None = None
        """What a guest that was asked for it says of its environment."""
        self._faults: collections.Counter[EnvironmentFault] = collections.Counter()

    @classmethod
    def of(cls, section: AgentSection) -> EnvironmentPool:
        """The configured ones."""
        deadlines = Deadlines(
            reset_seconds=section.reset_seconds,
            step_seconds=section.step_seconds,
            memory_mib=section.memory_mib,
        )
        environments = section.environments()
        specs = {key: EnvironmentSpec(str(e.environment), e.options) for key, e in environments.items()}
        return cls(specs, deadlines)

    def describe(self, environment: str) -> Description:
        """Its tools and whether it is replayable, asked of an object made for it. ConfigError where it cannot be made, or its tools
        are no schemas."""
        host, self._said = self._host(environment), None
        host.process.send_bytes(call_message(_DESCRIBING, 0, "describe", b'["describe"]'))
        deadline = time.monotonic() + _START_SECONDS + self._deadlines.reset_seconds
        named = f"agent.environment = {environment!r}"
        while self._said is None:
            if time.monotonic() > deadline:
                raise ConfigError(f"{named} says nothing of itself")
            self._receive([host], 1.0)
            if not self._is_alive(host):
                raise ConfigError(f"{named}: its process ended")
        if "fault" in self._said:
            raise ConfigError(f"{named} cannot be made: {self._said['reason']}")
        return _description(environment, self._said)

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None:
        """Begins an episode; its answer has turn 0. RolloutError for a key that is open, or a task that is no JSON."""
        if key in self._episodes:
            raise RolloutError(f"episode {key} is open already")
        payload = _encoded(key, "open", dict(task), seed)
        self._episodes[key] = _Open(self._host(environment))
        self._ask(key, "open", payload)

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Hands a turn to an episode. RolloutError where it is not open, has not answered, or has ended."""
        episode = self._episodes.get(key)
        if episode is None or episode.waits_since is not None or episode.ended:
            state = "not open" if episode is None else "over" if episode.ended else "still at its last turn"
            raise RolloutError(f"a turn for episode {key}, which is {state}")
        payload = _encoded(key, "step", text, [[call.name, dict(call.arguments)] for call in calls])
        episode.turn += 1
        self._ask(key, "step", payload)

    def close(self, key: str) -> None:
        """Ends an episode, whatever it is at; what it has not answered is not answered. Nothing for one that is not open."""
        if (episode := self._episodes.pop(key, None)) is not None and self._is_alive(episode.host):
            episode.host.process.send_bytes(call_message(key, episode.turn, "close", b'["close"]'))
        self._answers = collections.deque(answer for answer in self._answers if answer.key != key)

    def poll(self, timeout_seconds: float) -> list[EnvironmentAnswer]:
        """All answers that are there; waits up to `timeout_seconds` for the first one."""
        until = time.monotonic() + timeout_seconds
        while True:
            left = 0.0 if self._answers else max(0.0, until - time.monotonic())
            self._expire(self._receive(list(self._hosts.values()), left), time.monotonic())
            if self._answers or time.monotonic() >= until:
                found = list(self._answers)
                self._answers.clear()
                return found

    def descriptors(self) -> list[int]:
        """Return what becomes readable when a host says something, or ends."""
        lines = (host.process for host in self._hosts.values())
        return [fd for line in lines for fd in (line.replies, line.errors)]

    @property
    def has_unsent(self) -> bool:
        """Return True if a host has not taken all that it is to be told."""
        return any(host.process.has_unsent for host in self._hosts.values())

    @property
    def num_open(self) -> int:
        """Episodes that are open."""
        return len(self._episodes)

    def faults(self) -> Mapping[str, int]:
        """Answers that were faults, by the fault's name."""
        return {fault.value: count for fault, count in self._faults.items()}

    def shutdown(self) -> None:
        """Closes every environment, and ends the hosts; one that is late is killed."""
        until = time.monotonic() + 2 * self._deadlines.close_seconds + 1.0
        hosts = list(self._hosts.values())
        for host in hosts:
            host.process.finish()
        for host in hosts:
            while read_some(host.process.replies) is not None and time.monotonic() < until:
                _readable([host.process.replies], 0.1)
                host.process.read_errors()
            host.process.end()
        self._hosts.clear()
        self._episodes.clear()

    def __enter__(self) -> EnvironmentPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    # -- hosts ---------------------------------------------------------------------------------------------------

    def _host(self, environment: str) -> _Host:
        if environment not in self._specs:
            raise RolloutError(f"no environment {environment!r}; there are {sorted(self._specs)}")
        if environment not in self._hosts:
            opening = opening_message(self._specs[environment], self._deadlines)
            process = WorkerProcess("mrl.agents.host")
            process.send_bytes(opening)
            self._hosts[environment] = _Host(process, environment)
        return self._hosts[environment]

    def _is_alive(self, host: _Host) -> bool:
        return self._hosts.get(host.environment) is host

    def _ask(self, key: str, operation: str, payload: bytes) -> None:
        episode = self._episodes[key]
        episode.waits_since, episode.limit = time.monotonic(), self._deadlines.of(operation)
        if self._is_alive(episode.host):
            episode.host.process.send_bytes(call_message(key, episode.turn, operation, payload))
        else:
            self._note(
                failed(key, episode.turn, EnvironmentFault.HOST_LOST, "the environment's host is gone")
            )

    def _lose(self, host: _Host, reason: str) -> None:
        """A host that has died or has to: all that wait for it are answered."""
        del self._hosts[host.environment]
        words = f"{reason}: {host.process.end()}"
        _log.warning("environment %s: its host is lost: %s", host.environment, words)
        for key, episode in self._episodes.items():
            if episode.host is host and episode.waits_since is not None:
                self._note(failed(key, episode.turn, EnvironmentFault.HOST_LOST, words))

    # -- answers -------------------------------------------------------------------------------------------------

    def _receive(self, hosts: Iterable[_Host], timeout_seconds: float) -> list[_Host]:
        """Reads what hosts say; waits for the first word. Those that said something."""
        by_descriptor = {fd: h for h in hosts for fd in (h.process.replies, h.process.errors)}
        unsent = [host for host in by_descriptor.values() if host.process.has_unsent]
        for host in unsent:
            host.process.flush()
        pause = min(timeout_seconds, _UNSENT_SECONDS if unsent else timeout_seconds)
        readable = _readable(by_descriptor, pause)
        for descriptor in readable:
            host = by_descriptor[descriptor]
            if not self._is_alive(host):
                continue
            if descriptor == host.process.replies:
                self._read(host)
            else:
                host.process.read_errors()
        return [by_descriptor[descriptor] for descriptor in readable]

    def _read(self, host: _Host) -> None:
        try:
            for reply in host.process.read_replies():
                self._heard(host, reply)
        except EOFError:
            self._lose(host, "its process ended")
        except BadReply as error:
            self._lose(host, str(error))

    def _heard(self, host: _Host, reply: dict[str, Any]) -> None:
        if "broken" in reply:
            self._lose(host, "its environment cannot be had")
            raise ConfigError(str(reply["broken"]))
        if "ready" in reply:
            host.is_ready = True
            return
        key = str(reply["key"])
        if key == _DESCRIBING:
            self._said = reply
            return
        episode = self._episodes.get(key)
        if episode is not None and episode.waits_since is not None and reply["turn"] == episode.turn:
            self._note(decode_answer(reply))

    def _note(self, answer: EnvironmentAnswer) -> None:
        episode = self._episodes[answer.key]
        episode.waits_since, episode.ended = None, answer.ended_by is not None
        if answer.fault is not None:
            self._faults[answer.fault] += 1
            self._causes.note(f"episode {answer.key}: {answer.fault.value}", answer.reason)
        self._answers.append(answer)

    def _expire(self, spoke: list[_Host], now: float) -> None:
        """Gives up hosts that say nothing, while they are listened to."""
        unheard = {episode.host for episode in self._episodes.values() if episode.is_unheard(now)}
        for host in list(self._hosts.values()):
            if host in spoke or host not in unheard:
                host.quiet_since = None
            elif host.quiet_since is None:
                host.quiet_since = now
            elif now > host.quiet_since + self._host_seconds:
                self._lose(host, "it says nothing")


def _encoded(key: str, operation: str, *arguments: Any) -> bytes:
    try:
        return json.dumps([operation, *arguments]).encode()
    except (TypeError, ValueError) as error:
        raise RolloutError(f"episode {key}: its {operation} holds what is no JSON: {error}") from error


def _readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Those that have something to read, or have ended; any number may have any value."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _description(environment: str, said: Mapping[str, Any]) -> Description:
    tools = tuple(said["tools"])
    try:
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"].get("parameters", {}))
            if not isinstance(tool["function"]["name"], str):
                raise TypeError("a tool's name is a text")
    except (KeyError, TypeError, AttributeError, jsonschema.SchemaError) as error:
        raise ConfigError(
            f"agent.environment = {environment!r}: a tool is described as {{type: function, function: {{name, description, "
            f"parameters}}}}, parameters being a JSON schema; {str(tool)[:200]} is not: {error!r:.200}"
        ) from error
    return Description(tools, bool(said["replayable"]))
