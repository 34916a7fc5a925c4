"""Each nightly test has a counterpart in the merge suite, and breakages still match their source."""

import ast
from pathlib import Path

import pytest

from tests.breakages import BREAKAGES, ROOT, Breakage, changed, run
from tests.nightly import NIGHTLY, hidden_markers, is_left_out, is_nightly


def functions_of(test_id: str) -> set[str]:
    """Return the functions of an id's file, or only the named one; empty if the file or it is missing."""
    file, _, selector = test_id.partition("::")
    path = Path(ROOT / file)
    tree = ast.parse(path.read_text()) if path.is_file() else ast.Module([], [])
    functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    named = selector.partition("[")[0]
    return {name for name in functions if name.startswith(named)}


@pytest.mark.parametrize("test_id", NIGHTLY)
def test_what_is_left_to_the_night_is_there_and_has_a_test_that_stays(test_id: str) -> None:
    stays = NIGHTLY[test_id]
    assert functions_of(test_id) and functions_of(stays), f"{test_id} or {stays} is no test"
    assert not is_nightly(stays), f"{stays} is nightly itself"


@pytest.mark.parametrize(
    ("text", "left_out"),
    [
        ("", [False, True, True]),
        ("pytestmark = pytest.mark.integration\n", [True, False, True]),
        ("pytestmark = [pytest.mark.integration, pytest.mark.slow]\n", [True, False, False]),
        ("@pytest.mark.integration\n@pytest.mark.slow\n", [False, False, False]),
    ],
)
def test_a_file_is_collected_for_the_markers_that_it_names(
    text: str, left_out: list[bool], tmp_path: Path
) -> None:
    file = tmp_path / "test_some.py"
    file.write_text(text)
    ends = " and not slow and not gpu"
    runs = (f"not integration{ends}", f"integration{ends}", "slow and not gpu")
    assert [is_left_out(file, run) for run in runs] == left_out
    assert not is_left_out(file, "") and not is_left_out(file, "not slow and not gpu")
    assert hidden_markers(file, {"integration"}) == ([] if text else ["integration"])


def test_a_file_with_a_row_is_collected_at_night() -> None:
    row = next(test_id for test_id in NIGHTLY if "test_megatron_names" in test_id)
    assert not is_left_out(ROOT / row.partition("::")[0], "slow and not gpu")


@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_a_mistake_can_still_be_made(breakage: Breakage) -> None:
    source = (ROOT / breakage.file).read_text()
    assert changed(breakage, source) != source
    for test in breakage.tests:
        assert (ROOT / test).is_dir() or functions_of(test), f"{test} is no test"


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.parametrize("breakage", BREAKAGES, ids=lambda breakage: breakage.name)
def test_the_merge_suite_notices_a_mistake(breakage: Breakage) -> None:
    assert run(breakage), f"no test of {', '.join(breakage.tests)} failed"
