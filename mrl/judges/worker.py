"""A judge process: `python -m mrl.judges.worker PARENT_PID`.

consumes      frames on standard input: first (JudgePart, stage), then batches of requests, pickled
produces      frames on the descriptor standard output had: {"ready"} or {"broken"}, then one JSON reply per batch
waits for     the next frame; ends at end of input and with its parent
never does    let a judge's own printing reach the channel: standard output is turned into standard error
"""

from __future__ import annotations

import asyncio
import json
import os
import pickle
import resource
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from mrl.config.judge import JudgePart
from mrl.errors import MrlError, RewardError
from mrl.judges.build import build_judge
from mrl.judges.contract import GroupJudge, Judge, Request
from mrl.judges.executor import ForkedExecutor
from mrl.judges.lifeline import die_with_parent
from mrl.judges.wire import encode_verdict, frame, read_frame
from mrl.samples import Verdict

_MAX_ERROR = 2000


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    channel = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests = os.fdopen(os.dup(0), "rb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    def send(reply: dict[str, Any] | bytes) -> None:
        channel.write(frame(reply if isinstance(reply, bytes) else json.dumps(reply).encode()))
        channel.flush()

    opening = read_frame(requests)
    if opening is None:
        return
    part, stage = pickle.loads(opening)
    _limit_memory(part, stage)
    try:
        judge = build_judge(part, stage=stage)
        answer = _answerer(judge, part, stage)
    except Exception as error:
        send({"broken": _described(error)})
        return
    send({"ready": judge.name, "version": judge.version})
    while (payload := read_frame(requests)) is not None:
        send(answer(pickle.loads(payload)))


def _limit_memory(part: JudgePart, stage: str) -> None:
    """Private memory of a judge that runs in this process; the symbolic one limits its child instead."""
    limit = part.memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if stage != "symbolic":
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _answerer(judge: Judge | GroupJudge, part: JudgePart, stage: str) -> Callable[[Sequence[Request]], Any]:
    loop = asyncio.new_event_loop()

    def work(requests: Sequence[Request]) -> bytes:
        return json.dumps(_judged(judge, requests, loop)).encode()

    if stage != "symbolic":
        return work
    executor = ForkedExecutor(work, memory_bytes=part.memory_mib * 2**20)
    return lambda requests: executor.run(requests, deadline_seconds=part.deadline_seconds)


def _judged(
    judge: Judge | GroupJudge, requests: Sequence[Request], loop: asyncio.AbstractEventLoop
) -> dict[str, Any]:
    start = time.monotonic()
    try:
        if isinstance(judge, GroupJudge):
            verdicts = list(loop.run_until_complete(judge.score_group(requests)))
        else:
            verdicts = [loop.run_until_complete(judge.score(request)) for request in requests]
    except MemoryError:
        raise
    except Exception as error:  # becomes "failed": the pool retries and counts, it never scores
        return {"failed": _described(error)}
    if len(verdicts) != len(requests):
        return {"failed": f"judge {judge.name}: {len(verdicts)} verdicts for {len(requests)} samples"}
    wrong = next((v for v in verdicts if v is not None and not isinstance(v, Verdict)), None)
    if wrong is not None:
        return {"failed": f"judge {judge.name}: answered with {type(wrong).__name__}, not a Verdict"}
    seconds = (time.monotonic() - start) / max(len(requests), 1)
    return {"verdicts": [_stamped(verdict, seconds) for verdict in verdicts]}


def _stamped(verdict: Verdict | None, seconds: float) -> dict[str, Any] | None:
    encoded = encode_verdict(verdict)
    if encoded is not None and not encoded["seconds"]:
        encoded["seconds"] = seconds
    return encoded


def _described(error: BaseException) -> str:
    if isinstance(error, MrlError) and not isinstance(error, RewardError):
        return str(error)[:_MAX_ERROR]
    where = traceback.extract_tb(error.__traceback__)
    place = f" at {where[-1].filename}:{where[-1].lineno}" if where else ""
    return f"{type(error).__name__}: {error}{place}"[:_MAX_ERROR]


if __name__ == "__main__":
    main()
