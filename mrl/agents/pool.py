"""Pool of environments that work while engines generate: many episodes at once, without waiting for any.

consumes      open, step and close of episodes, from one thread
produces      poll(timeout) -> [Answer], exactly one per open and step, in order of completion
waits for     answers, in `poll` alone, with a time-out; `describe` waits too, with a deadline
unblocked by  hosts: one process per environment, with a forked guest per episode

No thread is needed, and no environment's code runs in this process. Hosts keep the deadlines, so that a
caller who is away for minutes finds the answers as they came. A host that dies or is silent is killed and
replaced; its episodes end as infrastructure failures."""

from __future__ import annotations

import collections
import dataclasses
import json
import logging
import os
import select
import time
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any

import jsonschema

from mrl.agents.answer import EnvironmentFault, EnvironmentResult, decode_answer, failed
from mrl.agents.environment_limits import Deadlines
from mrl.agents.environment_messages import call_message, opening_message
from mrl.agents.environment_registry import EnvironmentSpec
from mrl.agents.tool_calls import ToolCall
from mrl.config.sections.agent import AgentSection
from mrl.errors import ConfigError, RolloutError
from mrl.processes.channel import read_some
from mrl.processes.framing import BadReply
from mrl.processes.worker_process import WorkerProcess
from mrl.rewards.causes import CauseLog

_log = logging.getLogger(__name__)

_START_SECONDS = 120.0
"""Time for a host to import its environment's module."""
_UNSENT_SECONDS = 0.002
_DESCRIBING = "\0"
"""Key of a guest that only describes its environment; no episode has it."""


@dataclasses.dataclass(frozen=True, slots=True)
class Description:
    """An environment's description of itself."""

    tools: tuple[Mapping[str, Any], ...]
    """In the form of chat templates."""
    replayable: bool
    runs: bool = False
    """It is a program, which calls the policy itself."""
    about: str = ""
    """Line for the log."""

    def schemas(self) -> dict[str, Mapping[str, Any]]:
        """Return the schema of each tool's arguments, by the tool's name."""
        return {tool["function"]["name"]: tool["function"].get("parameters", {}) for tool in self.tools}


@dataclasses.dataclass(slots=True)
class _Open:
    """An open episode: its host, its turns so far, and its pending call."""

    host: _Host
    turn: int = 0
    waits_since: float | None = None
    limit: float = 0.0
    ended: bool = False

    def is_unheard(self, now: float) -> bool:
        """Return True if its host should have answered by now, at least with a missed deadline."""
        start = 0.0 if self.host.is_ready else _START_SECONDS
        return self.waits_since is not None and now > self.waits_since + 2 * self.limit + start


@dataclasses.dataclass(slots=True, eq=False)
class _Host:
    process: WorkerProcess
    environment: str
    is_ready: bool = False
    quiet_since: float | None = None
    """When it was first found silent while it owed an answer; None after it sends something."""


class EnvironmentWorkers:
    """Environments of a run. Hosts start on demand, and end with `shutdown`, or with the thread that opened
    their first episode."""

    def __init__(
        self,
        environments: Mapping[str, EnvironmentSpec],
        deadlines: Deadlines | None = None,
        *,
        host_seconds: float = 60.0,
    ) -> None:
        """`environments`: by the name that `open` gets. `host_seconds`: wall time after which a silent host
        that owes answers is given up."""
        self._specs, self._deadlines, self._host_seconds = (
            dict(environments),
            deadlines or Deadlines(),
            host_seconds,
        )
        self._hosts: dict[str, _Host] = {}
        """Hosts, by environment."""
        self._episodes: dict[str, _Open] = {}
        self._answers: collections.deque[EnvironmentResult] = collections.deque()
        self._causes = CauseLog(_log)
        self._description_reply: dict[str, Any] | None = None
        """Reply of the guest that describes its environment."""
        self._faults: collections.Counter[EnvironmentFault] = collections.Counter()

    @classmethod
    def of(cls, section: AgentSection) -> EnvironmentWorkers:
        """Return the pool of the configured environments."""
        deadlines = Deadlines(
            reset_seconds=section.reset_seconds,
            step_seconds=section.step_seconds,
            run_seconds=section.run_seconds,
            memory_mib=section.memory_mib,
        )
        environments = section.environments()
        specs = {
            key: EnvironmentSpec(str(e.environment), e.options, e.python) for key, e in environments.items()
        }
        return cls(specs, deadlines)

    def describe(self, environment: str) -> Description:
        """Return an environment's tools and whether it is replayable, from an object made for this. Raise
        ConfigError if it cannot be made, or its tools are not schemas."""
        host, self._description_reply = self._host(environment), None
        host.process.send_bytes(call_message(_DESCRIBING, 0, "describe", b'["describe"]'))
        deadline = time.monotonic() + _START_SECONDS + self._deadlines.reset_seconds
        named = f"agent.environment = {environment!r}"
        while self._description_reply is None:
            if time.monotonic() > deadline:
                raise ConfigError(f"{named} did not describe itself in time")
            self._receive([host], 1.0)
            if not self._is_alive(host):
                raise ConfigError(f"{named}: its process ended")
        if "fault" in self._description_reply:
            raise ConfigError(f"{named} cannot be made: {self._description_reply['reason']}")
        return _description(environment, self._description_reply)

    def open(self, key: str, environment: str, task: Mapping[str, Any], seed: int) -> None:
        """Start an episode; its answer has turn 0. Raise RolloutError if key is open or task is not JSON."""
        self._begin(key, environment, "open", dict(task), seed)

    def run(
        self, key: str, environment: str, task: Mapping[str, Any], seed: int, url: str, secret: str
    ) -> None:
        """Start a program, as `open`; its answer, when it ends, has turn 1. `url`, `secret`: of its model."""
        self._begin(key, environment, "run", dict(task), seed, url, secret, turn=1)

    def step(self, key: str, text: str, calls: Sequence[ToolCall] = ()) -> None:
        """Send a turn to an episode. Raise RolloutError if it is not open, has not answered, or has ended."""
        episode = self._episodes.get(key)
        if episode is None or episode.waits_since is not None or episode.ended:
            state = "not open" if episode is None else "over" if episode.ended else "still at its last turn"
            raise RolloutError(f"a turn for episode {key}, which is {state}")
        payload = _encoded(key, "step", text, [[call.name, dict(call.arguments)] for call in calls])
        episode.turn += 1
        self._ask(key, "step", payload)

    def close(self, key: str) -> None:
        """End an episode in any state; a pending answer is dropped. Do nothing if it is not open."""
        if (episode := self._episodes.pop(key, None)) is not None and self._is_alive(episode.host):
            episode.host.process.send_bytes(call_message(key, episode.turn, "close", b'["close"]'))
        self._answers = collections.deque(answer for answer in self._answers if answer.key != key)

    def poll(self, timeout_seconds: float) -> list[EnvironmentResult]:
        """Return all answers so far; wait up to `timeout_seconds` for the first one."""
        until = time.monotonic() + timeout_seconds
        while True:
            left = 0.0 if self._answers else max(0.0, until - time.monotonic())
            self._expire(self._receive(list(self._hosts.values()), left), time.monotonic())
            if self._answers or time.monotonic() >= until:
                answers = list(self._answers)
                self._answers.clear()
                return answers

    def descriptors(self) -> list[int]:
        """Return the descriptors that become readable when a host sends something, or ends."""
        lines = (host.process for host in self._hosts.values())
        return [fd for line in lines for fd in (line.replies, line.errors)]

    @property
    def has_unsent(self) -> bool:
        """True if a host has not taken all that was sent to it."""
        return any(host.process.has_unsent for host in self._hosts.values())

    @property
    def num_open(self) -> int:
        """Number of open episodes."""
        return len(self._episodes)

    def faults(self) -> Mapping[str, int]:
        """Return the number of answers that were faults, by the fault's name."""
        return {fault.value: count for fault, count in self._faults.items()}

    def shutdown(self) -> None:
        """Close every environment and end the hosts; a late one is killed."""
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

    def __enter__(self) -> EnvironmentWorkers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    def _host(self, environment: str) -> _Host:
        if environment not in self._specs:
            raise RolloutError(f"no environment {environment!r}; there are {sorted(self._specs)}")
        if environment not in self._hosts:
            spec = self._specs[environment]
            opening = opening_message(spec, self._deadlines)
            if spec.python is not None and not os.access(spec.python, os.X_OK):
                raise ConfigError(f"agent.python = {spec.python!r} is not an executable file")
            process = WorkerProcess("mrl.agents.environment_host", python=spec.python)
            process.send_bytes(opening)
            self._hosts[environment] = _Host(process, environment)
        return self._hosts[environment]

    def _is_alive(self, host: _Host) -> bool:
        return self._hosts.get(host.environment) is host

    def _begin(self, key: str, environment: str, operation: str, *arguments: Any, turn: int = 0) -> None:
        if key in self._episodes:
            raise RolloutError(f"episode {key} is open already")
        payload = _encoded(key, operation, *arguments)
        self._episodes[key] = _Open(self._host(environment), turn=turn)
        self._ask(key, operation, payload)

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
        """End a host that died or must end, and answer all calls that wait for it."""
        del self._hosts[host.environment]
        words = f"{reason}: {host.process.end()}"
        _log.warning("environment %s: its host is lost: %s", host.environment, words)
        for key, episode in self._episodes.items():
            if episode.host is host and episode.waits_since is not None:
                self._note(failed(key, episode.turn, EnvironmentFault.HOST_LOST, words))

    def _receive(self, hosts: Iterable[_Host], timeout_seconds: float) -> list[_Host]:
        """Read what hosts sent, waiting for the first message; return the hosts that sent something."""
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
            self._lose(host, "its environment cannot be loaded")
            raise ConfigError(str(reply["broken"]))
        if "ready" in reply:
            host.is_ready = True
            return
        key = str(reply["key"])
        if key == _DESCRIBING:
            self._description_reply = reply
            return
        episode = self._episodes.get(key)
        if episode is not None and episode.waits_since is not None and reply["turn"] == episode.turn:
            self._note(decode_answer(reply))

    def _note(self, answer: EnvironmentResult) -> None:
        episode = self._episodes[answer.key]
        episode.waits_since, episode.ended = None, answer.ended_by is not None
        if answer.fault is not None:
            self._faults[answer.fault] += 1
            self._causes.note(f"episode {answer.key}: {answer.fault.value}", answer.reason)
        self._answers.append(answer)

    def _expire(self, spoke: list[_Host], now: float) -> None:
        """Give up hosts that stay silent while they are listened to."""
        unheard = {episode.host for episode in self._episodes.values() if episode.is_unheard(now)}
        for host in list(self._hosts.values()):
            if host in spoke or host not in unheard:
                host.quiet_since = None
            elif host.quiet_since is None:
                host.quiet_since = now
            elif now > host.quiet_since + self._host_seconds:
                self._lose(host, "it is silent")


def _encoded(key: str, operation: str, *arguments: Any) -> bytes:
    try:
        return json.dumps([operation, *arguments]).encode()
    except (TypeError, ValueError) as error:
        raise RolloutError(f"episode {key}: its {operation} is not valid JSON: {error}") from error


def _readable(descriptors: Iterable[int], seconds: float) -> list[int]:
    """Return those that are readable or closed; the numbers of descriptors may be large."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return [descriptor for descriptor, _ in poll.poll(1000 * seconds)]


def _description(environment: str, reply: Mapping[str, Any]) -> Description:
    tools = tuple(reply["tools"])
    try:
        for tool in tools:
            jsonschema.Draft202012Validator.check_schema(tool["function"].get("parameters", {}))
            if not isinstance(tool["function"]["name"], str):
                raise TypeError("a tool's name must be a text")
    except (KeyError, TypeError, AttributeError, jsonschema.SchemaError) as error:
        raise ConfigError(
            f"agent.environment = {environment!r}: a tool must be {{type: function, function: {{name, "
            f"description, parameters}}}} with a JSON schema as parameters; "
            f"{str(tool)[:200]} is not: {error!r:.200}"
        ) from error
    return Description(tools, bool(reply["replayable"]), bool(reply["runs"]), str(reply["about"]))
