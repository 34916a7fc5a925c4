"""From configured files to checked, tokenised prompts, with a count of everything that was left out."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mrl.config.data import DataEntry, DataSection
from mrl.config.judge import JudgeSection
from mrl.data.files import read_rows
from mrl.data.shapes import Row, read_row, shape_of
from mrl.data.stream import PromptStream, Source, validation_order
from mrl.data.tokenise import encode, render
from mrl.errors import DataError
from mrl.judges.gold import parse_gold
from mrl.samples import Prompt

_SHOWN_PROBLEMS = 10


@dataclasses.dataclass(slots=True)
class LoadReport:
    """Counts of what happened to the rows; logged by the run."""

    rows: int = 0
    validation_rows: int = 0
    duplicates: int = 0
    over_long: int = 0
    overlapping: int = 0
    """Training prompts that are validation prompts too."""

    def lines(self) -> list[str]:
        return [f"{field.name}: {getattr(self, field.name)}" for field in dataclasses.fields(self)]


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Everything prompts are drawn from."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    report: LoadReport
    shuffle: bool

    def stream(self, seed: int) -> PromptStream:
        """The training stream of a run."""
        return PromptStream(self.train, seed, shuffle=self.shuffle)

    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, sources in turn; their indices are negative, from -1 down."""
        return validation_order(self.validation, count)


def load_data(section: DataSection, judge: JudgeSection, tokenizer: Any) -> Dataset:
    """Read, check, tokenise. Raises DataError that names every bad row it shows by file and line."""
    report = LoadReport()
    prepare = _Preparation(section, judge, tokenizer, report)
    train = [prepare.source(entry) for entry in section.train_entries()]
    report.rows = sum(len(source.rows) for source in train)
    validation = [prepare.source(entry) for entry in section.validation_entries()]
    report.validation_rows = sum(len(source.rows) for source in validation)
    return Dataset(
        train=tuple(_without_overlap(train, validation, section, report)),
        validation=tuple(validation),
        report=report,
        shuffle=section.shuffle,
    )


@dataclasses.dataclass(frozen=True, slots=True)
class _Preparation:
    section: DataSection
    judge: JudgeSection
    tokenizer: Any
    report: LoadReport

    def source(self, entry: DataEntry) -> Source:
        rows = _collect(lambda: self._checked(entry), entry)
        rows = self._without_duplicates(rows)
        prompts = self._without_over_long(self._tokenised(rows))
        name = f"{entry.domain}:{','.join(entry.paths)}"
        share = entry.probability if entry.probability is not None else float(len(prompts))
        return Source(name, prompts, share)

    def _checked(self, entry: DataEntry) -> Iterator[Row | DataError]:
        shape = entry.format
        for path in entry.paths:
            for place, columns in read_rows(path):
                if shape == "auto":
                    shape = shape_of(columns, place=place)
                yield _row_or_error(columns, place=place, entry=entry, shape=shape, judge=self.judge)

    def _without_duplicates(self, rows: Sequence[Row]) -> list[Row]:
        if not self.section.dedupe:
            return list(rows)
        kept: dict[tuple[str, bytes], Row] = {}
        for row in rows:
            kept.setdefault((row.domain, _prompt_key(row)), row)
        self.report.duplicates += len(rows) - len(kept)
        return list(kept.values())

    def _tokenised(self, rows: Sequence[Row]) -> list[Prompt]:
        rendered = [render(row, self.tokenizer, chat_template=self.section.chat_template) for row in rows]
        texts = [text for text, _ in rendered]
        tokens = encode(texts, [templated for _, templated in rendered], self.tokenizer)
        return [
            Prompt(
                index=number,
                tokens=ids,
                text=text,
                gold=row.gold,
                domain=row.domain,
                tag=row.tag,
                row=row.place,
                metadata={**row.metadata, "messages": row.prompt}
                if not isinstance(row.prompt, str)
                else row.metadata,
            )
            for number, (row, text, ids) in enumerate(zip(rows, texts, tokens, strict=True))
        ]

    def _without_over_long(self, prompts: Sequence[Prompt]) -> list[Prompt]:
        limit = self.section.max_prompt_tokens
        empty = [prompt.row for prompt in prompts if not len(prompt.tokens)]
        if empty:
            raise DataError(f"{empty[0]}: the prompt has no tokens ({len(empty)} such rows)")
        kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
        longer = [prompt for prompt in prompts if len(prompt.tokens) > limit]
        if longer and self.section.over_long == "refuse":
            raise DataError(
                f"{len(longer)} prompts are longer than data.max_prompt_tokens = {limit}, the first at "
                f"{longer[0].row} with {len(longer[0].tokens)} tokens; raise the limit or set data.over_long=filter"
            )
        self.report.over_long += len(longer)
        return kept


def _row_or_error(
    columns: dict[str, Any], *, place: str, entry: DataEntry, shape: str, judge: JudgeSection
) -> Row | DataError:
    try:
        row = read_row(columns, place=place, entry=entry, shape=shape)
        gold = parse_gold(row.gold, domain=row.domain, section=judge, place=place)
    except DataError as error:
        return error
    return dataclasses.replace(row, gold=gold)


def _collect(rows: Callable[[], Iterator[Row | DataError]], entry: DataEntry) -> list[Row]:
    good: list[Row] = []
    bad: list[DataError] = []
    for row in rows():
        if isinstance(row, DataError):
            bad.append(row)
        else:
            good.append(row)
    if bad:
        shown = "\n".join(str(error) for error in bad[:_SHOWN_PROBLEMS])
        more = f"\n... and {len(bad) - _SHOWN_PROBLEMS} more" if len(bad) > _SHOWN_PROBLEMS else ""
        raise DataError(
            f"{len(bad)} of {len(bad) + len(good)} rows of {entry.path} are unusable:\n{shown}{more}"
        )
    return good


def _prompt_key(row: Row) -> bytes:
    text = row.prompt if isinstance(row.prompt, str) else repr([sorted(m.items()) for m in row.prompt])
    return hashlib.sha256(text.strip().encode("utf-8", "surrogatepass")).digest()


def _without_overlap(
    train: Sequence[Source], validation: Sequence[Source], section: DataSection, report: LoadReport
) -> list[Source]:
    held_out = {prompt.text.strip(): prompt.row for source in validation for prompt in source.rows}
    shared = [prompt for source in train for prompt in source.rows if prompt.text.strip() in held_out]
    report.overlapping = len(shared)
    if not shared or section.overlap == "report":
        return list(train)
    if section.overlap == "refuse":
        first = shared[0]
        raise DataError(
            f"{len(shared)} training prompts are validation prompts too, the first: {first.row} and "
            f"{held_out[first.text.strip()]}; set data.overlap=drop to leave them out of training"
        )
    outside = [[p for p in source.rows if p.text.strip() not in held_out] for source in train]
    return [
        Source(source.name, rows, float(len(rows)) if source.share == len(source.rows) else source.share)
        for source, rows in zip(train, outside, strict=True)
    ]
