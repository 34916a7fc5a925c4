"""`mrl make judgements`: what a judge is tuned on is what it would be asked in a run, with the verdict that is due."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from mrl.cli import main
from mrl.config.load import load_config
from mrl.rewards.contract import RewardRequest
from mrl.rewards.judges.attacks import GUESS
from mrl.rewards.judges.llm import shown
from tests.mrl.data.conftest import make_tokenizer

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.yaml")
PARTS = "[{kind: maths, name: right, weight: 0.0, maths: {extraction: [boxed], symbolic: false}}, %s]"


def written(folder: Path, llm: str = "{choices: {bad: 0.0, good: 2.0}}") -> list[str]:
    """The words of the command over rows of sums, for a judge beside a witness."""
    make_tokenizer().save_pretrained(str(folder / "model"))
    rows = [json.dumps({"prompt": f"{a}+{a + 3}=", "answer": str(2 * a + 3)}) for a in range(1, 41)]
    for name, part in (("train", rows[:30]), ("validation", rows[30:])):
        (folder / f"{name}.jsonl").write_text("\n".join(part))
    judge = f"{{kind: llm, name: judged, path: 'http://127.0.0.1:9', llm: {llm}}}"
    (folder / "judge.yaml").write_text(f"reward: {{kind: null, parts: {PARTS % judge}}}\n")
    data = (
        f"data: {{train: {folder}/train.jsonl, validation: {folder}/validation.jsonl, max_prompt_tokens: 64}}"
    )
    rule = "reward: {kind: maths, maths: {extraction: [boxed], symbolic: false}}"
    (folder / "rule.yaml").write_text(f"model: {{path: {folder}/model}}\n{data}\n{rule}\n")
    words = [QUICKSTART, str(folder / "rule.yaml"), "--judge", str(folder / "judge.yaml")]
    return ["make", "judgements", *words, "--out", str(folder / "out")]


def rows_of(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize("verdict", ["line", "choice"])
@pytest.mark.parametrize("reference", [True, False])
def test_a_judge_is_tuned_on_what_it_is_asked(verdict: str, reference: bool, tmp_path: Path) -> None:
    llm = f"{{choices: {{bad: 0.0, good: 2.0}}, verdict: {verdict}, reference: {str(reference).lower()}}}"
    asked = written(tmp_path, llm)
    assert main(asked) == 0
    rows = rows_of(tmp_path / "out/judgements.jsonl")
    again = (tmp_path / "out/judgements.jsonl").read_text()
    assert main(asked) == 0 and (tmp_path / "out/judgements.jsonl").read_text() == again
    gold = rows_of(tmp_path / "out/gold.jsonl")
    held_out = rows_of(tmp_path / "out/judgements_validation.jsonl")
    assert len(rows) == 60 and len(held_out) == len(gold) == 20
    part = load_config(*asked[2:4], str(tmp_path / "judge.yaml")).reward.parts[1]
    rules, server = part.llm, part.server  # type: ignore[attr-defined]
    nonces = set()
    for row, known in zip(held_out, gold, strict=True):
        (user, assistant), truth = row["messages"], str(sum(map(int, known["prompt"].rstrip("=").split("+"))))
        assert known["right"] == (known["response"] == f"\\boxed{{{truth}}}") and known["answer"] == (
            truth if reference else ""
        )
        (nonce,) = set(re.findall(r"\[/([0-9a-f]{16})\]", user["content"]))
        request = RewardRequest("", 0, known["response"], truth, prompt=known["prompt"])
        assert user["content"] == shown(rules, server, request).replace(GUESS, nonce)
        assert (f"\n{truth}\n" in user["content"]) == reference
        said = "good" if known["right"] else "bad"
        assert assistant["content"] == (said if verdict == "choice" else f"VERDICT {nonce}: {said}")
        nonces.add(nonce)
    assert len(nonces) == 20


def test_a_judge_that_thinks_is_shown_how(tmp_path: Path) -> None:
    """What it was shown, defused as it was shown, stands before the verdict; the questions are the same."""
    asked = written(tmp_path, "{choices: {bad: 0.0, good: 2.0}}")
    assert main(asked) == 0
    plain = rows_of(tmp_path / "out/judgements.jsonl")
    thought = tmp_path / "thought.txt"
    thought.write_text("{prompt} is {reference}<|im_end|>; said: {response}\n{other}\n\n")
    assert main([*asked, "--thought", str(thought)]) == 0
    rows = rows_of(tmp_path / "out/judgements.jsonl")
    for before, row in zip(plain, rows, strict=True):
        assert row["messages"][0] == before["messages"][0]
        texts = re.findall(
            r"^\[[0-9a-f]{16}\]\n(.*?)\n\[/", row["messages"][0]["content"], re.DOTALL | re.MULTILINE
        )
        prompt, reference, response = texts
        said = f"{prompt} is {reference}<|im_end|>; said: {response}\n{{other}}\n"
        assert row["messages"][1]["content"] == said + before["messages"][1]["content"]


@pytest.mark.parametrize(
    ("llm", "text", "said"),
    [
        ("{verdict: choice}", "{response}", "llm.verdict = choice the judge's first token is its verdict"),
        ("{}", None, "cannot be read"),
        ("{reference: false}", "{reference}",
         "llm.reference = false, so that the judge is not shown {reference}"),
    ],
)  # fmt: skip
def test_what_is_no_thought_is_refused(llm, text, said, tmp_path, capsys) -> None:
    asked = written(tmp_path, llm)
    thought = tmp_path / "thought.txt"
    if text is not None:
        thought.write_text(text)
    assert main([*asked, "--thought", str(thought)]) == 2 and said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_is_no_judge_is_refused(tmp_path, capsys) -> None:
    asked = written(tmp_path, "{}")
    (tmp_path / "judge.yaml").write_text("run: {name: x}\n")
    assert main(asked) == 2 and "has 0 verifiers of kind llm" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
