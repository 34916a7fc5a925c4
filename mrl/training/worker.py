"""One Megatron rank: computes log-probs and values, updates, saves, and shares its memory.

A plain class; a thin Ray actor elsewhere wraps it. All methods except the memory ones are called on all ranks
together. Batches come as TrainBatch (numpy); results are numpy arrays and numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.compile_cache import use_own_compile_cache
from mrl.config.sections.critic import CriticSection
from mrl.config.sections.distillation import TEACHER, DistillationSection
from mrl.config.sections.model import ModelSection
from mrl.config.sections.training import TrainingSection
from mrl.errors import ConfigError
from mrl.models.families import family_of
from mrl.models.hf_config import different_values
from mrl.observe.memory_use import memory_use
from mrl.samples import Role, TrainBatch
from mrl.training.checkpoint.atomic_save import Save, save_weights
from mrl.training.checkpoint.loading import load_state
from mrl.training.checkpoint.training_state import TrainingState
from mrl.training.frozen_model import FrozenModel
from mrl.training.hf import base, hf_folder
from mrl.training.pass_options import DEFAULTS, PassOptions
from mrl.training.passes import Objective, ParameterSwap, Passes
from mrl.training.platform import device_memory
from mrl.training.platform.parallel import gather_entries, start_process_groups, stop_process_groups
from mrl.training.prefixes import shares_prefixes
from mrl.training.teacher_targets import TargetsOfTeachers
from mrl.training.trained_model import TrainedModel

_REFERENCE = "reference"


class MegatronWorker:
    """Rank `rank` of the trainer, with its policy, reference policy, teachers and critic."""

    def __init__(
        self,
        model: ModelSection,
        training: TrainingSection,
        *,
        rank: int,
        world_size: int,
        store: str,
        seed: int = 0,
        load: bool = True,
        replays: bool = False,
        has_value_head: bool = False,
    ) -> None:
        """Join the other ranks at the address `store` (`wire.meeting.Meeting`), build the policy and, if
        `load`, load model.path. With `replays` batches may contain routes for policy and reference
        (routing.replay). With `has_value_head` a reward model replaces the policy: forward() returns values,
        and objectives take them."""
        use_own_compile_cache()
        self.model, self.training = model, training
        self.layout = training.layout.sizes()
        self.place = self.layout.coordinates(rank)
        hf_config = hf_folder.read_config(model.path)
        # An invalid layout fails here, before any rank waits for another.
        family_of(hf_config).local_tensors(hf_config, self.layout, self.place)
        self.shares_prefixes = shares_prefixes(training, hf_config)
        """True if the policy's batches may share prefixes."""
        self.device, _ = start_process_groups(
            self.layout,
            rank=rank,
            world_size=world_size,
            store=store,
            seed=seed,
            collective_seconds=training.collective_seconds,
        )
        if self.device.type == "cpu":
            torch.set_num_threads(training.num_threads)
        self.policy = TrainedModel(
            model,
            training,
            layout=self.layout,
            place=self.place,
            device=self.device,
            seed=seed,
            replays=replays,
            has_value_head=has_value_head,
        )
        self.critic: TrainedModel | None = None
        """Value model, after add_critic()."""
        self._save: Save | None = None
        """Checkpoint being written, until it is committed."""
        self._frozen: dict[str, Callable[[str], AbstractContextManager[None]]] = {}
        """Contexts that swap another model in for the policy: the reference, and teachers by folder."""
        self._teachers: dict[str, FrozenModel] = {}
        """Teachers of other shapes than the policy's, by folder."""
        weights = ""
        if load:
            self.policy.load_hf(model.path)
            digests = base.file_digests(model.path, share=rank, shares=self.layout.world_size)
            weights = base.combined_digest(gather_entries(digests))
        self._about = base.run_identity(model, training, weights)
        """What checkpoints record about the run."""

    def add_critic(self, section: CriticSection) -> None:
        """Build the critic, from section.path or else the policy's starting point."""
        model = self.model.model_copy(update={"path": section.path or self.model.path})
        training = self.training.model_copy(update={"optimizer": section.optimizer})
        self.critic = TrainedModel(
            model, training, layout=self.layout, place=self.place, device=self.device, has_value_head=True
        )
        self.critic.load_hf(model.path)
        tokens, critic_tokens = (m.hf_config["vocab_size"] for m in (self.policy, self.critic))
        if critic_tokens != tokens:
            raise ConfigError(
                f"critic.path = {model.path} has a vocabulary of {critic_tokens} tokens, but the policy has "
                f"{tokens}; choose a critic with the same vocabulary, because it reads the policy's tokens"
            )

    @torch.no_grad()
    def snapshot_reference(self, path: str | Path | None = None) -> None:
        """Keep a frozen reference policy in host memory: the current parameters, or a Hugging Face folder's.
        Without a folder adapters need no copy, because they already keep the base weights there."""
        memory, adapters = self.policy.memory, self.policy.adapters
        if path is not None:
            self._frozen[_REFERENCE] = self._kept(path, _REFERENCE)
        elif adapters is not None:
            self._frozen[_REFERENCE] = adapters.removed
        else:
            self._frozen[_REFERENCE] = functools.partial(memory.swapped_in, memory.snapshot())

    @torch.no_grad()
    def add_teacher(self, path: str) -> None:
        """Keep a Hugging Face folder's weights in host memory as a teacher; update() finds it by folder.
        The start under adapters needs no copy, other weights of the policy's shapes a snapshot, others a
        model."""
        adapters = self.policy.adapters
        if adapters is not None and self.model.is_start(path):
            self._frozen[path] = adapters.removed
            return
        if not different_values(self.policy.hf_config, hf_folder.read_config(path)):
            self._frozen[path] = self._kept(path, "teacher")
            return
        self._teachers[path] = FrozenModel(
            path, self.training, max_length=self.model.max_length, place=self.place, device=self.device
        )

    def _kept(self, path: str | Path, name: str) -> Callable[[str], AbstractContextManager[None]]:
        """Load a folder's weights through the policy's memory, and keep a snapshot of them."""
        memory = self.policy.memory
        with memory.preserved(f"load the {name}"):
            self.policy.load_parameters(path)
            return functools.partial(memory.swapped_in, memory.snapshot())

    def forward(self, batch: TrainBatch, options: PassOptions = DEFAULTS) -> dict[str, np.ndarray] | None:
        """Return log-probs and entropy (nats) [N] of this shard, and what the options request.

        The critic returns `values` [N]: entry t is the value of the state before token t, 0 for a segment's
        first token. Only ranks with tp 0 and cp 0 on the last stage return arrays, the others None. Policy
        and reference take the batch's routes, if any.
        """
        if options.role == "critic":
            return self._trained("critic").passes.forward(batch, options)
        with self._acting_as(options.role) as passes:
            return passes.forward(batch, options, reference=self._reference(options))

    def update(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        options: PassOptions = DEFAULTS,
        *,
        lr: float | None = None,
        distillation: DistillationSection | None = None,
    ) -> dict[str, float]:
        """Take one optimizer step of policy or critic over this shard; return metrics, equal on all ranks.

        Losses and metrics are summed over micro-batches and ranks (names ending in _max or _min: largest,
        smallest). A loss or gradient that is not finite, or a step without trainable tokens, is skipped on
        all ranks: no parameter changes and `skipped` is 1. The policy takes the batch's routes, if any;
        `routing/...` measures how far its own choices agree (replay.py). With experts, `moe/...` measures how
        evenly tokens were spread (router_loads.py). The critic's objective takes values=[n]. With
        `distillation` teachers run first, and the objective also takes divergence=[n].
        """
        metrics, _ = self.accumulate(batch, objective, denominators, options, distillation=distillation)
        return metrics | self._trained(options.role).step(lr=lr)

    def accumulate(
        self,
        batch: TrainBatch,
        objective: Objective,
        denominators: Mapping[str, Any],
        options: PassOptions = DEFAULTS,
        *,
        distillation: DistillationSection | None = None,
    ) -> tuple[dict[str, float], dict[str, np.ndarray] | None]:
        """Run update()'s first half: return metrics and leave gradients for step(); no parameter changes.

        Also return the arrays of forward() by the same weights, with 0 for untrained tokens. Requested
        log-probs of the reference come first: the objective finds them in `arrays`.
        """
        taught = None
        if options.role == "policy" and distillation is not None:
            taught = self._lessons(batch, distillation)
        return self._trained(options.role).accumulate(
            batch, objective, denominators, options, taught=taught, reference=self._reference(options)
        )

    def step(self, *, lr: float | None = None) -> dict[str, float]:
        """Run the second half of the policy's update(): one optimizer step along the gradients."""
        return self.policy.step(lr=lr)

    def _lessons(self, batch: TrainBatch, section: DistillationSection) -> TargetsOfTeachers:
        """Run each teacher, which chooses its own experts, once over its samples of the shard."""
        numbers, lessons = batch.samples[TEACHER], []
        batch = dataclasses.replace(batch, routes=None)
        for number, path in enumerate(section.folders):
            with self._acting_as("teacher", path) as passes:
                lessons.append(passes.lesson(batch, np.flatnonzero(numbers == number)))
        return TargetsOfTeachers(section, [lesson for lesson in lessons if lesson is not None])

    def _trained(self, role: Role) -> TrainedModel:
        if role == "policy":
            return self.policy
        if self.critic is None:
            raise ConfigError("there is no critic on this worker; call add_critic() first")
        return self.critic

    def _reference(self, options: PassOptions) -> ParameterSwap | None:
        return functools.partial(self._acting_as, "reference") if options.with_reference else None

    @contextlib.contextmanager
    def _acting_as(self, role: Role, teacher: str = "") -> Iterator[Passes]:
        """Yield passes over a model: the policy's, with the parameters of the reference or of a teacher
        swapped in, or those of a teacher of other shapes."""
        if role == "policy":
            yield self.policy.passes
            return
        if teacher in self._teachers:
            with torch.no_grad(), self._teachers[teacher].on_device() as passes:
                yield passes
            return
        frozen = self._frozen.get(_REFERENCE if role == "reference" else teacher)
        if frozen is None and role == "reference":
            raise ConfigError("there is no reference policy on this worker; call snapshot_reference() first")
        if frozen is None:
            raise ConfigError(f"there is no teacher {teacher!r} on this worker; call add_teacher() first")
        with torch.no_grad(), frozen(f"swap the {role} in"):
            yield self.policy.passes

    def device_name(self) -> str:
        """Return CUDA's name of this rank's device; "cpu" without CUDA."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def memory_use(self) -> dict[str, float]:
        """Return this process's GPU and host memory use, in bytes by name."""
        return memory_use(self.device)

    def save_weights(self, path: str | Path) -> None:
        """Write only the policy's parameters to the new folder `path`, for an export."""
        save_weights(Path(path), self.policy.state())

    def save_checkpoint(self, path: str | Path, extra: dict[str, Any], *, beside: bool = False) -> None:
        """Save models, optimizers, schedules, random states, and `extra` (rank 0's).

        With `beside` it returns after copying this rank's state to host memory, and writes files while
        training continues; commit_checkpoint() then makes them a checkpoint. Otherwise it is committed on
        return.
        """
        payload = {
            "user": extra,
            "optimizer_steps": self.policy.optimizer.steps,
            "critic_steps": None if self.critic is None else self.critic.optimizer.steps,
        }
        self._save = Save(Path(path), self._states(), extra=payload, about=self._about)
        if beside:
            self._save.write_in_background()
        else:
            self._save.write()
            self.commit_checkpoint()

    def checkpoint_is_written(self) -> bool:
        """Return True if this rank has no pending background save; contacts no other rank."""
        return self._save is None or self._save.is_written()

    def commit_checkpoint(self) -> None:
        """Make the background save a checkpoint, after all ranks' files are written."""
        assert self._save is not None, "no checkpoint is being saved"
        save, self._save = self._save, None
        save.commit()

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Continue from a checkpoint of any layout; return its `extra`, or raise CheckpointError."""
        self.policy.memory.require_unleased("load a checkpoint")
        for model in self._models():
            model.note_change()
        payload = load_state(Path(path), self._states(), about=self._about)
        self.policy.merge()
        self.policy.optimizer.steps = payload["optimizer_steps"]
        if self.critic is not None:
            self.critic.optimizer.steps = payload["critic_steps"]
        return payload["user"]

    def _models(self) -> list[TrainedModel]:
        return [self.policy] if self.critic is None else [self.policy, self.critic]

    def _states(self) -> dict[str, TrainingState]:
        """Return each model's state by its folder in a checkpoint."""
        states = {"": self.policy.state()}
        return states if self.critic is None else states | {"critic": self.critic.state()}

    def offload(self, *, keep_parameters: bool = False) -> None:
        """Free gradients, optimizer state, the critic and parameters (on CPU: shared memory, gradients).

        With `keep_parameters` the policy's stay for a weight sync; a second call frees them. Freed memory
        returns to the device for the slot's engine: nothing stays in torch's cache.
        """
        self.policy.offload(keep_parameters=keep_parameters)
        if self.critic is not None:
            self.critic.offload()
        device_memory.release_cached(self.device)

    def reload(self) -> None:
        """Undo offload(). Peers' earlier knowledge of the parameter memory is then stale."""
        for model in self._models():
            model.reload()

    def close(self) -> None:
        """Leave the process groups."""
        stop_process_groups()
