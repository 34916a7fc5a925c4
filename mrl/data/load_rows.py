"""Load the configured files into checked, tokenised prompts, and count everything that is left out."""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import marshal
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from mrl.config.sections.data import DataEntry, DataSection
from mrl.config.sections.loop import LoopSection
from mrl.data.difficulty import filter_by_difficulty
from mrl.data.identity import content_digest, vocabulary_digest
from mrl.data.left_out import LeftOut
from mrl.data.messages import with_system
from mrl.data.prompt_stream import PromptStream, Source, validation_order
from mrl.data.row_files import from_arrow, read_rows
from mrl.data.row_shapes import DataRow, as_prompt, read_row, shape_of
from mrl.data.template_usage import TemplateUsage
from mrl.data.tokenise import encode_texts, has_double_bos, render, template_names
from mrl.errors import ConfigError, DataError
from mrl.rewards.kinds.ground_truth import parse_ground_truth, remarks
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.samples import Prompt

_SHOWN_PROBLEMS = 10
_WITHOUT_REFERENCES = 2
"""Last version of marshal's format in which equal values have equal bytes, whatever else references them."""

Tools = Callable[[str], list[dict[str, Any]] | str | None]
"""Domain -> JSON schemas of tools for the chat template, or the text of a system message that shows them."""


@dataclasses.dataclass(slots=True)
class LoadReport:
    """Counts of what happened to the rows; the run logs them."""

    rows: int = 0
    """Training prompts that remain."""
    validation_rows: int = 0
    """Validation prompts that remain."""
    duplicates: int = 0
    """Rows dropped because an earlier row has the same prompt and domain."""
    contradicting: int = 0
    """Duplicates whose ground truth differs from that of the kept row."""
    overlong: int = 0
    """Rows dropped because their prompt is longer than `data.max_prompt_tokens`."""
    unusable: int = 0
    """Rows dropped because they cannot be read or scored, if `data.unusable` is filter."""
    without_ground_truth: int = 0
    """Kept rows without a ground truth (their verifier needs none)."""
    overlapping: int = 0
    """Training prompts that are also validation prompts."""
    too_hard: int = 0
    """Training rows dropped because their solve rate is below `data.difficulty.min`."""
    too_easy: int = 0
    """Training rows dropped because their solve rate is above `data.difficulty.max`."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Sentences about dropped rows, and about tools and keys that the model does not read."""

    def text(self) -> str:
        """Return the counts in one line, then one line per note."""
        counts = [f.name for f in dataclasses.fields(self) if f.name != "notes"]
        first = ", ".join(f"{name}: {getattr(self, name)}" for name in counts)
        return "\n".join(f"data: {line}" for line in [first, *self.notes])


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Training and validation prompts, and the report on loading them."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    report: LoadReport
    shuffle: bool
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary."""

    @property
    def domains(self) -> set[str]:
        """Domains of all rows."""
        return {prompt.domain for source in (*self.train, *self.validation) for prompt in source.rows}

    def warnings(self, loop: LoopSection) -> list[str]:
        """Return warnings about what a run on these rows would do that is probably not intended."""
        rows, warnings = sum(len(source.rows) for source in self.train), []
        if loop.prompts_per_step > rows:
            warnings.append(
                f"loop.prompts_per_step = {loop.prompts_per_step} exceeds the {rows} training rows, so a "
                f"step repeats rows; set it to at most {rows}"
            )
        trained = {prompt.text.strip() for source in self.train for prompt in source.rows}
        validated = self.validation_prompts(loop.validation.num_prompts)
        if validated and all(prompt.text.strip() in trained for prompt in validated):
            warnings.append(
                f"data.validation: all {len(validated)} prompts are also training prompts, so scores do not "
                "show generalisation; use other rows, or set data.overlap=drop to remove them from training"
            )
        held_out = sum(len(source.rows) for source in self.validation)
        if len(validated) < held_out and "num_prompts" not in loop.validation.model_fields_set:
            warnings.append(
                f"only the first {len(validated)} of {held_out} validation rows are used, the default of "
                f"loop.validation.num_prompts; set it to {held_out} for all, or to what you want"
            )
        return warnings

    def stream(self, seed: int) -> PromptStream:
        """Return the run's training stream."""
        return PromptStream(self.train, seed, shuffle=self.shuffle, vocabulary=self.vocabulary)

    def validation_prompts(self, count: int) -> list[Prompt]:
        """Return the first `count` validation prompts, sources in turn; their indices are -1, -2, ..."""
        return validation_order(self.validation, count)


def load_data(
    section: DataSection, reward: RewardSection, tokenizer: Any, *, tools: Tools | None = None
) -> Dataset:
    """Read, check and tokenise the training and validation rows.

    Args:
        tools: Tools that the chat template shows for a row without tools of its own.

    Raises:
        DataError: Rows are bad; it lists the first ones by file and line.
        ConfigError: The chat template does not use an argument of `data.chat_template_kwargs`.
    """
    prepare = _Preparation(section, reward, tokenizer, LoadReport(), tools)
    train = prepare.sources(section.train_entries())
    validation = prepare.sources(section.validation_entries())
    train = _without_overlap(train, validation, section, prepare.report)
    if section.difficulty is not None:
        train, places, notes = filter_by_difficulty(train, section.difficulty)
        prepare.report.too_hard, prepare.report.too_easy = places["below"], places["above"]
        prepare.report.notes += notes
    return prepare.dataset(train, validation)


def load_validation(
    section: DataSection, reward: RewardSection, tokenizer: Any, *, tools: Tools | None = None
) -> Dataset:
    """Load only the validation rows; training files need not exist. Raises as `load_data` does."""
    prepare = _Preparation(section, reward, tokenizer, LoadReport(), tools)
    return prepare.dataset((), prepare.sources(section.validation_entries()))


@dataclasses.dataclass(frozen=True, slots=True)
class _Preparation:
    section: DataSection
    reward: RewardSection
    tokenizer: Any
    report: LoadReport
    tools: Tools | None

    def __post_init__(self) -> None:
        _check_arguments(self.section, self.tokenizer)

    def dataset(self, train: Sequence[Source], validation: Sequence[Source]) -> Dataset:
        """Build the data set of these sources and count their rows."""
        self.report.rows = sum(len(source.rows) for source in train)
        self.report.validation_rows = sum(len(source.rows) for source in validation)
        vocabulary = vocabulary_digest(self.tokenizer)
        return Dataset(tuple(train), tuple(validation), self.report, self.section.shuffle, vocabulary)

    def sources(self, entries: Sequence[DataEntry]) -> list[Source]:
        return [self.source(entry) for entry in entries]

    def source(self, entry: DataEntry) -> Source:
        left_out = LeftOut()
        rows = self._usable(entry, left_out)
        rows = self._without_duplicates(rows, left_out)
        self.report.without_ground_truth += sum(row.ground_truth is None for row in rows)
        prompts = self._without_overlong(self._tokenised(rows, entry, left_out), entry, left_out)
        name = f"{entry.domain}:{','.join(entry.paths)}"
        share = entry.probability if entry.probability is not None else float(len(prompts))
        return Source(name, prompts, share, left_out)

    def _usable(self, entry: DataEntry, left_out: LeftOut) -> list[DataRow]:
        good: list[DataRow] = []
        bad = _Unusable(entry, left_out)
        duplicates_before = self.report.duplicates
        for place, row in self._checked(entry, left_out):
            if isinstance(row, DataRow):
                good.append(row)
            else:
                bad.add(place, row)
        duplicates = self.report.duplicates - duplicates_before
        self._leave_out(bad, bad.count + len(good) + duplicates)
        self._note_remarks(good, entry)
        return good

    def _leave_out(self, bad: _Unusable, count: int) -> None:
        """Count the unusable rows; raise DataError if they are refused or are all `count` rows."""
        if not bad.count:
            return
        summary = f"{bad.count} of {count} rows of {bad.entry.path} are unusable:\n{bad.text()}"
        if bad.count == count:
            raise DataError(summary)
        if self.section.unusable == "refuse":
            raise DataError(f"{summary}\nfix them, or set data.unusable=filter to drop them")
        self.report.unusable += bad.count
        self.report.notes.append(summary)

    def _note_remarks(self, rows: Sequence[DataRow], entry: DataEntry) -> None:
        """Note what the rewards remark on ground truths."""
        places_by_remark: dict[str, list[str]] = {}
        for row in rows:
            for remark in remarks(row.ground_truth, domain=row.domain, section=self.reward):
                places_by_remark.setdefault(remark, []).append(row.place)
        for remark, places in places_by_remark.items():
            self.report.notes.append(
                f"{entry.path}: {len(places)} of {len(rows)} rows: {remark} (the first is {places[0]})"
            )

    def _checked(self, entry: DataEntry, left_out: LeftOut) -> Iterator[tuple[str, DataRow | DataError]]:
        """Yield each row, or its error, with its place. Skip exact copies of an earlier row of the file
        unparsed: DAPO-Math-17k contains each row a hundred times."""
        shape = entry.format
        for path in entry.paths:
            arrow, firsts = from_arrow(path), dict[bytes, DataRow]()
            for place, columns in read_rows(path):
                digest = _digest(columns) if self.section.dedupe else None
                if digest is not None and (first := firsts.get(digest)):
                    left_out.add(
                        "dedupe", place=place, domain=first.domain, why=f"same prompt as {first.place}"
                    )
                    self.report.duplicates += 1
                    continue
                if shape == "auto":
                    shape = shape_of(columns, place=place)
                row = self._row(columns, place, entry, shape, arrow)
                if digest is not None and isinstance(row, DataRow):
                    firsts[digest] = row
                yield place, row

    def _row(
        self, columns: dict[str, Any], place: str, entry: DataEntry, shape: str, arrow: bool
    ) -> DataRow | DataError:
        try:
            row = read_row(columns, place=place, entry=entry, shape=shape, from_arrow=arrow)
            ground_truth = parse_ground_truth(
                row.ground_truth, domain=row.domain, section=self.reward, place=place
            )
        except DataError as error:
            return error
        row = dataclasses.replace(row, ground_truth=ground_truth)
        if row.tools is None and self.tools is not None and not isinstance(row.prompt, str):
            tools = self.tools(row.domain)
            if isinstance(tools, str):
                row = dataclasses.replace(row, prompt=with_system(row.prompt, tools))
            else:
                row = dataclasses.replace(row, tools=tools)
        return dataclasses.replace(row, content=self._content(row))

    def _content(self, row: DataRow) -> str:
        renders = self.section.chat_template and not isinstance(row.prompt, str)
        template = getattr(self.tokenizer, "chat_template", None) if renders else None
        return content_digest(row, template, dict(self.section.chat_template_kwargs))

    def _without_duplicates(self, rows: Sequence[DataRow], left_out: LeftOut) -> list[DataRow]:
        if not self.section.dedupe:
            return list(rows)
        kept: dict[tuple[str, bytes], DataRow] = {}
        for row in rows:
            first = kept.setdefault((row.domain, _prompt_key(row)), row)
            if first is row:
                continue
            contradicts = first.ground_truth != row.ground_truth
            self.report.contradicting += contradicts
            why = f"same prompt as {first.place}" + (", but another ground truth" if contradicts else "")
            left_out.add("dedupe", place=row.place, domain=row.domain, why=why)
        self.report.duplicates += len(rows) - len(kept)
        return list(kept.values())

    def _render(self, row: DataRow) -> tuple[str, bool]:
        section = self.section
        return render(
            row,
            self.tokenizer,
            chat_template=section.chat_template,
            chat_template_kwargs=section.chat_template_kwargs,
        )

    def _tokenised(self, rows: Sequence[DataRow], entry: DataEntry, left_out: LeftOut) -> list[Prompt]:
        good: list[tuple[DataRow, tuple[str, bool]]] = []
        bad = _Unusable(entry, left_out)
        for row in rows:
            try:
                good.append((row, self._render(row)))
            except DataError as error:
                bad.add(row.place, error)
        self._note_unread(good, entry)
        texts = [text for _, (text, _) in good]
        tokens = encode_texts(texts, [templated for _, (_, templated) in good], self.tokenizer)
        prompts: list[Prompt] = []
        for (row, (text, _)), ids in zip(good, tokens, strict=True):
            if (wrong := self._wrong(ids)) is not None:
                bad.add(row.place, DataError(f"{row.place}: {wrong}"))
            else:
                prompts.append(as_prompt(row, index=len(prompts), tokens=ids, text=text))
        self._leave_out(bad, len(rows))
        return prompts

    def _wrong(self, tokens: np.ndarray) -> str | None:
        """Return what makes a prompt's tokens [T] unusable, or None."""
        if not len(tokens):
            return "the prompt has no tokens"
        if has_double_bos(tokens, self.tokenizer):
            return "the prompt begins with two BOS tokens; remove the one in the text"
        return None

    def _note_unread(self, rendered: Sequence[tuple[DataRow, tuple[str, bool]]], entry: DataEntry) -> None:
        """Note tools, keys of messages and row arguments that no rendered prompt shows."""
        unread = TemplateUsage(template_names(self.tokenizer))
        for row, (text, templated) in rendered:
            messages = () if isinstance(row.prompt, str) else row.prompt
            if templated:
                unread.check(messages, row.tools, row.chat_template_kwargs, self._as_in(row), text)
            else:
                tools = row.tools or (self.tools is not None and self.tools(row.domain))
                unread.count_unrendered(messages, tools, row.chat_template_kwargs)
        self.report.notes += [f"{entry.path}: {sentence}" for sentence in unread.sentences()]

    def _as_in(self, row: DataRow) -> Callable[..., str]:
        """Return a function that renders other messages and tools with the rest of this row."""
        return lambda messages, tools: self._render(dataclasses.replace(row, prompt=messages, tools=tools))[0]

    def _without_overlong(
        self, prompts: Sequence[Prompt], entry: DataEntry, left_out: LeftOut
    ) -> list[Prompt]:
        limit = self.section.max_prompt_tokens
        kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
        longer = [prompt for prompt in prompts if len(prompt.tokens) > limit]
        longer.sort(key=lambda prompt: -len(prompt.tokens))
        if longer:
            summary = (
                f"{','.join(entry.paths)}: {len(longer)} of {len(prompts)} rows are longer than "
                f"data.max_prompt_tokens = {limit}; the longest has {len(longer[0].tokens)} tokens "
                f"({longer[0].row})"
            )
            if self.section.overlong == "refuse":
                raise DataError(f"{summary}; raise the limit or set data.overlong=filter")
            if not kept:
                raise DataError(f"{summary}; no row remains; raise the limit")
            self.report.notes.append(summary)
        self.report.overlong += len(longer)
        for prompt in longer:
            why = f"{len(prompt.tokens)} tokens"
            left_out.add("overlong", place=prompt.row, domain=prompt.domain, why=why)
        return kept


class _Unusable:
    """Unusable rows of an entry: their count and the first few errors."""

    def __init__(self, entry: DataEntry, left_out: LeftOut) -> None:
        self.entry, self._left_out, self.count = entry, left_out, 0
        self._shown: list[str] = []

    def add(self, place: str, error: DataError) -> None:
        """Add one row, at `place` (file:line)."""
        self.count += 1
        if len(self._shown) < _SHOWN_PROBLEMS:
            self._shown.append(str(error))
        why = str(error).removeprefix(f"{place}: ")
        self._left_out.add("unusable", place=place, domain=self.entry.domain, why=why)

    def text(self) -> str:
        """Return the first few errors and the number of further ones."""
        num_hidden = self.count - len(self._shown)
        return "\n".join(self._shown + [f"... and {num_hidden} more"] * (num_hidden > 0))


def _check_arguments(section: DataSection, tokenizer: Any) -> None:
    """Refuse template arguments that the chat template does not name, and any if there is no template."""
    names = template_names(tokenizer)
    for name in section.chat_template_kwargs:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: "
                + ("the chat template does not use it" if names else "the tokenizer has no chat template")
                + (f"; did you mean '{close[0]}'?" if close else "")
            )


def _digest(columns: dict[str, Any]) -> bytes | None:
    """Return the digest of a raw row's values, or None if a value's type is not a JSON type."""
    try:
        return xxhash.xxh3_128_digest(marshal.dumps(columns, _WITHOUT_REFERENCES))
    except ValueError:
        return None


def _prompt_key(row: DataRow) -> bytes:
    text = (
        row.prompt.strip()
        if isinstance(row.prompt, str)
        else json.dumps([row.prompt, row.tools, dict(row.chat_template_kwargs)], sort_keys=True, default=repr)
    )
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()


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
            f"{len(shared)} training prompts are also validation prompts, e.g. {first.row} and "
            f"{held_out[first.text.strip()]}; set data.overlap=drop to remove them from training"
        )
    for source in train:
        for prompt in source.rows:
            if (other := held_out.get(prompt.text.strip())) is not None:
                why = f"same prompt as validation row {other}"
                source.left_out.add("overlap", place=prompt.row, domain=prompt.domain, why=why)
    return [
        source.with_rows([prompt for prompt in source.rows if prompt.text.strip() not in held_out])
        for source in train
    ]
