"""Render a diagnosis as text: what `mrl diagnose` prints and writes to diagnosis.md in the run folder."""

from __future__ import annotations

from collections.abc import Sequence

from mrl.diagnosis.findings import Diagnosis

HEALTHY = "No rule fires. That does not prove health: docs/diagnosis.md explains what each rule checks."


def markdown(name: str, diagnosis: Diagnosis, notes: Sequence[str]) -> str:
    """Return the page of a run; the likeliest cause comes first."""
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


def _block(title: str, texts: Sequence[str]) -> list[str]:
    return [f"{title}:", "", *(f"- {text}" for text in texts), ""] if texts else []
