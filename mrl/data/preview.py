"""Prepare loaded rows for display: the first of each file as the policy sees them, lengths, dropped rows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np

from mrl.data.left_out import LeftOutRows
from mrl.data.prompt_stream import Source
from mrl.data.tune_rows import TuneRow
from mrl.samples import Prompt

BINS = 12
"""Maximum number of lines of a histogram."""


@dataclasses.dataclass(frozen=True, slots=True)
class RowPreview:
    """One row for display."""

    place: str
    """file:line."""
    domain: str
    tag: str
    tokens: int
    text: str
    """Its tokens as text, special tokens by name."""
    special_tokens: dict[str, int]
    """Its special tokens: name -> count."""
    ground_truth: str | None
    response: str | None = None
    """The text that `mrl tune` trains on after `text`: a demonstration, or a chosen response."""
    rejected: str | None = None
    """The rejected response, if the row has one."""


@dataclasses.dataclass(frozen=True, slots=True)
class FilePreview:
    """One file of one use (`use`)."""

    use: str
    """train, validation or tune."""
    file: str
    domains: dict[str, int]
    """Domain -> rows kept."""
    lengths: dict[str, Any]
    """Tokens of kept rows: smallest, mean, median, p95, largest, `histogram` (lists of first, last, rows)."""
    left_out: list[LeftOutRows]
    first: list[RowPreview]

    @property
    def kept(self) -> int:
        """Rows kept."""
        return sum(self.domains.values())


def preview_source(use: str, source: Source, tokenizer: Any, *, rows: int) -> list[FilePreview]:
    """Preview the files of one entry that its rows name, with the first `rows` rows of each."""
    left_out = source.left_out.rows()
    by_file: dict[str, list[Prompt]] = {}
    for prompt in source.rows:
        by_file.setdefault(prompt.row.rpartition(":")[0], []).append(prompt)
    by_file |= {dropped.file: [] for dropped in left_out if dropped.file not in by_file}
    return [
        FilePreview(
            use=use,
            file=file,
            domains=dict(Counter(prompt.domain for prompt in prompts)),
            lengths=length_statistics([len(prompt.tokens) for prompt in prompts]),
            left_out=[dropped for dropped in left_out if dropped.file == file],
            first=[_row(prompt, tokenizer) for prompt in prompts[:rows]],
        )
        for file, prompts in by_file.items()
    ]


def preview_tune_file(file: str, tuned: Sequence[TuneRow], tokenizer: Any, *, rows: int) -> FilePreview:
    """Preview one file of `mrl tune` with its first `rows` rows; a pair has its longer response's length."""
    sizes = [max(len(response.tokens) for response in row.responses) for row in tuned]
    first = [_tuned(row, size, tokenizer) for row, size in zip(tuned[:rows], sizes, strict=False)]
    return FilePreview("tune", file, {"": len(tuned)}, length_statistics(sizes), [], first)


def _tuned(row: TuneRow, size: int, tokenizer: Any) -> RowPreview:
    trained = {
        side: decode_with_special_tokens(response.tokens[response.mask], tokenizer)
        for response, side in zip(row.responses, row.sides, strict=True)
    }
    shown = row.responses[0]
    return RowPreview(
        place=row.place,
        domain="",
        tag="",
        tokens=size,
        text=decode_with_special_tokens(shown.tokens[~shown.mask], tokenizer),
        special_tokens=special_tokens(shown.tokens, tokenizer),
        ground_truth=None,
        response=trained.get(True),
        rejected=trained.get(False),
    )


def length_statistics(values: Sequence[int]) -> dict[str, Any]:
    """Return statistics and the histogram of lengths in tokens; empty if there are no lengths.

    >>> length_statistics([3, 3, 5])["histogram"]
    [[3, 3, 2], [4, 4, 0], [5, 5, 1]]
    """
    if not values:
        return {}
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // BINS)
    starts = range(low, high + 1, width)
    counts = np.bincount((np.asarray(values) - low) // width, minlength=len(starts))
    return {
        "smallest": low,
        "mean": round(float(np.mean(values)), 1),
        "median": int(np.percentile(values, 50)),
        "p95": int(np.percentile(values, 95)),
        "largest": high,
        "histogram": [[start, start + width - 1, int(n)] for start, n in zip(starts, counts, strict=True)],
    }


def decode_with_special_tokens(tokens: np.ndarray, tokenizer: Any) -> str:
    """Decode [T] tokens into one text: special tokens by name, spaces unchanged."""
    return tokenizer.decode(tokens.tolist(), skip_special_tokens=False, clean_up_tokenization_spaces=False)


def special_tokens(tokens: np.ndarray, tokenizer: Any) -> dict[str, int]:
    """Return the special tokens among [T] tokens by name with their counts, ordered by id."""
    added = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    counts = Counter(tokens.tolist())
    special = sorted((added | set(tokenizer.all_special_ids)) & counts.keys())
    return {tokenizer.convert_ids_to_tokens(number): counts[number] for number in special}


def _row(prompt: Prompt, tokenizer: Any) -> RowPreview:
    return RowPreview(
        place=prompt.row,
        domain=prompt.domain,
        tag=prompt.tag,
        tokens=len(prompt.tokens),
        text=decode_with_special_tokens(prompt.tokens, tokenizer),
        special_tokens=special_tokens(prompt.tokens, tokenizer),
        ground_truth=None if prompt.ground_truth is None else str(prompt.ground_truth),
    )
