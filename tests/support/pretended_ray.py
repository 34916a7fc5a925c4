"""Ray in one process for the real groups: actors are objects, calls run at once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined] generated code

from mrl.launch.cluster import node_facts


class Reference:
    def __init__(self, function: Callable[[], Any]) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        try:
            self._value = function()
        except Exception as error:  # raised where the reference is asked for, as Ray does
            self._error = error

    def get(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._value


class PretendedRay:
    """Implements the calls of ray that actor groups make."""

    def __init__(self) -> None:
        self.running = "the driver"
        """The process whose call runs, as ActorGroup names it."""
        self.after_call: Callable[[Any], None] = lambda actor: None
        """Called inside the process with its actor after each of its calls."""

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ray, "remote", self._remote)
        monkeypatch.setattr(ray, "put", lambda value: Reference(lambda: value))
        monkeypatch.setattr(ray, "get", lambda pending, timeout=None: _values(pending))
        monkeypatch.setattr(ray, "wait", lambda references, num_returns=1, timeout=None: (references, []))
        monkeypatch.setattr(ray, "kill", lambda actor: None)
        monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: "127.0.0.1")
        # An actor sets the variables of its own process, which is this one.
        monkeypatch.setattr(node_facts, "listen_on_own_node", lambda address=None: None)

    def _remote(self, actor_class: type) -> Any:
        def make(config: Any, number: int, log_folder: str) -> Any:
            return self._actor(
                actor_class(config, number, log_folder), f"{NAMES[actor_class.__name__]} {number}"
            )

        return SimpleNamespace(options=lambda **options: SimpleNamespace(remote=make))

    def _actor(self, actor: Any, name: str) -> Any:
        def call(function: Callable, *arguments: Any, **options: Any) -> Reference:
            values = [a.get() if isinstance(a, Reference) else a for a in arguments]

            def run() -> Any:
                with self._inside(name):
                    result = function(actor, *values, **options)
                    self.after_call(actor)
                    return result

            return Reference(run)

        def method(name: str) -> Any:
            return SimpleNamespace(remote=functools.partial(call, getattr(type(actor), name)))

        alive = ActorTableData.ActorState.ALIVE
        methods = {name: method(name) for name in dir(type(actor)) if not name.startswith("_")}
        any_function = SimpleNamespace(remote=call)
        return SimpleNamespace(**methods, __ray_call__=any_function, _get_local_state=lambda: alive)

    @contextmanager
    def _inside(self, name: str) -> Iterator[None]:
        outer, self.running = self.running, name
        try:
            yield
        finally:
            self.running = outer


def _values(references: Any) -> Any:
    """Return the value of a reference, or the values of a list."""
    return [reference.get() for reference in references] if isinstance(references, list) else references.get()


NAMES = {"TrainActor": "trainer rank", "RolloutActor": "engine"}
