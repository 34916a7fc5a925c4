"""A judge's verdicts in a run are counted and cached."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mrl.rewards.judges import judge_cache
from mrl.rewards.judges.judge_cache import JudgeCache
from mrl.rewards.judges.judge_rules import EngineSection, LlmRules
from mrl.rewards.judges.llm import QuestionBuilder
from mrl.rewards.pool import engines
from mrl.rewards.reward_part import ServerSection


def test_a_long_run_s_answers_do_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest stay cached, also in a resumed run; all are counted."""
    monkeypatch.setattr(judge_cache, "MAX_CACHED_VERDICTS", 10)
    long = JudgeCache(tmp_path, "judge")
    for number in range(100):
        long.record(3, str(number), number / 99)
    for known in (long, JudgeCache(tmp_path, "judge")):
        assert (known.calls, known.tokens) == (100, 300)
        kept = [number for number in range(100) if known.find(str(number)) == number / 99]
        assert len(kept) in range(5, 11) and kept == list(range(kept[0], 100))


NO_MATTER = {"tries", "max_calls", "api_key_env"}
"""Rules that do not affect verdicts."""
BY_CONTENTS = {"template", "tokenizer"}


def test_a_judge_is_known_by_all_that_decides_its_verdicts(tmp_path: Path) -> None:
    """A new rule is part of the key, or is listed above as irrelevant to it."""

    def judge(**changes: Any) -> str:
        of_server = {name: value for name, value in changes.items() if name in ServerSection.model_fields}
        rules = LlmRules().model_copy(update={n: v for n, v in changes.items() if n not in of_server})
        return QuestionBuilder(rules, ServerSection().model_copy(update=of_server)).judge("somebody")

    names = {*LlmRules.model_fields, *ServerSection.model_fields}
    others = {name for name in names - BY_CONTENTS if judge(**{name: "another"}) != judge()}
    assert others == names - BY_CONTENTS - NO_MATTER
    texts = {
        "a": "{prompt} {response} {reference}",
        "b": "{prompt} {response} {reference}",
        "c": "{prompt} {response} {reference}?",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "template").write_text(text)
        words = [{"content": "<w>" if name == "c" else "<v>", "special": True}]
        (tmp_path / name / "tokenizer.json").write_text(json.dumps({"added_tokens": words}))
    for rule, file in (("template", "template"), ("tokenizer", "")):
        a, b, c = (judge(**{rule: str(tmp_path / name / file)}) for name in texts)
        assert a == b != c and a != judge(), "where its text lies makes no difference"


def test_a_server_of_the_run_is_known_by_its_model_and_what_it_serves_it_with(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    usual = EngineSection(model=str(tmp_path))
    serves = {"dtype": "float32", "max_length": 64, "arguments": ("--chat-template", "t")}
    known = [engines._answers(usual.model_copy(update={name: value}), ()) for name, value in serves.items()]
    known += [engines._answers(usual, ()), engines._answers(usual, ["--logprobs-mode", "processed_logprobs"])]
    assert len(set(known)) == len(known)
    assert engines._answers(usual.model_copy(update={"max_num_seqs": 2}), ()) == known[3]
    (tmp_path / "config.json").write_text("{ }")
    assert engines._answers(usual, ()) != known[3]
