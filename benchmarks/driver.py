"""python -m benchmarks.driver: measure what a stream step costs the driver, with stub engines and trainers.

The driver works as in a run: prompts, requests, engine messages, texts, reward workers (a hash), ledger,
store, packing, advantages, shards, rows. Only models are missing (driver_stubs.py): tokens come so fast that
a step takes about `--step-seconds`. The driver's own seconds hardly depend on that; its share does.
"""

from __future__ import annotations

import argparse
import contextlib
import cProfile
import itertools
import json
import pstats
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from benchmarks.bench_load import LogNormalLengths, hashed
from benchmarks.driver_stubs import Pace, StubPools, StubRollout, StubTrain
from mrl.config.load import load
from mrl.config.root import Config
from mrl.data.prompt_stream import PromptStream
from mrl.launch.cluster.cluster import cluster
from mrl.launch.commands.start_run import in_driver, in_workers, rollout_thread
from mrl.launch.workers.actor_group import close_all
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.placement import place
from mrl.launch.workers.rollout_workers import RolloutWorkerGroup
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.recorder import Recorder
from mrl.loops.rollout_thread import RolloutThread
from mrl.loops.stream import StreamLoop
from mrl.observe import metrics_log
from mrl.observe.driver_memory import tune_driver_memory
from mrl.observe.phases import Event, PhaseClock
from mrl.observe.run_folder import RunFolder
from mrl.prepare.tokenizer import write_bpe
from mrl.rewards.pool.reward_pool import RewardPool
from mrl.rollout.request import Lengths, Sampling
from mrl.samples import Prompt
from mrl.trajectories.group import GroupMaker

ROOT = Path(__file__).parents[1]
FIGURES = ("time/step_seconds", "perf/driver_seconds", "perf/driver_cpu_seconds", "perf/driver_frac")
ROLLOUTS, PROCESS = "rollout thread", "all threads' processor seconds"


class Processor:
    """Processor seconds of the driver: of its thread by phase, of the rollout thread, and of the process."""

    def __init__(self, rollouts: RolloutThread) -> None:
        self._rollouts, self._clock, self._phase = rollouts, rollouts.clock, "between"
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._thread, self._others = time.thread_time(), self._of_others()
        self._clock.listeners.append(self._on)

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, by name."""
        self._note()
        before, self._others = self._others, self._of_others()
        seconds = {**self._seconds, **{name: now - before[name] for name, now in self._others.items()}}
        self._seconds.clear()
        return seconds

    def _of_others(self) -> dict[str, float]:
        return {ROLLOUTS: self._rollouts.cpu_seconds(), PROCESS: time.process_time()}

    def _on(self, event: Event) -> None:
        if event != "wait":
            self._note()
            self._phase = self._clock.current if event == "enter" else "between"

    def _note(self) -> None:
        now = time.thread_time()
        self._seconds[self._phase] += now - self._thread
        self._thread = now


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.driver", description=__doc__)
    parser.add_argument("--prompts", type=int, default=512)
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2000, help="mean response length")
    parser.add_argument("--sigma", type=float, default=0.5, help="standard deviation of the log length")
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--workers", choices=["driver", "node"], default="driver", help="rollout.workers")
    parser.add_argument("--step-seconds", type=float, default=60.0)
    parser.add_argument("--steps", type=int, default=5, help="measured steps, after two warm-up steps")
    parser.add_argument("--profile", type=int, default=0, help="number of the driver's functions to print")
    options = parser.parse_args(arguments)
    profile = cProfile.Profile() if options.profile else None
    rows = _rows(options, profile)[2:]
    for row in rows:
        print("  ".join(f"{name} {row[name]:.3f}" for name in (*FIGURES, "mem/driver_bytes")))
    step, driver, computed, _ = (statistics.median(row[name] for row in rows) for name in FIGURES)
    print(
        f"{options.prompts} x {options.samples} x {options.tokens} tokens, medians of {len(rows)}: a step "
        f"{step:.1f} s, the driver's own {driver:.2f} s ({computed:.2f} of the processor), "
        f"{driver / step:.1%}; at most 5 % of steps from {20 * driver:.0f} s"
    )
    if profile is not None:
        pstats.Stats(profile).sort_stats("tottime").print_stats(options.profile)


def _rows(options: argparse.Namespace, profile: cProfile.Profile | None) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="mrl-driver-") as folder, contextlib.ExitStack() as stack:
        _write_tokenizer(folder)
        config = _config(options, folder)
        stack.enter_context(cluster(config.launch, num_slots=config.num_slots))
        clock = PhaseClock()
        pools = stack.enter_context(_pools(config, clock, folder))
        pools.start(_pace(options))
        run_folder = RunFolder(config.run_folder)
        make = stack.enter_context(_rollouts(config, pools, clock, run_folder))
        rollouts = rollout_thread(config, make, clock)
        stack.callback(rollouts.close)
        pools.rollout.attach(rollouts)
        loop = _loop(options, config, pools, rollouts, run_folder, stack)
        loop.start()
        tune_driver_memory()  # as in launch/commands/start_run.py
        clock.listeners.append(pools.look)
        processor = Processor(rollouts)
        for number in range(options.steps + 2):
            if profile is not None and number == 2:
                profile.enable()
            loop.step()
            figures = (f"{name} {seconds:.2f}" for name, seconds in processor.take().items())
            print(f"processor seconds: {', '.join(figures)}", flush=True)
        if profile is not None:
            profile.disable()
        rows = metrics_log.read(run_folder.metrics)
        run_folder.close()
    return rows


def _write_tokenizer(folder: str) -> None:
    """Write a tokenizer made from this project's pages."""
    pages = [page.read_text(encoding="utf-8") for page in sorted(ROOT.glob("docs/**/*.md"))]
    words = Path(folder, "pages.jsonl")
    words.write_text("".join(json.dumps({"text": page}) + "\n" for page in pages), encoding="utf-8")
    write_bpe([words], f"{folder}/model", vocab_size=8000)


def _config(options: argparse.Namespace, folder: str) -> Config:
    most = 4 * options.tokens
    return load(
        [ROOT / "configs/quickstart.yaml"],
        [
            f"run={{name: driver, folder: {folder}}}",
            f"model={{path: {folder}/model, max_length: {most + 512}, new: {{}}}}",
            "reward={kind: plugin, style: native, path: "
            f"'{hashed.__module__}:{hashed.__name__}', workers: 2}}",
            f"rollout.workers={options.workers}",
            "algorithm.filter=null",
            "training.layout={ep: 1, dp: 2}",
            f"launch.engine_slots={options.engines}",
            f"rollout={{max_response_tokens: {most}, max_num_seqs: {_seats(options)}}}",
            "loop.schedule=stream",
            "stream.max_staleness=1",
            f"loop.prompts_per_step={options.prompts}",
            f"loop.samples_per_prompt={options.samples}",
            f"loop.steps={options.steps + 3}",
            "loop.validation={every_steps: 0, before_training: false, after_training: false}",
            "loop.checkpoint={every_steps: 0, at_end: false}",
        ],
    )


def _seats(options: argparse.Namespace) -> int:
    """Return an engine's concurrent requests: an eighth of its share of a step."""
    return max(1, options.prompts * options.samples // options.engines // 8)


def _pace(options: argparse.Namespace) -> Pace:
    """Return a pace at which generating a step's tokens takes about the step, and an update half of it."""
    waves = 8
    return Pace(
        token_seconds=options.step_seconds / waves / options.tokens,
        update_seconds=options.step_seconds / 2,
        vocab_size=7000,
    )


@contextlib.contextmanager
def _pools(config: Config, clock: PhaseClock, folder: str) -> Iterator[StubPools]:
    placement = place(config.num_slots, gpus=False, deadline_seconds=120)
    options: dict[str, Any] = {"environment": {"OMP_NUM_THREADS": "1"}, "log_folder": folder}
    train = StubTrain(config, placement, clock, **options)
    rollout = StubRollout(config, placement, clock, sleeps=False, **options)
    try:
        yield StubPools(train, rollout)
    finally:
        close_all((rollout, train), deadline_seconds=20)
        placement.remove()


def _loop(
    options: argparse.Namespace,
    config: Config,
    pools: StubPools,
    rollouts: RolloutThread,
    run_folder: RunFolder,
    stack: contextlib.ExitStack,
) -> StreamLoop:
    rng = np.random.default_rng(0)
    rows = [Prompt(n, rng.integers(3, 7000, 200).astype(np.int32), "", None) for n in range(1000)]
    prompts = PromptStream(rows, seed=0)
    rollouts.open_buffer(config, prompts, Sampling.of(config, _lengths(options, config)))
    recorder = Recorder(config, run_folder, rollouts.clock, first_step=0)
    return StreamLoop(config, pools, rollouts, [], recorder, Checkpoints(config, run_folder))


@contextlib.contextmanager
def _rollouts(
    config: Config, pools: StubPools, clock: PhaseClock, folder: RunFolder
) -> Iterator[Callable[[RolloutThread], GroupMaker]]:
    """Yield a function that makes groups, in the driver or in a rollout worker."""
    options: dict[str, Any] = {"environment": {"OMP_NUM_THREADS": "1"}, "log_folder": str(folder.path)}
    if config.rollout.workers == "node":
        workers = RolloutWorkerGroup(config, pools.rollout, clock, trial=[], acting=None, **options)
        with workers.started():
            yield in_workers(config, workers)
    else:
        with RewardPool(config.reward, group_size=config.loop.samples_per_prompt) as rewards:
            yield in_driver(config, cast(Hybrid, pools), rewards, None, None)


def _lengths(options: argparse.Namespace, config: Config) -> Lengths:
    """Return lengths that were drawn before the first step, so that the steps' seconds exclude drawing."""
    draw = LogNormalLengths(options.tokens, options.sigma, config.rollout.max_response_tokens, seed=0)
    prompts, samples = range(options.prompts * (options.steps + 5)), range(options.samples)
    drawn = {key: draw(*key) for key in itertools.product(prompts, samples)}
    return lambda prompt, sample: drawn[prompt, sample]


if __name__ == "__main__":
    main()
