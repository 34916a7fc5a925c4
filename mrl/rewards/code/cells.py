"""An interpreter in the sandbox that keeps its names from one cell to the next."""

from __future__ import annotations

import dataclasses
from typing import Any

from mrl.processes.own_time import Allowance
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import OUTPUT_KIB, CodeRules
from mrl.rewards.code.outcome import Outcome
from mrl.rewards.code.sandbox import Boundary

_ERROR_BYTES, _BYTES_A_CHARACTER = 24_000, 12
"""Of an answer, as JSON: a traceback's at most, and a character's."""
_ALL_CELLS = 100
"""Cells' worth of processor time that the kernel allows the interpreter; each cell's own is looked at."""


@dataclasses.dataclass(frozen=True, slots=True)
class CellResult:
    """What a cell made."""

    output: str
    """What it printed, and the value of its last expression; cut at the limit, which is said."""
    error: str
    """The end of its traceback; empty where nothing was raised."""


class Cells(CandidateProcess):
    """A sandboxed interpreter. Use as a context manager; no cell runs after CandidateEnded, and nothing that one
    has started runs between two."""

    def __init__(self, boundary: Boundary, rules: CodeRules) -> None:
        """`rules.seconds` and `rules.cpu_seconds` are those of one cell."""
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
        """Runs a cell. CandidateEnded where it used up its time or memory, or ended the interpreter, and all names with it; Starved
        where the machine gave it no processor."""
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
            self._end(Outcome.WRONG, "an answer to another cell than the one asked")
        return CellResult(output, error)
