"""From configured files to checked, tokenised prompts, with a count of everything that was left out."""

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
from mrl.data.difficulty import choose
from mrl.data.identity import content_of, vocabulary_digest
from mrl.data.left_out import LeftOut
from mrl.data.messages import with_system
from mrl.data.prompt_stream import PromptStream, Source, validation_order
from mrl.data.row_files import from_arrow, read_rows
from mrl.data.row_shapes import DataRow, as_prompt, read_row, shape_of
from mrl.data.tokenise import encode_texts, opens_twice, render, template_names
from mrl.data.unread import Unread
from mrl.errors import ConfigError, DataError
from mrl.rewards.kinds.ground_truth import parse_ground_truth, remarks
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.samples import Prompt

_SHOWN_PROBLEMS = 10
_WITHOUT_REFERENCES = 2
"""The last version of marshal's form in which values that are equal have equal bytes, whoever else holds them."""

Tools = Callable[[str], list[dict[str, Any]] | str | None]
"""By a row's domain: JSON schemas of tools, as chat templates take them, or the text of a system message that shows them."""


@dataclasses.dataclass(slots=True)
class LoadReport:
    """Counts of what happened to the rows; logged by the run."""

    rows: int = 0
    """Training prompts that are left."""
    validation_rows: int = 0
    """Validation prompts that are left."""
    duplicates: int = 0
    """Rows left out because an earlier one has their prompt and domain."""
    contradicting: int = 0
    """Duplicates whose ground truth is another one than the row's that was kept."""
    overlong: int = 0
    """Rows left out because their prompt is longer than `data.max_prompt_tokens`."""
    unusable: int = 0
    """Rows left out because they cannot be read or scored, where `data.unusable` is filter."""
    without_ground_truth: int = 0
    """Rows that are kept and have none (their verifier needs none)."""
    overlapping: int = 0
    """Training prompts that are validation prompts too."""
    too_hard: int = 0
    """Training rows left out because they are solved more rarely than `data.difficulty.min`."""
    too_easy: int = 0
    """Training rows left out because they are solved more often than `data.difficulty.max`."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """Sentences about tools and keys that the model does not read, and about rows that were left out."""

    def text(self) -> str:
        """The counts in one line, then a line for each note."""
        counts = [f.name for f in dataclasses.fields(self) if f.name != "notes"]
        first = ", ".join(f"{name}: {getattr(self, name)}" for name in counts)
        return "\n".join(f"data: {line}" for line in [first, *self.notes])


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """Everything prompts are drawn from."""

    train: tuple[Source, ...]
    validation: tuple[Source, ...]
    report: LoadReport
    shuffle: bool
    vocabulary: str = ""
    """Digest of the tokenizer's vocabulary."""

    @property
    def domains(self) -> set[str]:
        """Of all rows."""
        return {prompt.domain for source in (*self.train, *self.validation) for prompt in source.rows}

    def warnings(self, loop: LoopSection) -> list[str]:
        """What a run on these rows would do and is probably not meant."""
        rows, warnings = sum(len(source.rows) for source in self.train), []
        if loop.prompts_per_step > rows:
            warnings.append(
                f"loop.prompts_per_step = {loop.prompts_per_step} is more than the {rows} training rows: a step takes a row several "
                f"times; set it to {rows} or fewer"
            )
        trained = {prompt.text.strip() for source in self.train for prompt in source.rows}
        validated = self.validation_prompts(loop.validation.num_prompts)
        if validated and all(prompt.text.strip() in trained for prompt in validated):
            warnings.append(
                f"data.validation: all {len(validated)} prompts that are validated are training prompts too, so that validation "
                "says nothing of other prompts; give other rows, or set data.overlap=drop to leave them out of training"
            )
        return warnings

    def stream(self, seed: int) -> PromptStream:
        """The training stream of a run."""
        return PromptStream(self.train, seed, shuffle=self.shuffle, vocabulary=self.vocabulary)

    def validation_prompts(self, count: int) -> list[Prompt]:
        """The first `count` held-out prompts, sources in turn; their indices are negative, from -1 down."""
        return validation_order(self.validation, count)


def load_data(
    section: DataSection, reward: RewardSection, tokenizer: Any, *, tools: Tools | None = None
) -> Dataset:
    """Read, check, tokenise. `tools`: what the chat template shows the model where a row has none of its own.

    Raises DataError that names every bad row it shows by file and line, and ConfigError for arguments that
    the chat template never names.
    """
    prepare = _Preparation(section, reward, tokenizer, LoadReport(), tools)
    train = prepare.sources(section.train_entries())
    validation = prepare.sources(section.validation_entries())
    train = _without_overlap(train, validation, section, prepare.report)
    if section.difficulty is not None:
        train, places, notes = choose(train, section.difficulty)
        prepare.report.too_hard, prepare.report.too_easy = places["below"], places["above"]
        prepare.report.notes += notes
    return prepare.dataset(train, validation)


def load_validation(
    section: DataSection, reward: RewardSection, tokenizer: Any, *, tools: Tools | None = None
) -> Dataset:
    """The held-out rows alone: no training file is opened, so that none need be there. Errors as in
    `load_data`."""
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
        """The data set of these sources, their rows counted."""
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
        copies_before = self.report.duplicates
        for place, row in self._checked(entry, left_out):
            if isinstance(row, DataRow):
                good.append(row)
            else:
                bad.add(place, row)
        copies = self.report.duplicates - copies_before
        self._leave_out(bad, bad.count + len(good) + copies)
        self._note_remarks(good, entry)
        return good

    def _leave_out(self, bad: _Unusable, count: int) -> None:
        """Count the unusable ones of `count` rows; DataError where they are refused, or are all."""
        if not bad.count:
            return
        said = f"{bad.count} of {count} rows of {bad.entry.path} are unusable:\n{bad.text()}"
        if bad.count == count:
            raise DataError(said)
        if self.section.unusable == "refuse":
            raise DataError(f"{said}\nmend them, or set data.unusable=filter to leave them out")
        self.report.unusable += bad.count
        self.report.notes.append(said)

    def _note_remarks(self, rows: Sequence[DataRow], entry: DataEntry) -> None:
        """Counts what the rewards remark on ground truths."""
        places: dict[str, list[str]] = {}
        for row in rows:
            for remark in remarks(row.ground_truth, domain=row.domain, section=self.reward):
                places.setdefault(remark, []).append(row.place)
        for remark, found in places.items():
            self.report.notes.append(
                f"{entry.path}: {len(found)} of {len(rows)} rows: {remark} (the first is {found[0]})"
            )

    def _checked(self, entry: DataEntry, left_out: LeftOut) -> Iterator[tuple[str, DataRow | DataError]]:
        """The rows with their places, or what is wrong with them. A copy of a row of its file, all columns alike, is left out before anything is made of it: DAPO-Math-17k has each row a hundred times."""
        shape = entry.format
        for path in entry.paths:
            arrow, firsts = from_arrow(path), dict[bytes, DataRow]()
            for place, columns in read_rows(path):
                digest = _digest(columns) if self.section.dedupe else None
                if digest is not None and (first := firsts.get(digest)):
                    left_out.add(
                        "dedupe", place=place, domain=first.domain, why=f"the prompt of {first.place}"
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
        return content_of(row, template, dict(self.section.chat_template_kwargs))

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
            why = f"the prompt of {first.place}" + (", with another ground truth" if contradicts else "")
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
        """What makes a prompt's tokens [T] unusable."""
        if not len(tokens):
            return "the prompt has no tokens"
        if opens_twice(tokens, self.tokenizer):
            return "the prompt begins with the opening token twice; take it out of the text"
        return None

    def _note_unread(self, rendered: Sequence[tuple[DataRow, tuple[str, bool]]], entry: DataEntry) -> None:
        """Notes tools, keys of messages and row arguments that no prompt's text shows."""
        unread = Unread(template_names(self.tokenizer))
        for row, (text, templated) in rendered:
            messages = () if isinstance(row.prompt, str) else row.prompt
            if templated:
                unread.look(messages, row.tools, row.chat_template_kwargs, self._as_in(row), text)
            else:
                tools = row.tools or (self.tools is not None and self.tools(row.domain))
                unread.pass_over(messages, tools, row.chat_template_kwargs)
        self.report.notes += [f"{entry.path}: {said}" for said in unread.sentences()]

    def _as_in(self, row: DataRow) -> Callable[..., str]:
        """What renders other messages and tools in a row's place."""
        return lambda messages, tools: self._render(dataclasses.replace(row, prompt=messages, tools=tools))[0]

    def _without_overlong(
        self, prompts: Sequence[Prompt], entry: DataEntry, left_out: LeftOut
    ) -> list[Prompt]:
        limit = self.section.max_prompt_tokens
        kept = [prompt for prompt in prompts if len(prompt.tokens) <= limit]
        longer = [prompt for prompt in prompts if len(prompt.tokens) > limit]
        longer.sort(key=lambda prompt: -len(prompt.tokens))
        if longer:
            said = (
                f"{','.join(entry.paths)}: {len(longer)} of {len(prompts)} rows are longer than data.max_prompt_tokens = {limit}, the "
                f"longest has {len(longer[0].tokens)} tokens ({longer[0].row})"
            )
            if self.section.overlong == "refuse":
                raise DataError(f"{said}; raise the limit or set data.overlong=filter")
            if not kept:
                raise DataError(f"{said}; none is left; raise the limit")
            self.report.notes.append(said)
        self.report.overlong += len(longer)
        for prompt in longer:
            why = f"{len(prompt.tokens)} tokens"
            left_out.add("overlong", place=prompt.row, domain=prompt.domain, why=why)
        return kept


class _Unusable:
    """The rows of an entry that cannot be read; of very many the first few are kept."""

    def __init__(self, entry: DataEntry, left_out: LeftOut) -> None:
        self.entry, self._left_out, self.count = entry, left_out, 0
        self._shown: list[str] = []

    def add(self, place: str, error: DataError) -> None:
        """One row, at `place` (file:line)."""
        self.count += 1
        if len(self._shown) < _SHOWN_PROBLEMS:
            self._shown.append(str(error))
        why = str(error).removeprefix(f"{place}: ")
        self._left_out.add("unusable", place=place, domain=self.entry.domain, why=why)

    def text(self) -> str:
        """The first few errors, and how many more there are."""
        more = self.count - len(self._shown)
        return "\n".join(self._shown + [f"... and {more} more"] * (more > 0))


def _check_arguments(section: DataSection, tokenizer: Any) -> None:
    """Refuses template arguments without a template, and ones whose name stands nowhere in it."""
    names = template_names(tokenizer)
    for name in section.chat_template_kwargs:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=1)
            raise ConfigError(
                f"data.chat_template_kwargs.{name}: "
                + ("the chat template never names it" if names else "the tokenizer has no chat template")
                + (f"; did you mean '{close[0]}'?" if close else "")
            )


def _digest(columns: dict[str, Any]) -> bytes | None:
    """Of a raw row's values, whatever they mean; None where there is another type among them than JSON has."""
    try:
        return xxhash.xxh3_128_digest(marshal.dumps(columns, _WITHOUT_REFERENCES))
    except ValueError:
        return None


def _prompt_key(row: DataRow) -> bytes:
    seen = (
        row.prompt.strip()
        if isinstance(row.prompt, str)
        else json.dumps([row.prompt, row.tools, dict(row.chat_template_kwargs)], sort_keys=True, default=repr)
    )
    return hashlib.sha256(seen.encode("utf-8", "surrogatepass")).digest()


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
    for source in train:
        for prompt in source.rows:
            if (other := held_out.get(prompt.text.strip())) is not None:
                why = f"the validation prompt of {other}"
                source.left_out.add("overlap", place=prompt.row, domain=prompt.domain, why=why)
    return [
        source.with_rows([prompt for prompt in source.rows if prompt.text.strip() not in held_out])
        for source in train
    ]
