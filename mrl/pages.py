"""Pages of docs/ that are made from the code: `python -m mrl.pages docs` writes them."""

import sys
from pathlib import Path

from mrl.capacity import page as recipes
from mrl.config import describe
from mrl.observe import metric_names

PAGES = {"settings.md": describe.page, "metrics.md": metric_names.page, "recipes.md": recipes.page}
"""File -> what makes its text."""

if __name__ == "__main__":
    for name, page in PAGES.items():
        Path(sys.argv[1], name).write_text(page(), encoding="utf-8")
