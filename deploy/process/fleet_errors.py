"""Errors that end a whole fleet: leaves of the tree in `schemas/errors`.

HeadraceError
├── FleetError           a fleet, or a command about one, cannot go on; `exit_code` says for what reason
├── ForeignCodeError     a settings file beside a checkpoint names code that it may not name
├── OtherSettingsError   a run directory has a run of other settings
├── DrainCutShortError   a second signal cut the drain short
└── SlurmError           Slurm refused, or did not answer
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.schemas.errors import ConfigError, ExitCode, HeadraceError

_SHOWN = 5
_FLAGS, _LONGEST = 20, 200
"""Most `--allow` options that an error proposes, and their longest name."""


class FleetError(HeadraceError):
    """A fleet, or a command about one, cannot go on. `exit_code` is that of the process that ends with the error."""

    def __init__(self, message: str, exit_code: ExitCode = ExitCode.FAILURE) -> None:
        self.exit_code = exit_code
        super().__init__(message)


def scale_error(problem: str, advice: str) -> FleetError:
    """Return the error for a run that cannot have the number of workers that was asked for."""
    return FleetError(f"the number of workers is not changed: {problem}; {advice}")


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


class DrainCutShortError(HeadraceError):
    """A second signal cut the drain short. Recorders of killed workers stay in the run directory."""

    def __init__(self) -> None:
        super().__init__(
            "stopped at the second signal; what was still queued is lost, and the next `headrace up` in this run "
            "directory counts it"
        )


class SlurmError(HeadraceError):
    """Slurm refused `what`, or did not answer; `reason` has all that it said."""

    exit_code = ExitCode.UNREACHABLE

    def __init__(self, what: str, reason: str, advice: str) -> None:
        self.what = what
        self.reason = reason
        super().__init__(f"{what}: {reason}; {advice}")
