"""`mrl tune`: train on demonstrations or preferences, SPMD, without Ray.

`mrl tune CONFIG...` starts the ranks of the training layout on this machine. On several machines, run on
each: `torchrun --nproc-per-node N ... -m mrl.launch.commands.tune CONFIG...`. A stop request (Ctrl-C,
SIGTERM, SIGUSR1) reaches the ranks as a file, so that they finish their step.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from mrl.config.load import dump, load_tune
from mrl.config.root import Config
from mrl.config.sections.tune import TuneSection
from mrl.data.conversation import Encoder
from mrl.data.tokenise import load_tokenizer_for
from mrl.data.tune_rows import (
    TuneRows,
    load_training,
    load_validation_rows,
    num_steps,
    overlapping_rows,
    reward_model_rows,
)
from mrl.errors import ConfigError
from mrl.files import output_lock
from mrl.launch.cluster.node_facts import installed_versions
from mrl.launch.commands import earlier_start
from mrl.launch.commands.stopping import StopSignals
from mrl.launch.commands.this_machine import with_local_models, with_values
from mrl.launch.workers.actor_log import original_stdout, redirect
from mrl.launch.workers.spmd import forget_meeting_place, run_local_ranks, start_worker, starter_is_gone
from mrl.loops.tuning.tuning_resume import CHECKPOINTS, require_resumable_tuning
from mrl.observe.run_folder import RunFolder
from mrl.reward_labels import require_one_score
from mrl.rollout.end_of_text_ids import end_of_text

PACKAGES = ("torch", "megatron-core", "transformers", "mrl")


def run_ranks(arguments: Sequence[str]) -> int:
    """Check model and data, then run the ranks on this machine. Returns 0 if all steps are done, the code of
    a failed rank, or the exit code of the stop request."""
    from mrl.algorithms.preference import try_pair_loss
    from mrl.launch.commands.check import check_policy, check_tokenizer
    from mrl.training.hf.export_folder import require_new

    config, absent = load_tune(*arguments)
    config = with_local_models(config)
    config, chosen = with_values(
        earlier_start.dated_as_begun(config, folder_of(config)), sections=["training"]
    )
    arguments = [*arguments, f"model.chat_template_date={config.model.chat_template_date}"]
    section = _section(config)
    require_new(Path(section.output))
    try_pair_loss(section.objective)
    check_policy(config, engines=False)
    check_tokenizer(config)
    encoder = encoder_of(config, section, load_tokenizer_for(config.model))
    training, validation = load_tune_rows(config, section, encoder)
    if (scored_config := _scored_config(config, section)) is not None:
        check_reward_model(config, scored_config, training)
    _check_resume(config, section, training)
    lines = [training.report, validation.report] if validation.rows else [training.report]
    if shared := overlapping_rows(training, validation):
        lines.append(f"{shared} training rows have the same prompt as a validation row")
    lines += encoder.unread.sentences()
    lines += amount_of_work(section, len(training.rows))
    print("\n".join(f"tune: {line}" for line in [*chosen, *lines]), flush=True)
    with output_lock(Path(section.output), "tune.output"):
        return _run_held(arguments, config, section, absent)


def _run_held(arguments: Sequence[str], config: Config, section: TuneSection, absent: frozenset[str]) -> int:
    folder, signals = RunFolder(folder_of(config)), StopSignals()

    def pass_on() -> None:
        if (reason := signals.reason()) is not None:
            stop_file(config).write_text(reason)

    try:
        folder.write_config(dump(config, without=absent), installed_versions(PACKAGES))
        stop_file(config).unlink(missing_ok=True)
        with signals:
            signals.begin_steps()  # the file also ends the time before the first step
            run = "mrl.launch.commands.tune"
            code = run_local_ranks(run, arguments, config, while_they_run=pass_on)
    finally:
        folder.close()
    if code:
        print(f"tune failed with exit code {code}; see each rank's log in {log_folder(config)}", flush=True)
        return code
    return 0 if Path(section.output).exists() else signals.exit_code


def amount_of_work(section: TuneSection, num_rows: int) -> list[str]:
    """Return lines about rows, steps, epochs and learning rate, and a warning if batch_rows is too large."""
    steps, optimizer = num_steps(section, num_rows), section.optimizer.in_updates(1)
    drawn = "in order" if section.passes is not None else "drawn with replacement"
    warm_up = f" after {optimizer.warmup_steps} steps of warm-up" if optimizer.warmup_steps else ""
    decay = f", {optimizer.schedule} to {optimizer.min_lr:g}" if optimizer.schedule != "constant" else ""
    lines = [
        f"{num_rows} rows, {steps} steps of {section.batch_rows} rows {drawn}, "
        f"{steps * section.batch_rows / num_rows:.3g} epochs; learning rate {optimizer.lr:g}{warm_up}{decay}"
    ]
    if section.batch_rows > num_rows:
        lines.append(
            f"warning: tune.batch_rows = {section.batch_rows} is more than the {num_rows} rows, so a step "
            f"repeats rows; set tune.batch_rows to {num_rows} or fewer"
        )
    return lines


def _check_resume(config: Config, section: TuneSection, training: TuneRows) -> None:
    """Raise ConfigError if this tuning cannot resume from the newest checkpoint in its folder, if any."""
    checkpoints = folder_of(config) / CHECKPOINTS
    if (checkpoint := earlier_start.newest(checkpoints)) is not None:
        folder, about, state = checkpoint
        earlier_start.require_same_model(folder, about, config)
        require_resumable_tuning(checkpoints, state, config, section, training)


def check_reward_model(config: Config, scored_config: Mapping[str, Any], rows: TuneRows) -> None:
    """Raise ConfigError if the reward model would be scored at another token than it is trained at, or if
    model.path is another kind of reward model."""
    from mrl.training.hf.hf_folder import read_config

    name = _section(config).objective.name
    if config.training.lora is not None:
        raise ConfigError(f"tune.objective = {name} trains all weights; remove training.lora")
    path = config.model.path
    require_one_score(read_config(path), source=f"tune.objective: model.path = {path}")
    pad = scored_config["pad_token_id"]
    for row in rows.rows:
        if any((response.tokens[:-1][response.mask[1:]] == pad).any() for response in row.responses):
            raise ConfigError(
                f"{row.place}: the scored text ends with the padding token ({pad}), which transformers does "
                "not count as part of a response, so that it would score the token before; give the "
                f"tokenizer in {config.model.path} another pad_token"
            )


def folder_of(config: Config) -> Path:
    """Return the folder of a tuning's own files, apart from `mrl train` runs of the same name."""
    return Path(config.run_folder).resolve() / "tune"


def log_folder(config: Config) -> Path:
    """Return the folder of the ranks' logs."""
    return folder_of(config) / "logs"


def stop_file(config: Config) -> Path:
    """Return the file whose existence tells the ranks to finish their step, save and exit."""
    return folder_of(config) / "stop"


def load_tune_rows(config: Config, section: TuneSection, encoder: Encoder) -> tuple[TuneRows, TuneRows]:
    """Return the tokenized training and validation rows."""
    longest = config.model.max_length
    rows = (
        load_training(section, encoder, max_length=longest),
        load_validation_rows(section, encoder, max_length=longest),
    )
    if not section.objective.is_reward_model:
        return rows
    return reward_model_rows(rows[0]), reward_model_rows(rows[1])


def encoder_of(config: Config, section: TuneSection, tokenizer: Any) -> Encoder:
    """Return the encoder that tokenizes rows."""
    ends = end_of_text(tokenizer, config.model.path)
    return Encoder(tokenizer, ends=ends, chat_template_kwargs=section.data.chat_template_kwargs)


def main(arguments: Sequence[str]) -> None:
    """Run one rank: metrics go to the screen, all other output to its log file, an error to both."""
    (config, _), seen, rank = load_tune(*arguments), original_stdout(), int(os.environ["RANK"])
    config, _ = with_values(with_local_models(config), sections=["training"])
    redirect(str(log_folder(config)), f"rank-{rank}")
    try:
        _tune(config, seen, rank)
    except Exception as error:
        print(f"tune, rank {rank}: {type(error).__name__}: {error}", file=seen, flush=True)
        raise
    finally:
        if rank == 0:
            forget_meeting_place()


def _scored_config(config: Config, section: TuneSection) -> dict[str, Any] | None:
    """Return config.json of the output if it is a reward model, else None."""
    from mrl.training.hf.reward_model_folder import config_of

    if not section.objective.is_reward_model:
        return None
    return config_of(config.model.path, load_tokenizer_for(config.model))


def _reward_folder(config: Config, section: TuneSection, report: Mapping[str, Any]) -> Any:
    from mrl.training.hf.reward_model_folder import RewardFolder

    if (scored_config := _scored_config(config, section)) is None:
        return None
    about = {
        "end_tokens": end_of_text(load_tokenizer_for(config.model), config.model.path),
        "objective": section.objective.model_dump(mode="json", exclude_defaults=True),
    }
    return RewardFolder(scored_config, about | dict(report))


def worker_changes(config: Config, section: TuneSection) -> dict[str, Any]:
    """Return the ranks' changes to the configuration: a reward model needs one more position."""
    if not section.objective.is_reward_model:
        return {}
    model = config.model.model_copy(update={"max_length": config.model.max_length + 1})
    return {"model": model, "has_value_head": True}


def _tune(config: Config, seen: TextIO, rank: int) -> None:
    from mrl.loops.tuning.tuner import BEST, Tuner
    from mrl.training.hf import export_folder

    def tell(line: str) -> None:
        if rank == 0:
            print(f"tune {line}", file=seen, flush=True)

    section, folder = _section(config), folder_of(config)
    training = config.training.model_copy(update={"optimizer": section.optimizer.in_updates(1)})
    worker = start_worker(config, training=training, **worker_changes(config, section))
    rows = load_tune_rows(config, section, encoder_of(config, section, load_tokenizer_for(config.model)))
    tuner = Tuner(config, section, worker, *rows, folder=folder, tell=tell)
    if not tuner.run(lambda: rank == 0 and _is_asked_to_stop(config)):
        worker.close()
        return
    shards = Path(section.output).with_name(Path(section.output).name + ".shards")
    tuner.save_weights(shards)
    lora = tuner.adapters()
    worker.close()
    if rank == 0:
        export_folder.export_checkpoint(
            shards,
            Path(section.output),
            source=Path(config.model.path),
            dtype=training.dtype,
            lora=lora,
            reward_model=_reward_folder(config, section, tuner.score_report()),
        )
        for spent in (shards, folder / "checkpoints", folder / BEST):
            shutil.rmtree(spent, ignore_errors=True)


def _is_asked_to_stop(config: Config) -> bool:
    return stop_file(config).exists() or starter_is_gone()


def _section(config: Config) -> TuneSection:
    if config.tune is None:
        raise ConfigError("the configuration has no section tune; add it with data and output")
    return config.tune


if __name__ == "__main__":
    main(sys.argv[1:])
