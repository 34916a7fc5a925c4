"""Style probes change a response's manner and nothing around it, and what a score makes of them is told in its own units."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mrl.config.sections.model import ModelSection, NewModelSection
from mrl.data.conversation import Encoder
from mrl.data.style_probes import MOST_RESPONSES, style_probes
from mrl.data.tune_rows import TuneRow, TuneRows, reward_model_rows
from mrl.loops.tuning.figures import style_line, style_report
from mrl.prepare import arithmetic, new_model
from mrl.tokenizer_folder import load_tokenizer
from tests.support.chat_tokenizers import qwen

MANNERS = {"padding", "bullets", "hedging", "flattery", "repetition", "gibberish", "cut_off"}
ANSWER = "The sum is 12. I added both."


def pairs(tokenizer: Any, *answers: str) -> tuple[TuneRow, ...]:
    """Pairs of a right and a wrong answer, as a reward model takes them."""
    encoder = Encoder(tokenizer, ends=[tokenizer.eos_token_id])
    rows = [
        TuneRow(str(n), tuple(encoder.text("5+7=", text, place="") for text in (answer, "3")), (True, False))
        for n, answer in enumerate(answers)
    ]
    return reward_model_rows(TuneRows(tuple(rows), None, "")).rows


def texts(tokenizer: Any, rows: tuple[TuneRow, ...], *, max_length: int = 400) -> dict[str, str]:
    """What the first row's chosen response is in each manner."""
    found = {}
    for probe in style_probes(rows, tokenizer, max_length=max_length, seed=1):
        (response,), own = probe.rows[0].responses, rows[0].responses[0]
        before = own.prompt_length
        assert np.array_equal(response.tokens[:before], own.tokens[:before])
        assert np.array_equal(response.tokens[-2:], own.tokens[-2:]), "its end, and the place of its score"
        assert response.mask.sum() == 1 and response.mask[-1] and probe.rows[0].sides == (True,)
        found[probe.name] = tokenizer.decode(response.tokens[before:-2].tolist())
    return found


def test_each_manner_says_the_same_in_another_way() -> None:
    tokenizer = qwen()
    found = texts(tokenizer, pairs(tokenizer, ANSWER))
    assert set(found) == MANNERS
    assert found["flattery"].endswith(ANSWER) and found["hedging"].endswith(ANSWER)
    assert found["padding"].startswith(ANSWER) and found["gibberish"].startswith(ANSWER)
    assert found["bullets"] == "- The sum is 12.\n- I added both."
    assert found["repetition"] == ANSWER + ANSWER and ANSWER.startswith(found["cut_off"])


def test_a_manner_that_does_not_fit_or_changes_nothing_is_left_out() -> None:
    tokenizer = qwen()
    rows = pairs(tokenizer, ANSWER)
    length = len(rows[0].responses[0].tokens)
    assert set(texts(tokenizer, rows, max_length=length - 1)) == {"cut_off"}
    one = pairs(tokenizer, "1")
    assert "cut_off" not in texts(tokenizer, one), "nothing is no response"
    (repeated,) = [p for p in style_probes(pairs(tokenizer, *["12"] * 100), tokenizer, max_length=400, seed=1) if p.name == "repetition"]  # fmt: skip
    assert repeated.numbers == tuple(range(MOST_RESPONSES))


def test_a_tokenizer_without_words_is_asked_by_tokens(tmp_path: Path) -> None:
    folder = arithmetic.write_arithmetic(tmp_path, largest=9, num_validation=8, num_sft=8)
    new = NewModelSection(hidden_size=64, num_heads=2, num_kv_heads=2, head_dim=32, expert_size=64)
    model = ModelSection(path=str(folder / "model"), new=new, max_length=16)
    new_model.ensure(model, [str(folder / "pairs.jsonl")], seed=0)
    tokenizer = load_tokenizer(model.path)
    assert set(texts(tokenizer, pairs(tokenizer, "12"))) == {"repetition", "gibberish", "cut_off"}


def test_a_score_of_length_is_told_by_what_makes_longer() -> None:
    tokenizer = qwen()
    rows = pairs(tokenizer, ANSWER, "It is 12. Yes, it is.")
    probes = style_probes(rows, tokenizer, max_length=400, seed=1)

    def of_length(row: TuneRow) -> float:
        return 0.5 * len(row.responses[0].tokens)

    chosen = np.array([of_length(row) for row in rows])
    by_length = [{n: [of_length(row)] for n, row in enumerate(probe.rows)} for probe in probes]
    report = style_report(probes, by_length, chosen, std=2.0)
    assert set(report) == MANNERS and all(each["responses"] == 2 for each in report.values())
    repeated = (len(rows[0].responses[0].tokens) + len(rows[1].responses[0].tokens)) / 2 - 4 - 2
    assert report["repetition"]["shift"] == pytest.approx(0.5 * repeated / 2.0)
    assert report["repetition"]["preferred"] == 1.0 and report["cut_off"]["preferred"] == 0.0
    assert report["cut_off"]["shift"] < 0 < report["repetition"]["shift_error"]
    by_content = [{n: [1.0] for n in range(len(probe.rows))} for probe in probes]
    still = style_report(probes, by_content, np.ones(2), std=0.0)
    assert all(each["shift"] == 0 and each["preferred"] == 0 for each in still.values())
    assert style_line(report).startswith(
        "what a manner alone moves a score by"
    ) and "padding +" in style_line(report)
