"""What a judge has answered in a run: a file that is only ever added to, so that a resumed run asks nothing
twice and keeps to its budget.

One line of JSON for each answered call: {"judge", "tokens"}, with {"key", "value"} where it held a verdict.
`judge` is the digest of all that decides the verdict, `key` that of the question.
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
MOST = 1 << 21
"""Answers that a process keeps in its memory, each about 256 bytes of the 2 GiB that it may have; then it forgets the older half."""


def json_digest(*what: Any) -> str:
    """128 bits of the SHA-256 of what JSON can hold, as hex."""
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:32]


class JudgeCache:
    """The answers of one judge, in memory alone where there is no folder."""

    def __init__(self, folder: Path | None, judge: str) -> None:
        self._judge = judge
        self._values: dict[str, float] = {}
        self.calls = self.tokens = 0
        """Of answered calls, those of the run's earlier parts included."""
        self._file = None
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = folder / FILE
            self._load(self._file)
        self.secret = _secret(folder)
        """Of the run: what no policy knows."""

    def find(self, key: str) -> float | None:
        """The value that was given to this question before."""
        return self._values.get(key)

    def note(self, tokens: int, key: str | None = None, value: float | None = None) -> None:
        """Adds an answered call, with the value that it gave to a question where it gave one."""
        line: dict[str, Any] = {"judge": self._judge, "tokens": tokens}
        if key is not None:
            line |= {"key": key, "value": value}
        self._count(line)
        if self._file is None:
            return
        descriptor = os.open(self._file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:  # one write, so that lines of two judges do not mix
            os.write(descriptor, json.dumps(line).encode() + b"\n")
        finally:
            os.close(descriptor)

    def _load(self, file: Path) -> None:
        if not file.is_file():
            return
        own = json.dumps(self._judge).encode()
        with file.open("rb") as lines:
            for text in lines:
                if own in text and (line := _line(text)).get("judge") == self._judge:
                    self._count(line)

    def _count(self, line: dict[str, Any]) -> None:
        self.calls += 1
        self.tokens += int(line.get("tokens", 0))
        if "key" in line:
            self._values[line["key"]] = float(line["value"])
            if len(self._values) > MOST:
                self._values = dict(itertools.islice(self._values.items(), MOST // 2, None))


def _line(text: bytes) -> dict[str, Any]:
    """Empty where it is none: the end of a line that a killed process wrote."""
    try:
        line = json.loads(text)
    except ValueError:
        return {}
    return line if isinstance(line, dict) else {}


def check_budget(server: ServerSection, ledger: JudgeCache) -> None:
    """NoVerdict where the run may not ask again, for all that the ledger holds."""
    if server.max_calls is not None and ledger.calls >= server.max_calls:
        raise NoVerdict(f"the run's budget is spent: max_calls = {server.max_calls}")


def first_date(folder: Path | None) -> datetime.date:
    """Return the day on which the run's judges were first made, which their templates write; today without a folder."""
    return datetime.date.fromisoformat(_kept(folder, DATE, datetime.date.today().isoformat()))


def _secret(folder: Path | None) -> str:
    """Return what no policy knows."""
    return _kept(folder, SECRET, secrets.token_hex(16))


def _kept(folder: Path | None, name: str, first: str) -> str:
    """The run's own text of this name, which is `first` on first need; two processes that begin at once agree."""
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
