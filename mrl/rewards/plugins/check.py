"""Whether users' reward functions can be read, asked in a process of its own: their modules may do anything
while they are read.

`python -m mrl.rewards.plugins.check` reads pickled RewardParts from its standard input and answers with a
JSON list, one text for each part: empty, or why its function cannot be had.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Sequence

from mrl.errors import ConfigError
from mrl.processes.start import child_environment, module_words
from mrl.rewards.plugins.plugin_verifier import load_plugin
from mrl.rewards.reward_part import RewardPart

DEADLINE_SECONDS = 60.0


def check_plugins(verifiers: Sequence[RewardPart]) -> None:
    """ConfigError with one line for each plug-in whose file or function is not there, or cannot be called in
    its style."""
    parts = [part for part in verifiers if part.kind == "plugin"]
    faults = dict.fromkeys(fault for fault in _answers(parts) if fault)
    if faults:
        raise ConfigError("\n".join(faults))


def _answers(parts: Sequence[RewardPart]) -> list[str]:
    if not parts:
        return []
    names = ", ".join(dict.fromkeys(str(part.path) for part in parts))
    try:
        done = subprocess.run(
            module_words("mrl.rewards.plugins.check"),
            input=pickle.dumps(tuple(parts)),
            capture_output=True,
            env=child_environment(),
            timeout=DEADLINE_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return [f"reward.path = {names}: reading it took more than {DEADLINE_SECONDS:g} s"]
    if done.returncode:
        said = done.stderr.decode(errors="replace").strip().splitlines()[-1:]
        return [
            f"reward.path = {names}: reading it ended the process with {done.returncode} ({''.join(said)})"
        ]
    return json.loads(done.stdout)


def _fault(part: RewardPart) -> str:
    try:
        load_plugin(part)
    except ConfigError as error:
        return str(error)
    except BaseException as error:  # whatever the user's module raises while it is read, SystemExit too
        return f"reward.path = {part.path!r} cannot be read: {type(error).__name__}: {error}"
    return ""


def main() -> None:
    """Answers on the descriptor that was standard output; what the modules print goes to standard error."""
    parts = pickle.load(sys.stdin.buffer)
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, json.dumps([_fault(part).replace("\n", " ") for part in parts]).encode())


if __name__ == "__main__":
    main()
