"""The health file of a process, for `headrace health`: who it is, how long it may be silent, and its last signs.

RUN_DIR/health/ROLE-HOST-PID.json       a `HealthRecord`; the file's time is the last turn of the process's loop
RUN_DIR/health/ROLE-HOST-PID.progress   the file's time is the last progress: a batch, or an answer of envs

Both times are of the machine's monotonic clock; 0: none yet. A process removes its files when it ends. The files of a
killed process are removed when the next process of its role starts on that host.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from headrace.deploy.process.liveness_file import LivenessFile
from headrace.deploy.process.proc_stat import is_alive, start_ticks

_LARGEST = 4096


@dataclass(frozen=True, slots=True)
class HealthRecord:
    """Facts that a process writes when it starts. `began_ns` is on the machine's monotonic clock.

    `starts_within_s` is the longest time until its first sign of life, `silent_within_s` the longest time between two.
    `recorders` is the folder of a worker's recorder, which has its signs; "" for other roles.
    """

    role: str
    pid: int
    start_ticks: int
    began_ns: int
    starts_within_s: float
    silent_within_s: float
    recorders: str = ""

    @property
    def lives(self) -> bool:
        """Return whether this very process still runs. It may be stopped."""
        return is_alive(self.pid) and start_ticks(self.pid) == self.start_ticks


class HealthFile:
    """This process's health file within `with`, beside the liveness file that its supervisor watches.

    `alive` and `progressed` are cheap enough for each turn of a loop. Without a run directory, or with one that cannot
    be written, there is no health file.
    """

    def __init__(
        self,
        run_dir: Path | None,
        role: str,
        watched: LivenessFile,
        *,
        starts_within_s: float,
        silent_within_s: float,
        recorders: Path | None = None,
    ) -> None:
        pid = os.getpid()
        self._watched = watched
        self._run_dir = run_dir
        self._place = _folder(run_dir) / f"{role}-{os.uname().nodename}-{pid}.json" if run_dir is not None else None
        self._record = HealthRecord(
            role,
            pid,
            start_ticks(pid),
            time.monotonic_ns(),
            starts_within_s,
            silent_within_s,
            str(recorders.absolute()) if recorders is not None else "",
        )
        self._own = LivenessFile(self._place)
        self.progressed = LivenessFile(progress_path(self._place) if self._place is not None else None).touch

    def __enter__(self) -> Self:
        if self._run_dir is not None and self._place is not None:
            with contextlib.suppress(OSError):
                self._place.parent.mkdir(parents=True, exist_ok=True)
                self._sweep(self._run_dir)
                self._write(self._place)
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            _remove(self._place)

    @property
    def is_watched(self) -> bool:
        """Return whether a supervisor started this process and watches it."""
        return self._watched.is_watched

    def alive(self) -> None:
        """Give a sign of life."""
        self._watched.touch()
        self._own.touch()

    def _sweep(self, run_dir: Path) -> None:
        """Remove the files of killed processes of this role on this host."""
        for path, record in health_records(run_dir, self._record.role):
            if not record.lives:
                _remove(path)

    def _write(self, place: Path) -> None:
        aside = place.with_suffix(".new")
        aside.write_text(json.dumps(asdict(self._record)))
        os.utime(aside, ns=(0, 0))
        aside.replace(place)


def health_records(run_dir: Path, role: str = "") -> Iterator[tuple[Path, HealthRecord]]:
    """Yield the records of processes on this host, or of those of one role, with their files. Skip damaged files."""
    for path in sorted(_folder(run_dir).glob(f"{role or '*'}-{os.uname().nodename}-*.json")):
        try:
            with path.open() as file:
                record = HealthRecord(**json.loads(file.read(_LARGEST)))
        except (OSError, ValueError, TypeError):
            continue
        if not role or record.role == role:
            yield path, record


def progress_path(record: Path) -> Path:
    """Return the path of the file that shows the progress of the process with this record."""
    return record.with_suffix(".progress")


def _folder(run_dir: Path) -> Path:
    return run_dir / "health"


def _remove(record: Path) -> None:
    for path in (record, progress_path(record)):
        with contextlib.suppress(OSError):
            path.unlink()
