"""The commands in the head of a large recipe are those that start it on the nodes of its own layout."""

import re

import pytest

from mrl.capacity.page import RECIPES
from mrl.config.load import load
from mrl.files import CONFIGS


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipes_head_asks_for_the_nodes_of_its_layout(name: str) -> None:
    file = CONFIGS / f"{name}.yaml"
    text, world = file.read_text(), load([file]).training.layout.world_size
    (submitted,) = re.findall(r"sbatch --nodes=(\d+) .*slurm/\S+ (\S+)", text)
    assert submitted == (str(world // 8), f"configs/{name}.yaml")
    (planned,) = re.findall(r"mrl plan +(\S+) --hardware (\S+)", text)
    assert planned == (f"configs/{name}.yaml", RECIPES[name])


@pytest.mark.parametrize("name", RECIPES)
def test_a_run_that_is_told_to_leave_has_time_for_a_step(name: str) -> None:
    """A job of several nodes gets its signal as long before its time limit as one phase may take."""
    file = CONFIGS / f"{name}.yaml"
    config = load([file])
    signals = re.findall(r"sbatch .*--signal=B:USR1@(\d+)", file.read_text())
    if config.training.layout.world_size > 8:
        assert [int(seconds) for seconds in signals] == [config.loop.phase_deadline_seconds]
