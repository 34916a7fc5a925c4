"""What a diagnosis says: findings with their evidence, what to change, what speaks against it; and what it cannot tell."""

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
    """What rules look at."""

    curves: Curves
    settings: Mapping[str, str]
    """By dotted names, as mrl.config.flat gives them."""

    @cached_property
    def quality(self) -> Quality:
        """ValueError without validation: a rule that reads it needs `val/reward`."""
        found = quality(self.curves)
        if found is None:
            raise ValueError("the run has no validation")
        return found

    @cached_property
    def parts(self) -> list[str]:
        """Metrics of the reward's named parts, in the reward's order: validation reads the first one."""
        return [name for name in self.curves.names("reward/") if name_in_list(name) == PART]

    def measures(self, name: str) -> bool:
        """Whether some row has a number of this metric; of PART, whether the reward has parts."""
        return bool(self.parts) if name == PART else self.curves.has(name)

    def number(self, setting: str) -> float | None:
        """The setting's value where it is a number."""
        try:
            return float(self.settings.get(setting, ""))
        except ValueError:
            return None


class Lever(NamedTuple):
    """A change that acts on what was found."""

    setting: str
    """Dotted name, or words where it is no setting."""
    now: str
    value: str
    why: str

    @property
    def text(self) -> str:
        change = f"{self.setting}={self.value}" if self.value else self.setting
        return f"{change}{f' (now {self.now})' if self.now else ''}: {self.why}"


@dataclasses.dataclass(frozen=True, slots=True)
class Signs:
    """What a rule sees."""

    sick: np.ndarray
    """[S] bool, looking back only."""
    evidence: list[str]
    """Sentences with metrics and values, of the last row."""
    levers: list[Lever]
    against: list[str]


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """A rule whose signs stand at the last row."""

    rule: str
    title: str
    since: int
    """First step of the signs that stand without a gap."""
    last: int
    """The last step."""
    evidence: list[str]
    levers: list[Lever]
    against: list[str]
    samples: list[str] = dataclasses.field(default_factory=list)
    """Ids in samples.jsonl."""


@dataclasses.dataclass(frozen=True, slots=True)
class Diagnosis:
    """Of one run, up to its last row."""

    last: int
    """The last step; -1 without rows."""
    findings: list[Finding]
    """The likeliest cause first."""
    cannot_tell: dict[str, str]
    """Rule -> what is missing."""
