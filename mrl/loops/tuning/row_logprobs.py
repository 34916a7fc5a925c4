"""Log-probs (a reward model: scores) of whole responses, by the weights of now: those of the reference, taken once and kept in
a file.

With the reference's in a file nobody holds its parameters. The file's name is the digest of the weights, of the rows' tokens
and of the dtype, and at every start some rows are computed again: a file that does not fit is an error, not a flat loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.data.tune_rows import TuneRow, TuneRows, batch_of
from mrl.errors import ConfigError
from mrl.files import replace_durably
from mrl.samples import TrainBatch
from mrl.training.hf import base
from mrl.training.platform.parallel import joined, run_on_rank_zero
from mrl.training.worker import MegatronWorker

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""How far a response's log-prob may be off when computed again, for each square root of its tokens: rounding differs with what
shares its microbatch, and adds up like a walk."""
CHECKED_ROWS = 8

Logprobs = Mapping[int, Sequence[float]]
"""Row's number -> the log-prob, or the one score, of each of its responses."""
Scores = Mapping[int, np.ndarray]
"""Row's number -> [responses, K] what each head says of each of its responses."""


def own_share(batch: TrainBatch, worker: MegatronWorker) -> TrainBatch:
    """The rows of this data-parallel rank: every dp-th, a pair being one."""
    return batch.select(np.flatnonzero(batch.group_ids % worker.layout.dp == worker.place.dp))


def row_logprobs(
    worker: MegatronWorker, rows: Sequence[TuneRow], *, batch_rows: int, numbers: Sequence[int] | None = None
) -> dict[int, list[float]]:
    """The same on all ranks, called on all together; sums in float64 over each response's trained tokens.

    `numbers`: of the rows wanted, all by default.
    """
    found = _sums(worker, rows, "logprobs", batch_rows=batch_rows, numbers=numbers)
    return {number: sums.tolist() for number, sums in found.items()}


def row_scores(worker: MegatronWorker, rows: Sequence[TuneRow], *, batch_rows: int) -> Scores:
    """A reward model's scores of all rows' responses; the same on all ranks, called on all together."""
    return _sums(worker, rows, "values", batch_rows=batch_rows)


def _sums(
    worker: MegatronWorker,
    rows: Sequence[TuneRow],
    name: str,
    *,
    batch_rows: int,
    numbers: Sequence[int] | None = None,
) -> dict[int, np.ndarray]:
    """Of the array `name` of a forward pass over each response's trained tokens, of which a score has one: [responses] by row."""
    own: dict[int, list[Any]] = {}
    wanted = range(len(rows)) if numbers is None else numbers
    for start in range(0, len(wanted), batch_rows):
        chunk = list(wanted[start : start + batch_rows])
        shard = own_share(batch_of([rows[number] for number in chunk], chunk), worker)
        arrays = worker.forward(shard)
        if arrays is None or not shard.num_samples:  # another rank has the results
            continue
        values = arrays[name].astype(np.float64)
        sums = np.add.reduceat(values * shard.loss_mask, shard.cu_seqlens[:-1])
        for group, value in zip(shard.group_ids, sums, strict=True):
            own.setdefault(chunk[int(group)], []).append(value)
    return joined({number: np.array(sums) for number, sums in own.items()})  # type: ignore[arg-type]


def reference_logprobs(
    worker: MegatronWorker, rows: TuneRows, *, folder: Path, batch_rows: int, weights: str
) -> Logprobs:
    """Of all rows by the weights of now, whose digest is `weights`, from the folder's file or, the first time, into it.

    Called on all ranks together. ConfigError where the file's values are not what the weights give.
    """
    dtype, sizes = worker.training.dtype, [len(row.responses) for row in rows.rows]
    key = hashlib.sha256(f"{weights} {rows.digest()} {dtype}".encode()).hexdigest()[:32]
    path = folder / f"{key}.f64"
    if not all(joined({worker.place.rank: path.is_file()}).values()):  # type: ignore[arg-type]
        found = row_logprobs(worker, rows.rows, batch_rows=batch_rows)
        values = np.array([value for number in range(len(sizes)) for value in found[number]])
        run_on_rank_zero(lambda: _write(path, values))
        return found
    values = np.fromfile(path, np.float64)
    if len(values) != sum(sizes):
        raise ConfigError(f"{path} holds {len(values)} log-probs for {sum(sizes)} responses; remove it")
    ends = np.cumsum(sizes)
    kept = {
        n: values[end - size : end].tolist() for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }
    _verify(worker, rows.rows, kept, path, batch_rows)
    return kept


def bound_of(row: TuneRow, dtype: str) -> float:
    """How far one of a row's log-probs may be off."""
    return BOUNDS[dtype] * max(float(each.mask.sum()) for each in row.responses) ** 0.5


def weights_digest(worker: MegatronWorker, path: str) -> str:
    """Of a folder's weights, in hex; asked for on all ranks together, each reads its share."""
    own = base.file_digests(path, share=worker.place.rank, shares=worker.layout.world_size)
    return base.combined_digest(joined(own))


def _write(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_durably(path, values.tobytes())


def _verify(
    worker: MegatronWorker, rows: Sequence[TuneRow], kept: Logprobs, path: Path, batch_rows: int
) -> None:
    numbers = sorted({int(n) for n in np.linspace(0, len(rows) - 1, CHECKED_ROWS)})
    again = row_logprobs(worker, rows, batch_rows=batch_rows, numbers=numbers)
    for number in numbers:
        gap = float(np.abs(np.subtract(again[number], kept[number])).max())
        if gap > (bound := bound_of(rows[number], worker.training.dtype)):
            raise ConfigError(
                f"{path}: {rows[number].place} has log-probs that are {gap:.3g} off what the reference gives now (bound "
                f"{bound:.3g}); the file is of other weights or damaged: remove it"
            )
