"""`headrace health`: whether the processes of a run directory live, and whether they make progress.

RUN_DIR/health/ROLE-HOST-PID.json       a `HealthRecord`; the file's time is the last turn of the process's loop
RUN_DIR/health/ROLE-HOST-PID.progress   the file's time is the last progress: a batch, or an answer of envs

Both times are of the machine's monotonic clock; 0: none yet. A process removes its files when it ends. The files of a
killed process are removed when the next process of its role starts on that host.

A probe runs it every few seconds in every container, so it needs the standard library alone: see `asked_plainly`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from headrace.deploy.process.liveness_file import LivenessFile, seconds_silent
from headrace.deploy.process.proc_stat import is_alive, is_stopped, start_ticks
from headrace.schemas.accounts.recorder_file import Pulse, read_pulse, seconds_of_silence

RUN_DIR_VARIABLE = "HEADRACE_FLEET__RUN_DIR"
WITHIN_S = 60.0
"""Seconds without progress after which a process is not ready."""
_LARGEST = 4096

_PROGRESS = {"worker": "has taken no step", "learner": "has had no batch", "env-host": "has answered no step"}
"""Role -> what it lacks without progress. Other roles make progress while their loop turns."""


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
        self.watched = watched
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
            with suppress(OSError):
                self._place.parent.mkdir(parents=True, exist_ok=True)
                for path, record in health_records(self._run_dir, self._record.role):
                    if not record.lives:  # it was killed
                        _remove(path)
                aside = self._place.with_suffix(".new")
                aside.write_text(json.dumps(asdict(self._record)))
                os.utime(aside, ns=(0, 0))
                aside.replace(self._place)
        return self

    def __exit__(self, *_: object) -> None:
        if self._place is not None:
            _remove(self._place)

    def alive(self) -> None:
        """Give a sign of life."""
        self.watched.touch()
        self._own.touch()


def health_records(run_dir: Path, role: str = "") -> Iterator[tuple[Path, HealthRecord]]:
    """Yield the records of processes on this host, or of those of one role, with their files. Skip damaged files.

    Raises `OSError` where the folder cannot be read; a missing one has no records.
    """
    paths: list[Path] = []
    with suppress(FileNotFoundError, NotADirectoryError):
        paths = sorted(_folder(run_dir).iterdir())  # `glob` takes a folder that cannot be read for an empty one
    for path in paths:
        if not path.match(f"{role or '*'}-{os.uname().nodename}-*.json"):
            continue
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
        with suppress(OSError):
            path.unlink()


@dataclass(frozen=True, slots=True)
class Health:
    """The state of one process, or of all that were asked for."""

    lives: bool
    ready: bool
    sentence: str


@dataclass(frozen=True, slots=True)
class Question:
    """The question of a probe: about which role ("": all), in which run directory, and whether it must be ready."""

    role: str
    run_dir: Path
    ready: bool


def asked_plainly(words: Sequence[str]) -> Question | None:
    """Return the question in a command line with only `--role`, `--run-dir` and `--ready`, as probes use it.

    Return None for other options, or if neither the line nor the environment names a run directory. The full command
    line must parse it then.
    """
    given, left = {"--run-dir": os.environ.get(RUN_DIR_VARIABLE, ""), "--role": ""}, list(words)
    ready = "--ready" in left
    if ready:
        left.remove("--ready")
    options, values = left[::2], left[1::2]
    if len(options) != len(values) or not set(options) <= set(given) or any(v.startswith("-") for v in values):
        return None
    given |= dict(zip(options, values, strict=True))
    return Question(given["--role"], Path(given["--run-dir"]), ready) if given["--run-dir"] else None


def answer(question: Question, within_s: float = WITHIN_S) -> tuple[bool, str]:
    """Return whether all processes that are asked for live, or are ready, and a sentence that says why."""
    try:
        records = list(health_records(question.run_dir, question.role))
    except OSError as error:
        return False, f"{question.run_dir} cannot be read: {error.strerror}; repair that, or name another"
    found = [judge(path, record, within_s) for path, record in records]
    if not found:
        return False, f"no {question.role or 'process'} runs in {question.run_dir}: none has started, or it has ended"
    wrong = [health for health in found if not (health.lives and (health.ready or not question.ready))]
    return not wrong, "; ".join(health.sentence for health in wrong or found)


def judge(place: Path, record: HealthRecord, within_s: float) -> Health:
    """Return the health of the process with this record at `place`."""
    who = f"{record.role} (pid {record.pid})"
    if not record.lives:
        return Health(False, False, f"{who} was killed or has crashed")
    if is_stopped(record.pid):
        return Health(False, False, f"{who} is stopped by a signal; continue it: kill -CONT {record.pid}")
    silent_s, progress_s = _of_worker(record) if record.recorders else _of_loop(place, record)
    if silent_s is None:
        age_s = (time.monotonic_ns() - record.began_ns) / 1e9
        lives = age_s <= record.starts_within_s
        return Health(lives, False, f"{who} has been starting for {age_s:.0f} s, of at most {record.starts_within_s:g}")
    if silent_s > record.silent_within_s:
        return Health(False, False, f"{who} has given no sign of life for {silent_s:.0f} s")
    lacks = _PROGRESS.get(record.role, "")
    if progress_s is None:
        return Health(True, False, f"{who} lives, and {lacks} yet")
    if progress_s > within_s:
        return Health(True, False, f"{who} lives, and {lacks} for {progress_s:.0f} s")
    return Health(True, True, f"{who} makes progress")


Signs = tuple[float | None, float | None]
"""Seconds since the last sign of life, and since the last progress; None where there was none."""


def _of_worker(record: HealthRecord) -> Signs:
    """Return the signs in the worker's newest recorder. An announced silence counts as 0 s; so does a call's limit."""
    pulse = max(_own_pulses(record), key=lambda pulse: pulse.updated_ns, default=None)
    if pulse is None:
        return None, None
    now_ns = time.monotonic_ns()
    silent_s, allowed_s = seconds_of_silence(pulse.updated_ns, pulse.silent_until_ns, pulse.watched, now_ns)
    return silent_s - allowed_s, (now_ns - pulse.stepped_ns) / 1e9 if pulse.stepped_ns else None


def _own_pulses(record: HealthRecord) -> Iterator[Pulse]:
    """Yield the pulses of this very process. In a container, its earlier lives may have had the same pid."""
    for path in Path(record.recorders).glob("worker-*.rec"):
        with suppress(OSError):
            pulse = read_pulse(path)
            if pulse is not None and pulse.pid == record.pid and pulse.updated_ns >= record.began_ns:
                yield pulse


def _of_loop(place: Path, record: HealthRecord) -> Signs:
    silent_s = seconds_silent(place)
    if silent_s is None or silent_s > (time.monotonic_ns() - record.began_ns) / 1e9:
        return None, None  # the file's initial time is before the process began
    return silent_s, seconds_silent(progress_path(place)) if record.role in _PROGRESS else silent_s
