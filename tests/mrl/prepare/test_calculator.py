"""The calculator's rows and demonstrations, in the words of the template that its tokenizer has."""

from __future__ import annotations

import json
from pathlib import Path

from mrl.agents.render import Observation, TurnRenderer
from mrl.agents.tool_calls import ToolCall, calls_in
from mrl.prepare import calculator_rows, tokenizer
from mrl.tokenizer_folder import load_tokenizer

SCHEMA = {"calculator": {"type": "object", "properties": {"expression": {"type": "string"}}}}


def test_demonstrations_are_what_an_episode_shows_the_policy(tmp_path: Path) -> None:
    folder = calculator_rows.write_calculator(tmp_path / "rows", num_train=50, num_validation=20, num_sft=60)
    names = ("train", "validation", "sft")
    train, validation, turns = (
        [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in names
    )
    shown = {row["prompt"].split(">")[1].removesuffix("<end") for row in turns}
    asked = {row["expression"] for row in (*train, *validation)}
    assert len(asked) == 70 and len(shown) == 60 and not asked & shown
    tokenizer.write_chat([folder / "train.jsonl", folder / "sft.jsonl"], tmp_path / "model")
    spoken = load_tokenizer(str(tmp_path / "model"))
    renderer = TurnRenderer(spoken, roles=("tool",))
    calls = [row for row in turns if row["response"].startswith("{")]
    answers = {row["prompt"]: row["response"] for row in turns}
    assert 5 < len(calls) < 30
    for row in calls:
        expression = row["prompt"].split(">")[1].removesuffix("<end")
        assert calls_in(row["response"], "json", SCHEMA) == [
            ToolCall("calculator", {"expression": expression})
        ]
        prompt = spoken.apply_chat_template(
            [{"role": "user", "content": expression}], tokenize=False, add_generation_prompt=True
        )
        assert row["prompt"] == prompt
        (after,) = (text for text in answers if text.startswith(prompt + row["response"]))
        between = renderer.after(spoken.eos_token_id, [Observation(str(eval(expression)), "tool")])
        wrote = spoken.encode(prompt + row["response"] + tokenizer.END, add_special_tokens=False)
        assert spoken.encode(after, add_special_tokens=False) == [*wrote, *between.tolist()]
        assert answers[after] == str(eval(expression))
