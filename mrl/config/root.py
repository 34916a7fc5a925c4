"""The whole configuration of a run: its sections, and the rules that cross them."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import model_validator

from mrl.config.sections.agent import AgentSection
from mrl.config.sections.algorithm import RELATIVE, AlgorithmSection
from mrl.config.sections.critic import CriticSection
from mrl.config.sections.data import DataSection
from mrl.config.sections.export import ExportSection
from mrl.config.sections.launch import LaunchSection
from mrl.config.sections.logging import LoggingSection
from mrl.config.sections.loop import LoopSection
from mrl.config.sections.model import ModelSection
from mrl.config.sections.rollout import RolloutSection
from mrl.config.sections.routing import RoutingSection
from mrl.config.sections.run import RunSection
from mrl.config.sections.stream import StreamSection
from mrl.config.sections.sync import SyncSection
from mrl.config.sections.training import TrainingSection
from mrl.config.sections.tune import TuneSection
from mrl.rewards.kinds.reward_section import RewardSection
from mrl.section import Section


def _given(tree: Mapping[str, Any], section: type[Section], name: str, setting: str) -> int:
    """A number of a configuration that is not checked yet; its default where there is none."""
    found = tree.get(name)
    value = found.get(setting) if isinstance(found, dict) else getattr(found, setting, None)
    return value if isinstance(value, int) else section.model_fields[setting].default


def _refusal(setting: str, without: Mapping[str, bool], way_out: str) -> Iterator[str]:
    """Yield what refuses a setting beside the first of what it cannot go together with that holds, if one does."""
    if found := next((sentence for sentence, holds in without.items() if holds), None):
        yield f"{setting} with {found}, or {way_out}"


class Config(Section):
    """Everything a run is made of; a resolved file of it runs again as it is."""

    run: RunSection
    """Name, folder and seed."""
    model: ModelSection
    """The policy's starting point."""
    data: DataSection
    """Training and validation rows."""
    reward: RewardSection
    """How responses are verified."""
    agent: AgentSection | None = None
    """The environment of the episodes; absent where a response is all there is."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Estimator, losses and their constants."""
    training: TrainingSection = TrainingSection()
    """The Megatron side."""
    critic: CriticSection | None = None
    """The value model; for algorithm.estimator gae, and absent otherwise."""
    rollout: RolloutSection = RolloutSection()
    """The vLLM side."""
    routing: RoutingSection = RoutingSection()
    """Which experts a trained token visits."""
    sync: SyncSection = SyncSection()
    """The weight sync."""
    loop: LoopSection = LoopSection()
    """Order and amount of work."""
    stream: StreamSection = StreamSection()
    """How far generation runs ahead, with loop.schedule stream."""
    launch: LaunchSection = LaunchSection()
    """Processes and machines."""
    logging: LoggingSection = LoggingSection()
    """Trackers and dumps."""
    export: ExportSection = ExportSection()
    """Checkpoints as Hugging Face folders."""
    tune: TuneSection | None = None
    """Demonstrations or preferences, run by `mrl tune`."""

    @model_validator(mode="before")
    @classmethod
    def _longest_is_prompt_and_response(cls, tree: Any) -> Any:
        """With model.max_length, where it is left out: room for the longest prompt and the longest response."""
        model = tree.get("model") if isinstance(tree, dict) else None
        if not isinstance(model, dict) or model.get("max_length") is not None:
            return tree
        lengths = (
            _given(tree, DataSection, "data", "max_prompt_tokens"),
            _given(tree, RolloutSection, "rollout", "max_response_tokens"),
        )
        return {**tree, "model": {**model, "max_length": sum(lengths)}}

    def faults(self) -> Iterator[str]:
        yield from self._slot_faults()
        yield from self._learning_faults()
        yield from self._stream_faults()
        yield from self._worker_faults()
        yield from self._length_faults()

    def _slot_faults(self) -> Iterator[str]:
        world, own, ranks = self.training.layout.world_size, self.launch.engine_slots, self.rollout.ranks
        name = "rollout.tp" if self.rollout.dp == 1 else "rollout.dp x tp"
        if own % ranks:
            yield (
                f"{name} = {ranks} does not divide launch.engine_slots = {own}; engines = engine_slots / {name}"
            )
        if not own and world % ranks:
            yield (
                f"{name} = {ranks} does not divide the training world of {world} slots "
                f"(tp x cp x dp x pp); engines = world / {name}, or have launch.engine_slots of their own"
            )
        if self.launch.engine_slots and self.training.offload == "always":
            yield (
                f"training.offload = always with launch.engine_slots = {self.launch.engine_slots}: engines have slots of "
                "their own, so that trainers never leave theirs; choose auto or never"
            )
        if unknown := [rank for rank in self.launch.profile.ranks if not 0 <= rank < world]:
            yield f"launch.profile.ranks names {unknown}; trainer ranks are 0 to {world - 1}"

    def _learning_faults(self) -> Iterator[str]:
        name = self.algorithm.estimator.name
        if self.algorithm.needs_values and self.critic is None:
            yield (
                f"algorithm.estimator {name} needs a critic; add the section (critic: {{}} for its defaults)"
            )
        if self.critic is not None and not self.algorithm.needs_values:
            yield f"critic: only read by algorithm.estimator gae, not by {name}; remove the section"
        alone = self.loop.samples_per_prompt == 1 and name in RELATIVE
        if alone and self.algorithm.distillation is None:
            yield (
                f"loop.samples_per_prompt = 1 with algorithm.estimator.name = {name}: the estimator compares the samples of one "
                "prompt, so that every advantage would be 0 and nothing is learned; set loop.samples_per_prompt to 2 or more, or "
                "choose reinforce_pp or gae"
            )
        if self.routing.replay == "engine" and self.agent is not None:
            yield (
                "routing.replay = engine: the routes of an environment's answers are not put together with those of the turns; set "
                "routing.replay = trainer or off, or remove the section agent"
            )
        if self.routing.replay == "trainer" and not self.algorithm.recomputes_policy:
            yield (
                "routing.replay = trainer: a step's only update chooses experts itself, and there is no pass before it whose "
                "choices it could take; set algorithm.old_logprobs = recomputed, or replay = off"
            )
        exports, saves = self.export.every_steps, self.loop.checkpoint.every_steps
        if exports and (not saves or exports % saves):
            yield (
                f"export.every_steps = {exports} must be a multiple of loop.checkpoint.every_steps = {saves}: "
                "a folder is made of a checkpoint that was just saved"
            )

    def _stream_faults(self) -> Iterator[str]:
        stream, loop = self.stream, self.loop
        is_read = loop.schedule == "stream"
        if not is_read and stream != StreamSection():
            yield "stream: only read with loop.schedule = stream; set it, or remove the section"
        on_policy = stream.max_age == 0 and stream.sync_every == 1
        if is_read and on_policy and self.launch.engine_slots:
            yield (
                f"stream.max_age = 0 with launch.engine_slots = {self.launch.engine_slots}: engines and trainer would wait for each "
                "other on slots of their own; set max_age 1 or more, sync_every above 1, or engine_slots 0"
            )
        if is_read and loop.deterministic and not (on_policy and self.algorithm.filter is None):
            yield (
                "loop.deterministic = true with loop.schedule = stream needs stream.max_age 0, sync_every 1 and no "
                "algorithm.filter: else an engine's batches depend on when responses finish"
            )
        if is_read and not on_policy and self.algorithm.ignores_age:
            yield (
                f"stream.max_age = {stream.max_age} with algorithm.loss.name = {self.algorithm.loss.name}: the loss has no "
                "ratio, so that tokens of earlier versions would be trained as if the newest had sampled them; set "
                "algorithm.old_logprobs: decoupled with a correction, choose a loss with a ratio, or max_age 0"
            )
        limit = self.loop.max_rollout_mismatch
        without = {
            "engines on the trainer's slots, which give their caches away; set launch.engine_slots": (
                not self.launch.engine_slots
            ),
            f"rollout.dp = {self.rollout.dp}; set 1": self.rollout.dp > 1,
            "routing.replay = engine: a route belongs to one version's pass over a prompt": (
                self.routing.replay == "engine"
            ),
            f"loop.max_rollout_mismatch = {limit}: tokens over an earlier version's cache differ by what training changes; set "
            "null, and an algorithm.correction": limit is not None,
        }
        if self.keeps_caches:
            yield from _refusal("stream.kv_cache = keep", without, "kv_cache recompute")
        without = {
            "engines on the trainer's slots; set launch.engine_slots": not self.launch.engine_slots,
            "loop.schedule = on_policy; set stream": self.loop.schedule != "stream",
            f"rollout.dp = {self.rollout.dp}: the ranks of such an engine start together; set 1": self.rollout.dp
            > 1,
            "routing.replay = engine: routes end with the process that has them; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        if self.rollout.replace:
            yield from _refusal(f"rollout.replace = {self.rollout.replace}", without, "replace 0")

    def _worker_faults(self) -> Iterator[str]:
        without = {
            "reward.engines, which answer on the driver's machine alone; start the server yourself and give its path": (
                bool(self.reward.engines)
            ),
            "routing.replay = engine: handles of routes do not pass through workers; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        if self.rollout.workers == "node":
            yield from _refusal("rollout.workers = node", without, "workers driver")

    def _length_faults(self) -> Iterator[str]:
        if self.rollout.max_response_tokens >= self.model.max_length:
            yield (
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens} leaves nothing for a prompt "
                f"in model.max_length = {self.model.max_length}"
            )
        agent, response = self.agent, self.rollout.max_response_tokens
        if agent is None and any(part.kind == "environment" for part in self.reward.all_verifiers()):
            yield "reward.kind = environment: there is none; add the section agent"
        if agent is not None and (agent.max_turn_tokens or 0) > response:
            yield (
                f"agent.max_turn_tokens = {agent.max_turn_tokens} has no effect: the whole episode has "
                f"rollout.max_response_tokens = {response}"
            )
        if agent is not None and self.loop.deterministic:
            yield (
                "loop.deterministic = true with the section agent: when environments answer decides what shares an engine's "
                "batch"
            )

    @property
    def keeps_caches(self) -> bool:
        """Whether unfinished responses go on over the KV cache of the weights before a weight sync."""
        return self.loop.schedule == "stream" and self.stream.kv_cache == "keep"

    @property
    def updates_per_step(self) -> int:
        """Updates that a step of the loop makes; minibatches are whole groups, so there are no more of them
        than prompts."""
        return self.algorithm.epochs * min(self.algorithm.minibatches, self.loop.prompts_per_step)

    def in_updates(self) -> "Config":
        """The same run with the schedules of policy and critic counted in updates, as their optimizers
        count."""
        counted = {
            name: section.model_copy(
                update={"optimizer": section.optimizer.in_updates(self.updates_per_step)}
            )
            for name, section in (("training", self.training), ("critic", self.critic))
            if section is not None
        }
        return self.model_copy(update=counted)

    def as_placed(self, *, shares_memory: bool = False) -> "Config":
        """Return the same run with what own slots of engines decide: nobody off-loads or sleeps, and weights go as messages
        if auto cannot have them go through memory. `shares_memory`: all slots are of one machine, and none is a GPU."""
        if not self.launch.engine_slots:
            return self
        goes = self.sync.transport != "auto" or shares_memory
        transport = self.sync.transport if goes else "distributed"
        return self.model_copy(
            update={
                "sync": self.sync.model_copy(update={"transport": transport}),
                "training": self.training.model_copy(update={"offload": "never"}),
                "rollout": self.rollout.model_copy(update={"enable_sleep_mode": False}),
            }
        )

    @property
    def num_slots(self) -> int:
        """Slots that the run takes: the trainer's, and after them those that engines have to themselves."""
        return self.training.layout.world_size + self.launch.engine_slots

    @property
    def engine_slots(self) -> range:
        """The slot of each engine rank: the trainer's slots, or those after them; engine e has the e-th dp x tp of these, the
        first tp of them for its dp rank 0."""
        trainers = self.training.layout.world_size
        return range(trainers, self.num_slots) or range(trainers)

    @property
    def num_engines(self) -> int:
        """Rollout engines."""
        return len(self.engine_slots) // self.rollout.ranks

    @property
    def run_folder(self) -> str:
        return f"{self.run.folder}/{self.run.name}"
