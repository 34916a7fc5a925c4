"""Import the user's own code (rewards, environments, losses) by name, and keep it apart from libraries.

The working folder comes last in the module search path: a file `token.py` there does not replace Python's
module.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from mrl.errors import ConfigError

_NOT_THE_USERS = tuple(
    os.path.join(os.path.realpath(folder), "")
    for folder in (
        os.path.dirname(__file__),
        *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    )
)
"""Folders of mrl and of installed libraries."""


def place_of(error: BaseException) -> str:
    """Return " at FILE:LINE" of the innermost user code, else of any code, in an error's traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    user_frames = [frame for frame in frames if _is_the_users(frame.filename)]
    return (
        f" at {(user_frames or frames)[-1].filename}:{(user_frames or frames)[-1].lineno}" if frames else ""
    )


def _is_the_users(file: str) -> bool:
    if file.startswith("<") or "site-packages" in Path(file).parts:
        return False
    return not os.path.realpath(file).startswith(_NOT_THE_USERS)


def search_path() -> list[str]:
    """Return this process's `sys.path` with the working folder at its end."""
    working_folder = os.getcwd()
    return [*(entry for entry in sys.path if entry not in ("", working_folder)), working_folder]


def child_path() -> dict[str, str]:
    """Return the variable that gives `python -P` this process's module search path, working folder last."""
    return {"PYTHONPATH": os.pathsep.join(search_path())}


def find_callable(
    path: str, *, setting: str, kind: Literal["function", "class"]
) -> tuple[ModuleType, Callable[..., Any]]:
    """Return (module, callable) of `package.module:name` or `file.py:name`.

    Raises:
        ConfigError: Names the setting and what is missing, or what the module raised on import.
    """
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())
    place, _, name = path.rpartition(":")
    where = f"{setting} = {path!r}"
    try:
        module = _load_file(place, setting) if place.endswith(".py") else importlib.import_module(place)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:  # whatever the user's module raises on import
        raise ConfigError(
            f"{where}: {place or 'nothing'} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    target = getattr(module, name, None)
    if not callable(target):
        is_one = inspect.isclass if kind == "class" else inspect.isfunction
        offered = sorted(n for n, v in vars(module).items() if is_one(v) and not n.startswith("_"))
        raise ConfigError(f"{where}: {place} has no {kind} {name!r}; it has {offered}")
    return module, target


def _load_file(place: str, setting: str) -> ModuleType:
    file = Path(place)
    if not file.is_file():
        raise ConfigError(f"{setting}: no file {place} (working directory {Path.cwd()})")
    spec = importlib.util.spec_from_file_location(f"mrl_plugin_{file.stem}", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
