"""Write the pages generated from the code: `python -m mrl.pages FOLDER` (`make docs`: docs/)."""

import sys
from pathlib import Path

from mrl.config import describe
from mrl.observe import metric_names

PAGES = {"settings.md": describe.page, "metrics.md": metric_names.metrics_page}
"""File name -> function that returns its text. Git ignores these files in docs/."""


def write_pages(folder: Path) -> None:
    """Write every page into a folder, which is created if needed."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, page in PAGES.items():
        (folder / name).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    write_pages(Path(sys.argv[1]))
