"""What the pages name is there: files, folders and links."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.pages import write_pages
from tests.support.source_tree import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "examples").rglob("*.md"), *(ROOT / "docs").rglob("*.md")])
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


def site(folder: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Reads the site's pages and resolves their links as `make docs` does, writing no page."""
    words = ["-qW", "--keep-going", "-b", "dummy", "-c", str(ROOT / "docs"), str(folder), str(out)]
    return subprocess.run(
        [sys.executable, "-m", "sphinx", *words], capture_output=True, text=True, timeout=400
    )


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    """Of a copy whose docs/ has the pages made from the code, as `make docs` writes them."""
    source = tmp_path / "source"
    source.mkdir()
    for path in ROOT.iterdir():
        if path.name in ("docs", "examples"):
            shutil.copytree(path, source / path.name)
        elif path.suffix == ".md":
            shutil.copy(path, source)
        elif not path.name.startswith("."):
            (source / path.name).symlink_to(path)
    write_pages(source / "docs")
    built = site(source, tmp_path / "out")
    assert (built.returncode, built.stderr) == (0, "")
