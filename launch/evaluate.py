"""`mrl eval`: greedy accuracy, avg@k and pass@k of a model folder on any data file, with the run's judge. One engine, no trainer, no Ray."""

from __future__ import annotations

from launch.assemble import decoder, load_tokenizer
from mrl.config.root import Config
from mrl.data.load import load_data
from mrl.errors import DataError
from mrl.judges.pool import JudgePool
from mrl.loops.collect import Collector
from mrl.loops.validate import validate
from mrl.observe.phases import PhaseClock
from mrl.rollout.request import Response, Round


def evaluate(config: Config) -> dict[str, float]:
    """`val/accuracy`, and `val/avg@k` and `val/pass@k` for k = loop.validation.num_samples, over data.validation."""
    from mrl.rollout.engine import RolloutEngine

    tokenizer = load_tokenizer(config)
    prompts = load_data(config.data, config.judge, tokenizer).validation_prompts(
        config.loop.validation.num_prompts
    )
    if not prompts:
        raise DataError("mrl eval measures data.validation, which is not given or has no rows left")
    engine = RolloutEngine(
        config.rollout,
        config.model.path,
        max_length=config.model.max_length,
        seed=config.run.seed,
        sync=config.sync,
        stop_token_ids=(tokenizer.eos_token_id,),
        real_weights=True,
    )
    try:
        with JudgePool(config.judge, group_size=max(1, config.loop.validation.num_samples)) as judges:
            collector = Collector(
                _OneEngine(engine),
                judges,
                decoder(tokenizer),
                clock=PhaseClock(),
                deadline_seconds=config.loop.phase_deadline_seconds,
            )
            return validate(collector, prompts, config)[0]
    finally:
        engine.close()


class _OneEngine:
    """An engine of this process behind the loop's door."""

    def __init__(self, engine) -> None:
        self._engine = engine

    def submit(self, wanted: Round) -> None:
        self._engine.submit(wanted.requests())

    def poll(self, timeout_seconds: float) -> list[Response]:
        return self._engine.poll(timeout_seconds)
