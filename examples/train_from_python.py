"""Train from Python on the task of `reversed_words`, stop by your own rule, and plot the rewards.

The cells (`# %%`) run one by one in an editor or a notebook, all together on the command line. The same
configuration resumes where it stopped. `mrl.train(config, callbacks)` does the same without the loop.
"""

# %% Configuration: the files of examples/README.md first
import sys

import plotly.graph_objects as go

import mrl

words = [word for word in sys.argv[1:] if "=" in word]
config = mrl.load_config("examples/reversed_words/config.yaml", {"loop": {"steps": 50}}, *words)

# %% Training: reading the first row starts the engines
rewards: dict[int, float] = {}
if __name__ == "__main__":
    with mrl.Run(config) as run:
        for row in run:
            if (reward := row.metrics.get("reward/mean")) is not None:
                rewards[row.step] = reward
                print(f"step {row.step}: reward {reward:.2f}")
            if row.step == 2 or (reward or 0.0) > 0.9:
                run.stop("good enough")
    print(f"ended: {run.ended}, in {run.folder}")

# %% Picture
if __name__ == "__main__":
    figure = go.Figure(go.Scatter(x=list(rewards), y=list(rewards.values())))
    figure.update_layout(xaxis_title="step", yaxis_title="mean reward")
    figure.write_html(f"{run.folder}/rewards.html")
