"""`mrl eval`: greedy accuracy, avg@k and pass@k of a model folder on any data file, with the run's verifier. One engine, no trainer, no Ray."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mrl.config.root import Config
from mrl.data.load import load_validation
from mrl.data.tokenise import decoder, load_tokenizer
from mrl.errors import ConfigError, DataError
from mrl.launch.commands.acting import look_at, opened
from mrl.loops.collect import Collector
from mrl.loops.in_flight import InFlight
from mrl.loops.validate import validate
from mrl.observe.phases import PhaseClock
from mrl.observe.samples_log import write_all
from mrl.rewards.pool.pool import RewardPool
from mrl.rollout.request import Request, Response, Round
from mrl.rollout.stop_tokens import end_of_text
from mrl.rollout.texts import Texts
from mrl.samples import Group
from mrl.training.checkpoint.folder import digest

if TYPE_CHECKING:
    from mrl.rollout.engine import RolloutEngine

SAMPLES, SUMMARY = "samples.jsonl", "summary.json"


def evaluate(config: Config, *, out: str | None = None) -> dict[str, float]:
    """`val/accuracy`, and `val/avg@k` and `val/pass@k` for k = loop.validation.num_samples, over data.validation.

    No training row is read. The new folder `out` then has every sample (kind "validation" where greedy, else "sampled") and a
    summary: the metrics, the settings and what they were measured on. ConfigError where it exists and is not empty.
    """
    folder, start, sampled = _new_folder(out) if out else None, time.monotonic(), list[Group]()
    metrics, greedy = _measure(config, sampled)
    if folder:
        write_all(folder / SAMPLES, 0, greedy, kind="validation")
        write_all(folder / SAMPLES, 0, sampled, kind="sampled")
        summary = {
            "metrics": metrics,
            "model": {"path": config.model.path, "sha256": model_digest(config.model.path)},
            "seconds": time.monotonic() - start,
            "settings": config.model_dump(mode="json"),
        }
        (folder / SUMMARY).write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return metrics


def model_digest(path: str) -> str:
    """SHA-256, in hex, over names, sizes and SHA-256 of the files of a model folder: what was measured, wherever it lies."""
    folder = Path(path)
    files = {
        file.name: [file.stat().st_size, digest(file, version=1)]
        for file in sorted(folder.iterdir())
        if file.is_file()
    }
    return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()


def _new_folder(path: str) -> Path:
    folder = Path(path)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"--out {path} exists and is not empty; choose a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _measure(config: Config, sampled: list[Group]) -> tuple[dict[str, float], list[Group]]:
    """The metrics and the greedy groups; the groups of k samples are put into `sampled`."""
    tokenizer = load_tokenizer(config.model.path, trust_remote_code=config.model.trust_remote_code)
    acting = look_at(config, tokenizer)
    tools = acting.tools if acting else None
    dataset = load_validation(config.data, config.reward, tokenizer, tools=tools)
    print(dataset.report.text(), file=sys.stderr, flush=True)
    prompts = dataset.validation_prompts(config.loop.validation.num_prompts)
    if not prompts:
        raise DataError("mrl eval measures data.validation, which is not given or has no rows left")
    from mrl.rollout.engine import RolloutEngine

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
            RewardPool(
                config.reward, group_size=max(1, config.loop.validation.num_samples)
            ) as reward_workers,
            opened(acting, config) if acting else contextlib.nullcontext() as episodes,
        ):
            rollout, clock = _OneEngine(engine, Texts(decoder(tokenizer, ends))), PhaseClock()
            in_flight = InFlight(rollout, reward_workers, clock, run_seed=config.run.seed, episodes=episodes)
            deadline = config.loop.phase_deadline_seconds
            collector = Collector(in_flight, clock=clock, deadline_seconds=deadline)
            return validate(collector, prompts, config, on_sampled=sampled.extend)
    finally:
        engine.close()


class _OneEngine:
    """An engine of this process as the loop sees engines."""

    def __init__(self, engine: RolloutEngine, texts: Texts) -> None:
        self._engine, self._texts = engine, texts
        self._ended: list[Response] = []

    def submit(self, requested: Iterable[Round | Request]) -> None:
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
