"""Search in a local full-text index: one SQLite file (https://www.sqlite.org/fts5.html), then read-only."""

from __future__ import annotations

import re
import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path

from mrl.agents.tools.tool import ToolError, arguments_schema
from mrl.errors import ConfigError

_WORD = re.compile(r"\w+")
_MAX_WORDS = 32
_STEPS_A_LOOK = 1000
"""Steps of SQLite's virtual machine between two checks of the clock."""


def build_index(path: Path, documents: Iterable[tuple[str, str]]) -> None:
    """Write an index of (title, text) to a path that does not exist."""
    with sqlite3.connect(f"{path.resolve().as_uri()}?mode=rwc", uri=True) as index:
        index.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize = 'porter unicode61')")
        index.executemany("INSERT INTO documents VALUES (?, ?)", documents)
        index.execute("INSERT INTO documents(documents) VALUES ('optimize')")
    index.close()


class Search:
    """Tool that finds the documents with a query's most distinctive words."""

    name = "search"
    description = "Finds documents by their words."
    parameters = arguments_schema(query={"type": "string"})

    def __init__(self, index: str, *, results: int = 3, words: int = 40, seconds: float = 5.0) -> None:
        """`index`: a file that `build_index` wrote. `words`: shown around a hit, for each of `results`
        documents. Raise ConfigError if there is no such index."""
        self._results, self._words, self._seconds = results, words, seconds
        try:
            address = Path(index).resolve(strict=True).as_uri()
            self._index = sqlite3.connect(f"{address}?mode=ro", uri=True)
            self._index.execute("SELECT title, text FROM documents LIMIT 0")
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"the search index {index} cannot be read: {error}") from error

    def run(self, query: str) -> str:
        """Return titles and the text around hits, best first. Raise ToolError without words or if late."""
        words = _WORD.findall(query)[:_MAX_WORDS]
        if not words:
            raise ToolError("a query must have words")
        until = time.monotonic() + self._seconds
        self._index.set_progress_handler(lambda: time.monotonic() > until, _STEPS_A_LOOK)
        try:
            rows = self._index.execute(
                "SELECT title, snippet(documents, 1, '', '', ' ... ', ?) FROM documents "
                "WHERE documents MATCH ? ORDER BY bm25(documents) LIMIT ?",
                (min(self._words, 64), " OR ".join(f'"{word}"' for word in words), self._results),
            ).fetchall()
        except sqlite3.OperationalError as error:
            if "interrupted" not in str(error):
                raise
            raise ToolError(f"time limit: nothing found within {self._seconds:g} s") from error
        return "\n\n".join(f"{title}\n{text}" for title, text in rows) or "nothing found"

    def close(self) -> None:
        """Close the index."""
        self._index.close()
