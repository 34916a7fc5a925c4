"""`mrl rewards show`: print the verifiers' verdicts on one response to one row."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mrl.config.root import Config
from mrl.data.find_row import find_row
from mrl.data.hub_models import names_model
from mrl.data.tokenise import load_tokenizer_for
from mrl.rewards.contract import request_for
from mrl.rewards.kinds.ground_truth import ground_truth_of
from mrl.rewards.kinds.registry import reward_kind
from mrl.rewards.kinds.reward_section import RewardSection, RewardSpec
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rewards.pool.tickets import closed_by, skipped_verdict, weighted_verdict
from mrl.rewards.pool.trial import trial_sample
from mrl.samples import Prompt, Verdict

SHOWN_CHARS = 300


@dataclasses.dataclass(frozen=True, slots=True)
class VerifierVerdict:
    """Verdict of one verifier alone."""

    label: str
    reading: Mapping[str, str]
    """What it read and compared, by name."""
    verdict: Verdict | None
    """None if it does not apply."""


def verify_row(config: Config, *, row: str, response: str | None, every_verifier: bool) -> str:
    """Return the verdict on a response to a row, and with `every_verifier` each verifier's part.

    `row`: number in its file, or file:line. `response`: text, a file with it, or "-" for standard input; None
    is the row's ground truth in a box. Raises DataError if the row cannot be used, RewardError if a verifier
    does not respond.
    """
    prompt = find_row(config.data, config.reward, tokenizer_if_there(config), row)
    text = _response(response, prompt)
    verdicts, verdict = explain(config.reward, prompt, text)
    lines = _lines(prompt, text, verdicts) if every_verifier else iter(())
    return "\n".join([*lines, f"reward {_verdict_text(verdict)}"])


def explain(
    section: RewardSection, prompt: Prompt, response: str, *, deadline_seconds: float = 600.0
) -> tuple[list[VerifierVerdict], Verdict]:
    """Run each verifier alone; return their verdicts and the combined one. RewardError after the deadline."""
    parts = section.for_domain(prompt.domain).verifiers()
    lone = {"weight": 1.0, "gate": None, "share": 1.0}
    domains = {
        part.label: RewardSpec().model_copy(update={"parts": (part.model_copy(update=lone),)})
        for part in parts
    }
    verdicts: list[VerifierVerdict] = []
    with RewardPool(section.model_copy(update={"domains": domains}), group_size=1, is_quiet=True) as pool:
        for part in parts:
            truth = ground_truth_of(part, ground_truth=prompt.ground_truth, alone=len(parts) == 1)
            part_prompt = dataclasses.replace(prompt, domain=part.label, ground_truth=truth)
            sample = trial_sample(part_prompt, response)
            (verdict,) = pool.score_all([(sample, part_prompt)], deadline_seconds=deadline_seconds).values()
            kind, shown = reward_kind(part), trial_sample(prompt, response)
            request = request_for(shown, prompt, ground_truth=truth, deadline_seconds=part.deadline_seconds)
            verdicts.append(
                VerifierVerdict(part.label, kind.reading(request), verdict if verdict.applies else None)
            )
    by_label = {part_verdict.label: part_verdict.verdict for part_verdict in verdicts}
    if closed := closed_by(parts, by_label):
        by_label |= {part.label: skipped_verdict(part, closed) for part in parts if part.gate is None}
    return verdicts, weighted_verdict(parts, by_label)


def tokenizer_if_there(config: Config) -> Any:
    """Return the model's tokenizer, to show prompts in its template; None without the model's folder."""
    model = config.model
    if not names_model(model.path):
        return None
    return load_tokenizer_for(model)


def _response(response: str | None, prompt: Prompt) -> str:
    if response is None:
        return f"\\boxed{{{prompt.ground_truth}}}"
    if response == "-":
        return sys.stdin.read()
    try:
        is_file = Path(response).is_file()
    except (OSError, ValueError):  # a long text, or one with a zero byte, is not a path
        is_file = False
    return Path(response).read_text() if is_file else response


def _lines(prompt: Prompt, response: str, verdicts: list[VerifierVerdict]) -> Iterator[str]:
    yield f"row {prompt.row}, domain {prompt.domain}"
    yield f"prompt {_short(prompt.text)}"
    yield f"ground truth {_short(prompt.ground_truth)}"
    yield f"response, {len(response)} characters {_short(response)}"
    for part in verdicts:
        yield f"verifier {part.label}"
        for name, text in part.reading.items():
            yield f"  {name}: {_short(text)}"
        yield f"  {_verdict_text(part.verdict)}"
        if part.verdict is not None:
            for name, value in part.verdict.parts.items():
                yield f"    {name}: {value:g}"


def _verdict_text(verdict: Verdict | None) -> str:
    if verdict is None:
        return "does not apply"
    value = "none" if verdict.value is None else f"{verdict.value:g}"
    return f"{value} ({verdict.kind.value}): {verdict.reason}"


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    return ascii(text) if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]!a} ..."
