"""Groups in memory up to a limit, and after that in files of the run's folder.

A file `N.groups` holds whole frames (frames.py), is written at its end alone, and goes when all of its groups were released. Files
serve the process that wrote them: what must outlive it is in the checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mrl.errors import PoolError
from mrl.pool.folder import MARK, claim, clear
from mrl.pool.frames import Frame, append, read_bytes
from mrl.pool.group_bytes import decode_group, encode_group, size_of
from mrl.routes import Routes
from mrl.samples import Group, Prompt

FILE_BYTES = 64 << 20
"""A file that has grown beyond this is written no more."""


@dataclasses.dataclass(slots=True)
class _File:
    """One file of frames."""

    path: Path
    descriptor: int
    live: set[int] = dataclasses.field(default_factory=set)
    """Handles of groups that were not released."""
    end: int = 0
    """Where the next frame begins."""


class FileStore:
    """The judged groups of a run until they are released, in memory and then in files. A handle is a number that is never used
    again."""

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        memory_bytes: int,
        prompt_at: Callable[[int], Prompt],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """`run`: whose folder it is; `memory_bytes`: of groups that are in memory (`size_of`); `prompt_at`: the prompt of an
        index, which the stream of rows has. PoolError where the folder cannot be written or belongs to another run."""
        self._folder, self._file_bytes, self._memory_bytes = folder, file_bytes, memory_bytes
        self._run, self._prompt_at = run, prompt_at
        self._memory: dict[int, tuple[Group, int]] = {}
        """Groups with their sizes."""
        self._routes: dict[int, tuple[Routes | None, ...]] = {}
        """Of each group that is in a file: handles, which no file can hold."""
        self._held = 0
        self._frames: dict[int, tuple[_File, Frame]] = {}
        self._files: list[_File] = []
        self._writing: _File | None = None
        self._num_files = 0
        self._num_put = 0
        with self._explained("open the pool's folder"):
            folder.mkdir(parents=True, exist_ok=True)
            claim(folder, run)

    @property
    def handles(self) -> list[int]:
        """Of all groups that are kept, in the order in which they came."""
        return sorted((*self._frames, *self._memory))

    @property
    def memory_bytes(self) -> int:
        """What the groups in memory take."""
        return self._held

    @property
    def spilled_bytes(self) -> int:
        """What the groups in files take."""
        return sum(frame.num_bytes for _, frame in self._frames.values())

    def metrics(self) -> dict[str, float]:
        """What a step's row tells."""
        spilled = float(self.spilled_bytes)
        return {"pool/bytes": self._held + spilled, "pool/spilled_bytes": spilled}

    def put(self, group: Group) -> int:
        """Keeps a group; its handle. PoolError where no file can take it."""
        handle, size = self._num_put, size_of(group)
        if self._held + size <= self._memory_bytes:
            self._memory[handle] = group, size
            self._held += size
        else:
            self._write(handle, encode_group(group))
            self._routes[handle] = tuple(sample.routes for sample in group.samples)
        self._num_put += 1
        return handle

    def get(self, handles: Iterable[int]) -> list[Group]:
        """The groups of these handles, in their order. PoolError for one that is not kept, or whose file is
        damaged."""
        return [self._memory[n][0] if n in self._memory else self._read(n) for n in handles]

    def release(self, handles: Iterable[int]) -> None:
        """Forgets groups; others that are not kept are no error. A file without groups goes."""
        for handle in handles:
            if handle in self._memory:
                self._held -= self._memory.pop(handle)[1]
            elif handle in self._frames:
                del self._routes[handle]
                file, _ = self._frames.pop(handle)
                file.live.discard(handle)
                if not file.live and file is not self._writing:
                    self._drop(file)

    def close(self) -> None:
        """Closes the files; what is in memory alone is gone."""
        for file in self._files:
            os.close(file.descriptor)
        self._files, self._writing = [], None
        self._frames.clear()
        self._memory.clear()
        self._routes.clear()
        self._held = 0

    def remove(self) -> None:
        """Closes, and gives the folder back: no group outlives this process. What a disk does not let go is left."""
        self.close()
        with contextlib.suppress(OSError):
            clear(self._folder, self._run)
            (self._folder / MARK).unlink(missing_ok=True)

    def _read(self, handle: int) -> Group:
        if handle not in self._frames:
            raise PoolError(f"the pool does not keep group {handle}")
        file, frame = self._frames[handle]
        group = decode_group(read_bytes(file.descriptor, frame, file.path), self._prompt_at)
        pairs = zip(group.samples, self._routes[handle], strict=True)
        return Group(group.prompt, tuple(dataclasses.replace(sample, routes=own) for sample, own in pairs))

    def _write(self, handle: int, data: bytes) -> None:
        with self._explained(f"keep group {handle} of {len(data)} bytes"):
            file = self._writing or self._new_file()
            frame = append(file.descriptor, file.end, handle, data)
        file.end = frame.end
        file.live.add(handle)
        self._frames[handle] = file, frame
        if file.end >= self._file_bytes:
            self._writing = None

    def _new_file(self) -> _File:
        path = self._folder / f"{self._num_files:08d}.groups"
        self._writing = _File(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        self._files.append(self._writing)
        self._num_files += 1
        return self._writing

    def _drop(self, file: _File) -> None:
        self._files.remove(file)
        os.close(file.descriptor)
        file.path.unlink(missing_ok=True)

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _explained(f"cannot {what} ({self._folder})")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PoolError(f"{what}: {error.strerror or error}") from error
