"""The shipped recipes and the hardware of each."""

from pathlib import Path

from mrl.files import CONFIGS

RECIPES = {
    "qwen3_30b_a3b": (1, "8x80gb"), "qwen3_30b_a3b_tools": (1, "8x80gb"), "gpt_oss_120b": (8, "8x80gb"),
    "glm_4_5_air": (8, "8x80gb"), "qwen3_next_80b_a3b": (4, "8x80gb"), "qwen3_235b_a22b": (16, "8x80gb"),
    "deepseek_v3": (32, "8x141gb"), "kimi_k2": (32, "8x141gb"),
}  # fmt: skip
"""Recipe -> nodes and hardware of its own layout."""

OVER = {
    "calculator_": "calculator",
    "quickstart_": "quickstart",
    "qwen3_30b_a3b_": "qwen3_30b_a3b",
    "tune_": "quickstart",
}
"""Prefix of a file with only the differences -> its base file."""

NOT_FOR_NODES = {
    *("quickstart", "quickstart_dapo", "quickstart_distil", "quickstart_model", "quickstart_ppo"),
    "quickstart_reward_model",
    *("quickstart_gpu", "quickstart_gpu_model"),  # one GPU
    *("calculator", "calculator_model", "gsm8k"),
    *("tune_dpo", "tune_reward_model"),
}
"""The other files of configs/, for a laptop or one GPU."""


def files_of(recipe: str) -> tuple[Path, ...]:
    """Return the files for `mrl train`, in order."""
    below = [name for prefix, name in OVER.items() if recipe.startswith(prefix)]
    return tuple(CONFIGS / f"{name}.yaml" for name in (*below, recipe))


def cases() -> list[tuple[tuple[Path, ...], int, str]]:
    """Return (files, nodes, hardware) of each recipe alone and with its layouts (recipe_NODESx8xMEMORY)."""
    collected = [(files_of(name), *where) for name, where in RECIPES.items()]
    for layout in sorted((CONFIGS / "layouts").glob("*.yaml")):
        name, _, size = layout.stem.rpartition("_")
        nodes, memory = size.split("x", 1)
        collected.append(((*files_of(name), layout), int(nodes), memory))
    return collected
