"""Rows as TensorBoard's scalars, in `tensorboard/` of the run directory. Needs the extra `tensorboard`, not torch."""

from __future__ import annotations

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headrace.deploy.loggers.protocol import Row, RunInfo

FLUSH_S = 5
_NOT_PLOTTED = ("time", "elapsed_s", "env_steps")
"""Columns that are TensorBoard's own axes."""


class TensorBoardLogger:
    """Writes each number of a row as a scalar named after its column, at the row's env steps and time."""

    def __init__(self, run: RunInfo) -> None:
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"), flush_secs=FLUSH_S)

    def log(self, row: Row, step: int) -> None:
        """Queue the row's numbers; they are in the file within some seconds."""
        values = [
            Summary.Value(tag=name, simple_value=value)
            for name, value in row.items()
            if name not in _NOT_PLOTTED and not isinstance(value, str)
        ]
        at = float(row["time"])
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))

    def close(self) -> None:
        """Write what is queued."""
        self._writer.close()
