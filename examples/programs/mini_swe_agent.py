"""mini-swe-agent, trained unchanged: it repairs repositories by shell commands; hidden tests are the reward.

    mrl train MODEL.yaml examples/programs/mini_swe_agent.yaml

needs a model that can use a shell, and the packages of `make programs`. The commands are not sandboxed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from mrl.agents.environment import Model

REPAIRS = Path(__file__).parent / "repairs"


class Repair:
    """Row: {"prompt": [...], "repository": "ledger"}. Reward 1 if tests that the agent never sees pass."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.command, self.env = [sys.executable, *command], os.environ | env

    def run(self, task: dict[str, Any], seed: int, model: Model) -> float:
        name, words = task["repository"], ["-t", task["prompt"][-1]["content"]]
        with tempfile.TemporaryDirectory() as work, tempfile.TemporaryDirectory() as grade:
            shutil.copytree(REPAIRS / name / "repository", work, dirs_exist_ok=True)
            subprocess.run([*self.command, *words], cwd=work, env=self.env, stdin=subprocess.DEVNULL)
            # The tests run in a fresh folder that has only the package of what the agent left.
            shutil.copytree(REPAIRS / name / "hidden", grade, dirs_exist_ok=True)
            if Path(work, name).is_dir():
                shutil.copytree(Path(work, name), Path(grade, name))
            done = subprocess.run([sys.executable, "hidden_test.py"], cwd=grade, timeout=60)
        return float(done.returncode == 0)
