"""What a fault drill may say; that drills kill as they say is test_kills.py's."""

import pytest

from mrl.errors import ConfigError
from mrl.launch.commands.fault_injection import Drill


@pytest.mark.parametrize("text", ["update:train-1:2", "save:driver", "reward:reward:10", "sync:vllm-0:1"])
def test_what_can_be_asked(text: str) -> None:
    drill = Drill.parse(text)
    count = text.split(":")[2] if text.count(":") == 2 else "1"
    assert (f"{drill.phase}:{drill.victim}", drill.count) == (text.rsplit(f":{count}", 1)[0], int(count))


@pytest.mark.parametrize(
    "text",
    [
        "update",
        "lunch:driver:1",
        "update:train:1",
        "update:reward-1:1",
        "update:train-x",
        "save:driver:soon",
    ],
)
def test_what_cannot_is_said_before_workers_start(text: str) -> None:
    with pytest.raises(ConfigError, match="PHASE:VICTIM:COUNT"):
        Drill.parse(text)
