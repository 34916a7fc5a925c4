"""Files and shared memory that vLLM creates, and their removal however the engine's process ends.

vLLM puts its workers' queues and its CPU all-reduce into named shared memory and rendezvous through a file;
only an orderly shutdown removes them. Here every engine has its own folder, named after its process, for
vLLM's files; the all-reduce's segments are named after its rendezvous file. A small shell in its own session
reads a pipe from the owner: when the owner ends, the pipe closes and the shell removes the folder and the
segments. If the shell was killed too, the next engine's start removes this user's folders whose owner is
dead.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil

from mrl.compile_cache import use_own_compile_cache
from mrl.errors import RolloutError
from mrl.files import folder_for_sockets, is_own_folder
from mrl.resharding.wire.processes import ProcessId

_SEGMENTS = Path("/dev/shm")
_OURS = re.compile(r"mrl-engine-(\d+)-(\d+)-[0-9a-f]+")
_NAMED = re.compile(r"/dev/shm/(?:psm_\w+|vllm_dist_\S+)")
_REMOVE = Path(__file__).with_name("remove_scratch.sh")
"""`remove_scratch.sh FOLDER SEGMENTS` removes an engine's folder and the segments that it names."""


class Scratch:
    """Folder of one engine, created before it, so that an engine killed during its start leaves nothing."""

    def __init__(self, root: Path | None = None, segments: Path = _SEGMENTS) -> None:
        root = root or Path(folder_for_sockets())
        remove_stale_scratch(root, segments)
        own_process = ProcessId.own()
        self.folder = root / f"mrl-engine-{own_process.pid}-{own_process.start_ticks}-{uuid.uuid4().hex[:8]}"
        self.folder.mkdir(mode=0o700)
        # A background process of a shell that ends at once: Ray kills its workers' children with the workers.
        starter = subprocess.Popen(
            ["/bin/sh", str(_REMOVE), str(self.folder), str(segments), "when-input-ends"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            env={"PATH": os.defpath},  # without the mark of a run's processes, which are killed at its end
        )
        assert starter.stdin is not None and starter.stdout is not None
        self._lifeline, self._remover_output = starter.stdin, starter.stdout
        self.remover_pid = int(self._remover_output.readline())
        starter.wait()

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """Put temporary files, but not caches, of this process and those it starts into the folder."""
        usual, before = tempfile.tempdir, dict(os.environ)
        use_own_compile_cache()
        os.environ["TMPDIR"] = os.environ["VLLM_RPC_BASE_PATH"] = tempfile.tempdir = str(self.folder)
        try:
            yield
        finally:
            tempfile.tempdir = usual
            os.environ.pop("TMPDIR")
            os.environ.update({"TMPDIR": before["TMPDIR"]} if "TMPDIR" in before else {})

    def note_segments(self) -> list[Path]:
        """Note the segments that this process and its descendants have mapped, which go with the folder."""
        segments = mapped_segments()
        (self.folder / "names").write_text("".join(f"{path}\n" for path in segments))
        return segments

    def close(self, seconds: float = 10.0) -> None:
        """Remove the folder and its segments; wait until they are gone."""
        self._lifeline.close()
        if not select.select([self._remover_output], [], [], seconds)[0]:  # closed when the remover exits
            raise RolloutError(f"{self.folder} was not removed within {seconds:g} s")
        self._remover_output.close()


def remove_stale_scratch(root: Path, segments: Path = _SEGMENTS) -> list[Path]:
    """Remove and return the folders of this user's dead engines, with their segments; never a link."""
    dead = []
    for folder in root.glob("mrl-engine-*"):
        owner = _OURS.fullmatch(folder.name)
        if owner and is_own_folder(folder) and not ProcessId(int(owner[1]), int(owner[2])).alive():
            dead.append(folder)
            subprocess.run(["/bin/sh", str(_REMOVE), str(folder), str(segments)], check=False, timeout=10)
    return dead


def mapped_segments() -> list[Path]:
    """Return the named segments that this process and its descendants have mapped."""
    names: set[str] = set()
    for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
        with contextlib.suppress(OSError):
            names |= set(_NAMED.findall(Path(f"/proc/{process.pid}/maps").read_text()))
    return sorted(Path(name) for name in names)
