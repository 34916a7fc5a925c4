"""Train from Python: the task of `reversed_words`, watched step by step and stopped by your own rule.

The same configuration resumes where it stopped. `mrl.train(config, callbacks)` is the same without the loop.
"""

import sys

import mrl

config = mrl.load_config("examples/reversed_words/config.yaml", {"loop": {"steps": 50}}, *sys.argv[1:])

if __name__ == "__main__":
    with mrl.Run(config) as run:
        for row in run:
            print(f"step {row.step}: reward {row.metrics.get('reward/mean', 0.0):.2f}")
            if row.step == 2 or row.metrics.get("reward/mean", 0.0) > 0.9:
                run.stop("good enough")
    print(f"ended: {run.ended}, in {run.folder}")
