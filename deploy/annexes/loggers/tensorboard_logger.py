"""Rows as TensorBoard's scalars, in `tensorboard/` of the run directory. Needs the extra `tensorboard`, not torch."""

from __future__ import annotations

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from headrace.deploy.loggers import Row, RunInfo

_NOT_PLOTTED = ("time", "elapsed_s", "env_steps")
"""Columns that are TensorBoard's own axes."""
_GROUPS = (
    ("", ("learner/", "learner_time/", "evaluation/", "policies/", "callbacks/")),
    ("sampling/", ("env", "agent", "episode", "aborted", "worker", "client", "sampled")),
    ("processes/", ("process", "restarts", "fenced")),
    ("broker/", ("",)),
)
"""(Prefix of a tag, beginnings of the columns that get the prefix). TensorBoard groups tags by their first part."""


class TensorBoardLogger:
    """Writes each number of a row as a scalar named after its group and column, at the row's env steps and time."""

    def __init__(self, run: RunInfo) -> None:
        self._writer = EventFileWriter(str(run.run_dir / "tensorboard"))

    def log(self, row: Row, step: int) -> None:
        """Write the row's numbers; they are in the file when this returns."""
        values = [
            Summary.Value(tag=tag_of(name), simple_value=value)
            for name, value in row.items()
            if name not in _NOT_PLOTTED and not isinstance(value, str)
        ]
        at = float(row["time"])
        self._writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        self._writer.flush()

    def close(self) -> None:
        """Write what is queued."""
        self._writer.close()


def tag_of(column: str) -> str:
    """Return the tag of a column: `sampling/episodes`, `broker/held_batches`, `learner/loss`."""
    return next(group for group, starts in _GROUPS if column.startswith(starts)) + column
