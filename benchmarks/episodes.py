"""python -m benchmarks.episodes: what open episodes cost the driver, over the environments' real processes and a policy of no model.

`--prompts` times `--samples` episodes of the game `guess` are open at once. A turn takes an engine `--turn-seconds` and has
`--turn-tokens` tokens, an answer of the environment `--answer-seconds` on average; both sleep meanwhile. Told is the processor time of
the driver's thread, by turn and as a share of the time that the episodes took; the stub's own share of it is in there. With `--nodes N`
the environments are reached as those of N nodes are; all of them are on this machine.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mrl.agents.episode import Limits
from mrl.agents.pool import EnvironmentPool
from mrl.agents.render import TurnRenderer
from mrl.config.load import load
from mrl.config.root import Config
from mrl.launch.cluster.cluster import cluster
from mrl.launch.workers.environment_nodes import EnvironmentNodes
from mrl.launch.workers.placement import node_strategies
from mrl.loops.arrivals.as_they_come import Environments, Rollout
from mrl.loops.episodes import Episodes, Rules
from mrl.loops.in_flight import InFlight
from mrl.observe.phases import PhaseClock
from mrl.prepare import tokenizer
from mrl.rewards.kinds.section import RewardSection
from mrl.rewards.pool.pool import RewardPool
from mrl.rollout.request import Request, Response, Round, Sampling, prompt_digest
from mrl.samples import Prompt, Segment, Status
from mrl.tokenizer_folder import load_tokenizer

LETTERS = "Guess my number from 1 to 64. Say a number. higher lower 0123456789"


class StubEngines(Rollout):
    """Turns of random tokens, each a fixed time after it was asked for."""

    def __init__(self, seconds: float, num_tokens: int, vocab_size: int) -> None:
        rng = np.random.default_rng(0)
        self._seconds, self._count = seconds, num_tokens
        self._tokens = rng.integers(3, vocab_size, 1 << 16).astype(np.int32)
        self._logprobs = np.full(num_tokens, -0.5, np.float32)
        self._due: list[tuple[float, Request]] = []
        self.turns = 0

    def submit(self, requested: Iterable[Round | Request]) -> None:
        due = time.monotonic() + self._seconds
        for each in requested:
            self._due += [
                (due, request) for request in (each.requests() if isinstance(each, Round) else [each])
            ]

    def at_work(self) -> Sequence[int]:
        return [0] if self._due else []

    def ended(self, timeout_seconds: float) -> Sequence[int]:
        wait = min(due for due, _ in self._due) - time.monotonic()
        time.sleep(min(max(wait, 0.02), timeout_seconds))  # a tick
        return [0]

    def take(self, engines: Sequence[int]) -> list[Response]:
        now = time.monotonic()
        ended = [request for due, request in self._due if due <= now]
        self._due = [(due, request) for due, request in self._due if due > now]
        self.turns += len(ended)
        return [self._response(request) for request in ended]

    def _response(self, request: Request) -> Response:
        start, count = request.seed % (len(self._tokens) - self._count), self._count
        segment = Segment(0, count, 0, request.attempt, 0, prompt_digest(request.engine_prompt()))
        tokens = self._tokens[start : start + count]
        said = str(request.seed % 64 + 1)
        return Response(request.request_id, tokens, self._logprobs, (segment,), Status.FINISHED, said)

    def park(self) -> list[Response]:
        return []

    def go_on(self) -> None:
        pass

    def under_way(self) -> Sequence[Any]:
        return ()

    def where(self, prompt: int) -> str:
        return "the stub"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.episodes", description=__doc__)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--turn-seconds", type=float, default=2.0)
    parser.add_argument("--turn-tokens", type=int, default=256)
    parser.add_argument("--answer-seconds", type=float, default=1.0)
    parser.add_argument("--nodes", type=int, default=0, help="0: the pool is in the driver's process")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measured(options, Path(folder)), indent=1))


@contextlib.contextmanager
def environments(options: argparse.Namespace, folder: Path) -> Iterator[Environments]:
    """The game's processes, below this one or below one actor for each node."""
    agent = f"agent={{environment: guess, options: {{seconds: {options.answer_seconds}}}, nodes: all}}"
    config: Config = load(["configs/quickstart.yaml"], [agent, "reward={kind: environment}"])
    assert config.agent is not None
    if not options.nodes:
        with EnvironmentPool.of(config.agent) as pool:
            yield pool
        return
    with cluster(config.launch, num_slots=config.num_slots):
        places = options.nodes * node_strategies()
        nodes = EnvironmentNodes(
            config, PhaseClock(), strategies=places, environment={}, log_folder=str(folder / "logs")
        )
        with nodes.pool() as pool:
            yield pool


def measured(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The figures of one round of episodes."""
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": LETTERS}))
    tokenizer.write_chat([folder / "rows.jsonl"], folder)
    spoken = load_tokenizer(str(folder))
    engines = StubEngines(options.turn_seconds, options.turn_tokens, len(spoken))
    budget = 16 * (options.turn_tokens + 64)
    rules = Rules(
        "guess", TurnRenderer(spoken), Limits(8, 2 * budget, budget, options.turn_tokens), 0, "json", {}
    )
    prompts = [Prompt(n, np.zeros(1, np.int32), "", None) for n in range(options.prompts)]
    sampling = Sampling(options.samples, 1.0, options.turn_tokens, 0)
    with (
        environments(options, folder) as answers,
        RewardPool(RewardSection.model_validate({"kind": "environment"})) as rewards,
    ):
        episodes = Episodes(answers, lambda _: rules, run_seed=0)
        in_flight = InFlight(engines, rewards, PhaseClock(), run_seed=0, episodes=episodes)
        start, worked = time.monotonic(), time.thread_time()
        in_flight.ask(prompts, sampling)
        while len(in_flight.whole()) < len(prompts):
            in_flight.poll(1.0)
        seconds, worked = time.monotonic() - start, time.thread_time() - worked
    return {
        "episodes": float(options.prompts * options.samples),
        "turns": float(engines.turns),
        "seconds": seconds,
        "driver processor seconds": worked,
        "driver processor milliseconds a turn": 1000 * worked / engines.turns,
        "driver share": worked / seconds,
    }


if __name__ == "__main__":
    main()
