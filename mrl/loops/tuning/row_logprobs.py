"""Log-probs (reward model: scores) of responses by the current weights; a file caches the reference's.

With that file no rank keeps the reference's parameters. Its name is a digest of the weights, the rows' tokens
and the dtype. Every start computes some rows again: a file that does not match is an error, not a flat loss.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.data.tune_rows import TuneRow, TuneRows, build_tune_batch
from mrl.errors import ConfigError
from mrl.files import replace_durably
from mrl.samples import TrainBatch
from mrl.training.hf import base
from mrl.training.platform.parallel import gather_entries, run_on_rank_zero
from mrl.training.prefixes import with_shared_prefixes
from mrl.training.worker import MegatronWorker

BOUNDS = {"float32": 1e-4, "bfloat16": 5e-2}
"""Largest error of a recomputed log-prob per square root of its response's tokens: rounding depends on the
microbatch, and adds up like a random walk."""
CHECKED_ROWS = 8

Logprobs = Mapping[int, Sequence[float]]
"""Row number -> log-prob, or single score, of each response."""
Scores = Mapping[int, np.ndarray]
"""Row number -> [responses, K] scores of each head."""


def own_share(batch: TrainBatch, worker: MegatronWorker) -> TrainBatch:
    """Return the rows of this data-parallel rank: every dp-th row, a pair counting as one."""
    share = batch.select(np.flatnonzero(batch.group_ids % worker.layout.dp == worker.place.dp))
    return with_shared_prefixes(share) if worker.shares_prefixes else share


def row_logprobs(
    worker: MegatronWorker, rows: Sequence[TuneRow], *, batch_rows: int, numbers: Sequence[int] | None = None
) -> dict[int, list[float]]:
    """Return log-probs, float64 sums over each response's trained tokens. Collective, the same on all ranks.

    `numbers`: the rows wanted, all by default.
    """
    sums_by_row = _sums(worker, rows, "logprobs", batch_rows=batch_rows, numbers=numbers)
    return {number: sums.tolist() for number, sums in sums_by_row.items()}


def row_scores(worker: MegatronWorker, rows: Sequence[TuneRow], *, batch_rows: int) -> Scores:
    """Return a reward model's scores of all rows' responses. Collective, the same on all ranks."""
    return _sums(worker, rows, "values", batch_rows=batch_rows)


def _sums(
    worker: MegatronWorker,
    rows: Sequence[TuneRow],
    name: str,
    *,
    batch_rows: int,
    numbers: Sequence[int] | None = None,
) -> dict[int, np.ndarray]:
    """Sum array `name` of a forward pass over each response's trained tokens: [responses] by row."""
    sums_by_row: dict[int, list[Any]] = {}
    wanted = range(len(rows)) if numbers is None else numbers
    for start in range(0, len(wanted), batch_rows):
        chunk = list(wanted[start : start + batch_rows])
        shard = own_share(build_tune_batch([rows[number] for number in chunk], chunk), worker)
        arrays = worker.forward(shard)
        if arrays is None or not shard.num_samples:  # another rank has the results
            continue
        values = arrays[name].astype(np.float64)
        sums = np.add.reduceat(values * shard.loss_mask, shard.cu_seqlens[:-1])
        for group, value in zip(shard.group_ids, sums, strict=True):
            sums_by_row.setdefault(chunk[int(group)], []).append(value)
    return gather_entries({number: np.array(sums) for number, sums in sums_by_row.items()})  # type: ignore[arg-type]


def reference_logprobs(
    worker: MegatronWorker, rows: TuneRows, *, folder: Path, batch_rows: int, weights: str
) -> Logprobs:
    """Return the log-probs of all rows by the current weights, whose digest is `weights`. Collective.

    They come from the folder's file, which is written if missing. Raise ConfigError if it does not match."""
    dtype, sizes = worker.training.dtype, [len(row.responses) for row in rows.rows]
    key = hashlib.sha256(f"{weights} {rows.digest()} {dtype}".encode()).hexdigest()[:32]
    path = folder / f"{key}.f64"
    if not all(gather_entries({worker.place.rank: path.is_file()}).values()):  # type: ignore[arg-type]
        logprobs = row_logprobs(worker, rows.rows, batch_rows=batch_rows)
        values = np.array([value for number in range(len(sizes)) for value in logprobs[number]])
        run_on_rank_zero(lambda: _write(path, values))
        return logprobs
    values = np.fromfile(path, np.float64)
    if len(values) != sum(sizes):
        raise ConfigError(f"{path} has {len(values)} log-probs for {sum(sizes)} responses; remove it")
    ends = np.cumsum(sizes)
    kept = {
        n: values[end - size : end].tolist() for n, (size, end) in enumerate(zip(sizes, ends, strict=True))
    }
    _verify(worker, rows.rows, kept, path, batch_rows)
    return kept


def bound_of(row: TuneRow, dtype: str) -> float:
    """Return the largest allowed error of a row's log-probs."""
    return BOUNDS[dtype] * max(float(response.mask.sum()) for response in row.responses) ** 0.5


def weights_digest(worker: MegatronWorker, path: str) -> str:
    """Return the hex digest of a folder's weights. Collective: each rank reads its share."""
    digests = base.file_digests(path, share=worker.place.rank, shares=worker.layout.world_size)
    return base.combined_digest(gather_entries(digests))


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
                f"{path}: the log-probs of {rows[number].place} are {gap:.3g} off what the reference gives "
                f"now (bound {bound:.3g}), so the file is of other weights or damaged; remove it"
            )
