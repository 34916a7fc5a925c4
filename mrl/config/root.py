"""Define the whole configuration of a run: its sections, and the rules across them."""

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
    """Return a number of an unchecked configuration, or its default."""
    given = tree.get(name)
    value = given.get(setting) if isinstance(given, dict) else getattr(given, setting, None)
    return value if isinstance(value, int) else section.model_fields[setting].default


def _refusal(setting: str, without: Mapping[str, bool], way_out: str) -> Iterator[str]:
    """Yield an error if a setting is combined with the first true, unsupported entry of `without`."""
    if reason := next((sentence for sentence, is_true in without.items() if is_true), None):
        yield f"{setting} with {reason}, or {way_out}"


class Config(Section):
    """Complete configuration of a run; the resolved file reproduces the run."""

    run: RunSection
    """Name, folder and seed."""
    model: ModelSection
    """Model that the policy starts from."""
    data: DataSection
    """Training and validation rows."""
    reward: RewardSection
    """Verifiers that reward responses."""
    agent: AgentSection | None = None
    """Environments of the episodes; absent for plain responses."""
    algorithm: AlgorithmSection = AlgorithmSection()
    """Estimator, losses and their constants."""
    training: TrainingSection = TrainingSection()
    """Trainer (Megatron)."""
    critic: CriticSection | None = None
    """Critic, required by algorithm.estimator gae and absent otherwise."""
    rollout: RolloutSection = RolloutSection()
    """Rollout engines (vLLM)."""
    routing: RoutingSection = RoutingSection()
    """Routing replay: which experts a trained token visits."""
    sync: SyncSection = SyncSection()
    """Weight sync."""
    loop: LoopSection = LoopSection()
    """Order and amount of work."""
    stream: StreamSection = StreamSection()
    """Staleness limit of loop.schedule stream."""
    launch: LaunchSection = LaunchSection()
    """Processes and machines."""
    logging: LoggingSection = LoggingSection()
    """Trackers and dumps."""
    export: ExportSection = ExportSection()
    """Export of checkpoints as Hugging Face folders."""
    tune: TuneSection | None = None
    """Demonstrations or preferences for `mrl tune`."""

    @model_validator(mode="before")
    @classmethod
    def _longest_is_prompt_and_response(cls, tree: Any) -> Any:
        """Set a missing model.max_length to the longest prompt plus the longest response."""
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
        world, engine_slots, ranks = (
            self.training.layout.world_size,
            self.launch.engine_slots,
            self.rollout.ranks,
        )
        name = "rollout.tp" if self.rollout.dp == 1 else "rollout.dp x tp"
        if engine_slots % ranks:
            yield (
                f"{name} = {ranks} does not divide launch.engine_slots = {engine_slots}; engines = "
                f"engine_slots / {name}"
            )
        if not engine_slots and world % ranks:
            yield (
                f"{name} = {ranks} does not divide the training world of {world} slots (tp x cp x dp x pp), "
                f"and engines = world / {name}; change one, or give engines launch.engine_slots of their own"
            )
        if self.launch.engine_slots and self.training.offload == "always":
            yield (
                f"training.offload = always with launch.engine_slots = {self.launch.engine_slots}: engines "
                "have their own slots, so trainers never leave theirs; set training.offload to auto or never"
            )
        if unknown := [rank for rank in self.launch.profile.ranks if not 0 <= rank < world]:
            yield f"launch.profile.ranks contains {unknown}, but trainer ranks are 0 to {world - 1}"

    def _learning_faults(self) -> Iterator[str]:
        name = self.algorithm.estimator.name
        if self.algorithm.needs_values and self.critic is None:
            yield (
                f"algorithm.estimator {name} needs a critic; add the section (critic: {{}} for its defaults)"
            )
        if self.critic is not None and not self.algorithm.needs_values:
            yield f"critic is only read by algorithm.estimator gae, not by {name}; remove the section"
        is_alone = self.loop.samples_per_prompt == 1 and name in RELATIVE
        if is_alone and self.algorithm.distillation is None:
            yield (
                f"loop.samples_per_prompt = 1 with algorithm.estimator.name = {name}: the estimator compares "
                "the samples of one prompt, so every advantage would be 0 and nothing learned; set "
                "loop.samples_per_prompt to 2 or more, or choose reinforce_pp or gae"
            )
        if self.routing.replay == "engine" and self.agent is not None:
            yield (
                "routing.replay = engine with the section agent: the routes of observations are not joined "
                "with those of turns; set routing.replay = trainer or off, or remove the section agent"
            )
        if self.routing.replay == "trainer" and not self.algorithm.recomputes_policy:
            yield (
                "routing.replay = trainer: no pass precedes a step's only update, so there are no routes to "
                "replay; set algorithm.old_logprobs = recomputed, or routing.replay = off"
            )
        if self.training.drafts == "trained" and self.tune and self.tune.objective.is_reward_model:
            yield (
                "training.drafts = trained with tune.objective.name = reward_model: a reward model has no "
                "draft head; set it to frozen"
            )
        exports, saves = self.export.every_steps, self.loop.checkpoint.every_steps
        if exports and (not saves or exports % saves):
            yield (
                f"export.every_steps = {exports} must be a multiple of loop.checkpoint.every_steps = "
                f"{saves}: a folder is made from a checkpoint just saved"
            )

    def _stream_faults(self) -> Iterator[str]:
        stream, loop = self.stream, self.loop
        is_read = loop.schedule == "stream"
        if not is_read and stream != StreamSection():
            yield "stream is only read with loop.schedule = stream; set it, or remove the section"
        on_policy = stream.max_staleness == 0 and stream.sync_every == 1
        if is_read and on_policy and self.launch.engine_slots:
            yield (
                f"stream.max_staleness = 0 with launch.engine_slots = {self.launch.engine_slots}: engines "
                "and trainer would wait for each other on separate slots; set max_staleness to 1 or more, "
                "sync_every above 1, or engine_slots 0"
            )
        if is_read and loop.deterministic and not (on_policy and self.algorithm.filter is None):
            yield (
                "loop.deterministic = true with loop.schedule = stream needs stream.max_staleness 0, "
                "sync_every 1 and no algorithm.filter: else engines' batches depend on when responses finish"
            )
        if is_read and not on_policy and self.algorithm.ignores_staleness:
            yield (
                f"stream.max_staleness = {stream.max_staleness} with algorithm.loss.name = "
                f"{self.algorithm.loss.name}: the loss has no importance ratio and would train tokens of "
                "earlier versions as if the newest had sampled them; set algorithm.old_logprobs: decoupled "
                "with a correction, choose a loss with a ratio, or max_staleness 0"
            )
        limit = self.loop.max_rollout_mismatch
        without = {
            "engines on the trainer's slots, which release their caches; set launch.engine_slots": (
                not self.launch.engine_slots
            ),
            f"rollout.dp = {self.rollout.dp}; set 1": self.rollout.dp > 1,
            "routing.replay = engine: routes belong to one version's pass over a prompt": (
                self.routing.replay == "engine"
            ),
            f"loop.max_rollout_mismatch = {limit}: log-probs over an earlier version's cache differ by the "
            "training in between; set null, and an algorithm.correction": limit is not None,
        }
        if self.keeps_caches:
            yield from _refusal("stream.kv_cache = keep", without, "kv_cache recompute")
        generates = {
            "engines on the trainer's slots; set launch.engine_slots": not self.launch.engine_slots,
            "loop.schedule = on_policy; set stream": self.loop.schedule != "stream",
        }
        without = generates | {
            f"rollout.dp = {self.rollout.dp}: an engine's dp ranks start together; set 1": self.rollout.dp
            > 1,
            "routing.replay = engine: routes are lost with the process that has them; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        if self.sync.overlap == "on":
            yield from _refusal("sync.overlap = on", generates, "overlap auto")
        if self.rollout.max_replacements:
            yield from _refusal(
                f"rollout.max_replacements = {self.rollout.max_replacements}", without, "replace 0"
            )

    def _worker_faults(self) -> Iterator[str]:
        without = {
            "reward.engines, which only serve the driver's node; start a server and set its path": (
                bool(self.reward.engines)
            ),
            "routing.replay = engine: workers do not forward routes; set trainer or off": (
                self.routing.replay == "engine"
            ),
        }
        if self.rollout.workers == "node":
            yield from _refusal("rollout.workers = node", without, "workers driver")

    def _length_faults(self) -> Iterator[str]:
        if self.rollout.max_response_tokens >= self.model.max_length:
            yield (
                f"rollout.max_response_tokens = {self.rollout.max_response_tokens} leaves no room for a "
                f"prompt in model.max_length = {self.model.max_length}; lower one or raise the other"
            )
        agent, response = self.agent, self.rollout.max_response_tokens
        if agent is None and any(part.kind == "environment" for part in self.reward.all_verifiers()):
            yield "reward.kind = environment needs an environment; add the section agent"
        if agent is not None and (agent.max_turn_tokens or 0) > response:
            yield (
                f"agent.max_turn_tokens = {agent.max_turn_tokens} has no effect: the whole episode is "
                f"limited to rollout.max_response_tokens = {response}; lower it"
            )
        if agent is not None and self.loop.deterministic:
            yield (
                "loop.deterministic = true with the section agent: an engine's batches depend on when "
                "environments reply; set it to false, or remove the section"
            )

    @property
    def keeps_caches(self) -> bool:
        """True if unfinished responses continue on the KV cache of earlier weights after a weight sync."""
        return self.loop.schedule == "stream" and self.stream.kv_cache == "keep"

    @property
    def updates_per_step(self) -> int:
        """Updates per loop step; mini-batches are whole groups, so at most one per prompt."""
        return self.algorithm.epochs * min(self.algorithm.minibatches, self.loop.prompts_per_step)

    def in_updates(self) -> "Config":
        """Return the same run with the schedules of policy and critic counted in optimizer updates."""
        sections = {
            name: section.model_copy(
                update={"optimizer": section.optimizer.in_updates(self.updates_per_step)}
            )
            for name, section in (("training", self.training), ("critic", self.critic))
            if section is not None
        }
        return self.model_copy(update=sections)

    def as_placed(self, *, gpus: bool, one_node: bool) -> "Config":
        """Return the same run as placed on the engines' own slots: without off-loading and sleep mode, with
        weights sent as messages if auto cannot use memory, and with sync.overlap on or off."""
        if not self.launch.engine_slots:
            return self
        transport, overlap = self.sync.transport, self.sync.overlap
        if transport == "auto" and (gpus or not one_node):
            transport = "distributed"
        if overlap == "auto":
            pays = self.loop.schedule == "stream" and transport != "auto" and not gpus
            overlap = "on" if pays else "off"
        return self.model_copy(
            update={
                "sync": self.sync.model_copy(update={"transport": transport, "overlap": overlap}),
                "training": self.training.model_copy(update={"offload": "never"}),
                "rollout": self.rollout.model_copy(update={"enable_sleep_mode": False}),
            }
        )

    @property
    def num_slots(self) -> int:
        """Number of slots that the run takes: the trainer's, then the engines' own."""
        return self.training.layout.world_size + self.launch.engine_slots

    @property
    def engine_slots(self) -> range:
        """Slots of the engine ranks: the trainer's, or those after them. Engine e has the e-th dp x tp of
        these; its dp rank 0 has the first tp."""
        trainers = self.training.layout.world_size
        return range(trainers, self.num_slots) or range(trainers)

    @property
    def num_engines(self) -> int:
        """Number of rollout engines."""
        return len(self.engine_slots) // self.rollout.ranks

    @property
    def run_folder(self) -> str:
        return f"{self.run.folder}/{self.run.name}"
