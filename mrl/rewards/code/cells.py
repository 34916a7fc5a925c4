"""Sandboxed interpreter that keeps its names from one cell to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.processes.own_time import Allowance
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import OUTPUT_KIB, CodeRules
from mrl.rewards.code.outcome import Outcome
from mrl.rewards.code.sandbox import CodeSandbox

_ERROR_BYTES, _BYTES_A_CHARACTER = 24_000, 12
"""Largest JSON size of a traceback and of a character in a reply."""
_ALL_CELLS = 100
"""Kernel limit of the interpreter's CPU time, in cells; each cell's own time is checked separately."""


@dataclasses.dataclass(frozen=True, slots=True)
class CellResult:
    """Result of a cell."""

    output: str
    """Printed text and the value of the last expression, cut at the limit with a note."""
    error: str
    """End of the traceback; empty without an error."""


class Cells(CandidateProcess):
    """Sandboxed interpreter, a context manager. No cell runs after CandidateEnded; all stops between
    cells."""

    def __init__(self, boundary: CodeSandbox, rules: CodeRules) -> None:
        """`rules.seconds` and `rules.cpu_seconds` apply to one cell."""
        super().__init__(boundary, rules, Allowance.of(rules.seconds))

    def __enter__(self) -> Cells:
        super().__enter__()
        self._close_stdin()
        whole = self._rules.model_copy(update={"cpu_seconds": _ALL_CELLS * self._rules.cpu_seconds})
        shown = max(0, OUTPUT_KIB * 1024 - _ERROR_BYTES) // _BYTES_A_CHARACTER
        limits = {"limits": self._boundary.rlimits(whole), "cells": shown}
        try:
            self._send(self._setup("", None) | limits)
            self._receive()
        except BaseException:
            self.__exit__()
            raise
        return self

    def run(self, source: str) -> CellResult:
        """Run a cell.

        Raises:
            CandidateEnded: It used up its time or memory or ended the interpreter; all names are lost.
            Starved: The machine gave it no CPU.
        """
        self._refuse_early()
        self._allowance = Allowance.of(self._rules.seconds)
        for printed in self._output.values():
            printed.clear()
        self._run.resume()
        self._begin()
        self._calls += 1
        self._send({"id": self._calls, "cell": source})
        reply = self._receive()
        self._run.pause()
        return self._result(reply)

    def _result(self, reply: dict[str, Any]) -> CellResult:
        output, error = reply.get("output"), reply.get("error")
        if reply.get("id") != self._calls or not isinstance(output, str) or not isinstance(error, str):
            self._end(Outcome.WRONG, "a reply to another cell")
        return CellResult(output, error)
