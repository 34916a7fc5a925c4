"""The service client against a real HTTP server on the loopback that runs programs in our own sandbox."""

import base64
import http.server
import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from mrl.processes.own_time import Allowance
from mrl.rewards.code.candidate import CandidateProcess
from mrl.rewards.code.code_rules import CodeRules
from mrl.rewards.code.code_service import MAX_REPLY_BYTES, RemoteSession
from mrl.rewards.code.outcome import CandidateEnded, Outcome
from mrl.rewards.code.sandbox import find_boundary
from mrl.rewards.code.tasks import parse_task
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.samples import VerdictKind

ADD = parse_task(
    {
        "entry_point": "add",
        "cases": [{"args": [1, 2], "expected": 3}, {"args": [[1], [2]], "expected": [1, 2]}],
    },
    place="x",
)
ECHO = parse_task({"cases": [{"stdin": "1 2", "stdout": "3"}]}, place="x")

# The fetched file is printed after a marker, because a sandboxed run returns its standard output alone.
FETCH = "\nimport base64 as _b, os as _o\nif _o.path.exists('answer.json'): print('@FILE@' + _b.b64encode(open('answer.json','rb').read()).decode())\n"


class Service(http.server.BaseHTTPRequestHandler):
    """POST /run_code as SandboxFusion answers it; `mode` makes it fail."""

    mode = "works"
    runs = 0

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        type(self).runs += 1
        if self.mode == "down":
            self.send_error(503)
            return
        reply: Any = {
            "works": self.run,
            "nonsense": lambda b: ["no"],
            "large": lambda b: _finished("x" * MAX_REPLY_BYTES),
            "half a character": lambda b: _finished("\ud800"),
            "sandbox error": lambda b: {"status": "SandboxError", "message": "full"},
        }[self.mode](body)
        data = json.dumps(reply).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def run(self, body: dict[str, Any]) -> dict[str, Any]:
        assert self.path == "/run_code" and body["language"] == "python"
        rules = CodeRules(seconds=body["run_timeout"], memory_mib=body["memory_limit_MB"])
        try:
            with CandidateProcess(find_boundary(), rules, Allowance.of(body["run_timeout"])) as session:
                source = body["code"] + (FETCH if body["fetch_files"] else "")
                written = session.run_as_main(source, body["stdin"]).decode()
        except CandidateEnded as ended:
            status = "TimeLimitExceeded" if ended.outcome is Outcome.TIME_LIMIT else "Finished"
            return {
                "status": "Failed",
                "run_result": {"status": status, "return_code": 1, "stdout": ""},
                "files": {},
            }
        stdout, _, file = written.partition("@FILE@")
        files = {"answer.json": file.strip()} if file else {}
        return {
            "status": "Success",
            "run_result": {"status": "Finished", "return_code": 0, "stdout": stdout},
            "files": files,
        }

    def log_message(self, *words: Any) -> None:
        return None


def _finished(written: str) -> dict[str, Any]:
    return {
        "status": "Success",
        "run_result": {"status": "Finished", "return_code": 0, "stdout": written},
    }


@pytest.fixture
def service() -> Iterator[tuple[str, type[Service]]]:
    handler = type("Handler", (Service,), {})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}", handler
    server.shutdown()
    server.server_close()
    thread.join(10)


def section(url: str, **fields: Any) -> RewardSection:
    return RewardSection(
        kind="code_service", path=url, code=CodeRules(seconds=3.0), workers=1, **{"retries": 0, **fields}
    )


def test_verdicts_are_those_of_the_local_verifier(service: Any, make_pair: Any, score_all: Any) -> None:
    url, _ = service
    programs = [
        ("def add(a, b):\n    return a + b", ADD, 1.0),
        ("def add(a, b):\n    return a", ADD, 0.0),
        ("class L:\n    def __eq__(self, o): return True\ndef add(a, b):\n    return L()", ADD, 0.0),
        ("import os\ndef add(a, b):\n    os._exit(0)", ADD, 0.0),
        ("def add(a, b):\n    while True: pass", ADD, 0.0),
        ("open('answer.json', 'w').write('{\"value\": 3}')\nimport os; os._exit(0)", ADD, 0.0),
        ("print(sum(map(int, input().split())))", ECHO, 1.0),
        ("print(4)", ECHO, 0.0),
    ]
    pairs = [
        make_pair(n, f"```python\n{program}\n```", task) for n, (program, task, _) in enumerate(programs)
    ]
    with RewardPool(section(url)) as pool:
        verdicts = score_all(pool, pairs)
    assert [verdicts[f"{n}.0"].value for n in range(len(programs))] == [value for _, _, value in programs]


@pytest.mark.parametrize("mode", ["down", "nonsense", "sandbox error"])
def test_a_service_that_fails_makes_samples_without_reward_after_retries(
    mode: str, service: Any, make_pair: Any, score_all: Any
) -> None:
    url, handler = service
    handler.mode = mode
    with RewardPool(section(url, retries=1)) as pool:
        (verdict,) = score_all(
            pool, [make_pair(1, "```python\ndef add(a, b):\n    return a + b\n```", ADD)]
        ).values()
    assert verdict.kind is VerdictKind.NO_REWARD
    assert handler.runs == 2
    assert "code service" in verdict.reason


def test_what_a_program_writes_is_scored_whatever_it_is(service: Any) -> None:
    url, handler = service
    session = RemoteSession(url, CodeRules(), Allowance.of(60.0))
    handler.mode = "half a character"
    assert session.run_as_main("", "") == b"?"
    handler.mode = "large"
    with pytest.raises(CandidateEnded, match="output limit"):
        session.run_as_main("", "")


def test_nobody_listening_is_an_outage(make_pair: Any, score_all: Any) -> None:
    with RewardPool(section("http://127.0.0.1:9")) as pool:
        (verdict,) = score_all(pool, [make_pair(1, "x = 1", ADD)]).values()
    assert verdict.kind is VerdictKind.NO_REWARD


def test_the_fetched_answer_is_data_only() -> None:
    from mrl.rewards.code.code_service import _answer

    assert _answer({"answer.json": base64.b64encode(b'{"value": 3}').decode()}) == {"value": 3}
    for bad in (
        None,
        {},
        {"answer.json": "%%"},
        {"answer.json": base64.b64encode(b"[1]").decode()},
        {"answer.json": 3},
    ):
        assert _answer(bad) is None
