"""Start everything a run needs, from its configuration to running workers, and stop it at the end.

Order: checks (launch/commands/check.py), verifiers, cluster, workers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import logging
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mrl.agents.environment_client import Environments
from mrl.agents.pool import EnvironmentWorkers
from mrl.capacity.model_facts import find_facts
from mrl.capacity.requirements import unmet
from mrl.config.root import Config
from mrl.data.load_rows import Dataset
from mrl.data.prompt_stream import PromptStream
from mrl.errors import ConfigError
from mrl.launch.cluster.cluster import OwnRay, address_of, cluster, has_gpus
from mrl.launch.cluster.driver_watchdog import DriverWatchdog
from mrl.launch.commands.check import Inputs, check_run
from mrl.launch.commands.engines import asks_engine, without_gpus_of
from mrl.launch.commands.this_machine import with_values
from mrl.launch.workers.colocated import Hybrid
from mrl.launch.workers.environments import EnvironmentRules
from mrl.launch.workers.placement import place
from mrl.launch.workers.reward_workers import check_rewards, reward_pool
from mrl.launch.workers.rollout_group import RolloutGroup
from mrl.launch.workers.rollout_workers import RolloutWorkerGroup
from mrl.launch.workers.train_group import TrainGroup
from mrl.launch.workers.two_pools import TwoPools
from mrl.loops.checkpoints import Checkpoints
from mrl.loops.group_supply import GroupSupply
from mrl.loops.on_policy import OnPolicyLoop
from mrl.loops.recorder import Recorder
from mrl.loops.rollout_thread import RolloutThread, in_this_process
from mrl.loops.stream import StreamLoop
from mrl.loops.throughput import Throughput, peak_flops
from mrl.observe.driver_memory import tune_driver_memory
from mrl.observe.phases import Event, PhaseClock
from mrl.observe.token_values import Pieces
from mrl.rewards.pool.engines import RewardEngines
from mrl.rollout.engine_pool import EnginePool
from mrl.rollout.request import Lengths, Sampling
from mrl.samples import Prompt
from mrl.training.hf.hf_folder import read_config
from mrl.trajectories.group import GroupMaker
from mrl.trajectories.remote_rollouts import RemoteRollouts
from mrl.trajectories.rewards import RewardWorkers

log = logging.getLogger(__name__)

WORKER_VARIABLES = re.compile(
    r"(MRL_SESSION|CUDA_HOME)"
    r"|(NCCL|UCX|GLOO|FI|OFI|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|VLLM|FLASHINFER|DG|NVTE)_"
    r"(?!.*(KEY|TOKEN|SECRET)).*"
)
"""Variables that workers get from the driver, also in a Ray that others started: none with a secret."""
OF_THE_DRIVER = ("VLLM_LOGGING_LEVEL", "TORCH_CPP_LOG_LEVEL", "VLLM_HOST_IP")
"""Variables that concern the driver's process alone."""
MOST_THREADS = 8
"""Maximum intra-op threads of a rank on a GPU node; more gain nothing."""


@dataclasses.dataclass(frozen=True)
class Parts:
    """Parts of a training loop."""

    config: Config
    hybrid: Hybrid
    rollouts: RolloutThread
    dataset: Dataset
    prompts: PromptStream
    clock: PhaseClock
    pieces: Pieces
    """Texts of single tokens, for samples.jsonl."""
    lengths: Lengths | None = None
    """Fixed response lengths, for measurements; None: the policy ends its responses."""

    def loop(
        self,
        recorder: Recorder,
        checkpoints: Checkpoints,
        *,
        should_stop: Callable[[], str | None] = lambda: None,
    ) -> OnPolicyLoop | StreamLoop:
        """Return the loop of the configured schedule, before its first step."""
        config, prompts, sampling = self.config, self.prompts, Sampling.of(self.config, self.lengths)
        common = self.dataset.validation_prompts(config.loop.validation.num_prompts), recorder, checkpoints
        options: dict[str, Any] = {"should_stop": should_stop, "throughput": self.throughput()}
        if config.loop.schedule == "stream":
            self.rollouts.open_buffer(config, prompts, sampling)
            return StreamLoop(config, self.hybrid, self.rollouts, *common, **options)
        supply = GroupSupply(config, prompts, sampling)
        return OnPolicyLoop(config, self.hybrid, self.rollouts, supply, *common, **options)

    def throughput(self) -> Throughput:
        """Return the throughput meter; its peak FLOP/s is the slowest device's, or None if one is unknown."""
        config = self.config
        names = self.hybrid.train.device_names()
        peaks = [peak_flops(name, config.training.dtype) for name in names]
        known = [peak for peak in peaks if peak is not None]
        peak = min(known) if len(known) == len(names) else None
        facts = find_facts(config.model)
        return Throughput(facts, config.algorithm, config.num_slots, config.training.layout.world_size, peak)


@contextlib.contextmanager
def assembled(
    config: Config, *, log_folder: Path, when_known: Callable[[Config], None] = lambda config: None
) -> Iterator[Parts]:
    """Start all workers, before the first weight sync; stop them at the end of the block.

    ConfigError and DataError are raised before anything starts. `when_known` is called after the checks, with
    the configuration in which settings have values in place of `auto`: for a Ray cluster to join, it depends
    on the cluster's slots. The clock has the phases of the start: check, cluster, workers, connect.
    """
    clock, chosen = PhaseClock(), list[str]()
    if not address_of(config.launch):
        config, chosen = with_values(config)
    with contextlib.ExitStack() as stack:
        gc.disable()  # garbage collection takes a fifth of the import time and frees nothing
        stack.callback(gc.enable)
        with clock.phase("check"):
            inputs = check_run(config)
            for warning in inputs.warnings:
                log.warning(warning)
            if inputs.refusal:
                raise ConfigError(inputs.refusal)
            print(inputs.dataset.report.text(), *chosen, sep="\n", flush=True)
            print(_starting(config), flush=True)
        engines = stack.enter_context(
            RewardEngines(
                config.reward, log_folder, start_deadline_seconds=config.launch.start_deadline_seconds
            )
        )
        prompts = inputs.dataset.stream(config.run.seed)
        overdue = stack.enter_context(DriverWatchdog(clock, config.loop.phase_deadline_seconds))
        with clock.phase("cluster"):
            stack.enter_context(without_gpus_of(config.reward))
            ray = stack.enter_context(cluster(config.launch, num_slots=config.num_slots))
        config, chosen = with_values(config, gpus=has_gpus())
        print("".join(f"{line}\n" for line in chosen), end="", flush=True)
        when_known(config)
        if config.rollout.workers == "node":

            def start_workers(hybrid: Hybrid) -> contextlib.AbstractContextManager[object]:
                return worker_processes(config, hybrid, inputs, clock, log_folder).started()

            hybrid = stack.enter_context(hybrid_engine(config, clock, log_folder, beside=start_workers))
            workers = hybrid.rollout.workers
            assert isinstance(workers, RolloutWorkerGroup), "start_workers started them"
            make = in_workers(config, workers)
        else:
            rewards = stack.enter_context(reward_processes(config, engines, inputs.trial))
            acting = inputs.acting
            environments = stack.enter_context(EnvironmentWorkers.of(acting.section)) if acting else None
            hybrid = stack.enter_context(hybrid_engine(config, clock, log_folder))
            make = in_driver(config, hybrid, rewards, environments, acting)
        rollouts = rollout_thread(config, make, clock)
        stack.callback(rollouts.close)
        with clock.phase("connect"):
            hybrid.rollout.attach(rollouts)
        tune_driver_memory()
        gc.enable()
        stack.callback(gc.unfreeze)
        stack.enter_context(_looked_after(ray, overdue, clock))
        yield Parts(config, hybrid, rollouts, inputs.dataset, prompts, clock, inputs.pieces)


@contextlib.contextmanager
def _looked_after(ray: OwnRay, overdue: DriverWatchdog, clock: PhaseClock) -> Iterator[None]:
    """Watch Ray's processes and the driver while the workers are up."""

    def check_ray(event: Event) -> None:
        ray.require(clock.current)

    clock.listeners.append(check_ray)
    overdue.begin()
    try:
        yield
    finally:
        clock.listeners.remove(check_ray)
        overdue.closing(without_ray=bool(ray.gone()))


def _starting(config: Config) -> str:
    """Return a line about the following minute, in which nothing is printed."""
    reward_engines = f", and for rewards {', '.join(config.reward.engines)}" if config.reward.engines else ""
    ranks, engines = config.training.layout.world_size, config.num_engines
    engine_slots = config.launch.engine_slots
    slots = f"{engine_slots} slots of their own" if engine_slots else f"{ranks} slots"
    return f"starting Ray, {ranks} trainer ranks and {engines} engines on {slots}{reward_engines}"


def reward_processes(
    config: Config, engines: RewardEngines, trial: Sequence[Prompt]
) -> contextlib.AbstractContextManager[RewardWorkers]:
    """Return the driver node's reward workers; wait for judges' servers and try the verifiers that use
    them."""
    section = engines.ready()
    if untried := [prompt for prompt in trial if asks_engine(section, prompt)]:
        check_rewards(section, untried)
    return reward_pool(config, section, check=engines.check)


def in_driver(
    config: Config,
    hybrid: Hybrid,
    rewards: RewardWorkers,
    environments: Environments | None,
    acting: EnvironmentRules | None,
) -> Callable[[RolloutThread], GroupMaker]:
    """Return a factory of the group maker of the driver's rollout thread, over a hybrid engine's engines."""
    group = hybrid.rollout

    def engines(thread: RolloutThread) -> EnginePool:
        return EnginePool(
            [group.name(number) for number in group.numbers()],
            secret=group.secret,
            run_seed=config.run.seed,
            by_index=config.loop.deterministic or config.loop.schedule == "on_policy",
            block_of=group.block_of,
            on_lost=thread.note_lost,
        )

    return in_this_process(
        engines,
        rewards,
        run_seed=config.run.seed,
        environments=environments,
        **(acting.for_rollouts() if acting else {}),
    )


def worker_processes(
    config: Config, hybrid: Hybrid, inputs: Inputs, clock: PhaseClock, log_folder: Path
) -> RolloutWorkerGroup:
    """Start a rollout worker on each node of a hybrid engine's engines."""
    return RolloutWorkerGroup(
        config,
        hybrid.rollout,
        clock,
        trial=inputs.trial,
        acting=inputs.acting,
        environment=worker_environment(config),
        log_folder=str(log_folder),
    )


def in_workers(config: Config, workers: RolloutWorkerGroup) -> Callable[[RolloutThread], GroupMaker]:
    """Return a factory of the group maker that runs in rollout workers."""

    def make(thread: RolloutThread) -> GroupMaker:
        return RemoteRollouts(
            workers,
            by_index=workers.by_index,
            silent_seconds=config.rollout.step_deadline_seconds,
            on_failure=thread.fail,
            on_engine_lost=thread.note_lost,
        )

    return make


def rollout_thread(
    config: Config, make: Callable[[RolloutThread], GroupMaker], clock: PhaseClock
) -> RolloutThread:
    """Start the thread that supplies a schedule with the groups of `make`."""
    return RolloutThread(make, clock, deadline_seconds=config.loop.phase_deadline_seconds)


@contextlib.contextmanager
def hybrid_engine(
    config: Config,
    clock: PhaseClock,
    log_folder: Path,
    *,
    beside: Callable[[Hybrid], contextlib.AbstractContextManager[object]] = contextlib.nullcontext,
) -> Iterator[Hybrid]:
    """Start trainer ranks and engines on the connected cluster's slots; close them at the end. `beside`: a
    context entered before waiting for them, and left before closing them."""
    gpus = has_gpus()
    placement = place(config.num_slots, gpus=gpus, deadline_seconds=config.launch.start_deadline_seconds)
    config = config.as_placed(gpus=gpus, one_node=len(set(placement.nodes)) == 1)
    environment = worker_environment(
        config, slots_per_node=max(Counter(placement.nodes).values()) if gpus else None
    )
    options: dict[str, Any] = {"environment": environment, "log_folder": str(log_folder)}
    with contextlib.ExitStack() as stack:
        stack.callback(placement.remove)
        if faults := unmet(config, read_config(config.model.path), placement.nodes, gpus=gpus):
            raise ConfigError("\n".join(faults))
        kind = TwoPools if config.launch.engine_slots else Hybrid
        hybrid = kind(
            config,
            TrainGroup(config, placement, clock, **options),
            RolloutGroup(
                config, placement, clock, sleeps=config.rollout.enable_sleep_mode and gpus, **options
            ),
            clock,
            offloads=config.training.offloads(gpus=gpus),
        )
        stack.callback(hybrid.close)
        stack.enter_context(beside(hybrid))
        hybrid.start()
        yield hybrid


def worker_environment(config: Config, *, slots_per_node: int | None = None) -> dict[str, str]:
    """Return the variables of all workers; `slots_per_node`: set if slots are GPUs.

    Threads of a rank are a setting on CPU, and on GPUs its share of the driver node's cores, because loading
    converts and shards weights there.
    """
    threads = max(config.training.num_threads, config.rollout.num_threads)
    if slots_per_node is not None:
        threads = max(1, min(MOST_THREADS, len(os.sched_getaffinity(0)) // (2 * slots_per_node)))
    fixed = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": str(threads)}
    return fixed | {
        name: value
        for name, value in os.environ.items()
        if WORKER_VARIABLES.fullmatch(name) and name not in OF_THE_DRIVER
    }
