"""Slurm's node lists by table; test_slurm.py compares the table with `scontrol show hostnames`."""

import pytest

from mrl.errors import ConfigError
from mrl.launch.cluster.slurm_nodes import expand, main
from tests.support.node_lists import TABLE


@pytest.mark.parametrize(("nodes", "names"), TABLE)
def test_table(nodes: str, names: list[str]) -> None:
    assert expand(nodes) == names


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("", "empty name"),
        ("n1,", "empty name"),
        ("n[1-2", "open bracket"),
        ("n1-2]", "do not pair"),
        ("n[[1]]", "do not pair"),
        ("n[a-b]", "neither a number nor a range"),
        ("n[3-1]", "runs backwards"),
        ("n[]", "neither a number nor a range"),
        ("n[1-999999]", "too long"),
        ("r[1-1000]n[1-1000]", "more than"),
    ],
)
def test_bad_lists_are_refused(nodes: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        expand(nodes)


def test_the_program_prints_a_name_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["n[1-2]", "m3"]) == 0
    assert capsys.readouterr().out == "n1\nn2\nm3\n"
