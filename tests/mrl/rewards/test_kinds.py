"""A new reward kind is one file and one registry entry; its settings, help and errors follow."""

import json
import subprocess
import sys
from typing import Any

ERRORS: list[tuple[list[str], Any, str]] = [
    ([], "two", "f:1: 'two' is no number of vowels"),
    ([], None, "f:1: the row has no ground truth, and the verifier 'vowels' needs one"),
    (["reward.vowels.pints=1"], "2",
     "reward.vowels.pints: unknown key (command line (reward.vowels.pints=1)); did you mean 'points'?"),
    (["reward.group=true"], "2", "group = true is not for kind = vowels; plug-ins take whole groups"),
]  # fmt: skip
"""Settings, a row's answer, and their error."""


def test_a_kind_is_one_file_and_one_registration() -> None:
    """It runs in a subprocess because the settings read the registry once."""
    cases = [(["reward.vowels.points=2.0"], [["aside", "2"], ["an education", 5], ["sea", "2"]])]
    cases += [(settings, [["aside", answer]]) for settings, answer, _ in ERRORS]
    done = subprocess.run(
        [sys.executable, "-c", "from tests.support.vowels import main; main()"],
        input=json.dumps(
            [[["reward.kind=vowels", "reward.workers=1", *settings], rows] for settings, rows in cases]
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    (verdicts, sentence), *errors = json.loads(done.stdout.splitlines()[-1])
    assert verdicts == [[0.0, "short"], [0.0, "long"], [2.0, "short"]]
    assert sentence == "Value of a right answer."
    for message, (_, _, error) in zip(errors, ERRORS, strict=True):
        assert error in message
