"""python -m benchmarks.park MODEL: what it costs that requests leave an engine and go on, against letting them finish.

One engine in this process, its folder's weights, `--requests` prompts of `--prompt-tokens` and `--new-tokens` to each, run to their
end, 256 of them at once; a park takes those out, or lets them end where `--let-end` steps surely do. Rounds with and without one park
in the middle are alternated; both take the way between processes (pickled batches and requests, the driver's drafts), so that the
difference is the park: taking out, sending there and back, and computing again. All times are the processor's (one process, one
thread), so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import pickle
import statistics
import time
from collections.abc import Sequence

import numpy as np

from mrl.config.sections.rollout import RolloutSection
from mrl.launch.workers.rollout_group import TICK_STEPS
from mrl.rollout.drafts import Drafts
from mrl.rollout.engine import RolloutEngine
from mrl.rollout.request import Request, Response, ResponseBatch, request_id, seed_of_request

SEED = 1
SAMPLES = 8
"""Requests to each prompt."""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.park", description=__doc__)
    parser.add_argument("model")
    parser.add_argument("--requests", type=int, default=512)
    parser.add_argument("--prompt-tokens", type=int, default=7)
    parser.add_argument("--new-tokens", type=int, default=6)
    parser.add_argument("--let-end", type=int, default=TICK_STEPS, help="steps in which all may end instead")
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args(arguments)
    length = options.prompt_tokens + options.new_tokens
    engine = RolloutEngine(
        RolloutSection(dtype="float32", enforce_eager=True, max_num_seqs=256, kv_cache_bytes=256 << 20),
        options.model,
        max_length=length,
        seed=SEED,
        real_weights=True,
    )
    seconds: dict[bool, list[float]] = {False: [], True: []}
    parking = []
    for number in range(2 * (options.repeats + 1)):
        with_park = number % 2 == 1
        asked = _requests(options.requests, options.prompt_tokens, options.new_tokens)
        park_after = options.new_tokens // 2 if with_park else None
        total, away = _round(engine, asked, park_after=park_after, let_end=options.let_end)
        if number > 1:
            seconds[with_park].append(total)
            parking += [away] * with_park
    plain, parked = (statistics.median(seconds[which]) for which in (False, True))
    print(
        f"{options.requests} requests of {options.prompt_tokens} + {options.new_tokens} tokens, medians of {options.repeats}: "
        f"a round {plain:.3f} s of the processor, with a park {parked:.3f} s (+{parked - plain:.3f}), of it leaving and coming back "
        f"{statistics.median(parking):.3f} s"
    )
    engine.close()


def _requests(count: int, prompt_tokens: int, new_tokens: int) -> list[Request]:
    rng = np.random.default_rng(SEED)
    prompts = rng.integers(3, 14, (-(-count // SAMPLES), prompt_tokens)).astype(np.int32)
    return [
        Request(
            name := request_id(*divmod(i, SAMPLES)),
            prompts[i // SAMPLES],
            seed_of_request(SEED, name),
            new_tokens,
            ignore_stop=True,
        )
        for i in range(count)
    ]


def _round(
    engine: RolloutEngine, asked: list[Request], *, park_after: int | None, let_end: int
) -> tuple[float, float]:
    """Processor seconds of a round, and of its park until the engine has its requests again."""
    drafts, whole, away = Drafts(SEED), 0, 0.0
    drafts.ask(asked)
    started = time.process_time()
    engine.submit(_sent(asked))
    if park_after is not None:
        whole += len(drafts.take(_arrived(engine.step(park_after))))
        leaving = time.process_time()
        whole += len(drafts.take(_arrived(engine.park(let_end))))
        engine.go_on()
        engine.submit(_sent(drafts.resubmit()))
        away = time.process_time() - leaving
    while whole < len(asked):
        whole += len(drafts.take(_arrived(engine.step(16))))
    return time.process_time() - started, away


def _sent(requests: list[Request]) -> list[Request]:
    return pickle.loads(pickle.dumps(requests, 5))


def _arrived(responses: list[Response]) -> list[Response]:
    batch: ResponseBatch = pickle.loads(pickle.dumps(ResponseBatch.of(responses), 5))
    return batch.responses()


if __name__ == "__main__":
    main()
