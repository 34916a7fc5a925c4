"""`mrl rewards show`: what the verifiers of a configuration say of one response to one row."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.pick import pick_row
from mrl.data.tokenise import tokenizer_of
from mrl.rewards.pool.explain import Explanation, StageVerdict, explain
from mrl.samples import Prompt, Verdict

SHOWN_CHARS = 300


def verify_row(config: Config, *, row: str, response: str | None, every_stage: bool) -> str:
    """The verdict on a response to a row (its number, or file:line), and with `every_stage` how it came
    about.

    `response` is text, a file that holds it, or "-" for standard input; None is the row's ground truth in a
    box. Raises DataError for a row that is not there or cannot be used, RewardError where a verifier does not
    answer.
    """
    prompt = pick_row(config.data, config.reward, tokenizer_if_there(config), row)
    text = _response(response, prompt)
    found = explain(config.reward, prompt, text)
    lines = _lines(prompt, text, found) if every_stage else iter(())
    return "\n".join([*lines, f"reward {_said(found.verdict)}"])


def tokenizer_if_there(config: Config) -> Any:
    """The tokenizer of the configuration's model, whose template prompts are shown in; None where its folder is not there yet."""
    model = config.model
    if not (Path(model.path) / "config.json").is_file():
        return None
    return tokenizer_of(model)


def _response(response: str | None, prompt: Prompt) -> str:
    if response is None:
        return f"\\boxed{{{prompt.ground_truth}}}"
    if response == "-":
        return sys.stdin.read()
    try:
        is_file = Path(response).is_file()
    except (OSError, ValueError):  # a long text, or one with a zero byte, is no path
        is_file = False
    return Path(response).read_text() if is_file else response


def _lines(prompt: Prompt, response: str, found: Explanation) -> Iterator[str]:
    yield f"row {prompt.row}, domain {prompt.domain}"
    yield f"prompt {_short(prompt.text)}"
    yield f"ground truth {_short(prompt.ground_truth)}"
    yield f"response, {len(response)} characters {_short(response)}"
    for stage in found.stages:
        yield from _of_stage(stage)


def _of_stage(stage: StageVerdict) -> Iterator[str]:
    yield f"verifier {stage.label}"
    for name, text in stage.reading.items():
        yield f"  {name}: {_short(text)}"
    yield f"  {_said(stage.verdict)}"
    if stage.verdict is not None:
        for name, value in stage.verdict.parts.items():
            yield f"    {name}: {value:g}"


def _said(verdict: Verdict | None) -> str:
    if verdict is None:
        return "leaves it to the next stage, or does not apply"
    value = "none" if verdict.value is None else f"{verdict.value:g}"
    return f"{value} ({verdict.kind.value}): {verdict.reason}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!a} ..."
