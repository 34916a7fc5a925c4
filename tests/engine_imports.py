"""What the fork server of the tests' engines (tests/engines.py) imports: as a run's own does, for eager engines of one thread."""

import gc
from pathlib import Path

from mrl.config.load import load_config
from mrl.rollout.preload import preload

gc.disable()  # a fifth of the time that imports take
preload(load_config(str(Path(__file__).parents[1] / "configs/quickstart.yaml")))
gc.collect()
gc.freeze()
gc.enable()
