"""mrl as a library: `import mrl`, then use these names; each name's module is imported on first use.

| name | purpose |
|---|---|
| `load_config(*sources)` | load the configuration from YAML files, mappings and `a.b.c=value` words |
| `train(config, callbacks)` | run or resume to the end, blocking; callbacks see each row and may stop it |
| `Run(config)` | the same, step by step: `for row in run` |
| `evaluate(config, out=...)` | mean reward, avg@k and pass@k of a model folder |
| `load_reward(mapping)`, `score(reward, rows)` | verdicts on any responses, with reward workers only |
| `__version__` | version of the installed package |
| `MrlError` and the others of mrl/errors.py | errors that these raise on purpose |

The commands call the same functions. Anything not listed here is readable but may change.
"""

import importlib
import importlib.metadata
from typing import Any

_HOMES = {
    "load_config": "mrl.config.load",
    "load_reward": "mrl.config.load",
    "Config": "mrl.config.root",
    "train": "mrl.launch.commands.train",
    "Run": "mrl.launch.commands.train",
    "StepRow": "mrl.launch.commands.train",
    "evaluate": "mrl.launch.commands.evaluate",
    "score": "mrl.rewards.pool.score_offline",
    "Verdict": "mrl.samples",
    **dict.fromkeys(
        (
            "MrlError",
            "ConfigError",
            "DataError",
            "RewardError",
            "NumericError",
            "RolloutError",
            "PeerLost",
            "RoutingError",
            "RolloutBufferError",
            "WeightSyncError",
            "CheckpointError",
            "DamagedCheckpoint",
            "WorkerLost",
        ),
        "mrl.errors",
    ),
}
"""Name -> its module."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.metadata.version("mrl")
    if name not in _HOMES:
        raise AttributeError(f"module 'mrl' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
