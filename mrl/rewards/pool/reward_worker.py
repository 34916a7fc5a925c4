"""Reward worker process: `python -m mrl.rewards.pool.reward_worker PARENT_PID`.

consumes      frames on standard input: first (RewardKind, Stage), then (number, requests), pickled
produces      frames on standard output's descriptor: {"ready"} or {"broken"}, then one JSON reply per number
waits for     the next frame; ends at end of input and with its parent
never does    let a verifier's own printing reach the channel: standard output is redirected to standard error

A verifier that computes serves one frame at a time. One that waits (`waits`: an async function, a service)
has many frames in flight on one event loop, each with its deadline; replies come in any order.
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
from concurrent.futures import ThreadPoolExecutor
from typing import Any, BinaryIO

from mrl.errors import MrlError, RewardError
from mrl.processes.channel import take_over_stdio
from mrl.processes.framing import MAX_REPLY_BYTES, frame, read_frame, read_frame_async
from mrl.processes.lifeline import die_with_parent
from mrl.processes.own_time import Starved
from mrl.rewards.contract import GroupVerifier, NoVerdict, RewardRequest, Stage, Verifier
from mrl.rewards.pool.executor import ForkedExecutor
from mrl.rewards.reward_part import RewardPart
from mrl.rewards.verdict_json import encode_verdict
from mrl.samples import Verdict
from mrl.user_code import place_of

_MAX_ERROR = 2000

AnyVerifier = Verifier | GroupVerifier


def main() -> None:
    die_with_parent(int(sys.argv[1]))
    requests_in, replies_out = take_over_stdio()
    requests, channel = os.fdopen(requests_in, "rb"), os.fdopen(replies_out, "wb")

    def send(reply: dict[str, Any]) -> None:
        channel.write(frame(_within_limit(reply)))
        channel.flush()

    opening = read_frame(requests)
    if opening is None:
        return
    kind, stage = pickle.loads(opening)
    _limit_memory(kind.part, stage)
    try:
        verifier = kind.verifier(stage)
    except Exception as error:
        send({"broken": _described(error, kind.part)})
        return
    waits = getattr(verifier, "waits", False)
    send({"ready": verifier.name, "version": verifier.version, "waits": waits})
    if waits:
        asyncio.run(_serve_waiting(verifier, kind.part, stage, requests, send))
    else:
        _serve_in_turn(verifier, kind.part, stage, requests, send)


def _serve_in_turn(
    verifier: AnyVerifier,
    part: RewardPart,
    stage: Stage,
    requests: BinaryIO,
    send: Callable[[dict[str, Any]], None],
) -> None:
    score = _scorer(verifier, part, stage)
    while (payload := read_frame(requests)) is not None:
        number, batch = pickle.loads(payload)
        send({"number": number} | score(batch))


async def _serve_waiting(
    verifier: AnyVerifier,
    part: RewardPart,
    stage: Stage,
    requests: BinaryIO,
    send: Callable[[dict[str, Any]], None],
) -> None:
    seconds = None if stage.keeps_deadline else part.deadline_seconds
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(part.concurrency))
    stream = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stream), requests)
    running: set[asyncio.Task[None]] = set()

    async def serve(number: int, batch: Sequence[RewardRequest]) -> None:
        try:
            async with asyncio.timeout(seconds):
                reply = await _scored(verifier, batch, part)
        except TimeoutError:  # ours: the verifier's own are caught in _scored
            reply = {"failed": f"verifier {verifier.name}: no verdict in {seconds:g} s"}
        except MemoryError:
            traceback.print_exc()
            os._exit(1)
        send({"number": number} | reply)

    while (payload := await read_frame_async(stream)) is not None:
        task = asyncio.create_task(serve(*pickle.loads(payload)))
        running.add(task)
        task.add_done_callback(running.discard)
    os._exit(0)  # the parent is gone: do not wait for threads that still wait for a service


def _limit_memory(part: RewardPart, stage: Stage) -> None:
    """Limit the private memory of a verifier that runs in this process; one that forks limits its child."""
    limit = part.memory_mib * 2**20
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if not stage.in_child:
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def _scorer(
    verifier: AnyVerifier, part: RewardPart, stage: Stage
) -> Callable[[Sequence[RewardRequest]], dict[str, Any]]:
    loop = asyncio.new_event_loop()

    def work(requests: Sequence[RewardRequest]) -> dict[str, Any]:
        return loop.run_until_complete(_scored(verifier, requests, part))

    if not stage.in_child:
        return work
    executor = ForkedExecutor(
        lambda requests: json.dumps(work(requests)).encode(), memory_bytes=part.memory_mib * 2**20
    )
    return lambda requests: executor.run(requests, deadline_seconds=part.deadline_seconds)


def _within_limit(reply: dict[str, Any]) -> bytes:
    """Return the reply as JSON; one over the limit becomes a failure, so that the worker survives."""
    payload = json.dumps(reply).encode()
    if len(payload) <= MAX_REPLY_BYTES:
        return payload
    fault = f"a reply of {len(payload)} bytes; the limit is {MAX_REPLY_BYTES}"
    return json.dumps(
        {"number": reply.get("number"), "failed": fault, "raised": "reply over the limit"}
    ).encode()


async def _scored(
    verifier: AnyVerifier, requests: Sequence[RewardRequest], part: RewardPart
) -> dict[str, Any]:
    start = time.monotonic()
    try:
        if isinstance(verifier, GroupVerifier):
            verdicts = list(await verifier.score_group(requests))
        else:
            verdicts = [await verifier.score(request) for request in requests]
    except MemoryError:
        raise
    except Starved as error:
        return {"failed": str(error), "starved": True}
    except NoVerdict as error:
        return {"failed": _described(error, part), "refused": True}
    except (MrlError, OSError) as error:  # the verifier reports a failure, or its service is unreachable
        return {"failed": _described(error, part)}
    except Exception as error:
        where = "" if getattr(verifier, "waits", False) else f"{type(error).__name__}{place_of(error)}"
        return {"failed": _described(error, part), "raised": where}
    if len(verdicts) != len(requests):
        return {"failed": f"verifier {verifier.name}: {len(verdicts)} verdicts for {len(requests)} samples"}
    wrong = next((v for v in verdicts if v is not None and not isinstance(v, Verdict)), None)
    if wrong is not None:
        return {"failed": f"verifier {verifier.name}: returned {type(wrong).__name__}, not a Verdict"}
    seconds = (time.monotonic() - start) / max(len(requests), 1)
    return {"verdicts": [_stamped(verdict, seconds) for verdict in verdicts]}


def _stamped(verdict: Verdict | None, seconds: float) -> dict[str, Any] | None:
    encoded = encode_verdict(verdict)
    if encoded is not None and not encoded["seconds"]:
        encoded["seconds"] = seconds
    return encoded


def _described(error: BaseException, part: RewardPart) -> str:
    if isinstance(error, MrlError) and not isinstance(error, RewardError):
        return str(error)[:_MAX_ERROR]
    if isinstance(error, MemoryError):
        error = MemoryError(f"{error} (reward.memory_mib = {part.memory_mib} is what it may allocate)")
    place = place_of(error)
    return f"{type(error).__name__}: {str(error)[: _MAX_ERROR - len(place) - 100]}{place}"


if __name__ == "__main__":
    main()
