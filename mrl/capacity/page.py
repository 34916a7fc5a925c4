"""docs/recipes.md: what `mrl plan` says of every large recipe on its own hardware."""

from __future__ import annotations

from pathlib import Path

from mrl.capacity.hardware import load_hardware
from mrl.capacity.report import capacity_report
from mrl.config.load import load
from mrl.files import CONFIGS

RECIPES = {
    "qwen3_30b_a3b": "8x80gb",
    "gpt_oss_120b": "8x80gb",
    "glm_4_5_air": "8x80gb",
    "qwen3_next_80b_a3b": "8x80gb",
    "qwen3_235b_a22b": "8x80gb",
    "deepseek_v3": "8x141gb",
    "kimi_k2": "8x141gb",
}
"""Recipe -> the hardware that its own layout is for."""

HEAD = """# Recipes

What `mrl plan` says of the large recipes, made from the code by `make docs`. **None of them has run yet**: memory is counted, times are estimated
from the assumptions of `configs/hardware/*.yaml` (edit a copy for your machines and pass it as `--hardware FILE`). The plan refuses what
`mrl train` would refuse, and a wait that outlasts its deadline. Layouts for other sizes are in `configs/layouts/`, named after the recipe, nodes
and memory they are for: `mrl plan configs/qwen3_30b_a3b.yaml configs/layouts/qwen3_30b_a3b_16x8x80gb.yaml --hardware 8x80gb`.
"""


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *(_section(name, hardware) for name, hardware in RECIPES.items())])


def _section(name: str, hardware: str) -> str:
    config = load([CONFIGS / f"{name}.yaml"])
    published = config.model.model_copy(
        update={"path": Path(config.model.path).name}
    )  # not a folder of weights
    config = config.model_copy(update={"model": published})
    table = capacity_report(config, load_hardware(hardware)).table()
    command = f"mrl plan configs/{name}.yaml --hardware {hardware}"
    return f"## {name}\n\n`{command}`\n\n```\n{table}\n```\n"
