"""Texts of a collapsed or attacking policy, of any length, one of each kind."""

from __future__ import annotations

from collections.abc import Iterator

MARKS = (
    "<tool_call>", "</tool_call>", "<think>", "</think>", "<tool_call>{", "\\boxed{", "<answer>", "<", "</",
)  # fmt: skip
RUNS = (
    "\\", "{", "}", "[", "]", '"', "'", " ", "\n", "\t", "9", "-", ".", ",", "$", "x", "é", "👩", "\u200d",
)  # fmt: skip
CALL = '{"name": "say", "arguments": {"text": "x"}}'


def texts(length: int) -> Iterator[tuple[str, str]]:
    """Yield (kind, text) of about that many characters each."""

    def run(part: str, share: float = 1.0) -> str:
        return part * max(1, int(length * share / len(part)))

    for part in (*MARKS, *RUNS):
        yield f"{part!r} again and again", run(part)
        yield f"{part!r} in a call without an end", "<tool_call>" + run(part)
        yield f"{part!r} in a call", "<tool_call>" + run(part) + "</tool_call>"
        yield f"{part!r} as an argument", CALL.replace("x", run(part))
    for left, right in (("<tool_call>", "</tool_call>"), ("<think>", "</think>"), ("[", "]"), ('{"a":', "}")):
        yield f"{left!r} and then {right!r}", run(left, 0.5) + run(right, 0.5)
        yield f"{right!r} and then {left!r}", run(right, 0.5) + run(left, 0.5)
        yield f"{left!r}, {right!r} in turn", run(left + right)
    yield "calls", run(f"<tool_call>{CALL}</tool_call>")
    yield "a list of calls", f"[{run(CALL + ',')}{CALL}]"
    yield "a call in each call", run(f"<tool_call>{CALL[:-1]}")
    yield (
        "many keys",
        '{"name": "say", "arguments": {' + ",".join(f'"k{n}": 1' for n in range(length // 9)) + "}}",
    )
    items = ",".join(f'{{"a": {n}}}, "{n}"' for n in range(length // 18))
    yield "unlike items", f'{{"name": "say", "arguments": {{"items": [{items}]}}}}'
