"""Registry of environments by name.

| name | source |
|---|---|
| `calculator`, `python_maths`, ... | this project |
| any other word | the entry point of that name in the group `mrl.environments` of an installed package |
| `package.module:Class`, `file.py:Class` | imported, as reward functions are |
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable, Mapping
from typing import Any

from mrl.errors import ConfigError
from mrl.user_code import find_callable

GROUP = "mrl.environments"
_SHIPPED = {
    "calculator": "mrl.agents.envs.calculator:Calculator",
    "gymnasium": "mrl.agents.adapters.gymnasium:Gymnasium",
    "harbor": "mrl.agents.adapters.harbor:Harbor",
    "nemo_gym": "mrl.agents.adapters.nemo_gym:NemoGym",
    "python_maths": "mrl.agents.envs.python_maths:PythonMaths",
    "remote": "mrl.agents.adapters.remote:Remote",
    "verifiers": "mrl.agents.adapters.verifiers:Verifiers",
}


@dataclasses.dataclass(frozen=True, slots=True)
class EnvironmentSpec:
    """Name of an environment, and its options."""

    name: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Keyword arguments of its class, JSON values."""
    python: str | None = None
    """Interpreter of its process; None: this one's."""


def names() -> list[str]:
    """Return the names of all environments that need no path."""
    return sorted({*_SHIPPED, *(point.name for point in importlib.metadata.entry_points(group=GROUP))})


def find_environment(name: str) -> Callable[..., Any]:
    """Return the class and import its module. Raise ConfigError if the name or the path does not exist."""
    if ":" not in name:
        name = _path(name)
    return find_callable(name, setting="agent.environment", kind="class")[1]


def _path(name: str) -> str:
    if name in _SHIPPED:
        return _SHIPPED[name]
    points = importlib.metadata.entry_points(group=GROUP, name=name)
    if not points:
        raise ConfigError(
            f"agent.environment = {name!r} is not known; choose one of {', '.join(names())}, or a path "
            "(package.module:Class, file.py:Class)"
        )
    return next(iter(points)).value
