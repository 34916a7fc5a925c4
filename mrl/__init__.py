"""mrl as a library: `import mrl`, then these names. Importing it imports nothing else; each name's module comes with its first use.

| name | what |
|---|---|
| `load_config(*sources)` | the configuration of YAML files, mappings and `a.b.c=value` words; what every command reads |
| `train(config, callbacks)` | runs or resumes a run to its end, blocking; callbacks see each step's row and may stop it |
| `Run(config)` | the same, read step by step: `for row in run` |
| `evaluate(config, out=...)` | mean reward, avg@k and pass@k of a model folder |
| `load_reward(mapping)`, `score(reward, rows)` | verdicts on any responses, by reward workers alone |
| `MrlError` and the others of mrl/errors.py | what these raise on purpose |

The commands call the same functions. What is not listed here is open to read and may change.
"""

import importlib
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
            "PoolError",
            "WeightSyncError",
            "CheckpointError",
            "DamagedCheckpoint",
            "WorkerLost",
        ),
        "mrl.errors",
    ),
}
"""Name -> the module that has it."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'mrl' has no attribute {name!r}; it has {', '.join(_HOMES)}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted(_HOMES)
