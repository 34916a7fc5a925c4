"""Loop of `mrl tune`: steps over rows, validation, checkpoints, best weights. All trainer ranks run it.

It has the worker, pass and optimizer path of `mrl train`. A step's rows are a function of (seed, step), so
that a resumed run is bitwise identical."""

from __future__ import annotations

import functools
import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mrl.algorithms.objective import cross_entropy
from mrl.algorithms.preference import PreferenceObjective, Side, pair_loss_of
from mrl.algorithms.reward_model_objective import RewardModelObjective
from mrl.config.root import Config
from mrl.config.sections.tune import TuneSection
from mrl.data.tune_rows import (
    TuneRow,
    TuneRows,
    build_tune_batch,
    mismatched_rows,
    num_steps,
    step_row_numbers,
)
from mrl.errors import ConfigError, NumericError
from mrl.files import replace_durably
from mrl.loops.tuning.figures import (
    demonstration_figures,
    preference_figures,
    report_line,
    score_figures,
    score_report,
)
from mrl.loops.tuning.row_logprobs import (
    Logprobs,
    Scores,
    bound_of,
    own_share,
    reference_logprobs,
    row_logprobs,
    row_scores,
    weights_digest,
)
from mrl.loops.tuning.tuning_resume import CHECKPOINTS, about, require_resumable_tuning
from mrl.observe.metrics_log import LAYERS, MetricsLog
from mrl.training.checkpoint import checkpoint_folder
from mrl.training.hf import base
from mrl.training.platform.parallel import max_over_world, run_on_rank_zero
from mrl.training.worker import MegatronWorker

KEPT_CHECKPOINTS = 2
BEST = "best"
REPORT = "score_report.json"
"""Report of a reward model's last, or best, validation."""


class Tuner:
    """One tuning run. All methods are collective: call them on all ranks."""

    def __init__(
        self,
        config: Config,
        section: TuneSection,
        worker: MegatronWorker,
        training: TuneRows,
        validation: TuneRows,
        *,
        folder: Path,
        tell: Callable[[str], None],
    ) -> None:
        """`folder`: the tuning's, in the run's folder; `tell` prints lines on the screen of rank 0."""
        self._config, self._section, self._worker, self._folder = config, section, worker, folder
        self._training, self._validation, self._tell = training, validation, tell
        self._objective = _objective_of(section)
        compares = section.objective.takes_pairs and not section.objective.is_reward_model
        self._pair_loss = pair_loss_of(section.objective) if compares else None
        self.num_steps = num_steps(section, len(training.rows))
        self._step, self._best = 0, float("-inf")
        self._last_saved = 0
        self._log = MetricsLog(folder / "metrics.jsonl")
        kto = section.objective.name == "kto"
        apart = mismatched_rows(training.rows, max_length=config.model.max_length) if kto else ()
        self._apart = TuneRows(apart, None, "")
        self._ref, self._val_ref, self._apart_ref = self._reference()

    def _reference(self) -> tuple[Logprobs | None, Logprobs | None, Logprobs | None]:
        """Return the reference's log-probs of training, validation and mismatched rows, before any step."""
        if not self._section.objective.needs_reference:
            return None, None, None
        policy, reference = self._config.model.path, self._config.model.reference_path
        path = reference or policy
        if path != policy:
            self._worker.policy.load_hf(path)
        of: dict[str, Any] = {
            "folder": self._folder / "reference",
            "batch_rows": self._section.batch_rows,
            "weights": weights_digest(self._worker, path),
        }
        logprobs = [
            reference_logprobs(self._worker, rows, **of) if rows.rows else None
            for rows in (self._training, self._validation, self._apart)
        ]
        if path != policy:
            self._worker.policy.load_hf(policy)
        return logprobs[0], logprobs[1], logprobs[2]

    def run(self, asked_to_stop: Callable[[], bool]) -> bool:
        """Run, resuming from a checkpoint if there is one; return True if all steps are done. When asked to
        stop, finish the step and save."""
        self._resume()
        start = time.monotonic()
        while self._step < self.num_steps:
            if max_over_world(int(asked_to_stop()), device=self._worker.device):
                self._save()
                return False
            metrics = self._next_step()
            row = metrics | self._validated(self._step)
            row["time/seconds"] = time.monotonic() - start
            self._write(row)
            every = self._section.checkpoint_every
            if every and self._step % every == 0 and self._step < self.num_steps:
                self._save()
        return True

    def _resume(self) -> None:
        _, state = checkpoint_folder.take_latest(self._checkpoints, self._worker.load_checkpoint)
        if state is not None:
            require_resumable_tuning(self._checkpoints, state, self._config, self._section, self._training)
            self._step, self._best = state["step"], state["best"]
            self._last_saved = self._step
            self._tell(f"resuming after step {self._step}")
        run_on_rank_zero(lambda: self._log.resume_at(self._step + 1 if self._step else 0))
        if not self._step and (row := self._validated(0)):
            self._write(row)

    @property
    def _checkpoints(self) -> Path:
        return self._folder / CHECKPOINTS

    def _next_step(self) -> dict[str, float]:
        self._step += 1
        section, seed = self._section, self._config.run.seed
        numbers = step_row_numbers(self._training, section, step=self._step, seed=seed)
        rows = [self._training.rows[number] for number in numbers]
        batch = build_tune_batch(rows, numbers.tolist(), self._ref)
        side = batch.samples["side"]
        denominators: dict[str, Any] = {
            "num_tokens": float(batch.loss_mask.sum()),
            "num_rows": float(len(rows)),
            "num_chosen": float((side > 0).sum()),
            "num_rejected": float((side == 0).sum()),
        }
        if self._apart.rows:
            denominators["kto_z"] = self._zero_point(numbers)
        if section.objective.couples_scores:
            denominators["score_sum"] = self._score_sum(rows)
        metrics = self._worker.update(own_share(batch, self._worker), self._objective, denominators)
        if self._step == 1:
            metrics |= self._begins_at_the_reference(numbers, metrics)
        if self._apart.rows:
            metrics["preference/kto_z"] = denominators["kto_z"]
        return _named(metrics)

    def _zero_point(self, numbers: np.ndarray) -> float:
        """Return KTO's z: the mean log-ratio of the step's prompts with others' responses, at least 0."""
        assert self._apart_ref is not None
        wanted = sorted(set(numbers.tolist()))
        logprobs = row_logprobs(
            self._worker, self._apart.rows, batch_rows=self._section.batch_rows, numbers=wanted
        )
        ratios = [logprobs[number][0] - self._apart_ref[number][0] for number in numbers.tolist()]
        return max(0.0, float(np.mean(ratios)))

    def _score_sum(self, rows: Sequence[TuneRow]) -> float:
        """Return the sum of all scores of the step, by the weights before it."""
        return float(sum(scores.sum() for scores in self._scores(rows).values()))

    def _scores(self, rows: Sequence[TuneRow]) -> Scores:
        return row_scores(self._worker, rows, batch_rows=self._section.batch_rows)

    def _begins_at_the_reference(self, numbers: np.ndarray, metrics: Mapping[str, float]) -> dict[str, float]:
        """Check that the first step's policy is the reference; return the margins' noise (preference/noise).

        The loss must be that of margin 0 (ln 2 for dpo). Raise NumericError if the two differ."""
        reference = self._config.model.reference_path
        if (
            self._ref is None
            or self._pair_loss is None
            or (reference and reference != self._config.model.path)
        ):
            return {}
        noise = max(0.0, metrics["preference/margin_square"]) ** 0.5
        rows, section = self._training.rows, self._section.objective
        bound = 2 * section.beta * max(bound_of(rows[n], self._worker.training.dtype) for n in numbers)
        zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
        expected = float(self._pair_loss(section, Side(zero, zero, one), Side(zero, zero, one)))
        loss = metrics["preference/pair_loss"]
        if noise > bound or abs(loss - expected) > (1e-3 + 10 * noise) * (1 + abs(expected)):
            raise NumericError(
                f"tune: before the first update the policy is the reference, yet margins spread by "
                f"{noise:.3g} (bound {bound:.3g}) and the loss is {loss:.6g} instead of {expected:.6g}"
            )
        return {"preference/noise": noise}

    def _validated(self, step: int) -> dict[str, float]:
        """Return the metrics of the validation due after `step`, if any; keep the best weights so far."""
        every, rows = self._section.validate_every, self._validation.rows
        due = step in (0, self.num_steps) or (every and step % every == 0)
        if not rows or not due:
            return {}
        if self._section.objective.is_reward_model:
            return self._validated_scores()
        logprobs = row_logprobs(self._worker, rows, batch_rows=self._section.batch_rows)
        if self._section.objective.name == "sft":
            figures = demonstration_figures(rows, logprobs)
        else:
            figures = preference_figures(
                self._section.objective, self._pair_loss, rows, logprobs, self._val_ref
            )
        self._is_kept(figures)
        return figures

    def _validated_scores(self) -> dict[str, float]:
        """Return the metrics of a reward model; its report goes with the weights that are kept."""
        section, rows = self._section.objective, self._validation.rows
        scores = self._scores(rows)
        figures, report = score_figures(section, rows, scores), score_report(rows, scores)
        if self._is_kept(figures):
            run_on_rank_zero(lambda: replace_durably(self._folder / REPORT, json.dumps(report).encode()))
        return figures

    def score_report(self) -> dict[str, Any]:
        """Return the validation report of the reward model that save_weights() writes; empty without one."""
        path = self._folder / REPORT
        if not self._validation.rows or not self._section.objective.is_reward_model:
            return {}
        report = json.loads(path.read_text(encoding="utf-8"))
        self._tell(report_line(report))
        return report

    def _is_kept(self, figures: Mapping[str, float]) -> bool:
        """Keep the current weights if tune.keep_best is set and no earlier validation was better. Return True
        if they are those to export so far."""
        name = self._section.keep_best
        if name is None:
            return True
        if name not in figures:
            raise ConfigError(
                f"tune.keep_best = {name} is not in the validation, which gives {', '.join(sorted(figures))}"
            )
        value = -figures[name] if name == "val/loss" else figures[name]
        if value <= self._best:
            return False
        self._best, folder, new = value, self._folder / BEST, self._folder / "best.new"
        run_on_rank_zero(lambda: shutil.rmtree(new, ignore_errors=True))
        self._worker.save_weights(new)

        def replace() -> None:
            shutil.rmtree(folder, ignore_errors=True)
            new.rename(folder)

        run_on_rank_zero(replace)
        return True

    def save_weights(self, path: Path) -> None:
        """Write the weights to export, in Megatron's format: the best ones if kept, else the current ones."""
        run_on_rank_zero(lambda: shutil.rmtree(path, ignore_errors=True))  # left by an interrupted export
        if self._section.keep_best:
            run_on_rank_zero(lambda: shutil.copytree(self._folder / BEST, path))
        else:
            self._worker.save_weights(path)

    def adapters(self) -> dict[str, Any] | None:
        """Return what an export must know of adapters; None if all weights are trained."""
        lora, path = self._worker.training.lora, self._config.model.path
        return None if lora is None else base.adapter_identity(lora, path, weights_digest(self._worker, path))

    def _save(self) -> None:
        if not self._step:
            return  # the start is model.path itself
        path = self._checkpoints / checkpoint_folder.name_of(self._step)
        if self._step != self._last_saved:
            run_on_rank_zero(lambda: checkpoint_folder.rename_rejected_from(path))
            same = about(self._config, self._section, self._training)
            self._worker.save_checkpoint(path, {"step": self._step, "best": self._best, "about": same})
            self._last_saved = self._step
        run_on_rank_zero(lambda: checkpoint_folder.prune(self._checkpoints, keep=KEPT_CHECKPOINTS))
        self._tell(f"step {self._step}: saved")

    def _write(self, row: Mapping[str, float]) -> None:
        if self._worker.place.rank:
            return
        self._log.write(self._step, row)
        if self._step % 20 == 0 or self._step == self.num_steps or "val/rows" in row:
            shown = {"loss": row.get("tune/loss"), "val loss": row.get("val/loss")}
            shown["val accuracy"] = row.get("val/preference/accuracy")
            words = "".join(f"  {name} {value:.4f}" for name, value in shown.items() if value is not None)
            seconds = f"  {row['time/seconds']:.0f} s" if "time/seconds" in row else ""
            self._tell(f"{self._step}/{self.num_steps}{words}{seconds}")


def _objective_of(section: TuneSection) -> Callable[..., Any]:
    if section.objective.is_reward_model:
        return RewardModelObjective(section.objective)
    if section.objective.name != "sft":
        return PreferenceObjective(section.objective)
    return functools.partial(cross_entropy, by_sequence=section.objective.average != "tokens")


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a step's metrics by their names in mrl/observe/metric_names.py."""
    return {
        name if "/" in name else f"tune/{name}": value
        for name, value in metrics.items()
        if not name.startswith(LAYERS)
    }
