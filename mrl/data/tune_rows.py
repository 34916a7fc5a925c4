"""The rows of `mrl tune` in tokens: read, checked, counted; which of them a step takes, and the batch they make.

A row is one demonstration, one labelled response, or a pair. What a step takes is a function of (seed, step) alone.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from mrl.config.sections.tune import TuneSection
from mrl.data.conversation import Encoded, Encoder
from mrl.data.messages import read_template_arguments, read_tools, without_nulls
from mrl.data.odd_values import refuse_half_characters, without_nan
from mrl.data.row_files import from_arrow, read_rows
from mrl.data.tune_shapes import (
    CERTAIN,
    PairLabel,
    Text,
    demonstration,
    label_of,
    labelled,
    preferences,
)
from mrl.errors import DataError
from mrl.samples import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class TuneRow:
    """What is trained on as one."""

    place: str
    """file:line."""
    responses: tuple[Encoded, ...]
    """One, or a pair's two with the chosen one first; each with its prompt."""
    sides: tuple[bool, ...]
    label: PairLabel = CERTAIN
    tag: str = ""
    """Splits figures; nothing is trained by it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TuneRows:
    """The rows of one purpose."""

    rows: tuple[TuneRow, ...]
    probabilities: np.ndarray | None
    """[R] of each row being drawn, where files have shares of their own."""
    report: str
    """What was read, left out and counted, in one line."""

    def digest(self) -> str:
        """Of everything that is trained on, in hex: with the tokens also tokenizer and template, with the rows the shares of files."""
        found = hashlib.sha256()
        if self.probabilities is not None:
            found.update(self.probabilities.tobytes())
        for row in self.rows:
            label = () if row.label == CERTAIN else dataclasses.astuple(row.label)
            found.update(repr((row.sides, *label)).encode())
            for each in row.responses:
                found.update(each.tokens.tobytes() + each.mask.tobytes())
        return found.hexdigest()


def load_training(section: TuneSection, encoder: Encoder, *, max_length: int) -> TuneRows:
    """The training rows; DataError names what is wrong with a row."""
    parts = [
        (file.probability, _load([file.path], section, encoder, max_length)) for file in section.data.files()
    ]
    rows = tuple(row for _, (part, _) in parts for row in part)
    shares = [np.full(len(part), (share or 0) / max(1, len(part))) for share, (part, _) in parts]
    weights = np.concatenate(shares)
    probabilities = weights / weights.sum() if weights.any() else None
    return TuneRows(rows, probabilities, "; ".join(said for _, (_, said) in parts) + _counts(rows))


def load_validation_rows(section: TuneSection, encoder: Encoder, *, max_length: int) -> TuneRows:
    """The validation rows, none where no file is named."""
    if section.data.validation is None:
        return TuneRows((), None, "nothing to validate on")
    rows, said = _load([section.data.validation], section, encoder, max_length)
    return TuneRows(rows, None, said)


def overlapping_rows(training: TuneRows, validation: TuneRows) -> int:
    """Training rows whose prompt is a validation row's."""
    known = {_prompt(row) for row in validation.rows}
    return sum(_prompt(row) in known for row in training.rows)


def _load(
    paths: Iterable[str], section: TuneSection, encoder: Encoder, max_length: int
) -> tuple[tuple[TuneRow, ...], str]:
    read = _demonstrations if section.objective.name == "sft" else _preferences
    rows, long, most, names = list[TuneRow](), 0, (0, ""), list(paths)
    for path in names:
        clean = without_nulls if from_arrow(path) else without_nan
        for place, columns in read_rows(path):
            refuse_half_characters(columns, place)
            values = {name: clean(without_nan(value)) for name, value in columns.items()}
            tools = read_tools(values.get("tools"), place=place)
            arguments = read_template_arguments(values.get("chat_template_kwargs"), place=place)
            for row in read(values, place, section, encoder.for_row(tools, arguments)):
                longest = max(len(each.tokens) for each in row.responses)
                if longest <= max_length:
                    rows.append(row)
                    continue
                long, most = long + 1, max(most, (longest, place))
    said = (
        f"{long} of {len(rows) + long} rows are longer than model.max_length = {max_length}, the longest has {most[0]} tokens "
        f"({most[1]})"
    )
    if long and section.data.over_long == "refuse":
        raise DataError(f"{', '.join(names)}: {said}; raise it, or set tune.data.over_long: filter")
    if not rows:
        raise DataError(f"{', '.join(names)}: no row is left: {said if long else 'there are none'}")
    return tuple(rows), f"{', '.join(names)}: {len(rows)} rows" + (f"; left out: {said}" if long else "")


def _counts(rows: Sequence[TuneRow]) -> str:
    seen = {_digest(row) for row in rows}
    return f", {len(rows) - len(seen)} of them twice" if len(seen) < len(rows) else ""


def _digest(row: TuneRow) -> bytes:
    """Of its tokens: a set of these is no second copy of the rows."""
    found = hashlib.blake2b(digest_size=16)
    for each in row.responses:
        found.update(len(each.tokens).to_bytes(8, "little") + each.tokens.tobytes())
    return found.digest()


def _prompt(row: TuneRow) -> bytes:
    first = row.responses[0]
    return first.tokens[: first.prompt_length].tobytes()


def _demonstrations(
    columns: Mapping[str, Any], place: str, section: TuneSection, encoder: Encoder
) -> Iterator[TuneRow]:
    prompt, response = demonstration(columns, place=place)
    if isinstance(prompt, str):
        if not isinstance(response, str):
            prompt = ({"role": "user", "content": prompt},)
        else:
            yield TuneRow(place, (_encode(prompt, response, encoder, place),), (True,))
            return
    answer = ({"role": "assistant", "content": response},) if isinstance(response, str) else response
    whole = (*prompt, *answer)
    turns = [i for i, message in enumerate(whole) if message["role"] == "assistant"]
    first = (turns[-1] if turns else 0) if section.data.turns == "last" else (len(prompt) if answer else 0)
    yield TuneRow(place, (encoder.messages(whole, first=first, place=place),), (True,))


def _preferences(
    columns: Mapping[str, Any], place: str, section: TuneSection, encoder: Encoder
) -> Iterator[TuneRow]:
    is_paired, tag = section.objective.takes_pairs, str(columns.get("tag") or "")
    for found in [preferences(columns, place=place)] if is_paired else labelled(columns, place=place):
        encoded = tuple(_encode(found.prompt, each, encoder, place) for each in found.responses)
        if len(encoded) == 2 and np.array_equal(encoded[0].tokens, encoded[1].tokens):
            raise DataError(f"{place}: chosen and rejected are the same {len(encoded[0].tokens)} tokens")
        label = label_of(columns, place=place) if section.objective.is_reward_model else CERTAIN
        yield TuneRow(place, encoded, found.sides, label, tag)


def by_tag(rows: Sequence[TuneRow]) -> dict[str, np.ndarray]:
    """Tag -> which rows have it, [R] bool; none where all are alike."""
    tags = np.array([row.tag for row in rows])
    names = sorted(set(tags.tolist()))
    return {name or "untagged": tags == name for name in names} if len(names) > 1 else {}


def reward_model_rows(rows: TuneRows) -> TuneRows:
    """The rows as a reward model takes them: one token follows each response, and what is trained on is the place after the response's
    last token. The value there is the state before it, which is the score of what ended."""
    return dataclasses.replace(rows, rows=tuple(_scored(row) for row in rows.rows))


def _scored(row: TuneRow) -> TuneRow:
    def longer(each: Encoded) -> Encoded:
        tokens = np.append(each.tokens, each.tokens[-1])
        return Encoded(tokens, np.arange(len(tokens)) == len(tokens) - 1, each.prompt_length)

    return dataclasses.replace(row, responses=tuple(longer(each) for each in row.responses))


def _encode(prompt: Text, response: Text, encoder: Encoder, place: str) -> Encoded:
    if isinstance(prompt, str) and isinstance(response, str):
        return encoder.text(prompt, response, place=place)
    asked = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    answer = ({"role": "assistant", "content": response},) if isinstance(response, str) else response
    return encoder.messages((*asked, *answer), first=len(asked), place=place)


def steps_of(section: TuneSection, num_rows: int) -> int:
    """Steps of the whole run."""
    return section.steps or max(1, (section.passes or 1) * num_rows // section.batch_rows)


def rows_of_step(rows: TuneRows, section: TuneSection, *, step: int, seed: int) -> np.ndarray:
    """[batch_rows] the rows that step `step`, from 1, takes: drawn with replacement, or the next of the epochs' orders."""
    size, count = section.batch_rows, len(rows.rows)
    if section.passes is None:
        generator = np.random.default_rng((seed, step))
        if rows.probabilities is None:
            return generator.integers(count, size=size)
        return generator.choice(count, size=size, p=rows.probabilities)
    places = [divmod(place, count) for place in range((step - 1) * size, step * size)]
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(count)
        for epoch in {each[0] for each in places}
    }
    return np.array([orders[epoch][place] for epoch, place in places])


def batch_of(
    rows: Sequence[TuneRow],
    numbers: Sequence[int],
    ref_logprobs: Mapping[int, Sequence[float]] | None = None,
) -> TrainBatch:
    """The batch of rows; `numbers` [R] are theirs. `ref_logprobs`: row's number -> its responses' sums under the reference.

    What is known of each response: side, ref_logprob (0 without a reference), margin and probability of its pair, all
    float64.
    """
    responses = [each for row in rows for each in row.responses]
    sizes = np.array([len(row.responses) for row in rows])
    lengths = [len(each.tokens) for each in responses]
    known = [0.0] * len(responses)
    if ref_logprobs is not None:
        known = [value for number in numbers for value in ref_logprobs[int(number)]]
    return TrainBatch(
        tokens=np.concatenate([each.tokens for each in responses]).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=np.concatenate([each.mask for each in responses]),
        group_ids=np.repeat(np.arange(len(rows), dtype=np.int64), sizes),
        sample_ids=tuple(f"{row.place}.{i}" for row in rows for i in range(len(row.responses))),
        samples={
            "side": np.array([side for row in rows for side in row.sides], np.float64),
            "ref_logprob": np.array(known, np.float64),
            "margin": np.repeat([row.label.margin for row in rows], sizes).astype(np.float64),
            "probability": np.repeat([row.label.probability for row in rows], sizes).astype(np.float64),
        },
        whole_groups=bool((sizes > 1).any()),
    )


def mismatched(rows: Sequence[TuneRow], *, max_length: int) -> tuple[TuneRow, ...]:
    """Each row's prompt with the response of the next row that has another prompt, as far as max_length goes: what kto measures
    its zero point on, and nobody trains on."""
    prompts = [_prompt(row) for row in rows]
    if len(set(prompts)) < 2:
        raise DataError(
            "kto needs rows of at least two prompts: its zero point is taken over mismatched ones"
        )
    made = []
    for number, row in enumerate(rows):
        other = number + 1
        while prompts[other % len(rows)] == prompts[number]:
            other += 1
        own, theirs = row.responses[0], rows[other % len(rows)].responses[0]
        tokens = np.concatenate([own.tokens[: own.prompt_length], theirs.tokens[theirs.prompt_length :]])
        mask = np.concatenate([own.mask[: own.prompt_length], theirs.mask[theirs.prompt_length :]])
        cut = Encoded(tokens[:max_length], mask[:max_length], own.prompt_length)
        made.append(TuneRow(row.place, (cut,), row.sides))
    return tuple(made)
