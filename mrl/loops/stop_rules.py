"""Stop rules: a diagnosis after every step, and what `loop.stop` says is done where a finding stands."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from mrl.config.flat import flat
from mrl.config.root import Config
from mrl.diagnosis.diagnosis_page import markdown
from mrl.diagnosis.findings import Diagnosis
from mrl.diagnosis.rules import diagnose
from mrl.observe import metrics_log
from mrl.observe.metric_curves import Curves

log = logging.getLogger(__name__)


class StopRules:
    """Looks at each row of a start of the run. A finding must stand for `patience` rows of this start, so that a run that is
    resumed after a stop has as many steps for what was changed to act."""

    def __init__(self, config: Config, metrics: Path, say: Callable[[str], None]) -> None:
        """`metrics`: metrics.jsonl, whose rows of earlier starts count as the run's past; `say` takes a message."""
        self._section, self._settings = config.loop.stop, dict(flat(config.model_dump(mode="json")))
        self._metrics, self._say = metrics, say
        self._curves: Curves | None = None
        self._stood: Counter[str] = Counter()
        self._wants_save = False
        self._reason: str | None = None

    def look(self, row: Mapping[str, float]) -> None:
        """A step's row, which is in metrics.jsonl by now."""
        if not self._section.rules:
            return
        if self._curves is None:
            self._curves = Curves(metrics_log.read(self._metrics))
        self._curves.add(row)
        found = diagnose(self._curves, self._settings, self._section.rules)
        self._stood = Counter({f.rule: self._stood[f.rule] + 1 for f in found.findings})
        if any(rows == self._section.patience for rows in self._stood.values()):
            self._act(found)

    def reason(self) -> str | None:
        """Why the run is to stop."""
        return self._reason

    def take_save(self) -> bool:
        """Whether the next step is to be saved; asked once, it is no more."""
        wanted, self._wants_save = self._wants_save, False
        return wanted

    def _act(self, found: Diagnosis) -> None:
        ripe = [f for f in found.findings if self._stood[f.rule] == self._section.patience]
        text = "; ".join(f"{f.rule} since step {f.since}: {f.title}" for f in ripe)
        self._say(f"diagnosis: {text}; see diagnosis.md, and `mrl diagnose` for samples")
        self._write(found)
        self._wants_save = self._section.action == "save"
        if self._section.action == "stop":
            self._reason = f"stopped by loop.stop: {text}"

    def _write(self, found: Diagnosis) -> None:
        folder = self._metrics.parent
        try:
            page = markdown(folder.resolve().name, found, [])
            (folder / "diagnosis.md").write_text(page, encoding="utf-8")
        except OSError as error:
            log.warning("%s/diagnosis.md could not be written: %s", folder, error)
