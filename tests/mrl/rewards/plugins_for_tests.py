"""Users' reward functions, good and bad, as their authors would write them."""

import asyncio
import os
import time
from typing import Any

import numpy as np

from mrl.rewards.contract import RewardRequest, scored
from mrl.samples import Verdict, VerdictKind


def native(request: RewardRequest) -> float:
    return float(str(request.ground_truth) in request.response)


async def native_async(request: RewardRequest) -> Verdict:
    await asyncio.sleep(0.001)
    return scored(float(str(request.ground_truth) in request.response), "looked")


ALL_64 = asyncio.Barrier(64)


async def waits_for_all(request: RewardRequest) -> float:
    """Return once 64 samples wait at the same time."""
    await ALL_64.wait()
    return float(str(request.ground_truth) in request.response)


async def waits(request: RewardRequest) -> float:
    """Hang, time out or die if the response says so."""
    if "hang" in request.response:
        await asyncio.sleep(1000)
    if "time out" in request.response:
        raise TimeoutError("the service took too long")
    if "kill" in request.response:
        os.abort()
    await asyncio.sleep(0.01)
    return float(str(request.ground_truth) in request.response)


async def blocks(request: RewardRequest) -> float:
    time.sleep(1000 if "hang" in request.response else 0.1)
    return float(str(request.ground_truth) in request.response)


async def waits_group(requests: list[RewardRequest]) -> list[float]:
    await ALL_64.wait()
    return [float(str(r.ground_truth) in r.response) for r in requests]


def native_group(requests: list[RewardRequest]) -> list[float]:
    """Rank by length: the shortest correct response gets 1."""
    right = [r for r in requests if str(r.ground_truth) in r.response]
    best = min(right, key=lambda r: len(r.response)).sample_id if right else ""
    return [float(r.sample_id == best) for r in requests]


def native_process(request: RewardRequest) -> Verdict:
    """Give every token but the second a value."""
    tokens = request.response_tokens
    assert tokens is not None
    values = np.linspace(0, 1, len(tokens), dtype=np.float32)
    values[1] = np.nan
    return Verdict(VerdictKind.SCORED, 1.0, token_values=values)


def verl(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> dict[str, float]:
    return {"score": float(str(ground_truth) in solution_str), "length": len(solution_str)}


def trl_columns(
    prompts: list[Any], completions: list[Any], ground_truth: list[Any], **columns: Any
) -> list[dict[str, float]]:
    """Report the columns, and if prompts are messages."""
    as_messages = isinstance(prompts[0], list) and completions[0][0]["role"] == "assistant"
    text = completions[0][0]["content"] if as_messages else completions[0]
    seen = {"score": float(ground_truth[0] in text), "messages": float(as_messages), "ground_truth": 1.0}
    return [seen | dict.fromkeys(columns, 1.0)]


def trl(
    prompts: list[str], completions: list[str], ground_truth: list[Any], **kwargs: Any
) -> list[float | None]:
    return [
        None if g == "skip" else float(str(g) in c) for c, g in zip(completions, ground_truth, strict=True)
    ]


def openrlhf(queries: list[str], prompts: list[str], labels: list[Any], **kwargs: Any) -> dict[str, Any]:
    rewards = [float(str(g) in q[len(p) :]) for q, p, g in zip(queries, prompts, labels, strict=True)]
    return {"rewards": np.array(rewards), "scores": rewards}


def wrong_signature(only_one: str) -> float:
    return 0.0


def gives_nan(request: RewardRequest) -> float:
    return float("nan")


def gives_infinity(request: RewardRequest) -> float:
    return float("inf")


def gives_text(request: RewardRequest) -> str:
    return "1.0"


def wrong_count(requests: list[RewardRequest]) -> list[float]:
    return [1.0] * (len(requests) + 1)


def raises(request: RewardRequest) -> float:
    raise ConnectionError("the service is down")


def raises_once_per_sample(request: RewardRequest) -> float:
    marker = f"{request.metadata['folder']}/{request.sample_id}"
    if not os.path.exists(marker):
        open(marker, "w").close()
        raise ConnectionError("try again")
    return 1.0


def dies_of(request: RewardRequest) -> float:
    if "kill" in request.response:
        os.abort()
    if "hang" in request.response:
        time.sleep(1000)
    if "leave" in request.response:
        raise SystemExit(3)
    return float(str(request.ground_truth) in request.response)


def prints(request: RewardRequest) -> float:
    print("x" * 10_000)
    os.write(1, b"\x00\x01garbage on standard output\n" * 100)
    return 1.0


def allocates(request: RewardRequest) -> float:
    return float(len(bytearray(8 * 2**30)))


def runs_out_of_memory_in_c(request: RewardRequest) -> float:
    os.write(2, b"terminate called after throwing an instance of 'std::bad_alloc'\n")
    os.abort()


ATTEMPTS = iter(range(1000))


def raises_on(request: RewardRequest) -> Verdict:
    """Raise on some samples: the same error every time, or changing ones."""
    if "poison" in request.response:
        raise ValueError(f"attempt {next(ATTEMPTS)}")
    if "fickle" in request.response:
        raise (KeyError, ValueError, IndexError)[next(ATTEMPTS) % 3](request.response)
    if "down" in request.response:
        raise ConnectionError("the service is down")
    names = {"x" * 9_000_000: 1.0} if "huge" in request.response else {}
    return scored(float(str(request.ground_truth) in request.response), "", **names)


def spins(request: RewardRequest) -> float:
    while "spin" in request.response:
        pass
    return float(str(request.ground_truth) in request.response)
