"""Programs in an unprivileged user's sandbox, also if the tests run as root."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mrl.processes.own_time import Allowance
from mrl.rewards.code import sandbox
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.outcome import CandidateEnded

_NOBODY = 65534
_SECONDS = 300.0


def run_as_plain_user(programs: Sequence[str], limits: Mapping[str, Any]) -> list[str]:
    """Run programs in an unprivileged process's sandbox; return each one's output or end."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.support.plain_user", folder],
            input=json.dumps({"programs": list(programs), "limits": dict(limits)}),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            cwd=Path(__file__).parents[2],
        )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def printed(boundary: sandbox.CodeSandbox, program: str, rules: CodeRules) -> str:
    try:
        with CandidateProcess(boundary, rules, Allowance.of(rules.seconds)) as session:
            return session.run_as_main(program, "").decode()
    except CandidateEnded as ended:
        return f"ended: {ended}"


def main(folder: str) -> None:
    request = json.load(sys.stdin)
    if os.geteuid() == 0:
        os.chmod(folder, 0o755)
        sandbox._RUNNER = Path(shutil.copy(sandbox._RUNNER, folder))  # the checkout may be root's alone
        sandbox._RUNNER.chmod(0o644)
        os.chdir("/")
        os.setgroups([])
        os.setresgid(_NOBODY, _NOBODY, _NOBODY)
        os.setresuid(_NOBODY, _NOBODY, _NOBODY)
    boundary, rules = sandbox.find_sandbox(), CodeRules(**request["limits"])
    json.dump([printed(boundary, program, rules) for program in request["programs"]], sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
