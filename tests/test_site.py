"""The built site, as `make docs` builds it: it opens from disk, draws its pictures and formulas, and asks no network."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, opened_page, wait_for
from tests.support.source_tree import ROOT

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
PAGE = """# A

## B

[one](one.md)
"""
ONE = """# One

```mermaid
flowchart LR
  a["prompt & group"] --> b["<b>weights</b>"]
```

$r_i < \\frac{1}{2}$
"""


def test_a_picture_and_a_formula_are_drawn_from_disk(tmp_path: Path) -> None:
    source, out = tmp_path / "source/docs", tmp_path / "site"
    source.mkdir(parents=True)
    (source / "README.md").write_text(PAGE)
    (source / "one.md").write_text(ONE)
    words = ["-qW", "--keep-going", "-c", str(ROOT / "docs"), str(source.parent), str(out)]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, timeout=400
    )
    assert (built.returncode, built.stderr) == (0, "")
    with opened_page((out / "docs/one.html").as_uri(), lambda url: url.startswith(out.as_uri())) as (
        page,
        wrong,
    ):
        wait_for(page, "document.querySelectorAll('pre.mermaid svg .node').length == 2")
        assert "prompt & group" in page.inner_text("pre.mermaid")
        assert page.locator("math mfrac").count() == 1
        assert wrong == []
    assert "mermaid" not in (out / "docs/README.html").read_text()
