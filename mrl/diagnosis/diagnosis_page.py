"""A diagnosis in words: diagnosis.md of the run folder, a screen of a terminal, and JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mrl.diagnosis.findings import Diagnosis, Finding

HEALTHY = "No rule fires. That is no proof of health: docs/diagnosis.md says what each one looks at."


def tree(diagnosis: Diagnosis, notes: Sequence[str]) -> dict[str, Any]:
    """JSON values."""
    return {
        "last_step": diagnosis.last,
        "findings": [finding.tree() for finding in diagnosis.findings],
        "cannot_tell": diagnosis.cannot_tell,
        "notes": list(notes),
    }


def markdown(name: str, diagnosis: Diagnosis, notes: Sequence[str]) -> str:
    """The page of a run; the likeliest cause comes first."""
    lines = [f"# Diagnosis of {name}", "", f"Up to step {diagnosis.last}.", ""]
    lines += [f"- {note}" for note in notes]
    if not diagnosis.findings:
        lines += [HEALTHY]
    for finding in diagnosis.findings:
        lines += ["", f"## {finding.title}", "", f"`{finding.rule}`, since step {finding.since}.", ""]
        lines += _block("Seen", finding.evidence)
        lines += _block("To change", [lever.text for lever in finding.levers])
        lines += _block("Against it", finding.against)
        lines += _block("Samples", [f"`{sample}`" for sample in finding.samples])
    if diagnosis.cannot_tell:
        lines += ["", "## Cannot tell", ""]
        lines += [f"- `{rule}`: {why}" for rule, why in diagnosis.cannot_tell.items()]
    return "\n".join(lines).rstrip() + "\n"


def diagnosis_text(name: str, diagnosis: Diagnosis, notes: Sequence[str]) -> str:
    """The same on one screen: the first finding whole, of the others what and since when."""
    lines = [f"{name}: up to step {diagnosis.last}", *notes]
    if not diagnosis.findings:
        lines.append(HEALTHY)
    for place, finding in enumerate(diagnosis.findings):
        lines.append(f"{finding.rule} since step {finding.since}: {finding.title}")
        lines += _details(finding) if place == 0 else []
    if diagnosis.cannot_tell:
        lines.append("cannot tell:")
        lines += [f"  {rule}: {why}" for rule, why in diagnosis.cannot_tell.items()]
    return "\n".join(lines)


def _details(finding: Finding) -> list[str]:
    lines = [f"  seen: {text}" for text in finding.evidence]
    lines += [f"  change: {lever.text}" for lever in finding.levers]
    lines += [f"  against: {text}" for text in finding.against]
    return lines + ([f"  samples: {', '.join(finding.samples)}"] if finding.samples else [])


def _block(title: str, texts: Sequence[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {text}" for text in texts), ""] if texts else []
