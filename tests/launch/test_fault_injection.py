"""Which faults can be asked for; test_kills.py shows that they kill."""

import pytest

from mrl.errors import ConfigError
from mrl.launch.commands.fault_injection import InjectedFault


@pytest.mark.parametrize("text", ["update:train-1:2", "save:driver", "reward:reward:10", "sync:vllm-0:1"])
def test_what_can_be_asked(text: str) -> None:
    fault = InjectedFault.parse(text)
    count = text.split(":")[2] if text.count(":") == 2 else "1"
    assert (f"{fault.phase}:{fault.target}", fault.count) == (text.rsplit(f":{count}", 1)[0], int(count))


def test_how_and_when_can_be_asked_too() -> None:
    assert InjectedFault.parse("park:tool:3:pause@0.25") == InjectedFault("park", "tool", 3, "pause", 0.25)


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
