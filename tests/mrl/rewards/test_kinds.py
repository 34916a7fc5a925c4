"""A new kind of reward is one file and one entry of the registry: its settings, their page and errors follow."""

import json
import subprocess
import sys
from typing import Any

import pytest


def run(settings: list[str], rows: list[list[Any]]) -> Any:
    """What `tests/support/vowels.py` answers in a process of its own: the registry is read when the settings are."""
    done = subprocess.run(
        [sys.executable, "-c", "from tests.support.vowels import main; main()"],
        input=json.dumps([["reward.kind=vowels", "reward.workers=1", *settings], rows]),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_a_kind_is_one_file_and_one_registration() -> None:
    rows = [["aside", "2"], ["an education", 5], ["sea", "2"]]
    verdicts, sentence = run(["reward.vowels.each=2.0"], rows)
    assert verdicts == [[0.0, "short"], [0.0, "long"], [2.0, "short"]]
    assert sentence == "Value of a right answer."


@pytest.mark.parametrize(
    ("settings", "answer", "error"),
    [
        ([], "two", "f:1: 'two' is no number of vowels"),
        ([], None, "f:1: the row has no ground truth, and the verifier 'vowels' needs one"),
        (["reward.vowels.eech=1"], "2",
         "reward.vowels.eech: unknown key (command line (reward.vowels.eech=1)); did you mean 'each'?"),
        (["reward.group=true"], "2", "group = true is not for kind = vowels; plug-ins take whole groups"),
    ],
)  # fmt: skip
def test_its_errors_have_their_places(settings: list[str], answer: Any, error: str) -> None:
    assert error in run(settings, [["aside", answer]])
