"""The report as one HTML file that opens from disk: data, style and scripts inside, and nothing asked of any network.

What runs wrote is data: it stands in the file as JSON without a "<", the page's scripts show it as text only, and a policy in the
page's head lets run no script but those written here, by their digests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from mrl.errors import DataError
from mrl.files import replace_text
from mrl.observe.phases import STREAM_PHASES
from mrl.report.page_figures import figures
from mrl.report.run_data import read_run

SCRIPTS = ("elements.js", "curves.js", "step.js", "samples.js", "settings.js", "held.js", "page.js")
"""The page's own, in the order in which they run; plotly's comes before them."""


def write_report(
    folders: Sequence[Path], out: Path, *, megabytes: float, steps: tuple[int, int] | None = None
) -> None:
    """Writes the page of some runs. DataError for a folder without rows, or a file that cannot be written.

    `megabytes`: of samples, all runs together; `steps`: the first and the last whose samples are shown, all where absent.
    """
    share = int(megabytes * 1e6 / len(folders))
    runs = [read_run(folder, max_bytes=share, steps=steps) for folder in folders]
    try:
        replace_text(out, render_page(runs))
    except OSError as error:
        raise DataError(f"{out} cannot be written: {error.strerror}; --out FILE names another one") from None


def render_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the text of a page that has all its data. `runs`: what read_run makes."""
    from plotly.offline import get_plotlyjs

    plotly, own = get_plotlyjs(), "\n".join(_file(name) for name in SCRIPTS)
    names = [name for run in runs for name in run["curves"]["metrics"]]
    data = {"runs": list(runs), "figures": figures(names), "phases": STREAM_PHASES}
    parts = {
        "policy": _policy([plotly, own]),
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": _file("page.css"),
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "plotly": plotly,
        "own": own,
    }
    pieces = _file("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _policy(scripts: Sequence[str]) -> str:
    """Return the content security policy of a page that runs these scripts and asks nothing of a network."""
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:"


def _file(name: str) -> str:
    return resources.files("mrl.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
