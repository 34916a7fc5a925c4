"""Write the report as one HTML file that opens from disk: data, style and scripts are inside, no network is
used.

What runs wrote is data: JSON without a "<", shown by the page's scripts as text only. A content security
policy in the page's head only allows the scripts written here, by their digests.
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

SCRIPTS = ("elements", "summary", "curves", "step", "samples", "settings", "held", "page")
"""Scripts of the page in running order, after plotly's."""


def write_report(
    folders: Sequence[Path], out: Path, *, megabytes: float, steps: tuple[int, int] | None = None
) -> None:
    """Write the page of some runs.

    Args:
        megabytes: Size of samples, all runs together.
        steps: First and last step whose samples are shown; None shows all.
    Raises:
        DataError: If a folder has no rows, or the file cannot be written.
    """
    share = int(megabytes * 1e6 / len(folders))
    runs = [read_run(folder, max_bytes=share, steps=steps) for folder in folders]
    try:
        replace_text(out, render_page(runs))
    except OSError as error:
        raise DataError(
            f"cannot write {out}: {error.strerror}; choose another file with --out FILE"
        ) from None


def render_page(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page's text with all its data; `runs` come from read_run."""
    from plotly.offline import get_plotlyjs

    plotly, own_scripts = get_plotlyjs(), "\n".join(_file(f"{name}.js") for name in SCRIPTS)
    names = [name for run in runs for name in run["curves"]["metrics"]]
    data = {"runs": list(runs), "figures": figures(names), "phases": STREAM_PHASES}
    parts = {
        "policy": _policy([plotly, own_scripts]),
        "title": html.escape(", ".join(run["name"] for run in runs)),
        "style": _file("page.css"),
        "data": json.dumps(data, allow_nan=False).replace("<", "\\u003c"),
        "plotly": plotly,
        "own": own_scripts,
    }
    pieces = _file("page.html").split("@@")
    return "".join(parts[piece] if place % 2 else piece for place, piece in enumerate(pieces))


def _policy(scripts: Sequence[str]) -> str:
    """Return the content security policy of a page that runs these scripts and uses no network."""
    digests = " ".join(f"'sha256-{_digest(script)}'" for script in scripts)
    return f"default-src 'none'; script-src {digests}; style-src 'unsafe-inline'; img-src data: blob:"


def _file(name: str) -> str:
    return resources.files("mrl.report").joinpath(name).read_text(encoding="utf-8")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
