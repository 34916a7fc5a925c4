"""Programs scored by a remote service with SandboxFusion's HTTP interface (POST {url}/run_code).

Here too the verifier is on this side: inputs go out one run at a time and what comes back is compared here.
A service that is down, overloaded or answers nonsense makes the verifier fail (no reward after retries);
only what the candidate did is scored. A call of a function is turned into a program that writes its value,
tagged, into a file the service returns; standard output is the answer of stdin tasks alone.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import dataclasses
import json
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from mrl.errors import RewardError
from mrl.processes.own_time import PATIENCE_SECONDS, Allowance
from mrl.rewards.addresses import proxy_of
from mrl.rewards.code.code_rules import OUTPUT_KIB, CodeRules
from mrl.rewards.code.code_verifier import verify_with
from mrl.rewards.code.examiner import examiner
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.program import program_in
from mrl.rewards.contract import RewardRequest, scored
from mrl.samples import Verdict

MAX_REPLY_BYTES = 16 * 2**20
_ANSWER_FILE = "answer.json"
_MARGIN_SECONDS = PATIENCE_SECONDS + 5.0
"""By the clock: a service too may be a busy machine that counts a program's own time."""


class RemoteSession:
    """One program at the service. Every call is a run of its own, so there is no state between calls."""

    def __init__(self, url: str, rules: CodeRules, allowance: Allowance) -> None:
        self._url = url.rstrip("/") + "/run_code"
        self._proxy = proxy_of(url)
        proxy = {"http": self._proxy.url, "https": self._proxy.url} if self._proxy else {}
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler(proxy))
        self._rules = rules
        self._allowance = allowance
        self._seconds = min(allowance.left, rules.seconds)
        self._began = time.monotonic()
        self._program = ""
        self._entry_point = ""

    def __enter__(self) -> RemoteSession:
        return self

    def __exit__(self, *error: object) -> None:
        self._allowance.left -= time.monotonic() - self._began

    def load(self, program: str, entry_point: str) -> None:
        self._program, self._entry_point = program, entry_point

    def call(self, question: dict[str, Any]) -> dict[str, Any]:
        """The answer to one call, both as encoded. Raises CandidateEnded, and RewardError where the service
        failed."""
        source = _call_source(self._program, self._entry_point, question)
        reply = self._post(source, "", [_ANSWER_FILE])
        answer = _answer(reply.get("files"))
        if answer is None:
            raise CandidateEnded(*_outcome(reply))
        return answer

    def finish(self) -> None:
        return None

    def run_as_main(self, program: str, stdin: str) -> bytes:
        """Standard output of one run."""
        reply = self._post(program, stdin, [])
        result = reply["run_result"]
        if result.get("status") != "Finished" or result.get("return_code") != 0:
            raise CandidateEnded(*_outcome(reply))
        written = str(result.get("stdout") or "").encode("utf-8", "replace")
        if len(written) > OUTPUT_KIB * 1024:
            raise CandidateEnded(Outcome.OUTPUT_LIMIT, f"more than {OUTPUT_KIB} KiB of output")
        return written

    def _post(self, source: str, stdin: str, files: list[str]) -> dict[str, Any]:
        body = {
            "code": source,
            "language": "python",
            "stdin": stdin,
            "run_timeout": self._seconds,
            "compile_timeout": self._seconds,
            "memory_limit_MB": self._rules.memory_mib,
            "files": {},
            "fetch_files": files,
        }
        request = urllib.request.Request(
            self._url, json.dumps(body).encode(), {"Content-Type": "application/json"}, method="POST"
        )
        start = time.monotonic()
        try:
            with self._opener.open(request, timeout=self._seconds + _MARGIN_SECONDS) as response:
                data = response.read(MAX_REPLY_BYTES + 1)
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            elapsed = time.monotonic() - start
            by = f" by {self._proxy.variable}" if self._proxy else ""
            raise RewardError(f"code service {self._url}{by}: {error} after {elapsed:.1f} s") from error
        return _checked(data, self._url)


class CodeServiceVerifier:
    """Scores the program of a response at a service."""

    name, version = "code_service", "1"
    waits = True

    def __init__(self, url: str, rules: CodeRules) -> None:
        proxy_of(url)  # an error at the start
        self._url, self._rules = url, rules
        examiner()  # started here, before there are threads to ask for it at once

    async def score(self, request: RewardRequest) -> Verdict:
        program = program_in(request.visible, request.ground_truth)
        if program is None:
            return scored(0.0, "no program in the response")

        def session(allowance: Allowance) -> RemoteSession:
            return RemoteSession(self._url, self._rules, allowance)

        verdict = await asyncio.to_thread(
            verify_with, session, program, request.ground_truth, self._rules, seconds=request.deadline_seconds
        )
        return dataclasses.replace(verdict, verifier=self.name, version=self.version)


def _checked(data: bytes, url: str) -> dict[str, Any]:
    if len(data) > MAX_REPLY_BYTES:  # it holds what the program wrote
        raise CandidateEnded(Outcome.OUTPUT_LIMIT, f"a reply of more than {MAX_REPLY_BYTES} bytes")
    try:
        reply = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise RewardError(f"code service {url}: a reply that is no JSON: {data[:80]!r}") from error
    if not isinstance(reply, dict) or reply.get("status") not in ("Success", "Failed"):
        status = reply.get("status") if isinstance(reply, dict) else type(reply).__name__
        message = reply.get("message") if isinstance(reply, dict) else ""
        raise RewardError(f"code service {url}: status {status!r}: {str(message)[:200]}")
    if not isinstance(reply.get("run_result"), dict):
        raise RewardError(f"code service {url}: a reply without run_result")
    return reply


def _outcome(reply: dict[str, Any]) -> tuple[Outcome, str]:
    result = reply["run_result"]
    if result.get("status") == "TimeLimitExceeded":
        return Outcome.TIME_LIMIT, "time limit of the service"
    if result.get("status") not in ("Finished", "Error"):
        raise RewardError(f"code service: run status {str(result.get('status'))[:60]!r}")
    return Outcome.RUNTIME_ERROR, f"the program ended with status {str(result.get('return_code'))[:10]}"


def _answer(files: Any) -> dict[str, Any] | None:
    content = files.get(_ANSWER_FILE) if isinstance(files, dict) else None
    if not isinstance(content, str):
        return None
    try:
        answer = json.loads(base64.b64decode(content, validate=True))
    except (ValueError, RecursionError, binascii.Error):
        return None
    return answer if isinstance(answer, dict) else None


def _call_source(program: str, entry_point: str, call: dict[str, Any]) -> str:
    """A program that defines the candidate, calls it once and writes the tagged value."""
    runner = Path(__file__).with_name("runner.py").read_text(encoding="ascii")
    shared = runner.partition('"""\n\n')[2].rpartition("\nif __name__")[0]
    return "\n".join(
        [
            shared,
            f"_call = json.loads({json.dumps(json.dumps(call))})",
            "try:",
            f"    _function = function_of(json.loads({json.dumps(json.dumps(program))}), {json.dumps(entry_point)})",
            "    _arguments = [decode_tagged(value) for value in _call['args']]",
            "    _named = {name: decode_tagged(value) for name, value in _call['kwargs'].items()}",
            "    _answer = {'value': encode_tagged(_function(*_arguments, **_named))}",
            "except BaseException as error:",
            "    _answer = error_message(error)",
            f"with open({json.dumps(_ANSWER_FILE)}, 'w') as file:",
            "    json.dump(_answer, file)",
        ]
    )
