"""Loggers of a run: where the rows of `headrace up` go. Files, TensorBoard, Weights & Biases, MLflow, and your own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = Mapping[str, float | int | str]
"""One row: column -> value. `deploy/report/run_rows.py` says which columns there are."""


class Logger(Protocol):
    """Takes the rows of a run. `headrace up` builds one from a `RunInfo` before the fleet starts.

    All calls come from one thread of this logger's own, so a call may take its time. Meanwhile the newest 1,000 rows
    wait. A logger that raises is reported by name and not called again; the fleet goes on.
    """

    def log(self, row: Row, step: int) -> None:
        """Take a row. `step` is the number of env steps that the fleet had made, over all runs in its directory."""

    def close(self) -> None:
        """Write all rows that are left. `headrace up` calls it once, at the end, and waits at most 10 seconds."""


@dataclass(frozen=True)
class RunInfo:
    """The facts about a run that its loggers get."""

    fleet_id: str
    run_dir: Path
    config: Mapping[str, Any]
    """The resolved configuration by section, without the URL of Redis, which may have a password."""
