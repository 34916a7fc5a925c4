"""Streams full checkpoint tensors out of any layout, one at a time, and writes them as a Hugging Face folder.

Each tensor is assembled on rank 0 from the lowest rank that holds each of its pieces; memory stays at one full tensor.
Files are written as their tensors arrive, into a temporary folder that is renamed when complete.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import Tensor

from models import float8
from models.families import Family
from models.manifest import CheckpointTensor, LocalTensor, Piece
from mrl.errors import CheckpointError
from mrl.training.hf_folder import box
from resharding.layout import Layout

SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "float64": "F64"}
FILE_BYTES = 4 << 30
"""Largest safetensors file, unless one tensor is larger."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """One rank's contribution to a checkpoint tensor."""

    rank: int
    sources: tuple[tuple[int, str, Piece], ...]
    """(model chunk, parameter name, piece)."""
    dtype: torch.dtype


def gather_plan(
    family: Family, hf_config: Mapping[str, Any], layout: Layout, *, dtype: str
) -> dict[str, list[Part]]:
    """Checkpoint tensor -> the parts that cover it exactly once, by rank. The same on every rank.

    `dtype` is the parameters'.
    """
    holders: dict[str, dict[tuple[Any, Any], tuple[int, int, str, Piece]]] = defaultdict(dict)
    kinds: dict[str, torch.dtype] = {}
    for place in layout.places():
        for local in family.local_tensors(hf_config, layout, place, dtype=dtype):
            for piece in local.pieces:
                kinds[piece.tensor] = getattr(torch, local.dtype)
                key = (piece.start, piece.shape)
                holders[piece.tensor].setdefault(key, (place.rank, local.chunk, local.name, piece))
    plan = {}
    for name, pieces in holders.items():
        by_rank: dict[int, list[tuple[int, str, Piece]]] = defaultdict(list)
        for rank, chunk, local_name, piece in pieces.values():
            by_rank[rank].append((chunk, local_name, piece))
        plan[name] = [Part(rank, tuple(by_rank[rank]), kinds[name]) for rank in sorted(by_rank)]
    return plan


def stream_full_tensors(
    tensors: Sequence[CheckpointTensor],
    plan: Mapping[str, list[Part]],
    parameters: Sequence[tuple[LocalTensor, Tensor]],
    *,
    rank: int,
    device: torch.device,
) -> Iterator[tuple[CheckpointTensor, Tensor | None]]:
    """Every checkpoint tensor in order: the full tensor on rank 0, None elsewhere. All ranks iterate together."""
    ours = {(local.chunk, local.name): parameter for local, parameter in parameters}
    for tensor in tensors:
        parts = plan[tensor.name]
        full = torch.empty(tensor.shape, dtype=parts[0].dtype, device=device) if rank == 0 else None
        covered = 0
        for part in parts:
            covered += _move(part, ours, full, rank=rank, device=device)
        assert rank != 0 or full is None or covered == full.numel(), (
            f"{tensor.name}: {covered} elements of {full.numel()}"
        )
        yield tensor, full


def _move(
    part: Part,
    ours: Mapping[tuple[int, str], Tensor],
    full: Tensor | None,
    *,
    rank: int,
    device: torch.device,
) -> int:
    size = sum(int(torch.Size(piece.shape).numel()) for _, _, piece in part.sources)
    flat = None
    if part.rank == rank:
        boxes = [
            box(ours[chunk, name], piece.local_start, piece.shape) for chunk, name, piece in part.sources
        ]
        flat = torch.cat([view.reshape(-1) for view in boxes])
        if rank != 0:
            dist.send(flat, 0)
    elif rank == 0:
        flat = torch.empty(size, dtype=part.dtype, device=device)
        dist.recv(flat, part.rank)
    if full is not None and flat is not None:
        shapes = [torch.Size(piece.shape) for _, _, piece in part.sources]
        values = flat.split([shape.numel() for shape in shapes])
        for (_, _, piece), value, shape in zip(part.sources, values, shapes, strict=True):
            box(full, piece.start, piece.shape).copy_(value.view(shape))
    return size


class FolderWriter:
    """Writes tensors, in a known order and each in its own type, as safetensors files of at most `file_bytes`."""

    def __init__(
        self, folder: Path, tensors: Sequence[CheckpointTensor], *, file_bytes: int = FILE_BYTES
    ) -> None:
        self._folder = folder
        self._files = _assign_files(tensors, file_bytes=file_bytes)
        self._stream: BinaryIO | None = None
        self._open: str | None = None
        self.total_bytes = 0

    def write(self, tensor: CheckpointTensor, value: Tensor) -> None:
        """The next tensor; it is converted to the type it has in the folder."""
        name = next(file for file, members in self._files.items() if tensor in members)
        if name != self._open:
            self._start(name)
        assert self._stream is not None
        data = value.to("cpu", getattr(torch, tensor.dtype)).contiguous().view(-1).view(torch.uint8)
        self._stream.write(data.numpy().tobytes())
        self.total_bytes += data.numel()

    def close(self) -> None:
        """Finish the files and write the index where there are several."""
        self._finish_file()
        if len(self._files) == 1:
            return
        weight_map = {tensor.name: file for file, members in self._files.items() for tensor in members}
        index = {"metadata": {"total_size": self.total_bytes}, "weight_map": weight_map}
        write_durably(self._folder / "model.safetensors.index.json", json.dumps(index, indent=2).encode())

    def _start(self, name: str) -> None:
        self._finish_file()
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        at = 0
        for tensor in self._files[name]:
            size = _bytes(tensor)
            header[tensor.name] = {
                "dtype": SAFETENSORS_TYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [at, at + size],
            }
            at += size
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._stream = open(self._folder / name, "wb")  # noqa: SIM115 closed by _finish_file
        self._stream.write(len(text).to_bytes(8, "little") + text)
        self._open = name

    def _finish_file(self) -> None:
        if self._stream is not None:
            self._stream.flush()
            os.fsync(self._stream.fileno())
            self._stream.close()
            self._stream = None


def _bytes(tensor: CheckpointTensor) -> int:
    return int(torch.Size(tensor.shape).numel()) * getattr(torch, tensor.dtype).itemsize


def _assign_files(
    tensors: Sequence[CheckpointTensor], *, file_bytes: int
) -> dict[str, list[CheckpointTensor]]:
    groups: list[list[CheckpointTensor]] = [[]]
    room = file_bytes
    for tensor in tensors:
        size = _bytes(tensor)
        if groups[-1] and size > room:
            groups.append([])
            room = file_bytes
        groups[-1].append(tensor)
        room -= size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{n + 1:05d}-of-{len(groups):05d}.safetensors": g for n, g in enumerate(groups)}


def prepare_folder(path: Path) -> Path:
    """The temporary folder beside `path`; CheckpointError when `path` exists."""
    if path.exists():
        raise CheckpointError(f"{path} exists already; export to a new folder or remove it first")
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    return partial


def copy_side_files(source: Path, folder: Path, *, dtype: str, changes: Mapping[str, Any]) -> None:
    """config.json (with the weights' type and the changes of keys it has) and all else of the source that is no weight."""
    for file in sorted(source.iterdir()):
        is_weight = file.suffix in {".safetensors", ".bin", ".pt", ".pth"} or file.name.endswith(
            ".index.json"
        )
        if file.is_file() and not is_weight and file.name != "config.json":
            shutil.copy2(file, folder / file.name)
    text = (source / "config.json").read_text()
    config = json.loads(text)
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    exported = config | {name: value for name, value in changes.items() if name in config} | {key: dtype}
    exported.pop(float8.KEY, None)  # what is written is wide, whatever was read
    if exported != config:
        text = json.dumps(exported, indent=2) + "\n"
    write_durably(folder / "config.json", text.encode())


def finish(
    writer: FolderWriter | None,
    partial: Path,
    path: Path,
    *,
    source: Path,
    dtype: str,
    changes: Mapping[str, Any],
) -> None:
    """Complete the temporary folder and commit it."""
    assert writer is not None
    writer.close()
    copy_side_files(source, partial, dtype=dtype, changes=changes)
    commit_folder(partial, path)


def write_durably(path: Path, data: bytes) -> None:
    """Write and fsync a file."""
    with open(path, "wb") as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


def commit_folder(partial: Path, path: Path) -> None:
    """Make a complete folder visible under its name, durably."""
    sync_folder(partial)
    os.rename(partial, path)
    sync_folder(path.parent)


def sync_folder(path: Path) -> None:
    """fsync a directory entry."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
