"""Errors that end a whole fleet: leaves of the tree in `schemas/errors`.

HeadraceError
├── ProcessFailedError   a process ended with an error that no restart can cure
├── NoRunError           a command needs a run, is given none, and finds none
├── OtherSettingsError   a run directory has a run of other settings
├── StartCheckError      the check before a start has found what would end a process of the fleet
├── OwnRedisError        the server that the fleet starts for itself does not start
├── GoalTimeoutError     the goal was not reached in time
└── DrainCutShortError   a second signal cut the drain short
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from headrace.schemas.errors import ExitCode, HeadraceError


class ProcessFailedError(HeadraceError):
    """Process `name` ended with an error that no restart can cure. `exit_code` is the process's own."""

    def __init__(self, name: str, exit_code: ExitCode, sentence: str) -> None:
        self.name = name
        self.exit_code = exit_code
        super().__init__(f"{name}: {sentence}")


class NoRunError(HeadraceError):
    """A command needs a run, is given none, and finds none in the folder `runs`."""

    exit_code = ExitCode.RUN_DIR

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        super().__init__(f"there is no run in {runs.absolute()}; name one with --run-dir, or start one: headrace up")


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
            "move it away to start with new books"
        )


class GoalTimeoutError(HeadraceError):
    """The goal was not reached within `timeout_s` seconds."""

    exit_code = ExitCode.TIMEOUT

    def __init__(self, timeout_s: float, reached: str) -> None:
        self.timeout_s = timeout_s
        super().__init__(
            f"the goal was not reached within {timeout_s:g} s ({reached}); raise --timeout-s or lower the goal"
        )


class DrainCutShortError(HeadraceError):
    """A second signal cut the drain short. Recorders of killed workers stay in the run directory."""

    def __init__(self) -> None:
        super().__init__(
            "stopped at the second signal; what was still queued is lost, and the next `headrace up` in this run "
            "directory counts it"
        )
