"""Good rows of every supported format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

CALL = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "tool_call_id": "c1", "content": "2"},
]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        },
    }
]


def rows_of(shape: str, count: int = 8) -> list[dict[str, Any]]:
    make: dict[str, Callable[[int], dict[str, Any]]] = {
        "plain": lambda n: {"prompt": f"{n}+{n}=", "answer": str(2 * n), "domain": "sums", "tag": "even"},
        "verl": lambda n: {"prompt": TALK[:1] + [{"role": "user", "content": f"{n}?"}],
            "reward_model": {"ground_truth": str(n)}, "data_source": "s"},
        "trl": lambda n: {"prompt": f"what is {n}?", "solution": n, "level": n},
        "chat": lambda n: {"prompt": [*TALK, {"role": "user", "content": str(n)}], "answer": str(n),
            "tools": TOOLS, "chat_template_kwargs": {"enable_thinking": False}},
        "messages": lambda n: {"messages": [
            {"role": role, "content": [{"type": "text", "text": f"{role} {n}"}]}
            for role in ("user", "assistant")], "ground_truth": "1"},
        "gsm8k": lambda n: {"question": f"{n}?", "answer": f"so\n#### {n}"},
        "math": lambda n: {"problem": f"${n}$", "solution": f"\\boxed{{{n}}}", "level": "Level 1"},
        "pairs": lambda n: {"prompt": f"{n}?", "chosen": f"{n}", "rejected": f"no {n}", "margin": 0.5,
            "chosen_probability": 0.9},
        "tune": lambda n: {"prompt": [{"role": "user", "content": f"{n}?"}], "response": "an answer",
            "tools": TOOLS},
    }  # fmt: skip
    return [make[shape](n) for n in range(1, count + 1)]


PROMPTS = ("plain", "verl", "trl", "chat", "messages", "gsm8k", "math")
