"""One engine and reward workers in this process, for commands that measure a model folder without Ray.

The engine has its own thread and socket, as in a run, and this process is its driver.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Iterator
from typing import Any

from mrl.agents.pool import EnvironmentWorkers
from mrl.config.root import Config
from mrl.data.tokenise import decoder
from mrl.errors import RolloutError
from mrl.launch.commands.engines import with_engines
from mrl.launch.workers.environments import EnvironmentRules
from mrl.loops.rollout_thread import RolloutThread, in_this_process
from mrl.observe.phases import PhaseClock
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rollout.end_of_text_ids import end_of_text, require_can_end
from mrl.rollout.engine_client import Address
from mrl.rollout.engine_loop import EngineLoop
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.engine_server import EngineServer
from mrl.training.hf.hf_folder import read_config


@contextlib.contextmanager
def one_engine(
    config: Config, tokenizer: Any, acting: EnvironmentRules | None, *, group_size: int
) -> Iterator[RolloutThread]:
    """Yield a rollout thread that makes judged groups with the weights of model.path; stop all afterwards."""
    require_can_end(config.rollout, tokenizer, int(read_config(config.model.path)["vocab_size"]))
    secret = secrets.token_bytes(32)

    def engines(thread: RolloutThread) -> EnginePool:
        def lost(number: int, why: str, kind: str) -> None:
            thread.fail(RolloutError(why))

        return EnginePool(["the engine"], secret=secret, run_seed=config.run.seed, on_lost=lost)

    with contextlib.ExitStack() as stack:
        address = stack.enter_context(_served(config, tokenizer, secret))
        served_config = stack.enter_context(with_engines(config))
        rewards = stack.enter_context(RewardPool(served_config.reward, group_size=group_size))
        environments = stack.enter_context(EnvironmentWorkers.of(acting.section)) if acting else None
        make = in_this_process(
            engines,
            rewards,
            run_seed=config.run.seed,
            environments=environments,
            **(acting.for_rollouts() if acting else {}),
        )
        rollouts = RolloutThread(make, PhaseClock(), deadline_seconds=config.loop.phase_deadline_seconds)
        stack.callback(rollouts.close)
        rollouts.connect(0, address)
        rollouts.resume()
        yield rollouts


@contextlib.contextmanager
def _served(config: Config, tokenizer: Any, secret: bytes) -> Iterator[Address]:
    """Yield the address of an engine with the folder's weights."""
    from mrl.rollout.engine import RolloutEngine

    ends = end_of_text(tokenizer, config.model.path)

    def make() -> RolloutEngine:
        return RolloutEngine(
            config.rollout,
            config.model.path,
            max_length=config.model.max_length,
            seed=config.run.seed,
            sync=config.sync,
            stop_token_ids=ends,
            trust_remote_code=config.model.trust_remote_code,
            real_weights=True,
        )

    listener = socket.create_server(("127.0.0.1", 0))
    server = EngineServer(listener, secret, decoder(tokenizer, ends))
    engine = EngineLoop(make, server)
    engine.start()
    engine.ready.result()
    server.serve(engine)
    try:
        yield listener.getsockname()[:2]
    finally:
        engine.close()
