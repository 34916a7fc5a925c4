"""What the pages name is there: files, folders and links."""

import re
from pathlib import Path

import pytest

from tests.support.source_tree import ROOT

PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
    ]
)
PLACE = re.compile(
    r"\b(?:mrl|models|resharding|launch|configs|docs|tests|benchmarks|examples|slurm)/[\w./-]*\w/?"
)
LINK = re.compile(r"\]\((?!https?://)([^)#]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_and_folders_that_a_page_names_are_there(page: Path) -> None:
    text = page.read_text()
    quoted = " ".join(re.findall(r"`[^`\n]+`", text))
    places = {place for place in PLACE.findall(quoted) if "..." not in place}
    absent = {place for place in places if not (ROOT / place).exists() and not list(ROOT.glob(f"{place}*"))}
    absent |= {link for link in LINK.findall(text) if not (page.parent / link).exists()}
    assert not absent
