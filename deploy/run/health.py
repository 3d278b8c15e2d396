"""`headrace health`: whether the processes of a run directory live, and whether they make progress.

A probe runs it every few seconds in every container, so it needs the standard library alone: see `asked_plainly`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.deploy.process.liveness_file import seconds_silent
from headrace.deploy.process.proc_stat import is_stopped
from headrace.deploy.run.health_file import HealthRecord, health_records, progress_path
from headrace.schemas.accounts.recorder_file import Pulse, read_pulse, seconds_of_silence

RUN_DIR_VARIABLE = "HEADRACE_FLEET__RUN_DIR"
WITHIN_S = 60.0
"""Seconds without progress after which a process is not ready."""

_PROGRESS = {
    "worker": "has taken no step",
    "learner": "has had no batch",
    "env-host": "has answered no step",
}
"""Role -> what it lacks without progress. Other roles make progress while their loop turns."""


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
    found = [judge(path, record, within_s) for path, record in health_records(question.run_dir, question.role)]
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
    silent_s, allowed_s = seconds_of_silence(pulse, now_ns)
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
