"""Score any responses with reward workers and a `reward` section, without an engine."""

import mrl

reward = mrl.load_reward({"kind": "maths", "domains": {"thoughts": {"kind": "format"}}})
rows = [
    {"response": "37 + 58 = \\boxed{95}", "ground_truth": "95"},
    {"response": "37 + 58 = \\boxed{85}", "ground_truth": "95"},
    {"response": "<think>37 + 58</think> 95", "domain": "thoughts"},
]

if __name__ == "__main__":  # reward workers are processes
    for row, verdict in zip(rows, mrl.score(reward, rows), strict=True):
        print(verdict.value, row["response"], "-", verdict.reason)
    try:
        mrl.load_config("configs/quickstart.yaml", {"loop": {"stepz": 3}}, "run.name=mine")
    except mrl.ConfigError as error:
        print(error)
