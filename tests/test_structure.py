"""What `python -m benchmarks.structure` counts beside lines: words that people write, and settings."""

from pathlib import Path

from benchmarks.structure import num_settings, pages_of
from mrl.config.describe import settings
from tests.support.source_tree import ROOT


def test_pages_that_are_made_from_the_code_have_no_words(tmp_path: Path) -> None:
    (tmp_path / "docs/design").mkdir(parents=True)
    for name in (
        "README.md",
        "docs/settings.md",
        "docs/metrics.md",
        "docs/concepts.md",
        "docs/design/house.md",
    ):
        (tmp_path / name).write_text("words")
    found = [str(page.relative_to(tmp_path)) for page in pages_of(tmp_path)]
    assert found == ["README.md", "docs/concepts.md", "docs/design/house.md"]


def test_settings_are_counted_without_their_sections() -> None:
    sections = [setting for setting in settings() if setting.form.startswith(": section")]
    assert sections and num_settings(ROOT) == len(settings()) - len(sections)
