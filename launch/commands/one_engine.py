"""An engine and reward workers of this process alone, for commands that measure a model folder: no trainer, no Ray."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.data.tokenise import decoder
from mrl.launch.commands.acting import Acting, open_episodes
from mrl.launch.commands.engines import with_engines
from mrl.loops.collect import Collector
from mrl.loops.in_flight import InFlight
from mrl.loops.protocols import Rollout
from mrl.observe.phases import PhaseClock
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rollout.end_of_text_ids import end_of_text, require_can_end
from mrl.rollout.request import GenerationRequest, Response, Round
from mrl.rollout.texts import Texts
from mrl.training.hf.hf_folder import read_config

if TYPE_CHECKING:
    from mrl.rollout.engine import RolloutEngine


@contextlib.contextmanager
def collecting(
    config: Config, tokenizer: Any, acting: Acting | None, *, group_size: int
) -> Iterator[Collector]:
    """What makes judged groups of prompts by the weights of model.path; all of it ends with the block."""
    from mrl.rollout.engine import RolloutEngine

    require_can_end(config.rollout, tokenizer, int(read_config(config.model.path)["vocab_size"]))
    ends = end_of_text(tokenizer, config.model.path)
    engine = RolloutEngine(
        config.rollout,
        config.model.path,
        max_length=config.model.max_length,
        seed=config.run.seed,
        sync=config.sync,
        stop_token_ids=ends,
        trust_remote_code=config.model.trust_remote_code,
        real_weights=True,
    )
    try:
        with (
            with_engines(config) as asking,
            RewardPool(asking.reward, group_size=group_size) as reward_workers,
            open_episodes(acting, config) if acting else contextlib.nullcontext() as episodes,
        ):
            rollout, clock = _OneEngine(engine, Texts(decoder(tokenizer, ends))), PhaseClock()
            in_flight = InFlight(rollout, reward_workers, clock, run_seed=config.run.seed, episodes=episodes)
            yield Collector(in_flight, clock=clock, deadline_seconds=config.loop.phase_deadline_seconds)
    finally:
        engine.close()


class _OneEngine(Rollout):
    """An engine of this process as the loop sees engines."""

    def __init__(self, engine: RolloutEngine, texts: Texts) -> None:
        self._engine, self._texts = engine, texts
        self._ended: list[Response] = []

    def submit(self, requested: Iterable[Round | GenerationRequest]) -> None:
        for each in requested:
            requests = each.requests() if isinstance(each, Round) else [each]
            self._texts.expect(requests)
            self._engine.submit(requests)

    def at_work(self) -> Sequence[int]:
        return [0] if self._engine.num_unfinished else []

    def ended(self, timeout_seconds: float) -> Sequence[int]:
        """The engine works only while it is waited for."""
        self._ended += self._texts.told(self._engine.poll(timeout_seconds))
        return [0]

    def take(self, engines: Sequence[int]) -> list[Response]:
        ended, self._ended = self._ended, []
        return ended

    def park(self) -> list[Response]:
        return self._texts.told(self._engine.park())

    def go_on(self) -> None:
        self._engine.go_on()

    def under_way(self) -> Sequence[Any]:
        return ()

    def where(self, prompt: int) -> str:
        return "the engine"
