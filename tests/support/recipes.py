"""The shipped recipes and the hardware of each."""

from collections.abc import Iterator
from pathlib import Path

from mrl.files import CONFIGS

RECIPES = {
    "qwen3_30b_a3b": (1, "8x80gb"), "qwen3_30b_a3b_tools": (1, "8x80gb"), "gpt_oss_120b": (8, "8x80gb"),
    "glm_4_5_air": (8, "8x80gb"), "qwen3_next_80b_a3b": (4, "8x80gb"), "qwen3_235b_a22b": (16, "8x80gb"),
    "deepseek_v3": (32, "8x141gb"), "kimi_k2": (32, "8x141gb"),
    "qwen3_235b_a22b_131k": (32, "8x80gb"), "glm_4_5_air_131k": (16, "8x80gb"),
}  # fmt: skip
"""Recipe -> nodes and hardware of its own layout."""

ONE_GPU = {"qwen2_5_0_5b": "1x80gb", "llama_3_2_1b": "1x80gb"}
"""Recipe of a pretrained model on one GPU -> its hardware."""

OVER = {
    "calculator_": "calculator",
    "glm_4_5_air_": "glm_4_5_air",
    "quickstart_": "quickstart",
    "qwen3_235b_a22b_": "qwen3_235b_a22b",
    "qwen3_30b_a3b_": "qwen3_30b_a3b",
    "tune_": "quickstart",
}
"""Prefix of a file with only the differences -> its base file."""

NOT_FOR_NODES = {
    *("quickstart", "quickstart_dapo", "quickstart_distil", "quickstart_model", "quickstart_ppo"),
    "quickstart_reward_model",
    *("quickstart_gpu", "quickstart_gpu_model"),  # one GPU
    *ONE_GPU,
    *("calculator", "calculator_model", "gsm8k", "smollm2"),
    *("tune_dpo", "tune_reward_model"),
}
"""The other files of configs/, for a laptop or one GPU."""


def files_of(recipe: str) -> tuple[Path, ...]:
    """Return the files for `mrl train`, in order."""
    below = [name for prefix, name in OVER.items() if recipe.startswith(prefix)]
    return tuple(CONFIGS / f"{name}.yaml" for name in (*below, recipe))


def cases() -> list[tuple[tuple[Path, ...], int, str]]:
    """Return (files, nodes, hardware) of each recipe for nodes, alone and with its layouts
    (recipe_NODESx8xMEMORY)."""
    collected = [(files_of(name), *where) for name, where in RECIPES.items()]
    for layout, name, nodes, hardware in _layouts():
        if name not in ONE_GPU:
            collected.append(((*files_of(name), layout), nodes, hardware))
    return collected


def one_gpu_cases() -> list[tuple[tuple[Path, ...], str]]:
    """Return (files, hardware) of each recipe for one GPU, alone and with its layouts
    (recipe_1x1xMEMORY)."""
    collected = [(files_of(name), hardware) for name, hardware in ONE_GPU.items()]
    for layout, name, _, hardware in _layouts():
        if name in ONE_GPU:
            collected.append(((*files_of(name), layout), hardware))
    return collected


def _layouts() -> Iterator[tuple[Path, str, int, str]]:
    """Yield (file, recipe, nodes, hardware) of each layout and record, from its name."""
    for layout in sorted([*(CONFIGS / "layouts").glob("*.yaml"), *(CONFIGS / "records").glob("*.yaml")]):
        name, _, size = layout.stem.rpartition("_")
        nodes, hardware = size.split("x", 1)
        yield layout, name, int(nodes), hardware
