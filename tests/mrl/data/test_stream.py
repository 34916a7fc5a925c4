"""The order of prompts: a pure function of seed and index, exact shares, tiny state."""

import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mrl.data.prompt_stream import PromptStream, Source, validation_order
from mrl.errors import DataError
from mrl.samples import Prompt


def rows(count: int, name: str = "a") -> list[Prompt]:
    return [
        Prompt(
            index=n,
            tokens=np.array([n, len(name)], np.int32),
            text=f"{name}{n}",
            ground_truth="",
            domain=name,
        )
        for n in range(count)
    ]


def texts(prompts: list[Prompt]) -> list[str]:
    return [prompt.text for prompt in prompts]


def test_every_epoch_holds_every_row_once_in_a_new_order() -> None:
    stream = PromptStream(rows(10), seed=1)
    epochs = [texts(stream.take(10)) for _ in range(5)]
    assert all(sorted(epoch) == sorted(texts(rows(10))) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 5
    assert [p.index for p in stream.take(3)] == [50, 51, 52]
    assert stream.epoch(25) == 2.5


def test_the_seed_alone_decides() -> None:
    assert texts(PromptStream(rows(50), seed=3).take(120)) == texts(PromptStream(rows(50), seed=3).take(120))
    assert texts(PromptStream(rows(50), seed=3).take(50)) != texts(PromptStream(rows(50), seed=4).take(50))
    assert texts(PromptStream(rows(5), seed=3, shuffle=False).take(7)) == [
        "a0",
        "a1",
        "a2",
        "a3",
        "a4",
        "a0",
        "a1",
    ]


@given(st.lists(st.integers(0, 40), max_size=8), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_how_it_is_taken_changes_nothing(takes: list[int], seed: int) -> None:
    stream, whole = PromptStream(rows(17), seed), PromptStream(rows(17), seed)
    prompts = [prompt for count in takes for prompt in stream.take(count)]
    assert texts(prompts) == texts(whole.take(sum(takes)))
    assert all(stream.prompt_at(p.index).text == p.text for p in prompts)


def test_a_restored_stream_neither_repeats_nor_skips() -> None:
    stream = PromptStream(rows(17), seed=5)
    first = texts(stream.take(23))
    state = json.loads(json.dumps(stream.state()))
    remaining = texts(stream.take(40))
    resumed = PromptStream(rows(17), seed=5)
    resumed.restore(state)
    assert resumed.position == 23
    assert texts(resumed.take(40)) == remaining
    assert texts(PromptStream(rows(17), seed=5).take(63)) == first + remaining
    assert len(json.dumps(state)) < 200


def test_a_state_of_other_data_is_refused() -> None:
    state = PromptStream(rows(17), seed=5).state()
    with pytest.raises(DataError, match="rows"):
        PromptStream(rows(18), seed=5).restore(state)
    with pytest.raises(DataError, match="seed"):
        PromptStream(rows(17), seed=6).restore(state)
    with pytest.raises(DataError, match="rows"):
        PromptStream(rows(17), seed=5, shuffle=False).restore(state)


@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=4), st.integers(1, 300))
@settings(max_examples=50, deadline=None)
def test_shares_are_exact_at_every_point(shares: list[float], length: int) -> None:
    sources = [Source(str(n), rows(3, str(n)), share) for n, share in enumerate(shares)]
    counts: Counter[str] = Counter()
    for done, prompt in enumerate(PromptStream(sources, seed=0).take(length), start=1):
        counts[prompt.domain] += 1
        for number, share in enumerate(shares):
            assert abs(counts[str(number)] - done * share / sum(shares)) < len(shares)
    for number, share in enumerate(shares):
        assert abs(counts[str(number)] - length * share / sum(shares)) <= max(1.0, len(shares) / 2)


def test_a_source_without_rows_is_refused() -> None:
    with pytest.raises(DataError, match="no training prompts"):
        PromptStream([Source("full", rows(2), 1.0), Source("empty", [], 1.0)], seed=0)


def test_validation_prompts_have_indices_of_their_own() -> None:
    sources = [Source("a", rows(3, "a"), 1.0), Source("b", rows(1, "b"), 1.0)]
    assert [(p.index, p.text) for p in validation_order(sources, 10)] == [
        (-1, "a0"),
        (-2, "b0"),
        (-3, "a1"),
        (-4, "a2"),
    ]
    assert len(validation_order(sources, 2)) == 2
    assert validation_order([], 5) == []
