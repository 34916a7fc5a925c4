"""Check everything a configuration names before anything starts, for `mrl train` and its dry run.

The cheap checks run first and report their faults together; if they pass, rows are read and rewards tried.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mrl.capacity import requirements
from mrl.capacity.fit import Fit
from mrl.config.load import dump
from mrl.config.root import Config
from mrl.config.run_warnings import warnings_of
from mrl.data.load_rows import Dataset, load_data
from mrl.data.row_files import read_rows
from mrl.data.tokenise import load_tokenizer_for, token_decoder
from mrl.errors import ConfigError, DataError
from mrl.launch.cluster.cluster import address_of, own_gpus
from mrl.launch.cluster.gpu_libraries import gpu_libraries
from mrl.launch.cluster.gpus import disagreements, find_gpus
from mrl.launch.commands import earlier_start
from mrl.launch.commands.engines import asks_engine, check_engines
from mrl.launch.commands.teachers import check_domains, check_teachers
from mrl.launch.commands.this_machine import memory_fit, with_local_models, with_values
from mrl.launch.slots import smaller
from mrl.launch.workers.environments import EnvironmentRules, check_environments, require_known_domains
from mrl.launch.workers.reward_workers import check_rewards
from mrl.loops import resume_check
from mrl.models.families import family_of, require_trainable
from mrl.observe import trackers
from mrl.observe.token_values import Pieces
from mrl.prepare import new_model
from mrl.reward_labels import has_score, require_one_score
from mrl.rewards.pool.plugin_check import check_plugins
from mrl.rewards.thoughts import ThoughtMarks
from mrl.rollout.end_of_text_ids import end_of_text, require_can_end
from mrl.samples import Prompt
from mrl.training.hf.hf_folder import check_folder, read_config
from mrl.training.prefixes import shares_prefixes

log = logging.getLogger(__name__)

TRIAL_PROMPTS = 64
"""Prompts to try rewards with: one per domain, or more if one is not conclusive."""


@dataclasses.dataclass(frozen=True, slots=True)
class Inputs:
    """Inputs of a run; the checks make them, the run keeps them."""

    dataset: Dataset
    acting: EnvironmentRules | None
    trial: tuple[Prompt, ...]
    """First prompts, to try rewards with."""
    pieces: Pieces
    """Texts of single tokens, for samples.jsonl."""
    warnings: tuple[str, ...]
    """Settings and rows that work but are probably unintended."""
    refusal: str = ""
    """Why the run cannot fit this machine's free memory; a dry run, which others may start elsewhere, goes
    on."""


def check_run(config: Config) -> Inputs:
    """Run all checks and return the inputs of the run; starts only reward processes.

    Creates the model's folder if `model.new` is set. Raises ConfigError with one line per fault.
    """
    results = [_result_of(check, config) for check in (*CHECKS, check_tokenizer)]
    if faults := dict.fromkeys(line for _, lines in results for line in lines):
        raise _joined_error(list(faults))
    tokenizer, _ = results[-1]
    if unknown := ThoughtMarks(tokenizer).unknown:
        log.warning(
            "model.path: the tokenizer has %s, which may be thought marks unknown to mrl; verifiers would "
            "then score thoughts as answers: add the marks to the table in mrl/rewards/thoughts.py",
            ", ".join(unknown[:5]),
        )
    acting = check_environments(config, tokenizer)
    dataset = load_data(config.data, config.reward, tokenizer, tools=acting.tools_of if acting else None)
    if acting is not None:
        require_known_domains(acting, config.reward, dataset.domains)
    if (distillation := config.algorithm.distillation) is not None:
        check_domains(distillation, (prompt for source in dataset.train for prompt in source.rows))
    stream = dataset.stream(config.run.seed)
    if (position := earlier_start.position(config)) is not None:
        stream.require(position)
    trial = tuple(stream.take(TRIAL_PROMPTS))
    check_rewards(config.reward, [p for p in trial if not asks_engine(config.reward, p)])
    warnings = [*warnings_of(config), *dataset.warnings(config.loop)]
    memory = Fit() if address_of(config.launch) else memory_fit(config)
    warnings += [memory.warning] * bool(memory.warning)
    return Inputs(dataset, acting, trial, token_decoder(tokenizer), tuple(warnings), memory.refusal)


def dry_run(config: Config) -> tuple[str, tuple[str, ...]]:
    """Run the checks of a run; return its settings as YAML, after a comment on those that were auto, and its
    warnings. A new model is made in a temporary folder, and none is downloaded."""
    config = with_local_models(config, download=False)
    config, chosen = with_values(config, gpus=may_have_gpus(config))
    settings = "".join(f"# {line}\n" for line in chosen) + dump(config)
    with tempfile.TemporaryDirectory() as folder:
        if config.model.new is not None and not Path(config.model.path).exists():
            model = config.model.model_copy(update={"path": f"{folder}/model"})
            config = config.model_copy(update={"model": model})
        inputs = check_run(config)
        return settings, (
            *inputs.warnings,
            *[f"mrl train is refused here: {inputs.refusal}"] * bool(inputs.refusal),
        )


def may_have_gpus(config: Config) -> bool:
    """Return False if the slots are this machine's and it has no GPU. Those of an existing cluster are known
    when it is joined: launch/commands/start_run.py checks again."""
    return bool(own_gpus() or address_of(config.launch))


def check_elastic(config: Config) -> None:
    """Check that each configuration of launch.elastic can run on its slots."""
    gpus = own_gpus()
    for words, elastic in smaller(config):
        nodes = requirements.node_numbers(
            elastic.num_slots, config.launch.slots_per_node or gpus or elastic.num_slots
        )
        if faults := requirements.unmet(elastic, read_config(config.model.path), nodes, gpus=bool(gpus)):
            raise ConfigError("\n".join(f"launch.elastic, {' '.join(words)}: {line}" for line in faults))


def check_resume(config: Config) -> None:
    """Check that the run can resume from its newest checkpoint, if any, with this model and settings."""
    if (checkpoint := earlier_start.newest(Path(config.run_folder) / "checkpoints")) is not None:
        folder, about, state = checkpoint
        if config.training.dtype == "auto":  # of a cluster to join: the ranks compare it
            training = config.training.model_copy(update={"dtype": about["dtype"]})
            config = config.model_copy(update={"training": training})
        earlier_start.require_same_model(folder, about, config)
        resume_check.require_resumable(state, config)


def check_trackers(config: Config) -> None:
    """Check that each tracker's package is installed."""
    trackers.require_installed(config.logging.trackers)


def check_loss(config: Config) -> None:
    """Check that a custom loss and estimator can be imported, accept their options and return numbers."""
    from mrl.algorithms.advantages import try_estimator
    from mrl.algorithms.losses import try_loss

    try_loss(config.algorithm.loss)
    try_estimator(config.algorithm.estimator)


def check_reward_plugins(config: Config) -> None:
    """Check that users' reward functions can be imported and called."""
    check_plugins(config.reward.all_verifiers())


def check_data_files(config: Config) -> None:
    """Check that every data file can be opened and has a first row."""
    entries = (*config.data.train_entries(), *config.data.validation_entries())
    paths = dict.fromkeys(path for entry in entries for path in entry.paths)
    if faults := [line for path in paths for line in _result_of(lambda p: next(iter(read_rows(p))), path)[1]]:
        raise DataError("\n".join(faults))


def check_gpus(config: Config) -> None:
    """Check that nvidia-smi, torch and vLLM agree about this machine's GPUs, and that the libraries for them
    can be imported; preflight checks a cluster's."""
    if address_of(config.launch):
        return
    gpus = find_gpus()
    faults = disagreements(gpus, slots=config.launch.slots_per_node)
    if not faults and gpus.torch:
        faults = list(gpu_libraries().faults)
    if faults:
        raise ConfigError("\n".join(faults))


def check_policy(config: Config, *, engines: bool = True) -> None:
    """Check that the model can be trained, sharded as configured and, with `engines`, served."""
    if config.model.new is not None:
        check_data_files(config)  # the new model's tokenizer is trained on them
    new_model.ensure_model(
        config.model, [p for e in config.data.train_entries() for p in e.paths], seed=config.run.seed
    )
    if has_score(read_config(config.model.path)) and not (
        config.tune and config.tune.objective.is_reward_model
    ):
        raise ConfigError(f"model.path = {config.model.path} is a reward model, which cannot generate text")
    gpus = own_gpus()
    per_node = config.launch.slots_per_node or gpus or config.num_slots
    nodes = requirements.node_numbers(config.num_slots, per_node)
    hf = read_config(config.model.path)
    if faults := requirements.unmet(config, hf, nodes, gpus=may_have_gpus(config), engines=engines):
        raise ConfigError("\n".join(faults))
    shares_prefixes(config.training, hf)
    _check_weights(config.model.path, config.model.path, drafts=config.training.drafts == "trained")


def check_reference(config: Config) -> None:
    """Check that the reference's folder has the policy's tensors."""
    path = config.model.reference_path
    if path is not None and config.algorithm.needs_reference and Path(config.model.path).exists():
        _check_weights(path, config.model.path)


def check_critic(config: Config) -> None:
    """Check that the critic's folder has a trainable model with the policy's vocabulary."""
    path = config.critic.path if config.critic is not None else None
    if path is None:
        return
    hf = read_config(path)
    require_trainable(hf)
    require_one_score(hf, source=f"critic.path = {path}")
    _check_weights(path, path)
    if Path(config.model.path).exists() and hf["vocab_size"] != read_config(config.model.path)["vocab_size"]:
        raise ConfigError(
            f"critic.path = {path} has a vocabulary of {hf['vocab_size']} tokens, the policy has another; "
            "the critic reads the policy's tokens"
        )


def check_tokenizer(config: Config) -> Any:
    """Return the tokenizer; check its ids, and that responses can end. None without a model."""
    if not (Path(config.model.path) / "config.json").is_file():
        return None  # check_policy reports it
    size = int(read_config(config.model.path)["vocab_size"])
    tokenizer = load_tokenizer_for(config.model)
    largest = max(tokenizer.get_vocab().values(), default=0)
    if largest >= size:
        raise ConfigError(
            f"the tokenizer in {config.model.path} has ids up to {largest}, the model's vocab_size is "
            f"{size}; they do not match"
        )
    require_can_end(config.rollout, tokenizer, size)
    if not end_of_text(tokenizer, config.model.path) and not (
        config.rollout.stop or config.rollout.stop_token_ids
    ):
        raise ConfigError(
            f"model.path = {config.model.path}: tokenizer_config.json (eos_token), generation_config.json "
            "and config.json (eos_token_id) have no end-of-text token, so that no response would end; add it "
            "there, or set rollout.stop_token_ids or rollout.stop"
        )
    return tokenizer


CHECKS: tuple[Callable[[Config], object], ...] = (
    check_trackers,
    check_loss,
    check_reward_plugins,
    check_engines,
    check_data_files,
    check_gpus,
    check_policy,
    check_reference,
    check_teachers,
    check_critic,
    check_elastic,
    check_resume,
)
"""All checks but the tokenizer's; they take milliseconds to seconds and raise one line per fault."""


def _check_weights(folder: str, policy: str, *, drafts: bool = False) -> None:
    """Check that `folder` has the tensors of the policy's config.json, by name, shape and kind of type; with
    `drafts` also its draft head's."""
    hf = read_config(policy)
    check_folder(folder, family_of(hf), hf, drafts=drafts)


def _result_of(check: Callable[[Any], Any], subject: Any) -> tuple[Any, list[str]]:
    """Return (result of a check, its fault lines: empty if it passes)."""
    try:
        return check(subject), []
    except (ConfigError, DataError) as error:
        return None, str(error).splitlines()


def _joined_error(faults: Sequence[str]) -> ConfigError:
    if len(faults) == 1:
        return ConfigError(faults[0])
    return ConfigError(
        f"{len(faults)} faults, nothing was started:" + "".join(f"\n  - {line}" for line in faults)
    )
