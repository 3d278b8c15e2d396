"""Errors that end a whole fleet: leaves of the tree in `schemas/errors`.

HeadraceError
├── ProcessFailedError   a process ended with an error that no restart can cure
├── OwnRedisError        the server that the fleet starts for itself does not start
├── GoalTimeoutError     the goal was not reached in time
└── DrainCutShortError   a second signal cut the drain short
"""

from __future__ import annotations

from pathlib import Path

from headrace.schemas.errors import ExitCode, HeadraceError


class ProcessFailedError(HeadraceError):
    """Process `name` ended with an error that no restart can cure. `exit_code` is the process's own."""

    def __init__(self, name: str, exit_code: ExitCode, sentence: str) -> None:
        self.name = name
        self.exit_code = exit_code
        super().__init__(f"{name}: {sentence}")


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
