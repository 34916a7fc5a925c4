"""Losses of the user's own: found by name, and tried on made-up numbers before a run starts.

Their modules may do anything while they are read, and their mistakes would otherwise show after a whole generation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.errors import ConfigError
from mrl.own_code import find_callable


def own_function(
    path: str, options: Mapping[str, Any], *, setting: str, takes: Sequence[str]
) -> Callable[..., Any]:
    """The function with its options. ConfigError where its module cannot be read or has no such function, and where that cannot
    be called with what it `takes`, by position, and the options."""
    _, function = find_callable(path, setting=setting, what="function")
    try:
        inspect.signature(function).bind(*takes, **options)
    except TypeError as error:
        name = path.rpartition(":")[2]
        words = ", ".join([*takes, *(f"{key}=..." for key in options)])
        raise ConfigError(
            f"{setting} = {path!r}: it is called as {name}({words}), and has the signature {inspect.signature(function)}: {error}"
        ) from error
    return functools.partial(function, **options)


def tried(path: str, call: Callable[[], str], *, setting: str) -> None:
    """ConfigError where the call of a user's function raises, or says with its text what is wrong with what came back."""
    try:
        fault = call()
    except Exception as error:  # whatever the user's function raises
        fault = f"it raised {type(error).__name__}: {error}"
    if fault:
        raise ConfigError(f"{setting} = {path!r}: tried on made-up numbers before the start, {fault}")
