"""MLflow: one run for all starts of a training run, every metric of a step once.

Points cannot be taken back there: a step that is run again after a death keeps its first figures. The store
itself is asked for the last step of each metric, because a death may fall into the middle of a row.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from mrl.config.flat import flat
from mrl.config.sections.logging import MlflowSection
from mrl.observe.run_folder import TrackedRun
from mrl.observe.samples_table import Row, table

BATCH = 100
"""Parameters MLflow takes at once."""


class MlflowTracker:
    """One MLflow run, its id kept in the run folder; settings are parameters, those changed later tags."""

    next_step = 0

    def __init__(self, run: TrackedRun, section: MlflowSection) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Metric, Param, RunTag

        self._client, self._metric = MlflowClient(tracking_uri=section.tracking_uri), Metric
        self._id = self._kept_id(run.folder / "mlflow_id", section, run.name)
        data = self._client.get_run(self._id).data
        self._last_steps = {
            name: max(point.step for point in self._client.get_metric_history(self._id, name))
            for name in data.metrics
        }
        settings = dict(flat(run.config))
        added = [Param(key, value) for key, value in settings.items() if key not in data.params]
        for start in range(0, len(added), BATCH):
            self._client.log_batch(self._id, params=added[start : start + BATCH])
        changed = {k: v for k, v in settings.items() if data.params.get(k, v) != v or k in data.tags}
        tags = [RunTag(key, value) for key, value in {**section.tags, **changed}.items()]
        self._client.log_batch(self._id, tags=tags)

    def _kept_id(self, path: Path, section: MlflowSection, run_name: str) -> str:
        """The run's id, made at the first start."""
        if path.is_file():
            run_id = path.read_text()
            self._client.update_run(run_id, status="RUNNING")
            return run_id
        experiment = self._client.get_experiment_by_name(section.experiment_name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(section.experiment_name)
        )
        run = self._client.create_run(experiment_id, run_name=section.run_name or run_name)
        path.write_text(run.info.run_id)
        return run.info.run_id

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        points = [
            self._metric(name, value, now, step)
            for name, value in ((k.replace("@", "_at_"), v) for k, v in metrics.items())
            if step > self._last_steps.get(name, -1)
        ]
        if points:
            self._client.log_batch(self._id, metrics=points)

    def samples(self, step: int, rows: Sequence[Row]) -> None:
        """A file of the run, in the form that MLflow's page shows as a table."""
        columns, values = table(rows)
        name = f"samples/{rows[0]['kind']}-{step:06d}.json"
        self._client.log_dict(self._id, {"columns": columns, "data": values}, name)

    def close(self) -> None:
        self._client.set_terminated(self._id)
