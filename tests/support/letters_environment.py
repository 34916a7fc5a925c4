"""Environment of the package `verifiers`, in the form in which hubs have them: letters counted by a tool."""

from __future__ import annotations

from typing import Any


def count_letters(word: str) -> str:
    """Count the letters of a word.

    Args:
        word: The word.
    """
    return str(len(word))


def load_environment(words: int = 4) -> Any:
    """Return an environment with a tool and two rewards."""
    import datasets
    import verifiers as vf

    rows = [{"question": f"How long is {'x' * n}?", "answer": str(n)} for n in range(1, words + 1)]

    def is_right(completion: Any, answer: str) -> float:
        return float(str(completion[-1]["content"]).strip() == answer)

    async def used_the_tool(state: Any) -> float:
        return float(len(state["trajectory"]) > 1)

    rubric = vf.Rubric(funcs=[is_right, used_the_tool], weights=[1.0, 0.25])
    return vf.ToolEnv(
        dataset=datasets.Dataset.from_list(rows), rubric=rubric, tools=[count_letters], max_turns=4
    )
