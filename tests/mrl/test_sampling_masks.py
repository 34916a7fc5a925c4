"""Sampling masks: kept with their tokens through joins, parts, messages and batches."""

from __future__ import annotations

import dataclasses

import msgspec
import numpy as np
import pytest

from mrl.rollout import engine_messages
from mrl.rollout.request import Completion, completion_of, join_completions, sample_of_completion
from mrl.samples import Group, Prompt, Status
from mrl.sampling_masks import MaskFields, SamplingMasks, join_masks
from mrl.training.batch import pack
from mrl.trajectories.group_messages import decode_group, encode_group
from tests.support.samples import make_sample

ROWS = [[3, 5], [7], [0, 1, 2, 70_000], []]


def rows_of(masks: SamplingMasks | None) -> list[list[int]]:
    assert masks is not None
    return [row.tolist() for row in np.split(masks.tokens, masks.bounds()[1:-1])]


def test_parts_joins_and_choices_keep_each_positions_tokens() -> None:
    masks = SamplingMasks.of(ROWS)
    assert rows_of(masks) == ROWS and masks.tokens.dtype == np.uint32
    assert SamplingMasks.of(ROWS[:2]).tokens.dtype == np.uint16
    assert rows_of(masks.part(1, 3)) == ROWS[1:3]
    assert rows_of(masks.take(np.array([3, 2, 0, 2]))) == [ROWS[3], ROWS[2], ROWS[0], ROWS[2]]
    joined = join_masks([(masks.part(0, 2), 2), (None, 1), (masks.part(2, 3), 1)])
    assert rows_of(joined) == [*ROWS[:2], [], ROWS[2]]
    assert join_masks([(None, 2), (None, 3)]) is None


def test_a_token_outside_its_mask_is_found() -> None:
    masks = SamplingMasks.of(ROWS)
    assert masks.first_outside(np.array([5, 7, 70_000, 9])) is None
    assert masks.first_outside(np.array([5, 7, 3, 9])) == 2
    assert masks.first_outside(np.array([4, 8, 3, 9])) == 0


@pytest.mark.parametrize("rows", [ROWS, ROWS[:2]])
def test_messages_carry_them(rows: list[list[int]]) -> None:
    fields = MaskFields.of(SamplingMasks.of(rows))
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=MaskFields)
    assert (
        rows_of(again.masks()) == rows and again.masks().tokens.dtype == SamplingMasks.of(rows).tokens.dtype
    )


def completion(name: str, rows: list[list[int]] | None) -> Completion:
    count = 2 if rows is None else len(rows)
    masks = None if rows is None else SamplingMasks.of(rows)
    tokens = np.arange(count, dtype=np.int32)
    return Completion(name, tokens, np.zeros(count, np.float32), (), Status.FINISHED, sampling_masks=masks)


def test_an_engines_message_of_several_completions() -> None:
    sent = [completion("0.0", ROWS[:2]), completion("0.1", None), completion("1.0", ROWS[2:])]
    message = engine_messages.decode(engine_messages.encode(engine_messages.ended(sent, lambda block: 0)))
    first, second, third = engine_messages.completions_of(message)
    assert rows_of(first.sampling_masks) == ROWS[:2] and rows_of(third.sampling_masks) == ROWS[2:]
    assert rows_of(second.sampling_masks) == [[], []]
    plain = engine_messages.ended(sent[1:2], lambda block: 0)
    assert plain.masks is None
    assert engine_messages.completions_of(plain)[0].sampling_masks is None


def test_a_continued_response_and_its_sample_keep_them() -> None:
    whole = join_completions(completion("0.0", ROWS[:2]), completion("0.0", ROWS[2:]))
    assert rows_of(whole.sampling_masks) == ROWS
    prompt = Prompt(0, np.zeros(1, np.int32), "", None)
    sample = sample_of_completion(prompt, 0, whole)
    assert rows_of(completion_of(sample).sampling_masks) == ROWS
    group = Group(prompt, (dataclasses.replace(sample, prompt_tokens=prompt.tokens), sample))
    decoded = decode_group(encode_group(group), lambda index: prompt)
    assert [rows_of(s.sampling_masks) for s in decoded.samples] == [ROWS, ROWS]


def test_a_batch_has_those_of_its_responses() -> None:
    samples = []
    for number, rows in enumerate((ROWS[:2], None, ROWS[2:])):
        made = make_sample(0, number)
        tokens = made.response_tokens[:2]
        samples.append(
            dataclasses.replace(
                made,
                response_tokens=tokens,
                loss_mask=np.ones(2, np.bool_),
                rollout_logprobs=np.zeros(2, np.float32),
                policy_versions=np.zeros(2, np.int32),
                segments=(),
                sampling_masks=None if rows is None else SamplingMasks.of(rows),
            )
        )
    batch = pack([Group(Prompt(0, samples[0].prompt_tokens, "", None), tuple(samples))])
    nothing = [[]] * len(samples[0].prompt_tokens)
    expected = [[*nothing, *rows] for rows in (ROWS[:2], [[], []], ROWS[2:])]
    assert rows_of(batch.sampling_masks) == [row for rows in expected for row in rows]
    chosen = batch.select(np.array([2, 0]))
    assert rows_of(chosen.sampling_masks) == expected[2] + expected[0]
    without = [dataclasses.replace(sample, sampling_masks=None) for sample in samples]
    assert pack([Group(Prompt(0, samples[0].prompt_tokens, "", None), tuple(without))]).sampling_masks is None
