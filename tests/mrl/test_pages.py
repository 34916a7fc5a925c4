"""Pages generated from the code are written whole, and none of them is committed."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.config.describe import settings
from mrl.observe.metric_names import METRICS
from mrl.pages import PAGES
from tests.support.source_tree import ROOT


def test_every_setting_and_metric_has_its_line(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mrl.pages", str(tmp_path / "new")]
    subprocess.run(command, check=True, timeout=120)
    written = {name: (tmp_path / "new" / name).read_text(encoding="utf-8") for name in PAGES}
    metrics = re.findall(r"^- `(.+?)` \[", written["metrics.md"], re.M)
    assert metrics == list(METRICS)
    lines = re.findall(r"^(?:- `|## )([^:`\n]+)", written["settings.md"], re.M)
    assert lines == [setting.path for setting in settings()]


@pytest.mark.parametrize("name", PAGES)
def test_git_ignores_a_page_that_is_made(name: str) -> None:
    done = subprocess.run(["git", "check-ignore", "-q", f"docs/{name}"], cwd=ROOT, check=False, timeout=60)
    assert done.returncode == 0
