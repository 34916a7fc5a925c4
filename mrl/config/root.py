"""The whole configuration of a run: its sections, and the rules that cross them."""

from collections.abc import Mapping
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

    @model_validator(mode="after")
    def _layouts_fit(self) -> "Config":
        world, own, ranks = self.training.layout.world_size, self.launch.engine_slots, self.rollout.ranks
        name = "rollout.tp" if self.rollout.dp == 1 else "rollout.dp x tp"
        if own % ranks:
            raise ValueError(
                f"{name} = {ranks} does not divide launch.engine_slots = {own}; engines = engine_slots / {name}"
            )
        if not own and world % ranks:
            raise ValueError(
                f"{name} = {ranks} does not divide the training world of {world} slots "
                f"(tp x cp x dp x pp); engines = world / {name}, or have launch.engine_slots of their own"
            )
        return self

    @model_validator(mode="after")
    def _own_slots_are_never_left(self) -> "Config":
        if self.launch.engine_slots and self.training.offload == "always":
            raise ValueError(
                f"training.offload = always with launch.engine_slots = {self.launch.engine_slots}: engines have slots of "
                "their own, so that trainers never leave theirs; choose auto or never"
            )
        return self

    @model_validator(mode="after")
    def _profiled_ranks_exist(self) -> "Config":
        world = self.training.layout.world_size
        if unknown := [rank for rank in self.launch.profile.ranks if not 0 <= rank < world]:
            raise ValueError(f"launch.profile.ranks names {unknown}; trainer ranks are 0 to {world - 1}")
        return self

    @model_validator(mode="after")
    def _critic_has_a_reader(self) -> "Config":
        name = self.algorithm.estimator.name
        if self.algorithm.needs_values and self.critic is None:
            raise ValueError(
                f"algorithm.estimator {name} needs a critic; add the section (critic: {{}} for its defaults)"
            )
        if self.critic is not None and not self.algorithm.needs_values:
            raise ValueError(
                f"critic: only read by algorithm.estimator gae, not by {name}; remove the section"
            )
        return self

    @model_validator(mode="after")
    def _groups_can_be_compared(self) -> "Config":
        name = self.algorithm.estimator.name
        alone = self.loop.samples_per_prompt == 1 and name in RELATIVE
        if alone and self.algorithm.distillation is None:
            raise ValueError(
                f"loop.samples_per_prompt = 1 with algorithm.estimator.name = {name}: the estimator compares the samples of one "
                "prompt, so that every advantage would be 0 and nothing is learned; set loop.samples_per_prompt to 2 or more, or "
                "choose reinforce_pp or gae"
            )
        return self

    @model_validator(mode="after")
    def _replay_has_routes_to_take(self) -> "Config":
        if self.routing.replay == "engine" and self.agent is not None:
            raise ValueError(
                "routing.replay = engine: the routes of an environment's answers are not put together with those of the turns; set "
                "routing.replay = trainer or off, or remove the section agent"
            )
        if self.routing.replay == "trainer" and not self.algorithm.recomputes_policy:
            raise ValueError(
                "routing.replay = trainer: a step's only update chooses experts itself, and there is no pass before it whose "
                "choices it could take; set algorithm.old_logprobs = recomputed, or replay = off"
            )
        return self

    @model_validator(mode="after")
    def _exports_have_checkpoints(self) -> "Config":
        exports, saves = self.export.every_steps, self.loop.checkpoint.every_steps
        if exports and (not saves or exports % saves):
            raise ValueError(
                f"export.every_steps = {exports} must be a multiple of loop.checkpoint.every_steps = {saves}: "
                "a folder is made of a checkpoint that was just saved"
            )
        return self

    @model_validator(mode="after")
    def _stream_fits(self) -> "Config":
        stream, loop = self.stream, self.loop
        if loop.schedule == "on_policy":
            if stream != StreamSection():
                raise ValueError(
                    "stream: only read with loop.schedule = stream; set it, or remove the section"
                )
            return self
        on_policy = stream.max_age == 0 and stream.sync_every == 1
        if on_policy and self.launch.engine_slots:
            raise ValueError(
                f"stream.max_age = 0 with launch.engine_slots = {self.launch.engine_slots}: engines and trainer would wait for each "
                "other on slots of their own; set max_age 1 or more, sync_every above 1, or engine_slots 0"
            )
        if loop.deterministic and not (on_policy and self.algorithm.filter is None):
            raise ValueError(
                "loop.deterministic = true with loop.schedule = stream needs stream.max_age 0, sync_every 1 and no "
                "algorithm.filter: else an engine's batches depend on when responses finish"
            )
        if not on_policy and self.algorithm.ignores_age:
            raise ValueError(
                f"stream.max_age = {stream.max_age} with algorithm.loss.name = {self.algorithm.loss.name}: the loss has no "
                "ratio, so that tokens of earlier versions would be trained as if the newest had sampled them; set "
                "algorithm.old_logprobs: decoupled with a correction, choose a loss with a ratio, or max_age 0"
            )
        return self

    @model_validator(mode="after")
    def _caches_can_be_kept(self) -> "Config":
        if not self.keeps_caches:
            return self
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
        return self._refusing("stream.kv_cache = keep", without, ", or kv_cache recompute")

    @model_validator(mode="after")
    def _lost_engines_can_be_replaced(self) -> "Config":
        if not self.rollout.replace:
            return self
        without = {
            "engines on the trainer's slots; set launch.engine_slots": not self.launch.engine_slots,
            "loop.schedule = on_policy; set stream": self.loop.schedule != "stream",
            f"rollout.dp = {self.rollout.dp}: the ranks of such an engine start together; set 1": self.rollout.dp
            > 1,
            "routing.replay = engine: routes end with the process that has them; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        return self._refusing(f"rollout.replace = {self.rollout.replace}", without, ", or replace 0")

    @model_validator(mode="after")
    def _workers_have_what_they_need(self) -> "Config":
        if self.rollout.workers == "driver":
            return self
        without = {
            "reward.nodes = driver: rewards are computed where the workers are; set all": (
                self.reward.nodes == "driver"
            ),
            "agent.nodes = driver: environments are where the workers are; set all": (
                self.agent is not None and self.agent.nodes == "driver"
            ),
            "routing.replay = engine: handles of routes do not pass through workers; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        return self._refusing("rollout.workers = node", without, ", or workers driver")

    def _refusing(self, setting: str, without: Mapping[str, bool], way_out: str) -> "Config":
        """The configuration; ValueError with the first of what a setting cannot go together with, said by name, that holds."""
        if found := next((said for said, holds in without.items() if holds), None):
            raise ValueError(f"{setting} with {found}{way_out}")
        return self

    @model_validator(mode="after")
    def _lengths_fit(self) -> "Config":
        if self.rollout.max_response_tokens >= self.model.max_length:
            raise ValueError(
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens} leaves nothing for a prompt "
                f"in model.max_length = {self.model.max_length}"
            )
        return self

    @model_validator(mode="after")
    def _episodes_fit(self) -> "Config":
        if self.agent is None:
            if any(part.kind == "environment" for part in self.reward.all_verifiers()):
                raise ValueError("reward.kind = environment: there is none; add the section agent")
            return self
        agent, response = self.agent, self.rollout.max_response_tokens
        if agent.max_turn_tokens is not None and agent.max_turn_tokens > response:
            raise ValueError(
                f"agent.max_turn_tokens = {agent.max_turn_tokens} has no effect: the whole episode has "
                f"rollout.max_response_tokens = {response}"
            )
        if self.loop.deterministic:
            raise ValueError(
                "loop.deterministic = true with the section agent: when environments answer decides what shares an engine's "
                "batch"
            )
        return self

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
