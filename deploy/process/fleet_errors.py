"""Errors that end a whole fleet: leaves of the tree in `schemas/errors`.

HeadraceError
├── ProcessFailedError   a process ended with an error that no restart can cure
├── NoRunError           a command needs a run, is given none, and finds none
├── ForeignCodeError     a settings file beside a checkpoint names code that it may not name
├── OtherSettingsError   a run directory has a run of other settings
├── StartCheckError      the check before a start has found what would end a process of the fleet
├── OwnRedisError        the server that the fleet starts for itself does not start
├── GoalTimeoutError     the goal was not reached in time
├── DrainCutShortError   a second signal cut the drain short
├── RayClusterError      no Ray cluster can be joined
├── SlurmError           Slurm refused, or did not answer
└── BrokenPromiseError   `headrace chaos` has found what must not happen
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError

_SHOWN = 5
_FLAGS, _LONGEST = 20, 200
"""Most `--allow` options that an error proposes, and their longest name."""


class ProcessFailedError(HeadraceError):
    """Process `name` ended with an error that no restart can cure. `exit_code` is the process's own."""

    def __init__(self, name: str, exit_code: ExitCode, sentence: str) -> None:
        self.name = name
        self.exit_code = exit_code
        super().__init__(f"{name}: {sentence}")


class ScaleError(HeadraceError):
    """A run cannot have the number of workers that was asked for. `advice` says what to do."""

    def __init__(self, problem: str, advice: str) -> None:
        super().__init__(f"the number of workers is not changed: {problem}; {advice}")


class NoRunError(HeadraceError):
    """A command needs a run, is given none, and finds none in the folder `runs`."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        super().__init__(f"there is no run in {runs.absolute()}; name one with --run-dir, or start one: headrace up")


class ForeignCodeError(ConfigError):
    """The settings file at `file`, which a command found by itself, names code that nobody has allowed.

    `named` has (key, name) of each; `allowable` the names that `--allow` can take.
    """

    def __init__(self, file: str, named: Sequence[tuple[str, str]], allowable: Sequence[str]) -> None:
        self.file = file
        self.named = list(named)
        self.allowable = list(dict.fromkeys(allowable))
        shown = ", ".join(f"{key} = {name!a:.100}" for key, name in self.named[:_SHOWN])
        more = len(self.named) - _SHOWN
        shown += f" and {more} more" if more > 0 else ""
        short = [name for name in self.allowable if len(name) <= _LONGEST][:_FLAGS]
        others = f" and {rest} more" if (rest := len(self.allowable) - len(short)) else ""
        flags = " ".join(f"--allow {name}" for name in short) + others
        in_program = ", ".join(f'"{name}"' for name in short) + others
        advice = f"add {flags} (in a program allow=[{in_program}]), or give" if self.allowable else "give"
        super().__init__(
            f"{file} names code that is not Headrace's own: {shown}; "
            f"this user's `headrace up` did not write that file. If you trust the code, {advice} your own settings "
            "with --config"
        )


class OtherSettingsError(HeadraceError):
    """The run in `run_dir` has other settings; `differences` says each as "key: was -> is"."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, run_dir: str, differences: Sequence[str], advice: str) -> None:
        self.run_dir = run_dir
        self.differences = differences
        super().__init__(f"{run_dir} has a run with other settings ({'; '.join(differences)}); {advice}")


class StartCheckError(HeadraceError):
    """The check before a start has failed. `exit_code` is that of the process that would have ended."""

    def __init__(self, exit_code: ExitCode, sentence: str) -> None:
        self.exit_code = exit_code
        super().__init__(sentence)


class OwnRedisError(HeadraceError):
    """The fleet's own Redis server ended again and again without an answer. `directory` has its data."""

    exit_code = ExitCode.REDIS_UNAVAILABLE

    def __init__(self, directory: Path, last_words: str, log: Path) -> None:
        self.directory = directory
        super().__init__(
            f"the fleet's own Redis server does not start ({last_words}); its log is {log}; repair {directory}, or "
            f"move it away, to {directory}.damaged for example: the next `headrace up` in this run directory then "
            "takes the books from books.json, recorders and checkpoint, and `headrace audit` names what they lack"
        )


class GoalTimeoutError(HeadraceError):
    """The goal was not reached within `timeout_s` seconds. `awaited`: what a run that stood still waited for."""

    exit_code = ExitCode.TIMEOUT

    def __init__(self, timeout_s: float, reached: str, awaited: str = "") -> None:
        self.timeout_s = timeout_s
        self.awaited = awaited
        advice = "raise --timeout-s or lower the goal"
        if awaited:
            advice = f"it stood still, waiting for {awaited}; if that only takes long, raise --timeout-s"
        super().__init__(f"the goal was not reached within {timeout_s:g} s ({reached}); {advice}")


class DrainCutShortError(HeadraceError):
    """A second signal cut the drain short. Recorders of killed workers stay in the run directory."""

    def __init__(self) -> None:
        super().__init__(
            "stopped at the second signal; what was still queued is lost, and the next `headrace up` in this run "
            "directory counts it"
        )


class BrokenPromiseError(HeadraceError):
    """`headrace chaos` has found what must not happen; `problems` has a sentence for each."""

    exit_code = ExitCode.CHAOS

    def __init__(self, problems: Sequence[str], report: str, replay: str) -> None:
        self.problems = list(problems)
        more = f"; and {len(self.problems) - _SHOWN} more" if len(self.problems) > _SHOWN else ""
        super().__init__(
            f"{len(self.problems)} broken promises: {'; '.join(self.problems[:_SHOWN])}{more}; all are in {report}; "
            f"the same schedule again: {replay}"
        )


class RayClusterError(HeadraceError):
    """The Ray cluster at `address` cannot be joined. `advice` says what to do."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, address: str, reason: str, advice: str) -> None:
        self.address = address
        super().__init__(f"no Ray cluster can be joined at {address!r}: {reason}; {advice}")


class SlurmError(HeadraceError):
    """Slurm refused `what`, or did not answer; `reason` has all that it said."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, what: str, reason: str, advice: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what}: {reason}; {advice}")
