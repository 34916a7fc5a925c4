"""User-defined losses: import them by name, and try them on made-up numbers before a run starts.

Importing their modules may do anything, and their mistakes would otherwise appear only after a whole
generation.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mrl.errors import ConfigError
from mrl.user_code import find_callable


def user_function(
    path: str, options: Mapping[str, Any], *, setting: str, takes: Sequence[str]
) -> Callable[..., Any]:
    """Return the function with its options bound. Raise ConfigError if it cannot be imported, or called with
    the positional arguments that it `takes` and the options."""
    _, function = find_callable(path, setting=setting, kind="function")
    try:
        inspect.signature(function).bind(*takes, **options)
    except TypeError as error:
        name = path.rpartition(":")[2]
        arguments = ", ".join([*takes, *(f"{key}=..." for key in options)])
        raise ConfigError(
            f"{setting} = {path!r}: it is called as {name}({arguments}), but has the signature "
            f"{inspect.signature(function)}: {error}"
        ) from error
    return functools.partial(function, **options)


def require_trial_passes(path: str, call: Callable[[], str], *, setting: str) -> None:
    """Raise ConfigError if the call raises or returns a text, which is the fault in its result."""
    try:
        fault = call()
    except Exception as error:  # whatever the user's function raises
        fault = f"it raised {type(error).__name__}: {error}"
    if fault:
        raise ConfigError(
            f"{setting} = {path!r}: a trial on made-up numbers before the start failed: {fault}"
        )
