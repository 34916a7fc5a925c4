"""Append-only file of a judge's verdicts, so that a resumed run repeats no question and keeps its budget.

One JSON line per answered call: {"judge", "tokens"}, and {"key", "value"} if the reply contained a verdict.
`judge` is the digest of all that decides the verdict, `key` the digest of the question.
"""

from __future__ import annotations

import datetime
import hashlib
import itertools
import json
import os
import secrets
from pathlib import Path
from typing import Any

from mrl.rewards.contract import NoVerdict
from mrl.rewards.reward_part import ServerSection

FILE, SECRET, DATE = "judged.jsonl", "secret", "date"
MAX_CACHED_VERDICTS = 1 << 21
"""Verdicts kept in memory, about 256 bytes each of a process's 2 GiB; above it the older half is dropped."""


def json_digest(*values: Any) -> str:
    """Return the first 128 bits of the SHA-256 of JSON values, as hex."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


class JudgeCache:
    """Verdicts of one judge; without a folder they are kept in memory only."""

    def __init__(self, folder: Path | None, judge: str) -> None:
        self._judge = judge
        self._values: dict[str, float] = {}
        self.calls = self.tokens = 0
        """Answered calls and their tokens, including those before a resume."""
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / FILE
            self._load(self._file)
        self.secret = _secret(folder)
        """Random hex of the run that no policy knows."""

    def find(self, key: str) -> float | None:
        """Return the cached value of a question; None if there is none."""
        return self._values.get(key)

    def record(self, tokens: int, key: str | None = None, value: float | None = None) -> None:
        """Record an answered call, with the question's key and value if the reply contained a verdict."""
        line: dict[str, Any] = {"judge": self._judge, "tokens": tokens}
        if key is not None:
            line |= {"key": key, "value": value}
        self._count(line)
        if self._file is None:
            return
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:  # one write, so that lines of concurrent judges do not interleave
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _load(self, file: Path) -> None:
        if not file.is_file():
            return
        judge = json.dumps(self._judge).encode()
        with file.open("rb") as lines:
            for text in lines:
                if judge in text and (line := _line(text)).get("judge") == self._judge:
                    self._count(line)

    def _count(self, line: dict[str, Any]) -> None:
        self.calls += 1
        self.tokens += int(line.get("tokens", 0))
        if "key" in line:
            self._values[line["key"]] = float(line["value"])
            if len(self._values) > MAX_CACHED_VERDICTS:
                self._values = dict(itertools.islice(self._values.items(), MAX_CACHED_VERDICTS // 2, None))


def _line(text: bytes) -> dict[str, Any]:
    """Parse a line; return {} for one that a killed process left incomplete."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def check_budget(server: ServerSection, ledger: JudgeCache) -> None:
    """Raise NoVerdict if the run has used up `max_calls`."""
    if server.max_calls is not None and ledger.calls >= server.max_calls:
        raise NoVerdict(f"the run's budget is spent: max_calls = {server.max_calls}")


def first_date(folder: Path | None) -> datetime.date:
    """Return the day when the run first made its judges, which chat templates write as today's date."""
    return datetime.date.fromisoformat(_stored(folder, DATE, datetime.date.today().isoformat()))


def _secret(folder: Path | None) -> str:
    return _stored(folder, SECRET, secrets.token_hex(16))


def _stored(folder: Path | None, name: str, first: str) -> str:
    """Return the run's text in the file `name`, created with `first`; processes that start together agree."""
    if folder is None:
        return first
    folder.mkdir(parents=True, exist_ok=True)
    file, made = folder / name, folder / f"{name}.{os.getpid()}"
    if not file.is_file():
        made.touch(0o600)
        made.write_text(first)
        try:
            os.link(made, file)
        except FileExistsError:
            pass
        finally:
            made.unlink()
    return file.read_text()
