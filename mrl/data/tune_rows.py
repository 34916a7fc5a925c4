"""Load the rows of `mrl tune` as tokens, choose those of each step, and batch them.

A row is a demonstration, a labelled response or a pair. A step's rows are a function of (seed, step) alone.
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
from mrl.data.odd_values import refuse_lone_surrogates, without_nan
from mrl.data.row_files import from_arrow, read_rows
from mrl.data.tune_shapes import (
    CERTAIN,
    PairLabel,
    Text,
    label_of,
    read_demonstration,
    read_labelled,
    read_pair,
)
from mrl.errors import DataError
from mrl.samples import TrainBatch


@dataclasses.dataclass(frozen=True, slots=True)
class TuneRow:
    """One training example."""

    place: str
    """file:line."""
    responses: tuple[Encoded, ...]
    """One response, or a pair with the chosen one first; each with its prompt."""
    sides: tuple[bool, ...]
    label: PairLabel = CERTAIN
    tag: str = ""
    """Splits metrics; training ignores it."""


@dataclasses.dataclass(frozen=True, slots=True)
class TuneRows:
    """The rows of training or of validation."""

    rows: tuple[TuneRow, ...]
    probabilities: np.ndarray | None
    """[R] probability of drawing each row, if files have their own shares."""
    report: str
    """One line on what was read, dropped and counted."""

    def digest(self) -> str:
        """Return a hex digest of all that is trained on: tokens, masks, labels and the shares of files."""
        digest = hashlib.sha256()
        if self.probabilities is not None:
            digest.update(self.probabilities.tobytes())
        for row in self.rows:
            label = () if row.label == CERTAIN else dataclasses.astuple(row.label)
            digest.update(repr((row.sides, *label)).encode())
            for response in row.responses:
                digest.update(response.tokens.tobytes() + response.mask.tobytes())
        return digest.hexdigest()


def load_training(section: TuneSection, encoder: Encoder, *, max_length: int) -> TuneRows:
    """Load the training rows. Raises DataError for a bad row."""
    parts = [
        (file.probability, _load([file.path], section, encoder, max_length)) for file in section.data.files()
    ]
    rows = tuple(row for _, (part, _) in parts for row in part)
    shares = [np.full(len(part), (share or 0) / max(1, len(part))) for share, (part, _) in parts]
    weights = np.concatenate(shares)
    probabilities = weights / weights.sum() if weights.any() else None
    return TuneRows(rows, probabilities, "; ".join(summary for _, (_, summary) in parts) + _counts(rows))


def load_validation_rows(section: TuneSection, encoder: Encoder, *, max_length: int) -> TuneRows:
    """Load the validation rows; none if no file is configured."""
    if section.data.validation is None:
        return TuneRows((), None, "no validation file")
    rows, summary = _load([section.data.validation], section, encoder, max_length)
    return TuneRows(rows, None, summary)


def overlapping_rows(training: TuneRows, validation: TuneRows) -> int:
    """Count training rows whose prompt is also a validation prompt."""
    validation_prompts = {_prompt(row) for row in validation.rows}
    return sum(_prompt(row) in validation_prompts for row in training.rows)


def _load(
    paths: Iterable[str], section: TuneSection, encoder: Encoder, max_length: int
) -> tuple[tuple[TuneRow, ...], str]:
    read = _demonstrations if section.objective.name == "sft" else _preferences
    rows, overlong, longest, names = list[TuneRow](), 0, (0, ""), list(paths)
    for path in names:
        clean = without_nulls if from_arrow(path) else without_nan
        for place, columns in read_rows(path):
            refuse_lone_surrogates(columns, place)
            values = {name: clean(without_nan(value)) for name, value in columns.items()}
            tools = read_tools(values.get("tools"), place=place)
            arguments = read_template_arguments(values.get("chat_template_kwargs"), place=place)
            for row in read(values, place, section, encoder.for_row(tools, arguments)):
                length = max(len(response.tokens) for response in row.responses)
                if length <= max_length:
                    rows.append(row)
                    continue
                overlong, longest = overlong + 1, max(longest, (length, place))
    summary = (
        f"{overlong} of {len(rows) + overlong} rows are longer than model.max_length = {max_length}; "
        f"the longest has {longest[0]} tokens ({longest[1]})"
    )
    if overlong and section.data.overlong == "refuse":
        raise DataError(f"{', '.join(names)}: {summary}; raise the limit, or set tune.data.overlong: filter")
    if not rows:
        raise DataError(f"{', '.join(names)}: no row remains: {summary if overlong else 'there are none'}")
    return tuple(rows), f"{', '.join(names)}: {len(rows)} rows" + (
        f"; dropped: {summary}" if overlong else ""
    )


def _counts(rows: Sequence[TuneRow]) -> str:
    digests = {_digest(row) for row in rows}
    return f", {len(rows) - len(digests)} of them duplicates" if len(digests) < len(rows) else ""


def _digest(row: TuneRow) -> bytes:
    """Digest a row's tokens, so that a set of digests needs less memory than the rows."""
    digest = hashlib.blake2b(digest_size=16)
    for response in row.responses:
        digest.update(len(response.tokens).to_bytes(8, "little") + response.tokens.tobytes())
    return digest.digest()


def _prompt(row: TuneRow) -> bytes:
    first = row.responses[0]
    return first.tokens[: first.prompt_length].tobytes()


def _demonstrations(
    columns: Mapping[str, Any], place: str, section: TuneSection, encoder: Encoder
) -> Iterator[TuneRow]:
    prompt, response = read_demonstration(columns, place=place)
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
    for example in [read_pair(columns, place=place)] if is_paired else read_labelled(columns, place=place):
        encoded = tuple(_encode(example.prompt, response, encoder, place) for response in example.responses)
        if len(encoded) == 2 and np.array_equal(encoded[0].tokens, encoded[1].tokens):
            raise DataError(f"{place}: chosen and rejected are the same {len(encoded[0].tokens)} tokens")
        label = label_of(columns, place=place) if section.objective.is_reward_model else CERTAIN
        yield TuneRow(place, encoded, example.sides, label, tag)


def by_tag(rows: Sequence[TuneRow]) -> dict[str, np.ndarray]:
    """Return tag -> which rows have it, [R] bool; empty if all rows have the same tag."""
    tags = np.array([row.tag for row in rows])
    names = sorted(set(tags.tolist()))
    return {name or "untagged": tags == name for name in names} if len(names) > 1 else {}


def reward_model_rows(rows: TuneRows) -> TuneRows:
    """Convert rows for a reward model: append one token to each response and train only at that place, whose
    value is the state after the response's last token, so the score of the whole response."""
    return dataclasses.replace(rows, rows=tuple(_scored(row) for row in rows.rows))


def _scored(row: TuneRow) -> TuneRow:
    def extend(response: Encoded) -> Encoded:
        tokens = np.append(response.tokens, response.tokens[-1])
        return Encoded(tokens, np.arange(len(tokens)) == len(tokens) - 1, response.prompt_length)

    return dataclasses.replace(row, responses=tuple(extend(response) for response in row.responses))


def _encode(prompt: Text, response: Text, encoder: Encoder, place: str) -> Encoded:
    if isinstance(prompt, str) and isinstance(response, str):
        return encoder.text(prompt, response, place=place)
    messages = ({"role": "user", "content": prompt},) if isinstance(prompt, str) else prompt
    answer = ({"role": "assistant", "content": response},) if isinstance(response, str) else response
    return encoder.messages((*messages, *answer), first=len(messages), place=place)


def num_steps(section: TuneSection, num_rows: int) -> int:
    """Return the number of steps of the whole run."""
    return section.steps or max(1, (section.passes or 1) * num_rows // section.batch_rows)


def step_row_numbers(rows: TuneRows, section: TuneSection, *, step: int, seed: int) -> np.ndarray:
    """Return the row numbers [batch_rows] of `step` (from 1): drawn with replacement, or in epoch order."""
    size, count = section.batch_rows, len(rows.rows)
    if section.passes is None:
        generator = np.random.default_rng((seed, step))
        if rows.probabilities is None:
            return generator.integers(count, size=size)
        return generator.choice(count, size=size, p=rows.probabilities)
    places = [divmod(place, count) for place in range((step - 1) * size, step * size)]
    orders = {
        epoch: np.random.default_rng((seed, epoch)).permutation(count)
        for epoch in {position[0] for position in places}
    }
    return np.array([orders[epoch][place] for epoch, place in places])


def build_tune_batch(
    rows: Sequence[TuneRow], numbers: Sequence[int], ref_logprobs: Mapping[int, Sequence[float]] | None = None
) -> TrainBatch:
    """Build the batch of rows with numbers `numbers` [R].

    `ref_logprobs`: row number -> its responses' log-probability sums under the reference. Each response has
    side, ref_logprob (0 without a reference), and its pair's margin and probability, all float64.
    """
    responses = [response for row in rows for response in row.responses]
    sizes = np.array([len(row.responses) for row in rows])
    lengths = [len(response.tokens) for response in responses]
    reference = [0.0] * len(responses)
    if ref_logprobs is not None:
        reference = [value for number in numbers for value in ref_logprobs[int(number)]]
    return TrainBatch(
        tokens=np.concatenate([response.tokens for response in responses]).astype(np.int32),
        cu_seqlens=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        loss_mask=np.concatenate([response.mask for response in responses]),
        group_ids=np.repeat(np.arange(len(rows), dtype=np.int64), sizes),
        sample_ids=tuple(f"{row.place}.{i}" for row in rows for i in range(len(row.responses))),
        samples={
            "side": np.array([side for row in rows for side in row.sides], np.float64),
            "ref_logprob": np.array(reference, np.float64),
            "margin": np.repeat([row.label.margin for row in rows], sizes).astype(np.float64),
            "probability": np.repeat([row.label.probability for row in rows], sizes).astype(np.float64),
        },
        whole_groups=bool((sizes > 1).any()),
    )


def mismatched_rows(rows: Sequence[TuneRow], *, max_length: int) -> tuple[TuneRow, ...]:
    """Pair each row's prompt with the response of the next row with another prompt, cut to max_length: kto
    estimates its zero point on them without training on them."""
    prompts = [_prompt(row) for row in rows]
    if len(set(prompts)) < 2:
        raise DataError(
            "kto needs rows of at least two prompts: it estimates its zero point on mismatched ones"
        )
    result = []
    for number, row in enumerate(rows):
        other = number + 1
        while prompts[other % len(rows)] == prompts[number]:
            other += 1
        source, donor = row.responses[0], rows[other % len(rows)].responses[0]
        tokens = np.concatenate([source.tokens[: source.prompt_length], donor.tokens[donor.prompt_length :]])
        mask = np.concatenate([source.mask[: source.prompt_length], donor.mask[donor.prompt_length :]])
        cut = Encoded(tokens[:max_length], mask[:max_length], source.prompt_length)
        result.append(TuneRow(row.place, (cut,), row.sides))
    return tuple(result)
