"""Stub engines and trainer ranks of `python -m benchmarks.driver`: real processes and messages, no model.

An engine process has a run's thread, socket and messages (EngineLoop, EngineServer) around random tokens,
which come at a steady rate; a rank's update takes a fixed time. Both sleep, which leaves the processor to the
driver and the reward workers.
"""

from __future__ import annotations

import dataclasses
import heapq
import time
from collections.abc import Iterable, Mapping
from typing import Any, cast

import numpy as np

from mrl.config.root import Config
from mrl.data.tokenise import decoder
from mrl.launch.workers.rollout_actor import RolloutActor
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.train_actor import TrainActor
from mrl.launch.workers.train_group import TrainGroup
from mrl.observe.phases import Event
from mrl.rollout.engine import PauseReport, RolloutEngine
from mrl.rollout.engine_loop import EngineLoop
from mrl.rollout.engine_process import EngineProcess
from mrl.rollout.engine_server import EngineServer
from mrl.rollout.request import Completion, GenerationRequest, join_completions, next_request, prompt_digest
from mrl.rollout.waiting_queue import ALL, NOTHING, TRAINING, WaitingQueue
from mrl.samples import ResponseSegment, Status, TrainBatch
from mrl.tokenizer_folder import load_tokenizer
from mrl.training.pass_options import PassOptions

POOL_TOKENS = 1 << 20
"""Random tokens of an engine; each response is a slice of them."""
TOKENS_A_STEP = 8
"""Most tokens that a request gains per step, so that an engine's process uses little CPU time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
    """Speed of the stubs."""

    token_seconds: float
    """Seconds per token of each running request."""
    update_seconds: float
    vocab_size: int


@dataclasses.dataclass(slots=True)
class _Open:
    """A request that has not ended: as submitted, as it runs, its completion so far, and its start."""

    original: GenerationRequest
    request: GenerationRequest
    so_far: Completion | None = None
    begun: int = 0


class StubEngine:
    """The part of RolloutEngine that an EngineLoop calls; time counts in tokens."""

    def __init__(self, pace: Pace, part: EngineProcess, *, seats: int, seed: int) -> None:
        rng = np.random.default_rng(part.engine)
        self.part, self.version = part, -1
        self._pace, self._seats, self._seed = pace, seats, seed
        self._tokens = rng.integers(0, pace.vocab_size, POOL_TOKENS).astype(np.int32)
        self._logprobs = -rng.exponential(0.5, POOL_TOKENS).astype(np.float32)
        self._open: dict[str, _Open] = {}
        self._waiting, self._running = WaitingQueue(), dict[str, _Open]()
        self._ends: list[tuple[int, str]] = []
        """Heap of (end, request id) of running requests."""
        self._now = 0

    @property
    def has_work(self) -> bool:
        return bool(self._running or len(self._waiting))

    def vote(self, *, wants_pause: bool) -> tuple[bool, bool]:
        return self.has_work, wants_pause

    def submit(self, requests: Iterable[GenerationRequest]) -> None:
        for request in requests:
            self._open[request.request_id] = _Open(request, request)
            self._waiting.add([request])

    def step(self) -> list[Completion]:
        """Add equally many tokens to all running requests, until the first ends; return those that ended."""
        for request in self._waiting.take(self._seats - len(self._running)):
            entry = self._running[request.request_id] = self._open[request.request_id]
            entry.begun = self._now
            heapq.heappush(self._ends, (self._now + request.max_tokens, request.request_id))
        if not self._ends:
            return []
        count = min(self._ends[0][0] - self._now, TOKENS_A_STEP)
        time.sleep(count * self._pace.token_seconds)
        self._now += count
        ended = []
        while self._ends and self._ends[0][0] <= self._now:
            name = heapq.heappop(self._ends)[1]
            entry = self._running.pop(name)
            del self._open[name]
            ended.append(join_completions(entry.so_far, self._completion(entry, Status.TRUNCATED)))
        return ended

    def take_ended(self) -> list[Completion]:
        return []

    def pause(self) -> PauseReport:
        self._waiting.hold(ALL)
        interrupted, self._running, self._ends = list(self._running.values()), {}, []
        for entry in interrupted:
            entry.so_far = join_completions(entry.so_far, self._completion(entry, Status.INTERRUPTED))
            entry.request = next_request(entry.original, entry.so_far, self._seed)
        self._waiting.add(entry.request for entry in interrupted)
        contexts = (len(entry.request.prompt_tokens) + len(entry.request.own_tokens) for entry in interrupted)
        return PauseReport(len(interrupted), sum(contexts))

    def snapshot(self) -> list[Completion]:
        begun = (entry.so_far for entry in self._open.values() if entry.so_far is not None)
        return [dataclasses.replace(part, status=Status.INTERRUPTED) for part in begun if len(part.tokens)]

    def resume(self, *, training: bool = True) -> None:
        self._waiting.hold(NOTHING if training else TRAINING)

    def abort(self, request_ids: Iterable[str]) -> None:
        names = set(request_ids)
        self._waiting.remove(names)
        self._open = {name: entry for name, entry in self._open.items() if name not in names}
        self._running = {name: entry for name, entry in self._running.items() if name not in names}
        self._ends = sorted(end for end in self._ends if end[1] not in names)

    def close(self) -> None: ...

    def _completion(self, entry: _Open, status: Status) -> Completion:
        """Return the tokens of a request since it began."""
        request, length = entry.request, self._now - entry.begun
        start = request.seed % (POOL_TOKENS - length)
        digest = prompt_digest(request.engine_prompt())
        segment = ResponseSegment(0, length, self.version, request.attempt, self.part.engine, digest)
        part = slice(start, start + length)
        segments = (segment,) if length else ()
        return Completion(request.request_id, self._tokens[part], self._logprobs[part], segments, status)


class StubRank:
    """The part of MegatronWorker that a GRPO step without a reference calls."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace

    def step(self) -> dict[str, float]:
        return {"grad_norm": 1.0, "skipped": 0.0}


class StubRolloutActor(RolloutActor):
    def start_stub(self, pace: Pace, secret: bytes) -> None:
        config = self._config
        server = EngineServer(self._listener, secret, decoder(load_tokenizer(config.model.path)))
        stub = StubEngine(pace, self.part, seats=config.rollout.max_num_seqs, seed=config.run.seed)
        self.loop = EngineLoop(lambda: cast(RolloutEngine, stub), server)
        self.loop.start()
        self.loop.ready.result()
        server.serve(self.loop)


class StubTrainActor(TrainActor):
    worker: Any

    def __init__(self, config: Config, rank: int, log_folder: str) -> None:
        self._config, self._rank = config, rank

    def start_stub(self, pace: Pace) -> None:
        self.worker, self._pace = StubRank(pace), pace

    def accumulate(
        self, shard: TrainBatch, divisors: Mapping[str, float], options: PassOptions
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """Return the engine's log-probs: the policy has not changed."""
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
        self.on_all(_start, pace, self.secret)

    def serve(self, version: int) -> None:
        self.on_all(RolloutActor.on_engine, lambda engine: setattr(engine, "version", version))


class StubTrain(TrainGroup):
    actor_class = StubTrainActor

    def start_stubs(self, pace: Pace) -> None:
        self.on_all(_start, pace)


def _start(actor: Any, *arguments: Any) -> None:
    actor.start_stub(*arguments)


class StubPools:
    """The part of TwoPools that a schedule needs."""

    def __init__(self, train: StubTrain, rollout: StubRollout) -> None:
        self.train, self.rollout = train, rollout

    def start(self, pace: Pace) -> None:
        self.train.start_stubs(pace)
        self.rollout.start_stubs(pace)

    def look(self, event: Event) -> None:
        """Watch the engines, as a run does (listener of its clock)."""
        if event != "enter":
            self.rollout.watch()

    def transfer(self, version: int) -> dict[str, float]:
        return {}

    def sync(self, version: int) -> dict[str, float]:
        self.rollout.serve(version)
        return {}

    def end_generation(self) -> None: ...
