"""Process of one remote sandbox, at its server: `python -m ...sandbox_session PARENT_PID`.

consumes      frames on stdin, a pipe: what is allowed, then messages CALL and DATA of the client
produces      frames on the former stdout: messages CALL and DATA
waits for     the next frame, commands of the sandbox, and connections of its door
never does    outlive its server, or its sandbox's `life_seconds`
"""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

from mrl.agents.environment import Model, SandboxLost
from mrl.agents.sandboxes.providers import KEPT_FILES, Sandbox, SandboxLimits, TooLarge, open_sandbox
from mrl.agents.sandboxes.remote.sandbox_messages import (
    CALL,
    DATA,
    data_messages,
    json_message,
    list_files,
    read_files,
    total_bytes,
)
from mrl.agents.sandboxes.work_files import WorkFile
from mrl.errors import ConfigError
from mrl.processes.channel import take_over_stdio
from mrl.processes.framing import frame, read_frame
from mrl.processes.lifeline import die_with_parent

_MOST_FILES = 10 * KEPT_FILES


@dataclasses.dataclass(frozen=True, slots=True)
class SandboxRules:
    """Decisions of a server about its sandboxes."""

    kind: str
    options: Mapping[str, Any]
    images: tuple[str, ...]
    """Patterns of the images that clients may name."""
    mounts: Mapping[str, str]

    def require_image(self, image: str | None) -> None:
        """Raise ConfigError if a client must not name this image."""
        if image is None:
            return
        name = os.path.realpath(image) if image.startswith("/") else image
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in self.images):
            raise ConfigError(
                f"the server does not allow the image {image!r}; allow it by `mrl sandboxes --image PATTERN`"
            )


class _Session:
    def __init__(self, requests: BinaryIO, replies: BinaryIO) -> None:
        self._requests, self._replies = requests, replies
        rules = json.loads(self._next())
        self._rules = SandboxRules(rules["kind"], rules["options"], tuple(rules["images"]), rules["mounts"])
        self._door = rules["door"]

    def serve(self) -> None:
        """Open the sandbox and answer calls until the client has no more."""
        try:
            opening = json.loads(self._next(CALL))
            limits = SandboxLimits(**opening["limits"])
            signal.alarm(max(1, math.ceil(limits.life_seconds)))  # its default action ends this process
            self._rules.require_image(opening["image"])
            sandbox = open_sandbox(
                self._rules.kind,
                options=self._rules.options,
                image=opening["image"],
                mounts=self._rules.mounts,
                limits=limits,
                model=Model(f"unix:{self._door}", "") if opening["model"] else None,
                folders=opening["folders"],
            )
        except (SandboxLost, ConfigError) as error:
            self._fail(error)
            return
        with sandbox:
            url = sandbox.model.url if sandbox.model is not None else None
            self._send(json_message({"about": sandbox.describe(), "url": url}))
            while True:
                try:
                    self._answer(sandbox, limits)
                except EOFError:
                    return
                except (SandboxLost, TooLarge, ValueError) as error:
                    self._fail(error)

    def _answer(self, sandbox: Sandbox, limits: SandboxLimits) -> None:
        call = json.loads(self._next(CALL))
        match call["call"]:
            case "run":
                done = sandbox.run(call["command"], seconds=call["seconds"], env=call["env"])
                self._send(json_message({"exit": dataclasses.asdict(done)}))
            case "write":
                listed = call["files"]
                if total_bytes(listed) > limits.disk_mib << 20 or len(listed) > _MOST_FILES:
                    self._fail(TooLarge(f"{len(listed)} files are more than the sandbox takes"))
                    raise EOFError  # their bytes are not read
                sandbox.write(read_files(listed, self._data(total_bytes(listed))), call["folder"])
                self._send(json_message({}))
            case "read":
                files = sandbox.read(call["patterns"], call["folder"])
                self._send_files(files)
            case name:
                raise ValueError(f"no call {name!r}")

    def _send_files(self, files: Mapping[str, WorkFile]) -> None:
        self._send(json_message({"files": list_files(files)}))
        for message in data_messages(files):
            self._send(message)

    def _data(self, count: int) -> bytes:
        parts = list[bytes]()
        while count > 0:
            parts.append(self._next(DATA))
            count -= len(parts[-1])
        return b"".join(parts)

    def _next(self, kind: bytes = b"") -> bytes:
        """Return the content of the next message, of this kind. Raise EOFError at the end."""
        if (message := read_frame(self._requests)) is None:
            raise EOFError
        if not message.startswith(kind):
            raise ValueError(f"a message of kind {message[:1]!r}, which was not expected")
        return message[len(kind) :]

    def _fail(self, error: Exception) -> None:
        kinds = (SandboxLost, TooLarge, ConfigError, ValueError)
        name = next(kind.__name__ for kind in kinds if isinstance(error, kind))
        self._send(json_message({"error": name, "reason": str(error)}))

    def _send(self, message: bytes) -> None:
        self._replies.write(frame(message))
        self._replies.flush()


def main() -> None:
    """Serve one sandbox."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))  # closes the sandbox
    requests, replies = take_over_stdio()
    die_with_parent(int(sys.argv[1]))
    with open(requests, "rb") as stream, open(replies, "wb") as channel:
        _Session(stream, channel).serve()


if __name__ == "__main__":
    main()
