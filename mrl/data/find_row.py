"""Find one row of the configured data by its place, and make the prompt that the loader would make of it."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np

from mrl.config.sections.data import DataEntry, DataSection
from mrl.data.row_files import RawRow, from_arrow, read_rows
from mrl.data.row_shapes import DataRow, as_prompt, read_row, shape_of, texts_of
from mrl.data.tokenise import render
from mrl.errors import DataError
from mrl.rewards.kinds.ground_truth import parse_ground_truth
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.samples import Prompt


def find_row(section: DataSection, reward: RewardSection, tokenizer: Any, which: str) -> Prompt:
    """Return the first row at `which` in the training data, then the validation data: a line (row) number
    from 1, or file:line.

    Without a tokenizer the text is that of the messages; tokens are empty in any case. Raises DataError if
    there is no such row, or if the loader refuses it.
    """
    for entry in (*section.train_entries(), *section.validation_entries()):
        for raw, path in _rows(entry):
            if which in (raw[0], raw[0].rpartition(":")[2]) or raw[0].endswith(f"/{which}"):
                return _prompt(_row(raw, path, entry), section, reward, tokenizer)
    raise DataError(f"no row {which!r} in data.train or data.validation; give a number from 1, or file:line")


SCANNED_ROWS = 10_000
"""Rows of each training entry that are searched for domains."""


def first_rows(
    section: DataSection, reward: RewardSection, tokenizer: Any, *, count: int
) -> dict[str, list[Prompt]]:
    """Return domain -> its first rows of the training data, at most `count`, as `find_row` makes them. Raises
    DataError for a row that the loader refuses."""
    prompts_by_domain: dict[str, list[Prompt]] = {}
    index = 0
    for entry in section.train_entries():
        for raw, path in itertools.islice(_rows(entry), SCANNED_ROWS):
            row = _row(raw, path, entry)
            prompts = prompts_by_domain.setdefault(row.domain, [])
            if len(prompts) < count:
                prompt = _prompt(row, section, reward, tokenizer)
                prompts.append(dataclasses.replace(prompt, index=index))
                index += 1
    return prompts_by_domain


def _rows(entry: DataEntry) -> Iterator[tuple[RawRow, str]]:
    for path in entry.paths:
        for raw in read_rows(path):
            yield raw, path


def _row(raw: RawRow, path: str, entry: DataEntry) -> DataRow:
    place, columns = raw
    shape = entry.format
    if shape == "auto":
        first_place, first = next(read_rows(entry.paths[0]))
        shape = shape_of(first, place=first_place)
    return read_row(columns, place=place, entry=entry, shape=shape, from_arrow=from_arrow(path))


def _prompt(row: DataRow, section: DataSection, reward: RewardSection, tokenizer: Any) -> Prompt:
    ground_truth = parse_ground_truth(row.ground_truth, domain=row.domain, section=reward, place=row.place)
    text = texts_of(row.prompt)
    if tokenizer is not None:
        arguments = section.chat_template_kwargs
        text, _ = render(row, tokenizer, chat_template=section.chat_template, chat_template_kwargs=arguments)
    row = dataclasses.replace(row, ground_truth=ground_truth)
    return as_prompt(row, index=0, tokens=np.zeros(0, np.int32), text=text)
