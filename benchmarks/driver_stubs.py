"""Engines and trainer ranks of `python -m benchmarks.driver`: real processes with the driver's side of their messages, and no model.

An engine's tokens are random and come at a steady rate; a rank's update takes a fixed time. Both sleep meanwhile, so that
the processor is the driver's and the reward workers'.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from mrl.config.root import Config
from mrl.data.tokenise import decoder
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.rollout.request import GenerationRequest, Response, prompt_digest, sample_of
from mrl.rollout.texts import Texts
from mrl.rollout.waiting import WaitingQueue
from mrl.samples import ResponseSegment, Status, TrainBatch
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.pass_options import PassOptions

POOL_TOKENS = 1 << 20
"""Random tokens of an engine; each response is a part of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """How fast the stubs are."""

    engine_step_seconds: float
    """Each running request of an engine gains a token in so long."""
    update_seconds: float
    """Of a trainer rank."""
    vocab_size: int


class StubEngine:
    """RolloutEngine, as far as its actor calls it."""

    def __init__(self, pace: Pace, *, index: int, seats: int) -> None:
        rng = np.random.default_rng(index)
        self._pace, self._index, self._seats = pace, index, seats
        self._tokens = rng.integers(0, pace.vocab_size, POOL_TOKENS).astype(np.int32)
        self._logprobs = -rng.exponential(0.5, POOL_TOKENS).astype(np.float32)
        self._waiting, self._running = WaitingQueue(), dict[str, tuple[GenerationRequest, int]]()
        self.version = -1

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        self._waiting.add(requests)

    def step(self, max_steps: int) -> list[Response]:
        """All requests that have a seat gain so many tokens."""
        for request in self._waiting.take(self._seats - len(self._running)):
            self._running[request.request_id] = request, 0
        if self._running:
            time.sleep(max_steps * self._pace.engine_step_seconds)
        self._running = {n: (r, done + max_steps) for n, (r, done) in self._running.items()}
        ended = [name for name, (request, done) in self._running.items() if done >= request.max_tokens]
        return [self._response(*self._running.pop(name), Status.TRUNCATED) for name in ended]

    def works_for(self, prompt: int) -> bool:
        return any(sample_of(name)[0] <= prompt for name in (*self._running, *self._waiting.first()))

    def goes_on_working(self, wanted: bool) -> bool:
        return wanted and bool(self._running or len(self._waiting))

    def park(self, max_steps: int) -> list[Response]:
        self._waiting.hold()
        parked = [self._response(*running, Status.PARKED) for running in self._running.values()]
        self._running.clear()
        return parked

    def go_on(self) -> None:
        self._waiting.go_on()

    def _response(self, request: GenerationRequest, done: int, status: Status) -> Response:
        length = min(done, request.max_tokens)
        start = request.seed % (POOL_TOKENS - length)
        digest = prompt_digest(request.engine_prompt())
        segment = ResponseSegment(0, length, self.version, request.attempt, self._index, digest)
        part = slice(start, start + length)
        segments = (segment,) if length else ()
        return Response(request.request_id, self._tokens[part], self._logprobs[part], segments, status)


class StubRank:
    """MegatronWorker, as far as a step of GRPO without a reference calls it."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def step(self) -> dict[str, float]:
        return {"grad_norm": 1.0, "skipped": 0.0}


class StubRolloutActor(RolloutActor):
    engine: Any

    def start_stub(self, pace: Pace) -> None:
        self.engine = StubEngine(pace, index=self.part.engine, seats=self._config.rollout.max_num_seqs)
        self.texts = Texts(decoder(load_tokenizer(self._config.model.path)))

    def close(self) -> None: ...


class StubTrainActor(TrainActor):
    worker: Any

    def __init__(self, config: Config, rank: int, log_folder: str) -> None:
        self._config, self._rank = config, rank

    def start_stub(self, pace: Pace) -> None:
        self.worker, self._pace = StubRank(pace), pace

    def accumulate(
        self, shard: TrainBatch, divisors: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """The policy has not moved: the engine's log-probs are the trainer's."""
        assert not options.with_reference
        time.sleep(self._pace.update_seconds)
        logprobs = shard.arrays["rollout_logprobs"]
        return {"loss": 0.0}, {"logprobs": logprobs}

    def update(
        self, shard: TrainBatch, divisors: Mapping[str, float], options: PassOptions
    ) -> dict[str, float]:
        raise AssertionError("one update a step measures the engine too, and goes through accumulate")

    def close(self) -> None: ...


class StubRollout(RolloutGroup):
    actor_class = StubRolloutActor

    def start_stubs(self, pace: Pace) -> None:
        self.on_all(_start, pace)

    def serve(self, version: int) -> None:
        self.on_all(_serve, version)


class StubTrain(TrainGroup):
    actor_class = StubTrainActor

    def start_stubs(self, pace: Pace) -> None:
        self.on_all(_start, pace)


def _start(actor: Any, pace: Pace) -> None:
    actor.start_stub(pace)


def _serve(actor: Any, version: int) -> None:
    actor.engine.version = version


class StubPools:
    """TwoPools, as a schedule needs it."""

    def __init__(self, train: StubTrain, rollout: StubRollout) -> None:
        self.train, self.rollout = train, rollout

    def start(self, pace: Pace) -> None:
        self.train.start_stubs(pace)
        self.rollout.start_stubs(pace)

    def sync(self, version: int) -> dict[str, float]:
        self.rollout.serve(version)
        return {}

    def rest(self) -> None: ...
