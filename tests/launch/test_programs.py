"""Programs that call the policy by themselves, on real engines, with weight updates between and in turns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.observe.metrics_log import read
from tests.launch.acting_runs import PROGRAM, words
from tests.launch.command import run

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("schedule", "extra"),
    [
        ("on_policy", ()),
        ("stream", ("stream.max_staleness=1",)),
        pytest.param("on_policy", ("rollout.workers=node",), marks=pytest.mark.slow),
    ],
)
def test_programs_are_trained(schedule: str, extra: tuple[str, ...], acting: Path, tmp_path: Path) -> None:
    """A difference between generated and trained tokens, or in a log-prob, ends the run."""
    args = words(acting, tmp_path, "run", f"loop.schedule={schedule}", "loop.steps=3", PROGRAM, *extra)
    run("train", *args, log=tmp_path / "run.log", seconds=500)
    rows = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert len(rows) == 3
    for row in rows:
        assert row["agent/episodes"] == row["agent/ended_by/env_done"] == 16
        assert row["agent/conversations"] == 2 and row["agent/turns"] == 4
        assert row["agent/retries"] == row["reward/no_reward_frac"] == 0 and row["reward/mean"] > 0
        assert row.get("policy/rollout_logprob_diff_max", 0.0) < 1e-4
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    for sample in samples:
        ((branch),) = sample["branches"]
        assert [len(one["turns"]) for one in (sample, branch)] == [1, 3]
        assert branch["turns"][1]["observed"].startswith("1 é語👩 <|im_end|> ")
        assert branch["turns"][0]["said"][:10].strip() in sample["prompt"] or sample["turns"]
    if schedule == "stream":
        assert max(row["policy/staleness_max"] for row in rows) == 1, "no version came while programs ran"


AGENT = """
import json, os, sys, urllib.request
texts = []
for number in range(2):
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions")
    request.add_header("Authorization", "Bearer " + os.environ["OPENAI_API_KEY"])
    messages = [{"role": "user", "content": f"{sys.argv[1]} {number}"}]
    body = json.dumps({"model": "policy", "messages": messages}).encode()
    with urllib.request.urlopen(request, body) as answer:
        texts.append(json.load(answer)["choices"][0]["message"]["content"] or "")
open("texts.json", "w").write(json.dumps(texts))
"""
GRADE = """
import json
texts = json.load(open("texts.json"))
letters = [letter for text in texts for letter in text]
open("/tmp/reward", "w").write(str(sum(map(str.islower, letters)) / max(1, len(letters))))
"""


def test_commands_in_sandboxes_are_trained(acting: Path, tmp_path: Path) -> None:
    """The program is a command without a class, and its grade is another, in a fresh sandbox."""
    for name, text in (("files/agent.py", AGENT), ("grade/grade.py", GRADE)):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(text)
    program = {
        "command": ["python3", "agent.py", "{prompt}"],
        "files": str(tmp_path / "files"),
        "sandbox": {"disk_mib": 16},
        "grade": {
            "command": ["python3", "grade.py"],
            "files": str(tmp_path / "grade"),
            "keep": ["texts.json"],
            "reward": "number",
        },
    }
    agent = json.dumps({"environment": None, "program": program, "max_turn_tokens": 24})
    args = words(acting, tmp_path, "run", "loop.steps=2", f"agent={agent}")
    run("train", *args, log=tmp_path / "run.log", seconds=500)
    rows = [row for row in read(tmp_path / "run/metrics.jsonl") if row["step"]]
    assert len(rows) == 2
    for row in rows:
        assert row["agent/episodes"] == row["agent/ended_by/env_done"] == 16
        assert row["agent/conversations"] == row["agent/turns"] == 2
        assert row["agent/retries"] == row["reward/no_reward_frac"] == 0 and row["reward/mean"] > 0
        assert row.get("policy/rollout_logprob_diff_max", 0.0) < 1e-4
    samples = [json.loads(line) for line in (tmp_path / "run/samples.jsonl").read_text().splitlines()]
    assert {turn["said"] for sample in samples for turn in sample["turns"]} and len(samples) > 0
