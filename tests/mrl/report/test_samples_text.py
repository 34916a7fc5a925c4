"""Samples as text: an episode turn by turn, without terminal control sequences."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.errors import DataError
from mrl.observe.samples_log import row_of
from mrl.report.samples_text import samples_text
from mrl.samples import Transcript, Turn
from tests.support.samples import make_groups, make_sample, verdict_of


def test_an_episode_turn_by_turn(tmp_path: Path) -> None:
    turns = (Turn(0, 1, "call\n\x1b[2J", "4", 0.25), Turn(2, 3, "four", "", 1.0))
    episode = Transcript(turns, "begin", ended_by="env_done")
    samples = [
        make_sample(0, 0, transcript=episode, verdict=verdict_of(1.25)),
        make_sample(0, 1, response_text="no"),
    ]
    rows = [row_of(3, "train", group, s) for group in make_groups(samples) for s in group.samples]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    text = samples_text(tmp_path)
    assert text.splitlines() == [
        "step 3  train  sample 0.0  reward 1.25  finished, ended by env_done",
        "  prompt: begin",
        "  turn 1 (reward 0.25): call",
        "    \\x1b[2J",
        "  observed: 4",
        "  turn 2 (reward 1): four",
        "",
        "step 3  train  sample 0.1  reward None  finished",
        "  prompt: ",
        "  response: no",
    ]
    assert samples_text(tmp_path, limit=1).endswith("\n\n1 more; --limit shows them")
    with pytest.raises(DataError, match="has no such samples; 2 rows"):
        samples_text(tmp_path, step=4)


def test_every_conversation_of_a_program(tmp_path: Path) -> None:
    main, other = (
        make_sample(
            0, 0, transcript=Transcript((Turn(0, 1, f"words {n}"),), f"user: {n}?", ended_by="env_done")
        )
        for n in (2, 1)
    )
    (group,) = make_groups([dataclasses.replace(main, branches=(other,))])
    (tmp_path / "samples.jsonl").write_text(json.dumps(row_of(1, "train", group, group.samples[0])) + "\n")
    assert samples_text(tmp_path).splitlines()[1:] == [
        "conversation 1 of 2",
        "  prompt: user: 1?",
        "  turn 1: words 1",
        "conversation 2 of 2",
        "  prompt: user: 2?",
        "  turn 1: words 2",
    ]


def test_a_cut_file_is_shown_as_far_as_it_goes(tmp_path: Path) -> None:
    row = {
        "step": 1,
        "kind": "train",
        "sample_id": "0.0",
        "prompt": "p",
        "response": "r",
        "reward": 0.0,
        "status": "finished",
    }
    (tmp_path / "some.jsonl").write_text(json.dumps(row) + '\n{"step": 2, "ki')
    text = samples_text(tmp_path / "some.jsonl")
    assert "response: r" in text and text.endswith("first line 2.")
