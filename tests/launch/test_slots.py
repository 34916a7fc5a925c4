"""A run on fewer slots than it was written for."""

from pathlib import Path

import pytest

from mrl.config.load import load_config
from mrl.config.root import Config
from mrl.errors import ConfigError
from mrl.launch.commands.check import check_elastic
from mrl.launch.slots import main, overrides_for, smaller
from tests.launch.tiny_runs import ROOT

FOUR = "training.layout={ep: 2, dp: 4}"
ELASTIC = "launch.elastic=[[training.layout.dp=2], [training.layout.dp=1, training.layout.ep=1]]"


def config(*words: str) -> Config:
    return load_config(str(ROOT / "configs/quickstart.yaml"), FOUR, "rollout.tp=1", *words)


@pytest.mark.parametrize(
    ("num_slots", "words"),
    [
        (5, ()),
        (4, ()),
        (3, ("training.layout.dp=2",)),
        (2, ("training.layout.dp=2",)),
        (1, ("training.layout.dp=1", "training.layout.ep=1")),
        (0, ()),  # preflight says what lacks
    ],
)
def test_the_first_entry_that_fits_is_taken(num_slots: int, words: tuple[str, ...]) -> None:
    assert overrides_for(config(ELASTIC), num_slots) == words


def test_a_run_that_went_on_smaller_reads_the_same_entries() -> None:
    before = config(ELASTIC)
    after = config(ELASTIC, *overrides_for(before, 2))
    assert after.num_slots == 2 and overrides_for(after, 2) == ()
    assert [made.num_slots for _, made in smaller(after)] == [2, 1]


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ("[[training.layout.dq=2]]", r"launch.elastic.0 \(training.layout.dq=2\): .*did you mean 'dp'"),
        (
            "[[training.layout.dp=2], [training.layout.dp=2]]",
            "elastic.1 .* needs 2 slots, the entry before it 2",
        ),
        ("[[training.layout.dp=3]]", "launch.elastic.0"),  # ep 2 does not divide it
    ],
)
def test_an_entry_that_cannot_be_is_refused_by_its_number(entries: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        list(smaller(config(f"launch.elastic={entries}")))


def test_the_checks_of_a_start_look_at_every_entry(tiny_model: Path) -> None:
    words = [f"model.path={tiny_model}", "launch.slots_per_node=1"]
    check_elastic(config(ELASTIC, *words))
    with pytest.raises(
        ConfigError, match=r"launch.elastic, training.layout.dp=3 training.layout.ep=1 rollout.tp=3: "
    ):
        check_elastic(
            config("launch.elastic=[[training.layout.dp=3, training.layout.ep=1, rollout.tp=3]]", *words)
        )


def test_the_batch_script_is_told_the_words(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = str(ROOT / "configs/quickstart.yaml")
    assert main([path, FOUR, "rollout.tp=1", ELASTIC, "launch.slots_per_node=1", "--nodes", "1"]) == 0
    captured = capsys.readouterr()
    assert captured.out.split() == ["training.layout.dp=1", "training.layout.ep=1"]
    assert "1 of 4 slots available" in captured.err
    assert main([path, FOUR, "rollout.tp=1", "--nodes", "1"]) == 0
    assert capsys.readouterr().out == ""
    assert main([path, "launch.elastik=3", "--nodes", "1"]) == 2
