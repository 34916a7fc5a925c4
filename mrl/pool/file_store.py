"""Groups in memory up to a limit, and after that in files of the run's folder.

| file | holds |
|---|---|
| run | the run that the folder belongs to |
| N.open | the file that is written: whole frames, and after a kill perhaps a torn one, which opening cuts off |
| N.sealed | a file that is never written again; it goes when all of its groups were released |

A group that `put` returned the handle of is in memory or in a file; what is in a file outlives this process, and
`seal` brings the rest there too. Nothing is fsynced: a machine that stops may lose what its disks had not taken. A
release is not written: opening finds a released group again as long as its file has others, and who opens says
which it goes on with.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from mrl.errors import PoolError
from mrl.pool.folder import MARK, claim, clear
from mrl.pool.frames import Frame, append, frames_of, read
from mrl.pool.group_bytes import decode, encode
from mrl.samples import Group, Prompt

FILE_BYTES = 64 << 20
"""A file is sealed when it has grown beyond this."""


@dataclasses.dataclass(slots=True)
class _File:
    """One file of frames, open for reading; the one that is written is the last."""

    path: Path
    descriptor: int
    live: set[int]
    """Handles of groups that were not released."""
    end: int = 0
    """Where the next frame begins."""


class FileStore:
    """A pool.Store."""

    def __init__(
        self,
        folder: Path,
        *,
        run: str,
        memory_bytes: int,
        prompt_at: Callable[[int], Prompt],
        file_bytes: int = FILE_BYTES,
    ) -> None:
        """Opens the folder with all groups that files have, each of whose bytes is looked at.

        `run`: whose folder it is; `memory_bytes`: of groups that are in memory alone; `prompt_at`: the prompt of an
        index, which the stream of rows has. PoolError where the folder cannot be written, belongs to another run or has a
        damaged file."""
        self._folder, self._file_bytes, self._memory_bytes = folder, file_bytes, memory_bytes
        self._run, self._prompt_at = run, prompt_at
        self._memory: dict[int, bytes] = {}
        self._held = 0
        self._frames: dict[int, tuple[_File, Frame]] = {}
        self._files: list[_File] = []
        with self._explained("open the pool's folder"):
            folder.mkdir(parents=True, exist_ok=True)
            claim(folder, run)
            for path in sorted((*folder.glob("*.sealed"), *folder.glob("*.open")), key=_number):
                self._reopen(path)
            self.next_handle = 1 + max(self._frames, default=-1)
            """Of the group that is put next."""
            self._number = 1 + max(map(_number, folder.glob("*.sealed")), default=-1)
        self._writing: _File | None = None

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
        data, handle = encode(group), self.next_handle
        if self._held + len(data) <= self._memory_bytes:
            self._memory[handle] = data
            self._held += len(data)
        else:
            self._write(handle, data)
        self.next_handle = handle + 1
        return handle

    def get(self, handles: Iterable[int]) -> list[Group]:
        """The groups of these handles, in their order. PoolError for one that is not kept, or whose file is
        damaged."""
        return [decode(self._bytes(handle), self._prompt_at) for handle in handles]

    def release(self, handles: Iterable[int]) -> None:
        """Forgets groups; others that are not kept are no error. A sealed file without groups goes."""
        for handle in handles:
            self._held -= len(self._memory.pop(handle, b""))
            if handle in self._frames:
                file, _ = self._frames.pop(handle)
                file.live.discard(handle)
                if not file.live and file is not self._writing:
                    self._drop(file)

    def seal(self) -> None:
        """Brings all groups into files that are never written again. PoolError where there is no room."""
        for handle, data in list(self._memory.items()):
            self._write(handle, data)
            del self._memory[handle]
            self._held -= len(data)
        self._seal_file()

    def snapshot(self) -> dict[str, list[int]]:
        """Seals, and says which groups each file has: what must outlive this process to go on from here."""
        self.seal()
        return {file.path.name: sorted(file.live) for file in self._files}

    def close(self) -> None:
        """Closes the files; what is in memory alone is gone."""
        for file in self._files:
            os.close(file.descriptor)
        self._files, self._writing = [], None
        self._frames.clear()
        self._memory.clear()
        self._held = 0

    def remove(self) -> None:
        """Closes, and gives the folder back: no group outlives this process. What a disk does not let go is left."""
        self.close()
        with contextlib.suppress(OSError):
            clear(self._folder, self._run)
            (self._folder / MARK).unlink(missing_ok=True)

    def _bytes(self, handle: int) -> bytes:
        if handle in self._memory:
            return self._memory[handle]
        if handle not in self._frames:
            raise PoolError(f"the pool does not keep group {handle}")
        file, frame = self._frames[handle]
        return read(file.descriptor, frame, file.path)

    def _write(self, handle: int, data: bytes) -> None:
        with self._explained(f"keep group {handle} of {len(data)} bytes"):
            file = self._writing or self._new_file()
            frame = append(file.descriptor, file.end, handle, data)
        file.end = frame.end
        file.live.add(handle)
        self._frames[handle] = file, frame
        if file.end >= self._file_bytes:
            self._seal_file()

    def _new_file(self) -> _File:
        path = self._folder / f"{self._number:08d}.open"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._writing = _File(path, descriptor, set())
        self._files.append(self._writing)
        self._number += 1
        return self._writing

    def _seal_file(self) -> None:
        file, self._writing = self._writing, None
        if file is None:
            return
        with self._explained("seal a file"):
            file.path = file.path.rename(file.path.with_suffix(".sealed"))
        if not file.live:
            self._drop(file)

    def _drop(self, file: _File) -> None:
        self._files.remove(file)
        os.close(file.descriptor)
        file.path.unlink(missing_ok=True)

    def _reopen(self, path: Path) -> None:
        """A file of an earlier process; one that was still written is cut after its last whole frame and sealed."""
        descriptor = os.open(path, os.O_RDWR)
        frames = list(frames_of(descriptor))
        end, size = max((frame.end for frame in frames), default=0), os.fstat(descriptor).st_size
        if path.suffix == ".open":
            os.ftruncate(descriptor, end)
            path = path.rename(path.with_suffix(".sealed"))
        elif end != size:
            os.close(descriptor)
            raise PoolError(f"{path} is damaged after byte {end} of {size}: a sealed file is never torn")
        file = _File(path, descriptor, {frame.number for frame in frames}, end)
        self._files.append(file)
        self._frames |= {frame.number: (file, frame) for frame in frames}
        if not frames:
            self._drop(file)

    def _explained(self, what: str) -> contextlib.AbstractContextManager[None]:
        return _explained(f"cannot {what} ({self._folder})")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise PoolError(f"{what}: {error.strerror or error}") from error


def _number(path: Path) -> int:
    return int(path.stem)
