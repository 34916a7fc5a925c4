"""`mrl rewards show`: what the verifiers of a configuration say of one response to one row."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.pick import pick_row
from mrl.data.tokenise import tokenizer_of
from mrl.rewards.contract import request_for
from mrl.rewards.kinds.ground_truth import ground_truth_of
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection, RewardSpec
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.tickets import closed_by, not_asked, weighted_verdict
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Verdict

SHOWN_CHARS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class VerifierVerdict:
    """What one verifier says by itself."""

    label: str
    reading: Mapping[str, str]
    """What it looked at and what that was compared with, by what it is."""
    verdict: Verdict | None
    """None where it does not apply."""


def verify_row(config: Config, *, row: str, response: str | None, every_verifier: bool) -> str:
    """The verdict on a response to a row (its number, or file:line), and with `every_verifier` how it came
    about.

    `response` is text, a file that holds it, or "-" for standard input; None is the row's ground truth in a
    box. Raises DataError for a row that is not there or cannot be used, RewardError where a verifier does not
    answer.
    """
    prompt = pick_row(config.data, config.reward, tokenizer_if_there(config), row)
    text = _response(response, prompt)
    found, verdict = explain(config.reward, prompt, text)
    lines = _lines(prompt, text, found) if every_verifier else iter(())
    return "\n".join([*lines, f"reward {_said(verdict)}"])


def explain(
    section: RewardSection, prompt: Prompt, response: str, *, deadline_seconds: float = 600.0
) -> tuple[list[VerifierVerdict], Verdict]:
    """Ask each verifier of the prompt's domain by itself; return what each one says, and what that adds up to. Raises RewardError past
    the deadline."""
    parts = section.for_domain(prompt.domain).verifiers()
    lone = {"weight": 1.0, "gate": None, "share": 1.0}
    domains = {
        part.label: RewardSpec().model_copy(update={"parts": (part.model_copy(update=lone),)})
        for part in parts
    }
    found: list[VerifierVerdict] = []
    with RewardPool(section.model_copy(update={"domains": domains}), group_size=1, is_quiet=True) as pool:
        for part in parts:
            truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
            own = dataclasses.replace(prompt, domain=part.label, ground_truth=truth)
            sample = trial_sample(own, response)
            (verdict,) = pool.score_all([(sample, own)], deadline_seconds=deadline_seconds).values()
            kind, asked = reward_kind(part), trial_sample(prompt, response)
            request = request_for(asked, prompt, ground_truth=truth, deadline_seconds=part.deadline_seconds)
            found.append(
                VerifierVerdict(part.label, kind.reading(request), verdict if verdict.applies else None)
            )
    answers = {each.label: each.verdict for each in found}
    if closed := closed_by(parts, answers):
        answers |= {part.label: not_asked(part, closed) for part in parts if part.gate is None}
    return found, weighted_verdict(parts, answers)


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


def _lines(prompt: Prompt, response: str, found: list[VerifierVerdict]) -> Iterator[str]:
    yield f"row {prompt.row}, domain {prompt.domain}"
    yield f"prompt {_short(prompt.text)}"
    yield f"ground truth {_short(prompt.ground_truth)}"
    yield f"response, {len(response)} characters {_short(response)}"
    for each in found:
        yield f"verifier {each.label}"
        for name, text in each.reading.items():
            yield f"  {name}: {_short(text)}"
        yield f"  {_said(each.verdict)}"
        if each.verdict is not None:
            for name, value in each.verdict.parts.items():
                yield f"    {name}: {value:g}"


def _said(verdict: Verdict | None) -> str:
    if verdict is None:
        return "does not apply"
    value = "none" if verdict.value is None else f"{verdict.value:g}"
    return f"{value} ({verdict.kind.value}): {verdict.reason}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!a} ..."
