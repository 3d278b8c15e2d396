"""Rows to MLflow. Needs the extra `mlflow`. MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME count.

A fleet is one MLflow run, found by the tag "headrace.fleet_id". A resumed run goes on in the same MLflow run.
"""

from __future__ import annotations

import os
import re

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from headrace.deploy.loggers import Row, RunInfo
from headrace.schemas.accounts.figures import GAUGE_TABLE, RESTARTS
from headrace.schemas.accounts.lifetime_counters import COUNTER_TABLE

DEFAULT_EXPERIMENT = "headrace"
FLEET_TAG = "headrace.fleet_id"
_MOST_AT_ONCE = 100
_LONGEST_PARAM = 500
_TOTALS = {metric.column_for() for metric in (*GAUGE_TABLE, *COUNTER_TABLE) if metric.label == "reason"} | {
    RESTARTS.column_for()
}
"""Columns that are folders of further ones. A store of files cannot have both a metric and a folder of one name."""
_not_allowed = re.compile(r"[^A-Za-z0-9_\-. /:]")


class MlflowLogger:
    """Logs each number of a row as a metric at its env steps.

    Characters that MLflow forbids in names become "_", and the sum of `restarts/ROLE` is `restarts/total`.
    """

    def __init__(self, run: RunInfo) -> None:
        self._client = MlflowClient()
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", DEFAULT_EXPERIMENT)
        experiment = self._client.get_experiment_by_name(name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(name)
        known = self._client.search_runs([experiment_id], f"tags.`{FLEET_TAG}` = '{run.fleet_id}'", max_results=1)
        if known:
            self._run_id: str = known[0].info.run_id
            self._client.update_run(self._run_id, status="RUNNING")
        else:
            tags = {FLEET_TAG: run.fleet_id}
            self._run_id = self._client.create_run(experiment_id, run_name=run.run_dir.name, tags=tags).info.run_id
            self._log_params(run)

    def _log_params(self, run: RunInfo) -> None:
        params = [
            Param(f"{section}.{key}", str(value)[:_LONGEST_PARAM])
            for section, values in run.config.items()
            for key, value in values.items()
        ]
        for begin in range(0, len(params), _MOST_AT_ONCE):
            self._client.log_batch(self._run_id, params=params[begin : begin + _MOST_AT_ONCE])

    def log(self, row: Row, step: int) -> None:
        """Send the row's numbers, and wait for the answer."""
        at = int(float(row["time"]) * 1000)
        metrics = [
            Metric(_metric_name(name), float(value), at, step)
            for name, value in row.items()
            if not isinstance(value, str)
        ]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self) -> None:
        """End the MLflow run."""
        self._client.set_terminated(self._run_id)


def _metric_name(column: str) -> str:
    return f"{column}/total" if column in _TOTALS else _not_allowed.sub("_", column)
