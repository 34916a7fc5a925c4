"""python -m benchmarks.driver_parts: what each thing that the driver does for a step costs, without any other process.

Every part is called alone, once, on `--prompts` groups of random responses, in processor seconds, so that other work on the machine
hardly counts; told for `--told-for` prompts. Event loops, sockets and the reward workers' messages are not in it: `python -m
benchmarks.driver` has them.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.algorithms.controllers import AlgorithmState
from mrl.algorithms.recipe import shape_and_estimate
from mrl.config.load import load
from mrl.config.root import Config
from mrl.loops import mismatch, nan_guard, staleness
from mrl.loops.screen import Screen
from mrl.pool.group_bytes import encode_group, size_of
from mrl.rollout import engine_messages
from mrl.rollout.request import Completion, GenerationRequest, Sampling, prompt_digest, whole_sample
from mrl.samples import Group, Prompt, ResponseSegment, Sample, Status, TrainBatch, Verdict, VerdictKind
from mrl.training.balance import Dealer, SampleCost
from mrl.training.batch import ages, merge_parts, pack

ROOT = Path(__file__).parents[1]
VOCABULARY, PROMPT_TOKENS = 7000, 200


class Parts:
    """Calls parts and keeps what they took."""

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def __call__[T](self, name: str, part: Callable[[], T]) -> T:
        start = time.process_time()
        found = part()
        print(f"{name:<34} {self._scale * (time.process_time() - start):7.3f} s", flush=True)
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver_parts", description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--told-for", type=int, default=512)
    options = parser.parse_args(arguments)
    config = load(
        [ROOT / "configs/quickstart.yaml"],
        [
            f"loop={{schedule: stream, prompts_per_step: {options.prompts}, samples_per_prompt: {options.samples}}}",
            "algorithm.filter=null",
        ],
    )
    parts = Parts(options.told_for / options.prompts)
    groups = _generated(parts, config, options.prompts, options.tokens)
    parts("a group's size in memory", lambda: [size_of(group) for group in groups])
    parts("a group as bytes (files alone)", lambda: [encode_group(group) for group in groups])
    _screened(parts, config, groups)
    _trained(parts, config, groups)


def _generated(parts: Parts, config: Config, num_prompts: int, num_tokens: int) -> list[Group]:
    rng, num_samples = np.random.default_rng(0), config.loop.samples_per_prompt
    prompts = [
        Prompt(n, rng.integers(3, VOCABULARY, PROMPT_TOKENS).astype(np.int32), "", None)
        for n in range(num_prompts)
    ]
    requests = parts("requests", lambda: Sampling(num_samples, 1.0, num_tokens, 0).requests(prompts))
    parts("a message of requests", lambda: engine_messages.encode(engine_messages.submit(requests)))
    parted = itertools.batched(_answers(requests, rng), 64)
    ended = [engine_messages.encode(engine_messages.ended(part, lambda block: -1)) for part in parted]
    completions: list[Completion] = parts(
        "completions out of messages",
        lambda: [c for data in ended for c in engine_messages.completions_of(engine_messages.decode(data))],
    )
    pairs = [(divmod(n, num_samples), completion) for n, completion in enumerate(completions)]
    samples: list[Sample] = parts(
        "samples", lambda: [whole_sample(prompts[i], number, c) for (i, number), c in pairs]
    )
    samples = [s.with_verdict(Verdict(VerdictKind.SCORED, float(rng.random()))) for s in samples]
    return [
        Group(prompt, tuple(samples[n * num_samples : (n + 1) * num_samples]))
        for n, prompt in enumerate(prompts)
    ]


def _answers(requests: Sequence[GenerationRequest], rng: np.random.Generator) -> list[Completion]:
    tokens = rng.integers(3, VOCABULARY, 1 << 20).astype(np.int32)
    logprobs = -rng.exponential(0.5, 1 << 20).astype(np.float32)
    answers = []
    for request in requests:
        start, length = request.seed % (len(tokens) - request.max_tokens), request.max_tokens
        part, digest = slice(start, start + length), prompt_digest(request.prompt_tokens)
        segments, text = (ResponseSegment(0, length, 0, 0, 0, digest),), 5 * length * "x"
        ended = Completion(request.request_id, tokens[part], logprobs[part], segments, Status.TRUNCATED, text)
        answers.append(ended)
    return answers


def _screened(parts: Parts, config: Config, groups: list[Group]) -> None:
    screen = Screen(config)
    screened = parts("which groups are worth it", lambda: screen.look(groups))
    screen.book(screened)
    parts("a row's statistics", lambda: screen.close(screened.scored, version=0, effort=""))
    parts("a row's ages", lambda: staleness.ages_of(groups, 0))


def _trained(parts: Parts, config: Config, groups: list[Group]) -> None:
    batch = parts("packing", lambda: pack(groups))
    batch = batch.with_arrays(age=parts("ages of packed tokens", lambda: ages(groups, version=0)))
    parts("checking numbers", lambda: nan_guard.check_batch(batch, batch.arrays))
    state = AlgorithmState.of(config.algorithm)
    batch, _ = parts(
        "rewards to advantages", lambda: shape_and_estimate(config.algorithm, batch, groups, state=state)
    )
    shards = parts("shards of two ranks", lambda: _shards(batch))
    logprobs = [shard.arrays["rollout_logprobs"] for _, shard in shards]
    found = parts("ranks' answers", lambda: merge_parts(batch, [part for part, _ in shards], logprobs))
    measured: dict[str, Any] = {"served": batch.arrays["age"] == 0, "margin": 1e-5}
    parts("engine against trainer", lambda: mismatch.measure_mismatch(batch, found, None, **measured))


def _shards(batch: TrainBatch) -> list[tuple[np.ndarray, TrainBatch]]:
    dealt, parts = Dealer(ranks=2, max_tokens=16384, cost=SampleCost(token=8000, pair=1))(batch)
    return [(part, dealt.select(part)) for part in parts]


if __name__ == "__main__":
    main()
