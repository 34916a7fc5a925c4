"""A public class or function name is defined once in the packages, so that a search finds one definition."""

from pathlib import Path

from benchmarks.structure import CLASSES, FUNCTIONS, homes_of, modules_of, shared_base_names
from tests.support.source_tree import ROOT

MOST_SHARED_FUNCTIONS = 1
"""`named` of mrl/section.py and of mrl/config/describe.py."""
MOST_SHARED_FILES = 6
"""File names that another file of the same top-level folder has: agents, sections, loops, rollout."""


def listed(homes: dict[str, list[str]]) -> str:
    return "\n".join(f"{name}: {', '.join(files)}" for name, files in homes.items())


def test_a_public_class_name_has_one_home() -> None:
    shared = homes_of(modules_of(ROOT), *CLASSES)
    assert not shared, f"rename all but one of each, or make them private:\n{listed(shared)}"


def test_few_public_function_names_have_more_than_one_home() -> None:
    shared = homes_of(modules_of(ROOT), *FUNCTIONS)
    assert len(shared) <= MOST_SHARED_FUNCTIONS, f"rename all but one of each:\n{listed(shared)}"


def test_few_files_share_a_base_name() -> None:
    shared = shared_base_names(modules_of(ROOT))
    assert sum(map(len, shared.values())) <= MOST_SHARED_FILES, (
        f"rename all but one of each:\n{listed(shared)}"
    )


def test_homes_are_those_of_public_names_at_the_top_level(tmp_path: Path) -> None:
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("class Row: ...\nclass _Own: ...\nasync def read(): ...\ndef main(): ...\n")
    second.write_text(
        "def read(): ...\nclass Row:\n    def text(self): ...\nclass _Own: ...\ndef main(): ...\n"
    )
    modules = {"first": first, "second": second}
    assert homes_of(modules, *CLASSES) == {"Row": ["first.py", "second.py"]}
    assert homes_of(modules, *FUNCTIONS) == {"read": ["first.py", "second.py"]}
