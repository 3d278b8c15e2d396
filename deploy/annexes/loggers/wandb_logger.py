"""Rows to Weights & Biases. Needs the extra `wandb`. WANDB_PROJECT, WANDB_MODE and its other variables count.

A fleet is one wandb run, identified by the fleet id. A resumed run goes on in the same wandb run.
"""

from __future__ import annotations

import os

import wandb

from headrace.deploy.loggers import Row, RunInfo

DEFAULT_PROJECT = "headrace"


class WandbLogger:
    """Logs each row with its env steps as the axis."""

    def __init__(self, run: RunInfo) -> None:
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", DEFAULT_PROJECT),
            name=run.run_dir.name,
            id=run.fleet_id,
            resume="allow",
            dir=str(run.run_dir),
            config=dict(run.config),
        )
        self._run.define_metric("env_steps")
        self._run.define_metric("*", step_metric="env_steps")

    def log(self, row: Row, step: int) -> None:
        """Hand the row to wandb, which sends it when it can."""
        self._run.log(dict(row))

    def close(self) -> None:
        """Finish the wandb run, and end the process that wandb started."""
        self._run.finish()
        wandb.teardown()
