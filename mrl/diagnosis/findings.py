"""Types of a diagnosis: findings with evidence, changes and counter-evidence, and what it cannot tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import cached_property
from typing import NamedTuple

import numpy as np

from mrl.diagnosis.quality import Quality, quality
from mrl.observe.metric_curves import Curves
from mrl.observe.metric_names import name_in_list

PART = "reward/<part>"


@dataclasses.dataclass(frozen=True)
class DiagnosedRun:
    """Run that the rules examine."""

    curves: Curves
    settings: Mapping[str, str]
    """Settings by dotted name, as returned by mrl.config.flat."""

    @cached_property
    def quality(self) -> Quality:
        """Quality of the run; ValueError without validation, so a rule that reads it needs `val/reward`."""
        result = quality(self.curves)
        if result is None:
            raise ValueError("the run has no validation")
        return result

    @cached_property
    def parts(self) -> list[str]:
        """Metrics of the reward's named parts, in order; validation reads the first."""
        return [name for name in self.curves.names("reward/") if name_in_list(name) == PART]

    def measures(self, name: str) -> bool:
        """Return True if some row has a number of this metric; for PART, if the reward has parts."""
        return bool(self.parts) if name == PART else self.curves.has(name)

    def number(self, setting: str) -> float | None:
        """Return the setting's value if it is a number."""
        try:
            return float(self.settings.get(setting, ""))
        except ValueError:
            return None


class Lever(NamedTuple):
    """Change that acts on a finding."""

    setting: str
    """Dotted name, or words if it is not a setting."""
    now: str
    value: str
    why: str

    @property
    def text(self) -> str:
        change = f"{self.setting}={self.value}" if self.value else self.setting
        return f"{change}{f' (now {self.now})' if self.now else ''}: {self.why}"


@dataclasses.dataclass(frozen=True, slots=True)
class Signs:
    """Result of one rule."""

    present: np.ndarray
    """[S] bool, from earlier rows only."""
    evidence: list[str]
    """Sentences with metrics and values of the last row."""
    levers: list[Lever]
    against: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """Rule whose signs are present at the last row."""

    rule: str
    title: str
    since: int
    """First step from which the signs are present without a gap."""
    last: int
    """Last step."""
    evidence: list[str]
    levers: list[Lever]
    against: list[str]
    samples: list[str] = dataclasses.field(default_factory=list)
    """Ids in samples.jsonl."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Diagnosis of one run, up to its last row."""

    last: int
    """Last step; -1 without rows."""
    findings: list[Finding]
    """Findings, the likeliest cause first."""
    cannot_tell: dict[str, str]
    """Rule -> what is missing."""
