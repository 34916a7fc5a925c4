"""Labelled steps: what they are in tokens, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.tune import ObjectiveSection, TuneDataSection, TuneSection
from mrl.data.conversation import Encoder
from mrl.data.tune_rows import TuneRows, batch_of, load_training, reward_model_rows
from mrl.data.tune_shapes import stepwise
from mrl.errors import DataError
from mrl.prepare import tokenizer
from mrl.reasoning_steps import joined_steps, split_steps, step_ends
from mrl.tokenizer_folder import load_tokenizer

ROWS = (
    {"prompt": "3+9+4=", "completions": ["3+9=12", "12+4=16"], "labels": [True, 0.25], "tag": "a"},
    {"prompt": "1+1=", "completions": ["1+1=é2"], "labels": [0]},
    {"prompt": "1+2+3=", "completions": ["1+2=3\n", "3+3=6"], "labels": [None, 1]},
)


def loaded(folder: Path, rows: Any, *, kind: str) -> tuple[Any, TuneRows]:
    """The tokenizer of the kind, made of the rows, and the rows as they are read."""
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "more.jsonl").write_text(json.dumps({"text": "\nmark"}) + "\n")
    files = [path, folder / "more.jsonl"]
    if kind == "bpe":
        tokenizer.write_bpe(files, folder / "tokenizer", vocab_size=300)
    else:
        write = tokenizer.write_chat if kind == "chat" else tokenizer.write_characters
        write(files, folder / "tokenizer")
    found = load_tokenizer(str(folder / "tokenizer"))
    section = TuneSection(
        objective=ObjectiveSection(name="process_reward_model"),
        data=TuneDataSection(train=str(path)),
        output="out",
    )
    encoder = Encoder(found, ends=[found.eos_token_id])
    return found, load_training(section, encoder, max_length=64)


@pytest.mark.parametrize("kind", ["characters", "chat", "bpe"])
def test_the_score_of_a_step_is_read_after_its_last_token(kind: str, tmp_path: Path) -> None:
    own, rows = loaded(tmp_path, ROWS, kind=kind)
    first, second, third = reward_model_rows(rows).rows
    assert first.step_labels == (1.0, 0.25) and second.step_labels == (0.0,) and third.step_labels == (1.0,)
    assert (first.tag, second.tag) == ("a", "")

    def texts(row: Any) -> list[str]:
        """What stands before each place of a score."""
        (each,) = row.responses
        return [own.decode(each.tokens[:end].tolist()) for end in np.flatnonzero(each.mask)]

    assert texts(first)[0].endswith("3+9=12\n") and texts(first)[1].endswith("12+4=16\n")
    assert texts(second)[0].endswith("é2\n") and texts(third)[0].endswith("3+3=6\n")
    assert all(
        len(row.responses[0].tokens) == np.flatnonzero(row.responses[0].mask)[-1] + 1
        for row in reward_model_rows(rows).rows
    )
    batch = batch_of(reward_model_rows(rows).rows, range(3))
    assert batch.arrays["step_labels"][batch.loss_mask].tolist() == [1.0, 0.25, 0.0, 1.0]
    assert not batch.arrays["step_labels"][~batch.loss_mask].any()


def test_other_labels_are_other_rows(tmp_path: Path) -> None:
    """A run that resumes with other labels is refused by the digest."""
    digests = set()
    for label in (True, False, 0.5):
        rows = [{"prompt": "1+1=", "completions": ["1+1=2"], "labels": [label]}]
        digests.add(loaded(tmp_path, rows, kind="characters")[1].digest())
    assert len(digests) == 3


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"labels": None}, "no column 'labels'"),
        ({"labels": [True]}, "one label of each of the 2 completions"),
        ({"labels": [True, 2]}, "not 2"),
        ({"labels": [True, "no"]}, "not 'no'"),
        ({"labels": [True, float("nan")]}, "not nan"),
        ({"labels": [None, None]}, "no step has a label"),
        ({"completions": "3+9=12"}, "completions is a list of texts"),
        ({"completions": ["3+9\n=12", "12+4=16"]}, r"blank or has '\\n' inside"),
        ({"completions": [" ", "12+4=16"]}, "blank"),
    ],
)
def test_what_is_no_row_of_steps_is_refused_by_its_place(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DataError, match=f"rows:1: .*{said}"):
        stepwise(ROWS[0] | changes, "\n", place="rows:1")


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("a\nb\nc", ["a\n", "b\n", "c\n"]),
        ("\n\na\n\n\nb\n", ["\n\na\n\n\n", "b\n"]),
        ("", ["\n"]),
        ("\n", ["\n"]),
        ("a", ["a\n"]),
        ("a\n  \nb", ["a\n  \n", "b\n"]),
    ],
)
def test_a_text_is_cut_at_separators_and_no_step_is_blank(text: str, steps: list[str]) -> None:
    assert split_steps(text, "\n") == steps and "".join(steps).removesuffix("\n") == text.removesuffix("\n")


def test_a_token_across_two_steps_counts_to_the_first(tmp_path: Path) -> None:
    """BPE that has learnt "ab" as one token, cut between a and b."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"text": "ab ab ab ab"}) + "\n")
    tokenizer.write_bpe([tmp_path / "rows.jsonl"], tmp_path / "t", vocab_size=259)
    own = load_tokenizer(str(tmp_path / "t"))
    ids, ends = step_ends(own, ["a", "b", "é"])
    assert own.convert_ids_to_tokens(ids)[0] == "ab" and ends == [1, 1, len(ids)] and len(ids) == 3


def test_steps_are_joined_as_a_policy_writes_them() -> None:
    assert joined_steps(["a", "b"], "; ") == ["a; ", "b; "]
