"""Faults that cannot be asked for; test_soak.py has those that can, test_kills.py shows that they kill."""

import pytest

from mrl.errors import ConfigError
from mrl.launch.commands.fault_injection import InjectedFault


@pytest.mark.parametrize(
    "text",
    [
        "update",
        "lunch:driver:1",
        "update:train:1",
        "update:reward-1:1",
        "update:train-x",
        "save:driver:soon",
        "generate:guest-1",
        "generate:guest:1:drown@1",
        "generate:guest:1:kill",
        "generate:guest:1:kill@soon",
    ],
)
def test_what_cannot_is_said_before_workers_start(text: str) -> None:
    with pytest.raises(ConfigError, match="PHASE:TARGET:COUNT"):
        InjectedFault.parse(text)
